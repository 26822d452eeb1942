"""Time of one optimizer step of LoRA training, by part: sums of work over rate, rate by rate.

What is assumed, and said in every plan: routing is balanced; parameter gathers overlap with the
computation of a block (the longer of the two counts) but not with its all-to-all, which uses the
same links; adapter gradients are reduced after each micro-batch without overlap.
"""

from __future__ import annotations

from dataclasses import dataclass

from analyzers.backends import Backend, Fact
from analyzers.errors import InputError
from analyzers.schema import Part, Work
from strategies import collectives
from strategies.cluster import Cluster, Group
from strategies.collectives import Timing
from strategies.memory import (
    ADAPTER_BYTES,
    COMPUTE_BYTES,
    EXPERT_BYTES,
    PARTIAL_SUM_BYTES,
    Candidate,
    memory,
    oom_probability,
)
from strategies.schema import Predicted, StepTime
from strategies.workload import Kind, Workload

PEAK_SHARE = {"matmul": 0.7, "memory": 0.85}
"""Where only the vendor's peak is known. Achieved on H200: 690 of 989 TFLOPS, 4260 of 4800 GB/s."""
OPTIMIZER_BYTES = 28
"""AdamW per parameter: weight, gradient and two moments read, weight and moments written."""


@dataclass(frozen=True, kw_only=True)
class Rates:
    flops: float
    """Per second, matmul in the compute dtype."""
    bandwidth: float
    """Bytes/s of device memory."""
    launch: float
    """Seconds a kernel launch."""
    origins: dict[str, str]


def rates(device: Backend, compute_dtype: str) -> Rates:
    """Achievable rates of a device; a vendor's peak is scaled by `PEAK_SHARE`.

    Raises InputError when the backend gives no rate for the dtype.
    """
    matmul = device.matmul_tflops.get(compute_dtype)
    if matmul is None:
        fault = f"gives no matmul rate for {compute_dtype}"
        raise InputError(
            f"backend {device.name}", field="matmul_tflops", fault=fault, fix="add one"
        )

    def achievable(fact: Fact, kind: str) -> float:
        return fact.value * (PEAK_SHARE[kind] if fact.origin == "spec" else 1.0)

    return Rates(
        flops=achievable(matmul, "matmul") * 1e12,
        bandwidth=achievable(device.memory_gbps, "memory") * 1e9,
        launch=device.launch_overhead_us.value * 1e-6,
        origins={
            "matmul": matmul.origin,
            "memory_bandwidth": device.memory_gbps.origin,
            "memory_capacity": device.memory_gib.origin,
            "launch_overhead": device.launch_overhead_us.origin,
        },
    )


def predict(work: Workload, c: Candidate, cluster: Cluster) -> Predicted:
    """Everything that a plan states about its step."""
    known = rates(cluster.device, c.compute_dtype)
    step = step_time(work, c, cluster, known)
    seconds = total(step)
    held = memory(work, c, cluster.device)
    bound = lower_bound(work, c, known)
    p = c.parallelism
    tokens = c.tokens * c.gradient_accumulation
    return Predicted(
        step_seconds=seconds,
        step=step,
        tokens_per_second_per_device=tokens / seconds / (p.tp * p.pp),
        memory_gib=held,
        oom_probability=oom_probability(held, cluster.device),
        lower_bound_seconds=bound,
        optimality_gap=(seconds - bound) / seconds,
    )


def total(step: StepTime) -> float:
    return (
        step.compute
        + step.all_gather
        + step.reduce_scatter
        + step.all_to_all
        + step.optimizer
        + step.overhead
    )


def step_time(work: Workload, c: Candidate, cluster: Cluster, known: Rates) -> StepTime:
    """Seconds by part. Each kind of layer is priced once and multiplied by its layers."""
    compute = gathered = reduced = exchanged = 0.0
    token_exchange = exchange(work, c, cluster).seconds
    passes = 3 if c.activation_checkpointing == "full" else 2
    for kind in work.kinds:
        forward, backward = _block_compute(kind, work, c, known)
        gather = gather_block(kind, c, cluster).seconds
        exposed = max(gather - forward, 0.0)
        if c.reshard_after_forward:
            exposed += max(gather - backward, 0.0)
        compute += kind.layers * (forward + backward)
        gathered += kind.layers * exposed
        reduced += kind.layers * _reduce_block(kind, c, cluster)
        if kind.routed_parameters:
            exchanged += kind.layers * passes * token_exchange
    for part in work.outer:
        compute += sum(_part_seconds(part, c, known))
    gathered += _gather_root(work, c, cluster).seconds

    p, n = c.parallelism, c.gradient_accumulation
    adapters = (work.dense_adapters + work.expert_adapters) / (p.fsdp * p.tp)
    # Backward launches about two kernels for each one of forward.
    launches = work.calls * (passes + 1)
    return StepTime(
        compute=n * compute,
        all_gather=n * gathered,
        reduce_scatter=n * reduced,
        all_to_all=n * exchanged,
        optimizer=adapters * OPTIMIZER_BYTES / known.bandwidth,
        overhead=n * launches * known.launch,
    )


def lower_bound(work: Workload, c: Candidate, known: Rates) -> float:
    """Seconds that no plan on these devices can beat for the same tokens.

    Forward and backward arithmetic at the achievable matmul rate: no recomputation, no memory
    traffic, no communication, no launches.
    """
    flops = 0.0
    for kind in work.kinds:
        for part in kind.parts:
            forward, backward = _flops(part, c)
            flops += kind.layers * (forward + backward)
        flops += kind.layers * 3 * 2 * work.lora_rank * kind.visited_width * c.tokens
    for part in work.outer:
        flops += sum(_flops(part, c))
    return c.gradient_accumulation * flops / known.flops


def _flops(part: Part, c: Candidate) -> tuple[float, float]:
    """Forward and backward of one micro-batch: the base is frozen, so weights have no gradient.

    A causal kernel skips the upper half of the score matrix. Images are not part of the job, so the
    vision tower computes nothing.
    """
    if part.name == "vision":
        return 0.0, 0.0
    t, n = c.sequence_length, c.micro_batch_size
    return n * part.flops.causal(t), n * part.backward.flops.causal(t)


def _part_seconds(part: Part, c: Candidate, known: Rates) -> tuple[float, float]:
    """Roofline: the longer of arithmetic and memory traffic (weights read once, activations)."""
    if part.name in ("vision", "embedding"):
        return 0.0, 0.0
    dtype = COMPUTE_BYTES[c.compute_dtype]
    weights = part.parameters * dtype
    if part.name == "routed_experts":
        weights /= c.parallelism.ep
    scale = c.micro_batch_size * dtype / 2
    forward, backward = _flops(part, c)

    def seconds(flops: float, activations: Work) -> float:
        moved = weights + scale * activations.at(c.sequence_length)
        return max(flops / known.flops, moved / known.bandwidth)

    return seconds(forward, part.bytes), seconds(backward, part.backward.bytes)


def _block_compute(kind: Kind, work: Workload, c: Candidate, known: Rates) -> tuple[float, float]:
    """Forward and backward seconds of one layer, recomputation counted in backward.

    An adapter multiplies twice in forward and four times in backward (input and weight gradients),
    `2 * rank * (in + out)` each; it also reads and writes its `in + out` activations, which binds.
    """
    dtype = COMPUTE_BYTES[c.compute_dtype]
    forward = backward = 0.0
    for part in kind.parts:
        f, b = _part_seconds(part, c, known)
        forward, backward = forward + f, backward + b
    width = c.tokens * kind.visited_width
    adapter = max(2 * work.lora_rank * width / known.flops, dtype * width / known.bandwidth)
    forward, backward = forward + adapter, backward + 2 * adapter
    if c.expert_weight_format == "mxfp4":
        unpack = kind.routed_parameters / c.parallelism.ep * (EXPERT_BYTES["mxfp4"] + dtype)
        forward += unpack / known.bandwidth
        backward += unpack / known.bandwidth
    if c.activation_checkpointing == "full":
        backward += forward
    return forward, backward


def _groups(c: Candidate) -> tuple[Group, Group, Group]:
    """Ranks of fsdp, ep and efsdp: ep is the innermost mesh axis, then efsdp, then replicas."""
    p = c.parallelism
    return Group(p.fsdp * p.tp), Group(p.ep), Group(p.efsdp, p.ep)


def gather_block(kind: Kind, c: Candidate, cluster: Cluster) -> Timing:
    """All-gather of one layer's frozen weights and adapters: dense over fsdp, experts over efsdp.

    The frozen weights are gathered for forward and again for backward, and never reduce-scattered.
    """
    dtype = COMPUTE_BYTES[c.compute_dtype]
    fsdp, _, efsdp = _groups(c)
    ep = c.parallelism.ep
    dense = (kind.dense_parameters + kind.dense_adapter) * dtype
    expert = kind.routed_parameters * EXPERT_BYTES[c.expert_weight_format]
    expert = (expert + kind.expert_adapter * dtype) / ep
    return _add(
        collectives.all_gather(cluster, dense, fsdp),
        collectives.all_gather(cluster, expert, efsdp),
    )


def _gather_root(work: Workload, c: Candidate, cluster: Cluster) -> Timing:
    """Embedding, head and last norm: gathered once a micro-batch, before anything can hide it."""
    size = work.outer_parameters * COMPUTE_BYTES[c.compute_dtype]
    return collectives.all_gather(cluster, size, _groups(c)[0])


def _reduce_block(kind: Kind, c: Candidate, cluster: Cluster) -> float:
    """Reduce-scatter of the adapters' float32 gradients, then all-reduce over the replicas."""
    p = c.parallelism
    fsdp, _, efsdp = _groups(c)
    dense, expert = kind.dense_adapter * ADAPTER_BYTES, kind.expert_adapter / p.ep * ADAPTER_BYTES
    seconds = collectives.reduce_scatter(cluster, dense, fsdp).seconds
    seconds += collectives.reduce_scatter(cluster, expert, efsdp).seconds
    if p.dp_replicate > 1:
        shard = (kind.dense_adapter + kind.expert_adapter) * ADAPTER_BYTES / (p.fsdp * p.tp)
        replicas = Group(p.dp_replicate, p.fsdp * p.tp)
        seconds += collectives.all_reduce(cluster, shard, replicas).seconds
    return seconds


def distinct_destinations(ranks: int, top_k: int) -> float:
    """Expected number of ranks that a token's `top_k` experts lie on: `R (1 - (1 - 1/R)^k)`.

    A token is sent once to each rank however many of its experts live there (balanced routing).
    """
    return ranks * (1 - (1 - 1 / ranks) ** top_k)


def exchange(work: Workload, c: Candidate, cluster: Cluster) -> Timing:
    """Dispatch and combine of one layer's tokens, one direction (forward, or their gradients).

    all_to_all: tokens * expert width * distinct destinations, there and back. all_gather: every
    rank of the group gets all of the group's tokens; float32 partial sums are reduce-scattered.
    The width is the experts' own: half the model's in a latent mixture of experts.
    """
    dtype = COMPUTE_BYTES[c.compute_dtype]
    row = work.expert_width * dtype
    ep = _groups(c)[1]
    if c.dispatcher == "all_to_all":
        size = c.tokens * row * distinct_destinations(ep.size, work.top_k)
        return _add(
            collectives.all_to_all(cluster, size, ep, op="all_to_all_dispatch"),
            collectives.all_to_all(cluster, size, ep, op="all_to_all_combine"),
        )
    if c.dispatcher == "all_gather":
        size = c.tokens * row * ep.size
        return _add(
            collectives.all_gather(cluster, size, ep),
            collectives.reduce_scatter(cluster, size * PARTIAL_SUM_BYTES / dtype, ep),
        )
    return collectives.NOTHING


def origins(work: Workload, c: Candidate, cluster: Cluster) -> dict[str, str]:
    """Where each rate behind the prediction came from."""
    found = dict(rates(cluster.device, c.compute_dtype).origins)
    if c.parallelism.fsdp > 1:
        heaviest = max(work.kinds, key=lambda k: k.dense_parameters + k.routed_parameters)
        found["weight_gather"] = gather_block(heaviest, c, cluster).origin
    if c.dispatcher != "none":
        found["token_exchange"] = exchange(work, c, cluster).origin
    return found


def _add(a: Timing, b: Timing) -> Timing:
    """The weaker origin of the parts that take time: a sum is as good as its worst number."""
    ranking = ("measured", "spec", "default")
    known = [t.origin for t in (a, b) if t.seconds > 0] or ["spec"]
    return Timing(a.seconds + b.seconds, max(known, key=ranking.index))
