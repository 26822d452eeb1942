"""Published rows that can be predicted: (Workload, Cluster, Candidates) and what was measured.

A row needs a model whose shape is public, a machine whose facts are known and a layout without an
unknown degree. Each row that lacks something is left out with the reason, which is counted.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass

from strategies.calibration.fit import Row
from strategies.calibration.hardware import cluster_of, device_of
from strategies.calibration.layout import Layout, Unknown, layout
from strategies.calibration.models import find_model
from strategies.calibration.published import PublishedRun, faulty, organisation, supplemented
from strategies.calibration.shapes import shape
from strategies.candidates import columns
from strategies.cluster import Cluster
from strategies.cost.compute import DTYPE_OF
from strategies.cost.routing import BALANCED, Routing
from strategies.schema import Lora
from strategies.workload import FLOAT32_STATE, MASTER_STATE, Precision, State, Workload, workload

BF16_STATE = State(weight=2.0, gradient=2.0, optimizer=4.0)
MEGATRON_STATE = State(weight=2.0, gradient=2.0, optimizer=12.0)


@dataclass(frozen=True, kw_only=True)
class Stack:
    """What a family of frameworks does that no plan says."""

    state: State = FLOAT32_STATE
    loss_size: int = 4
    lora_rank: int = 8
    """Where the row does not say; 8 is what most rows say."""
    reduces_last: bool = False
    """Of models with experts."""
    xla: bool = False


STACKS = {
    # NeMo AutoModel's benchmark recipes (examples/llm_benchmark): models are loaded in bfloat16
    # under a plain Adam, `fp32_upcast: false`, and `enable_fsdp_optimizations` keeps weights and
    # gradients of models with experts whole until the last micro-batch (moe/fsdp_mixin.py,
    # NVIDIA-NeMo/Automodel#3960).
    "automodel": Stack(state=BF16_STATE, loss_size=2, lora_rank=16, reduces_last=True),
    # Megatron-Bridge's performance recipes set `grad_reduce_in_fp32 = False`
    # (scripts/performance); 32 is its default rank.
    "megatron": Stack(state=MEGATRON_STATE, lora_rank=32),
    "fsdp2": Stack(),
    "deepspeed": Stack(state=MASTER_STATE),
    # marin compiles all blocks as one `lax.scan` and sets no flag that pipelines its collectives
    # (marin-community/marin, experiments/grug/moe_hero_fsdp: README.md and train.py).
    "jax": Stack(xla=True),
}
NATURAL = Routing(exponent=0.3)
"""Of a router that balances itself: the fullest of 64 ranks gets 1.2 to 1.35 times the mean, as
marin#7668 measured (1.21 to 1.34 on average)."""
EVERYTHING = ["attention", "routed_experts", "shared_experts", "dense", "latent_projection"]


@dataclass(frozen=True, kw_only=True)
class Case(Row):
    """One published row as the planner sees it; its source is the organisation."""

    run: PublishedRun
    layout: Layout
    out_of_memory: bool | None
    """None where nothing was said of it."""

    @property
    def bf16(self) -> bool:
        return self.work.precision == "bf16"

    @property
    def lora(self) -> bool:
        return self.work.training == "lora"

    @property
    def fsdp_ep(self) -> bool:
        """Sharded parameters with expert parallelism and no pipeline: the runtime's own layout."""
        c = self.plan
        return bool(c.shard_parameters[0] and c.ep[0] > 1 and c.pp[0] == 1)

    @property
    def comparable(self) -> bool:
        """Whether the row counts in the headline: what the table says is certain."""
        return self.run.confidence == "high"


@dataclass(frozen=True)
class Skipped:
    run: PublishedRun
    reason: str


def cases(runs: Iterable[PublishedRun]) -> tuple[list[Case], list[Skipped]]:
    """Every row that can be predicted, and why each other one can not."""
    found: list[Case] = []
    left: list[Skipped] = []
    for run in runs:
        try:
            found.append(case(supplemented(run)))
        except Unknown as e:
            left.append(Skipped(run, str(e)))
    return found, left


def case(run: PublishedRun) -> Case:
    """Raises Unknown with the reason when the row does not say enough."""
    if run.kind not in ("train_step", "memory"):
        raise Unknown(f"no training run: {run.kind}")
    if run.confidence == "low":
        raise Unknown("low confidence")
    if reason := faulty(run):
        raise Unknown(reason)
    named = find_model(run.model)
    if named is None:
        raise Unknown("the model's shape is not public, or not described here")
    if named.towers:
        raise Unknown("images or sound are part of the run")
    if device_of(run.gpu) is None or "power limited" in run.gpu.lower():
        raise Unknown("the device's facts are not known")
    analysis = shape(named.shape)
    found = layout(run, experts=analysis.experts is not None)
    cluster = cluster_of(run.gpu, found.devices)
    if cluster is None:
        raise Unknown("the devices make no whole nodes or racks")
    precision = _precision(run, cluster)
    work = _workload(named.shape, run, found.family, precision)
    if work.experts and work.experts % found.columns["ep"]:
        raise Unknown("expert parallelism does not divide the experts")
    seconds = _seconds(run, found)
    failed = _out_of_memory(run, found)
    peak = _peak(run, found)
    if seconds is None and peak is None and failed is None:
        raise Unknown("nothing measured that a plan predicts")
    return Case(
        run=run,
        source=organisation(run),
        work=work,
        cluster=cluster,
        plan=columns(**found.columns),
        layout=found,
        seconds=seconds,
        peak_gib=peak,
        whole_device="nvidia-smi" in run.notes,
        out_of_memory=failed,
    )


def _workload(name: str, run: PublishedRun, family: str, precision: Precision) -> Workload:
    if run.task.startswith("lora"):
        match = re.search(r"r(?:ank)? ?=? ?(\d+)", run.task) or re.search(
            r"rank (\d+)|\br(\d+)\b", run.notes
        )
        rank = int(next(g for g in match.groups() if g)) if match else 0
        return _made(name, precision, family, routing(run), rank or STACKS[family].lora_rank)
    if run.task in ("pretrain", "sft"):
        return _made(name, precision, family, routing(run))
    raise Unknown("the task is not stated" if not run.task else f"no known task: {run.task}")


@functools.cache
def _made(
    name: str, precision: Precision, family: str, spread: Routing, rank: int | None = None
) -> Workload:
    """Of LoRA of a rank, or of full fine-tuning."""
    analysis, stack = shape(name), STACKS[family]
    lora = Lora(rank=rank, targets=EVERYTHING) if rank else Lora()  # type: ignore[arg-type]
    return workload(
        analysis,
        lora,
        training="lora" if rank else "full",
        precision=precision,
        state=FLOAT32_STATE if rank else stack.state,
        loss_size=stack.loss_size,
        prefetch=not stack.xla,
        static_shapes=stack.xla,
        reduces_last=stack.reduces_last and analysis.experts is not None,
        fused_experts=True,
        routing=spread,
    )


def routing(run: PublishedRun) -> Routing:
    """Balanced where a benchmark forces it or limits the capacity to it, and where a table of
    benchmarks on mock data says nothing."""
    said = run.routing.lower()
    if "natural" in said or "learned" in said:
        return NATURAL
    if said.startswith("fake_balanced_gate"):
        return Routing(consecutive=True)
    if match := re.match(r"power_law_([\d.]+)", said):
        return Routing(exponent=float(match[1]) - 1)
    return BALANCED


def _precision(run: PublishedRun, cluster: Cluster) -> Precision:
    text = run.precision.lower().split("(")[0].strip()
    found: Precision | None = None
    if text in ("bf16", "bfloat16", "half"):
        found = "bf16"
    elif text.startswith(("mxfp8", "fp8-mx", "fp8_mx")):
        found = "mxfp8"
    elif text in ("nvfp4", "fp4"):
        found = "nvfp4"
    elif text.startswith("fp8") and "wire" not in text:
        found = "fp8"
    if found is None:
        raise Unknown(f"no known precision: {run.precision or 'not stated'}")
    if DTYPE_OF[found] not in cluster.device.matmul_tflops:
        raise Unknown(f"no rate of the device for {found}")
    return found


def _seconds(run: PublishedRun, found: Layout) -> float | None:
    """The printed step time; else that of the printed tokens a second."""
    if run.kind != "train_step":
        return None
    if run.step_time_s:
        return run.step_time_s
    if run.tokens_per_s_per_gpu:
        c = found.columns
        tokens = c["micro_batch_size"] * c["sequence_length"] * c["gradient_accumulation"]
        ranks = c["dp_replicate"] * c["fsdp"] // c["cp"]
        return tokens * ranks / (run.tokens_per_s_per_gpu * found.devices)
    return None


def _peak(run: PublishedRun, found: Layout) -> float | None:
    """A measured peak of a run whose recomputation is known; that of XLA's plan is no measurement
    of this kind of framework."""
    if run.peak_mem_gib is None or found.family == "jax" or not found.recomputation_known:
        return None
    if re.search(r"resident|extrapolated", f"{run.unit} {run.notes}"):
        return None
    return run.peak_mem_gib


def _out_of_memory(run: PublishedRun, found: Layout) -> bool | None:
    """What the row says of memory: that it ran out, or that the run went through (with which
    recomputation, where a pass is to say something). XLA lays out memory in its own way."""
    if found.family == "jax":
        return None
    said = f"{run.outcome}; {run.notes}"
    if re.match(r"OOM", run.outcome) or re.search(r"result: OOM|^OOM\b|; OOM after", run.notes):
        return "timeout" not in said
    if run.outcome.startswith("ok") or re.search(r"result: (max-)?fit", run.notes):
        return False
    ran = run.step_time_s or run.tokens_per_s_per_gpu or run.peak_mem_gib
    return False if ran and found.recomputation_known else None
