"""The mixture of experts of a layer: where its weights lie, and what its router does.

Three layouts are read: 3-D parameters `[experts, out, in]` of one module (or its transpose), 3-D
`weight`s of several modules in one, and lists of alike modules. What the router computes is read
from the config where a key names it, else from the functions that the router's code calls.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn

from analyzers.mixers import first_of
from analyzers.schema import ExpertBank, Router

DOWN = ("w2", "fc2", "wo", "output_linear")  # beside names with "down" in them
TOP_K = ("num_experts_per_tok", "moe_topk", "moe_top_k", "top_k_experts", "num_selected_experts")
SHARED = ("n_shared_experts", "num_shared_experts", "num_shared_expert")
ACTIVATION = (
    "moe_hidden_act",
    "mlp_hidden_act",
    "hidden_act",
    "hidden_activation",
    "activation_function",
    "dense_act_fn",
)
SCORING = ("scoring_func", "score_function", "moe_router_activation_func", "router_score_function")
RENORMALIZE = ("norm_topk_prob", "moe_renormalize", "route_norm", "moe_norm_topk_prob")
SCALING = ("routed_scaling_factor", "route_scale", "router_scaling_factor", "scaling_factor")
AUXILIARY = ("router_aux_loss_coef", "aux_loss_alpha", "aux_loss_coef", "moe_aux_loss_coeff")
CORRECTION = ("correction_bias", "expert_bias", "balancing_bias")
SCORES = ("softmax", "sigmoid", "softplus", "sparsemixer")


@dataclass(frozen=True)
class Moe:
    """A mixture of experts: `experts` and `router` are paths in the block, sizes as in schema."""

    path: str
    """Of the module that owns the experts; empty when the layer itself does."""
    experts: str
    router: str | None
    count: int
    top_k: int
    shared: int
    hidden_size: int
    intermediate_size: int
    router_input_size: int
    gated: bool
    routing: Router
    banks: list[ExpertBank] = field(default_factory=list)
    """The one that projects down comes last."""
    layout: Literal["stacked", "module_list"] = "stacked"
    zero_experts: int = 0
    shared_paths: tuple[str, ...] = ()
    shared_intermediate_size: int = 0
    activation: str = "unknown"

    def held(self, parameter: nn.Parameter) -> int:
        """Elements of an expert parameter that some expert uses.

        transformers' LongCat-Flash allocates rows for its zero experts too, 180 B parameters that
        are in no checkpoint.
        """
        elements = parameter.numel()
        if parameter.ndim == 3 and parameter.shape[0] > self.count:
            return elements // parameter.shape[0] * self.count
        return elements

    @property
    def for_images(self) -> bool:
        return for_images(self.path)

    @property
    def visited(self) -> float:
        """The share of the experts that one token of text visits; zero experts, which compute
        nothing, are taken to be chosen as often as the others."""
        return 0.0 if self.for_images else self.top_k / (self.count + self.zero_experts)


def for_images(path: str) -> bool:
    """Whether a layer has experts at `path` for images alone."""
    return "vision" in path


def find_moes(layer: nn.Module, config: Any) -> list[Moe]:
    """The groups of routed experts of a layer: one in its feed-forward, and in a few models others
    in its attention (JetMoE) or for images (Ernie 4.5 VL)."""
    found = []
    for path, module in layer.named_modules():
        if "shared" in path or isinstance(module, nn.Conv1d):
            continue
        stacked = _stacked(path, module, config) or _flattened(path, module)
        listed = _listed(path, module)
        if stacked or listed:
            found.append(_moe(layer, path, stacked, listed, config))
    return sorted(found, key=lambda moe: moe.for_images or "attention" in moe.experts)


def experts_of(model: nn.Module) -> dict[str, Any]:
    """All modules of stacked experts, by name: those that run through transformers' registry, and
    lists of experts that were stacked here.

    Typed loosely: what transformers' decorator adds to them is not declared anywhere.
    """
    return {n: module for n, module in model.named_modules() if hasattr(module, "is_transposed")}


def _moe(
    layer: nn.Module,
    path: str,
    stacked: list[ExpertBank],
    listed: list[ExpertBank],
    config: Any,
) -> Moe:
    banks = sorted(stacked or listed, key=lambda bank: _is_down(bank.name))
    down = banks[-1]
    if path.endswith(".experts.mlp"):  # DBRX: weights in one module, the loop in that around it
        path = path.removesuffix(".mlp")
    experts = layer.get_submodule(path)
    own_router = any(_is_router(name) for name, _ in experts.named_children())  # JetMoE
    parent_path = path if own_router else path.rpartition(".")[0]
    parent = layer.get_submodule(parent_path)
    shared = _shared(layer, path)
    shared_width = sum(_down_width(layer.get_submodule(p)) for p in shared)
    router, weight = _router(parent, experts, down.count)
    owner = _owner(parent, router)
    scored = weight.shape[0] if weight is not None else down.count
    return Moe(
        path=parent_path,
        experts=path,
        router=".".join(p for p in (parent_path, router) if p) if router else None,
        count=down.count,
        top_k=_top_k(owner, parent, config),
        shared=(first_of(config, *SHARED) or 1) if shared_width else 0,
        hidden_size=down.out_features,
        intermediate_size=down.in_features,
        router_input_size=weight.shape[1] if weight is not None else down.out_features,
        gated=sum(bank.out_features for bank in banks[:-1]) == 2 * down.in_features,
        routing=_routing(parent, owner, weight, config, down.out_features),
        banks=banks,
        layout=getattr(experts, "layout", None) or ("stacked" if stacked else "module_list"),
        # Some routers score their shared experts too.
        zero_experts=max(0, scored - down.count - int(first_of(owner, *SHARED) or 0)),
        shared_paths=tuple(shared),
        shared_intermediate_size=shared_width,
        activation=_named(first_of(config, *ACTIVATION)),
    )


def _top_k(owner: nn.Module, parent: nn.Module, config: Any) -> int:
    """What the modules say, else the config, else the name of the router's class (`Top2Router`)."""
    named = re.search(r"Top(\d)", type(owner).__name__)
    said = first_of(owner, "top_k") or first_of(parent, "top_k") or first_of(config, *TOP_K)
    return said or (int(named[1]) if named else 1)


def _named(activation: Any) -> str:
    return activation if isinstance(activation, str) else "unknown"


# ------------------------------------------------------------------------------------- weights


def _is_down(name: str) -> bool:
    words = name.split(".")
    return "down" in words[-1] or any(word in DOWN for word in words[-2:])


def _stacked(path: str, module: nn.Module, config: Any) -> list[ExpertBank]:
    """Banks that are 3-D parameters of the module, or of its children as `weight`s."""
    own = {n: p for n, p in module.named_parameters(recurse=False) if p.ndim == 3}
    if not any(_is_down(n) for n in own):
        own = {
            name: parameter
            for name, child in module.named_children()
            if not isinstance(child, nn.Conv1d)
            for parameter in child.parameters(recurse=False)
            if parameter.ndim == 3
        }
    down = next((p for n, p in own.items() if _is_down(n)), None)
    if len(own) < 2 or down is None or down.shape[0] < 2:
        return []
    transposed = getattr(module, "is_transposed", None)
    if transposed is None:  # no decorator to ask: the side that is not the experts' width
        sides = down.shape[1:]
        transposed = sides[0] != config.hidden_size and sides[1] == config.hidden_size
    return [
        ExpertBank(
            name=f"{path}.{name}",
            count=min(p.shape[0] for p in own.values()),
            in_features=p.shape[1 if transposed else 2],
            out_features=p.shape[2 if transposed else 1],
        )
        for name, p in own.items()
    ]


def _flattened(path: str, module: nn.Module) -> list[ExpertBank]:
    """Banks that are 2-D, `[experts * width, hidden]`, as in DBRX."""
    count = getattr(module, "moe_num_experts", None)
    own = {n: p for n, p in module.named_parameters(recurse=False) if p.ndim == 2}
    if not isinstance(count, int) or not any(_is_down(n) for n in own):
        return []
    banks = []
    for name, p in own.items():
        width, hidden = p.shape[0] // count, p.shape[1]
        into, out = (width, hidden) if _is_down(name) else (hidden, width)
        bank = ExpertBank(name=f"{path}.{name}", count=count, in_features=into, out_features=out)
        banks.append(bank)
    return banks


def _listed(path: str, module: nn.Module) -> list[ExpertBank]:
    """Banks of a list (or dictionary) of alike experts, one for each of their linear layers and
    named like it."""
    if not isinstance(module, (nn.ModuleList, nn.ModuleDict)) or "expert" not in path:
        return []
    children = [c for c in module.children() if any(True for _ in c.parameters())]
    if len(children) < 2:
        return []
    first = [(n, m) for n, m in children[0].named_modules() if isinstance(m, nn.Linear)]
    if not any(_is_down(n) for n, _ in first):
        return []
    return [
        ExpertBank(
            name=f"{path}.{name.replace('.', '_')}",
            count=len(children),
            in_features=m.in_features,
            out_features=m.out_features,
        )
        for name, m in first
    ]


def _shared(layer: nn.Module, experts: str) -> list[str]:
    """Outermost modules beside the experts that every token visits, and their gates."""
    found: list[str] = []
    for path, _ in layer.named_modules():
        if "shared" in path.rpartition(".")[2] and not path.startswith((*found, f"{experts}.")):
            found.append(path)
    return found


def _down_width(module: nn.Module) -> int:
    """Width inside a shared expert; several that are stacked count together."""
    linears = ((n, m) for n, m in module.named_modules() if isinstance(m, nn.Linear))
    stacked = (
        p.shape[0] * p.shape[2] for n, p in module.named_parameters() if p.ndim == 3 and _is_down(n)
    )
    return sum(m.in_features for n, m in linears if _is_down(n)) + sum(stacked)


# -------------------------------------------------------------------------------------- router


def _router(
    parent: nn.Module, experts: nn.Module, count: int
) -> tuple[str | None, nn.Parameter | None]:
    """Path and weight of the module beside the experts that scores every expert."""
    inside = set() if experts is parent else set(experts.modules())
    found: list[tuple[int, str, nn.Parameter]] = []
    for path, module in parent.named_modules():
        weight = getattr(module, "weight", None)
        if module in inside or "shared" in path or not isinstance(weight, nn.Parameter):
            continue
        if weight.ndim == 2 and weight.shape[0] >= count and _is_router(path):
            found.append((weight.shape[0], path, weight))
    if not found:
        return None, None
    _, path, weight = min(found, key=lambda item: item[0])
    return path, weight


def _is_router(path: str) -> bool:
    return any(w in ("gate", "wg") or "router" in w or "gating" in w for w in path.split("."))


def _owner(parent: nn.Module, router: str | None) -> nn.Module:
    """The module whose code turns scores into a choice: of those from the one that scores up to the
    one that owns the experts, the first that says how."""
    path = router or ""
    while path:
        module = parent.get_submodule(path)
        if {"topk", *SCORES} & set(_called(module)):
            return module
        path = path.rpartition(".")[0]
    return parent


def _routing(
    parent: nn.Module, owner: nn.Module, weight: nn.Parameter | None, config: Any, width: int
) -> Router:
    called = list(_called(owner))
    tensors = [n for n, _ in parent.named_buffers()] + [n for n, _ in parent.named_parameters()]
    names = {name.rpartition(".")[2] for name in tensors}
    groups = int(first_of(config, "n_group", "num_expert_group", "n_groups_experts") or 1)
    return Router(
        scoring=_scoring(names, called, owner, config),
        input_size=weight.shape[1] if weight is not None else width,
        correction_bias=any(word in name for name in names for word in CORRECTION),
        groups=groups,
        top_k_groups=int(first_of(config, "topk_group") or 1) if groups > 1 else 1,
        renormalize=_renormalizes(called, owner, config),
        scaling=float(first_of(owner, *SCALING) or first_of(config, *SCALING) or 1.0),
        auxiliary_loss=float(first_of(config, *AUXILIARY) or 0.0),
    )


def _called(module: nn.Module) -> Iterator[str]:
    """Names that the code of a module's class uses, forward first, in the order of their use."""
    functions = {n: f for n, f in vars(type(module)).items() if inspect.isfunction(f)}
    functions.pop("__init__", None)
    for _, function in sorted(functions.items(), key=lambda item: item[0] != "forward"):
        yield from inspect.unwrap(function).__code__.co_names


def _scoring(tensors: set[str], called: list[str], owner: nn.Module, config: Any) -> str:
    if "tid2eid" in tensors:
        return "hash"
    said = first_of(config, *SCORING)
    if isinstance(said, str):
        return said
    for name in called:
        if name in SCORES:
            return "sqrtsoftplus" if name == "softplus" and "sqrt" in called else name
    functions = (type(m).__name__.lower() for n, m in owner.named_children() if "scor" in n)
    return next(functions, "unknown")


def _renormalizes(called: list[str], owner: nn.Module, config: Any) -> bool:
    """Whether the chosen weights are made to sum to one: by a switch that the code asks, by
    dividing by their sum, or by a softmax over the chosen alone. Without code, as a key says."""
    if not called:
        return bool(first_of(config, *RENORMALIZE))
    for switch in RENORMALIZE:
        if switch in called:
            own = getattr(owner, switch, None)
            return bool(getattr(config, switch, False) if own is None else own)
    if "sum" in called or "norm" in called:
        return True
    return "softmax" in called and "topk" in called[: called.index("softmax")]
