"""What a model is made of: its layers, grouped by kind, and the role of every module in a kind.

Everything is read from the modules of a model built on the meta device and from transformers'
conventions (expert weights stacked in one 3-D parameter, norms and routers by shape and name). What
the conventions do not say is in one table of mixers, keyed by module structure.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from torch import nn

from analyzers.errors import InputError
from analyzers.mixers import Mixer, first_of, is_mixer, recognise
from analyzers.schema import ExpertBank, PartName

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


@dataclass(frozen=True)
class Moe:
    """A mixture of experts: `experts` and `router` are paths in the block, sizes as in schema."""

    path: str
    experts: str
    router: str | None
    count: int
    top_k: int
    shared: int
    hidden_size: int
    intermediate_size: int
    router_input_size: int
    gated: bool
    banks: list[ExpertBank] = field(default_factory=list)


@dataclass(frozen=True)
class Kind:
    """One distinct kind of layer: `module` is the first of `layers`, the others are like it."""

    module: nn.Module
    layers: list[int]
    mixers: list[Mixer]
    moe: Moe | None
    dense: list[str]
    """Paths of the feed-forwards without experts."""

    @property
    def mixer(self) -> str:
        return self.mixers[0].name if self.mixers else "none"

    @property
    def feed_forward(self) -> Literal["dense", "moe", "none"]:
        return "moe" if self.moe else "dense" if self.dense else "none"

    def part(self, path: str) -> PartName:
        """The part that the module (or parameter) at `path` in the block belongs to."""

        def under(root: str | None) -> bool:
            return root is not None and (path == root or path.startswith(f"{root}."))

        if any(under(m.path) for m in self.mixers):
            return "mixer"
        if self.moe and under(self.moe.path):
            if under(self.moe.experts):
                return "routed_experts"
            if under(self.moe.router):
                return "router"
            # What is left beside the experts: a shared expert with its gate, or the projections
            # (and the norm) around a latent space.
            return "shared_experts" if "shared" in path else "latent_projection"
        if any(under(path) for path in self.dense):
            return "dense"
        return "norm" if "norm" in path else "other"


def decoder_layers(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """Path and list of the decoder's layers: the list of modules that holds most parameters."""
    lists = [
        (path, m) for path, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m)
    ]
    if not lists:
        where = type(model).__name__
        raise InputError(
            where, fault="has no list of layers", fix="only decoder models are analysed"
        )
    return max(lists, key=lambda item: sum(p.numel() for p in item[1].parameters()))


def kinds(model: PreTrainedModel) -> list[Kind]:
    """The distinct kinds of layers in order of first appearance. Raises InputError without any."""
    config = model.config.get_text_config()
    found: dict[Any, Kind] = {}
    for index, layer in enumerate(decoder_layers(model)[1]):
        kind = _kind(layer, index, config)
        key = (_signature(layer), tuple((m.name, tuple(m.attributes.items())) for m in kind.mixers))
        if key in found:
            found[key].layers.append(index)
        else:
            found[key] = kind
    return list(found.values())


def _signature(layer: nn.Module) -> tuple:
    return tuple(
        (
            path,
            type(m).__name__,
            *((n, tuple(p.shape)) for n, p in m.named_parameters(recurse=False)),
        )
        for path, m in layer.named_modules()
    )


def _kind(layer: nn.Module, index: int, config: PreTrainedConfig) -> Kind:
    moe = _moe(layer, config)
    mixers: list[Mixer] = []
    for path, module in _outermost(layer, skip=moe.path if moe else None):
        mixer = recognise(module, config)
        if mixer:
            mixers.append(Mixer(mixer.name, mixer.operator, mixer.attributes, mixer.site, path))
    skipped = {m.path.partition(".")[0] for m in mixers} | {moe.path if moe else None}
    # What else has linear layers: a mixer that the table does not know, or a feed-forward.
    others = [
        (path, child)
        for path, child in layer.named_children()
        if path not in skipped and any(isinstance(m, nn.Linear) for m in child.modules())
    ]
    if not mixers:
        unknown = [path for path, child in others if _looks_like_mixer(path, child)]
        mixers = [
            Mixer(name="other", operator="other_mixer", attributes={}, path=p) for p in unknown
        ]
    dense = [path for path, _ in others if path not in {m.path for m in mixers}]
    return Kind(layer, [index], mixers, moe, dense)


def _looks_like_mixer(path: str, module: nn.Module) -> bool:
    return "Attention" in type(module).__name__ or "attn" in path or "mixer" in path


def _outermost(layer: nn.Module, *, skip: str | None) -> Iterator[tuple[str, nn.Module]]:
    """The layer's modules from outside in, without those inside a mixer that was already found."""
    pending = list(layer.named_children())
    while pending:
        path, module = pending.pop(0)
        if path == skip:
            continue
        yield path, module
        if not is_mixer(module):
            pending += [(f"{path}.{name}", child) for name, child in module.named_children()]


def _moe(layer: nn.Module, config: PreTrainedConfig) -> Moe | None:
    """The mixture of experts of a layer: the module that owns stacked 3-D expert weights."""
    for path, module in layer.named_modules():
        if isinstance(module, nn.Conv1d):
            continue
        stacked = [(n, p) for n, p in module.named_parameters(recurse=False) if p.ndim == 3]
        names = " ".join(name for name, _ in stacked)
        if "up" in names and "down" in names and stacked[0][1].shape[0] > 1:
            return _stacked(layer, path, module, stacked, config)
    return None


def _stacked(
    layer: nn.Module,
    path: str,
    experts: nn.Module,
    stacked: list[tuple[str, nn.Parameter]],
    config: PreTrainedConfig,
) -> Moe:
    weights = dict(stacked)
    down_name = next(n for n in weights if "down" in n)
    up_name = next(n for n in weights if "up" in n)
    count, *sides = weights[down_name].shape  # [E, D, I], or transposed [E, I, D]
    transposed = getattr(experts, "is_transposed", None)
    if transposed is None:  # no decorator to ask: the side that is not the experts' width
        transposed = sides[0] != config.hidden_size and sides[1] == config.hidden_size
    hidden, inner = (sides[1], sides[0]) if transposed else (sides[0], sides[1])
    up_sides = weights[up_name].shape[1:]
    up_out = up_sides[1] if transposed else up_sides[0]
    banks = [
        ExpertBank(name=f"{path}.{up_name}", count=count, in_features=hidden, out_features=up_out),
        ExpertBank(name=f"{path}.{down_name}", count=count, in_features=inner, out_features=hidden),
    ]
    parent_path = path.rpartition(".")[0]
    parent = layer.get_submodule(parent_path)
    router, router_input, top_k = _router(parent, experts, count)
    shared = first_of(config, "n_shared_experts", "num_shared_experts")
    if shared is None or shared == 0:
        shared = int(any("shared" in name for name, _ in parent.named_children()))
    top_k = top_k or first_of(
        config, "num_experts_per_tok", "moe_topk", "moe_top_k", "top_k_experts"
    )
    return Moe(
        path=parent_path,
        experts=path,
        router=f"{parent_path}.{router}" if router else None,
        count=count,
        top_k=top_k or 1,
        shared=shared,
        hidden_size=hidden,
        intermediate_size=inner,
        router_input_size=router_input or hidden,
        gated=up_out == 2 * inner,
        banks=banks,
    )


def _router(
    moe: nn.Module, experts: nn.Module, count: int
) -> tuple[str | None, int | None, int | None]:
    """Path in `moe`, input width and top k of the router: the module that scores every expert."""
    for path, module in moe.named_modules():
        weight = getattr(module, "weight", None)
        if module is experts or "shared" in path or not isinstance(weight, nn.Parameter):
            continue
        if weight.ndim == 2 and weight.shape[0] >= count and ("gate" in path or "router" in path):
            return path, weight.shape[1], first_of(module, "top_k") or first_of(moe, "top_k")
    return None, None, first_of(moe, "top_k")
