"""A set of plans as columns, so that their costs are array arithmetic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

RECOMPUTATION = ("none", "selective", "full")
"""`selective` keeps the outputs of every second product, with its adapter, and of attention cores,
as `runtime.recomputation` does (and torchtitan for single operators); `full` recomputes whole
blocks."""
DISPATCHERS = ("none", "all_to_all", "hierarchical", "all_gather")
EXPERT_FORMATS = ("bf16", "fp32", "mxfp4", "fp8")

Column = np.ndarray


@dataclass(frozen=True, kw_only=True)
class Candidates:
    """One row a plan: columns of one length. `efsdp` and what else follows is derived.

    pp * dp_replicate * fsdp * tp devices are used; cp divides fsdp; ep divides fsdp * tp.
    """

    pp: Column
    dp_replicate: Column
    fsdp: Column
    tp: Column
    cp: Column
    ep: Column
    virtual_stages: Column
    """Chunks of layers that a pipeline stage holds (interleaved 1F1B); 1 without."""
    micro_batch_size: Column
    """Sequences of one micro-batch of one data-parallel rank."""
    gradient_accumulation: Column
    """Micro-batches a step; those of a pipeline's schedule."""
    sequence_length: Column
    recomputation: Column
    """Index in `RECOMPUTATION`."""
    reshard_after_forward: Column
    shard_parameters: Column
    """False: gradients and optimizer states alone are sharded (ZeRO-1 or 2)."""
    dispatcher: Column
    """Index in `DISPATCHERS`."""
    expert_format: Column
    """Index in `EXPERT_FORMATS`: how frozen routed experts lie in memory."""
    capacity_factor: Column
    """Tokens an expert takes at most, as a multiple of the mean; infinite without a limit."""
    reroute: Column
    """What exceeds an expert's capacity goes to the next best with room instead of nowhere."""
    expert_copies: Column
    """Slots of each expert-parallel rank that hold copies of the most loaded experts."""
    offload: Column
    """Optimizer states in host memory."""
    shards_inside: Column
    """Shards of an expert lie on neighbouring devices and expert parallelism strides over them;
    else expert parallelism is inside and its shards stride."""
    replicas_outside: Column
    """Replicas are outermost, each with all pipeline stages; else stages are."""

    def __len__(self) -> int:
        return len(self.pp)

    @property
    def devices(self) -> Column:
        return self.pp * self.dp_replicate * self.fsdp * self.tp

    @property
    def efsdp(self) -> Column:
        return self.fsdp * self.tp // self.ep

    @property
    def ep_stride(self) -> Column:
        """Devices from one member of the expert-parallel group to the next."""
        return np.where(self.shards_inside, self.efsdp, 1)

    @property
    def efsdp_stride(self) -> Column:
        return np.where(self.shards_inside, 1, self.ep)

    @property
    def replica_stride(self) -> Column:
        return self.fsdp * self.tp * np.where(self.replicas_outside, self.pp, 1)

    @property
    def stage_stride(self) -> Column:
        return self.fsdp * self.tp * np.where(self.replicas_outside, 1, self.dp_replicate)

    @property
    def data_ranks(self) -> Column:
        """Ranks that read different sequences."""
        return self.dp_replicate * self.fsdp // self.cp

    @property
    def tokens(self) -> Column:
        """Tokens of one micro-batch on one device, before tensor parallelism divides anything."""
        return self.micro_batch_size * self.sequence_length // self.cp

    def take(self, rows: Any) -> Candidates:
        """The rows of a mask or an index array."""
        return Candidates(**{f.name: getattr(self, f.name)[rows] for f in fields(self)})

    def row(self, i: int) -> dict[str, Any]:
        """One plan as plain values."""
        return {f.name: getattr(self, f.name)[i].item() for f in fields(self)}


DEFAULTS: Mapping[str, Any] = {
    "pp": 1,
    "dp_replicate": 1,
    "fsdp": 1,
    "tp": 1,
    "cp": 1,
    "ep": 1,
    "virtual_stages": 1,
    "micro_batch_size": 1,
    "gradient_accumulation": 1,
    "sequence_length": 4096,
    "recomputation": 0,
    "reshard_after_forward": True,
    "shard_parameters": True,
    "dispatcher": 0,
    "expert_format": 0,
    "capacity_factor": np.inf,
    "reroute": False,
    "expert_copies": 0,
    "offload": False,
    "shards_inside": False,
    "replicas_outside": False,
}


def columns(**given: Any) -> Candidates:
    """Broadcasts values and arrays to columns of one length; what is not given is its default."""
    if unknown := given.keys() - DEFAULTS.keys():
        raise TypeError(f"no such column: {', '.join(sorted(unknown))}")
    arrays = np.broadcast_arrays(*(np.atleast_1d(given.get(n, d)) for n, d in DEFAULTS.items()))
    return Candidates(**{n: np.ascontiguousarray(a) for n, a in zip(DEFAULTS, arrays, strict=True)})
