"""The harness lets a right kernel pass and stops wrong ones."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from analyzers.backends import load_backend
from codegen.build import subject_of
from codegen.family import load_specs
from codegen.verify.harness import compile_for, run_on
from codegen.verify.judge import errors
from tests.codegen.kernel_samples import write_kernel


def subject(folder: Path, member: str, change: tuple[str, str] | None = None):
    rendered = write_kernel(folder, member, 16, 16)
    if change:
        path = folder / rendered.module
        text = path.read_text(encoding="utf-8")
        assert change[0] in text
        path.write_text(text.replace(*change), encoding="utf-8")
    return subject_of(rendered, load_specs()[member], folder)


def failed(gates) -> list[str]:
    return [f"{gate.name}: {gate.detail}" for gate in gates if not gate.passed]


@pytest.mark.slow
def test_kernels_pass_every_gate_in_the_interpreter(member, tmp_path):
    gates = run_on(subject(tmp_path, member), "interpreter")
    assert len(gates) > 15
    assert not failed(gates)


@pytest.mark.slow
def test_kernels_of_full_width_fit_the_device(member, tmp_path):
    backend = load_backend("h200")
    rendered = write_kernel(tmp_path, member, 128, 128, backend="h200")
    (gate,) = compile_for(subject_of(rendered, load_specs()[member], tmp_path), backend)
    assert gate.passed, gate.detail
    assert gate.ran_on == "compiler:sm_90"


def test_a_kernel_that_needs_too_much_shared_memory_is_refused(tmp_path):
    right = subject(tmp_path, "gated_delta_rule")
    backend = load_backend("h200")
    small = dataclasses.replace(backend.triton, shared_memory_bytes=1024)
    (gate,) = compile_for(right, dataclasses.replace(backend, triton=small))
    assert not gate.passed
    assert "bytes of shared memory" in gate.detail


def test_a_kernel_that_does_not_compile_is_refused(tmp_path):
    wrong = subject(tmp_path, "gated_delta_rule", ("tl.cumsum(g, 0)", "tl.cumsumm(g, 0)"))
    (gate,) = compile_for(wrong, load_backend("h200"))
    assert not gate.passed
    assert "_prepare" in gate.detail


WRONG_KERNELS = {
    "dropped decay": ("h = h * decay + tl.dot", "h = h + tl.dot"),
    "wrong mask": (
        "lower = r[:, None] >= r[None, :]",
        "lower = r[:, None] >= r[None, :] - 1",
    ),
    "off-by-one chunk": (
        "(chunk - tl.load(first_chunk_ptr + n)) * BT",
        "(chunk + 1 - tl.load(first_chunk_ptr + n)) * BT",
    ),
    "missing tail": ("(self.bounds.diff() + CHUNK - 1) // CHUNK", "self.bounds.diff() // CHUNK"),
    "store past the sequence": (
        "mask = (row < end)[:, None] & (col < WIDTH)[None, :]\n    tl.store",
        "mask = (row < end + 2)[:, None] & (col < WIDTH)[None, :]\n    tl.store",
    ),
    "gradient never written": ("    tl.store(dh0_ptr", "    if n < 0:\n        tl.store(dh0_ptr"),
    "gate gradient by cancellation": (
        "dg += tl.sum(tl.where(r[:, None] > r[None, :], d_from_row[None, :], 0.0), 1)",
        "dg += tl.cumsum(d_from_row, 0) - d_from_row",
    ),
}


@pytest.mark.parametrize("fault", WRONG_KERNELS)
def test_a_wrong_triton_kernel_is_refused(fault, tmp_path):
    cases = ["odd length", "gates of -8 a step"]
    wrong = subject(tmp_path, "gated_delta_rule", WRONG_KERNELS[fault])
    assert failed(run_on(wrong, "interpreter", cases=cases))


WRONG_TORCH = {
    "dropped decay": ("h = h * decay[here] +", "h = h +"),
    "future leaks": ("lower = r[:, None] >= r[None, :]", "lower = r[:, None] >= r[None, :] - 1"),
    "input changed": (
        "    return o.view(v.shape).to(v.dtype), ht",
        "    return o.view(v.shape).to(v.dtype), ht + 0 * v.mul_(1.01).sum()",
    ),
    "not the same twice": (
        "    return o.view(v.shape).to(v.dtype), ht",
        "    return o.view(v.shape).to(v.dtype), ht * (1 + 1e-6 * torch.rand(1))",
    ),
    "reads its own scratch": (
        "    return o.view(v.shape).to(v.dtype), ht",
        "    return o.view(v.shape).to(v.dtype) + 0 * torch.empty(1), ht",
    ),
    "crashes": ("    group = v.shape[2]", "    raise RuntimeError\n    group = v.shape[2]"),
}


@pytest.mark.parametrize("fault", WRONG_TORCH)
def test_a_wrong_plain_torch_form_is_refused(fault, tmp_path):
    cases = ["odd length", "future as it is", "future changed"]
    wrong = subject(tmp_path, "kda", WRONG_TORCH[fault])
    assert failed(run_on(wrong, "cpu", cases=cases))


def test_the_unchanged_kernel_passes_what_the_wrong_ones_are_judged_by(tmp_path):
    cases = ["odd length", "gates of -8 a step"]
    right = subject(tmp_path / "a", "gated_delta_rule")
    assert not failed(run_on(right, "interpreter", cases=cases))
    cases = ["odd length", "future as it is", "future changed"]
    assert not failed(run_on(subject(tmp_path / "b", "kda"), "cpu", cases=cases))


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
