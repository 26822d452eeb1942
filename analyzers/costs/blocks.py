"""The operator calls of one block: which formula prices each of its modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import nn

from analyzers.costs.attention import compressed_attention, softmax_attention, sparse_attention
from analyzers.costs.call import Call
from analyzers.costs.experts import experts, router, stacked_linear
from analyzers.costs.linear import activation, linear, norm, short_convolution
from analyzers.costs.linear_attention import (
    delta_rule,
    linear_attention,
    rg_lru,
    selective_scan,
    wkv,
)
from analyzers.costs.residual import residual_site
from analyzers.mixers import Mixer
from analyzers.mixers.mixer import has, whole
from analyzers.mixers.mixer import site as site_of
from analyzers.mixers.sites import CONVOLUTION
from analyzers.schema import PartName, Pass, Work
from analyzers.structure import Kind

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# By the name of a mixer's operator. What is not here costs its linears alone.
FORMULAS: dict[str, Callable[[Mixer], list[Call]]] = {
    "kda": delta_rule,
    "gated_delta_rule": delta_rule,
    "mamba2": linear_attention,
    "lightning": linear_attention,
    "gla": linear_attention,
    "mlstm": linear_attention,
    "selective_scan": selective_scan,
    "rg_lru": rg_lru,
    "wkv": wkv,
    "scaled_dot_product_attention": softmax_attention,
    "sparse_attention": sparse_attention,
    "compressed_attention": compressed_attention,
}
# Not known, or priced by its own convolution module.
NO_FORMULA = {"other_mixer", "short_convolution"}

# Last projections of a mixer or feed-forward, whose input nothing else reads.
OUTPUTS = {
    *("o_proj", "out_proj", "wo", "dense", "c_proj", "o"),
    *("down_proj", "w2", "fc2", "dense_4h_to_h", "output_linear"),
}
UPS = {"gate_proj", "up_proj", "w1", "w3"}  # read one tensor
SOFTMAX = {"scaled_dot_product_attention", "sparse_attention", "compressed_attention"}


def block_calls(kind: Kind, config: PreTrainedConfig) -> list[Call]:
    """Every operator call of one block of this kind, with the part that it belongs to.

    `config` is the text model's: its hidden size, and the block size of attention residuals.
    """
    calls: list[Call] = []
    kept: set[str] = set()  # inputs that an adapter keeps
    for path, module in kind.module.named_modules():
        found = _calls(kind, path, module, config, kept)
        if "indexer" in path.split("."):  # hands on indices, which have no gradient
            found = [replace(c, backward=Pass(), saved=Work(), adapter=None) for c in found]
        calls += found
        for mixer in kind.mixers:
            if mixer.path == path and mixer.operator in FORMULAS:
                calls += FORMULAS[mixer.operator](mixer)
    return calls


def _calls(
    kind: Kind, path: str, module: nn.Module, config: PreTrainedConfig, kept: set[str]
) -> list[Call]:
    """Of one module itself. Adds to `kept` the tensor that an adapter on it keeps."""
    for moe in kind.moes:
        if path == moe.experts:
            # Groups after the first are for tokens of another modality.
            return [experts(moe, module)] if moe is kind.moe else []
        if path == moe.router:
            return [router(moe, module)]
        if _under(path, moe.experts) or _under(path, moe.router):
            return []
    if isinstance(module, nn.Linear) and kind.part(path) == "router":  # takes no adapter
        return [replace(linear(module, "router"), adapter=None)]
    if isinstance(module, nn.Linear):
        tensor = _input(kind, path, module, config.hidden_size)
        keeps = tensor not in kept and not _is_attention_output(kind, path, module)
        kept.add(tensor)
        return [linear(module, kind.part(path), keeps_input=keeps)]
    return list(_elementwise(kind, path, module, config))


def _elementwise(
    kind: Kind, path: str, module: nn.Module, config: PreTrainedConfig
) -> Iterator[Call]:
    """Norms, short convolutions, activations and residual sites, by their form."""
    part = kind.part(path)
    own = dict(module.named_parameters(recurse=False))
    count = sum(p.numel() for p in own.values())
    name = type(module).__name__
    if isinstance(module, nn.Conv1d):
        parent = kind.module.get_submodule(path.rpartition(".")[0])
        yield replace(short_convolution(module, part), site=site_of(parent, CONVOLUTION))
    elif (site := residual_site(path, module, part, kind.layers, config)) is not None:
        yield site
    elif set(own) in ({"weight"}, {"weight", "bias"}) and own["weight"].ndim == 1:
        rows = _heads(kind, path, own["weight"].numel())
        called = norm(name, own["weight"].numel(), part, count, rows=rows)
        known = name.endswith("RMSNormGated") and has(module, "variance_epsilon")
        yield replace(called, site=whole(module)) if known else called
    stacked = [p for p in own.values() if p.ndim == 3]
    if part == "shared_experts" and stacked:
        yield stacked_linear(stacked, part)
    if part in ("dense", "shared_experts"):
        yield from _activation(module, part)


def _activation(module: nn.Module, part: PartName) -> Iterator[Call]:
    """Between the up and down projections of a feed-forward, if the module is one."""
    linears = {n: c for n, c in module.named_children() if isinstance(c, nn.Linear)}
    for down in (c for n, c in linears.items() if n in OUTPUTS):
        up = sum(c.out_features for c in linears.values() if c is not down)
        if up in (down.in_features, 2 * down.in_features):
            yield activation(down.in_features, part, gated=up > down.in_features)


def _heads(kind: Kind, path: str, width: int) -> int:
    """How often a norm of a mixer is applied to a token: once a head when it is one head wide."""
    for mixer in kind.mixers:
        if _under(path, mixer.path):
            a = mixer.attributes
            keys = path.rpartition(".")[2].startswith("k")
            heads = a.get("kv_heads" if keys else "value_heads", a.get("heads", 1))
            head_widths = {a.get("key_dim"), a.get("value_dim")}
            return int(heads) if width in head_widths and width != a.get("latent_dim") else 1
    return 1


def _input(kind: Kind, path: str, module: nn.Linear, hidden: int) -> str:
    """A name for the tensor that a linear reads: the same for all that read the same."""
    parent, _, name = path.rpartition(".")
    if name in OUTPUTS:
        return path
    if module.in_features == hidden:
        roots = [m.path for m in kind.mixers] + [moe.path for moe in kind.moes] + kind.dense
        return next((root for root in roots if _under(path, root)), parent)
    return parent if name in UPS else path


def _is_attention_output(kind: Kind, path: str, module: nn.Linear) -> bool:
    """Whether a linear reads what attention itself made, which the attention keeps."""
    mixer = next((m for m in kind.mixers if _under(path, m.path)), None)
    if mixer is None or mixer.operator not in SOFTMAX or path.rpartition(".")[2] not in OUTPUTS:
        return False
    width = int(mixer.attributes["heads"]) * int(mixer.attributes["value_dim"])
    return module.in_features == width and not mixer.attributes.get("output_gate")


def _under(path: str, root: str | None) -> bool:
    return bool(root) and (path == root or path.startswith(f"{root}."))
