"""Every gate again on a real device, in bfloat16 and float32."""

from __future__ import annotations

import pytest
import torch

from analyzers.backends import load_backend
from codegen.build import subject_of
from codegen.family import load_specs
from codegen.render import FLOORS
from codegen.verify.cases import Case, Shape, make_inputs, run
from codegen.verify.harness import compile_for, run_on
from codegen.verify.judge import errors
from tests.codegen.kernel_samples import load, write_kernel

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

WIDTHS = [(32, 32), (64, 64), (100, 60), (128, 128), (128, 256), (256, 128)]


@pytest.fixture(scope="module", params=WIDTHS, ids=lambda w: f"K{w[0]}-V{w[1]}")
def made(request, member, tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpu")
    rendered = write_kernel(folder, member, *request.param, backend="h200")
    return folder, rendered, subject_of(rendered, load_specs()[member], folder)


def test_all_gates_pass_on_the_device(made):
    gates = run_on(made[2], "device", "cuda")
    failed = [f"{g.name}: {g.detail} {g.measured} > {g.tolerance}" for g in gates if not g.passed]
    assert not failed, "\n".join(failed)
    assert len(gates) > 30


def test_every_kernel_keeps_the_limits_of_the_device(made):
    (gate,) = compile_for(made[2], load_backend("h200"))
    assert gate.passed, gate.detail


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "lengths", [(1000,), (781, 0, 1267), (64, 1, 1, 257)], ids=lambda x: "+".join(map(str, x))
)
def test_long_sequences_match_the_recurrence_in_float64(made, lengths, dtype):
    folder, rendered, subject = made
    shape = Shape(**subject.shape)
    heads = 4 if shape.grouped else 2
    case = Case(name="long", lengths=lengths, heads=2, value_heads=heads)
    inputs = {
        n: None if x is None else x.cuda()
        for n, x in make_inputs(case, shape, getattr(torch, dtype)).items()
    }
    exact = {
        n: x.double() if x is not None and x.is_floating_point() else x for n, x in inputs.items()
    }
    kernel, reference = load(folder / rendered.module), load(folder / rendered.reference)
    got = run(getattr(kernel, shape.function), case, inputs, output_final_state=True)
    want = run(getattr(reference, shape.function), case, exact)
    same = run(getattr(reference, shape.function), case, inputs)
    for name, value in want.items():
        tokenwise = name not in ("state", "dstate")
        measured = errors(got[name], value, tokenwise)
        torch_has = errors(same[name], value, tokenwise)
        assert measured[0] <= max(2 * torch_has[0], FLOORS[dtype]), name
        assert measured[1] <= max(4 * torch_has[1], 2 * FLOORS[dtype]), name


@pytest.fixture(scope="module")
def narrow(member, tmp_path_factory):
    folder = tmp_path_factory.mktemp("narrow")
    rendered = write_kernel(folder, member, 16, 16, backend="h200")
    subject = subject_of(rendered, load_specs()[member], folder)
    return getattr(load(folder / rendered.module), subject.shape["function"]), subject


def test_more_sequences_and_heads_than_a_grid_axis_holds(narrow):
    # fla#1077: invalid launch when N * HV exceeds 65,535.
    function, subject = narrow
    N = 65536 // 2 + 1
    case = Case(name="", lengths=(N,), heads=2, value_heads=2, state=False)
    x = make_inputs(case, Shape(**subject.shape), torch.float32)
    names = ("q", "k", "v", "g", "beta")
    args = [x[n].cuda() for n in names]
    limits = torch.arange(N + 1, device="cuda")
    o, _ = function(*args, cu_seqlens=limits, scale=1.0)
    q, k, v, _, beta = args
    want = (q * k).sum(-1, keepdim=True) * beta[..., None] * v
    torch.testing.assert_close(o, want, atol=1e-5, rtol=1e-4)


def test_a_very_long_sequence_keeps_its_tail(narrow):
    # fla#906: the tail was skipped beyond 65,536 tokens.
    function, subject = narrow
    T = 65537
    case = Case(name="", lengths=(T,), state=False)
    x = make_inputs(case, Shape(**subject.shape), torch.float32)
    args = [x[n].cuda() for n in ("q", "k", "v", "g", "beta")]
    options = {"use_qk_l2norm_in_kernel": True}
    whole, _ = function(*args, **options)
    head = [a[:, : T - 5] for a in args]
    tail = [a[:, T - 5 :] for a in args]
    _, state = function(*head, output_final_state=True, **options)
    last, _ = function(*tail, initial_state=state, **options)
    torch.testing.assert_close(whole[:, T - 5 :], last, atol=1e-5, rtol=1e-4)


def test_offsets_beyond_two_to_the_31(narrow):
    # fla#1080, #911, #769: 32-bit offsets gave finite wrong values.
    function, subject = narrow
    T, H = 2**20 + 40, 130  # T * H * K just beyond 2^31
    if torch.cuda.mem_get_info()[0] < 100 * 2**30:
        pytest.skip("needs 100 GiB of device memory")
    shape = Shape(**subject.shape)
    torch.manual_seed(0)
    gate = (1, T, H, 16) if shape.per_channel else (1, T, H)
    new = {"device": "cuda", "dtype": torch.bfloat16}
    q, k, v = (torch.randn(1, T, H, 16, **new) for _ in range(3))
    g = torch.full(gate, -8.0, **new)
    beta = torch.rand(1, T, H, **new)
    with torch.no_grad():
        o, _ = function(q, k, v, g, beta, use_qk_l2norm_in_kernel=True)
        tail = [x[:, -64:] for x in (q, k, v, g, beta)]
        last, _ = function(*tail, use_qk_l2norm_in_kernel=True)
    # at -8 a step, 20 tokens ago is e^-160
    torch.testing.assert_close(o[:, -32:].float(), last[:, -32:].float(), atol=1e-2, rtol=2e-2)
