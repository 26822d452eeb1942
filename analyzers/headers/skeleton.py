"""Tensor names and shapes -> a tree of modules on the meta device, as a class would have built it.

A name's dots are the tree. What a leaf is, its shape says: a matrix is a linear layer, a vector a
norm, `[channels, 1, taps]` a depthwise convolution. Experts that lie one by one become one stacked
parameter a matrix, `[experts, out, in]`, so that half a million tensors are a few hundred modules.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from analyzers.mixers import Mixer

Shape = tuple[int, ...]
Shapes = dict[str, Shape]

EXPERT = re.compile(
    r"^(?P<list>(?:.+\.)?(?![^.]*shared)[^.]*expert[^.]*)\."
    r"(?:expert_)?(?P<index>\d{1,8})\.(?P<rest>.+)$"
)
LAST = ("down", "w2", "fc2", "wo", "c_proj", "output")
"""Parts of names of an expert's last matrix."""
EMBEDDINGS = (
    *("embed_tokens", "tok_embeddings", "word_embeddings"),
    *("embeddings", "embed", "embed_in", "wte"),
)
UNTRAINED = ("correction_bias", "expert_bias", "tid2eid", "inv_freq", "slope_rate", "_decay")
FEED_FORWARD = {"gate_proj", "up_proj", "down_proj", "gate_up_proj", "fc1", "fc2", "w1", "w2", "w3"}
MAX_DEPTH = 24
MAX_ELEMENTS = 2**62
"""Of one tensor: torch counts elements and bytes in 64 bits."""


class Inferred(nn.Module):
    """A module known by its tensors alone."""

    inferred_mixer: Mixer | None = None
    """Set where the module mixes tokens; see `analyzers.mixers.recognise`."""


class ExpertBanks(Inferred):
    """All experts of a layer; each child `weight` is `[experts, out, in]`."""

    layout: Literal["stacked", "module_list"] = "stacked"
    is_transposed = False


class InferredMLP(Inferred):
    """A feed-forward: nothing in it but projections up and down."""


class GatedRMSNorm(nn.RMSNorm):
    """A norm whose output a gate multiplies."""


EMPTY = ExpertBanks()
RESERVED = ("config", "notes", "reason", "tied_head")
"""Attributes of the model that the modules are put in."""


@dataclass
class Node:
    """One dotted prefix of the names."""

    shapes: dict[str, Shape] = field(default_factory=dict)
    """Of the tensors that lie here, by last word."""
    children: dict[str, Node] = field(default_factory=dict)
    is_experts: bool = False
    """Whether what lies below was stacked from a list of experts."""


def build(shapes: Mapping[str, Shape]) -> tuple[nn.Module, list[str]]:
    """The tree of modules of these tensors, and notes on what does not fit in one."""
    notes: list[str] = []
    stacked, lists = stack_experts(shapes, notes)
    root = Node()
    left_out = 0
    for name, shape in sorted(stacked.items()):  # so that like layers are built alike
        *path, last = name.split(".")
        if len(path) > MAX_DEPTH or elements(shape) >= MAX_ELEMENTS:
            left_out += 1
            continue
        node = root
        for word in path:
            node = node.children.setdefault(_safe(word), Node())
        node.shapes[_safe(last)] = shape
    for name in lists:
        _find(root, name).is_experts = True
    if left_out:
        notes.append(f"{left_out} tensors with absurd names or shapes are not counted")
    return _module("", root), notes


def stack_experts(shapes: Mapping[str, Shape], notes: list[str]) -> tuple[Shapes, list[str]]:
    """The shapes with every list of experts stacked, and the paths of these lists.

    `mlp.experts.7.w1.weight [I, H]` becomes `mlp.experts.w1.weight [E, I, H]`.
    """
    lists: dict[str, dict[str, dict[int, Shape]]] = defaultdict(lambda: defaultdict(dict))
    found: Shapes = {}
    for name, shape in shapes.items():
        if match := EXPERT.match(name):
            lists[match["list"]][match["rest"]][int(match["index"])] = shape
        else:
            found[name] = shape
    for owner, matrices in lists.items():
        count = max(len(of_expert) for of_expert in matrices.values())
        for rest, of_expert in matrices.items():
            forms = set(of_expert.values())
            if len(forms) > 1 or len(of_expert) != count:
                notes.append(f"the experts of {owner:.120} are not alike: {rest:.60}")
            found[f"{owner}.{rest}"] = (len(of_expert), *max(forms, key=elements))
    return found, list(lists)


def is_expert(path: str) -> bool:
    """Whether a list at this path is one of routed experts."""
    return EXPERT.match(f"{path}.0.weight") is not None


def elements(shape: Shape) -> int:
    count = 1
    for side in shape:
        count *= side
    return count


def safe_path(path: str) -> str:
    """A dotted name as the modules have it."""
    return ".".join(map(_safe, path.split(".")))


def _safe(word: str) -> str:
    """A word that hides no attribute of a module."""
    return f"{word}_" if not word or word in RESERVED or hasattr(EMPTY, word) else word


def _find(root: Node, name: str) -> Node:
    node = root
    for word in name.split("."):
        node = node.children.setdefault(_safe(word), Node())
    return node


def _module(name: str, node: Node) -> nn.Module:
    """The module of a node, whose own word is `name`."""
    if node.is_experts:
        return _stack_of_experts(node)
    # A tensor may have the name of a module beside it.
    shapes = {f"{w}_" if w in node.children else w: shape for w, shape in node.shapes.items()}
    if shapes and not node.children and (leaf := _leaf(name, shapes)) is not None:
        return leaf
    below = {word: _module(word, child) for word, child in node.children.items()}
    experts = {word: s for word, s in shapes.items() if len(s) == 3 and "conv" not in word}
    module = InferredMLP() if below and below.keys() <= FEED_FORWARD else Inferred()
    if len(experts) > 1 and any(map(is_last, experts)):
        module = ExpertBanks()
    if below and all(word.isdecimal() for word in below):
        module = nn.ModuleList([below.pop(word) for word in sorted(below, key=int)])
    _hold(module, shapes)
    for word, child in below.items():
        module.add_module(word, child)
    if isinstance(module, ExpertBanks):
        module.is_transposed = _is_transposed(experts)
    return module


def _stack_of_experts(node: Node) -> ExpertBanks:
    """One child for each matrix of an expert, whose weight is that of all experts."""
    module = ExpertBanks()
    module.layout = "module_list"
    _hold(module, node.shapes)
    for name, shapes in sorted(_matrices(node), key=lambda item: (is_last(item[0]), item[0])):
        holder = Inferred()
        _hold(holder, shapes)
        module.add_module(name if not hasattr(module, name) else f"{name}_", holder)
    return module


def _matrices(node: Node, prefix: str = "") -> Iterator[tuple[str, dict[str, Shape]]]:
    """What lies below a node, dots as underscores."""
    for word, child in node.children.items():
        if child.shapes:
            yield prefix + word, child.shapes
        yield from _matrices(child, f"{prefix}{word}_")


def is_last(name: str) -> bool:
    return any(part in name for part in LAST)


def _is_transposed(banks: Mapping[str, Shape]) -> bool:
    """Whether 3-D weights are `[experts, in, out]`, from an up and a down matrix that must fit."""
    down = next((s for word, s in banks.items() if is_last(word)), None)
    up = next((s for word, s in banks.items() if not is_last(word)), None)
    if down is None or up is None:
        return False
    hidden, inner = down[1:]
    as_is = up[2] == hidden and up[1] in (inner, 2 * inner)
    inner, hidden = down[1:]
    return not as_is and up[1] == hidden and up[2] in (inner, 2 * inner)


def _hold(module: nn.Module, shapes: Mapping[str, Shape]) -> None:
    """Gives the module these tensors; what no loss trains is a buffer, as in any class."""
    for word, shape in shapes.items():
        tensor = torch.empty(shape, device="meta")
        if any(part in word for part in UNTRAINED):
            module.register_buffer(word, tensor)
        else:
            module.register_parameter(word, nn.Parameter(tensor, requires_grad=False))


def _leaf(name: str, shapes: dict[str, Shape]) -> nn.Module | None:
    """The library's module for a weight, maybe with a bias; None where the shapes fit none."""
    weight, bias = shapes.get("weight"), shapes.get("bias")
    if weight is None or shapes.keys() - {"weight", "bias"}:
        return None
    meta: dict[str, Any] = {"device": "meta"}
    match weight:
        case (width,) if bias is None:
            return nn.RMSNorm(width, **meta)
        case (width,) if bias == weight:
            return nn.LayerNorm(width, **meta)
        case (rows, width) if name in EMBEDDINGS and bias is None:
            # Drawing normals on meta would import torch's compiler, seconds of it.
            return nn.Embedding.from_pretrained(torch.empty(rows, width, **meta))
        case (rows, width) if bias in (None, (rows,)):
            return nn.Linear(width, rows, bias=bias is not None, **meta)
        case (channels, 1, taps) if bias in (None, (channels,)) and channels and taps:
            return nn.Conv1d(
                channels, channels, taps, groups=channels, bias=bias is not None, **meta
            )
    return None
