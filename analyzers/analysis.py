"""model folder -> ModelAnalysis, from config, headers, a model on meta and a graph of each kind."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from analyzers import costs, models
from analyzers.checkpoint import CheckpointFolder, open_checkpoint
from analyzers.costs import Call
from analyzers.errors import InputError
from analyzers.graph import BlockGraph, trace_blocks
from analyzers.schema import (
    AdapterWork,
    Block,
    Checkpoint,
    Experts,
    Fidelity,
    Layer,
    Linear,
    ModelAnalysis,
    Operator,
    Parameters,
    Part,
    PartName,
    Pass,
    Work,
)
from analyzers.structure import Kind, decoder_layers, kinds
from analyzers.weights import check_weights

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FINAL = ("norm", "norm_f", "final_layernorm", "ln_f")  # names of the norm after the last layer
STORED = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


def analyze(
    path: str | Path,
    *,
    trust_remote_code: bool = False,
    progress: Callable[[str], None] | None = None,
) -> ModelAnalysis:
    """What the model in a folder is made of and what each part costs. No weight is read.

    Code in the folder is imported only with `trust_remote_code`. Raises InputError for a folder
    that is not a model, is damaged or unsafe, or that nothing here builds.
    """
    say = progress or (lambda line: None)
    folder = Path(path)
    config = models.load_config(folder, trust_remote_code=trust_remote_code)
    checkpoint = open_checkpoint(folder)
    say(f"config: {config.model_type}; {_weights(checkpoint)}")
    # Tracing changes the model's config; the caller's stays as it is.
    model = models.build_on_meta(copy.deepcopy(config))
    notes = check_weights(model, checkpoint) if checkpoint else []
    for size in ("hidden_size", "vocab_size"):
        if not isinstance(getattr(model.config.get_text_config(), size, None), int):
            fix = "only decoder language models are analysed"
            raise InputError(folder / "config.json", field=size, fault="is missing", fix=fix)
    layer_kinds = kinds(model)
    say(f"{type(model).__name__}: {len(layer_kinds)} kinds of layers")

    text = model.config.get_text_config()
    calls = [costs.block_calls(kind, text) for kind in layer_kinds]
    outer_calls, outer = _outer(model)
    parameters = _parameters(model, layer_kinds)
    float32 = _float32_names(model)
    dtype, assumed = _dtype(model, checkpoint)
    notes += assumed + _notes(layer_kinds) + _config_notes(folder, outer)

    graphs, fidelity, reason = _traced(model, layer_kinds, calls)
    say(f"fidelity {fidelity}: {reason}")
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
        parameters=parameters,
        checkpoint=checkpoint
        and Checkpoint(
            bytes=checkpoint.nbytes, formats=checkpoint.formats, shards=len(checkpoint.shards)
        ),
        layers=_layers(layer_kinds),
        blocks=[
            _block(kind, kind_calls, graph)
            for kind, kind_calls, graph in zip(layer_kinds, calls, graphs, strict=True)
        ],
        outer=outer,
        experts=_experts(layer_kinds),
        operators=_operators(layer_kinds, calls, outer_calls),
        float32_parameters=float32,
        notes=notes,
    )


def _weights(checkpoint: CheckpointFolder | None) -> str:
    if checkpoint is None:
        return "no weights (planning only)"
    return f"{checkpoint.nbytes / 1e9:.3f} GB in {len(checkpoint.shards)} shards"


def _parameters(model: PreTrainedModel, layer_kinds: list[Kind]) -> Parameters:
    """Exact counts; a tied parameter counts once. Active leaves out experts not visited."""
    total = sum(p.numel() for p in model.parameters())
    routed = visited = 0
    for kind in layer_kinds:
        if kind.moe:
            held = sum(p.numel() for p in kind.module.get_submodule(kind.moe.experts).parameters())
            routed += held * len(kind.layers)
            visited += held * kind.moe.top_k // kind.moe.count * len(kind.layers)
    return Parameters(total=total, active=total - routed + visited, routed_experts=routed)


def _layers(layer_kinds: list[Kind]) -> list[Layer]:
    layers = [
        Layer(index=index, mixer=kind.mixer, feed_forward=kind.feed_forward)
        for kind in layer_kinds
        for index in kind.layers
    ]
    return sorted(layers, key=lambda layer: layer.index)


def _experts(layer_kinds: list[Kind]) -> Experts | None:
    moe = next((kind.moe for kind in layer_kinds if kind.moe), None)
    return moe and Experts(
        count=moe.count,
        top_k=moe.top_k,
        shared=moe.shared,
        hidden_size=moe.hidden_size,
        intermediate_size=moe.intermediate_size,
        router_input_size=moe.router_input_size,
    )


def _block(kind: Kind, calls: list[Call], graph: BlockGraph | None) -> Block:
    count: Counter[PartName] = Counter()
    for name, parameter in kind.module.named_parameters():
        count[kind.part(name)] += parameter.numel()
    linears = [
        Linear(
            name=path,
            in_features=module.in_features,
            out_features=module.out_features,
            part=kind.part(path),
        )
        for path, module in kind.module.named_modules()
        if isinstance(module, nn.Linear)
    ]
    return Block(
        kind=f"{kind.mixer}+{kind.feed_forward}",
        module_class=type(kind.module).__name__,
        layers=kind.layers,
        mixer=kind.mixer,
        feed_forward=kind.feed_forward,
        parts=[_part(name, count[name], calls) for name in _part_names(count, calls)],
        linears=linears,
        banks=kind.moe.banks if kind.moe else [],
        mixer_attributes=kind.mixers[0].attributes if kind.mixers else {},
    )


def _part_names(count: Counter[PartName], calls: list[Call]) -> list[PartName]:
    names: dict[PartName, None] = dict.fromkeys(count)
    names.update(dict.fromkeys(call.part for call in calls))
    return list(names)


def _part(name: PartName, parameters: int, calls: list[Call]) -> Part:
    mine = [call for call in calls if call.part == name]
    return Part(
        name=name,
        parameters=parameters,
        flops=_sum(call.forward.flops for call in mine),
        bytes=_sum(call.forward.bytes for call in mine),
        backward=_sum_passes((call.backward, 1) for call in mine),
        saved_bytes=_sum(call.saved for call in mine),
        adapted_saved_bytes=_sum(call.adapter.saved_bytes for call in mine if call.adapter),
    )


def _sum(work: Iterable[Work]) -> Work:
    return sum(work, Work())


def _sum_passes(passes: Iterable[tuple[Pass, int]]) -> Pass:
    """Each pass as often as it occurs."""
    pairs = list(passes)
    return Pass(
        flops=_sum(p.flops * times for p, times in pairs),
        bytes=_sum(p.bytes * times for p, times in pairs),
        bytes_written=_sum(p.bytes_written * times for p, times in pairs),
    )


def _outer(model: PreTrainedModel) -> tuple[list[Call], list[Part]]:
    """Operators and parts outside the decoder's layers."""
    inside = decoder_layers(model)[0] + "."
    text = model.config.get_text_config()
    count: Counter[PartName] = Counter()
    for name, parameter in model.named_parameters():
        if not name.startswith(inside):
            count[_outer_part(name)] += parameter.numel()
    calls = [costs.embedding(text.vocab_size, text.hidden_size)]
    head = model.get_output_embeddings()
    if isinstance(head, nn.Linear):
        calls.append(costs.linear(head, "head"))
        count["head"] += 0  # a tied head has no parameters of its own and is still computed
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in FINAL and not name.startswith(inside) and count["norm"]:
            call = costs.norm(type(module).__name__, text.hidden_size, "norm", count["norm"])
            calls.append(call)
            break
    return calls, [_part(part, number, calls) for part, number in count.items()]


def _outer_part(name: str) -> PartName:
    words = name.split(".")
    if any(w.startswith(("vis", "mm_", "multi_modal", "image")) for w in words):
        return "vision"
    owner = words[-2] if words[1:] else ""
    if owner.startswith(("embed", "wte", "word_embed")):
        return "embedding"
    if owner in ("lm_head", "output", "embed_out"):
        return "head"
    return "norm" if owner in FINAL else "other"


def _operators(
    layer_kinds: list[Kind], calls: list[list[Call]], outer_calls: list[Call]
) -> list[Operator]:
    """All calls of the model; those of one operator in one shape are one entry."""
    groups: dict[tuple, list[tuple[Call, int]]] = {}
    pairs = [(c, len(k.layers)) for k, cs in zip(layer_kinds, calls, strict=True) for c in cs]
    for call, times in [*pairs, *((c, 1) for c in outer_calls)]:
        key = (call.operator, tuple(sorted(call.attributes.items())), call.site)
        groups.setdefault(key, []).append((call, times))
    found = []
    for (name, _, site), members in groups.items():
        forward = _sum_passes((call.forward, times) for call, times in members)
        found.append(
            Operator(
                name=name,
                count=sum(times for _, times in members),
                flops=forward.flops,
                bytes=forward.bytes,
                bytes_written=forward.bytes_written,
                backward=_sum_passes((call.backward, times) for call, times in members),
                saved_bytes=_sum(call.saved * times for call, times in members),
                adapter=_adapter(members),
                weight_bytes=float(
                    costs.ACTIVATION * sum(call.parameters * times for call, times in members)
                ),
                attributes=members[0][0].attributes,
                site=site,
            )
        )
    # Most work first, at a length where both terms count.
    return sorted(found, key=lambda o: (-o.flops.at(4096), o.name))


def _adapter(members: list[tuple[Call, int]]) -> AdapterWork | None:
    adapted = [(call.adapter, times) for call, times in members if call.adapter]
    if not adapted:
        return None
    return AdapterWork(
        width=sum(a.width * times for a, times in adapted),
        matrices=sum(a.matrices * times for a, times in adapted),
        saved_bytes=_sum(a.saved_bytes * times for a, times in adapted),
    )


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


def _notes(layer_kinds: list[Kind]) -> list[str]:
    """What is unusual about the layers, in sentences."""
    notes = []
    if any(m.operator == "other_mixer" for kind in layer_kinds for m in kind.mixers):
        notes.append("the token mixer is not known here: only its linear layers are counted")
    moe = next((kind.moe for kind in layer_kinds if kind.moe), None)
    if moe and moe.router_input_size != moe.hidden_size:
        notes.append(
            f"the experts work in a latent width of {moe.hidden_size}; the router reads"
            f" {moe.router_input_size}"
        )
    if any("AttentionResidual" in type(m).__name__ for m in layer_kinds[0].module.modules()):
        notes.append(
            "attention residuals hand a bank of block starts from layer to layer; its memory comes"
            " on top of the saved bytes of the blocks"
        )
    return notes


def _config_notes(folder: Path, outer: list[Part]) -> list[str]:
    """What the config file says beyond the model that is built."""
    data = models.read_config(folder)
    text = data.get("text_config")
    inner = text.get("quantization_config") if isinstance(text, dict) else None
    notes = []
    packed = data.get("quantization_config") or inner
    if isinstance(packed, dict):
        form = packed.get("format") or packed.get("quant_method") or "an unnamed format"
        notes.append(f"the checkpoint is quantised ({form}); sizes here are of the unpacked model")
    if data.get("vision_config") and not any(part.name == "vision" for part in outer):
        notes.append("text only: the vision tower of the config is not built")
    return notes


def _traced(
    model: PreTrainedModel, layer_kinds: list[Kind], calls: list[list[Call]]
) -> tuple[list[BlockGraph | None], Fidelity, str]:
    """The graphs, and whether they agree with what the modules say; none when export fails."""
    try:
        graphs = trace_blocks(model, layer_kinds)
    except Exception as e:  # export raises anything on code that it cannot follow
        first = str(e).strip().partition("\n")[0]
        reason = f"counted from modules; torch.export failed: {type(e).__name__}: {first:.200}"
        return [None] * len(layer_kinds), "structural", reason
    nodes = sum(graph.nodes for graph in graphs)
    reason = f"torch.export graph of each of {len(graphs)} kinds of layers, {nodes} nodes"
    differences = [
        difference
        for kind, kind_calls, graph in zip(layer_kinds, calls, graphs, strict=True)
        for difference in _differences(kind, kind_calls, graph)
    ]
    agreement = "; ".join(differences) or "its calls are those counted from the modules"
    return list(graphs), "traced", f"{reason}; {agreement}"


COMPARED = (
    "linear",
    "kda",
    "gated_delta_rule",
    "scaled_dot_product_attention",
    "sparse_attention",
    "experts",
    "router",
)


def _differences(kind: Kind, calls: list[Call], graph: BlockGraph) -> list[str]:
    """Where graph and modules disagree on the calls of a block or the work of its linears."""
    counted = Counter(call.operator for call in calls)
    found = [
        f"{kind.mixer}+{kind.feed_forward} calls {name} {graph.operators[name]} times in the graph,"
        f" {counted[name]} by modules"
        for name in COMPARED
        if graph.operators[name] != counted[name]
    ]
    flops = sum(call.forward.flops.per_token for call in calls if call.operator == "linear")
    if not found and flops != graph.linear_flops:
        found.append(
            f"{kind.mixer}+{kind.feed_forward} linears take {graph.linear_flops:.0f} FLOPs a token"
            f" in the graph, {flops:.0f} by modules"
        )
    return found
