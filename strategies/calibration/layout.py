"""The layout of a published run as columns of `Candidates`, read strictly.

What a table leaves open is unknown, never one, unless something else of the row fixes it: the
degrees that it gives already make up all devices, its model has no experts, or it is a launch
script, where a flag that is not there is at its default of one.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field

from strategies.calibration.published import PublishedRun
from strategies.candidates import DISPATCHERS, RECOMPUTATION


class Unknown(Exception):
    """Why a row cannot be predicted."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    family: str
    """Of frameworks that lay out and keep state alike."""
    devices: int
    columns: dict = field(default_factory=dict)
    recomputation_known: bool


FAMILIES = (
    ("automodel", r"automodel"),
    ("jax", r"levanter|jax|maxtext"),
    ("deepspeed", r"deepspeed|zero-?[23]"),
    ("megatron", r"megatron|primus|miles|nemo|mcore|mindspeed"),
    ("fsdp2", r"torchtitan|fsdp2?\b|veomni|xtuner|transformers|trl"),
)


def layout(run: PublishedRun, *, experts: bool) -> Layout:
    """Raises Unknown when a degree, the batch or the sequence is not known or does not add up.

    `experts`: whether the model has any.
    """
    family = _family(run)
    if "SHARES one batch" in run.dispatcher:
        raise Unknown("its expert-parallel group shares one batch: no dispatch of tokens")
    if re.search(r"clone|echo", run.balancer, re.IGNORECASE):
        raise Unknown("experts are copied to other devices while it runs")
    devices = run.num_gpus or _never("the number of devices is not stated")
    sequence = run.seq_len or _never("the sequence length is not stated")
    if _script(run) and "packing" not in run.notes.lower():
        raise Unknown("its sequences are shorter than the length that is stated")
    tp, pp, cp = _degrees(run, devices)
    if devices % (tp * pp * cp):
        raise Unknown("the degrees do not divide the devices")
    if sequence % cp:
        raise Unknown("context parallelism does not divide the sequence")
    if (run.etp or 1) > 1:
        raise Unknown("experts are split by tensor parallelism")
    ep = _expert_parallel(run, experts)
    fsdp, sharded = _shards(run, family, devices // (pp * tp), cp, ep)
    if fsdp * tp % ep:
        raise Unknown("expert parallelism does not divide the shards")
    ranks = devices // (tp * pp * cp)
    micro_batch, accumulation = _batch(run, family, ranks, pp)
    recomputation, known = _recomputation(run)
    return Layout(
        family=family,
        devices=devices,
        recomputation_known=known,
        columns={
            "pp": pp,
            "dp_replicate": devices // (pp * tp * fsdp),
            "fsdp": fsdp,
            "tp": tp,
            "cp": cp,
            "ep": ep,
            "virtual_stages": _virtual_stages(run, pp),
            "micro_batch_size": micro_batch,
            "gradient_accumulation": accumulation,
            "sequence_length": sequence,
            "recomputation": RECOMPUTATION.index(recomputation),
            "reshard_after_forward": "reshard_after_forward=false" not in run.notes,
            "shard_parameters": sharded,
            "dispatcher": DISPATCHERS.index(_dispatcher(run, ep)),
            "capacity_factor": _capacity(run),
            "reroute": "spill" in run.balancer,
            "offload": "offload" in run.notes and "optimizer" in run.notes,
        },
    )


def _script(run: PublishedRun) -> bool:
    """Of fine-tuning on real data: lengths are limits unless documents are packed."""
    return bool(re.search(r"\.sh\b", run.source)) and run.task != "pretrain"


def _never(reason: str) -> int:
    raise Unknown(reason)


def _family(run: PublishedRun) -> str:
    text = run.framework.lower()
    found = next((name for name, pattern in FAMILIES if re.search(pattern, text)), None)
    if found is None:
        raise Unknown(f"no known framework: {run.framework or 'not stated'}")
    return found


def _shard_number(run: PublishedRun) -> int | None:
    return int(run.fsdp_shard) if run.fsdp_shard.isdigit() and run.fsdp_shard != "0" else None


def _degrees(run: PublishedRun, devices: int) -> tuple[int, int, int]:
    """tp, pp and cp. The label `no PP/TP` counts as one each."""
    said = {"tp": run.tp, "pp": run.pp, "cp": run.cp}
    if "no PP/TP" in run.framework:
        said["tp"], said["pp"] = said["tp"] or 1, said["pp"] or 1
    product = math.prod(v for v in said.values() if v)
    ranks = run.dp or _shard_number(run) or 1
    if run.gbs and run.local_bs and (run.ga or 1) == 1 and run.gbs % run.local_bs == 0:
        ranks = max(ranks, run.gbs // run.local_bs)
    if product * ranks == devices or _script(run):
        said = {name: v or 1 for name, v in said.items()}
    for name, value in said.items():
        if value is None:
            raise Unknown(f"{name} is not stated")
    return said["tp"] or 1, said["pp"] or 1, said["cp"] or 1


def _expert_parallel(run: PublishedRun, experts: bool) -> int:
    if not experts:
        return 1
    return run.ep or _never("ep is not stated")


def _shards(run: PublishedRun, family: str, ranks: int, cp: int, ep: int) -> tuple[int, bool]:
    """Shards of a replica, and whether parameters are sharded too.

    `ranks` share a stage and a tensor-parallel rank. Megatron shards optimizer states over all of
    them (its distributed optimizer) unless its own FSDP is on. FSDP2 shards over all where a table
    does not say; the shards that it says are without context parallelism, which shards as well.
    """
    said = run.fsdp_shard.lower()
    if match := re.fullmatch(r"ep_shard(\d+)", said):
        if int(match[1]) * ep != ranks:
            raise Unknown("the shards of experts do not make up the devices")
        return ranks, True
    if family == "megatron":
        number = _shard_number(run)
        if number is None and said not in ("on", "yes"):
            return ranks, "fsdp" in run.framework.lower()
        return (ranks if number is None else _whole(number, cp, ranks)), True
    if family == "deepspeed":
        return ranks, bool(re.search(r"zero-?3", run.framework.lower()))
    if family == "jax" and ep == 1 and _shard_number(run) is None:
        # Its runs without expert parallelism replicate or shard as a mesh says that is not printed.
        raise Unknown("the number of shards is not stated")
    if said == "no":
        return ranks, False
    number = _shard_number(run)
    return (ranks if number is None else _whole(number, cp, ranks)), True


def _whole(number: int, cp: int, ranks: int) -> int:
    shards = number * cp if ranks % (number * cp) == 0 else number
    if ranks % shards or shards % cp:
        raise Unknown("the shards do not divide the devices")
    return shards


def _batch(run: PublishedRun, family: str, ranks: int, pp: int) -> tuple[int, int]:
    """Sequences of a micro-batch and micro-batches a step."""
    micro_batch = run.mbs or (run.local_bs if pp == 1 else None)
    if micro_batch is None:
        raise Unknown("the micro-batch is not stated")
    if run.gbs is None:
        if run.ga or (run.local_bs == micro_batch and family != "megatron"):
            return micro_batch, run.ga or 1
        raise Unknown("the global batch is not stated")
    if run.gbs % (ranks * micro_batch):
        raise Unknown("the global batch does not divide into micro-batches")
    return micro_batch, run.gbs // (ranks * micro_batch)


def _virtual_stages(run: PublishedRun, pp: int) -> int:
    if pp == 1:
        return 1
    return run.vpp or _never("virtual stages are not stated")


def _recomputation(run: PublishedRun) -> tuple[str, bool]:
    """Taken as none where a table does not say, which costs a few percent of time; a peak is then
    not compared."""
    said = run.recompute.lower()
    if not said:
        return "none", False
    if said.startswith(("activation_checkpointing", "full")):
        return "full", True
    if said in ("none", "selective:none"):
        return "none", True
    return "selective", True


def _capacity(run: PublishedRun) -> float:
    """None is set where none is stated, except that an exchange of fixed size has one."""
    if run.capacity_factor is None and re.search(r"\bfixed\b", run.dispatcher.lower()):
        raise Unknown("the capacity of its fixed exchange is not stated")
    return run.capacity_factor or math.inf


def _dispatcher(run: PublishedRun, ep: int) -> str:
    """DeepEP and HybridEP send a token once to each node; it is what NVIDIA's recipes use where
    they do not say."""
    said = run.dispatcher.lower()
    if ep == 1 or said.startswith("none"):
        return "none"
    if "ag/rs" in said or "all_gather" in said or "allgather" in said:
        return "all_gather"
    hierarchical = re.search(r"deepep|hybridep|uccl", said) or (
        not said and re.search(r"megatron-bridge|automodel", run.framework.lower())
    )
    return "hierarchical" if hierarchical else "all_to_all"
