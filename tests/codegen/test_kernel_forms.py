"""The plain torch form against independent mathematics: fast, so the breadth is here."""

from __future__ import annotations

import pytest
import torch

from codegen.verify.cases import Case, Shape, make_inputs, run
from codegen.verify.judge import errors


def shape_of(kernel, member) -> Shape:
    return Shape(
        function="chunk_kda" if member == "kda" else "chunk_gated_delta_rule",
        key_dim=kernel.KEY_DIM,
        value_dim=kernel.VALUE_DIM,
        chunk=kernel.CHUNK,
        per_channel=member == "kda",
        grouped=member != "kda",
    )


def recurrence(q, k, v, g, beta, *, scale, state):
    """Sum form with an explicit transition matrix, one head: S <- (I - b k k^T) D S + b k v^T."""
    K = q.shape[-1]
    outputs = []
    for t in range(q.shape[0]):
        decay = torch.diag(g[t].exp().expand(K))
        erase = torch.eye(K, dtype=q.dtype) - beta[t] * torch.outer(k[t], k[t])
        state = erase @ decay @ state + beta[t] * torch.outer(k[t], v[t])
        outputs.append(scale * q[t] @ state)
    return torch.stack(outputs), state


def test_the_reference_is_the_papers_recurrence(modules, member):
    kernel, reference = modules
    shape = shape_of(kernel, member)
    case = Case(
        name="", lengths=(9,), heads=2, value_heads=2 if member == "kda" else 4, normalize=False
    )
    x = {n: t.double() for n, t in make_inputs(case, shape, torch.float32).items() if t is not None}
    o, state = getattr(reference, shape.function)(
        *(x[n] for n in ("q", "k", "v", "g", "beta")), initial_state=x["h0"], scale=0.3
    )
    group = case.value_heads // case.heads
    for head in range(case.value_heads):
        q, k = (x[n][0, :, head // group] for n in ("q", "k"))
        v, g, beta = (x[n][0, :, head] for n in ("v", "g", "beta"))
        want, last = recurrence(q, k, v, g, beta, scale=0.3, state=x["h0"][0, head])
        torch.testing.assert_close(o[0, :, head], want)
        torch.testing.assert_close(state[0, head], last)


CASES = [
    Case(name="one token", lengths=(1,)),
    Case(name="chunk less one", lengths=(15,)),
    Case(name="one chunk", lengths=(16,)),
    Case(name="many chunks", lengths=(77,), batch=2),
    # fla#103: repeated cu_seqlens; chunks must be counted by sequence, not from the total.
    Case(name="empty and one-token sequences", lengths=(0, 5, 0, 1, 33, 0)),
    # fla#20, FlashKDA#1
    Case(name="hard reset", lengths=(40,), gate="reset"),
    Case(name="strong decay", lengths=(40,), gate="strong"),
    Case(name="repeated keys without decay", lengths=(64,), gate="none", repeated_keys=True),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_plain_torch_form_matches_the_recurrence(modules, member, case):
    kernel, reference = modules
    shape = shape_of(kernel, member)
    inputs = make_inputs(case, shape, torch.float32)
    exact = {
        n: x.double() if x is not None and x.is_floating_point() else x for n, x in inputs.items()
    }
    got = run(getattr(kernel, shape.function), case, inputs, output_final_state=True)
    want = run(getattr(reference, shape.function), case, exact)
    same = run(getattr(reference, shape.function), case, inputs)
    for name, value in want.items():
        tokenwise = name not in ("state", "dstate")
        whole, worst = errors(got[name], value, tokenwise)
        torch_whole, torch_worst = errors(same[name], value, tokenwise)
        assert whole <= max(2 * torch_whole, 1e-6), name
        assert worst <= max(4 * torch_worst, 4e-6), name


def test_empty_sequences_hand_their_state_on(modules, member):
    kernel, _ = modules
    shape = shape_of(kernel, member)
    x = make_inputs(Case(name="", lengths=(0, 0)), shape, torch.float32)
    got = run(
        getattr(kernel, shape.function), Case(name="", lengths=(0, 0)), x, output_final_state=True
    )
    assert got["o"].shape == (1, 0, 1, shape.value_dim)
    assert torch.equal(got["state"], x["h0"])
    assert torch.equal(got["dstate"], x["dht"])


def test_decay_to_minus_infinity_forgets_the_past_exactly(modules, member):
    # fla#20: a hard reset worked in the recurrent form and not in the chunked one.
    kernel, _ = modules
    shape = shape_of(kernel, member)
    x = make_inputs(Case(name="", lengths=(24,), state=False), shape, torch.float32)
    x["g"][:, 11] = -float("inf")
    tail = {n: t[:, 11:] if t is not None and n != "cu_seqlens" else t for n, t in x.items()}
    call = getattr(kernel, shape.function)
    names = ("q", "k", "v", "g", "beta")
    o, state = call(*(x[n] for n in names), output_final_state=True)
    o_tail, state_tail = call(*(tail[n] for n in names), output_final_state=True)
    torch.testing.assert_close(o[:, 11:], o_tail)
    torch.testing.assert_close(state, state_tail)


def test_sequences_packed_in_another_order_give_the_same_outputs(modules, member):
    kernel, _ = modules
    shape = shape_of(kernel, member)
    call = getattr(kernel, shape.function)
    x = make_inputs(Case(name="", lengths=(7, 20, 1)), shape, torch.float32)
    names = ("q", "k", "v", "g", "beta")
    parts = {n: x[n].split([7, 20, 1], 1) for n in names}
    order = [2, 0, 1]
    o, state = call(
        *(x[n] for n in names),
        initial_state=x["h0"],
        cu_seqlens=x["cu_seqlens"],
        output_final_state=True,
    )
    other, other_state = call(
        *(torch.cat([parts[n][i] for i in order], 1) for n in names),
        initial_state=x["h0"][order],
        cu_seqlens=torch.tensor([0, 1, 8, 28], dtype=torch.int32),
        output_final_state=True,
    )
    back = other.split([1, 7, 20], 1)
    torch.testing.assert_close(torch.cat([back[1], back[2], back[0]], 1), o)
    torch.testing.assert_close(other_state, state[order])


def test_a_very_long_sequence_keeps_its_tail(modules, member):
    # fla#906: the tail was skipped beyond 65,536 tokens.
    kernel, _ = modules
    T = 65537
    shape = shape_of(kernel, member)
    x = make_inputs(Case(name="", lengths=(T,), state=False), shape, torch.float32)
    call = getattr(kernel, shape.function)
    names = ("q", "k", "v", "g", "beta")
    with torch.no_grad():
        o, _ = call(*(x[n] for n in names), use_qk_l2norm_in_kernel=True)
        _, state = call(
            *(x[n][:, : T - 5] for n in names),
            use_qk_l2norm_in_kernel=True,
            output_final_state=True,
        )
        tail, _ = call(
            *(x[n][:, T - 5 :] for n in names), use_qk_l2norm_in_kernel=True, initial_state=state
        )
    torch.testing.assert_close(o[:, T - 5 :], tail, atol=1e-5, rtol=1e-5)


def test_value_scales_the_output(modules, member):
    kernel, _ = modules
    shape = shape_of(kernel, member)
    x = make_inputs(Case(name="", lengths=(20,), state=False), shape, torch.float32)
    call = getattr(kernel, shape.function)
    q, k, v, g, beta = (x[n] for n in ("q", "k", "v", "g", "beta"))
    options = {"use_qk_l2norm_in_kernel": True}
    torch.testing.assert_close(
        call(q, k, 4 * v, g, beta, **options)[0], 4 * call(q, k, v, g, beta, **options)[0]
    )


def test_gradients_without_a_gradient_for_the_output(modules, member):
    # fla#245-like: a backward that returns the wrong tuple when a part is unused.
    kernel, reference = modules
    shape = shape_of(kernel, member)
    x = make_inputs(Case(name="", lengths=(19,)), shape, torch.float32)
    names = ("q", "k", "v", "g", "beta")

    def grads(module, **options):
        leaves = [x[n].detach().requires_grad_() for n in names]
        _, state = getattr(module, shape.function)(*leaves, use_qk_l2norm_in_kernel=True, **options)
        return torch.autograd.grad((state * x["dht"]).sum(), leaves, allow_unused=True)

    for got, want in zip(grads(kernel, output_final_state=True), grads(reference), strict=True):
        want = torch.zeros_like(got) if want is None else want
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)


def test_other_implementations_arguments_are_accepted(modules, member):
    kernel, _ = modules
    shape = shape_of(kernel, member)
    x = make_inputs(Case(name="", lengths=(5, 6), state=False), shape, torch.float32)
    args = [x[n] for n in ("q", "k", "v", "g", "beta")]
    call = getattr(kernel, shape.function)
    packed, _ = call(*args, cu_seqlens=x["cu_seqlens"])
    # transformers passes the limits of packed sequences to KDA under this name
    same, _ = call(*args, cu_seq_lens_q=x["cu_seqlens"], chunk_size=64, max_length_q=6)
    torch.testing.assert_close(packed, same, atol=0, rtol=0)


BAD = {
    # fla#837: a batch together with cu_seqlens gave huge gradients without a word.
    "B = 1": lambda x: x | {"cu_seqlens": torch.tensor([0, 4])},
    "k must be .*float32.*bfloat16": lambda x: x | {"k": x["k"].bfloat16()},
    "k must be .*got .2, 3": lambda x: x | {"k": x["k"][:, :-1]},
    "q must be": lambda x: x | {"q": x["q"][..., :-1]},
    "v must be": lambda x: x | {"v": x["v"][..., :-1]},
    "multiple of": lambda x: x | {"q": x["q"].repeat(1, 1, 2, 1), "k": x["k"].repeat(1, 1, 2, 1)},
    "g must be": lambda x: x | {"g": x["g"][:, :-1]},
    "beta must be": lambda x: x | {"beta": x["beta"][..., None]},
    "initial_state must be": lambda x: x | {"initial_state": torch.zeros(1, 1, 2, 2)},
}


@pytest.mark.parametrize("message", BAD)
def test_bad_arguments_are_refused(modules, member, message):
    kernel, _ = modules
    shape = shape_of(kernel, member)
    x = make_inputs(Case(name="", lengths=(4,), batch=2), shape, torch.float32)
    good = {n: x[n] for n in ("q", "k", "v", "g", "beta")}
    with pytest.raises(ValueError, match=message):
        getattr(kernel, shape.function)(**BAD[message](good))


@pytest.mark.parametrize("limits", [[0, 3], [1, 4], [0, 3, 2, 4]])
def test_limits_that_do_not_fit_are_refused(modules, member, limits):
    kernel, _ = modules
    shape = shape_of(kernel, member)
    x = make_inputs(Case(name="", lengths=(4,)), shape, torch.float32)
    with pytest.raises(ValueError, match="rise from 0 to T = 4"):
        getattr(kernel, shape.function)(
            *(x[n] for n in ("q", "k", "v", "g", "beta")), cu_seqlens=torch.tensor(limits)
        )


def test_matches_transformers_own_function(modules, member):
    kernel, _ = modules
    shape = shape_of(kernel, member)
    case = Case(name="", lengths=(70,), batch=2, heads=2, value_heads=2 if member == "kda" else 4)
    x = make_inputs(case, shape, torch.float32)
    if member == "kda":
        from transformers.models.kimi_linear import modeling_kimi_linear as modeling

        theirs = modeling.chunk_kimi_delta_attention
    else:
        from transformers.models.qwen3_next import modeling_qwen3_next as modeling

        theirs = modeling.torch_chunk_gated_delta_rule
    outputs = {}
    for name, function in (("ours", getattr(kernel, shape.function)), ("theirs", theirs)):
        leaves = [x[n].detach().requires_grad_() for n in ("q", "k", "v", "g", "beta", "h0")]
        q, k, v, g, beta, h0 = leaves
        o, state = function(
            q,
            k,
            v,
            g=g,
            beta=beta,
            initial_state=h0,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        grads = torch.autograd.grad((o, state), leaves, (x["do"], x["dht"]))
        outputs[name] = (o, state, *grads)
    for ours, other in zip(outputs["ours"], outputs["theirs"], strict=True):
        torch.testing.assert_close(ours, other, atol=3e-5, rtol=3e-4)


def test_export_sees_one_opaque_operator(modules, member):
    kernel, _ = modules
    shape = shape_of(kernel, member)
    x = make_inputs(Case(name="", lengths=(20,), state=False), shape, torch.float32)

    class Layer(torch.nn.Module):
        def forward(self, q, k, v, g, beta):
            return getattr(kernel, shape.function)(q, k, v, g, beta)[0]

    args = tuple(x[n] for n in ("q", "k", "v", "g", "beta"))
    T = torch.export.Dim("T", min=2, max=4096)
    graph = torch.export.export(Layer(), args, dynamic_shapes=[{1: T}] * 5).graph
    named = [n for n in graph.nodes if "codegen_" in str(n.target)]
    assert len(named) == 1


def test_checkpointing_recomputes_to_the_same_gradients(modules, member):
    from torch.utils.checkpoint import checkpoint

    kernel, _ = modules
    shape = shape_of(kernel, member)
    x = make_inputs(Case(name="", lengths=(20,), state=False), shape, torch.float32)
    call = getattr(kernel, shape.function)

    def grads(wrap):
        leaves = [x[n].detach().requires_grad_() for n in ("q", "k", "v", "g", "beta")]
        o = wrap(lambda *a: call(*a, use_qk_l2norm_in_kernel=True)[0], *leaves)
        return torch.autograd.grad(o, leaves, x["do"])

    plain = grads(lambda f, *a: f(*a))
    again = grads(lambda f, *a: checkpoint(f, *a, use_reentrant=False))
    for one, two in zip(plain, again, strict=True):
        assert torch.equal(one, two)
