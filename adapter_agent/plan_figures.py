"""Figures of a plan: time and memory by part beside its alternatives, EP by micro-batch, and which
EP is best at how many tokens a rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from adapter_agent.figures import COLOURS, WIDTH, caption, number, rect, svg, ticks

if TYPE_CHECKING:
    from strategies.schema import Alternative, Cell, EpCurve, Plan, Predicted

LEFT = 210
"""Width of the names of rows."""
ROW = 34
MOST_LINES = 7
CUT = 0.5
"""Share of the highest speed below which a curve is not drawn."""
HATCH = (
    '<defs><pattern id="hatch" width="7" height="7" patternUnits="userSpaceOnUse" '
    'patternTransform="rotate(45)"><line x1="0" y1="0" x2="0" y2="7" class="hatch"/>'
    "</pattern></defs>"
)


@dataclass(frozen=True, kw_only=True)
class Row:
    name: str
    detail: str = ""
    parts: Mapping[str, float]
    interval: tuple[float, float] | None = None
    runnable: bool = True

    @property
    def total(self) -> float:
        return sum(self.parts.values())


def plan_figures(plan: Plan) -> dict[str, str]:
    """Name -> inline SVG; what there is no data for is left out."""
    made = {"step": step_figure(plan), "memory": memory_figure(plan)}
    if plan.survey and plan.has_experts:
        made["survey"] = survey_figure(plan)
    if plan.ep_curve:
        made["curve"] = curve_figure(plan.ep_curve)
    return made


def step_figure(plan: Plan) -> str:
    """Seconds for as many tokens as a step of the plan has, so that batches of any size compare."""
    rows = []
    for name, detail, predicted, runnable in _shown(plan):
        speed = predicted.tokens_per_second_per_device
        scale = plan.predicted.tokens_per_second_per_device / speed
        scale *= plan.predicted.step_seconds / predicted.step_seconds
        low_high = predicted.step_seconds_interval
        rows.append(
            Row(
                name=name,
                detail=detail,
                parts={k: v * scale for k, v in vars(predicted.step).items()},
                interval=low_high and (low_high[0] * scale, low_high[1] * scale),
                runnable=runnable,
            )
        )
    return stacked_rows(rows, unit="s", label="Step time by part, of the plan and its alternatives")


def memory_figure(plan: Plan) -> str:
    """GiB on the fullest device, with a line at what the device has."""
    rows = [
        Row(
            name=name,
            detail=detail,
            parts=_parts(predicted),
            interval=predicted.memory_gib_interval,
            runnable=runnable,
        )
        for name, detail, predicted, runnable in _shown(plan)
    ]
    limit = plan.predicted.memory_gib.capacity
    label = "Memory by part, of the plan and its alternatives"
    return stacked_rows(rows, unit="GiB", label=label, limit=limit)


def _shown(plan: Plan) -> list[tuple[str, str, Predicted, bool]]:
    """Why each is there, its settings, what is predicted of it, and whether it can be run."""
    rows = [("the plan", _settings(plan, plan.expert_weight_format), plan.predicted, plan.runnable)]
    for a in plan.alternatives:
        if a.predicted:
            other = a.settings.get("expert_weight_format")
            experts = str(other) if other else plan.expert_weight_format
            why = a.why.partition(":")[0]
            rows.append((why, _settings(a, experts), a.predicted, a.runnable))
    return rows


def _settings(plan: Plan | Alternative, experts: str | None) -> str:
    """`TP 2, EP 64 x 2, batch 1, mxfp4`; sharding is what is left of the devices. Of experts, in
    the format `experts`, only where there are some."""
    p = plan.parallelism
    axes = {"PP": p.pp, "TP": p.tp, "CP": p.cp}
    said = [f"{name} {size}" for name, size in axes.items() if size > 1]
    said += [f"{p.dp_replicate} replicas"] * (p.dp_replicate > 1)
    said += [f"EP {p.ep} x {p.efsdp}"] * bool(experts)
    return ", ".join([*said, f"batch {plan.micro_batch_size}", *([experts] if experts else [])])


def _parts(predicted: Predicted) -> dict[str, float]:
    return {k: v for k, v in vars(predicted.memory_gib).items() if k not in ("peak", "capacity")}


def stacked_rows(rows: Sequence[Row], *, unit: str, label: str, limit: float | None = None) -> str:
    """One stacked bar a row on a shared axis from zero; the first row is the chosen one.

    A thin line spans the interval, a dashed one stands at `limit`. Parts are coloured alike in all
    rows; where they are more than there are colours, the smallest are drawn together as `other`.
    """
    rows, names = _coloured(rows)
    colours = {name: f"c{i}" for i, name in enumerate(names)}
    high = max([limit or 0, *(max(r.total, r.interval[1] if r.interval else 0) for r in rows)])
    scale = (WIDTH - LEFT - 8) / (high * 1.02 or 1)
    foot = len(rows) * ROW
    drawn = []
    for tick in ticks(0, high, 6):
        x = LEFT + tick * scale
        drawn.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{foot}" class="grid"/>')
        drawn.append(caption(x, foot + 15, number(tick), "soft", "middle"))
    for i, row in enumerate(rows):
        drawn += _row(row, i * ROW, scale, colours, unit, chosen=i == 0)
    if limit is not None:
        x = LEFT + limit * scale
        title = f"the device has {number(limit)} {unit}"
        drawn.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{foot}" class="limit">'
            f"<title>{title}</title></line>"
        )
    drawn.append(caption(WIDTH, foot + 31, unit, "soft", "end"))
    y, x = foot + 38, 0.0
    for name in names:
        text = name.replace("_", " ")
        width = 34 + 7.2 * len(text)
        if x + width > WIDTH:
            x, y = 0.0, y + 22
        drawn.append(rect(x, y, 12, 12, colours[name], text, rx=2))
        drawn.append(caption(x + 18, y + 10.5, text))
        x += width
    return svg(y + 20, drawn, label)


def _coloured(rows: Sequence[Row]) -> tuple[list[Row], list[str]]:
    """The rows with as many parts as there are colours, and the names of those that are not nil."""
    most = {name: max(row.parts[name] for row in rows) for name in rows[0].parts}
    names = [name for name, size in most.items() if size > 0]
    if len(names) > COLOURS:
        kept = sorted(names, key=lambda name: -most[name])[: COLOURS - 1]
        names = [*(name for name in names if name in kept), "other"]
    whole = []
    for row in rows:
        parts = {name: row.parts.get(name, 0.0) for name in names}
        if "other" in names:
            parts["other"] = row.total - sum(parts.values())
        whole.append(replace(row, parts=parts))
    return whole, names


def _row(
    row: Row, y: float, scale: float, colours: Mapping[str, str], unit: str, *, chosen: bool
) -> list[str]:
    css = "strong" if chosen else "ink" if row.runnable else "soft"
    drawn = [caption(LEFT - 8, y + 13, _short(row.name, 31), css, "end")]
    drawn.append(caption(LEFT - 8, y + 27, _short(row.detail, 38), "soft small", "end"))
    x = float(LEFT)
    for name, colour in colours.items():
        value = row.parts.get(name, 0)
        if value <= 0:
            continue
        share = value / row.total
        part = f"{name.replace('_', ' ')} {number(value)} {unit} ({share:.1%})"
        title = f"{row.name} ({row.detail}): {part}"
        more = {} if row.runnable else {"fill_opacity": 0.45}
        drawn.append(rect(x, y + 5, value * scale, 22, colour, title, **more))
        x += value * scale
    if row.interval:
        low, high = (LEFT + v * scale for v in row.interval)
        reach = f"{number(row.interval[0])} to {number(row.interval[1])} {unit}"
        title = f"{reach} about four times in five"
        drawn.append(
            f'<path d="M{low:.1f} {y + 12}v8m0 -4H{high:.1f}m0 -4v8" class="whisker">'
            f"<title>{title}</title></path>"
        )
    return drawn


def _short(name: str, letters: int) -> str:
    return name if len(name) <= letters else name[: letters - 1] + "…"


def survey_figure(plan: Plan) -> str:
    """Tokens/s a device by EP and micro-batch; darker is faster, hatched does not fit, and the
    reason is on hover. Pairs that no layout or batch allows stay empty."""
    cells = {(c.ep, c.micro_batch_size): c for c in plan.survey}
    columns = sorted({ep for ep, _ in cells})
    rows = sorted({micro for _, micro in cells})
    speeds = [c.tokens_per_second_per_device for c in plan.survey if c.fits]
    span = (min(speeds, default=0.0), max(speeds, default=1.0))
    capacity = plan.predicted.memory_gib.capacity
    left, w, h = 88, (WIDTH - 88) / len(columns), 30
    drawn = [HATCH]
    for i, micro in enumerate(rows):
        drawn.append(caption(left - 8, i * h + 20, f"batch {micro}", "soft", "end"))
        for j, ep in enumerate(columns):
            if cell := cells.get((ep, micro)):
                drawn += _cell(cell, left + j * w, i * h, w - 2, h - 2, span, capacity)
    for j, ep in enumerate(columns):
        drawn.append(caption(left + (j + 0.5) * w, len(rows) * h + 14, str(ep), "soft", "middle"))
    chosen = (plan.parallelism.ep, plan.micro_batch_size)
    if chosen in cells:
        x, y = left + columns.index(chosen[0]) * w, rows.index(chosen[1]) * h
        drawn.append(
            f'<rect x="{x:.1f}" y="{y}" width="{w - 2:.1f}" height="{h - 2}" class="chosen">'
            "<title>the plan</title></rect>"
        )
    drawn.append(caption(WIDTH, len(rows) * h + 30, "expert-parallel ranks", "soft", "end"))
    label = "Tokens per second of a device by expert parallelism and micro-batch"
    return svg(len(rows) * h + 36, drawn, label)


def _cell(
    cell: Cell,
    x: float,
    y: float,
    w: float,
    h: float,
    span: tuple[float, float],
    capacity: float,
) -> list[str]:
    """`span` are the slowest and the fastest speed of all that fit."""
    where = f"EP {cell.ep}, micro-batch {cell.micro_batch_size}"
    held = f"{number(cell.memory_gib)} of {number(capacity)} GiB"
    if not cell.fits:
        over = cell.memory_gib > capacity
        chance = f"runs out with probability {cell.oom_probability:.0%} at {held}"
        title = f"{where}: does not fit, {'needs ' + held if over else chance}"
        drawn = [rect(x, y, w, h, "empty", title), rect(x, y, w, h, "hatched", title)]
        if w > 52:
            needs = f"{cell.memory_gib:.0f} GiB"
            drawn.append(caption(x + w / 2, y + h / 2 + 4, needs, "soft", "middle"))
        return drawn
    speed = cell.tokens_per_second_per_device
    title = f"{where}: {number(speed)} tokens/s a device, {held}"
    slow, fast = span
    # From a fifth of full colour, so that the slowest cell still reads as a cell that fits.
    shade = 0.2 + 0.65 * (speed - slow) / ((fast - slow) or 1)
    drawn = [rect(x, y, w, h, "c0", title, fill_opacity=f"{shade:.3f}")]
    text = number(speed) if speed < 1e4 else f"{speed / 1e3:.0f}k"
    if w > 7.5 * len(text):
        drawn.append(caption(x + w / 2, y + h / 2 + 4, text, "ink", "middle"))
    return drawn


def curve_figure(curve: EpCurve) -> str:
    """Tokens/s a device over the tokens of a rank's micro-batch, one line an EP; hollow points do
    not fit in memory, and speeds below half the highest are cut off. Below, which EP is the fastest
    from where to where."""
    lines = _closest(curve)
    points = [p for line in lines.values() for p in line]
    height, left, right, bottom, top = 350, 56, 70, 84, 26
    low, high = min(p.tokens for p in points), max(p.tokens for p in points)
    fast = 1.02 * max(p.speed for p in points)
    slow = max(fast * CUT, 0.98 * min(p.speed for p in points))

    def px(tokens: float) -> float:
        return left + (WIDTH - left - right) * math.log(tokens / low) / (math.log(high / low) or 1)

    def py(speed: float) -> float:
        return height - bottom - (height - bottom - top) * (speed - slow) / (fast - slow)

    floor = height - bottom
    drawn = [
        f'<defs><clipPath id="shown"><rect x="{left}" y="0" width="{WIDTH}" height="{floor}"/>'
        "</clipPath></defs>"
    ]
    for tokens in sorted({p.tokens for p in points}):
        drawn.append(caption(px(tokens), floor + 18, f"{tokens:,}", "soft", "middle"))
    for tick in ticks(slow, fast):
        y, end = py(tick), WIDTH - right + 8
        drawn.append(f'<line x1="{left}" x2="{end}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>')
        drawn.append(caption(left - 8, y + 4, number(tick), "soft", "end"))
    colours = {ep: f"c{i % COLOURS}" for i, ep in enumerate(lines)}
    last = -math.inf
    for ep in sorted(lines, key=lambda ep: -lines[ep][-1].speed):
        drawn += _line(ep, lines[ep], colours[ep], px, py, floor)
        last = max(min(py(lines[ep][-1].speed), floor) + 4, last + 14)  # close names stay apart
        drawn.append(rect(WIDTH - right + 12, last - 9, 9, 9, colours[ep], f"EP {ep}", rx=2))
        drawn.append(caption(WIDTH - right + 26, last, f"EP {ep}"))
    drawn.append(caption(left, 12, "tokens/s a device", "soft"))
    windows = curve.windows[0].windows
    starts = sorted(first for first, _ in windows.values())
    for ep, (first, end) in windows.items():
        title = f"EP {ep} is the fastest from {first:,} to {end:,} tokens"
        until = min((start for start in starts if start > end), default=end)
        x, stop = px(max(first, low)), px(min(until, high))
        drawn.append(rect(x, floor + 30, stop - x - 1, 12, colours.get(ep, "empty"), title))
    drawn.append(caption(left - 8, floor + 40, "fastest", "soft", "end"))
    drawn.append(caption(WIDTH, floor + 64, "tokens of a rank's micro-batch", "soft", "end"))
    return svg(max(floor + 70, last + 6), drawn, "Speed by tokens per rank and EP")


def _line(
    ep: int,
    line: Sequence[_Point],
    colour: str,
    px: Callable[[float], float],
    py: Callable[[float], float],
    floor: float,
) -> list[str]:
    path = " ".join(f"{px(p.tokens):.1f},{py(p.speed):.1f}" for p in line)
    drawn = [f'<polyline points="{path}" class="line of-{colour}" clip-path="url(#shown)"/>']
    for p in line:
        if py(p.speed) > floor:
            continue
        title = f"EP {ep}, {p.tokens:,} tokens: {number(p.speed)} tokens/s a device, {p.held}"
        css = colour if p.fits else f"hollow of-{colour}"
        drawn.append(
            f'<circle cx="{px(p.tokens):.1f}" cy="{py(p.speed):.1f}" r="3.2" class="{css}">'
            f"<title>{title}</title></circle>"
        )
    return drawn


@dataclass(frozen=True, kw_only=True)
class _Point:
    tokens: int
    speed: float
    fits: bool
    held: str


def _closest(curve: EpCurve) -> dict[int, list[_Point]]:
    """The lines of the EPs that come closest to the fastest one somewhere, by EP."""
    nearest: dict[int, float] = {}
    lines: dict[int, list[_Point]] = {}
    for row in curve.rows:
        fastest = min(cell.seconds for cell in row.by_ep.values())
        for ep, cell in row.by_ep.items():
            nearest[ep] = min(nearest.get(ep, math.inf), cell.seconds / fastest)
            held = f"{number(cell.memory_gib)} GiB" + ("" if cell.fits else ", does not fit")
            lines.setdefault(ep, []).append(
                _Point(
                    tokens=row.tokens_per_rank,
                    speed=row.tokens_per_rank / cell.seconds,
                    fits=cell.fits,
                    held=held,
                )
            )
    kept = sorted(sorted(lines, key=lambda ep: nearest[ep])[:MOST_LINES])
    return {ep: lines[ep] for ep in kept}
