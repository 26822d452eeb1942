"""Bytes on the fullest device, by part: plain sums.

Sources: FSDP2's gather-compute-free cycle (two blocks in flight while the next is prefetched);
Megatron-LM pull request 6782 (expert parallelism does not divide routed activations, because every
rank of the group brings its own tokens); Megatron-LM's count of micro-batches in flight under 1F1B
(arXiv 2104.04473, section 2.2 and 4.1); the resident state of published LoRA runs lies 4-33 GB
below their measured peak, and that difference is what the transient parts here account for.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import numpy as np

from strategies.candidates import DISPATCHERS, Candidates, Column
from strategies.cluster import Cluster
from strategies.cluster.model import GIB
from strategies.cost import collectives
from strategies.cost.columns import at, total
from strategies.cost.communication import PARTIAL_SUM_BYTES
from strategies.cost.compute import FULL, NONE, SELECTIVE, Routed, expert_bytes
from strategies.cost.constants import Constants
from strategies.cost.stages import Stages

if TYPE_CHECKING:
    from strategies.workload import State, Workload

LOGIT_BYTES = 4
"""Per token and vocabulary entry: logits and their gradient in bf16, besides the log-softmax and
its gradient. In float32 this makes three copies of 4. In chunks, one kernel keeps only the former.
"""
BLOCKS_IN_FLIGHT = 2
"""The block that computes and the one that is prefetched."""
FRAGMENTATION = 0.05
"""Share of the transient parts that the allocator holds without using (assumption)."""


@dataclass(frozen=True, kw_only=True)
class Bytes:
    """Columns of bytes on the fullest device."""

    frozen_weights: Column
    adapters: Column
    trained_weights: Column
    """With full fine-tuning."""
    gradients: Column
    optimizer: Column
    unsharded_blocks: Column
    activations: Column
    logits: Column
    dispatch: Column
    communication: Column
    """Buffers of the groups' communicators, outside the allocator."""
    fragmentation: Column
    reserved: Column
    """Driver and runtime, before the first tensor."""

    @property
    def state(self) -> Column:
        weights = self.frozen_weights + self.adapters + self.trained_weights
        return weights + self.gradients + self.optimizer

    @property
    def transient(self) -> Column:
        return self.unsharded_blocks + self.activations + self.logits + self.dispatch

    @property
    def allocated(self) -> Column:
        """What PyTorch's allocator reports as its peak."""
        return self.state + self.transient

    @property
    def peak(self) -> Column:
        return total(getattr(self, f.name) for f in fields(self))


def memory(
    work: Workload,
    c: Candidates,
    cluster: Cluster,
    stages: Stages,
    k: Constants,
    load: Routed,
) -> Bytes:
    """The largest moments of different parts are added although they need not coincide (logits live
    when no block is recomputed), so the peak errs upwards."""
    device = cluster.device
    size = 2 if device.training_dtype == "bfloat16" else 4
    full = work.training == "full"
    frozen, trained, gradients, optimizer = resident(work, c, size, stages)
    optimizer = np.where(offloaded(c, optimizer, cluster), 0.0, optimizer)
    unsharded = _unsharded(work, c, size, stages)
    kept, block = _activations(work, c, size, stages, load, k)
    entries = c.tokens * work.vocab_size / c.tp
    logits = entries * float(LOGIT_BYTES + 2 * work.loss_size)
    if work.loss_chunk is not None:
        logits = np.minimum(entries, float(work.loss_chunk)) * LOGIT_BYTES
    # Gradients of the first micro-batch come as its activations go: both are never there in full.
    fresh = c.shard_parameters & (c.gradient_accumulation == 1) & (c.pp == 1)
    activations = block + np.where(fresh, np.maximum(kept - gradients, 0.0), kept)
    dispatch = _dispatch(work, c, size, load)
    groups = [c.tp, c.cp, c.fsdp, c.dp_replicate, c.ep, c.efsdp, c.pp]
    communicators = np.sum([g > 1 for g in groups], axis=0)
    return Bytes(
        frozen_weights=frozen,
        adapters=np.zeros(len(c)) if full else trained,
        trained_weights=trained if full else np.zeros(len(c)),
        gradients=gradients,
        optimizer=optimizer,
        unsharded_blocks=unsharded,
        activations=activations,
        logits=logits,
        dispatch=dispatch,
        communication=communicators * k.communicator_gib * GIB,
        fragmentation=FRAGMENTATION * (unsharded + activations + logits + dispatch),
        reserved=np.full(len(c), device.reserved_gib.value * GIB),
    )


def resident(
    work: Workload, c: Candidates, size: int, stages: Stages
) -> tuple[Column, Column, Column, Column]:
    """Frozen weights, trained weights, gradients and optimizer states of the fullest stage.

    All are sharded over the ranks of a replica; without `shard_parameters` weights and gradients
    are whole on every rank and optimizer states alone are sharded.
    """
    full = work.training == "full"
    outer = work.outer_parameters
    layers_dense = work.dense_parameters - outer
    share = stages.share
    dense_whole = (layers_dense * share + outer * stages.outer_share) / c.tp
    # Copies of loaded experts lie in every layer beside a rank's own.
    copies = 1 + c.expert_copies * c.ep / max(work.experts, 1)
    routed_whole = work.routed_parameters * share / c.ep * copies
    dense_shards = np.where(c.shard_parameters, c.fsdp, 1)
    expert_shards = np.where(c.shard_parameters, c.efsdp, 1)
    stored = expert_bytes(c, size)
    zero = np.zeros(len(c))
    frozen = zero
    if full:
        whole, whole_experts = dense_whole, routed_whole
    else:
        frozen = dense_whole * size / dense_shards + routed_whole * stored / expert_shards
        whole = work.dense_adapters * share / c.tp
        whole_experts = work.expert_adapters * share / c.ep
    state: State = work.state
    kept = whole / dense_shards + whole_experts / expert_shards
    owned = whole / c.fsdp + whole_experts / c.efsdp
    return frozen, kept * state.weight, kept * state.gradient, owned * state.optimizer


def offloaded(c: Candidates, optimizer: Column, cluster: Cluster) -> Column:
    """Which rows hold their optimizer states, bytes of a device, in host memory: those that are to
    and whose host has room for them. The others keep them."""
    return c.offload & (optimizer <= cluster.host_bytes)


def owned_parameters(work: Workload, c: Candidates, stages: Stages) -> Column:
    """Trained parameters that the optimizer of one device updates."""
    if work.training == "full":
        dense = (work.dense_parameters - work.outer_parameters) * stages.share
        dense = dense + work.outer_parameters * stages.outer_share
        routed = work.routed_parameters * stages.share
    else:
        dense, routed = work.dense_adapters * stages.share, work.expert_adapters * stages.share
    return dense / c.tp / c.fsdp + routed / c.ep / c.efsdp


def _unsharded(work: Workload, c: Candidates, size: int, stages: Stages) -> Column:
    """Gathered parameters, and the whole gradients of those that are trained.

    A block's dense part is gathered over fsdp, its local experts over efsdp; a group of one gathers
    nothing. Packed experts are gathered packed and unpacked for one block at a time. The root group
    (embedding, head, last norm) stays gathered through forward and backward. A trainer that reduces
    after the last micro-batch alone keeps weights and whole gradients of all blocks until then.
    """
    full = work.training == "full"
    gradient = work.state.gradient
    zero = np.zeros(len(c))
    blocks: list[tuple[Column, int]] = []
    unpacked = zero
    stored = expert_bytes(c, size)
    packed = stored < size
    for kind in work.kinds:
        dense = kind.dense_parameters * size + kind.dense_adapter * (size + gradient)
        routed = kind.routed_parameters * stored + kind.expert_adapter * (size + gradient)
        if full:
            dense = kind.dense_parameters * (size + gradient)
            routed = kind.routed_parameters * (size + gradient)
        held = np.where(c.fsdp > 1, dense / c.tp, 0.0)
        held = held + np.where(c.efsdp > 1, routed / c.ep, 0.0)
        blocks.append((held, kind.layers))
        if not full:
            whole = np.where(packed, kind.routed_parameters / c.ep * size, 0.0)
            unpacked = np.maximum(unpacked, whole)
    kept = sum((held * layers for held, layers in blocks), zero) * stages.share
    stays = ~c.reshard_after_forward | (work.reduces_last & (c.gradient_accumulation > 1))
    flight = np.where(stays, kept, np.minimum(_largest(blocks), kept))
    root = np.where(c.fsdp > 1, work.outer_parameters * stages.outer_share * size / c.tp, 0.0)
    return np.where(c.shard_parameters, flight + root, 0.0) + unpacked


def _largest(blocks: list[tuple[Column, int]]) -> Column:
    """Sum of the `BLOCKS_IN_FLIGHT` largest blocks."""
    rows = np.stack([held for held, layers in blocks for _ in range(min(layers, BLOCKS_IN_FLIGHT))])
    rows = np.sort(rows, axis=0)[::-1]
    return rows[:BLOCKS_IN_FLIGHT].sum(axis=0)


def _activations(
    work: Workload, c: Candidates, size: int, stages: Stages, load: Routed, k: Constants
) -> tuple[Column, Column]:
    """Bytes kept for the backward pass on the first stage, which has most micro-batches in flight,
    and those of the block that is in its backward pass.

    none: every saved tensor of every layer. selective: each layer's input, outputs of every second
    product and of attention cores. full: each layer's input. A block in its backward pass has all
    its tensors and as many gradients. Expert parallelism divides nothing here; tensor parallelism,
    with sequences split, everything.
    """
    scale = size / 2 * c.micro_batch_size / c.cp / c.tp
    every = largest = selected = np.zeros(len(c))
    for kind in work.kinds:
        routed = at(kind.saved_routed, c.sequence_length)
        saved = at(kind.saved_bytes, c.sequence_length) + routed * (load.overload - 1)
        saved = saved * k.saved_share
        every = every + kind.layers * saved
        between = at(kind.selective_bytes, c.sequence_length)
        between = between + at(kind.selective_routed, c.sequence_length) * (load.overload - 1)
        selected = selected + kind.layers * between
        largest = np.maximum(largest, saved)
    inputs = (work.layers * work.layer_input_bytes + work.shared_input_bytes) * c.sequence_length
    kept = np.where(c.recomputation == FULL, inputs, every)
    kept = np.where(c.recomputation == SELECTIVE, np.minimum(inputs + selected, every), kept)
    block = np.where(c.recomputation == NONE, largest, 2 * largest)
    return scale * kept * stages.share * stages.in_flight, scale * block


def _dispatch(work: Workload, c: Candidates, size: int, load: Routed) -> Column:
    """Send and receive buffers of one layer's dispatch and combine.

    all-to-all: four buffers of top_k copies of each token, or, in the runtime, of one for each rank
    that it goes to. all_gather: the group's tokens and float32 partial outputs for all of them.
    """
    tokens, width = c.tokens / c.tp, work.expert_width
    rows = collectives.destinations(work.choice, c.ep) if work.grouped_kernel else work.top_k
    copies = 4 * tokens * rows * load.overload * width * size
    gathered = c.ep * tokens * width * float(size + PARTIAL_SUM_BYTES)
    chosen = np.where(c.dispatcher == DISPATCHERS.index("all_gather"), gathered, copies)
    return np.where((c.dispatcher > 0) & (c.ep > 1), chosen, 0.0)
