"""Which transformers architectures the analysis must know, and how far it comes with each.

An architecture counts when its modelling code defines routed experts or a linear, state-space or
sparse mixer (`SIGNS`, read from the syntax tree, so that comments do not count), or when its
default text model is of such a type. It is analysed as its users would meet it: a folder with the
config of a language model, here a tiny one made from the class's defaults.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from analyzers import models
from analyzers.analysis import analyze
from analyzers.errors import InputError
from analyzers.schema import ModelAnalysis
from analyzers.tiny import tiny_config

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

SIGNS: dict[str, str] = {
    "routed experts": r"\w*[Ee]xperts|\w*(Moe|MoE)(Block|Layer|Gate|Mlp|MLP)?|\w*SparseMLP",
    "state space": r"A_log|ssm_state_size|selective_scan\w*",
    "delta rule": r"\w*(GatedDelta|DeltaAttention|DeltaNet)\w*",
    "linear attention": r"slope_rate|\w*(Lightning|Linear)Attention\w*|\w*Retention\w*",
    "recurrence": r"\w*(R[Gg]L[Rr][Uu]|Rwkv|[ms]LSTM|xLSTM|RecurrentBlock)\w*",
    "short convolution": r"\w*Short(Conv|Convolution)\w*",
    "sparse attention": r"\w*[Ii]ndexer|\w*BlockSparse\w*|\w*(LSH|Sparse)\w*Attention\w*"
    r"|\w*GlobalLocal\w*|\w*TransientGlobal\w*|one_sided_attn_window\w*|\w*(Mra|Nystrom|Yoso)\w*SelfAttention",
}
"""What is looked for, and the identifiers (classes, attributes, decorators) that give it away."""


@dataclass(frozen=True)
class Architecture:
    """A class of transformers that is a language model with such a part."""

    model_type: str
    name: str
    """Of the class, e.g. `DeepseekV3ForCausalLM`."""
    signs: tuple[str, ...]


@dataclass(frozen=True)
class Excluded:
    """A model type whose code shows a sign and that is still not listed by itself."""

    model_type: str
    reason: str


@dataclass(frozen=True)
class Result:
    """How far the analysis of one architecture came."""

    model_type: str
    architecture: str
    signs: list[str]
    level: str
    """Of fidelity; `failed` when there was no analysis."""
    reason: str
    """Why it was not traced; empty otherwise."""
    mixers: list[str] = field(default_factory=list)
    experts: str = ""
    """`count / top k`."""
    blocks: int = 0
    nodes: int = 0
    dynamic: list[str] = field(default_factory=list)
    seconds: float = 0.0
    """Of the whole analysis, which is nearly all export."""


def enumerate_architectures() -> tuple[list[Architecture], list[Excluded]]:
    """Every architecture of the installed transformers that counts, and what was left out."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    types = {t: CONFIG_MAPPING[t] for t in CONFIG_MAPPING}
    types = {t: c for t, c in types.items() if c.__module__.startswith("transformers.")}
    parts = {part: t for t, config_class in types.items() for part in _parts(config_class)}
    found: dict[str, Architecture] = {}
    excluded: list[Excluded] = []
    for model_type, config_class in types.items():
        signs = _type_signs(config_class)
        if not signs:
            continue
        names = models.class_names(model_type)
        whole = parts.get(model_type)
        if not names and whole:
            excluded.append(Excluded(model_type, f"a part of {whole}"))
            continue
        names = names or [cls.__name__ for cls in models.candidates(config_class)]
        new = [name for name in names if name not in found]
        found |= {name: Architecture(model_type, name, signs) for name in new}
        if not names:
            excluded.append(Excluded(model_type, "no class that reads tokens"))
        elif not new:
            excluded.append(Excluded(model_type, f"built as {', '.join(names)}"))
    order = sorted(found.values(), key=lambda a: (a.model_type, a.name))
    return order, sorted(excluded, key=lambda e: e.model_type)


def _parts(config_class: type[PreTrainedConfig]) -> Iterator[str]:
    """The model types that a composite config is made of; placeholders of any config are not."""
    for part in (getattr(config_class, "sub_configs", None) or {}).values():
        if getattr(part, "model_type", "") not in ("", config_class.model_type):
            yield part.model_type
        yield from _parts(part)


def _type_signs(config_class: type[PreTrainedConfig]) -> tuple[str, ...]:
    """The signs of a type's own code or, where it has none, of the class or of the default text
    model that it takes from another type."""
    source = _modeling_file(config_class)
    if signs := _signs(source):
        return signs
    if not source.exists():
        files = [Path(inspect.getfile(cls)) for cls in models.candidates(config_class)]
        return next((signs for file in files if (signs := _signs(file))), ())
    if "text_config" not in (getattr(config_class, "sub_configs", None) or {}):
        return ()
    try:
        text = config_class().get_text_config()
    except Exception:  # config classes raise anything; one without defaults names no text model
        return ()
    return _signs(_modeling_file(type(text)))


def _modeling_file(config_class: type) -> Path:
    """Where a config's modelling code is, as transformers names its files."""
    file = Path(inspect.getfile(config_class))
    return file.with_name(file.name.replace("configuration_", "modeling_"))


@functools.cache
def _signs(source: Path) -> tuple[str, ...]:
    """The signs among the identifiers that a modelling file defines or sets."""
    text = source.read_text(encoding="utf-8") if source.exists() else ""
    forms = {sign: re.compile(form) for sign, form in SIGNS.items()}
    words = set(re.findall(r"\w+", text))
    if not any(form.fullmatch(word) for form in forms.values() for word in words):
        return ()  # parsing takes a while, and most have none
    names: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.attr)
    return tuple(s for s, form in forms.items() if any(form.fullmatch(n) for n in names))


# -------------------------------------------------------------------------------------- analysis


def write_tiny(architecture: Architecture, folder: Path) -> None:
    """A model folder with the tiny config of an architecture and no weights."""
    config = tiny_config(architecture.model_type)
    config.architectures = [architecture.name]
    config.save_pretrained(folder)


def examine(architecture: Architecture) -> Result:
    """Analyses an architecture in its tiny form; what goes wrong is in the result."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        try:
            write_tiny(architecture, Path(folder))
            analysis = analyze(folder)
        except Exception as e:  # a sweep goes on whatever a class raises
            fault = e.fault if isinstance(e, InputError) else f"{type(e).__name__}: {e}"
            return failed(architecture, fault, time.monotonic() - start)
    return _result(architecture, analysis, time.monotonic() - start)


def failed(architecture: Architecture, fault: str, seconds: float) -> Result:
    return Result(
        model_type=architecture.model_type,
        architecture=architecture.name,
        signs=list(architecture.signs),
        level="failed",
        reason=" ".join(fault.split())[:300],
        seconds=seconds,
    )


def _result(architecture: Architecture, analysis: ModelAnalysis, seconds: float) -> Result:
    experts = analysis.experts
    graphs = [block.graph for block in analysis.blocks if block.graph]
    dynamic = [d for d in ("batch", "sequence") if graphs and all(d in g.dynamic for g in graphs)]
    traced = analysis.fidelity == "traced"
    return Result(
        model_type=architecture.model_type,
        architecture=analysis.architecture,
        signs=list(architecture.signs),
        level=analysis.fidelity,
        reason="" if traced else analysis.fidelity_reason,
        mixers=list(dict.fromkeys(block.mixer for block in analysis.blocks)),
        experts=f"{experts.count} / {experts.top_k}" if experts else "",
        blocks=len(analysis.blocks),
        nodes=sum(len(graph.nodes) for graph in graphs),
        dynamic=dynamic,
        seconds=seconds,
    )


# ------------------------------------------------------------------------------------------ page


def render(results: list[Result], excluded: list[Excluded], setting: str) -> str:
    """The results as a page: a summary, what failed, and a row an architecture."""
    levels = Counter(result.level for result in results)
    summary = ", ".join(f"{count} {level}" for level, count in levels.most_common())
    share = levels["traced"] / max(1, len(results))
    lines = [
        "# Coverage",
        "",
        "Made by `python benchmarks/coverage.py --write-docs`; do not edit.",
        "",
        f"**{len(results)} architectures: {summary} ({share:.1%} traced).** {setting}.",
        "",
        "Every transformers architecture with routed experts or a linear, state-space or sparse",
        "mixer: found by the identifiers in its modelling code (`analyzers/coverage.py`), analysed",
        "in a tiny form of its default config (`analyzers/tiny`), without weights. Seconds are",
        "those of the whole analysis, nearly all of it export. A layer that was traced has a graph",
        "with every call in it; `structural` means counted from modules.",
        "",
        "| architecture | model type | level | mixers | experts / top k | blocks | nodes |"
        " dynamic | seconds |",
        "|---|---|---|---|---|--:|--:|---|--:|",
    ]
    lines += [_row(result) for result in results]
    untraced = [result for result in results if result.reason]
    lines += ["", "## Not traced", ""]
    lines += [f"- {r.architecture} ({r.level}): {r.reason}" for r in untraced] or ["None."]
    lines += ["", "## Not listed by themselves", "", "| model type | why |", "|---|---|"]
    lines += [f"| {e.model_type} | {e.reason} |" for e in excluded]
    return "\n".join(lines) + "\n"


def _row(result: Result) -> str:
    cells = [
        result.architecture,
        result.model_type,
        result.level,
        ", ".join(result.mixers),
        result.experts,
        str(result.blocks),
        str(result.nodes),
        ", ".join(result.dynamic),
        f"{result.seconds:.1f}",
    ]
    return f"| {' | '.join(cells)} |"
