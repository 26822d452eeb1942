"""What one plan does not answer: how few devices, how long, how many, which EP, what if."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from analyzers.errors import InputError
from strategies.alternatives import missing, settings
from strategies.candidates import DISPATCHERS, RECOMPUTATION, Candidates, Column, columns
from strategies.cluster import degraded
from strategies.infeasible import no_layout, nothing_fits
from strategies.parts import smallest_part
from strategies.pricing import GIB, CostModel
from strategies.problem import LONGEST, Problem
from strategies.schema import EpCell, EpCurve, EpRow, EpWindows
from strategies.solver import Points, Solution, price, price_all, solve
from strategies.space import divisors

SEQUENCE_STEP = 128
"""Sequences are counted in multiples of this."""
MOST_SEQUENCES = 1 << 14
"""Larger micro-batches are not tried."""
SHOWN_TOKENS = (1024, 2048, 4096, 8192, 16384, 32768)
VARIED = ("ep", "dispatcher", "micro_batch_size", "sequence_length", "gradient_accumulation")
"""Columns in which the rows of an EP curve differ."""
FEWEST_TOKENS, MOST_TOKENS, TOKENS_PER_OCTAVE = 512, 65536, 16
CUTS = 32
"""Numbers of tokens that are priced at once to narrow a limit down."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The plan that answers a question, in short."""

    value: int
    """Devices, tokens or sequences."""
    unit: str
    settings: str
    step_seconds: float
    tokens_per_second_per_device: float
    memory_gib: float
    capacity_gib: float
    missing: list[str]
    """What the runtime lacks to run it."""
    limit: str
    """Why not one less, or one more."""


@dataclass(frozen=True, kw_only=True)
class Degraded:
    """What slower links of one tier cost."""

    tier: str
    scale: float
    same_plan: float
    """Times as long a token, with the plan for sound links."""
    best_plan: float
    """Times as long a token, planned anew."""
    settings: str
    """Of the plan made anew."""
    changed: bool


def fewest_devices(problem: Problem) -> Answer:
    """The fewest devices (whole nodes, or devices of one node) on which a plan fits.

    Raises InfeasibleError where not even the whole cluster will do.
    """
    # Where no part will do, neither does the whole, which says why.
    part, best, tried = smallest_part(problem) or (problem, _require_best(problem), True)
    devices = part.cluster.world_size
    if tried:
        limit = "on fewer, every plan needs more memory than is safe"
    elif devices > 1:
        limit = "fewer cannot be laid out as the job and --fix ask"
    else:
        limit = "one will do"
    return _answer(part, best, devices, "devices", limit)


def longest_sequence(problem: Problem) -> Answer:
    """The longest sequence, in steps of 128 tokens up to the model's longest, that fits as a
    micro-batch of its own.

    Memory never shrinks with the sequence, so bisection is exact. Raises InfeasibleError.
    """
    longest = problem.longest or LONGEST
    most = -(-longest // SEQUENCE_STEP)

    def tokens(count: int) -> int:
        return min(count * SEQUENCE_STEP, longest)

    def asked(count: int) -> Problem:
        job = replace(problem.job, sequence_length=tokens(count), global_batch_size=None)
        return replace(problem, job=job, fixed={**problem.fixed, "micro_batch_size": 1})

    count, point = _largest(lambda count: _solved(asked(count)).best, most)
    if point is None:
        point = _require_best(asked(1))  # raises: not even one fits
    if count < most:
        limit = f"one of {tokens(count + 1):,} tokens does not fit"
    elif problem.longest:
        limit = "the model takes none that is longer"
    else:
        limit = "longer ones are not tried"
    return _answer(problem, point, tokens(count), "tokens", limit)


def largest_micro_batch(problem: Problem) -> Answer:
    """The most sequences of the job's length that fit in a rank's micro-batch.

    Raises InfeasibleError.
    """

    def asked(count: int) -> Problem:
        job = replace(problem.job, global_batch_size=None)
        return replace(problem, job=job, fixed={**problem.fixed, "micro_batch_size": count})

    count, point = _largest(lambda count: _solved(asked(count)).best, MOST_SEQUENCES)
    if point is None:
        point = _require_best(asked(1))  # raises: not even one fits
    limit = "one more does not fit" if count < MOST_SEQUENCES else "more are not tried"
    return _answer(problem, point, count, "sequences", limit)


def ep_curve(problem: Problem, like: Candidates | None = None) -> EpCurve:
    """Seconds of a micro-batch by EP over tokens a rank, and where another EP becomes better.

    The rest of the plan `like` is kept, by default of the fastest that can be run. A rank's tokens
    are as few sequences as possible, none longer than the job's. Times are given also where memory
    does not allow them, and marked.
    Raises InfeasibleError where no plan fits, InputError for a model without experts.
    """
    if not problem.model.experts:
        fix = "give a mixture-of-experts model"
        raise InputError("--ask", field="ep-curve", fault="the model has no experts", fix=fix)
    if like is None:
        like = _require_best(replace(problem, allow=frozenset())).plans
    octaves = math.log2(MOST_TOKENS / FEWEST_TOKENS)
    fine = np.geomspace(FEWEST_TOKENS, MOST_TOKENS, round(octaves * TOKENS_PER_OCTAVE) + 1)
    pricing = problem.pricing
    shown = _over_tokens(problem, pricing, like, np.array(SHOWN_TOKENS))
    table = _over_tokens(problem, pricing, like, fine)
    bare = problem.pricing
    bare.constants = replace(bare.constants, shard_overlap=0.0, exchange_overlap=0.0)
    once = replace(like, recomputation=np.array([RECOMPUTATION.index("none")]))
    windows = {
        "as planned": table,
        "nothing hidden behind compute": _over_tokens(problem, bare, like, fine),
        "nothing hidden, no recomputation": _over_tokens(problem, bare, once, fine),
    }
    return EpCurve(
        kept=settings(problem, like),
        rows=[_row(shown, tokens) for tokens in np.unique(_tokens(shown)).tolist()],
        windows=[EpWindows(assumed=name, windows=_windows(t)) for name, t in windows.items()],
        fits_up_to=_most_tokens(problem, pricing, like, table),
    )


def degraded_links(problem: Problem, scale: float) -> list[Degraded]:
    """What links at `scale` of their rate cost, one tier after the other."""
    best = _require_best(problem)
    found = []
    for tier in problem.cluster.tiers:
        slow = problem.on(degraded(problem.cluster, tier.name, scale))
        same = price(slow.pricing, best.plans)
        anew = _require_best(slow)
        found.append(
            Degraded(
                tier=tier.name,
                scale=scale,
                same_plan=float(same.per_token[0] / best.per_token[0]),
                best_plan=float(anew.per_token[0] / best.per_token[0]),
                settings=settings(problem, anew.plans),
                changed=anew.plans.row(0) != best.plans.row(0),
            )
        )
    return found


def _solved(problem: Problem) -> Solution:
    return solve(problem.space(problem.allow), problem.pricing)


def _largest(fastest: Callable[[int], Points | None], most: int) -> tuple[int, Points | None]:
    """The largest count from 1 to `most` that fits, by bisection, with its plan."""
    low, found = 0, None
    high = 1
    while high <= most and (point := fastest(high)):
        low, found, high = high, point, 2 * high
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        if point := fastest(middle):
            low, found = middle, point
        else:
            high = middle
    return low, found


def _answer(problem: Problem, point: Points, value: int, unit: str, limit: str) -> Answer:
    devices = int(point.plans.devices[0])
    return Answer(
        value=value,
        unit=unit,
        settings=settings(problem, point.plans),
        step_seconds=float(point.seconds[0]),
        tokens_per_second_per_device=1 / float(point.per_token[0]) / devices,
        memory_gib=float(point.peak[0]) / GIB,
        capacity_gib=problem.pricing.capacity / GIB,
        missing=missing(problem, point.plans),
        limit=limit,
    )


def _require_best(problem: Problem) -> Points:
    found = _solved(problem)
    if not found.plans:
        raise no_layout(problem)
    if found.best is None:
        raise nothing_fits(problem, price_all(problem.space(), problem.pricing))
    return found.best


def _over_tokens(problem: Problem, pricing: CostModel, like: Candidates, tokens: Column) -> Points:
    """One plan with every EP of its shards and every number of tokens a rank."""
    shards = int(like.fsdp[0] * like.tp[0])
    eps = [n for n in divisors(shards) if problem.model.experts % n == 0]
    cases = [
        (ep, dispatcher, round(n))
        for ep in eps
        for dispatcher in (("all_to_all", "all_gather") if ep > 1 else ("none",))
        for n in tokens
    ]
    ep, dispatcher, wanted = (np.array(column) for column in zip(*cases, strict=True))
    count = -(-wanted // problem.job.sequence_length)
    row = {name: value for name, value in like.row(0).items() if name not in VARIED}
    return price(
        pricing,
        columns(
            **row,
            ep=ep,
            dispatcher=np.array([DISPATCHERS.index(name) for name in dispatcher]),
            micro_batch_size=count,
            sequence_length=wanted // count,
            gradient_accumulation=1,
        ),
    )


def _most_tokens(problem: Problem, pricing: CostModel, like: Candidates, table: Points) -> int:
    """Those that fit, exactly: between the last of a table that do and the first that do not."""
    low, high = 0, MOST_TOKENS + 1
    while True:
        tokens = _tokens(table)
        low = int(tokens[table.fits].max(initial=low))
        high = int(tokens[tokens > low].min(initial=high))
        between = np.unique(np.linspace(low, high, CUTS + 2).astype(int))[1:-1]
        if high > MOST_TOKENS or not len(between):
            return low
        table = _over_tokens(problem, pricing, like, between)
        if (_tokens(table) <= low).all():  # sequences of equal length make no number in between
            return low


def _tokens(points: Points) -> Column:
    return points.plans.tokens


def _by_ep(table: Points, tokens: int) -> dict[int, Points]:
    """The faster dispatcher of each EP at some tokens a rank; one that fits before one that does
    not."""
    here = table.take(_tokens(table) == tokens)
    found: dict[int, Points] = {}
    for ep in np.unique(here.plans.ep).tolist():
        same = here.take(here.plans.ep == ep)
        found[ep] = (same.take(same.fits) if same.fits.any() else same).best
    return found


def _row(table: Points, tokens: int) -> EpRow:
    points = _by_ep(table, tokens)
    cells = {
        ep: EpCell(
            seconds=float(p.seconds[0]), memory_gib=float(p.peak[0]) / GIB, fits=bool(p.fits[0])
        )
        for ep, p in points.items()
    }
    return EpRow(
        tokens_per_rank=tokens, by_ep=cells, fastest=min(cells, key=lambda n: cells[n].seconds)
    )


def _windows(table: Points) -> dict[int, tuple[int, int]]:
    """EP -> the first and last tokens at which it is the fastest, whether it fits or not."""
    tokens, eps = _tokens(table), table.plans.ep
    order = np.lexsort((eps, table.seconds, tokens))
    counts, first = np.unique(tokens[order], return_index=True)
    fastest = eps[order][first]
    return {
        int(ep): (int(counts[fastest == ep].min()), int(counts[fastest == ep].max()))
        for ep in np.unique(fastest)[::-1]
    }


def windows_in_words(windows: dict[int, tuple[int, int]]) -> str:
    """`EP 128 to 2,300, EP 64 to 9,000 tokens a rank, EP 32 above`."""
    ordered = sorted(windows.items(), key=lambda item: item[1])
    if len(ordered) == 1:
        return f"EP {ordered[0][0]} throughout"
    said = [f"EP {ep} to {last:,}" for ep, (_, last) in ordered[:-1]]
    return f"{', '.join(said)} tokens a rank, EP {ordered[-1][0]} above"
