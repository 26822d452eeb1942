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
    """AdamW with one parameter group a mesh, so that no fused call mixes meshes, and with groups of
    their own for vectors, which do not decay."""
    groups: dict[tuple[object, bool], list[nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault((_layout(parameter), parameter.ndim > 1), []).append(parameter)
    fused = all(p.device.type != "cpu" for group in groups.values() for p in group)
    return torch.optim.AdamW(
        [
            {"params": group, "weight_decay": config.weight_decay if decays else 0.0}
            for (_, decays), group in groups.items()
        ],
        lr=config.learning_rate,
        betas=config.betas,
        eps=config.epsilon,
        fused=fused,
        foreach=not fused,
    )


def learning_rate(config: Optimizer, step: int, steps: int) -> float:
    """Of step `step` (from 0) of `steps`: linear warm-up, then `lr_scheduler_type` down to
    `min_lr_rate` of the whole rate."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    span = max(1, steps - config.warmup_steps)
    done = min(1.0, (step - config.warmup_steps) / span)
    left = {
        "constant": 1.0,
        "linear": 1 - done,
        "cosine": 0.5 * (1 + math.cos(math.pi * done)),
    }[config.lr_scheduler_type]
    return config.learning_rate * (config.min_lr_rate + (1 - config.min_lr_rate) * left)


@torch.no_grad()
def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Scales gradients so that their global L2 norm is at most `max_norm`; returns the norm before,
    on the device: nothing is waited for.

    Squares are summed by (mesh, placements) and reduced over the mesh axes that shard, so shards
    count once and replicas are not counted twice. Every rank joins every reduction, with or without
    gradients of its own.
    """
    groups: dict[object, list[nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault(_layout(parameter), []).append(parameter)
    total = torch.zeros(())
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
        total = total.to(square.device) + square
    norm = total.sqrt()
    if gradients:
        torch._foreach_mul_(gradients, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def _layout(parameter: Tensor) -> object:
    if isinstance(parameter, DTensor):
        return parameter.device_mesh, tuple(parameter.placements)
    return None
