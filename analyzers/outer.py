"""What lies outside the decoder's layers (embedding, head, towers, multi-token prediction) and
what the layers hand to one another."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from torch import nn

from analyzers import costs
from analyzers.costs import Call
from analyzers.mixers import first_of
from analyzers.schema import MultiToken, PartName, Residual, Tower
from analyzers.structure import Kind, decoder_layers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Shapes = Mapping[str, tuple[int, ...]]
"""Unpacked shapes of the tensors of a checkpoint, by name."""
TowerKind = Literal["vision", "audio", "projector"]

BF16 = 2  # bytes
FINAL = ("norm", "norm_f", "final_layernorm", "ln_f")  # names of the norm after the last layer
PROJECTOR = ("projector", "merger", "connector", "resampler", "embed_vision", "embed_audio")
FIRST_LETTERS: dict[str, TowerKind] = {
    "vis": "vision",
    "vit": "vision",
    "mm_": "vision",
    "image": "vision",
    "audio": "audio",
    "speech": "audio",
    "sound": "audio",
}
TOWER = re.compile(rf"(?:^|\.)({'|'.join(FIRST_LETTERS)})|{'|'.join(PROJECTOR)}")
MULTI_TOKEN = (
    "num_nextn_predict_layers",
    "mtp_num_hidden_layers",
    "num_mtp_modules",
    "num_mtp_layers",
    "mtp_num_layers",
)
STREAMS = ("hc_mult", "hc_count")


def outer_part(name: str) -> PartName:
    """The part of a parameter that is in no layer of the decoder."""
    tower = _tower(name)
    if tower:
        return "other" if tower == "audio" else "vision"
    words = name.split(".")
    owner = words[-2] if words[1:] else ""
    if owner.startswith(("embed", "wte", "word_embed")) or owner == "shared":
        return "embedding"
    if owner in ("lm_head", "output", "embed_out"):
        return "head"
    return "norm" if owner in FINAL else "other"


def outer_counts(model: PreTrainedModel) -> Counter[PartName]:
    """Parameters outside the decoder's layers by part; a tied head has none of its own."""
    count: Counter[PartName] = Counter()
    for name, parameter in _outside(model):
        count[outer_part(name)] += parameter.numel()
    if isinstance(model.get_output_embeddings(), nn.Linear):
        count["head"] += 0  # it is computed even when it is tied
    return count


def looked_up(model: PreTrainedModel) -> int:
    """Elements of embedding tables, of which a token reads a row, without one that is the head."""
    head = getattr(model.get_output_embeddings(), "weight", None)
    tables = (p for name, p in _outside(model) if outer_part(name) == "embedding")
    return sum(table.numel() for table in tables if table is not head)


def outer_calls(model: PreTrainedModel) -> list[Call]:
    """Operators outside the decoder's layers; those of towers are not counted."""
    text = model.config.get_text_config()
    inside, norms = decoder_layers(model)[0] + ".", outer_counts(model)["norm"]
    calls = [costs.embedding(text.vocab_size, text.hidden_size)]
    head = model.get_output_embeddings()
    if isinstance(head, nn.Linear):
        calls.append(replace(costs.linear(head, "head"), adapter=None))
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in FINAL and not name.startswith(inside) and norms:
            calls.append(costs.norm(type(module).__name__, text.hidden_size, "norm", norms))
            break
    last = [len(decoder_layers(model)[1]) - 1]
    for name, module in model.named_modules():
        if not name.startswith(inside):
            site = costs.residual_site(name, module, "other", last, text)
            calls += [site] if site else []
    return calls


def _outside(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Parameters outside the decoder's layers that are not tied to one inside."""
    inside = {id(p) for p in decoder_layers(model)[1].parameters()}
    return [(n, p) for n, p in model.named_parameters() if id(p) not in inside]


# -------------------------------------------------------------------------------------- towers


def towers(model: nn.Module, data: Mapping[str, Any], stored: Shapes) -> list[Tower]:
    """Towers that are built and, with `data` the config file, those that are only named."""
    built: Counter[TowerKind] = Counter()
    for name, parameter in _outside(model):
        if (kind := _tower(name)) is not None:
            built[kind] += parameter.numel()
    found = [Tower(kind=kind, parameters=n, built=True) for kind, n in built.items()]
    if built:
        return found
    sizes: Counter[TowerKind] = Counter()
    for name, shape in stored.items():
        if (kind := _tower(name)) is not None:
            sizes[kind] += _elements(shape)
    named: list[TowerKind] = [k for k in ("vision", "audio") if data.get(f"{k}_config")]
    kinds: list[TowerKind] = [*named, *(kind for kind in sizes if kind not in named)]
    return [Tower(kind=kind, parameters=sizes.get(kind), built=False) for kind in kinds]


def _tower(name: str) -> TowerKind | None:
    found = TOWER.search(name)
    if found is None:  # of half a million names of a checkpoint, nearly all
        return None
    if any(projector in name for projector in PROJECTOR):
        return "projector"
    return FIRST_LETTERS[found[1]] if found[1] else None


# ----------------------------------------------------------------------- multi-token prediction


def multi_token(model: PreTrainedModel, kinds: list[Kind], stored: Shapes) -> MultiToken | None:
    """The layers that predict further tokens: built, in the checkpoint, or named by the config.

    Where only the config names them, their size is that of DeepSeek-V3's form, which GLM, Qwen3.5
    and Nemotron share: a layer like the decoder's last, a projection of hidden state and embedding
    together, and three norms (arXiv 2412.19437, section 2.2); embedding and head are the model's.
    """
    text = model.config.get_text_config()
    layers = int(first_of(text, *MULTI_TOKEN) or 0)
    if not layers or getattr(text, "use_mtp", None) is False:
        return None
    count = sum(len(kind.layers) for kind in kinds)
    built = sum(p.numel() for n, p in _outside(model) if _is_multi_token(n, count))
    in_checkpoint = sum(_elements(s) for n, s in stored.items() if _is_multi_token(n, count))
    return MultiToken(
        layers=layers,
        parameters=built or in_checkpoint or layers * _in_deepseek_form(kinds, text.hidden_size),
        built=built > 0,
    )


def _is_multi_token(name: str, layers: int) -> bool:
    """By a word in the name, or as a layer after the decoder's last."""
    words = name.split(".")
    if any(word.startswith(("mtp", "nextn")) for word in words):
        return True
    numbered = (words[i + 1] for i, word in enumerate(words[:-1]) if word == "layers")
    return _tower(name) is None and any(n.isdecimal() and int(n) >= layers for n in numbered)


def _in_deepseek_form(kinds: list[Kind], hidden: int) -> int:
    last = max(kinds, key=lambda kind: kind.layers[-1])
    whole = [last]
    if not last.mixers or last.feed_forward == "none":  # a layer here is half of a layer elsewhere
        attention = [k for k in kinds if "attention" in k.mixer or k.mixer == "mla"]
        whole = [*attention[-1:], *[k for k in kinds if k.moe][-1:]]
    block = sum(k.elements(n, p) for k in whole for n, p in k.module.named_parameters())
    return block + 2 * hidden * hidden + 3 * hidden


def _elements(shape: tuple[int, ...]) -> int:
    product = 1
    for side in shape:
        product *= side
    return product


# ------------------------------------------------------------------------------------- sharing


def tied_weights(model: nn.Module) -> list[list[str]]:
    """Groups of names that are one parameter."""
    groups: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    return [names for names in groups.values() if names[1:]]


def residual(model: PreTrainedModel, kinds: list[Kind]) -> Residual:
    """What one layer hands to the next.

    Attention residuals (Kimi-K3) carry the running sum of the block and a bank with the start of
    every block so far; only where a block begins is nothing else under way. Hyper-connections carry
    several residual streams (arXiv 2409.19606).
    """
    text = model.config.get_text_config()
    state = BF16 * text.hidden_size
    classes = {type(m).__name__ for kind in kinds for m in kind.module.modules()}
    if any("AttentionResidual" in name for name in classes):
        block = first_of(text, "attn_res_block_size", "n_layers_per_attn_res_block")
        layers = sum(len(kind.layers) for kind in kinds)
        starts = -(-layers // block)
        carried = (1 + starts) * state
        return Residual(
            kind="attention_residual", carried_bytes_per_token=carried, cut_multiple=block
        )
    streams = int(first_of(text, *STREAMS) or 1)
    if streams > 1:
        return Residual(
            kind="hyper_connection", streams=streams, carried_bytes_per_token=streams * state
        )
    return Residual(kind="plain", carried_bytes_per_token=state)
