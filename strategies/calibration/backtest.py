"""The cost model held against published runs: each organisation is predicted from the others.

A source is the organisation that published, not the file: NVIDIA's NeMo repositories, Megatron-LM
and the Megatron-MoE-ModelZoo of its team are one (`published.ORGANISATIONS`).
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from strategies.calibration.cases import Case
from strategies.calibration.fit import Range, Table, fit
from strategies.cost.constants import Constants, Deviations, load_deviations
from strategies.pricing import FOUR_IN_FIVE

ENOUGH = 5
"""Comparable rows from which a rank correlation is worth a number."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    case: Case
    seconds: float
    peak_gib: float
    """As the row's memory was counted."""
    oom_probability: float
    deviations: Deviations = field(default_factory=load_deviations)
    """Of the interval that is held against the row."""

    @property
    def step_time_error(self) -> float | None:
        measured = self.case.seconds
        return None if measured is None else self.seconds / measured - 1

    @property
    def peak_memory_error(self) -> float | None:
        measured = self.case.peak_gib
        return None if measured is None else self.peak_gib / measured - 1

    @property
    def step_time_inside(self) -> bool | None:
        """Whether the measured time lies in the interval of the predicted one."""
        error = self.step_time_error
        if error is None:
            return None
        return abs(np.log1p(error)) <= FOUR_IN_FIVE * self.deviations.seconds

    @property
    def peak_memory_inside(self) -> bool | None:
        if self.case.peak_gib is None:
            return None
        reach = FOUR_IN_FIVE * self.deviations.peak * self.peak_gib
        return abs(self.peak_gib - self.case.peak_gib) <= reach


@dataclass(frozen=True, kw_only=True)
class Score:
    """Of a set of predictions; None where no row says anything of it."""

    rows: int
    step_time_rows: int
    step_time_median_error: float | None
    step_time_p90_error: float | None
    step_time_bias: float | None
    """Median of the signed error."""
    step_time_inside: float | None
    """Share of the rows that lie in their interval: that which a plan would print if its width had
    been set by the other sources alone."""
    peak_memory_rows: int
    peak_memory_median_error: float | None
    peak_memory_p90_error: float | None
    peak_memory_bias: float | None
    peak_memory_inside: float | None
    rank_correlation: float | None
    """Spearman's of predicted and measured step times of plans."""
    throughput_rank_correlation: float | None
    """Spearman's of predicted and measured seconds a token and device: the harder question, since
    the size of a step says nothing."""
    oom_accuracy: float | None
    oom_right: int
    oom_rows: int
    """Rows that ran out of memory, and how many of them are predicted to."""
    ran_right: int
    ran_rows: int
    """Rows that ran, and how many of them are predicted to."""


@dataclass(frozen=True, kw_only=True)
class Backtest:
    predictions: list[Prediction]
    constants: dict[str, Constants]
    """By the organisation that was held out."""
    skipped: dict[str, int] = field(default_factory=dict)


def predict(cases: Sequence[Case], constants: Constants) -> list[Prediction]:
    table = Table(cases)
    (found,) = table.costs([constants])
    return [
        Prediction(
            case=case,
            seconds=float(found.seconds[i]),
            peak_gib=float(found.peak_gib[i]),
            oom_probability=float(found.oom_probability[i]),
        )
        for i, case in enumerate(cases)
    ]


def leave_one_out(
    cases: Sequence[Case],
    ranges: dict[str, Range],
    training: Sequence[Case] | None = None,
) -> tuple[list[Prediction], dict[str, Constants]]:
    """Predicts each organisation's cases with constants fitted to all others of `training`.

    Without it to all others of the cases; the width of its intervals is then what these others
    show, each predicted from the rest of them. With it intervals are as wide as those of a plan.
    """
    learned = list(cases if training is None else training)
    found: list[Prediction] = []
    constants: dict[str, Constants] = {}
    to_all: Constants | None = None
    for name in dict.fromkeys(c.source for c in cases):
        others = [c for c in learned if c.source != name]
        if len(others) < len(learned):
            constants[name] = fit(Table(others), ranges)
        else:
            # Nothing of a new source is among them: one fit does for all new ones.
            constants[name] = to_all = to_all or fit(Table(others), ranges)
        found += predict([c for c in cases if c.source == name], constants[name])
    if training is None:
        for name in constants:
            others = [c for c in cases if c.source != name]
            width = deviations(leave_one_out(others, ranges, training=others)[0])
            found = [
                dataclasses.replace(p, deviations=width) if p.case.source == name else p
                for p in found
            ]
    order = {id(c): i for i, c in enumerate(cases)}
    return sorted(found, key=lambda p: order[id(p.case)]), constants


def deviations(predictions: Sequence[Prediction]) -> Deviations:
    """Those whose intervals hold four of five of these rows: 80th percentiles of the errors, so
    that nothing is assumed of their distribution but that it is even-sided."""
    time = [abs(np.log1p(p.step_time_error)) for p in predictions if p.step_time_error is not None]
    peak = [
        abs(p.case.peak_gib / p.peak_gib - 1) for p in predictions if p.case.peak_gib is not None
    ]
    known = Deviations()
    return Deviations(
        seconds=float(np.quantile(time, 0.8)) / FOUR_IN_FIVE if time else known.seconds,
        peak=float(np.quantile(peak, 0.8)) / FOUR_IN_FIVE if peak else known.peak,
    )


def score(predictions: Iterable[Prediction]) -> Score:
    rows = list(predictions)
    time = _errors(p.step_time_error for p in rows)
    memory = _errors(p.peak_memory_error for p in rows)
    plans = _plans(rows)
    failed = [p for p in rows if p.case.out_of_memory is True]
    ran = [p for p in rows if p.case.out_of_memory is False]
    failed_right = sum(p.oom_probability > 0.5 for p in failed)
    ran_right = sum(p.oom_probability <= 0.5 for p in ran)
    judged = len(failed) + len(ran)
    return Score(
        rows=len(rows),
        step_time_rows=len(time),
        step_time_median_error=_quantile(np.abs(time), 0.5),
        step_time_p90_error=_quantile(np.abs(time), 0.9),
        step_time_bias=_quantile(time, 0.5),
        step_time_inside=_share(p.step_time_inside for p in rows),
        peak_memory_rows=len(memory),
        peak_memory_median_error=_quantile(np.abs(memory), 0.5),
        peak_memory_p90_error=_quantile(np.abs(memory), 0.9),
        peak_memory_bias=_quantile(memory, 0.5),
        peak_memory_inside=_share(p.peak_memory_inside for p in rows),
        rank_correlation=spearman([(p, m) for p, m, _ in plans]),
        throughput_rank_correlation=spearman([(p * each, m * each) for p, m, each in plans]),
        oom_accuracy=(failed_right + ran_right) / judged if judged else None,
        oom_right=failed_right,
        oom_rows=len(failed),
        ran_right=ran_right,
        ran_rows=len(ran),
    )


def by_source(predictions: Sequence[Prediction]) -> dict[str, list[Prediction]]:
    """Largest first."""
    groups: dict[str, list[Prediction]] = defaultdict(list)
    for p in predictions:
        groups[p.case.source].append(p)
    return dict(sorted(groups.items(), key=lambda item: -len(item[1])))


VIEWS = {
    "all rows": lambda c: True,
    "confidence high": lambda c: c.comparable,
    "confidence high, bf16": lambda c: c.comparable and c.bf16,
    "bf16": lambda c: c.bf16,
    "8 and 4 bits": lambda c: not c.bf16,
    "FSDP and EP": lambda c: c.fsdp_ep,
    "LoRA": lambda c: c.lora,
}
"""Cuts through the rows that are reported apart."""


def as_data(result: Backtest) -> dict:
    """For `--json`. `overall` counts the rows of confidence high, the others are in `views`."""
    views = {
        name: dataclasses.asdict(score(p for p in result.predictions if keep(p.case)))
        for name, keep in VIEWS.items()
    }
    return {
        "overall": _headline(result.predictions),
        "sources": {
            name: dataclasses.asdict(score(rows))
            for name, rows in by_source(result.predictions).items()
        },
        "views": views,
        "constants_by_held_out_source": {
            name: dataclasses.asdict(k) for name, k in result.constants.items()
        },
        "skipped": result.skipped,
        "predictions": [
            {
                "id": p.case.run.id,
                "source": p.case.source,
                "model": p.case.run.model,
                "gpu": p.case.run.gpu,
                "step_time_s": p.case.seconds,
                "predicted_step_time_s": p.seconds,
                "peak_mem_gib": p.case.peak_gib,
                "predicted_peak_mem_gib": p.peak_gib,
                "out_of_memory": p.case.out_of_memory,
                "oom_probability": p.oom_probability,
            }
            for p in result.predictions
        ],
    }


def _headline(predictions: Sequence[Prediction]) -> dict:
    """Rows of confidence high where there are any; else all. The rank correlation is the median of
    the sources' own with enough rows: between sources ranks compare nothing."""
    rows = [p for p in predictions if p.case.comparable] or list(predictions)
    found = dataclasses.asdict(score(rows))
    within = [score(r).rank_correlation for r in by_source(rows).values()]
    known = [r for r in within if r is not None]
    found["rank_correlation"] = float(np.median(known)) if known else None
    return found


def counted(reasons: Iterable[str]) -> dict[str, int]:
    return dict(Counter(reasons).most_common())


def _errors(values: Iterable[float | None]) -> np.ndarray:
    return np.array([v for v in values if v is not None], dtype=float)


def _share(values: Iterable[bool | None]) -> float | None:
    known = [v for v in values if v is not None]
    return sum(known) / len(known) if known else None


def _quantile(values: np.ndarray, share: float) -> float | None:
    return float(np.quantile(values, share)) if len(values) else None


def _plans(rows: Sequence[Prediction]) -> list[tuple[float, float, float]]:
    """Predicted and measured seconds of each plan and 1 / (its tokens a device).

    Rows that differ in what is no part of a plan (software versions, variants of a kernel) are one
    plan, measured by their median: no planner can rank them.
    """
    groups: dict[tuple, list[Prediction]] = defaultdict(list)
    for p in rows:
        if p.case.seconds:
            key = (id(p.case.work), id(p.case.cluster), tuple(p.case.layout.columns.values()))
            groups[key].append(p)
    found = []
    for same in groups.values():
        c, devices = same[0].case.plan, same[0].case.layout.devices
        tokens = c.tokens[0] * c.gradient_accumulation[0] * c.cp[0] * c.data_ranks[0]
        measured = float(np.median([p.case.seconds or np.nan for p in same]))
        found.append((same[0].seconds, measured, float(devices / tokens)))
    return found


def spearman(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Rank correlation; None for fewer than `ENOUGH` pairs."""
    if len(pairs) < ENOUGH:
        return None
    x, y = (_ranks(np.array(values)) for values in zip(*pairs, strict=True))
    if x.std() == 0 or y.std() == 0:
        return None
    return float(np.corrcoef(x, y)[0, 1])


def _ranks(values: np.ndarray) -> np.ndarray:
    """Equal values share the mean of their ranks."""
    order = np.argsort(values, kind="stable")
    ranks = np.empty(len(values))
    ranks[order] = np.arange(len(values), dtype=float)
    _, code, count = np.unique(values, return_inverse=True, return_counts=True)
    return (np.bincount(code, weights=ranks) / count)[code]
