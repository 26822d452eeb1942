"""What a model is made of: its layers, grouped by kind, and the role of every module in a kind.

Everything is read from the modules of a model built on the meta device and from transformers'
conventions (expert weights stacked in one 3-D parameter, norms and routers by shape and name). What
the conventions do not say is in one table of mixers, keyed by module structure.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from torch import nn

from analyzers.errors import InputError
from analyzers.experts import Moe, find_moes
from analyzers.mixers import Mixer, is_mixer, recognise
from analyzers.schema import PartName

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


@dataclass(frozen=True)
class Kind:
    """One distinct kind of layer: `module` is the first of `layers`, the others are like it."""

    module: nn.Module
    layers: list[int]
    mixers: list[Mixer]
    moes: list[Moe]
    """Groups of routed experts, that of the feed-forward first."""
    dense: list[str]
    """Paths of the feed-forwards without experts."""

    @property
    def moe(self) -> Moe | None:
        return self.moes[0] if self.moes else None

    @property
    def mixer(self) -> str:
        """The mixers' names, joined where a layer has several that differ."""
        return "+".join(dict.fromkeys(m.name for m in self.mixers)) or "none"

    @property
    def feed_forward(self) -> Literal["dense", "moe", "none"]:
        return "moe" if self.moes else "dense" if self.dense else "none"

    def part(self, path: str) -> PartName:
        """The part that the module (or parameter) at `path` in the block belongs to."""
        for moe in self.moes:
            if moe.router and _under(path, moe.router):
                return "router"
            if _under(path, moe.experts):
                return "routed_experts"
        if any(_under(path, m.path) for m in self.mixers):
            return "mixer"
        if any(_under(path, shared) for moe in self.moes for shared in moe.shared_paths):
            return "shared_experts"
        if any(_under(path, dense) for dense in self.dense):
            return "dense"
        around = path.partition(".")[0]  # an output projection beside the attention proper
        if "attention" in around and any(m.path.startswith(f"{around}.") for m in self.mixers):
            return "mixer"
        for moe in self.moes:
            if path == moe.path:  # sums what its experts give
                return "routed_experts"
            if moe.path and _under(path, f"{moe.path}.shared_expert_gate"):  # Qwen's; one number
                return "router"
            # What is left beside the experts projects (and norms) around a latent space.
            if moe.path and _under(path, moe.path):
                return "latent_projection"
        return "norm" if "norm" in path else "other"

    def elements(self, path: str, parameter: nn.Parameter) -> int:
        """Elements of the parameter at `path`, without rows of experts that compute nothing."""
        for moe in self.moes:
            if _under(path, moe.experts):
                return moe.held(parameter)
        return parameter.numel()


def _under(path: str, root: str) -> bool:
    return path == root or path.startswith(f"{root}.")


def decoder_layers(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """Path and list of the decoder's layers: of the lists of modules in what transformers calls the
    decoder (so no vision tower), the one with a mixer in it that holds most parameters."""
    get_decoder = getattr(model, "get_decoder", None)
    decoder = get_decoder() if get_decoder else model
    within = {id(m) for m in decoder.modules()}
    lists = [
        (path, m)
        for path, m in model.named_modules()
        if isinstance(m, nn.ModuleList) and len(m) and id(m) in within
    ]
    if not lists:
        where = type(model).__name__
        raise InputError(
            where, fault="has no list of layers", fix="only decoder models are analysed"
        )
    mixing = [(p, m) for p, m in lists if any(is_mixer(inner) for inner in m[0].modules())]
    return max(mixing or lists, key=lambda item: sum(p.numel() for p in item[1].parameters()))


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
    moes = find_moes(layer, config)
    beside = {
        p for moe in moes for p in (moe.experts, moe.router, moe.path, *moe.shared_paths) if p
    }
    mixers: list[Mixer] = []
    for path, module in _outermost(layer, skip=beside):
        mixer = recognise(module, config)
        if mixer:
            mixers.append(Mixer(mixer.name, mixer.operator, mixer.attributes, mixer.site, path))
    # What else has linear layers: a mixer that the table does not know, or a feed-forward.
    others = [
        (path, module)
        for path, module in _rest(layer, {m.path for m in mixers} | beside)
        if any(isinstance(m, nn.Linear) for m in module.modules())
    ]
    unknown = [path for path, module in others if _looks_like_mixer(path, module)]
    if not mixers:
        mixers = [
            Mixer(name="other", operator="other_mixer", attributes={}, path=p) for p in unknown
        ]
    dense = [path for path, _ in others if path not in unknown]
    return Kind(layer, [index], mixers, moes, dense)


def _rest(layer: nn.Module, taken: set[str]) -> Iterator[tuple[str, nn.Module]]:
    """Outermost modules that neither are, nor lie in, nor hold one of `taken`."""
    pending = list(layer.named_children())
    while pending:
        path, module = pending.pop(0)
        if any(_under(path, root) for root in taken):
            continue
        if any(_under(root, path) for root in taken):
            pending += [(f"{path}.{name}", child) for name, child in module.named_children()]
        else:
            yield path, module


def _looks_like_mixer(path: str, module: nn.Module) -> bool:
    if "MLP" in type(module).__name__:  # Nemotron-H calls its feed-forwards mixers, too
        return False
    words = ("attn", "attention", "mixer")
    return "Attention" in type(module).__name__ or any(word in path for word in words)


def _outermost(layer: nn.Module, *, skip: set[str]) -> Iterator[tuple[str, nn.Module]]:
    """The layer's modules from outside in, without those inside a mixer that was already found."""
    pending = list(layer.named_children())
    while pending:
        path, module = pending.pop(0)
        if path in skip:
            continue
        yield path, module
        if not is_mixer(module):
            pending += [(f"{path}.{name}", child) for name, child in module.named_children()]
