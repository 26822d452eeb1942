"""Seconds that a device computes for one micro-batch in one layer, by what bounds each operator."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from analyzers.backends import Backend, Fact
from analyzers.errors import InputError
from analyzers.schema import Work
from strategies.candidates import EXPERT_FORMATS, RECOMPUTATION, Candidates, Column
from strategies.cost.columns import at, causal, distinct
from strategies.cost.constants import Constants
from strategies.cost.routing import device_overload, dropped_share

if TYPE_CHECKING:
    from strategies.workload import Gemm, Kind, PartWork, Precision, Workload

PEAK_SHARE = {"matmul": 0.7, "memory": 0.85}
"""Where only the vendor's peak is known. Achieved on H200: 690 of 989 TFLOPS, 4260 of 4800 GB/s."""
EXPERT_BYTES = {"bf16": 2.0, "fp32": 4.0, "mxfp4": 0.53, "fp8": 1.0}
"""Bytes per routed-expert parameter; MXFP4 is 4 bits and one scale byte for 32 values."""
ATTENTION_RATIO = 0.7
"""Of attention's forward kernels to matrix products where nobody measured the device's: 0.68 to
0.81 on seven devices of NVIDIA."""
DTYPE_OF = {"bf16": "bfloat16", "fp8": "float8", "mxfp8": "mxfloat8", "nvfp4": "nvfloat4"}
"""Key in a backend's `matmul_tflops`."""
LINEAR_INTENSITY, LINEAR_INTENSITY_BACKWARD = 16.8, 12.0
"""FLOPs of chunked linear attention in the time of a byte at the memory rate: small products whose
intermediates travel, so that their rate goes with the memory's. Measured on an H200 at 4,260 GB/s
(docs/kernels/linear-attention.md): KDA, 32 heads of 128, 8,192 tokens takes 0.66 ms forward for
47 GFLOP and 2.61 ms backward for 133 GFLOP."""
QUANTISED_BYTES = {"bf16": 0.0, "fp8": 10.0, "mxfp8": 5.0, "nvfp4": 5.5}
"""At the full memory rate, what quantising one activation for both orientations takes. One
orientation takes 9, 3.7 and 4.8 in measured products whose rate is 1 / (1 / peak + a / columns)
(aiconfigurator-core 0.12.0, data/*/gemm: fp8 with a scale for the tensor, fp8_block, nvfp4); the
second adds its writes."""
WEIGHT_BYTES = {"bf16": 2.0, "fp8": 1.0, "mxfp8": 1.03, "nvfp4": 0.56}
"""Of a weight that a product reads."""
TILE_ROWS, TILE_COLUMNS = 128, 256
"""Of the output tile of one multiprocessor, as cuBLAS and CUTLASS choose for large products."""
GROUPED_KERNEL_SHARE = 0.93
"""Of `matmul_share`'s rate, reached by one launch for the products of all experts, the half tile
that each expert fills in vain counted: on an H200, 65,536 rows of 256 experts, 2304 x 2048 and
1024 x 2304 forward, and their inputs' gradients, take 40.8 ms in seven layers, each forward twice
(benchmarks/training_speed.py, torch 2.11)."""
STREAMS = 4
"""Experts whose products run at once: Transformer Engine's grouped product is one cuBLAS call an
expert on four streams (common/gemm/cublaslt_gemm.cu)."""
ROUTED = ("routed_experts", "expert_biases")
"""Work of which the fullest device has more."""
NOT_COMPUTED = ("vision", "embedding")
"""Images are no part of a job, and a lookup is priced as nothing."""
LOSS_BYTES = 6
"""Moved for a token and vocabulary entry: logits written and read as bf16, gradient written;
besides, the log-softmax is written and read, or, in chunks, the logits are read twice."""
NONE, SELECTIVE, FULL = (RECOMPUTATION.index(n) for n in ("none", "selective", "full"))


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What a device reaches; a vendor's peak is scaled by `PEAK_SHARE`."""

    matmul: float
    """FLOP/s of the products of layers, in the job's precision."""
    bf16_matmul: float
    """FLOP/s in the compute dtype: attention, router, head."""
    attention: float
    """FLOP/s of forward attention kernels on long documents."""
    bandwidth: float
    """Bytes/s of device memory."""
    launch: float
    """Seconds a kernel launch."""
    processors: int
    """Multiprocessors that one product is spread over; 0 where unknown, so that no tail counts."""
    dtype_bytes: int
    """Of the compute dtype."""
    origins: dict[str, str]


def rates(device: Backend, precision: Precision = "bf16") -> Rates:
    """Raises InputError when the backend gives no rate for the precision."""
    compute = device.training_dtype
    wanted = DTYPE_OF[precision] if compute == "bfloat16" else compute
    for dtype in (compute, wanted):
        if dtype not in device.matmul_tflops:
            fault = f"gives no matmul rate for {dtype}"
            fix = f"known: {', '.join(device.matmul_tflops)}"
            raise InputError(f"backend {device.name}", field="matmul_tflops", fault=fault, fix=fix)

    def achievable(fact: Fact, kind: str) -> float:
        return fact.value * (PEAK_SHARE[kind] if fact.origin == "spec" else 1.0)

    matmul = device.matmul_tflops[wanted]
    bf16 = achievable(device.matmul_tflops[compute], "matmul") * 1e12
    ratio = device.attention_ratio.value if device.attention_ratio else ATTENTION_RATIO
    return Rates(
        matmul=achievable(matmul, "matmul") * 1e12,
        bf16_matmul=bf16,
        attention=ratio * bf16,
        bandwidth=achievable(device.memory_gbps, "memory") * 1e9,
        launch=device.launch_overhead_us.value * 1e-6,
        processors=int(device.processors.value) if device.processors else 0,
        dtype_bytes=2 if compute == "bfloat16" else 4,
        origins={
            "matmul": matmul.origin,
            "memory_bandwidth": device.memory_gbps.origin,
            "memory_capacity": device.memory_gib.origin,
            "launch_overhead": device.launch_overhead_us.origin,
        },
    )


@dataclass(frozen=True, kw_only=True)
class Passes:
    """Seconds of one micro-batch in one layer, recomputation counted in backward."""

    forward: Column
    backward: Column
    core: Column
    """Of forward: attention over pairs, behind which keys and values are passed on."""
    mixer: Column
    """Of forward."""
    mixer_backward: Column
    """Of backward, without what is recomputed."""


@dataclass(frozen=True, kw_only=True)
class Routed:
    """Loads of routed experts relative to an even spread, one value a row."""

    overload: Column
    """Assignments that the fullest device takes over the mean of all that were made."""
    dropped: Column
    """Share of the assignments that no expert takes."""


def routed(work: Workload, c: Candidates) -> Routed:
    """Of every row, evaluated once for equal ones."""
    few, at_rows = distinct(c, ("ep", "capacity_factor", "expert_copies", "reroute"))
    experts, routing = max(work.experts, 1), work.routing
    overload, dropped = [], []
    for i in range(len(few)):
        capacity, reroute = float(few.capacity_factor[i]), bool(few.reroute[i])
        ep, spare = int(few.ep[i]), int(few.expert_copies[i])
        load = device_overload(
            routing, experts, ep, capacity=capacity, reroute=reroute, spare=spare
        )
        overload.append(capacity if work.static_shapes and np.isfinite(capacity) else load)
        dropped.append(dropped_share(routing, experts, capacity, reroute))
    return Routed(overload=np.array(overload)[at_rows], dropped=np.array(dropped)[at_rows])


def expert_bytes(c: Candidates, size: int) -> Column:
    """Bytes of a frozen expert's parameter; `size` are those of the compute dtype."""
    stored = np.array([EXPERT_BYTES[f] for f in EXPERT_FORMATS])[c.expert_format]
    return np.where(c.expert_format == EXPERT_FORMATS.index("bf16"), float(size), stored)


def block_passes(
    kind: Kind, work: Workload, c: Candidates, known: Rates, k: Constants, load: Routed
) -> Passes:
    """Sums the parts of a layer; tensor parallelism divides each, expert parallelism none of the
    products, because every rank brings its own tokens."""
    forward = backward = again = core_seconds = mixer = mixer_back = np.zeros(len(c))
    full = work.training == "full"
    share = c.micro_batch_size / (c.cp * c.tp)
    moved_rate = known.bandwidth * k.memory_share
    for part in kind.works:
        if part.name in NOT_COMPUTED:
            continue
        once, gradient = _products(part, work, c, known, k, load)
        core = share * _core(part.core, c, known, k, LINEAR_INTENSITY)
        core_back = share * _core(part.core_backward, c, known, k, LINEAR_INTENSITY_BACKWARD)
        scale = share * known.dtype_bytes / 2 / moved_rate
        moved = scale * at(part.moved, c.sequence_length)
        moved_back = scale * at(part.moved_backward, c.sequence_length)
        if part.name in ROUTED:
            moved, moved_back = moved * load.overload, moved_back * load.overload
        ahead = once + core + moved
        back = (once + gradient if full else once) + core_back + moved_back
        forward, backward = forward + ahead, backward + back
        if part.name == "mixer":
            mixer, mixer_back = ahead, back
        again = again + moved + once / 2
        if part.core.per_pair or part.core.per_window:
            core_seconds = core_seconds + core
    if kind.visited_adapter:
        adapter = _adapters(kind, c, known, k)
        forward, backward = forward + adapter, backward + 2 * adapter
        again = again + adapter / 2
    stored = expert_bytes(c, known.dtype_bytes)
    packed = stored < known.dtype_bytes
    if kind.routed_parameters and packed.any() and not full:
        unpack = kind.routed_parameters / c.ep * (stored + known.dtype_bytes) / moved_rate
        unpack = np.where(packed, unpack, 0.0)
        forward, backward = forward + unpack, backward + unpack
        again = again + unpack / 2
    recomputed = np.where(c.recomputation == FULL, forward, 0.0)
    recomputed = np.where(c.recomputation == SELECTIVE, again, recomputed)
    return Passes(
        forward=forward,
        backward=backward + recomputed,
        core=core_seconds,
        mixer=mixer,
        mixer_backward=mixer_back,
    )


def _core(work: Work, c: Candidates, known: Rates, k: Constants, intensity: float) -> Column:
    """Seconds of one document: attention over pairs or windows, and linear attention by tokens."""
    pairs = causal(replace(work, per_token=0.0), c.sequence_length)
    tokens = work.per_token * c.sequence_length
    attention = pairs / (known.attention * k.attention_share)
    return attention + tokens / (known.bandwidth * intensity)


def _products(
    part: PartWork, work: Workload, c: Candidates, known: Rates, k: Constants, load: Routed
) -> tuple[Column, Column]:
    """Forward seconds of a part's products (the gradient of their inputs takes as long), and those
    of the gradients of the weights."""
    tokens = c.tokens / c.tp
    experts = part.name == "routed_experts"
    narrow = part.name == "router"
    rate = known.bf16_matmul if narrow else known.matmul
    rate = rate * k.matmul_share
    held, rows = 1.0, c.tokens
    if experts:
        rate = rate * (GROUPED_KERNEL_SHARE if work.grouped_kernel else k.grouped_matmul_share)
        held = work.experts / c.ep
        rows = tokens * part.visits * load.overload
    once = gradient = np.zeros(len(c))
    for gemm in part.gemms:
        columns = gemm.out_features if experts or narrow else gemm.out_features / c.tp
        if narrow:
            rows = tokens
        o, g = _product(gemm, rows, columns, held, rate, known, work, c)
        once, gradient = once + o, gradient + g
    if work.precision != "bf16" and not narrow:
        inputs = sum(g.in_features for g in part.gemms) * rows / (1.0 if experts else c.tp)
        seconds = QUANTISED_BYTES[work.precision] * inputs / known.bandwidth
        once = once + seconds
    return once, gradient


def _product(
    gemm: Gemm,
    rows: Column,
    columns: Column | float,
    held: Column | float,
    rate: Column | float,
    known: Rates,
    work: Workload,
    c: Candidates,
) -> tuple[Column, Column]:
    """The longer of arithmetic and memory traffic, forward and for the weights' gradients.

    Arithmetic: tiles of `TILE_ROWS` x `TILE_COLUMNS`, so that each of the `held` experts fills half
    a tile too much on average, and the last wave of tiles occupies the multiprocessors for half its
    time, once for every `STREAMS` experts, or once for all in one launch. Without sharded
    parameters gradients of weights are added to sums of all micro-batches.
    """
    k_size = gemm.in_features
    padded = rows + np.where(np.asarray(held) > 1, held * TILE_ROWS / 2, 0.0)
    tails = 1.0 if work.grouped_kernel else np.maximum(np.asarray(held) / STREAMS, 1.0)
    tail = tails * 0.5 * known.processors * TILE_ROWS * TILE_COLUMNS * 2.0 / rate
    arithmetic = 2.0 * padded * k_size * columns / rate
    weights = held * k_size * columns
    size = known.dtype_bytes
    stored = WEIGHT_BYTES[work.precision] * size / 2
    activations = rows * (k_size + columns) * size
    memory = (weights * stored + activations) / known.bandwidth
    once = np.maximum(arithmetic + tail * k_size, memory)
    summed = np.where(c.shard_parameters, size, 2 * work.state.gradient) * weights
    gradient = np.maximum(
        arithmetic + tail * np.minimum(rows / held, k_size),
        (activations + summed) / known.bandwidth,
    )
    return once, gradient


def _adapters(kind: Kind, c: Candidates, known: Rates, k: Constants) -> Column:
    """Forward seconds of a layer's adapters: `2 * rank * (in + out)` FLOPs a token, and `in + out`
    activations read and written, which bind."""
    tokens = c.tokens / c.tp
    arithmetic = 2 * tokens * kind.visited_adapter / (known.bf16_matmul * k.matmul_share)
    memory = known.dtype_bytes * tokens * kind.visited_width / (known.bandwidth * k.memory_share)
    return np.maximum(arithmetic, memory)


def head_seconds(work: Workload, c: Candidates, known: Rates, k: Constants) -> Column:
    """Head and loss of one micro-batch, forward and backward, in the compute dtype."""
    tokens = c.tokens
    size = known.dtype_bytes / 2
    rate = known.bf16_matmul * k.matmul_share
    once = tokens * work.head.flops / c.tp / rate
    products = 3 if work.training == "full" else 2
    moved = LOSS_BYTES + (2 if work.loss_chunk is not None else 2 * work.loss_size)
    loss = tokens * work.vocab_size / c.tp * moved * size / (known.bandwidth * k.memory_share)
    return products * once + loss
