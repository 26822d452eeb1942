"""Every plan that could be, as columns: layouts of the devices times the settings of each.

The space is walked in three steps, so that it never lies in memory at once: `layouts` (all of
them: 87,644 for Kimi K3 on 102,400 devices), `stems` (a layout with its batch, pipeline schedule,
recomputation and expert format) and `leaves` (a stem with its resharding, dispatcher, capacity and
offloading). Bounds are taken at stems, costs at leaves.

Axes lie on the devices, and so on the tiers, in one of four orders. Tensor parallelism is
innermost; then expert parallelism with its shards around it, or the shards with expert parallelism
around them; then replicas with pipeline stages around them, or the other way round.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from analyzers.schema import ModelAnalysis
from strategies.candidates import (
    DISPATCHERS,
    EXPERT_FORMATS,
    RECOMPUTATION,
    Candidates,
    Column,
    columns,
)
from strategies.cluster import Cluster
from strategies.schema import Job

FEATURES: Mapping[str, str] = {
    "pp": "pipeline parallelism",
    "tp": "tensor parallelism",
    "cp": "context parallelism",
    "selective": "selective recomputation",
    "hierarchical": "hierarchical dispatch",
    "capacity": "a limit on the tokens of an expert",
    "copies": "copies of the most loaded experts",
    "mapping": "shards of experts on neighbouring devices",
    "packed_experts": "experts held packed",
    "offload": "optimizer states in host memory",
}
"""What is priced, and used where it is allowed, in words."""
RUN = frozenset({"hierarchical", "capacity", "copies", "selective"})
"""What of these the runtime runs, and none of it unasked: two change where tokens are computed,
capacity also by which experts, and no run has measured what selective recomputation is priced."""

MICRO_BATCHES = (1, 2, 4, 8, 16)
"""Tried where the global batch does not decide."""
MAX_MICRO_BATCH = 64
"""Of those that divide the global batch."""
ROUNDS = 4
"""Micro-batches of a pipeline for each of its stages, where the global batch does not decide."""
VIRTUAL_STAGES = (1, 2, 4)
CAPACITIES = ((math.inf, False), (2.0, True), (1.5, True), (1.25, True))
"""Factor, and whether what exceeds it is rerouted: a plan never drops tokens to be faster."""
EXPERT_COPIES = (0, 1, 2, 4)
PACKED = EXPERT_FORMATS.index("mxfp4")
"""This format and those after it are packed."""
LAYOUT = ("pp", "dp_replicate", "fsdp", "tp", "cp", "ep")


@dataclass(frozen=True, kw_only=True)
class Model:
    """What of a model decides which layouts there are."""

    layers: int
    experts: int
    """0 for a dense model."""
    heads: int
    """Greatest common divisor of the heads and key-value heads of all mixers; 1 where a mixer does
    not say, which rules tensor parallelism out."""
    packed_format: str | None
    """How the checkpoint packs its experts, if it does and they may stay so."""


def model_of(analysis: ModelAnalysis) -> Model:
    heads = 0
    for block in analysis.blocks:
        named = [block.mixer_attributes.get(k) for k in ("heads", "kv_heads", "value_heads")]
        known = [n for n in named if isinstance(n, int)]
        heads = math.gcd(heads, *known) if known else 1
    packed = analysis.experts.weight_format if analysis.experts else None
    return Model(
        layers=sum(len(b.layers) for b in analysis.blocks),
        experts=analysis.experts.count if analysis.experts else 0,
        heads=max(heads, 1),
        packed_format=packed if packed in ("mxfp4", "fp8") else None,
    )


@dataclass(frozen=True, kw_only=True)
class Space:
    layouts: Candidates
    """One row a layout, everything else at its default."""
    stem_options: Mapping[str, Column]
    leaf_options: Mapping[str, Column]
    rejected: Counter[str]
    """Reason -> layouts left out."""
    model: Model
    global_batch_size: int | None
    node: int
    """Devices of the first tier."""

    @property
    def evens(self) -> bool:
        """Whether leaves even out the load of experts, by capacity or copies: then bounds that know
        stems alone must take it as even."""
        options = self.leaf_options
        return bool(options["reroute"].any() or options["expert_copies"].any())

    def branches(self, layouts: slice) -> tuple[Column, Column]:
        """Stems of some layouts: rows of `layouts` and of `stem_options`."""
        rows, picks = np.nonzero(self._may_grow(self.layouts.take(layouts)))
        return rows + (layouts.start or 0), picks

    def stems(self, rows: Column, picks: Column) -> Candidates:
        """Layouts with their batch, schedule, recomputation and expert format."""
        chosen = {name: column[picks] for name, column in self.stem_options.items()}
        made = replace(self.layouts.take(rows), **chosen)
        if self.global_batch_size is None:
            steps = np.where(made.pp > 1, made.pp * ROUNDS, 1)
        else:
            steps = self.global_batch_size // (made.data_ranks * made.micro_batch_size)
        return replace(made, gradient_accumulation=steps)

    def leaves(self, stems: Candidates) -> Candidates:
        """Each stem with every setting that is left."""
        rows, picks = np.nonzero(self._may_end(stems))
        chosen = {name: column[picks] for name, column in self.leaf_options.items()}
        return replace(stems.take(rows), **chosen)

    def leaf_counts(self) -> Column:
        """Leaves of each stem of a layout."""
        return self._may_end(self.layouts).sum(axis=1)

    def count(self) -> int:
        """Plans of the whole space, counted without making them."""
        return int((self._may_grow(self.layouts).sum(axis=1) * self.leaf_counts()).sum())

    def _may_grow(self, c: Candidates) -> Column:
        """Which options (columns) each layout (rows) may take."""
        options = self.stem_options
        pp, stages = c.pp[:, None], options["virtual_stages"]
        valid = (stages == 1) | (pp > 1) & (pp * stages <= self.model.layers)
        both = (c.ep > 1) & (c.efsdp > 1)
        valid = valid & (~options["shards_inside"] | both[:, None])
        if self.global_batch_size is not None:
            sequences = c.data_ranks[:, None] * options["micro_batch_size"]
            steps = self.global_batch_size // sequences
            valid &= sequences * steps == self.global_batch_size
            # An interleaved schedule takes its micro-batches in rounds of one a stage.
            valid &= (stages == 1) | (steps % pp == 0)
        return valid

    def _may_end(self, c: Candidates) -> Column:
        options = self.leaf_options
        ep, dispatcher = c.ep[:, None], options["dispatcher"]
        valid = (dispatcher == DISPATCHERS.index("none")) == (ep == 1)
        # Within a node there is one stage of exchange: `all_to_all` by another name.
        valid &= (dispatcher != DISPATCHERS.index("hierarchical")) | (ep > self.node)
        valid &= options["reshard_after_forward"] | (c.fsdp[:, None] > 1)
        uneven = np.isfinite(options["capacity_factor"]) | (options["expert_copies"] > 0)
        valid &= ~uneven | (ep > 1)
        valid &= ~options["replicas_outside"] | ((c.pp > 1) & (c.dp_replicate > 1))[:, None]
        return valid


def make_space(
    model: Model,
    cluster: Cluster,
    job: Job,
    *,
    fixed: Mapping[str, int] | None = None,
    allow: Collection[str] = (),
    require: str | None = None,
) -> Space:
    """All plans of `job` on every device of `cluster`.

    `allow` names FEATURES; without any, the space holds what the runtime can run. `require` keeps
    only plans that use that one. `fixed` keeps one value of an axis or of `micro_batch_size`.
    """
    fixed, rejected = dict(fixed or {}), Counter()
    allow = {*allow, *([require] if require else [])}
    layouts = _layouts(model, cluster.world_size, job.sequence_length, allow, rejected)
    kept = np.ones(len(layouts), bool)
    for key, value in fixed.items():
        if key != "micro_batch_size":
            kept &= getattr(layouts, key) == value
    if not kept.all():
        rejected["not the parallelism asked for"] += int((~kept).sum())
    if require in ("pp", "tp", "cp"):
        kept &= getattr(layouts, require) > 1
    float32 = cluster.device.training_dtype == "float32"
    made = Space(
        layouts=layouts.take(kept),
        stem_options=_stem_options(model, job, float32, fixed, allow, require),
        leaf_options=_leaf_options(allow, require),
        rejected=rejected,
        model=model,
        global_batch_size=job.global_batch_size,
        node=cluster.devices_per_node,
    )
    if job.global_batch_size is not None:
        splits = made._may_grow(made.layouts).any(axis=1)
        if not splits.all():
            reason = f"global batch of {job.global_batch_size} sequences does not split"
            rejected[reason] += int((~splits).sum())
            made = replace(made, layouts=made.layouts.take(splits))
    return made


def _stem_options(
    model: Model,
    job: Job,
    float32: bool,
    fixed: Mapping[str, int],
    allow: Collection[str],
    require: str | None,
) -> dict[str, Column]:
    formats = ["fp32" if float32 else "bf16"]
    if "packed_experts" in allow and model.packed_format and not float32:
        formats.append(model.packed_format)
    if require == "packed_experts":
        formats = formats[1:]
    step = job.global_batch_size
    if "micro_batch_size" in fixed:
        sizes: Sequence[int] = (fixed["micro_batch_size"],)
    elif step is None:
        sizes = MICRO_BATCHES
    else:
        sizes = [n for n in range(1, MAX_MICRO_BATCH + 1) if step % n == 0]
    return _table(
        micro_batch_size=sizes,
        virtual_stages=VIRTUAL_STAGES if "pp" in allow else (1,),
        recomputation=_codes(RECOMPUTATION, "selective", allow, require),
        expert_format=[EXPERT_FORMATS.index(name) for name in formats],
        shards_inside=_bools("mapping", allow, require),
    )


def _leaf_options(allow: Collection[str], require: str | None) -> dict[str, Column]:
    def of(feature: str, values: Sequence) -> Sequence:
        if require == feature:
            return values[1:]
        return values if feature in allow else values[:1]

    options = _table(
        reshard_after_forward=(True, False),
        dispatcher=_codes(DISPATCHERS, "hierarchical", allow, require),
        capacity=of("capacity", range(len(CAPACITIES))),
        expert_copies=of("copies", EXPERT_COPIES),
        offload=of("offload", (False, True)),
        replicas_outside=(False, True) if "pp" in allow else (False,),
    )
    chosen = options.pop("capacity")
    factors, reroutes = (np.array(column) for column in zip(*CAPACITIES, strict=True))
    return options | {"capacity_factor": factors[chosen], "reroute": reroutes[chosen]}


def _bools(feature: str, allow: Collection[str], require: str | None) -> tuple[bool, ...]:
    if require == feature:
        return (True,)
    return (False, True) if feature in allow else (False,)


def _codes(
    names: tuple[str, ...], extra: str, allow: Collection[str], require: str | None
) -> list[int]:
    """Indices of names; `extra` only where it is allowed, and alone where it is required."""
    if require == extra:
        return [names.index(extra)]
    return [i for i, name in enumerate(names) if name != extra or extra in allow]


def _layouts(
    model: Model,
    devices: int,
    sequence_length: int,
    allow: Collection[str],
    rejected: Counter[str],
) -> Candidates:
    """pp * dp_replicate * fsdp * tp = devices; cp divides fsdp, ep divides fsdp * tp."""
    blocks: list[np.ndarray] = []
    for tp in divisors(devices) if "tp" in allow else [1]:
        if model.heads % tp:
            rejected[f"tensor parallelism does not divide {model.heads} heads"] += 1
            continue
        for pp in divisors(devices // tp) if "pp" in allow else [1]:
            if pp > model.layers:
                rejected[f"more pipeline stages than {model.layers} layers"] += 1
                continue
            left = devices // tp // pp
            for fsdp in divisors(left):
                eps = _experts_over(fsdp * tp, model.experts, rejected)
                cps = [1]
                if "cp" in allow:
                    # Two chunks a rank balance a causal mask.
                    cps = [n for n in divisors(fsdp) if n == 1 or sequence_length % (2 * n) == 0]
                cp, ep = (a.ravel() for a in np.meshgrid(cps, eps, indexing="ij"))
                block = np.empty((len(LAYOUT), len(cp)), np.int64)
                block[:] = np.array([pp, left // fsdp, fsdp, tp, 0, 0])[:, None]
                block[4], block[5] = cp, ep
                blocks.append(block)
    made = np.concatenate(blocks, axis=1)
    return columns(**dict(zip(LAYOUT, made, strict=True)), sequence_length=sequence_length)


def _experts_over(ranks: int, experts: int, rejected: Counter[str]) -> list[int]:
    if not experts:
        return [1]
    possible = divisors(ranks)
    kept = [n for n in possible if experts % n == 0]
    if len(kept) < len(possible):
        reason = f"expert parallelism does not divide {experts} experts"
        rejected[reason] += len(possible) - len(kept)
    return kept


def features_of(c: Candidates) -> dict[str, Column]:
    """Feature -> which rows need it; a row that needs none can be run."""
    return {
        "pp": c.pp > 1,
        "tp": c.tp > 1,
        "cp": c.cp > 1,
        "selective": c.recomputation == RECOMPUTATION.index("selective"),
        "hierarchical": c.dispatcher == DISPATCHERS.index("hierarchical"),
        "capacity": np.isfinite(c.capacity_factor),
        "copies": c.expert_copies > 0,
        "packed_experts": c.expert_format >= PACKED,
        "offload": c.offload,
        "mapping": c.shards_inside,
    }


def _table(**options: Sequence) -> dict[str, Column]:
    """The product of the options as columns."""
    rows = list(product(*options.values()))
    return {name: np.array([row[i] for row in rows]) for i, name in enumerate(options)}


def divisors(n: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})
