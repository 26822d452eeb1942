"""What `adapt analyze` prints: where the layers, parameters and costs of a model are."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from rich import box
from rich.bar import Bar
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from adapter_agent import anatomy
from adapter_agent.words import count, layer_pattern, letters, size

if TYPE_CHECKING:
    from analyzers.backends import Backend
    from analyzers.schema import ModelAnalysis

WIDTH = 110
"""Wider terminals are not filled."""
STYLES = ("cyan", "magenta", "yellow", "green", "blue", "red")
DIFFERENCES = 8


class _AtMost:
    """Keeps what it holds readable on wide terminals."""

    def __init__(self, inside: RenderableType) -> None:
        self.inside = inside

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from console.render(
            self.inside, options.update(max_width=min(options.max_width, WIDTH))
        )


def picture_of_analysis(a: ModelAnalysis, backend: Backend | None = None) -> RenderableType:
    """All of it; with a backend, what the backend serves too."""
    parts = [_head(a), _layers(a), _facts(a), _shares(a), _operators(a)]
    if any(block.graph for block in a.blocks):
        parts.append(_regions(a))
    if backend is not None:
        parts.append(_support(a, backend))
    unusual = [*a.notes, *anatomy.differences(a, DIFFERENCES)]
    if unusual:
        parts.append(_section("Unusual", _bullets(unusual)))
    return _AtMost(Group(*parts))


def _section(title: str, body: RenderableType, aside: str = "") -> RenderableType:
    head = Text.assemble((title, "bold"), (f"  {aside}" if aside else "", "dim"))
    return Padding(Group(head, Padding(body, (0, 0, 0, 2))), (1, 0, 0, 0))


def _pairs(rows: Iterable[tuple[str, RenderableType]]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for subject, words in rows:
        table.add_row(subject, words)
    return table


def _bullets(lines: Iterable[str]) -> Table:
    table = Table.grid(padding=(0, 1))
    for line in lines:
        table.add_row("-", Text(line))
    return table


def _head(a: ModelAnalysis) -> RenderableType:
    p = a.parameters
    longest = f", up to {a.max_sequence_length} tokens" if a.max_sequence_length else ""
    routed = f", {count(p.routed_experts)} in routed experts" if p.routed_experts else ""
    rows = [
        (
            "model",
            f"{len(a.layers)} layers of width {a.hidden_size}, vocabulary {a.vocab_size}{longest}",
        ),
        ("size", f"{count(p.total)} parameters, {count(p.active)} active a token{routed}"),
        ("weights", _weights(a)),
        ("fidelity", f"{a.fidelity}: {a.fidelity_reason}"),
    ]
    title = Text.assemble((a.architecture, "bold"), f"  {a.model_type}, {a.dtype}")
    return Group(title, Padding(_pairs((s, Text(w)) for s, w in rows), (0, 0, 0, 2)))


def _weights(a: ModelAnalysis) -> str:
    c = a.checkpoint
    if c is None:
        return "none in the folder: planning only"
    stored = ", ".join(f"{form} {size(n)}" for form, n in c.formats.items())
    packed = ", ".join(f"{form} {size(n)}" for form, n in c.packed.items())
    shards = f"{c.shards} shard{'s' * (c.shards != 1)}"
    return f"{size(c.bytes)} in {shards}: {stored}" + (f"; packed {packed}" if packed else "")


def _layers(a: ModelAnalysis) -> RenderableType:
    """One letter a layer; a bar where a pipeline may cut, when it may not everywhere."""
    names = letters(a)
    styles = {mixer: STYLES[i % len(STYLES)] for i, mixer in enumerate(names)}
    every = a.residual.cut_multiple if a.residual else 1
    routed = any(layer.feed_forward == "moe" for layer in a.layers)
    small = [routed and layer.feed_forward == "dense" for layer in a.layers]
    strip, legend = Text(overflow="fold"), Text()
    for i, layer in enumerate(a.layers):
        if i and every > 1 and i % every == 0:
            strip.append("|", "dim")
        letter = names[layer.mixer]
        strip.append(letter.lower() if small[i] else letter, styles[layer.mixer])
    for mixer, letter in names.items():
        times = sum(layer.mixer == mixer for layer in a.layers)
        name = "no mixer" if mixer == "none" else mixer.replace("_", " ")
        legend.append(letter, styles[mixer]).append(f" {name} x {times}   ")
    if any(small):
        legend.append("small: dense feed-forward   ", "dim")
    if every > 1 and len(a.layers) > every:
        legend.append("|: a pipeline may cut", "dim")
    return _section("Layers", Group(strip, legend), layer_pattern(a))


def _facts(a: ModelAnalysis) -> RenderableType:
    return _section("Structure", _pairs((s, Text(w)) for s, w in anatomy.facts(a)))


class _Bar:
    """A share as a bar as wide as its column; without colour in a pipe."""

    def __init__(self, value: float, largest: float) -> None:
        self.value, self.largest = value, largest

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Bar(self.largest or 1, 0, self.value, color="cyan")

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(4, options.max_width)


def _table(*columns: str) -> Table:
    """Columns that start with `>` are numbers; an empty name is a bar."""
    style = {"expand": True, "pad_edge": False, "show_edge": False, "header_style": "dim"}
    table = Table(box=box.SIMPLE_HEAD, **style)
    for column in columns:
        right = column.startswith(">")
        table.add_column(
            column.lstrip(">"),
            justify="right" if right else "left",
            ratio=1 if column in ("", "shape") else None,
            no_wrap=True,
        )
    return table


def _shares(a: ModelAnalysis) -> RenderableType:
    found = anatomy.shares(a)
    largest = [
        max((getattr(s, k) for s in found), default=0) for k in ("parameters", "flops", "saved")
    ]
    table = _table("part", ">parameters", "", ">FLOPs", "", ">bytes kept", "")
    for s in found:
        table.add_row(
            s.name.replace("_", " "),
            count(s.parameters),
            _Bar(s.parameters, largest[0]),
            count(s.flops),
            _Bar(s.flops, largest[1]),
            size(s.saved),
            _Bar(s.saved, largest[2]),
        )
    table.add_section()
    kept = sum(s.saved for s in found)
    table.add_row(
        "all", count(a.parameters.total), "", count(sum(s.flops for s in found)), "", size(kept), ""
    )
    aside = (
        f"forward FLOPs (full squares), bytes kept for backward; a token of {anatomy.length_of(a)}"
    )
    return _section("Parts", table, aside)


def _operators(a: ModelAnalysis) -> RenderableType:
    table = _table("operator", ">calls", ">FLOPs", ">bytes", "shape")
    for o in anatomy.operators(a):
        shape = f"{o.shapes} shapes" if o.shapes > 1 else anatomy.attributes(o.attributes)
        table.add_row(o.name, str(o.calls), count(o.flops), size(o.bytes), Text(shape))
    aside = f"forward, a token of {anatomy.length_of(a)}; bytes of activations"
    return _section("Operators", table, aside)


def _regions(a: ModelAnalysis) -> RenderableType:
    found = anatomy.fusable(a)
    largest = max((f.avoided for f in found), default=0)
    table = _table("what one kernel could do", ">regions", ">bytes avoided", "")
    for f in found:
        bar = _Bar(f.avoided, largest)
        table.add_row(f.kind.replace("_", " "), str(f.count), size(f.avoided), bar)
    return _section("Fusable", table, "in all layers, forward, a token")


def _support(a: ModelAnalysis, backend: Backend) -> RenderableType:
    from analyzers.support import support

    answers = support(a, backend)
    rows = []
    for native, word in ((False, "missing"), (True, "native"), (None, "not asked")):
        these = [answer for answer in answers if answer.native is native]
        if native is False:
            rows += [(word, Text(f"{answer.operator}: {answer.how}")) for answer in these]
        elif these:
            named = ", ".join(answer.operator.removeprefix("aten.") for answer in these)
            why = f" ({these[0].how})" if native is None else ""
            rows.append((word, Text(f"{named}{why}")))
    return _section(f"On {backend.title}", _pairs(rows), f"status {backend.status}")
