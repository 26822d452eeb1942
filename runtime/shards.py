"""What a rank holds of a tensor, and the whole of it; a sharded model under its own classes."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate


def local_rows(tensor: Tensor) -> tuple[Tensor, int, int]:
    """This rank's shard of a tensor and the rows `[low, high)` of dimension 0 that it holds.

    Shards are contiguous: the last mesh axis cuts first (`ep` before `efsdp`), each in chunks of
    `ceil(n / ranks)` as `torch.chunk` does.
    """
    if not isinstance(tensor, DTensor):
        return tensor.detach(), 0, tensor.shape[0] if tensor.ndim else 1
    low, high = 0, tensor.shape[0]
    for axis in reversed(range(tensor.device_mesh.ndim)):
        placement = tensor.placements[axis]
        if isinstance(placement, Replicate):
            continue
        assert getattr(placement, "dim", None) == 0, f"not sharded by rows: {placement}"
        chunk = -(-(high - low) // tensor.device_mesh.size(axis))
        start = low + chunk * tensor.device_mesh.get_local_rank(axis)
        low, high = min(start, high), min(start + chunk, high)
    shard = tensor.to_local().detach()
    assert shard.shape[0] == high - low, f"shard has {shard.shape[0]} rows, not {high - low}"
    return shard, low, high


def whole(tensor: Tensor) -> Tensor:
    """A copy of the full tensor on the CPU; all ranks call it together."""
    return full(tensor).to("cpu", copy=True)  # one rank's full tensor is its shard itself


def full(tensor: Tensor) -> Tensor:
    """The full tensor on its device, perhaps this rank's own memory; all ranks call it together."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def tensor_digest(tensor: Tensor) -> str:
    """sha256 of dtype, shape and bytes."""
    data = tensor.detach().cpu().contiguous()
    made = hashlib.sha256(f"{data.dtype}{list(data.shape)}".encode())
    made.update(data.reshape(-1).view(torch.uint8).numpy().tobytes())
    return made.hexdigest()


def shared_parameters(model: nn.Module) -> set[nn.Parameter]:
    """Parameters that a model has under several names."""
    count = Counter(p for _, p in model.named_parameters(remove_duplicate=False))
    return {p for p, names in count.items() if names > 1}


@contextmanager
def own_classes(model: nn.Module) -> Iterator[None]:
    """Takes away the class that FSDP puts before a module's own: transformers finds a model's
    conversions by the name of its class, and finds others, or none, by FSDP's."""
    sharded = [
        (module, type(module)) for module in model.modules() if isinstance(module, FSDPModule)
    ]
    try:
        for module, cls in sharded:
            module.__class__ = cls.__mro__[2]  # FSDP's, FSDPModule, the module's own
        yield
    finally:
        for module, cls in sharded:
            module.__class__ = cls
