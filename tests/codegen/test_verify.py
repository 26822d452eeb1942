"""The harness lets right kernels pass, stops wrong ones, and survives what they do to it."""

from __future__ import annotations

import dataclasses
import itertools
import time
from types import SimpleNamespace

import pytest
import torch

from analyzers.backends import load_backend
from codegen.members import load_specs
from codegen.schema import Gate
from codegen.verify import launches
from codegen.verify.cases import Shape, all_cases, make_inputs, run
from codegen.verify.harness import compile_for, run_on
from codegen.verify.judge import Judge, errors, errors_of
from tests.codegen.kernel_samples import load
from tests.codegen.proofs import LINEAR, failed, gates_of, subject
from tests.codegen.test_kernel_oracles import FLA


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory) -> dict[str, list[Gate]]:
    """By member, the gates of its plain torch form; by fault, those of a wrong one."""
    folder = tmp_path_factory.mktemp("cpu")
    subjects = [subject(folder / n, n, widths=(20, 24)) for n in LINEAR]
    cases = [tuple(c.name for c in all_cases(Shape(**one.shape))) for one in subjects]
    names = [(*every, "opcheck") for every in cases]
    names += [past_and_usual(cases[LINEAR.index("kda")])] * len(WRONG_TORCH)
    subjects += [subject(folder / fault, "kda", how) for fault, how in WRONG_TORCH.items()]
    return dict(
        zip(
            [*LINEAR, *WRONG_TORCH], gates_of(folder, subjects, names, interpret=False), strict=True
        )
    )


@pytest.mark.parametrize("member", LINEAR)
def test_every_member_passes_on_a_cpu(member, on_cpu):
    assert len(on_cpu[member]) > 20
    assert not failed(on_cpu[member])


def test_half_precision_passes_on_a_cpu(tmp_path):
    cases = ["usual", "packed, few", "raw gates", "gates in the inputs' dtype, beta of zero"]
    gates = run_on(subject(tmp_path, "kda"), "cpu", cases=cases, dtypes=["bfloat16"])
    assert len(gates) == len(cases) + 2
    assert not failed(gates)


@pytest.mark.slow
@pytest.mark.parametrize("member", LINEAR)
def test_kernels_pass_every_gate_in_the_interpreter(member, tmp_path):
    gates = run_on(subject(tmp_path, member), "interpreter")
    assert len(gates) > 20
    assert not failed(gates)


@pytest.mark.slow
@pytest.mark.parametrize("member", ["kda", "gated_delta_rule"])
def test_kernels_of_full_width_fit_the_device(member, tmp_path):
    backend = load_backend("h200")
    wide = subject(tmp_path, member, widths=(128, 128), backend="h200")
    (gate,) = compile_for(wide, backend)
    assert gate.passed, gate.detail
    assert gate.ran_on == "compiler:sm_90"


# --- Two references ---------------------------------------------------------------------------

# Their chunked form loses hard resets and strong decays; the recurrent ones keep them.
CHUNKED = ("simple_gla", "lightning", "mamba2")
AGREED = [
    "usual",
    "grouped value heads in a batch",
    "packed, few",
    "one token",
    "inputs of 1e-3",
    "no decay, repeated keys",
    "gates of -8 a step",
    "hard resets",
]


def as_ours(member: str):
    """The naive function of flash-linear-attention, called as our reference is."""

    def function(
        q, k, v, *gates, initial_state, use_qk_l2norm_in_kernel, cu_seqlens, scale, **constant
    ):
        assert scale is None
        names = load_specs()[member].inputs
        group = v.shape[2] // q.shape[2]
        if use_qk_l2norm_in_kernel:
            q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
        q, k = (x.repeat_interleave(group, 2) for x in (q, k))
        tensors = dict(zip(names, (q, k, v, *gates), strict=True))
        limits = [0, q.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
        outputs, states = [], []
        for n, (begin, end) in enumerate(itertools.pairwise(limits)):
            state = initial_state if cu_seqlens is None else initial_state[n : n + 1]
            if begin < end:
                part = {name: x[:, begin:end] for name, x in tensors.items()}
                o, state = FLA[member](**part, **constant, initial_state=state)
                outputs.append(o)
            states.append(state)
        return torch.cat(outputs, 1), torch.cat(states)

    return function


@pytest.mark.parametrize("member", FLA)
def test_the_references_agree_with_the_naive_functions_on_the_cases(member, tmp_path):
    of_kernel = subject(tmp_path, member)
    reference = load(of_kernel.reference)
    shape = Shape(**of_kernel.shape)
    for case in all_cases(shape):
        if case.name not in AGREED or (member in CHUNKED and case.name in AGREED[-2:]):
            continue
        inputs = make_inputs(case, shape, torch.float32)
        ours = run(getattr(reference, shape.function), case, inputs, kernel=False)
        theirs = run(as_ours(member), case, inputs, kernel=False)
        for name, x in ours.items():
            worst = errors_of(theirs[name].float(), x, case.kind(name))[1]
            assert worst < 2e-4, f"{case.name}: {name}"


# --- What is refused --------------------------------------------------------------------------


def test_a_kernel_that_needs_too_much_shared_memory_is_refused(tmp_path):
    right = subject(tmp_path, "gated_delta_rule")
    backend = load_backend("h200")
    small = dataclasses.replace(backend.triton, shared_memory_bytes=1024)
    (gate,) = compile_for(right, dataclasses.replace(backend, triton=small))
    assert not gate.passed
    assert "bytes of shared memory" in gate.detail


def test_a_kernel_that_does_not_compile_is_refused(tmp_path):
    wrong = subject(tmp_path, "gated_delta_rule", ("tl.cumsum(", "tl.cumsumm("))
    (gate,) = compile_for(wrong, load_backend("h200"))
    assert not gate.passed
    assert "_prepare" in gate.detail


RETURNED = "    return o.view(v.shape).to(v.dtype), ht\n"
WRONG_TORCH = {
    "future leaks": (
        "lower = (r[:, None] >= r[None, :])",
        "lower = (r[:, None] >= r[None, :] - 1)",
    ),
    "input changed": (RETURNED, RETURNED.replace(", ht", ", ht + 0 * v.mul_(1.01).sum()")),
    "not the same twice": (
        RETURNED,
        RETURNED.replace(", ht", ", ht * (1 + 1e-6 * torch.rand_like(ht))"),
    ),
    "reads its own scratch": (
        RETURNED,
        RETURNED.replace(", ht", " + 0 * torch.empty(1), ht"),
    ),
    "says that it passed": (RETURNED, f'    print("PASS")\n    o = o * 1.1\n{RETURNED}'),
    "raises": (RETURNED, "    raise RuntimeError\n" + RETURNED),
}


def past_and_usual(cases: tuple[str, ...]) -> tuple[str, ...]:
    past = ("strong gates, gradients until", "strong gates, other values from")
    found = ("usual", *(name for name in cases if name.startswith(past)))
    assert len(found) == 3
    return found


@pytest.mark.parametrize("fault", WRONG_TORCH)
def test_a_wrong_plain_torch_form_is_refused(fault, on_cpu):
    assert failed(on_cpu[fault])


# --- The processes ----------------------------------------------------------------------------


def test_a_crash_or_a_hang_costs_one_case_only(tmp_path):
    dies = (
        "    if q.shape[1] == 1:\n        import ctypes\n        ctypes.string_at(0)\n"
        "    if q.shape[1] == 8:\n        import time\n        time.sleep(600)\n"
    )
    wrong = subject(tmp_path, "gated_delta_rule", (RETURNED, dies + RETURNED))
    crashes, hangs = "one token", "last state without a gradient"
    cases = ["usual", crashes, "long memory", hangs, "strided inputs"]
    begin = time.monotonic()
    gates = run_on(wrong, "cpu", cases=cases, dtypes=["float32"], seconds=25)
    assert time.monotonic() - begin < 250
    details = {g.name.split(": ")[1]: g.detail for g in gates if g.name.startswith("accuracy")}
    assert details.keys() == set(cases)
    assert details[crashes] == "killed by SIGSEGV"
    assert details[hangs] == "no result after 25 s"
    assert {g.name.split(": ")[1] for g in gates if g.passed} == {*cases} - {crashes, hangs}


def test_a_candidate_that_always_dies_is_not_started_for_ever(tmp_path):
    wrong = subject(tmp_path, "gated_delta_rule", ("import triton\n", "import triton\nexit(9)\n"))
    gates = run_on(wrong, "cpu", dtypes=["float32"])
    assert not any(gate.passed for gate in gates)
    assert sum("the candidate died 3 times before" in gate.detail for gate in gates) > 10


def test_every_row_of_a_launch_table_is_met():
    # A kernel for many heads has other launches than the small cases would choose.
    table = {torch.bfloat16: {"_a": [(16, 32, 4, 1), (None, 64, 8, 2)], "_b": [(None, 16, 2, 1)]}}
    module = SimpleNamespace(LAUNCHES=table)
    assert launches.count(module) == 2
    met = []
    for number in range(2):
        with launches.only(module, number):
            met.append(module.LAUNCHES[torch.bfloat16])
    assert met == [
        {"_a": [(None, 32, 4, 1)], "_b": [(None, 16, 2, 1)]},
        {"_a": [(None, 64, 8, 2)], "_b": [(None, 16, 2, 1)]},
    ]
    assert module.LAUNCHES is table
    assert launches.count(SimpleNamespace()) == 1


def test_a_wrong_second_row_is_refused(tmp_path):
    right = subject(tmp_path, "gla")
    shape = Shape(**right.shape)
    usual = next(case for case in all_cases(shape) if case.name == "usual")
    judge = Judge(load(right.reference), shape, [usual])
    exact, _ = judge.references(usual, "float32")
    good = {n: x.float() for n, x in exact.items()}
    bad = good | {"dk": good["dk"] * 1.01}
    ran = {"broken_bands": 0, "changed_inputs": []}
    answer = ran | {"runs": [good, good], "launches": [ran | {"runs": [bad, bad]}]}
    (fault,) = failed(judge.gates({("float32", "usual"): answer}, "h200"))
    assert fault.startswith("accuracy, float32: usual, launches 2: closest to its limit: dk")


# --- The measure of errors --------------------------------------------------------------------


def test_one_ruined_token_is_seen():
    # A root-mean-square ratio of 0.02 passes with three of 8,192 tokens zeroed.
    exact = torch.randn(1, 8192, 2, 4, generator=torch.Generator().manual_seed(0))
    ruined = exact.clone()
    ruined[0, 100:103] = 0
    whole, worst = errors(ruined, exact, tokenwise=True)
    assert whole < 0.03
    assert worst > 0.9


def test_a_structural_zero_must_be_exact():
    zero = torch.zeros(1, 3, 1, 2)
    assert errors(zero + 1e-30, zero, tokenwise=True) == (float("inf"), float("inf"))
    assert errors(zero, zero, tokenwise=True) == (0.0, 0.0)


def test_not_a_number_is_an_infinite_error():
    x = torch.ones(1, 2, 1, 2)
    assert errors(x * float("nan"), x, tokenwise=True)[0] == float("inf")
