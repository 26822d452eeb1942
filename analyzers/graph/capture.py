"""One fx graph a kind of layer, from one export of a decoder that has one layer of each kind.

The decoder is cut down and exported in one piece on the meta device, so that masks, positions and
whatever else layers hand to one another are made by the model's own code; 93 layers cost what three
cost. Batch and sequence stay symbolic where the code allows it.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import fx, nn
from torch.export import Dim
from torch.export.graph_signature import InputKind
from torch.fx.experimental.proxy_tensor import make_fx

from analyzers.graph.collapse import collapse
from analyzers.graph.flat import flat
from analyzers.graph.layer import Dimension, LayerGraph
from analyzers.graph.naming import name_calls
from analyzers.graph.opaque import WHOLE, replaced
from analyzers.models import float32_names, is_named
from analyzers.structure import Kind, decoder_layers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DIMENSIONS: tuple[Dimension, Dimension] = ("batch", "sequence")
PRIMES = (251, 241, 239, 233)
"""Lengths to export at: a prime that divides no width tells a tensor's power of the length."""


@dataclass
class Capture:
    graphs: list[LayerGraph]
    by: Literal["export", "make_fx"]
    reason: str = ""
    """Why it is not torch.export with both dimensions symbolic."""


def capture(model: PreTrainedModel, kinds: list[Kind]) -> Capture:
    """One graph a kind, in the order of `kinds`.

    The model is cut down for it and is of no further use. Raises whatever make_fx raises on code
    that neither it nor torch.export can follow.
    """
    path, layers = decoder_layers(model)
    owner, name = _reader(model, path)
    _cut_down(owner, name, [kind.layers[0] for kind in kinds], len(layers))
    owner.eval()
    _to_bfloat16(model)
    hidden = model.config.get_text_config().hidden_size
    decoder = _Decoder(owner)
    widths = {size for weight in owner.parameters() for size in weight.shape}
    tokens = next(p for p in PRIMES if not any(w % p == 0 for w in widths))
    traced = _with_operators(decoder, kinds, hidden, tokens)
    block = getattr(owner.config, "attn_res_block_size", None)
    graphs = _split(traced, owner, name, kinds)
    for graph in graphs:
        if block:
            graph.starts = sum(i // block + 1 for i in graph.kind.layers) / len(graph.kind.layers)
    return Capture(graphs, traced.by, traced.reason)


def _with_operators(decoder: _Decoder, kinds: list[Kind], hidden: int, tokens: int) -> _Traced:
    """Traced with the operators that stay whole in place; a list of experts in its own form where
    its block does more than the operator stands for."""
    try:
        with replaced(decoder.owner, kinds):
            return _trace(decoder, hidden, tokens)
    except Exception:
        if not any(moe.layout == "module_list" for kind in kinds for moe in kind.moes):
            raise
    with replaced(decoder.owner, kinds, lists=False):
        return _trace(decoder, hidden, tokens)


def _reader(model: nn.Module, path: str) -> tuple[Any, str]:
    """The module nearest around the layers at `path` that reads tokens, and their path in it.

    It is the one that holds them but for models in BERT's form, whose encoder takes what the
    embeddings module makes of the tokens.
    """
    words = path.split(".")
    for start in range(len(words) - 1, -1, -1):
        owner = model.get_submodule(".".join(words[:start]))
        if {"inputs_embeds", "input_ids"} & _parameters(owner):
            return owner, ".".join(words[start:])
    owner_path, _, name = path.rpartition(".")
    return model.get_submodule(owner_path), name


def _parameters(module: nn.Module) -> set[str]:
    return set(inspect.signature(module.forward).parameters)


class _Decoder(nn.Module):
    """[B, T, D] or token ids [B, T] -> [B, T, D] through the cut-down decoder."""

    def __init__(self, owner: nn.Module) -> None:
        super().__init__()
        self.owner = owner
        self.has_cache = {"use_cache", "kwargs"} & _parameters(owner)

    def forward(
        self, inputs_embeds: torch.Tensor | None = None, input_ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        given = (
            {"input_ids": input_ids} if inputs_embeds is None else {"inputs_embeds": inputs_embeds}
        )
        options = {"use_cache": False} if self.has_cache else {}
        return self.owner(**given, **options).last_hidden_state


def _to_bfloat16(model: PreTrainedModel) -> None:
    """What is not float32 in a bfloat16 model becomes bfloat16, whatever the config names."""
    kept = float32_names(model)
    kept |= {"inv_freq", "original_inv_freq"}  # rotary embeddings compute in float32
    for name, weight in (*model.named_parameters(), *model.named_buffers()):
        if weight.is_floating_point() and not any(is_named(part, name) for part in kept):
            weight.data = weight.data.to(torch.bfloat16)


def _cut_down(owner: Any, name: str, keep: list[int], count: int) -> None:
    """Keeps only these layers, in the module and in every per-layer list or count of its config."""
    holder, _, last = name.rpartition(".")
    layers = owner.get_submodule(name)
    setattr(owner.get_submodule(holder), last, nn.ModuleList([layers[i] for i in keep]))
    config = owner.config
    for key, value in list(vars(config).items()):
        if isinstance(value, list) and len(value) == count:
            setattr(config, key, [value[i] for i in keep])
    # LongCat-Flash counts both: its `num_hidden_layers`, two a layer, sets the other as well.
    counts = [key for key in ("num_hidden_layers", "num_layers") if hasattr(config, key)]
    for key in counts:
        setattr(config, key, len(keep))


# ----------------------------------------------------------------------------------------- tracing


@dataclass
class _Traced:
    graph: fx.Graph
    """Flat: subgraphs are inlined, `meta["grad"]` says where gradients are recorded."""
    batch: int
    tokens: int
    dynamic: list[Dimension]
    by: Literal["export", "make_fx"]
    reason: str


# Tried in turn: code that compares a length with a constant may refuse it as a symbol.
ATTEMPTS: tuple[tuple[Dimension, ...], ...] = (
    ("batch", "sequence"),
    ("sequence",),
    ("batch",),
    (),
)


def _trace(decoder: _Decoder, hidden: int, tokens: int) -> _Traced:
    """By torch.export with as much symbolic as goes; from embeddings, or from token ids where the
    code asks for them (a router that hashes tokens); by make_fx where neither goes."""
    reasons = []
    forms = ["inputs_embeds", "input_ids"]
    inner = [m for m in decoder.modules() if m not in (decoder, decoder.owner)]
    if any("input_ids" in _parameters(m) for m in inner):
        forms.reverse()
    pending = [(form, dynamic) for dynamic in ATTEMPTS for form in forms]
    while pending:
        form, dynamic = pending.pop(0)
        # A symbolic batch is not 1, which export would take for a constant.
        given = _inputs(form, 2 if "batch" in dynamic else 1, tokens, hidden)
        sizes = {i: Dim.DYNAMIC for i, d in enumerate(DIMENSIONS) if d in dynamic}
        try:
            # On code that it cannot follow torch prints all of the graph that it has so far.
            with contextlib.redirect_stderr(io.StringIO()):
                program = torch.export.export(
                    decoder,
                    (),
                    {form: given},
                    dynamic_shapes={form: sizes} if sizes else None,
                    strict=False,
                )
        except Exception as e:  # export raises anything on code that it cannot follow
            reasons.append(f"{' and '.join(dynamic) or 'static'}: {_first_line(e)}")
            about_form = not type(e).__module__.startswith("torch")
            pending = [p for p in pending if (p[0] == form) != about_form]
            continue
        graph = flat(program.graph_module, _exported_roles(program))
        reason = "; ".join(dict.fromkeys(reasons)) if len(dynamic) < len(DIMENSIONS) else ""
        return _Traced(graph, given.shape[0], tokens, list(dynamic), "export", reason)
    given = _inputs("inputs_embeds", 1, tokens, hidden)

    def run(embedded: torch.Tensor) -> torch.Tensor:
        return decoder(embedded)

    setattr(run, "_orig_mod", decoder)  # noqa: B010  make_fx records the modules of this one
    tracer = make_fx(
        run,
        tracing_mode="fake",
        pre_dispatch=True,
        record_module_stack=True,
        _allow_non_fake_inputs=True,
    )
    reason = f"torch.export failed: {reasons[-1]}"
    return _Traced(flat(tracer(given), {}), 1, tokens, [], "make_fx", reason)


def _inputs(form: str, batch: int, tokens: int, hidden: int) -> torch.Tensor:
    if form == "input_ids":
        return torch.empty(batch, tokens, dtype=torch.long, device="meta")
    return torch.empty(batch, tokens, hidden, dtype=torch.bfloat16, device="meta")


def _first_line(error: Exception) -> str:
    line = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {line:.200}"


def _exported_roles(program: torch.export.ExportedProgram) -> dict[str, tuple[str, str]]:
    """Role and path of each placeholder of an exported program that is a weight or a constant."""
    kinds = {
        InputKind.PARAMETER: "parameter",
        InputKind.BUFFER: "buffer",
        InputKind.CONSTANT_TENSOR: "buffer",
    }
    return {
        spec.arg.name: (kinds[spec.kind], spec.target or "")
        for spec in program.graph_signature.input_specs
        if spec.kind in kinds
    }


# ------------------------------------------------------------------------------------ one per layer


def _split(traced: _Traced, owner: nn.Module, name: str, kinds: list[Kind]) -> list[LayerGraph]:
    """The calls inside each layer as a graph of their own."""
    inside = re.compile(rf"^owner\.{re.escape(name)}\.(\d+)\.?(.*)$")
    where: dict[fx.Node, tuple[int, str]] = {}
    for node in traced.graph.nodes:
        match = next(
            (m for m in map(inside.match, reversed(node.meta.get("stack", ()))) if m), None
        )
        if node.op == "call_function" and match:
            where[node] = int(match[1]), match[2]
    depends = _depends_on_input(traced.graph)
    shape = next(n for n in depends if n.op == "placeholder").meta["val"].shape
    symbols: dict[Any, Dimension] = {
        size.node.expr: dimension
        for size, dimension in zip(shape, DIMENSIONS, strict=False)
        if isinstance(size, torch.SymInt)
    }
    graphs = []
    for number, kind in enumerate(kinds):
        prefix = f"owner.{name}.{number}."
        module = _extract(traced.graph, where, number, prefix, depends)
        graph = LayerGraph(kind, module, traced.batch, traced.tokens, traced.dynamic, symbols)
        if not any(graph.calls()):
            raise RuntimeError("a layer left no node in the graph of its decoder")
        name_calls(graph)
        for mixer in kind.mixers:
            inlined = not any(n.meta["operator"] == mixer.operator for n in graph.calls())
            if inlined and mixer.operator in WHOLE:
                collapse(module.graph, mixer.path, WHOLE[mixer.operator])
        name_calls(graph)
        module.recompile()
        graphs.append(graph)
    return graphs


def _depends_on_input(graph: fx.Graph) -> set[fx.Node]:
    """The decoder's input and what gradients reach it through."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        source = node.op == "placeholder" and node.meta["role"] == "input"
        through = node.meta.get("grad") and any(n in found for n in node.all_input_nodes)
        # Not through sizes: rotary angles are made from them.
        if source or (through and not isinstance(node.meta["val"], torch.SymInt)):
            found.add(node)
    return found


def _extract(
    whole: fx.Graph,
    where: dict[fx.Node, tuple[int, str]],
    number: int,
    prefix: str,
    depends: set[fx.Node],
) -> fx.GraphModule:
    graph, new, results = fx.Graph(), {}, []
    mine = [node for node in whole.nodes if node in where and where[node][0] == number]
    for node in mine:
        for source in node.all_input_nodes:
            if source in new:
                continue
            outside = new[source] = graph.placeholder(source.name)
            outside.meta = {
                "val": source.meta["val"],
                "role": source.meta.get("role", "input"),
                "path": source.meta.get("path", "").removeprefix(prefix),
                "grad": source in depends,
            }
        copied = new[node] = graph.node_copy(node, new.__getitem__)
        copied.meta = {
            "val": node.meta["val"],
            "path": where[node][1],
            "grad": node.meta["grad"],
        }
        leaves = any(user not in where or where[user][0] != number for user in node.users)
        if leaves and isinstance(node.meta["val"], torch.Tensor):
            results.append(copied)
    graph.output(tuple(results))
    _placeholders_first(graph)
    return fx.GraphModule(nn.Module(), graph)


def _placeholders_first(graph: fx.Graph) -> None:
    first = next(iter(graph.nodes), None)
    for node in graph.find_nodes(op="placeholder"):
        if node is not first and first is not None:
            first.prepend(node)
