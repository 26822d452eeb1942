"""What a model is made of, in the words and numbers that terminal and report show."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from adapter_agent.words import count, size

if TYPE_CHECKING:
    from analyzers.schema import Experts, ModelAnalysis, Part, PartName, Router, Tower

LENGTH = 4096
"""Tokens of the document that costs a token are given for, where the model takes so many."""


def length_of(analysis: ModelAnalysis) -> int:
    return min(LENGTH, analysis.max_sequence_length or LENGTH)


@dataclass
class Share:
    """One part over all layers; the costs are means a token of one document."""

    name: PartName
    parameters: int = 0
    flops: float = 0.0
    """Forward."""
    saved: float = 0.0
    """Bytes kept for the backward pass with frozen weights."""

    def add(self, part: Part, times: int, length: int) -> None:
        self.parameters += part.parameters * times
        self.flops += part.flops.at(length) / length * times
        self.saved += part.saved_bytes.at(length) / length * times


def shares(analysis: ModelAnalysis) -> list[Share]:
    """All parts of the model, most parameters first."""
    length = length_of(analysis)
    found: dict[str, Share] = {}
    parts = [(part, len(block.layers)) for block in analysis.blocks for part in block.parts]
    for part, times in [*parts, *((part, 1) for part in analysis.outer)]:
        found.setdefault(part.name, Share(part.name)).add(part, times, length)
    return sorted(found.values(), key=lambda share: (-share.parameters, -share.flops))


@dataclass
class Fusable:
    """All regions of one kind."""

    kind: str
    count: int = 0
    """In all layers."""
    avoided: float = 0.0
    """Bytes a token that one kernel for each would not move."""


def fusable(analysis: ModelAnalysis) -> list[Fusable]:
    """Kinds of regions, most bytes first; empty when nothing was traced."""
    length = length_of(analysis)
    found: dict[str, Fusable] = {}
    for block in analysis.blocks:
        for region in block.graph.regions if block.graph else []:
            kind = found.setdefault(region.kind, Fusable(region.kind))
            kind.count += len(block.layers)
            kind.avoided += region.bytes_avoided.at(length) / length * len(block.layers)
    return sorted(found.values(), key=lambda f: -f.avoided)


@dataclass
class Called:
    """All calls of one operator, in whatever shape; costs as in `Share`."""

    name: str
    calls: int = 0
    shapes: int = 0
    flops: float = 0.0
    bytes: float = 0.0
    attributes: dict[str, int | float | str | bool] = field(default_factory=dict)
    """Of the shape with the most FLOPs."""


def operators(analysis: ModelAnalysis) -> list[Called]:
    """Operators by name, most FLOPs first."""
    length = length_of(analysis)
    found: dict[str, Called] = {}
    for o in analysis.operators:
        called = found.setdefault(o.name, Called(o.name, attributes=o.attributes))
        called.calls += o.count
        called.shapes += 1
        called.flops += o.flops.at(length) / length
        called.bytes += o.bytes.at(length) / length
    return sorted(found.values(), key=lambda called: (-called.flops, -called.bytes))


# --------------------------------------------------------------------------------------- words


def facts(analysis: ModelAnalysis) -> list[tuple[str, str]]:
    """What the structure of the model is, as (subject, words)."""
    return [(subject, words) for subject, words in _facts(analysis) if words]


def _facts(a: ModelAnalysis) -> Iterator[tuple[str, str]]:
    yield from mixers(a)
    if a.experts:
        yield "experts", experts(a.experts, a.hidden_size)
        yield "router", router(a.experts.router) if a.experts.router else ""
    if a.residual and (a.residual.kind != "plain" or a.residual.cut_multiple > 1):
        r = a.residual
        streams = f" in {r.streams} streams" if r.streams > 1 else ""
        cuts = f"; stages begin at multiples of {r.cut_multiple}" if r.cut_multiple > 1 else ""
        carried = f"{size(r.carried_bytes_per_token)} a token between layers"
        yield "residual", f"{_plain(r.kind)}{streams}, {carried}{cuts}"
    yield "towers", ", ".join(_tower(tower) for tower in a.towers)
    if a.multi_token:
        m = a.multi_token
        held = f", {count(m.parameters)} parameters" if m.parameters else ""
        built = "" if m.built else ", not in the class"
        yield (
            "multi-token",
            f"{m.layers} layer{'s' * (m.layers > 1)} after the decoder{held}{built}",
        )
    tied = ["embedding and head"] if a.tied_embeddings else []
    tied = [" = ".join(group) for group in a.tied_weights] or tied
    yield "tied", "; ".join(tied[:2]) + (f"; {len(tied) - 2} more" if tied[2:] else "")
    yield "float32", ", ".join(a.float32_parameters)


def mixers(analysis: ModelAnalysis) -> Iterator[tuple[str, str]]:
    """Each mixer with its attributes: `kda`, `69 layers: 96 heads, key dim 128, ...`."""
    layers: Counter[tuple[str, str]] = Counter()
    for block in (b for b in analysis.blocks if b.mixer != "none"):
        layers[block.mixer, attributes(block.mixer_attributes)] += len(block.layers)
    for (mixer, words), times in layers.items():
        number = f"{times} layer{'s' * (times > 1)}"
        yield _plain(mixer), f"{number}: {words}" if words else number


def attributes(values: dict[str, int | float | str | bool]) -> str:
    """`{"heads": 4, "key_dim": 32, "rope": False}` -> `4 heads, key dim 32, no rope`."""
    words = []
    for key, value in values.items():
        name = _plain(key)
        if key in ("value_heads", "kv_heads") and value == values.get("heads"):
            continue
        if isinstance(value, bool):
            words.append(name if value else f"no {name}")
        elif key.endswith("heads"):
            words.append(f"{value} {name}")
        else:
            number = f"{value:.4g}" if isinstance(value, float) else _plain(str(value))
            words.append(f"{name} {number}")
    return ", ".join(words)


def experts(e: Experts, hidden: int) -> str:
    more = f" (and {e.zero_experts} that compute nothing)" if e.zero_experts else ""
    latent = f" in a latent width, of a model {hidden} wide" if e.hidden_size != hidden else ""
    form = [e.activation] * (e.activation != "unknown") + ["gated"] * e.gated
    words = [
        f"{e.count}{more}, top {e.top_k}",
        f"{e.hidden_size} x {e.intermediate_size}{latent}",
        " ".join(form),
        f"weights {e.weight_format}",
    ]
    if e.shared:
        wide = f", {e.shared_intermediate_size} wide" if e.shared_intermediate_size else ""
        words.append(f"{e.shared} shared{wide}")
    return "; ".join(filter(None, words))


def router(r: Router) -> str:
    known = r.scoring != "unknown"
    words = [f"{r.scoring} scores of {r.input_size}" if known else f"reads {r.input_size}"]
    if r.correction_bias:
        words.append("a bias corrects the choice")
    if r.groups > 1:
        words.append(f"best {r.top_k_groups} of {r.groups} groups")
    if r.renormalize:
        words.append("weights sum to one")
    if r.scaling != 1:
        words.append(f"scaled by {r.scaling:g}")
    if r.auxiliary_loss:
        words.append(f"auxiliary loss {r.auxiliary_loss:g}")
    return ", ".join(words)


def _tower(tower: Tower) -> str:
    held = f" {count(tower.parameters)}" if tower.parameters else ""
    return f"{tower.kind}{held}" + ("" if tower.built else " (not in the class)")


def differences(analysis: ModelAnalysis, most: int) -> list[str]:
    """Tensors that are not as the config says; what is left out is counted in a last line."""
    found = analysis.checkpoint.differences if analysis.checkpoint else []
    lines = [f"{d.tensor} ({d.kind}): {d.detail}" for d in found[:most]]
    return lines + [f"{len(found) - most} more tensors differ"] * (len(found) > most)


def _plain(name: str) -> str:
    return name.replace("_", " ")
