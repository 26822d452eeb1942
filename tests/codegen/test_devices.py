"""Kernels run on the device of their tensors, whichever is the current one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from analyzers.backends import load_backend
from codegen.load import import_file
from codegen.members import load_members
from codegen.render import render

SHAPES = {
    "simple_gla": {"key_dim": 16, "value_dim": 16},
    "short_convolution": {"kernel_size": 4},
    "gated_rms_norm": {},
}
MEMBERS = pytest.mark.parametrize("member", SHAPES)


def module_of(folder: Path, member: str):
    rendered = render(load_members()[member], load_backend("h200"), SHAPES[member])
    path = folder / rendered.module
    path.write_text(rendered.files[rendered.module], encoding="utf-8")
    return import_file(path, f"on_devices_{member}")


def call_of(module, member: str, device: str) -> Callable[[], list[torch.Tensor]]:
    """A call, which gives the output and the gradients of its inputs."""
    generator = torch.Generator().manual_seed(0)

    def normal(*size):
        return torch.randn(*size, generator=generator).to(device).requires_grad_()

    if member == "simple_gla":
        x = [normal(1, 70, 2, 16) for _ in range(3)]
        x.append((-torch.rand(1, 70, 2, generator=generator)).to(device).requires_grad_())
    else:
        x = [normal(1, 70, 8), normal(8, 4) if member == "short_convolution" else normal(8)]
    function = getattr(module, load_members()[member].function)

    def call():
        made = function(*x)
        made = made[0] if isinstance(made, tuple) else made
        return [made, *torch.autograd.grad(made.sum(), x)]

    return call


@MEMBERS
def test_launches_are_made_with_the_device_of_the_tensors(member, tmp_path, monkeypatch):
    # Triton launches on the current device, and takes pointers of another one.
    module = module_of(tmp_path, member)
    module._INTERPRETED = True  # CPU tensors take the path of the launches
    entered: list = []
    launched = []

    class Current:
        def __init__(self, index):
            self.index = index

        def __enter__(self):
            entered.append(self.index)

        def __exit__(self, *_):
            entered.pop()

    def noted(name):
        plain = getattr(module, name.replace("triton", "torch"))

        def run(*given):
            launched.append((name, list(entered)))
            if member != "simple_gla":
                return plain(*given)
            if "forward" in name:
                return *plain(*given[:-1]), []
            return plain(*given[:6], *given[7:])

        return run

    monkeypatch.setattr(torch.accelerator, "device_index", Current)
    for name in ("_triton_forward", "_triton_backward"):
        monkeypatch.setattr(module, name, noted(name))
    call_of(module, member, "cpu")()
    index = torch.device("cpu").index
    assert launched == [("_triton_forward", [index]), ("_triton_backward", [index])]


@pytest.mark.parametrize("member", ["short_convolution", "gated_rms_norm"])
def test_tensors_on_different_devices_are_refused(member, tmp_path):
    function = getattr(module_of(tmp_path, member), load_members()[member].function)
    weight = torch.ones((8, 4) if member == "short_convolution" else (8,), device="meta")
    with pytest.raises(ValueError, match=r"on one device, got \['cpu', 'meta'\]"):
        function(torch.ones(1, 5, 8), weight)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@MEMBERS
def test_the_second_device_computes_what_the_first_one_does(member, tmp_path):
    module = module_of(tmp_path, member)
    first, second = (call_of(module, member, device)() for device in ("cuda:0", "cuda:1"))
    for x, y in zip(first, second, strict=True):
        assert y.device == torch.device("cuda:1")
        assert torch.equal(x.cpu(), y.cpu())
