"""The report's figures as inline SVG. Colours are the page's CSS classes: `c0` ... `c8`, `grid`.

Every mark carries a `<title>`, which browsers show on hover and screen readers read. `svg`, `rect`
and `caption` are the pieces that other figures are made of.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape

WIDTH = 760
COLOURS = 9


def svg(height: float, parts: Iterable[str], label: str) -> str:
    body = "".join(parts)
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(label)}">'
        f"{body}</svg>"
    )


def rect(x: float, y: float, w: float, h: float, css: str, title: str, **more: object) -> str:
    extra = "".join(f' {k.replace("_", "-")}="{v}"' for k, v in more.items())
    return (
        f'<rect x="{x:.2f}" y="{y:.2f}" width="{max(w, 0):.2f}" height="{h:.2f}" '
        f'class="{css}"{extra}>'
        f"<title>{escape(title)}</title></rect>"
    )


def caption(x: float, y: float, text: str, css: str = "ink", anchor: str = "start") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" class="{css}" text-anchor="{anchor}">{escape(text)}</text>'
    )


def standalone(figure: str, style: str) -> str:
    """The figure as a file of its own: with the rules that the page's style sheet has for figures,
    in its light colours. Colours are written out, since few programs know CSS variables."""
    colours = dict(re.findall(r"--([\w-]+):\s*(#\w+)", style.partition("@media")[0]))
    rules = " ".join(re.findall(r"svg[^{}]*\{[^}]*\}", style))
    rules = re.sub(r"var\(--([\w-]+)\)", lambda match: colours[match[1]], rules)
    head = f'xmlns="http://www.w3.org/2000/svg" width="{WIDTH}"'
    ground = f'<rect width="100%" height="100%" style="fill:{colours["card"]}"/>'
    opening, _, body = figure.partition(">")
    return f"{opening} {head}><style>{rules}</style>{ground}{body}"


def png(figure: str, zoom: float = 2.0) -> bytes | None:
    """A standalone figure as an image; None without resvg-py."""
    try:
        import resvg_py  # pyright: ignore[reportMissingImports]
    except ImportError:
        return None
    return bytes(resvg_py.svg_to_bytes(svg_string=figure, zoom=zoom))


def number(value: float) -> str:
    """Three significant digits, without an exponent where that reads well."""
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        digits = 3 if value == 0 else max(0, 2 - math.floor(math.log10(abs(value))))
        text = f"{value:.{digits}f}"
        return text.rstrip("0").rstrip(".") if "." in text else text
    return f"{value:.2e}"


def stacked_bar(parts: Mapping[str, float], *, unit: str, label: str) -> str:
    """One bar cut into `parts`, as wide as the figure."""
    shown = {name: value for name, value in parts.items() if value > 0}
    whole = sum(shown.values())
    bar, legend, x, column, y = [], [], 0.0, WIDTH / 3, 56.0
    for i, (name, value) in enumerate(shown.items()):
        css, text = f"c{i % COLOURS}", f"{name} {number(value)} {unit}"
        w = WIDTH * value / whole
        # Two pixels of background keep neighbours apart for every eye.
        title = f"{name}: {number(value)} {unit} ({value / whole:.1%})"
        bar.append(rect(x, 0, w - 2 if w > 3 else w, 34, css, title, rx=2))
        x += w
        row, at = divmod(i, 3)
        y = 56.0 + row * 22
        legend.append(rect(at * column, y, 12, 12, css, name, rx=2))
        legend.append(caption(at * column + 18, y + 10.5, text))
    return svg(y + 22, bar + legend, label)


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    span = high - low or 1.0
    rough = span / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough)
    first = math.ceil(low / step - 1e-9)
    return [k * step for k in range(first, math.floor(high / step + 1e-9) + 1)]


def line_chart(
    xs: Sequence[float], ys: Sequence[float], *, x_label: str, y_label: str, label: str
) -> str:
    """One line with its first and last value named; the y axis starts at zero."""
    height, left, bottom, top = 290, 56, 42, 40
    finite = [y for y in ys if math.isfinite(y)]
    high = max(finite, default=1.0) * 1.05 or 1.0
    low_x, high_x = min(xs, default=0), max(xs, default=1)

    def px(x: float) -> float:
        return left + (WIDTH - left - 16) * (x - low_x) / ((high_x - low_x) or 1)

    def py(y: float) -> float:
        return height - bottom - (height - bottom - top) * y / high

    parts = []
    for tick in ticks(0, high):
        y = py(tick)
        parts.append(f'<line x1="{left}" x2="{WIDTH}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>')
        parts.append(caption(left - 8, y + 4, number(tick), "soft", "end"))
    for tick in ticks(low_x, high_x, 8):
        parts.append(caption(px(tick), height - bottom + 18, number(tick), "soft", "middle"))
    points = [(px(x), py(y), x, y) for x, y in zip(xs, ys, strict=True) if math.isfinite(y)]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y, _, _ in points)
    parts.append(f'<polyline points="{path}" class="line"/>')
    for x, y, step, value in points:
        title = f"{x_label} {number(step)}: {number(value)}"
        parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" class="dot"><title>{title}</title></circle>'
        )
    for (x, y, _, value), anchor in zip(points[:1] + points[-1:], ("start", "end"), strict=False):
        parts.append(caption(x, y - 10, number(value), "strong", anchor))
    parts.append(caption(left, 12, y_label, "soft"))
    parts.append(caption(WIDTH, height - 6, x_label, "soft", "end"))
    return svg(height, parts, label)


def heat_map(rows: Mapping[str, Sequence[float]], *, column: str, label: str) -> str:
    """One row a layer; a cell is as dark as its share of the row's largest.

    Rows wider than 128 columns are summed in groups, so that 896 experts still draw.
    """
    left, cell_h = 64, 18 if len(rows) <= 24 else 9
    width = max((len(r) for r in rows.values()), default=1)
    group = math.ceil(width / 128)
    parts = []
    for i, (name, values) in enumerate(rows.items()):
        cells = [sum(values[j : j + group]) for j in range(0, len(values), group)]
        mean = sum(cells) / len(cells) if cells else 0
        largest = max(cells, default=0)
        w = (WIDTH - left) / max(len(cells), 1)
        y = i * cell_h
        if cell_h >= 18 or i % 4 == 0:
            parts.append(caption(left - 8, y + cell_h * 0.75, name, "soft", "end"))
        for j, value in enumerate(cells):
            which = f"{column} {j * group}" + (f"-{j * group + group - 1}" if group > 1 else "")
            times = f", {value / mean:.2f} x the mean" if mean else ""
            shade = 0.06 + 0.94 * value / largest if largest else 0.06
            title = f"{name}, {which}: {number(value)} tokens{times}"
            gap = 1 if w > 4 else 0
            parts.append(
                rect(left + j * w, y, w - gap, cell_h - 1, "c0", title, fill_opacity=f"{shade:.3f}")
            )
    foot = len(rows) * cell_h + 16
    parts.append(caption(left, foot, f"{column} 0", "soft"))
    parts.append(caption(WIDTH, foot, f"{column} {width - 1}", "soft", "end"))
    return svg(foot + 6, parts, label)


def layer_strip(layers: Sequence[tuple[str, str]], *, label: str) -> str:
    """One cell a layer: coloured by its mixer, with a foot by its feed-forward."""
    mixers = list(dict.fromkeys(mixer for mixer, _ in layers))
    feeds = list(dict.fromkeys(feed for _, feed in layers))
    across = min(len(layers), 32) or 1
    w, h = min(WIDTH / across, 48), 40
    parts = []
    for i, (mixer, feed) in enumerate(layers):
        row, at = divmod(i, across)
        x, y = at * w, row * (h + 6)
        title = f"layer {i}: {mixer} + {feed}"
        parts.append(rect(x, y, w - 3, 26, f"c{mixers.index(mixer) % COLOURS}", title, rx=3))
        foot = f"c{(len(mixers) + feeds.index(feed)) % COLOURS}"
        parts.append(rect(x, y + 28, w - 3, 8, foot, title, rx=2))
    y = math.ceil(len(layers) / across) * (h + 6) + 6
    x = 0.0
    for i, name in enumerate([*mixers, *feeds]):
        times = sum(name in layer for layer in layers)
        text = f"{name} x {times}"
        parts.append(rect(x, y, 12, 12, f"c{i % COLOURS}", name, rx=2))
        parts.append(caption(x + 18, y + 10.5, text))
        x += 34 + 7.2 * len(text)
    return svg(y + 20, parts, label)
