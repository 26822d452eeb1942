"""The picture of a report: a row of panels a member, bars of milliseconds, the floors as lines."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PASSES = (("forward_ms", "forward"), ("both_ms", "forward + backward"))
FLOORS = ("memory_floor_ms", "matrix_floor_ms")


@dataclass(frozen=True)
class Panel:
    """One member and pass: milliseconds by name of an implementation or a floor, a workload each;
    None where there is no number."""

    title: str
    workloads: list[str]
    bars: dict[str, list[float | None]]
    floors: dict[str, list[float | None]]


def _panels(data: dict) -> Iterator[list[Panel]]:
    rows = [row for row in data["rows"] if "forward_ms" in row]
    names = list(dict.fromkeys(row["implementation"] for row in rows))
    for member in dict.fromkeys(row["member"] for row in rows):
        loads: dict[str, dict[str, dict]] = {}
        for row in rows:
            if row["member"] == member:
                label = f"{row['shape']}\n{row['gate']}"
                loads.setdefault(label, {})[row["implementation"]] = row
        yield [
            Panel(
                title=f"{member}, {title}",
                workloads=list(loads),
                bars={n: [of.get(n, {}).get(column) for of in loads.values()] for n in names},
                floors={
                    floor.removesuffix("_ms").replace("_", " "): [
                        next(iter(of.values())).get(floor, (None, None))[index]
                        for of in loads.values()
                    ]
                    for floor in FLOORS
                },
            )
            for index, (column, title) in enumerate(PASSES)
        ]


def plot(file: Path) -> Path:
    """Writes the picture beside the JSON: a PNG with matplotlib, else an HTML page with plotly.

    Raises ImportError when neither is installed.
    """
    data = json.loads(file.read_text("utf-8"))
    machine = data["machine"]
    where = machine.get("gpu") or machine["system"]
    versions = f"torch {machine['torch']}, triton {machine['triton']}, commit {data['commit']}"
    title, panels = f"{where}, {versions}", list(_panels(data))
    try:
        import matplotlib  # noqa: F401  # pyright: ignore[reportMissingImports]
    except ImportError:
        return _plotly(title, panels, file.with_suffix(".html"))
    return _matplotlib(title, panels, file.with_suffix(".png"))


def _matplotlib(title: str, panels: list[list[Panel]], target: Path) -> Path:
    import matplotlib  # pyright: ignore[reportMissingImports]

    matplotlib.use("Agg")
    from matplotlib import pyplot  # pyright: ignore[reportMissingImports]

    size = (16.0, 2.8 * len(panels) + 0.6)
    figure, axes = pyplot.subplots(len(panels), 2, figsize=size, squeeze=False)
    for axis, panel in zip(axes.flat, (p for row in panels for p in row), strict=True):
        width = 0.8 / len(panel.bars)
        for i, (name, values) in enumerate(panel.bars.items()):
            at = [n + width * (i - (len(panel.bars) - 1) / 2) for n in range(len(values))]
            axis.bar(at, [value or float("nan") for value in values], width, label=name)
        for (name, values), style in zip(panel.floors.items(), ("-", ":"), strict=True):
            left = [n - 0.45 for n in range(len(values))]
            right = [n + 0.45 for n in range(len(values))]
            heights = [value or float("nan") for value in values]
            axis.hlines(heights, left, right, "black", style, label=name)
        axis.set_yscale("log")
        axis.set_ylabel("ms")
        axis.set_title(panel.title, fontsize=9)
        axis.set_xticks(range(len(panel.workloads)), panel.workloads, fontsize=6)
    axes[0, 0].legend(fontsize=7)
    figure.suptitle(title, fontsize=10)
    figure.tight_layout(rect=(0, 0, 1, 0.99))
    figure.savefig(target, dpi=110)
    return target


def _plotly(title: str, panels: list[list[Panel]], target: Path) -> Path:
    from plotly.graph_objects import Bar, Scatter
    from plotly.subplots import make_subplots

    titles = [panel.title for row in panels for panel in row]
    figure = make_subplots(rows=len(panels), cols=2, subplot_titles=titles)
    for line, row in enumerate(panels, 1):
        for column, panel in enumerate(row, 1):
            x = [load.replace("\n", "<br>") for load in panel.workloads]
            first = line == column == 1
            traces = [Bar(x=x, y=y, name=n, legendgroup=n) for n, y in panel.bars.items()]
            dash = {"mode": "markers", "marker": {"symbol": "line-ew-open", "size": 24}}
            traces += [
                Scatter(x=x, y=y, name=n, legendgroup=n, **dash) for n, y in panel.floors.items()
            ]
            for color, trace in enumerate(traces):
                paint = f"hsl({47 * color}, 60%, 45%)"
                trace.update(showlegend=first, marker_color=paint)
                figure.add_trace(trace, row=line, col=column)
    figure.update_yaxes(type="log", title="ms")
    figure.update_layout(title=title, height=320 * len(panels) + 120)
    figure.write_html(target)
    return target
