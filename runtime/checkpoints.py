"""Checkpoints of adapters and optimizer by torch distributed checkpoint, complete or absent.

Experts are placements of a DTensor, so a checkpoint written at one EP size loads at another. Where
the data stands and what is drawn at random follow from the number of the step and from what
`Run` keeps, so neither a data loader nor a generator has a state of its own to lose.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from analyzers.errors import InputError
from runtime.adapters import adapter_parameters
from runtime.experts.copies import Balancer

KEPT = 2
BALANCE = "balance"
"""Key of what was known of the experts' loads, as JSON."""


@dataclass(frozen=True)
class Run:
    """What a run must share with the one that it goes on from, besides the model."""

    seed: int
    global_batch_size: int
    data: str
    """Fingerprint of what was tokenised."""
    sequence_length: int
    packing: bool
    evaluation_fraction: float
    lora: dict[str, Any]

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    def check(self, saved: str, where: Path) -> None:
        """Raises InputError for the first difference from what `to_json` gave."""
        before = json.loads(saved)
        for name, now in json.loads(self.to_json()).items():
            if before[name] != now:
                fault = f"is {now}, but the checkpoint was written with {before[name]}"
                fix = "go on as before, or remove the folder to start anew"
                raise InputError(where, field=name, fault=fault, fix=fix)


@dataclass
class Checkpoints:
    """Writes `step_N` of `folder` beside the training, one at a time, and keeps the last two."""

    folder: Path
    model: nn.Module
    optimizer: torch.optim.Optimizer
    run: Run
    balancer: Balancer | None = None
    _group: dist.ProcessGroup | None = None
    """Of its own, on the host: its collectives run in another thread than the training's."""
    _writing: tuple[int, Future] | None = field(default=None, init=False)

    def start(self, step: int) -> None:
        """Copies the state and writes it in the background. All ranks call it together; waits for
        the checkpoint before."""
        self.finish()
        temporary = _begin(self.folder, step)
        if self._group is None:
            self._group = dist.new_group(backend="gloo")  # type: ignore[assignment]
        state = _state(self.model, self.optimizer) | {"run": self.run.to_json()}
        state[BALANCE] = json.dumps(self.balancer and self.balancer.state())
        future = dcp.async_save(state, checkpoint_id=temporary, process_group=self._group)
        assert isinstance(future, Future)
        self._writing = step, future

    def poll(self) -> None:
        """Gives a checkpoint that is written its name; waits for nothing."""
        if self._writing is not None and self._writing[1].done():
            self.finish()

    def finish(self) -> None:
        """Waits until the checkpoint that is being written is complete.

        Rank 0 writes the metadata after it has heard from all ranks, so its own end is the end.
        """
        if self._writing is None:
            return
        step, future = self._writing
        self._writing = None
        future.result()
        if dist.get_rank() == 0:
            _complete(self.folder, step)

    def resume(self) -> int:
        """Fills adapters and optimizer from the last complete checkpoint; returns its step, 0
        without one. Raises InputError when it belongs to another run."""
        step = last_checkpoint(self.folder) or 0
        if step:
            saved = {"run": "", BALANCE: ""}
            dcp.load(saved, checkpoint_id=self.folder / f"step_{step}")
            self.run.check(saved["run"], self.folder / f"step_{step}")
            load_checkpoint(self.folder, step, self.model, self.optimizer)
            if self.balancer is not None and (balance := json.loads(saved[BALANCE])):
                self.balancer.restore(balance)
        return step


def save_checkpoint(folder: Path, step: int, model: nn.Module, optimizer: Any) -> Path:
    """Writes `step_N` of `folder` and waits for it."""
    temporary = _begin(folder, step)
    dcp.save(_state(model, optimizer), checkpoint_id=temporary)
    if dist.get_rank() == 0:
        _complete(folder, step)
    dist.barrier()
    return folder / f"step_{step}"


def _begin(folder: Path, step: int) -> Path:
    """The folder that is written to: beside the final one, and renamed when it is complete."""
    temporary = folder / f"step_{step}.tmp"
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        for stale in [*folder.glob("step_*.tmp"), folder / f"step_{step}"]:
            shutil.rmtree(stale, ignore_errors=True)
    dist.barrier()
    return temporary


def _complete(folder: Path, step: int) -> None:
    (folder / f"step_{step}.tmp").rename(folder / f"step_{step}")
    for old in sorted(_steps(folder))[:-KEPT]:
        shutil.rmtree(folder / f"step_{old}")


def last_checkpoint(folder: Path) -> int | None:
    """Step of the last complete checkpoint."""
    return max(_steps(folder), default=None)


def _steps(folder: Path) -> list[int]:
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
