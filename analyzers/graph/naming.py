"""What a call in the graph of a layer is called, and the part of the block that it belongs to."""

from __future__ import annotations

from torch import nn

from analyzers.experts import Moe
from analyzers.graph.layer import LayerGraph
from analyzers.graph.opaque import NAMESPACE
from analyzers.mixers import Mixer
from analyzers.structure import Kind


def name_calls(graph: LayerGraph) -> None:
    """Gives every call its `part`, `operator` and `whole` (see `LayerGraph`)."""
    for node in graph.calls():
        path = node.meta["path"]
        # What a block of experts does between its modules is about the routed ones.
        glue = path and any(path == moe.path for moe in graph.kind.moes)
        node.meta["part"] = "routed_experts" if glue else graph.kind.part(path)
        name, whole = normalised(graph.kind, path, str(node.target))
        node.meta["operator"], node.meta["whole"] = name, whole
    for mixer in graph.kind.mixers:
        if not any(n.meta["operator"] == mixer.operator for n in graph.calls()):
            _name_spelt_out_attention(graph, mixer)


def _name_spelt_out_attention(graph: LayerGraph, mixer: Mixer) -> None:
    """In code that calls no function of attention its softmax stands for it."""
    for node in graph.calls():
        inside = f"{node.meta['path']}.".startswith(f"{mixer.path}.")
        if inside and mixer.operator in SOFTMAX and str(node.target).startswith("aten.softmax"):
            node.meta["operator"] = mixer.operator


SOFTMAX = ("scaled_dot_product_attention", "sparse_attention", "compressed_attention")


def normalised(kind: Kind, path: str, target: str) -> tuple[str, str | None]:
    """Normalised name of a call, and the path of the module whose calls count as one, if any."""
    for moe in kind.moes:
        for name, root in (("router", _router_root(moe)), ("experts", moe.experts)):
            if root and f"{path}.".startswith(f"{root}."):
                return name, root
    if site := _residual_site(kind.module, path):
        return site
    module = kind.module.get_submodule(path)
    name = type(module).__name__
    if "Norm" in name:
        plain = "rms_norm" if "RMS" in name else "layer_norm"
        return ("gated_rms_norm" if "Gated" in name else plain), path
    if isinstance(module, nn.Conv1d):
        return "short_convolution", path
    mixer = next((m for m in kind.mixers if f"{path}.".startswith(f"{m.path}.")), None)
    if mixer and target.startswith(("analyzers.attention", "aten.scaled_dot_product")):
        return mixer.operator, None
    if target.startswith(f"{NAMESPACE}."):
        return target.split(".")[1], None
    if target == "aten.linear.default":
        return "linear", None
    if target.startswith("<"):  # <built-in function mul>, on sizes
        return f"builtin.{target.rstrip('>').split()[-1]}", None
    return target.removesuffix(".default"), None


def _router_root(moe: Moe) -> str | None:
    """The router's module; where it has its scores from a linear layer inside, all of it."""
    around = (moe.router or "").rpartition(".")[0]
    return moe.router if around in ("", moe.path) else around


def _residual_site(layer: nn.Module, path: str) -> tuple[str, str] | None:
    """The module around a call that mixes residual streams: what it is, and its path."""
    words = path.split(".")
    for end in range(1, len(words) + 1):
        root = ".".join(words[:end])
        class_name = type(layer.get_submodule(root)).__name__
        found = next((name for word, name in RESIDUAL_SITES.items() if word in class_name), None)
        if found:
            return found, root
    return None


RESIDUAL_SITES = {
    "AttentionResidual": "attention_residual",
    "HyperConnection": "hyper_connection",
}


def plain_name(target: str) -> str:
    """`aten.silu.default` -> `silu`."""
    return target.split(".")[1] if "." in target else target
