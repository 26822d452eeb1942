"""AdamW, its schedule, and one gradient norm over parameters that live on different meshes."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

if TYPE_CHECKING:
    from strategies.schema import Optimizer


def build_optimizer(parameters: Iterable[nn.Parameter], config: Optimizer) -> torch.optim.AdamW:
    """AdamW with one parameter group a mesh, so that no fused call mixes meshes."""
    groups: dict[object, list[nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault(_layout(parameter), []).append(parameter)
    return torch.optim.AdamW(
        [{"params": group} for group in groups.values()],
        lr=config.learning_rate,
        betas=config.betas,
        eps=config.epsilon,
        weight_decay=config.weight_decay,
        foreach=True,
    )


def learning_rate(config: Optimizer, step: int, steps: int) -> float:
    """Of step `step` (from 0) of `steps`: linear warm-up, then a half cosine down to a tenth."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    span = max(1, steps - config.warmup_steps)
    done = min(1.0, (step - config.warmup_steps) / span)
    return config.learning_rate * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * done)))


@torch.no_grad()
def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float) -> float:
    """Scales gradients so that their global L2 norm is at most `max_norm`; returns the norm before.

    Squares are summed by (mesh, placements) and reduced over the mesh axes that shard, so shards
    count once and replicas are not counted twice. Every rank joins every reduction, with or without
    gradients of its own.
    """
    groups: dict[object, list[nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault(_layout(parameter), []).append(parameter)
    total = 0.0
    gradients: list[Tensor] = []
    for members in groups.values():
        shards = [_local(p.grad) for p in members if p.grad is not None]
        gradients += shards
        square = torch.zeros((), device=_local(members[0]).device)
        if shards:
            square = torch.stack(torch._foreach_norm(shards)).square().sum()
        if isinstance(members[0], DTensor):
            mesh = members[0].device_mesh
            for axis, placement in enumerate(members[0].placements):
                if not isinstance(placement, Replicate):
                    dist.all_reduce(square, group=mesh.get_group(axis))
        total = total + square
    norm = float(torch.as_tensor(total).sqrt())
    if norm > max_norm and gradients:
        torch._foreach_mul_(gradients, max_norm / (norm + 1e-6))
    return norm


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def _layout(parameter: Tensor) -> object:
    if isinstance(parameter, DTensor):
        return parameter.device_mesh, tuple(parameter.placements)
    return None
