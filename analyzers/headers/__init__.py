"""The `headers` level: a model's structure without its class, from tensor names, shapes and config.

What is built is a tree of modules on the meta device that everything else reads like a real model;
it has no forward, so there is no graph.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping

from torch import nn

from analyzers.checkpoint import CheckpointFolder
from analyzers.errors import InputError
from analyzers.formats import Logical, logical_tensors, quantization_of
from analyzers.headers.decoder import expected_tensors
from analyzers.headers.keys import GenericConfig, mixers
from analyzers.headers.roles import name_mixers
from analyzers.headers.skeleton import (
    UNTRAINED,
    ExpertBanks,
    Inferred,
    Shape,
    Shapes,
    build,
    elements,
    is_expert,
    safe_path,
)
from analyzers.outer import outer_part

INTEGERS = ("BOOL", "I16", "U16", "I32", "U32", "I64", "U64")
"""Dtypes of tables, masks and positions; eight bits may be weights as they are used."""
HEADS = ("lm_head", "embed_out", "output", "head", "tied_head")
NUMBERED = re.compile(r"^(?P<list>.*?)\.(?P<index>\d{1,8})\.(?P<rest>.+)$")


class Skeleton(Inferred):
    """A model known by its tensors alone. It answers where a `PreTrainedModel` is asked."""

    config: GenericConfig
    notes: list[str]
    """What is unknown or assumed, in sentences for people."""
    reason: str
    """Why there is no class, and what was read instead."""

    def get_input_embeddings(self) -> nn.Embedding | None:
        tables = [m for m in self.modules() if isinstance(m, nn.Embedding)]
        return max(tables, key=lambda table: table.num_embeddings, default=None)

    def get_output_embeddings(self) -> nn.Linear | None:
        for path, module in self.named_modules():
            *above, last = path.split(".")
            numbered = any(word.isdecimal() for word in above)
            if last in HEADS and isinstance(module, nn.Linear) and not numbered:
                return module
        return None


def infer_model(config: GenericConfig, checkpoint: CheckpointFolder | None) -> Skeleton:
    """The modules of a model that no class here builds.

    Without weights, or where their names show no layers, the config says which tensors there would
    be. Raises InputError when neither says how wide the model is.
    """
    notes: list[str] = []
    stored: Shapes = {}
    if checkpoint is not None:
        logical = logical_tensors(checkpoint, quantization_of(config.data))
        stored, notes = _weights(logical)
    layers = _layer_list(stored)
    if layers is None:
        if stored:
            notes.append("the tensor names show no list of layers: the config alone is read")
        shapes, more = expected_tensors(config)
    elif outer_part(f"{layers}.0") == "vision":
        where = f"{config.name_or_path}/config.json"
        fault = f"the weights are those of '{layers}' alone, no language model"
        raise InputError(where, fault=fault, fix="add the shards of the decoder")
    else:
        shapes, more = _without_later_layers(stored, layers, config)
        more += _odd_ones(shapes, layers)
    notes += more
    tree, more = build(shapes)
    model = type(_class_name(config), (Skeleton,), {})()
    for name, child in tree.named_children():
        model.add_module(name, child)
    for name, parameter in tree.named_parameters(recurse=False):
        model.register_parameter(name, parameter)
    model.config, model.notes = config, notes + more
    read = (
        "the config alone" if layers is None else f"the names and shapes of {len(stored)} weights"
    )
    model.reason = f"{config.reason}; read from {read}"
    _fill_sizes(model)
    _tie(model)
    _name_roles(model, "model.layers" if layers is None else layers)
    return model


def _weights(logical: Mapping[str, Logical]) -> tuple[Shapes, list[str]]:
    """The shapes of what can be weights, and notes on dtypes that weights seldom have."""
    tables = [
        name
        for name, tensor in logical.items()
        if tensor.dtype in INTEGERS
        and tensor.format == tensor.dtype.lower()
        and not any(part in name for part in UNTRAINED)
    ]
    doubles = [name for name, tensor in logical.items() if tensor.dtype == "F64"]
    notes = []
    if tables:
        notes.append(f"integers are no weights and are not counted: {_listed(tables)}")
    if doubles:
        notes.append(f"stored as float64: {_listed(doubles)}")
    left_out = set(tables)
    return {name: t.shape for name, t in logical.items() if name not in left_out}, notes


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(f"{name:.120}" for name in names[:3]) + more


def _class_name(config: GenericConfig) -> str:
    named = (name for name in config.architectures if name.isidentifier())
    return next(named, "UnknownForCausalLM")


def _layer_list(shapes: Shapes) -> str | None:
    """Path of the list that holds most of the parameters."""
    held: Counter[str] = Counter()
    for name, shape in shapes.items():
        if (match := NUMBERED.match(name)) and not is_expert(match["list"]):
            held[match["list"]] += elements(shape)
    return held.most_common(1)[0][0] if held else None


def _without_later_layers(
    shapes: Shapes, layers: str, config: GenericConfig
) -> tuple[Shapes, list[str]]:
    """The shapes with the layers after the decoder's last, which predict further tokens
    (DeepSeek-V3), in a list of their own."""
    prefix, found, indices = f"{layers}.", {}, set()
    last = config.num_hidden_layers
    for name, shape in shapes.items():
        match = NUMBERED.match(name) if name.startswith(prefix) else None
        if match and match["list"] == layers:
            index = int(match["index"])
            if last is not None and index >= last:
                name = f"mtp.{index - last}.{match['rest']}"
            else:
                indices.add(index)
        found[name] = shape
    notes = []
    if last is not None and len(indices) != last:
        notes.append(f"the config says {last} layers, the tensors make {len(indices)}")
    if not indices:
        fault = f"all layers of the checkpoint lie after the {last} of the config"
        where = f"{config.name_or_path}/config.json"
        raise InputError(where, field="num_hidden_layers", fault=fault, fix="correct it")
    config.num_hidden_layers = len(indices)
    return found, notes


def _odd_ones(shapes: Shapes, layers: str) -> list[str]:
    """Tensors whose shape one layer alone has, where all others (three at least) agree."""
    alike: dict[str, dict[str, Shape]] = defaultdict(dict)
    for name, shape in shapes.items():
        match = NUMBERED.match(name)
        if match and match["list"] == layers:
            alike[match["rest"]][name] = shape
    notes = []
    for named in alike.values():
        counted = Counter(named.values()).most_common()
        if len(counted) == 2 and counted[1][1] == 1 and counted[0][1] > 2:
            (usual, times), (odd, _) = counted
            name = next(n for n, shape in named.items() if shape == odd)
            notes.append(f"{name:.120} is {list(odd)}, its {times} sisters {list(usual)}")
    return notes


def _fill_sizes(model: Skeleton) -> None:
    """Hidden width and vocabulary from the embedding (or the norms) where the config has none."""
    config, table = model.config, model.get_input_embeddings()
    if table is not None:
        for name, size in (
            ("hidden_size", table.embedding_dim),
            ("vocab_size", table.num_embeddings),
        ):
            said = getattr(config, name)
            if said is not None and said != size:
                model.notes.append(f"the config says {name} {said}, the embedding has {size}")
            setattr(config, name, size)
    if config.hidden_size is None:
        widths = Counter(
            m.weight.numel() for m in model.modules() if isinstance(m, nn.RMSNorm | nn.LayerNorm)
        )
        if not widths:
            where = f"{config.name_or_path}/config.json"
            fault = "is missing, and no embedding or norm among the weights tells it"
            raise InputError(where, field="hidden_size", fault=fault, fix="add it")
        config.hidden_size = widths.most_common(1)[0][0]
        model.notes.append(f"hidden_size is taken from the norms: {config.hidden_size}")
    if config.vocab_size is None:
        config.vocab_size = 0
        model.notes.append("no vocabulary: neither config nor weights tell its size")


def _tie(model: Skeleton) -> None:
    """Gives a model without a head of its own one that shares the embedding, unless the config
    says that they are apart; where it says that they are one, a stored copy is not counted."""
    table, head, config = model.get_input_embeddings(), model.get_output_embeddings(), model.config
    if head is not None:
        same = table is not None and table.weight.shape == head.weight.shape
        config.tie_word_embeddings = same and config.tie_word_embeddings is True
        if table is not None and config.tie_word_embeddings:
            head.weight = table.weight
    elif table is None or config.tie_word_embeddings is False:
        model.notes.append("there is no output head among the weights")
    else:
        config.tie_word_embeddings = True
        head = nn.Linear(table.embedding_dim, table.num_embeddings, bias=False, device="meta")
        head.weight = table.weight
        model.add_module("tied_head", head)


def _name_roles(model: Skeleton, layers: str) -> None:
    """Recognises the mixers of the layers at this path, and notes what stays unknown."""
    config, found = model.config, model.get_submodule(safe_path(layers))
    blocks = list(found.children())
    banks = [m for m in found.modules() if isinstance(m, ExpertBanks)]
    experts = bool(banks)
    for block, kind in zip(blocks, mixers(config, len(blocks)), strict=True):
        name_mixers(block, config, kind)
    if config.num_experts and not experts:
        model.notes.append(
            f"the config names {config.num_experts} experts, but no weights look like theirs"
        )
    held = {p.shape[0] for bank in banks for p in bank.parameters() if p.ndim == 3}
    if config.num_experts and held and config.num_experts not in held:
        counts = " or ".join(map(str, sorted(held)))
        model.notes.append(f"the config says {config.num_experts} experts, the tensors {counts}")
    if experts and not config.num_experts_per_tok:
        model.notes.append("how many experts a token visits is unknown: one is assumed")
