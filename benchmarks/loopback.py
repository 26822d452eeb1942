"""One process plays rank 0 of several that all hold the same.

Collectives hand its own data back, so what a rank computes, keeps and launches is real, and what
travels costs nothing: the memory of a rank, and its step without communication, on one device.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.testing._internal.distributed.fake_pg import FakeStore


class Done:
    """The handle of a collective that is over."""

    def wait(self, *_: Any) -> bool:
        return True


def _repeated(x: Tensor, group: Any) -> Tensor:
    return x.repeat(dist.get_world_size(group), *[1] * (x.ndim - 1))


def _first(x: Tensor, group: Any) -> Tensor:
    """The part of rank 0; sums are not multiplied, so that values keep their size."""
    return x.unflatten(0, (dist.get_world_size(group), -1))[0].clone()


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _repeated(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _first(grad, ctx.group), None


class Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _first(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _repeated(grad, ctx.group), None


class Exchange(torch.autograd.Function):
    """Every rank sends rank 0 what rank 0 sends itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, receive: list[int], send: list[int], group: Any) -> Tensor:
        ctx.rows = x.shape[0]
        return _repeated(x[: send[0]], group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        back = grad.new_zeros(ctx.rows, *grad.shape[1:])
        rows = min(len(back), len(grad))
        back[:rows].copy_(grad[:rows])
        return back, None, None, None


class Collectives:
    """Of torch's functional collectives, those that tokens travel by."""

    @staticmethod
    def all_gather_tensor_autograd(x: Tensor, dim: int, group: Any) -> Any:
        return Gather.apply(x, group)

    @staticmethod
    def reduce_scatter_tensor_autograd(x: Tensor, op: str, dim: int, group: Any) -> Any:
        return Scatter.apply(x, group)

    @staticmethod
    def wait_tensor(x: Tensor) -> Tensor:
        return x


def all_gather_into_tensor(
    output_tensor: Tensor, input_tensor: Tensor, group: Any = None, async_op: bool = False
) -> Done | None:
    output_tensor.view(-1).copy_(_repeated(input_tensor.reshape(-1), group))
    return Done() if async_op else None


def reduce_scatter_tensor(
    output: Tensor, input: Tensor, op: Any = None, group: Any = None, async_op: bool = False
) -> Done | None:
    output.view(-1).copy_(_first(input.reshape(-1), group))
    return Done() if async_op else None


def all_to_all_single(
    output: Tensor,
    input: Tensor,
    output_split_sizes: list[int] | None = None,
    input_split_sizes: list[int] | None = None,
    group: Any = None,
    async_op: bool = False,
) -> Done | None:
    ranks = dist.get_world_size(group)
    rows = input_split_sizes[0] if input_split_sizes else input.shape[0] // ranks
    output.copy_(_repeated(input[:rows], group))
    return Done() if async_op else None


def all_reduce(
    tensor: Tensor, op: Any = None, group: Any = None, async_op: bool = False
) -> Done | None:
    if op in (None, dist.ReduceOp.SUM):
        tensor.mul_(dist.get_world_size(group))
    return Done() if async_op else None


@contextmanager
def process_group(ranks: int) -> Iterator[torch.device]:
    """In place of `runtime.build.process_group`."""
    from runtime.experts import dispatch
    from runtime.sharding import device_type

    kind = device_type()
    device = torch.device(kind) if kind == "cpu" else torch.device(kind, 0)
    own = (all_gather_into_tensor, reduce_scatter_tensor, all_to_all_single, all_reduce)
    with ExitStack() as stack:
        dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
        stack.callback(dist.destroy_process_group)
        stack.enter_context(patch.object(dispatch, "collectives", Collectives))
        stack.enter_context(patch.object(dispatch, "exchange", Exchange.apply))
        for where, function in itertools.product((dist, distributed_c10d), own):
            stack.enter_context(patch.object(where, function.__name__, function))
        yield device
