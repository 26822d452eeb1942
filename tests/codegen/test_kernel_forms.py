"""Every member's plain torch form against independent mathematics: fast, so the breadth is here."""

from __future__ import annotations

import pytest
import torch

from codegen.members import load_specs
from codegen.verify.judge import errors
from tests.codegen.kernel_samples import Form, arguments, form_of, outputs_and_gradients


@pytest.fixture(scope="module", params=load_specs())
def member(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def form(member, tmp_path_factory) -> Form:
    return form_of(tmp_path_factory.mktemp(member), member)


def double(given: dict) -> dict:
    return {n: x.double() if x.is_floating_point() else x for n, x in given.items()}


def assert_as_exact_as_torch(form, given, **options):
    """Outputs and gradients err at most twice (in the worst row four times) what the reference in
    the same dtype errs, from the reference in float64."""
    got = outputs_and_gradients(form.kernel, given, output_final_state=True, **options)
    want = outputs_and_gradients(form.reference, double(given), **options)
    same = outputs_and_gradients(form.reference, given, **options)
    floor = 1e-6 if given["q"].dtype == torch.float32 else 2.0**-8
    for name, value in want.items():
        tokenwise = "state" not in name
        whole, worst = errors(got[name], value, tokenwise)
        torch_whole, torch_worst = errors(same[name], value, tokenwise)
        assert whole <= max(2 * torch_whole, floor), name
        assert worst <= max(4 * torch_worst, 4 * floor), name


# --- The reference ----------------------------------------------------------------------------


def recurrence(spec, x, head: int, key_head: int, scale: float):
    """One head with an explicit transition: S <- (I - w k^T) D S + w v^T, w the written key."""
    q, k, v = (x[n][0, :, j] for n, j in (("q", key_head), ("k", key_head), ("v", head)))
    state, eye = x["initial_state"][0, head], torch.eye(q.shape[-1], dtype=q.dtype)
    outputs = []
    for t in range(q.shape[0]):
        write = k[t] * x["beta"][0, t, head] if spec.delta else k[t]
        erase = torch.outer(write, k[t]) if spec.delta else torch.zeros_like(eye)
        log_decay = x["g"][0, t, head] if "g" in x else x.get("g_gamma", torch.zeros(4))[head]
        decay = eye * log_decay.exp()
        state = (eye - erase) @ decay @ state + torch.outer(write, v[t])
        outputs.append(scale * q[t] @ state)
    return torch.stack(outputs), state


def test_the_reference_is_the_papers_recurrence(form):
    x = double(arguments(form.spec, form.widths, (9,), heads=2, value_heads=4))
    o, state = form.reference(**x, scale=0.3)
    for head in range(4):
        want, last = recurrence(form.spec, x, head, head // 2, 0.3)
        torch.testing.assert_close(o[0, :, head], want)
        torch.testing.assert_close(state[0, head], last)


# --- The plain torch form against the reference -----------------------------------------------

CASES = {
    "one token": {"lengths": (1,)},
    "chunk less one": {"lengths": (15,)},
    "one chunk": {"lengths": (32,)},
    "many chunks": {"lengths": (77,), "batch": 2},
    "grouped value heads": {"lengths": (34,), "heads": 2, "value_heads": 4},
    # fla#103: repeated cu_seqlens; chunks must be counted by sequence, not from the total.
    "empty and one-token sequences": {"lengths": (0, 5, 0, 1, 33, 0)},
    # fla#20, FlashKDA#1
    "hard reset": {"lengths": (40,), "decay": "reset"},
    "strong decay": {"lengths": (40,), "decay": "strong"},
    "repeated keys without decay": {"lengths": (64,), "decay": "none", "repeated_keys": True},
}


@pytest.mark.parametrize("case", CASES)
def test_plain_torch_form_matches_the_recurrence(form, case):
    assert_as_exact_as_torch(form, arguments(form.spec, form.widths, **CASES[case]))


@pytest.mark.parametrize("widths", [(32, 96), (100, 60), (256, 40), (64, 256)], ids=str)
def test_any_width_of_keys_and_of_values(member, widths, tmp_path):
    wide = form_of(tmp_path, member, widths)
    assert_as_exact_as_torch(wide, arguments(wide.spec, widths, (19,)))


def test_keys_normalised_inside(form):
    x = arguments(form.spec, form.widths, (37,))
    x |= {"q": 3 * x["q"], "k": 0.2 * x["k"]}
    assert_as_exact_as_torch(form, x, use_qk_l2norm_in_kernel=True)


def test_bfloat16_computes_in_float32(form):
    x = arguments(form.spec, form.widths, (37,))
    x |= {n: x[n].bfloat16() for n in ("q", "k", "v", "beta") if n in x}
    o, state = form.kernel(**x, output_final_state=True)
    assert (o.dtype, state.dtype) == (torch.bfloat16, torch.float32)
    assert_as_exact_as_torch(form, x)


def test_empty_sequences_hand_their_state_on(form):
    x = arguments(form.spec, form.widths, (0, 0))
    x["initial_state"].requires_grad_()
    o, state = form.kernel(**x, output_final_state=True)
    assert o.shape == (1, 0, 1, 24)
    assert torch.equal(state, x["initial_state"])
    (grad,) = torch.autograd.grad(state.sum(), x["initial_state"])
    assert torch.equal(grad, torch.ones_like(grad))


def test_decay_to_minus_infinity_forgets_the_past_exactly(form):
    # fla#20: a hard reset worked in the recurrent form and not in the chunked one.
    if "g" not in form.spec.inputs:
        pytest.skip("its decay is not a token's")
    x = arguments(form.spec, form.widths, (24,), state=False)
    x["g"][:, 11] = -float("inf")
    o, state = form.kernel(**x, output_final_state=True)
    tail = {n: t[:, 11:] for n, t in x.items()}
    o_tail, state_tail = form.kernel(**tail, output_final_state=True)
    torch.testing.assert_close(o[:, 11:], o_tail)
    torch.testing.assert_close(state, state_tail)
    grads = outputs_and_gradients(form.kernel, x, output_final_state=True)
    assert all(g.isfinite().all() for g in grads.values())


def test_sequences_packed_in_another_order_give_the_same_outputs(form):
    x = arguments(form.spec, form.widths, (7, 20, 1))
    order = [2, 0, 1]

    def moved(name, t):
        if name == "initial_state":
            return t[order]
        if name == "cu_seqlens":
            return torch.tensor([0, 1, 8, 28], dtype=torch.int32)
        if name == "g_gamma":
            return t
        parts = t.split([7, 20, 1], 1)
        return torch.cat([parts[i] for i in order], 1)

    o, state = form.kernel(**x, output_final_state=True)
    other, other_state = form.kernel(
        **{n: moved(n, t) for n, t in x.items()}, output_final_state=True
    )
    back = other.split([1, 7, 20], 1)
    torch.testing.assert_close(torch.cat([back[1], back[2], back[0]], 1), o)
    torch.testing.assert_close(other_state, state[order])


def test_a_very_long_sequence_keeps_its_tail(form):
    # fla#906: the tail was skipped beyond 65,536 tokens.
    T = 65537
    x = arguments(form.spec, form.widths, (T,), state=False)

    def part(begin, end):
        return {n: t if n == "g_gamma" else t[:, begin:end] for n, t in x.items()}

    with torch.no_grad():
        o, _ = form.kernel(**x)
        _, state = form.kernel(**part(0, T - 5), output_final_state=True)
        tail, _ = form.kernel(**part(T - 5, T), initial_state=state)
    # Without decay the state keeps growing, and its rounding with it.
    torch.testing.assert_close(o[:, T - 5 :], tail, atol=2e-4, rtol=1e-5)


def test_value_and_state_scale_the_output(form):
    x = arguments(form.spec, form.widths, (20,))
    scaled = x | {n: 4 * x[n] for n in ("v", "initial_state")}
    torch.testing.assert_close(form.kernel(**scaled)[0], 4 * form.kernel(**x)[0])


def test_gradients_without_a_gradient_for_the_output(form):
    # fla#245-like: a backward that returns the wrong tuple when a part is unused.
    x = arguments(form.spec, form.widths, (19,), state=False)

    def grads(function, **options):
        leaves = {n: t.detach().requires_grad_() for n, t in x.items() if n != "g_gamma"}
        _, state = function(**(x | leaves), **options)
        return torch.autograd.grad(state.square().sum(), leaves.values(), allow_unused=True)

    ours, theirs = grads(form.kernel, output_final_state=True), grads(form.reference)
    for got, want in zip(ours, theirs, strict=True):
        want = torch.zeros_like(got) if want is None else want
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)


# --- The operator -----------------------------------------------------------------------------


def test_other_implementations_arguments_are_accepted(form):
    x = arguments(form.spec, form.widths, (5, 6), state=False)
    packed, _ = form.kernel(**x)
    # transformers passes the limits of packed sequences to KDA under this name
    x["cu_seq_lens_q"] = x.pop("cu_seqlens")
    same, _ = form.kernel(**x, chunk_size=64, max_length_q=6)
    torch.testing.assert_close(packed, same, atol=0, rtol=0)


BAD = [
    # fla#837: a batch together with cu_seqlens gave huge gradients without a word.
    ("cu_seqlens", lambda _: torch.tensor([0, 4]), "B = 1"),
    ("q", lambda q: q[..., :-1], "q must be"),
    ("q", lambda q: q[0], "q and v must be"),
    ("q", lambda q: q.repeat(1, 1, 2, 1), "multiple of the 2 key heads"),
    ("q", lambda q: q.half(), "q must be .*float32.*bfloat16.*got .*float16"),
    ("k", lambda k: k.bfloat16(), "k must be .*float32.*got .*bfloat16"),
    ("k", lambda k: k[:, :-1], "k must be .2, 4, 1, 20. .*got .2, 3, 1, 20."),
    ("v", lambda v: v[..., :-1], "v must be"),
    ("g", lambda g: g[:, :-1], "g must be"),
    ("g", lambda g: g.double(), "g must be .*float32.*got .*float64"),
    ("g_gamma", lambda g: g[None], "g_gamma must be"),
    ("g_gamma", lambda g: g.clone().requires_grad_(), "gets no gradient"),
    ("beta", lambda _: None, "beta must be .*got None"),
    ("initial_state", lambda h: h[:1], "initial_state must be"),
    ("v", lambda v: v.to("meta"), "v must be .* on cpu, got .* on meta"),
    ("initial_state", lambda h: h.to("meta"), "initial_state must be .* on cpu, got .* on meta"),
]


@pytest.mark.parametrize(("name", "change", "message"), BAD, ids=[f"{b[0]}: {b[2]}" for b in BAD])
def test_bad_arguments_are_refused(form, name, change, message):
    x = arguments(form.spec, form.widths, (4,), batch=2) | {"cu_seqlens": None}
    if name not in x:
        pytest.skip(f"the member has no {name}")
    x[name] = change(x[name])
    with pytest.raises(ValueError, match=message):
        form.kernel(**x)


@pytest.mark.parametrize(("batch", "tokens"), [(0, 4), (2, 0)])
def test_no_sequences_and_no_tokens_are_nothing(form, batch, tokens):
    given = arguments(form.spec, form.widths, (tokens,), batch=batch)
    made = outputs_and_gradients(form.kernel, given, output_final_state=True)
    assert made["o"].shape == given["v"].shape
    assert torch.equal(made["state"], given["initial_state"])
    for name, x in given.items():
        if name != "g_gamma":
            assert made[f"gradient of {name}"].shape == x.shape


@pytest.mark.parametrize("limits", [[0, 3], [1, 4], [0, 3, 2, 4]])
def test_limits_that_do_not_fit_are_refused(form, limits):
    x = arguments(form.spec, form.widths, (4,), state=False)
    with pytest.raises(ValueError, match="rise from 0 to T = 4"):
        form.kernel(**x, cu_seqlens=torch.tensor(limits))


def test_export_sees_one_opaque_operator(form):
    x = arguments(form.spec, form.widths, (20,), state=False)

    class Layer(torch.nn.Module):
        def forward(self, x):
            return form.kernel(**x)[0]

    T = torch.export.Dim("T", min=2, max=4096)
    sizes = {n: None if n == "g_gamma" else {1: T} for n in x}
    graph = torch.export.export(Layer(), (x,), dynamic_shapes=(sizes,)).graph
    named = [n for n in graph.nodes if "codegen_" in str(n.target)]
    assert len(named) == 1


def test_checkpointing_recomputes_to_the_same_gradients(form):
    from torch.utils.checkpoint import checkpoint

    x = arguments(form.spec, form.widths, (20,))

    def again(**given):
        return checkpoint(lambda: form.kernel(**given), use_reentrant=False)

    plain = outputs_and_gradients(form.kernel, x, output_final_state=True)
    for name, value in outputs_and_gradients(again, x, output_final_state=True).items():
        assert torch.equal(value, plain[name]), name


def test_only_the_delta_rule_has_a_writing_strength(member):
    spec = load_specs()[member]
    assert spec.delta == (spec.beta != "none")
    assert ("beta" in spec.inputs) == spec.delta
