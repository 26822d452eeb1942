"""Fit of the cost model's free constants to published runs.

Rows of one source share its software, clocks and habits, so they are not independent. The log error
of a row is therefore an offset of its source (normal around 0, one for time and one for memory)
plus the row's own rest, and the constants explain what they can of both:

    sum over rows of  weight * huber((error - offset) / width)
    + sum over sources of  (offset / spread)**2 / 2
    + sum over constants of  ((value - expected) / deviation)**2 / 2

`expected` and `deviation` of a constant are what was known of it before any row was seen
(`constants.yaml`); a source's rows weigh the square root of their number together. A new source is
predicted with the offset 0. The search is Gauss-Newton's: the model's slopes by differences,
Huber's weights, bounds by fixing what leaves them, and as much of a step as lowers the true loss.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from strategies import cost
from strategies.candidates import Candidates
from strategies.cluster import Cluster
from strategies.cost import GIB
from strategies.cost.constants import Constants
from strategies.workload import Workload

WIDTH = {"seconds": 0.15, "peak_gib": 0.10}
"""Of the log error of a row within its source; beyond it Huber's loss grows linearly."""
SPREAD = {"seconds": 0.20, "peak_gib": 0.10}
"""Standard deviation of the offsets of sources."""
STEPS = 12
FRACTIONS = (1.0, 0.5, 0.2, 0.05)
"""Of a Gauss-Newton step, tried at once."""
ROWS_AT_ONCE = 4000
"""Of one evaluation: below what the cost model looks for repeated rows in."""


@dataclass(frozen=True, kw_only=True)
class Range:
    """What a constant can be, and what was known of it before the fit."""

    low: float
    high: float
    expected: float

    @property
    def deviation(self) -> float:
        """The range is taken as two standard deviations on either side."""
        return (self.high - self.low) / 4


@dataclass(frozen=True, kw_only=True)
class Row:
    """A plan that was run, and what was measured of it; None where it was not."""

    source: str
    """Whose software, clocks and habits it shares."""
    work: Workload
    cluster: Cluster
    plan: Candidates
    """Of length one."""
    seconds: float | None
    """Of one optimizer step."""
    peak_gib: float | None
    """As the allocator counts it, or the driver where `whole_device`."""
    whole_device: bool = False


@dataclass(frozen=True)
class Batch:
    """Rows of one workload on one cluster, evaluated together."""

    rows: np.ndarray
    """Positions in the list of all rows."""
    first: Row
    plans: Candidates


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """Columns, one value a row."""

    seconds: np.ndarray
    peak_gib: np.ndarray
    """As the row's memory was counted: by the allocator, or by the driver."""
    oom_probability: np.ndarray


class Table:
    """Rows grouped for evaluation under many constants at once."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self.rows = list(rows)
        groups: dict[tuple[int, int], list[int]] = {}
        for i, row in enumerate(self.rows):
            groups.setdefault((id(row.work), id(row.cluster)), []).append(i)
        self.batches = [
            Batch(np.array(at), self.rows[at[0]], _stack([self.rows[i].plan for i in at]))
            for at in groups.values()
        ]
        names = sorted({r.source for r in self.rows})
        self.source = np.array([names.index(r.source) for r in self.rows], dtype=int)
        self.sources = names
        self.measured = {
            "seconds": np.array([r.seconds or np.nan for r in self.rows], dtype=float),
            "peak_gib": np.array([r.peak_gib or np.nan for r in self.rows], dtype=float),
        }

    def costs(self, points: Sequence[Constants]) -> list[Predicted]:
        """What each point predicts for all rows."""
        names = [f.name for f in dataclasses.fields(Predicted)]
        found = {name: np.empty((len(points), len(self.rows))) for name in names}
        for batch in self.batches:
            size = len(batch.rows)
            driver = np.array([self.rows[i].whole_device for i in batch.rows])
            step = max(ROWS_AT_ONCE // size, 1)
            for start in range(0, len(points), step):
                some = points[start : start + step]
                costs = cost.evaluate(
                    batch.first.work,
                    batch.first.cluster,
                    batch.plans.take(np.tile(np.arange(size), len(some))),
                    _columns(some, size),
                )
                counted = np.where(np.tile(driver, len(some)), costs.peak, costs.memory.allocated)
                columns = {
                    "seconds": costs.seconds,
                    "peak_gib": counted / GIB,
                    "oom_probability": costs.oom_probability,
                }
                at = np.ix_(np.arange(start, start + len(some)), batch.rows)
                for name, column in columns.items():
                    found[name][at] = column.reshape(len(some), size)
        return [Predicted(**{name: found[name][i] for name in names}) for i in range(len(points))]

    def errors(self, points: Sequence[Constants]) -> dict[str, np.ndarray]:
        """Log of predicted over measured by quantity, [points, rows]; nan where not measured."""
        found = self.costs(points)
        return {
            name: np.log(np.stack([getattr(f, name) for f in found]) / measured)
            for name, measured in self.measured.items()
        }


def _stack(plans: Sequence[Candidates]) -> Candidates:
    names = [f.name for f in dataclasses.fields(Candidates)]
    return Candidates(**{n: np.concatenate([getattr(p, n) for p in plans]) for n in names})


def _columns(points: Sequence[Constants], size: int) -> Constants:
    names = [f.name for f in dataclasses.fields(Constants)]
    values = {n: np.repeat([getattr(p, n) for p in points], size) for n in names}
    return Constants(**values)  # type: ignore[arg-type]


def weights(rows: Sequence[Row]) -> np.ndarray:
    """One a row: those of a source add up to the square root of their number."""
    counts = Counter(r.source for r in rows)
    return np.array([counts[r.source] ** -0.5 for r in rows])


def fit(
    table: Table,
    ranges: Mapping[str, Range],
    *,
    weight: np.ndarray | None = None,
    spread: float = 1.0,
) -> Constants:
    """The constants with the least loss.

    `weight` replaces `weights`; `spread` scales `SPREAD`, e.g. 0 where a source has no offset
    because its own constants are wanted.
    """
    w = weights(table.rows) if weight is None else weight
    low = np.array([r.low for r in ranges.values()])
    high = np.array([r.high for r in ranges.values()])
    expected = np.array([r.expected for r in ranges.values()])
    deviation = np.array([r.deviation for r in ranges.values()])

    def made(values: np.ndarray) -> Constants:
        return Constants(**dict(zip(ranges, values.tolist(), strict=True)))

    best, nudge = expected, 0.02 * (high - low)
    for _ in range(STEPS):
        # Away from the nearer bound, so that a slope is taken inside.
        signs = np.where(best + nudge > high, -1.0, 1.0) * nudge
        points = [best, *(best + np.diag(signs))]
        errors = table.errors([made(p) for p in points])
        step = _step(table, errors, signs, w, spread, best, expected, deviation, low, high)
        trials = [best] + [np.clip(best + f * step, low, high) for f in FRACTIONS]
        tried = table.errors([made(t) for t in trials[1:]])
        losses = [_loss(table, {n: e[0] for n, e in errors.items()}, w, spread)]
        losses += [
            _loss(table, {n: e[i] for n, e in tried.items()}, w, spread)
            for i in range(len(FRACTIONS))
        ]
        losses = [
            loss + np.sum(((t - expected) / deviation) ** 2) / 2
            for loss, t in zip(losses, trials, strict=True)
        ]
        i = int(np.argmin(losses))
        if losses[0] - losses[i] < 1e-4:
            break
        best = trials[i]
    return made(best)


def offsets(
    table: Table, errors: Mapping[str, np.ndarray], w: np.ndarray, spread: float = 1.0
) -> dict[str, np.ndarray]:
    """The most likely offset of each source by quantity: its rows' robust mean, drawn towards 0."""
    found = {}
    for name, error in errors.items():
        known = np.isfinite(error)
        offset = np.zeros(len(table.sources))
        for _ in range(20):
            rest = (np.nan_to_num(error) - offset[table.source]) / WIDTH[name]
            each = w * known / np.maximum(np.abs(rest), 1.0) / WIDTH[name] ** 2
            total = np.bincount(table.source, each * np.nan_to_num(error), len(table.sources))
            mass = np.bincount(table.source, each, len(table.sources))
            offset = total / (mass + _precision(name, spread))
        found[name] = offset
    return found


def _precision(name: str, spread: float) -> float:
    return (max(spread, 1e-6) * SPREAD[name]) ** -2


def _loss(table: Table, errors: Mapping[str, np.ndarray], w: np.ndarray, spread: float) -> float:
    total = 0.0
    for name, offset in offsets(table, errors, w, spread).items():
        known = np.isfinite(errors[name])
        rest = np.abs(np.nan_to_num(errors[name]) - offset[table.source]) / WIDTH[name]
        total += float(np.sum(w * known * np.where(rest <= 1, rest**2 / 2, rest - 0.5)))
        total += float(np.sum(offset**2) * _precision(name, spread) / 2)
    return total


def _step(
    table: Table,
    errors: Mapping[str, np.ndarray],
    signs: np.ndarray,
    w: np.ndarray,
    spread: float,
    at: np.ndarray,
    expected: np.ndarray,
    deviation: np.ndarray,
    low: np.ndarray,
    high: np.ndarray,
) -> np.ndarray:
    """Of the constants: the least of the loss' quadratic model in constants and offsets.

    A constant that the step would take out of its bounds is fixed at the bound and the rest solved
    again.
    """
    count, sources = len(at), len(table.sources)
    size = count + sources * len(errors)
    matrix, target = np.zeros((size, size)), np.zeros(size)
    known_offsets = offsets(table, {n: e[0] for n, e in errors.items()}, w, spread)
    for j, (name, error) in enumerate(errors.items()):
        rows = np.isfinite(error[0])
        slope = np.zeros((rows.sum(), size))
        slope[:, :count] = ((error[1:] - error[0]) / signs[:, None])[:, rows].T
        columns = count + j * sources + table.source[rows]
        slope[np.arange(rows.sum()), columns] = -1.0
        offset = known_offsets[name][table.source[rows]]
        rest = np.abs(error[0][rows] - offset) / WIDTH[name]
        each = w[rows] / np.maximum(rest, 1.0) / WIDTH[name] ** 2
        matrix += slope.T @ (each[:, None] * slope)
        target -= slope.T @ (each * error[0][rows])
        diagonal = np.arange(count + j * sources, count + (j + 1) * sources)
        matrix[diagonal, diagonal] += _precision(name, spread)
    diagonal = np.arange(count)
    matrix[diagonal, diagonal] += deviation**-2
    target[:count] -= (at - expected) / deviation**2
    fixed = np.zeros(count)
    free = np.ones(size, dtype=bool)
    while True:
        held = ~free[:count]
        right = target[free] - matrix[free][:, ~free] @ fixed[held]
        solved = np.zeros(size)
        solved[free] = np.linalg.solve(matrix[free][:, free], right)
        step = np.where(held, fixed, solved[:count])
        outside = ~held & ((at + step < low) | (at + step > high))
        if not outside.any():
            return step
        fixed[outside] = np.clip(at + step, low, high)[outside] - at[outside]
        free[:count] &= ~outside
