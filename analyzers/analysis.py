"""model folder -> ModelAnalysis, from config, headers, a model on meta and a graph of each kind."""

from __future__ import annotations

import contextlib
import copy
import gc
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from torch import nn

from analyzers import costs, models, tally
from analyzers.checkpoint import CheckpointFolder, open_checkpoint
from analyzers.costs import Call
from analyzers.errors import InputError
from analyzers.formats import Logical, Stored, quantization_of, stored_weights
from analyzers.graph import BlockGraph, trace_blocks
from analyzers.headers import GenericConfig, infer_model
from analyzers.notes import about_config, about_layers
from analyzers.outer import (
    looked_up,
    multi_token,
    outer_calls,
    outer_counts,
    residual,
    tied_weights,
    towers,
)
from analyzers.quantization import configured_format, stored_format
from analyzers.schema import (
    Block,
    Checkpoint,
    Experts,
    Fidelity,
    Layer,
    Linear,
    ModelAnalysis,
    Parameters,
    PartName,
    Tower,
)
from analyzers.structure import Kind, kinds
from analyzers.weights import check_weights, refusal

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

STORED = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


@contextlib.contextmanager
def _collector_paused() -> Iterator[None]:
    """Python's garbage collector walks half a million tensor entries again and again, all of which
    are kept; without it the analysis takes a sixth less time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@_collector_paused()
def analyze(
    path: str | Path,
    *,
    trust_remote_code: bool = False,
    progress: Callable[[str], None] | None = None,
) -> ModelAnalysis:
    """What the model in a folder is made of and what each part costs. No weight is read.

    Code in the folder is imported only with `trust_remote_code`; without a class the structure is
    inferred from tensor names, shapes and config. Raises InputError for a folder that is not a
    model, or is damaged or unsafe.
    """
    say = progress or (lambda line: None)
    folder = Path(path)
    config = models.find_config(folder, trust_remote_code=trust_remote_code)
    checkpoint = open_checkpoint(folder)
    say(f"config: {config.model_type}; {_weights(checkpoint)}")
    data = models.read_config(folder)
    weights = stored_weights(checkpoint, quantization_of(data)) if checkpoint else Stored()
    inferred = infer_model(config, checkpoint) if isinstance(config, GenericConfig) else None
    if inferred is not None:
        model, notes = cast("PreTrainedModel", inferred), inferred.notes
        if weights.faults:
            raise refusal(folder, weights.faults)
        differences = []
    else:
        # Tracing changes the model's config; the caller's stays as it is.
        model = models.build_on_meta(copy.deepcopy(cast("PreTrainedConfig", config)))
        notes = []
        differences = check_weights(model, checkpoint, weights, data) if checkpoint else []
    for size in ("hidden_size", "vocab_size"):
        if not isinstance(getattr(model.config.get_text_config(), size, None), int):
            fix = "only decoder language models are analysed"
            raise InputError(folder / "config.json", field=size, fault="is missing", fix=fix)
    layer_kinds = kinds(model)
    say(f"{type(model).__name__}: {_kinds(len(layer_kinds))}")

    text = model.config.get_text_config()
    calls = [costs.block_calls(kind, text) for kind in layer_kinds]
    outside = outer_calls(model)
    outer = tally.parts(outer_counts(model), outside)
    stored = weights.tensors
    beside = towers(model, data, {name: t.shape for name, t in stored.items()})
    further = multi_token(model, layer_kinds, {name: t.shape for name, t in stored.items()})
    tied = tied_weights(model)
    handed_on = residual(model, layer_kinds)
    parameters = _parameters(model, layer_kinds, beside)
    float32 = _float32_names(model)
    dtype, assumed = _dtype(model, checkpoint)
    experts = _experts(layer_kinds, dtype, data, stored)
    notes += assumed + about_layers(layer_kinds, handed_on, tied)
    notes += about_config(quantization_of(data), beside, further)

    if inferred is not None:
        graphs, fidelity, reason = [None] * len(layer_kinds), "headers", inferred.reason
    else:
        graphs, fidelity, reason = _traced(model, layer_kinds, calls)
    say(f"fidelity {fidelity}: {reason}")
    encoder = bool(getattr(model.config, "is_encoder_decoder", False))
    return ModelAnalysis(
        model_type=config.model_type,
        architecture=type(model).__name__,
        fidelity=fidelity,
        fidelity_reason=reason,
        dtype=dtype,
        hidden_size=text.hidden_size,
        vocab_size=text.vocab_size,
        max_sequence_length=getattr(text, "max_position_embeddings", None),
        tied_embeddings=bool(getattr(text, "tie_word_embeddings", False)),
        tied_weights=tied,
        parameters=parameters,
        checkpoint=checkpoint
        and Checkpoint(
            bytes=checkpoint.nbytes,
            formats=checkpoint.formats,
            shards=len(checkpoint.shards),
            packed=weights.packed,
            differences=differences,
        ),
        layers=_layers(layer_kinds),
        blocks=[
            _block(kind, kind_calls, graph, encoder)
            for kind, kind_calls, graph in zip(layer_kinds, calls, graphs, strict=True)
        ],
        outer=outer,
        experts=experts,
        residual=handed_on,
        towers=beside,
        multi_token=further,
        operators=tally.operators(layer_kinds, calls, outside),
        float32_parameters=float32,
        notes=notes,
    )


def _weights(checkpoint: CheckpointFolder | None) -> str:
    if checkpoint is None:
        return "no weights (planning only)"
    return f"{checkpoint.nbytes / 1e9:.3f} GB in {len(checkpoint.shards)} shards"


def _kinds(count: int) -> str:
    return "1 kind of layer" if count == 1 else f"{count} kinds of layers"


def _parameters(model: PreTrainedModel, kinds: list[Kind], towers: list[Tower]) -> Parameters:
    """Exact counts; a tied parameter counts once, rows of experts that compute nothing never."""
    total = sum(p.numel() for p in model.parameters())
    routed = visited = 0
    for kind in kinds:
        for moe in kind.moes:
            experts = list(kind.module.get_submodule(moe.experts).parameters())
            held = sum(moe.held(p) for p in experts) * len(kind.layers)
            total -= sum(p.numel() for p in experts) * len(kind.layers) - held
            routed += held
            visited += round(held * moe.visited)
    unused = sum(t.parameters or 0 for t in towers if t.built)
    return Parameters(
        total=total,
        active=total - routed + visited - unused - looked_up(model),
        routed_experts=routed,
        embedding=outer_counts(model)["embedding"],
    )


def _layers(layer_kinds: list[Kind]) -> list[Layer]:
    layers = [
        Layer(index=index, mixer=kind.mixer, feed_forward=kind.feed_forward)
        for kind in layer_kinds
        for index in kind.layers
    ]
    return sorted(layers, key=lambda layer: layer.index)


def _experts(
    kinds: list[Kind], dtype: str, data: dict[str, Any], stored: dict[str, Logical]
) -> Experts | None:
    """The experts of most layers, those that a hash of the token chooses last."""
    found = [(kind, kind.moe) for kind in kinds if kind.moe]
    if not found:
        return None
    kind, moe = max(found, key=lambda f: (f[1].routing.scoring != "hash", len(f[0].layers)))
    path = f"model.layers.{kind.layers[0]}.{moe.experts}"
    return Experts(
        count=moe.count,
        top_k=moe.top_k,
        shared=moe.shared,
        hidden_size=moe.hidden_size,
        intermediate_size=moe.intermediate_size,
        router_input_size=moe.router_input_size,
        shared_intermediate_size=moe.shared_intermediate_size,
        activation=moe.activation,
        gated=moe.gated,
        zero_experts=moe.zero_experts,
        layout=moe.layout,
        weight_format=stored_format(stored)
        or configured_format(quantization_of(data), path, dtype, data.get("expert_dtype")),
        router=moe.routing,
    )


def _block(kind: Kind, calls: list[Call], graph: BlockGraph | None, encoder: bool) -> Block:
    count: Counter[PartName] = Counter()
    for name, parameter in kind.module.named_parameters():
        count[kind.part(name)] += kind.elements(name, parameter)
    run = _run(kind, None if encoder else graph)
    linears = [
        Linear(
            name=path,
            in_features=module.in_features,
            out_features=module.out_features,
            part=kind.part(path),
        )
        for path, module in kind.module.named_modules()
        # An indexer chooses keys and gets no gradient, so an adapter on it would learn nothing;
        # experts in a list are banks.
        if isinstance(module, nn.Linear)
        and ".indexer." not in path
        and kind.part(path) != "routed_experts"
        and path.partition(".")[0] in run
    ]
    parts = tally.parts(count, calls)
    if graph and graph.saved is not None and graph.adapted_saved is not None:
        parts = tally.measured(parts, graph.saved, graph.adapted_saved)
    return Block(
        kind=f"{kind.mixer}+{kind.feed_forward}",
        module_class=type(kind.module).__name__,
        layers=kind.layers,
        mixer=kind.mixer,
        feed_forward=kind.feed_forward,
        parts=parts,
        linears=linears,
        banks=[bank for moe in kind.moes if not moe.for_images for bank in moe.banks],
        mixer_attributes=kind.mixers[0].attributes if kind.mixers else {},
        saved_from="graph" if graph and graph.saved is not None else "formula",
        graph=graph and graph.document,
    )


def _run(kind: Kind, graph: BlockGraph | None) -> set[str]:
    """The members of a block that its graph calls; without a graph, all. A decoder's attention to
    an encoder, for one, does nothing in a model that has no encoder."""
    if graph is None:
        return {name for name, _ in kind.module.named_children()}
    return {node.path.partition(".")[0] for node in graph.document.nodes}


def _float32_names(model: PreTrainedModel) -> list[str]:
    names = [n for n, _ in model.named_parameters()] + [n for n, _ in model.named_buffers()]
    kept = models.float32_names(model)
    return sorted(k for k in kept if any(models.is_named(k, n) for n in names))


def _dtype(model: PreTrainedModel, checkpoint: CheckpointFolder | None) -> tuple[str, list[str]]:
    """The dtype that the weights are stored in or, without weights, configured; and a note."""
    stored = [STORED[f] for f in checkpoint.formats if f in STORED] if checkpoint else []
    if stored:
        return stored[0], []
    configured = model.config.dtype or model.config.get_text_config().dtype
    if configured is not None:
        return str(configured).removeprefix("torch."), []
    return "bfloat16", ["the config names no dtype: bfloat16 is assumed"]


def _traced(
    model: PreTrainedModel, layer_kinds: list[Kind], calls: list[list[Call]]
) -> tuple[list[BlockGraph | None], Fidelity, str]:
    """The graphs, and whether they agree with what the modules say; none when nothing traces."""
    try:
        trace = trace_blocks(model, layer_kinds)
    except (Exception, SystemExit) as e:  # tracing runs code that may do anything
        first = str(e).strip().partition("\n")[0]
        what = f"{type(e).__name__}: {first:.200}" if first else type(e).__name__
        reason = f"counted from modules; torch.export failed: {what}"
        return [None] * len(layer_kinds), "structural", reason
    nodes = sum(len(graph.document.nodes) for graph in trace.blocks)
    way = "torch.export" if trace.exported else "make_fx"
    reason = f"{way} graph of {_kinds(len(trace.blocks))}, {nodes} nodes"
    differences = [
        difference
        for kind, kind_calls, graph in zip(layer_kinds, calls, trace.blocks, strict=True)
        for difference in _differences(kind, kind_calls, graph)
    ]
    agreement = "; ".join(differences) or "its calls are those counted from the modules"
    return list(trace.blocks), "traced", "; ".join([reason, agreement, *trace.notes])


COMPARED = (
    "linear",
    "kda",
    "gated_delta_rule",
    "gla",
    "lightning",
    "mamba2",
    "mlstm",
    "rg_lru",
    "selective_scan",
    "wkv",
    "short_convolution",
    "scaled_dot_product_attention",
    "sparse_attention",
    "compressed_attention",
    "experts",
    "router",
)


def _differences(kind: Kind, calls: list[Call], graph: BlockGraph) -> list[str]:
    """Where graph and modules disagree on the calls of a block or the work of its linears."""
    counted = Counter(call.operator for call in calls)
    found = [
        f"{kind.mixer}+{kind.feed_forward} calls {name} {graph.calls[name]} times in the graph,"
        f" {counted[name]} by modules"
        for name in COMPARED
        if graph.calls[name] != counted[name]
    ]
    flops = sum(call.forward.flops.per_token for call in calls if call.operator == "linear")
    if not found and flops != graph.linear_flops:
        found.append(
            f"{kind.mixer}+{kind.feed_forward} linears take {graph.linear_flops:.0f} FLOPs a token"
            f" in the graph, {flops:.0f} by modules"
        )
    return found
