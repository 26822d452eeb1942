"""The first call compiles every kernel of a step, side by side."""

import threading

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget

from codegen.family import SHORT
from codegen.load import import_file
from tests.codegen.kernel_samples import write_kernel


class Absent:
    """A device that is compiled for and not here; notes where launchers are built."""

    def __init__(self):
        self.launchers: list[tuple[str, threading.Thread]] = []

    def launcher_cls(self, src, metadata):
        self.launchers.append((src.fn.__name__, threading.current_thread()))

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)


@pytest.fixture
def absent(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    device = Absent()
    monkeypatch.setattr(triton.runtime.driver, "_active", device)
    return device


def compiled(module) -> dict[str, set]:
    """By kernel, what Triton holds of it in memory."""
    kernels = {n: f for n, f in vars(module).items() if isinstance(f, triton.JITFunction)}
    return {n: set(f.device_caches[0][0]) for n, f in kernels.items() if f.device_caches[0][0]}


def launch_without_device(kernel, programs, **arguments):
    kernel.warmup(grid=(programs,), **arguments)


@pytest.mark.parametrize("keep", [False, True], ids=["computed again", "kept"])
@pytest.mark.parametrize("packed", [False, True], ids=["one sequence", "packed"])
def test_a_step_finds_all_its_kernels_compiled(packed, keep, absent, tmp_path):
    rendered = write_kernel(tmp_path, "simple_gla", 16, 16, backend="h200")
    module = import_file(tmp_path / rendered.module, "compiled_ahead")
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 70, 2, 16, dtype=torch.bfloat16) for _ in range(3))
    g = -torch.rand(1, 70, 2)
    limits = torch.tensor([0, 0, 64, 70]) if packed else None
    given = q, k, v, g, None, limits, 0.25, True
    module._compile_ahead(*given, keep=False, gradients=False)
    forward = compiled(module)
    assert set(forward) == set(SHORT)
    module._compile_ahead(*given, keep=keep, gradients=True)
    ahead = compiled(module)
    assert set(ahead) == {*SHORT, "_prepare", "_recur", "_reverse", "_pairs", "_gradients"}

    module._run = launch_without_device
    o, _, kept = module._triton_forward(*given, keep)
    module._triton_backward(*given[:6], [o, *kept] if keep else [], o, None, *given[6:])
    assert compiled(module) == ahead


def test_launchers_are_built_beside_the_kernels_that_still_compile(absent, tmp_path):
    rendered = write_kernel(tmp_path, "simple_gla", 16, 16, backend="h200")
    module = import_file(tmp_path / rendered.module, "launchers_ahead")
    q = torch.randn(1, 70, 2, 16, dtype=torch.bfloat16)
    given = q, q, q, -torch.rand(1, 70, 2), None, None, 0.25, True
    module._compile_ahead(*given, keep=True, gradients=True)
    assert {name for name, _ in absent.launchers} == set(compiled(module))
    assert threading.main_thread() not in {thread for _, thread in absent.launchers}


def test_tensors_of_one_kind_are_compiled_for_once(absent, tmp_path):
    rendered = write_kernel(tmp_path, "linear_attention", 16, 16, backend="h200")
    module = import_file(tmp_path / rendered.module, "compiled_once")
    walked = []
    module._triton_forward = lambda *given: (walked.append(given[0].shape[1]), None, [])
    for tokens in (64, 128, 4096):
        q = torch.randn(1, tokens, 2, 16, dtype=torch.bfloat16)
        module._compile_ahead(q, q, q, None, None, 0.25, False, keep=False, gradients=False)
    assert walked == [64]
