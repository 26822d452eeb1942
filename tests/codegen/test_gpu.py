"""Every gate again on a real device, and the known bugs that only show there.

    pytest -m gpu -n 14 --dist loadgroup tests/codegen/test_gpu.py [-k gates]

Compilation takes most of the time: a test is one member, widths and dtype, so that they compile
side by side; each takes about 1 GiB of device memory. The tests of sizes take up to 100 GiB, one
after the other, and skip where less is free.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from analyzers.backends import load_backend
from codegen.members import load_specs
from codegen.verify.cases import Shape, forward_alone, make_inputs, run
from codegen.verify.families.linear_attention import LinearCase
from codegen.verify.harness import compile_for, run_on
from tests.codegen.proofs import LINEAR, assert_as_exact, failed, function_of, on, subject

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

WIDTHS = {
    "kda": [(32, 32), (64, 64), (100, 60), (128, 256), (256, 128), (256, 256)],
    "gated_delta_rule": [(64, 64), (100, 60), (128, 256), (256, 256)],
    "gla": [(100, 60), (256, 256)],
    "linear_attention": [(100, 60)],
}
EVERY = [(n, (128, 128)) for n in LINEAR] + [(n, w) for n, every in WIDTHS.items() for w in every]
DTYPES = pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
GiB = 2**30


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A member rendered for this device."""
    folder = tmp_path_factory.mktemp("gpu")

    def make(member: str, widths: tuple[int, int]):
        place = folder / f"{member}_{widths[0]}x{widths[1]}"
        return subject(place, member, widths=widths, backend="h200")

    return make


def need_free(size: int) -> None:
    torch.cuda.empty_cache()  # what an earlier test left there is free
    if torch.cuda.mem_get_info()[0] < size:
        pytest.skip(f"needs {size // GiB} GiB of device memory")


def title(x) -> str:
    return f"K{x[0]}-V{x[1]}" if isinstance(x, tuple) else str(x)


@DTYPES
@pytest.mark.parametrize(("member", "widths"), EVERY, ids=title)
def test_all_gates_pass_on_the_device(made, member, widths, dtype):
    gates = run_on(made(member, widths), "device", "cuda", dtypes=[dtype])
    assert len(gates) > 20
    assert not failed(gates), "\n".join(failed(gates))


@pytest.mark.parametrize(
    ("member", "widths"), [("kda", (128, 128)), ("gated_delta_rule", (256, 256))], ids=title
)
def test_every_kernel_keeps_the_limits_of_the_device(made, member, widths):
    (gate,) = compile_for(made(member, widths), load_backend("h200"))
    assert gate.passed, gate.detail


@DTYPES
@pytest.mark.parametrize(
    "lengths", [(1024,), (781, 0, 1267), (64, 1, 1, 257)], ids=lambda x: "+".join(map(str, x))
)
@pytest.mark.parametrize("member", LINEAR)
def test_long_sequences_match_the_recurrence_in_float64(made, member, lengths, dtype):
    # fla#103: chunks of [0, 781, 2048] were counted from the total.
    case = LinearCase(name="", lengths=lengths, heads=2, value_heads=4, gates="slow")
    for each in (case, forward_alone(case)):
        assert_as_exact(made(member, (128, 128)), each, dtype, "cuda")


@DTYPES
@pytest.mark.parametrize("member", ["kda", "gated_delta_rule", "gla"])
def test_gradients_at_a_width_of_one_hundred(made, member, dtype):
    # fla#640: dk, and through it dg, wrong on Hopper with Triton 3.4 to 3.7, forward right.
    case = LinearCase(name="", lengths=(1024,), heads=4, value_heads=4)
    assert_as_exact(made(member, (100, 100)), case, dtype, "cuda")


@DTYPES
@pytest.mark.parametrize("member", ["kda", "gated_delta_rule", "delta_rule"])
def test_one_whole_chunk_has_right_gradients(made, member, dtype):
    # fla#984: dk and dbeta were half of what they should be, at one chunk of 64 tokens and 4 warps.
    case = LinearCase(name="", lengths=(64,), heads=16, value_heads=16)
    assert_as_exact(made(member, (128, 128)), case, dtype, "cuda")


@DTYPES
@pytest.mark.parametrize("member", ["kda", "gated_delta_rule", "lightning"])
def test_many_blocks_give_the_same_bits_every_time(made, member, dtype):
    # fla#945, #1228, triton#10590: with a thousand blocks and more, some runs differed or were NaN.
    one = made(member, (128, 128))
    case = LinearCase(name="", lengths=(2048,), batch=2, heads=32, value_heads=32)
    x = on("cuda", make_inputs(case, Shape(**one.shape), getattr(torch, dtype)))
    function = function_of(one)
    for each in (case, forward_alone(case)):
        first = run(function, each, x)
        assert all(bool(t.isfinite().all()) for t in first.values())
        for _ in range(8):
            again = run(function, each, x)
            assert [n for n in first if not torch.equal(first[n], again[n])] == []


@pytest.mark.parametrize("member", ["kda", "gla"])
def test_compiled_is_what_eager_is(made, member):
    # fla#52: torch.compile gave other values where the keys were wider than a block.
    one = made(member, (256, 64))
    case = LinearCase(name="", lengths=(130,), last="value")
    x = on("cuda", make_inputs(case, Shape(**one.shape), torch.bfloat16))
    compiled = torch.compile(function_of(one), fullgraph=True)
    eager, graph = run(function_of(one), case, x), run(compiled, case, x)
    torch.testing.assert_close(graph, eager, atol=0, rtol=0)


@pytest.mark.parametrize("member", ["kda", "gated_delta_rule", "linear_attention"])
def test_more_sequences_and_heads_than_a_grid_axis_holds(made, member):
    # fla#1077: invalid launch when N * HV exceeds 65,535.
    one = made(member, (16, 16))
    N = 65536 // 2 + 1
    case = LinearCase(
        name="", lengths=(N,), heads=2, value_heads=2, initial=False, last="value", normalize=False
    )
    x = on("cuda", make_inputs(case, Shape(**one.shape), torch.float32))
    x["cu_seqlens"] = torch.arange(N + 1, device="cuda")
    got = run(function_of(one), case, x)
    beta = 1.0 if x["beta"] is None else x["beta"][..., None]
    # Sequences of one token: o = (q . k) beta v / 4.
    q, k, v, do = (x[n] for n in ("q", "k", "v", "do"))
    pairs = (q * k).sum(-1, keepdim=True) / 4
    torch.testing.assert_close(got["o"], pairs * beta * v, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(got["dv"], pairs * beta * do, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("member", ["kda", "gated_delta_rule", "gla", "linear_attention"])
def test_a_very_long_sequence_keeps_its_tail(made, member):
    # fla#906: the tail was skipped beyond 65,536 tokens. T = 65,537, H = 2, D = 8.
    one = made(member, (8, 8))
    T = 65537
    case = LinearCase(name="", lengths=(T,), heads=2, value_heads=2, gates="slow", split_at=T - 5)
    x = on("cuda", make_inputs(case, Shape(**one.shape), torch.float32))
    split = run(function_of(one), case, x)
    whole = run(function_of(one), replace(case, split_at=None), x)
    for name, value in whole.items():
        error = (split[name] - value)[:, -5:] if case.kind(name) == "token" else split[name] - value
        assert error.norm() <= 1e-4 * value.norm(), name


@pytest.mark.xdist_group("memory")
@pytest.mark.parametrize("member", ["kda", "gated_delta_rule", "lightning"])
def test_offsets_beyond_two_to_the_31(made, member):
    # fla#1080, #911, #769: 32-bit offsets gave finite wrong values. At -8 a step nothing is left of
    # what was 20 tokens ago, so that the last tokens alone give what the whole sequence gives.
    one = made(member, (64, 64))
    H, tail = 128, 64
    T = 2**31 // (H * 64) + 3 * tail
    need_free(100 * GiB)
    new = {"device": "cuda", "dtype": torch.bfloat16}
    torch.manual_seed(0)
    spec = load_specs()[member]
    x: dict = dict.fromkeys(("g", "beta", "g_gamma", "h0", "cu_seqlens"))
    x |= {n: torch.randn(1, T, H, 64, **new) for n in ("q", "k", "v")}
    if spec.decay == "constant":
        x["g_gamma"] = torch.full((H,), -8.0, device="cuda")
    else:
        x["g"] = torch.full((1, T, H, *([64] if spec.decay == "per_channel" else [])), -8.0, **new)
    if spec.beta != "none":
        x["beta"] = torch.rand(1, T, H, **new)
    case = LinearCase(name="", lengths=(T,), last="none", initial=False)
    part = {
        n: t[:, -tail:].clone() if t is not None and case.INPUTS.get(n) == "token" else t
        for n, t in x.items()
    }
    above = torch.zeros_like(x["v"])
    above[:, -tail // 2 :] = torch.randn(1, tail // 2, H, 64, **new)
    function = function_of(one)
    last = run(function, case, part | {"do": above[:, -tail:].clone()})
    whole = run(function, case, x | {"do": above})
    alone = run(function, forward_alone(case), x)["o"]
    got, want = (t[:, -tail // 2 :].float() for t in (alone, last["o"]))
    assert (got - want).norm() <= 1e-2 * want.norm()
    for name, value in last.items():
        got, want = whole[name][:, -tail // 2 :].float(), value[:, -tail // 2 :].float()
        assert (got - want).norm() <= 1e-2 * want.norm(), name
        assert bool(whole[name].isfinite().all()), name


@pytest.mark.xdist_group("memory")
def test_a_million_tokens_are_their_pieces(made):
    # fla#410, #728: overflow in long sequences. Eight heads; 16 pieces with the state carried on.
    need_free(100 * GiB)
    one = made("kda", (128, 128))
    T, pieces = 2**20, 16
    new = {"device": "cuda", "dtype": torch.bfloat16}
    torch.manual_seed(0)
    q, k, v, do = (torch.randn(1, T, 8, 128, **new) for _ in range(4))
    g = -torch.nn.functional.softplus(torch.randn(1, T, 8, 128, **new)) * 0.02
    beta = torch.rand(1, T, 8, **new)
    leaves = [t.requires_grad_() for t in (q, k, v, g, beta)]
    function = function_of(one)
    o, state = function(*leaves, use_qk_l2norm_in_kernel=True, output_final_state=True)
    grads = torch.autograd.grad(o, leaves, do)
    # What is not differentiated runs by other kernels, as right, that round elsewhere.
    for limit, gradients in ((1e-3, True), (1e-2, False)):
        carried, size = None, T // pieces
        for n in range(pieces):
            part = [t[:, n * size : (n + 1) * size].detach() for t in leaves]
            with torch.set_grad_enabled(gradients):
                piece, carried = function(
                    *(t.requires_grad_(gradients) for t in part),
                    initial_state=carried,
                    use_qk_l2norm_in_kernel=True,
                    output_final_state=True,
                )
            want, carried = piece.detach().float(), carried.detach()
            assert (o[:, n * size : (n + 1) * size].float() - want).norm() <= limit * want.norm()
        assert (state - carried).norm() <= limit * carried.norm()
    # The last piece's gradients do not depend on what came before but through its state.
    start = T - size
    part = [t[:, start:].detach().requires_grad_() for t in leaves]
    _, before = function(
        *(t[:, :start] for t in leaves), use_qk_l2norm_in_kernel=True, output_final_state=True
    )
    tail, _ = function(*part, initial_state=before.detach(), use_qk_l2norm_in_kernel=True)
    for whole, alone in zip(grads, torch.autograd.grad(tail, part, do[:, start:]), strict=True):
        got, want = whole[:, start:].float(), alone.float()
        assert math.isfinite(got.norm().item())
        assert (got - want).norm() <= 5e-3 * want.norm()
