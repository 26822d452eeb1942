"""Memory of a plan on its fullest device, by part: plain sums of bytes, no hidden factor.

Sources: FSDP2's gather-compute-free cycle (two blocks in flight while the next is prefetched);
Megatron-LM pull request 6782 (expert parallelism does not divide routed activations, because every
rank of the group brings its own tokens); the resident state of published LoRA runs lies 4-33 GB
below their measured peak, and that difference is what the transient parts here account for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from analyzers.backends import Backend
from strategies.schema import Memory, Parallelism, Plan
from strategies.workload import Workload

GIB = 2**30
EXPERT_BYTES = {"bf16": 2.0, "fp32": 4.0, "mxfp4": 0.53}
"""Bytes per routed-expert parameter; MXFP4 is 4 bits and one scale byte for 32 values."""
COMPUTE_BYTES = {"bfloat16": 2, "float32": 4}
ADAPTER_BYTES = 4
"""Adapters, their gradients and AdamW's two moments are float32 on any base."""
LOGIT_BYTES = 12
"""Per token and vocabulary entry. bf16: logits and their gradient 2 + 2, float32 log-softmax and
its gradient 4 + 4; float32: three copies of 4."""
PARTIAL_SUM_BYTES = 4
"""The all-gather dispatcher adds the outputs of a token's experts in float32."""
BLOCKS_IN_FLIGHT = 2
"""The block that computes and the one that is prefetched."""
FRAGMENTATION = 0.05
"""Share of the transient parts that the allocator holds without using (assumption)."""
STATE_DEVIATION, TRANSIENT_DEVIATION = 0.02, 0.25
"""Standard deviation of the prediction's relative error (assumption): resident state is near exact;
published predictions of the rest range over 0.72-1.06 of the measured value."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One point of the search: everything of a plan that its cost depends on."""

    parallelism: Parallelism
    micro_batch_size: int
    sequence_length: int
    gradient_accumulation: int = 1
    activation_checkpointing: str = "none"
    reshard_after_forward: bool = True
    expert_weight_format: str = "bf16"
    compute_dtype: str = "bfloat16"
    dispatcher: str = "none"

    @property
    def tokens(self) -> int:
        """Tokens of one micro-batch on one device."""
        return self.micro_batch_size * self.sequence_length // self.parallelism.cp

    @property
    def data_ranks(self) -> int:
        """Ranks that read different sequences."""
        p = self.parallelism
        return p.dp_replicate * p.fsdp // p.cp


def candidate_of(plan: Plan) -> Candidate:
    return Candidate(**{name: getattr(plan, name) for name in Candidate.__dataclass_fields__})


def memory(work: Workload, c: Candidate, device: Backend) -> Memory:
    """GiB by part. The largest moments of different parts are added although they need not
    coincide (logits live when no block is recomputed), so the peak errs upwards."""
    p, dtype = c.parallelism, COMPUTE_BYTES[c.compute_dtype]
    dense_shards, expert_shards = p.fsdp * p.tp, p.ep * p.efsdp
    assert dense_shards == expert_shards
    expert_bytes = EXPERT_BYTES[c.expert_weight_format]

    frozen = work.dense_parameters * dtype / dense_shards
    frozen += work.routed_parameters * expert_bytes / expert_shards
    adapters = work.dense_adapters * ADAPTER_BYTES / dense_shards
    adapters += work.expert_adapters * ADAPTER_BYTES / expert_shards
    gradients, optimizer = adapters, 2 * adapters

    transient = {
        "unsharded_blocks": _unsharded(work, c),
        "activations": _activations(work, c),
        "logits": c.tokens * work.vocab_size * LOGIT_BYTES,
        "dispatch": _dispatch(work, c),
    }
    gib = {name: value / GIB for name, value in transient.items()}
    reserved = device.reserved_gib.value + FRAGMENTATION * sum(gib.values())
    state = {
        "frozen_weights": frozen / GIB,
        "adapters": adapters / GIB,
        "gradients": gradients / GIB,
        "optimizer": optimizer / GIB,
    }
    peak = reserved + sum(state.values()) + sum(gib.values())
    return Memory(peak=peak, reserved=reserved, capacity=device.memory_gib.value, **state, **gib)


def _unsharded(work: Workload, c: Candidate) -> float:
    """Bytes of gathered parameters, gradients of the gathered adapters included.

    A block's dense part is gathered over fsdp, its local experts over efsdp; a group of one
    gathers nothing. Packed experts are gathered packed and unpacked for one block at a time.
    The root group (embedding, head, last norm) stays gathered through forward and backward.
    """
    p, dtype = c.parallelism, COMPUTE_BYTES[c.compute_dtype]
    tp = p.tp
    blocks: list[float] = []
    unpacked = 0.0
    for kind in work.kinds:
        size = 0.0
        if p.fsdp > 1:
            size += kind.dense_parameters * dtype / tp
            size += kind.dense_adapter * (dtype + ADAPTER_BYTES)
        if p.efsdp > 1:
            size += kind.routed_parameters / p.ep * EXPERT_BYTES[c.expert_weight_format]
            size += kind.expert_adapter / p.ep * (dtype + ADAPTER_BYTES)
        blocks += [size] * kind.layers
        if c.expert_weight_format == "mxfp4":
            unpacked = max(unpacked, kind.routed_parameters / p.ep * dtype)
    if c.reshard_after_forward:
        held = sum(sorted(blocks, reverse=True)[:BLOCKS_IN_FLIGHT])
    else:
        held = sum(blocks)
    root = work.outer_parameters * dtype / tp if p.fsdp > 1 else 0.0
    return held + unpacked + root


def _activations(work: Workload, c: Candidate) -> float:
    """Bytes kept for the backward pass.

    none: every saved tensor of every layer. full: each layer's input, and one layer recomputed.
    Tensor parallelism is not searched yet; expert parallelism divides nothing here.
    """
    scale = COMPUTE_BYTES[c.compute_dtype] / 2
    sequences = c.micro_batch_size / c.parallelism.cp
    saved = [scale * sequences * k.saved_bytes.at(c.sequence_length) for k in work.kinds]
    if c.activation_checkpointing == "none":
        return sum(s * kind.layers for s, kind in zip(saved, work.kinds, strict=True))
    inputs = work.layers * work.layer_input_bytes + work.shared_input_bytes
    return c.tokens * scale * inputs + max(saved, default=0.0)


def _dispatch(work: Workload, c: Candidate) -> float:
    """Bytes of the send and receive buffers of one layer's dispatch and combine.

    all_to_all: top_k copies of each token, four buffers. all_gather: the group's tokens and float32
    partial outputs for all of them. Routing is taken as balanced.
    """
    dtype = COMPUTE_BYTES[c.compute_dtype]
    if c.dispatcher == "all_to_all":
        return 4 * c.tokens * work.top_k * work.expert_width * dtype
    if c.dispatcher == "all_gather":
        rows = c.parallelism.ep * c.tokens
        return rows * work.expert_width * (dtype + PARTIAL_SUM_BYTES)
    return 0.0


def oom_probability(memory: Memory, device: Backend) -> float:
    """Chance that the real peak exceeds the capacity.

    The real peak is taken as normal around the predicted one, with the deviations named above:
    state * 2% and transient * 25%, independent.
    """
    transient = memory.unsharded_blocks + memory.activations + memory.logits + memory.dispatch
    state = memory.peak - transient - device.reserved_gib.value
    deviation = math.hypot(STATE_DEVIATION * state, TRANSIENT_DEVIATION * transient)
    room = memory.capacity - memory.peak
    if deviation == 0:
        return 0.0 if room >= 0 else 1.0
    return 0.5 * math.erfc(room / deviation / math.sqrt(2))
