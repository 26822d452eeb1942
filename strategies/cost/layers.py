"""Seconds of one micro-batch in all layers of a model, but for what sharded weights cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from strategies.candidates import Candidates, Column
from strategies.cluster import Cluster
from strategies.cost.columns import distinct
from strategies.cost.communication import context, permutation, tensor
from strategies.cost.compute import FULL, Rates, block_passes, head_seconds, routed
from strategies.cost.constants import Constants

if TYPE_CHECKING:
    from strategies.workload import Workload

MICRO_BATCH_COLUMNS = (
    *("tp", "cp", "ep", "micro_batch_size", "sequence_length", "recomputation"),
    *("shard_parameters", "expert_format", "capacity_factor", "reroute", "expert_copies"),
)
"""All that this module reads of a plan."""


@dataclass(frozen=True, kw_only=True)
class Layers:
    compute: Column
    overhead: Column
    """By which the host launches more slowly than the device computes."""
    tensor_parallel: Column
    context_parallel: Column
    forward: tuple[Column, ...]
    """Of one layer of each kind: what gathers hide behind."""
    backward: tuple[Column, ...]
    mixer: tuple[Column, ...]
    """Of `forward`, the mixer's: what gathers hide behind that start with their layer."""
    mixer_backward: tuple[Column, ...]
    head: Column
    """Head and loss, forward and backward; in none of the others."""


def micro_batch(
    work: Workload, cluster: Cluster, c: Candidates, k: Constants, known: Rates
) -> Layers:
    """Each kind of layer is priced once and multiplied by its layers.

    Tensor-parallel exchanges hide by a share of themselves, keys and values behind the attention
    core; a layer takes no less than the host needs to launch it.
    """
    few, at_rows = distinct(c, MICRO_BATCH_COLUMNS)
    size = known.dtype_bytes
    load = routed(work, few)
    passes = forward_passes(few) + 1
    permute = permutation(work, few, known, k, load)
    # Backward takes the host about as long as forward: 1.2 and 1.0 ms for a layer of Qwen3-MoE in
    # PyTorch 2.13 on a server's core, 0.7 and 0.6 of Llama, 1.6 and 1.3 of DeepSeek-V3.
    host = work.calls / max(work.layers, 1) * k.host_calls * known.launch
    # Backward gathers the inputs once more for the gradients of the weights.
    splits = passes + (0.5 if work.training == "full" else 0.0)
    names = ("compute", "overhead", "tensor_parallel", "context_parallel")
    sums = {name: np.zeros(len(few)) for name in names}
    windows, windows_back, mixers, mixers_back = [], [], [], []
    for kind in work.kinds:
        p = block_passes(kind, work, few, known, k, load)
        sorting = permute if kind.routed_parameters else 0.0
        forward, backward = p.forward + sorting, p.backward + sorting * (passes - 1)
        late, late_back = (
            np.maximum(host - forward, 0.0),
            np.maximum(host * (passes - 1) - backward, 0.0),
        )
        passed, passed_back = context(kind, few, cluster, size)
        # Keys and values travel behind the attention core, and while the host is late.
        behind, behind_back = p.core + late, passes * p.core + late_back
        passed_back = passed_back + passed * (passes - 2)
        layer = {
            "compute": forward + backward,
            "overhead": late + late_back,
            "tensor_parallel": tensor(kind, work, few, cluster, size)
            * splits
            * (1 - k.tensor_overlap),
            "context_parallel": np.maximum(passed - behind, 0.0)
            + np.maximum(passed_back - behind_back, 0.0),
        }
        for name, seconds in layer.items():
            sums[name] = sums[name] + kind.layers * seconds
        # What already hides keys and values hides nothing else.
        windows.append((forward + late - np.minimum(passed, behind))[at_rows])
        busy = np.minimum(passed_back, behind_back)
        windows_back.append((backward + late_back - busy)[at_rows])
        mixers.append(p.mixer[at_rows])
        mixers_back.append(p.mixer_backward[at_rows])
    return Layers(
        **{name: seconds[at_rows] for name, seconds in sums.items()},
        forward=tuple(windows),
        backward=tuple(windows_back),
        mixer=tuple(mixers),
        mixer_backward=tuple(mixers_back),
        head=head_seconds(work, few, known, k)[at_rows],
    )


def forward_passes(c: Candidates) -> Column:
    """Two where blocks are recomputed."""
    return np.where(c.recomputation == FULL, 2.0, 1.0)
