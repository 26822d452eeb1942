"""Checkpoints of adapters and optimizer by torch distributed checkpoint, complete or absent.

Experts are placements of a DTensor, so a checkpoint written at one EP size loads at another.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from runtime.adapters import adapter_parameters

KEPT = 2


def save_checkpoint(folder: Path, step: int, model: nn.Module, optimizer: Any) -> Path:
    """Writes `step_N` of `folder`: first beside it, then renamed. Keeps the last two."""
    final, temporary = folder / f"step_{step}", folder / f"step_{step}.tmp"
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        for stale in (temporary, final):
            shutil.rmtree(stale, ignore_errors=True)
    dist.barrier()
    dcp.save(_state(model, optimizer), checkpoint_id=temporary)
    dist.barrier()
    if dist.get_rank() == 0:
        temporary.rename(final)
        for old in sorted(_complete(folder))[:-KEPT]:
            shutil.rmtree(folder / f"step_{old}")
    dist.barrier()
    return final


def last_checkpoint(folder: Path) -> int | None:
    """Step of the last complete checkpoint."""
    return max(_complete(folder), default=None)


def _complete(folder: Path) -> list[int]:
    if not folder.is_dir():
        return []
    found = (re.fullmatch(r"step_(\d+)", entry.name) for entry in folder.iterdir())
    return [int(match[1]) for match in found if match]


def load_checkpoint(folder: Path, step: int, model: nn.Module, optimizer: Any) -> None:
    """Fills adapters and optimizer in place from `step_N`."""
    state = _state(model, optimizer)
    dcp.load(state, checkpoint_id=folder / f"step_{step}")
    for name, parameter in adapter_parameters(model).items():
        optimizer.state[parameter] = {
            "step": state[f"optimizer.{name}.step"],
            "exp_avg": state[f"optimizer.{name}.exp_avg"],
            "exp_avg_sq": state[f"optimizer.{name}.exp_avg_sq"],
        }


def _state(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    """Adapters and AdamW state by name. A fresh optimizer has no tensors to load into, so absent
    ones are made as zeros."""
    state: dict[str, Any] = {}
    for name, parameter in adapter_parameters(model).items():
        held = optimizer.state.get(parameter) or {}
        data = parameter.detach()
        state[f"adapter.{name}"] = data
        state[f"optimizer.{name}.step"] = held.get("step", torch.tensor(0.0))
        for key in ("exp_avg", "exp_avg_sq"):
            state[f"optimizer.{name}.{key}"] = held.get(key, torch.zeros_like(data))
    return state
