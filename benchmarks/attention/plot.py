"""The picture of a report: bars of milliseconds a workload, with the floors as lines."""

from __future__ import annotations

import json
from pathlib import Path

PASSES = (("forward_ms", 0, "forward"), ("both_ms", 1, "forward + backward"))


def _workloads(data: dict) -> tuple[list[tuple], list[str], dict]:
    rows = [row for row in data["rows"] if "forward_ms" in row]
    keys = list(dict.fromkeys((r["member"], r["gate"], r["shape"]) for r in rows))
    names = list(dict.fromkeys(r["implementation"] for r in rows))
    found = {(r["member"], r["gate"], r["shape"], r["implementation"]): r for r in rows}
    return keys, names, found


def plot(file: Path) -> Path:
    """Writes the picture beside the JSON: a PNG with matplotlib, else an HTML page with plotly.

    Raises ImportError when neither is installed.
    """
    data = json.loads(file.read_text("utf-8"))
    try:
        import matplotlib  # noqa: F401  # pyright: ignore[reportMissingImports]
    except ImportError:
        return _plotly(data, file.with_suffix(".html"))
    return _matplotlib(data, file.with_suffix(".png"))


def _title(data: dict) -> str:
    machine = data["machine"]
    gpu = machine.get("gpu", machine["system"])
    return f"{gpu}, torch {machine['torch']}, triton {machine['triton']}, commit {data['commit']}"


def _matplotlib(data: dict, target: Path) -> Path:
    import matplotlib  # pyright: ignore[reportMissingImports]

    matplotlib.use("Agg")
    from matplotlib import pyplot  # pyright: ignore[reportMissingImports]

    keys, names, found = _workloads(data)
    width = 0.8 / max(1, len(names))
    figure, axes = pyplot.subplots(2, 1, figsize=(max(8.0, 1.1 * len(keys)), 9), squeeze=False)
    for axis, (column, index, title) in zip(axes[:, 0], PASSES, strict=True):
        for i, name in enumerate(names):
            points = [
                (n, found[(*key, name)][column])
                for n, key in enumerate(keys)
                if column in found.get((*key, name), {})
            ]
            at = [n + width * (i - (len(names) - 1) / 2) for n, _ in points]
            axis.bar(at, [y for _, y in points], width, label=name)
        for floor, style in (("memory_floor_ms", "-"), ("matrix_floor_ms", ":")):
            for n, key in enumerate(keys):
                row = next(found[(*key, name)] for name in names if (*key, name) in found)
                label = floor.removesuffix("_ms").replace("_", " ") if n == 0 else None
                axis.hlines(row[floor][index], n - 0.45, n + 0.45, "black", style, label=label)
        axis.set_yscale("log")
        axis.set_ylabel("ms")
        axis.set_title(title)
        axis.set_xticks(range(len(keys)), ["\n".join(key) for key in keys], fontsize=7)
        axis.legend(fontsize=8)
    figure.suptitle(_title(data), fontsize=10)
    figure.tight_layout()
    figure.savefig(target, dpi=120)
    return target


def _plotly(data: dict, target: Path) -> Path:
    from plotly import graph_objects
    from plotly.subplots import make_subplots

    keys, names, found = _workloads(data)
    figure = make_subplots(rows=2, cols=1, subplot_titles=[title for *_, title in PASSES])
    labels = ["<br>".join(key) for key in keys]
    for line, (column, index, _) in enumerate(PASSES, 1):
        for name in names:
            values = [found.get((*key, name), {}).get(column) for key in keys]
            bar = graph_objects.Bar(x=labels, y=values, name=name, legendgroup=name)
            figure.add_trace(bar.update(showlegend=line == 1), row=line, col=1)
        for floor in ("memory_floor_ms", "matrix_floor_ms"):
            any_row = [next(found[(*k, n)] for n in names if (*k, n) in found) for k in keys]
            name = floor.removesuffix("_ms").replace("_", " ")
            marks = graph_objects.Scatter(
                x=labels,
                y=[row[floor][index] for row in any_row],
                mode="markers",
                marker={"symbol": "line-ew-open", "size": 24},
                name=name,
                legendgroup=name,
                showlegend=line == 1,
            )
            figure.add_trace(marks, row=line, col=1)
    figure.update_yaxes(type="log", title="ms")
    figure.update_layout(title=_title(data), height=900)
    figure.write_html(target)
    return target
