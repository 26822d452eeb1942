"""A limit on the tokens of an expert: what exceeds it goes to the next best expert, or nowhere.

The tokens of a rank form one group, and each expert takes at most `capacity` of every group, so
that no rank needs to know another's tokens and all buffers have one size. A token's outcome depends
on the other tokens of its rank, and on nothing else: not on how experts lie on ranks.

Legend of shapes: T tokens of this rank, K experts that a token needs, N >= K candidates of a token
in order of its preference, E experts.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from analyzers.errors import InputError
from analyzers.experts import experts_of
from runtime.experts.fan import TORCH, RowKernels, tally
from runtime.experts.replay import TopkHandler, once

if TYPE_CHECKING:
    from analyzers.experts import Moe
    from strategies.schema import Plan

TRIES = 2
"""A rerouted token asks at most so many times the experts that it needs."""


def settle(
    index_TN: Tensor, score_TN: Tensor, open_TN: Tensor, top_k: int, experts: int, capacity: int
) -> Tensor:
    """Which candidates each token gets [T, N]: at most `top_k`, and no expert above `capacity`.

    Deferred acceptance (Gale and Shapley 1962, each side with a quota): a token asks its best
    candidates that have not refused it, an expert keeps the highest scores, equal ones by the lower
    token index, and refuses the rest for good. The outcome is the one that no token and expert
    would both rather leave; an expert refuses only when it is full of higher scores. With N = K
    nothing can be asked again, and the host waits for nothing; otherwise it asks every N rounds
    whether somebody was refused in the last one.
    """
    tokens, tries = index_TN.shape
    expert = index_TN.reshape(-1)
    # All candidacies as experts prefer them: by expert, then score, then token.
    order = torch.argsort(score_TN.reshape(-1), descending=True, stable=True)
    order = order[torch.argsort(expert[order], stable=True)]
    expert = expert[order]
    counts_E = tally(expert, experts)
    first = (counts_E.cumsum(0) - counts_E)[expert]
    refused = ~open_TN

    def ask() -> tuple[Tensor, Tensor]:
        """The candidates asked, and those of them that refuse, now."""
        asked = ~refused & ((~refused).cumsum(1) <= top_k)
        asking = asked.reshape(-1)[order]
        before = asking.cumsum(0) - asking.long()
        full = asking & (before - before[first] >= capacity)
        refusing = torch.empty_like(full)
        refusing[order] = full
        return asked, refusing.view(tokens, tries)

    if tokens == 0 or tries == top_k:
        asked, refusing = ask()
        return asked & ~refusing
    while True:
        for _ in range(tries):
            asked, refusing = ask()
            refused = refused | refusing
        if not bool(refusing.any()):
            return asked


@dataclass
class Limiter:
    """What a layer's experts take; called by the experts on what the router chose."""

    name: str
    experts: int
    top_k: int
    candidates: int
    """N; more than `top_k` where tokens are rerouted."""
    capacity: int
    renormalize: bool
    """Whether the router makes the weights of the chosen sum to one, as it then does for N."""
    grouped: bool = False
    """Whether the router chooses groups first and leaves the experts of others out."""
    closed_TN: Tensor | None = None
    """Candidates that the router itself excluded, as those of groups it did not choose."""

    def run_block(self, forward: Callable, *args: Any, **kwargs: Any) -> Any:
        """`forward` of the module that owns router and experts, its router asked for N choices."""
        self.closed_TN = None
        with _Candidates(self):
            return forward(*args, **kwargs)

    def __call__(
        self,
        index_TN: Tensor,
        weights_TN: Tensor,
        valid_T: Tensor | None,
        kernels: RowKernels = TORCH,
    ) -> tuple[Tensor, Tensor]:
        """-> ids [T, K], `experts` for none, and weights [T, K].

        The weights of a token are scaled so that they sum to what its K first choices did; those
        of a token that is not valid are zero, and it takes no place.
        """
        if index_TN.shape[1] != self.candidates:
            fault = f"reroute, but the router of {self.name} is not one topk over its experts"
            raise InputError("plan.json", field="capacity.overflow", fault=fault, fix="drop")
        score_TN = weights_TN.detach()
        ids_TK, column_TK = once(lambda: self._chosen(index_TN, score_TN, valid_T, kernels))
        whole = weights_TN if self.renormalize else weights_TN[:, : self.top_k]
        kept_TK = torch.where(ids_TK < self.experts, weights_TN.gather(1, column_TK), 0)
        kept = kept_TK.sum(1, keepdim=True)
        scale = whole.sum(1, keepdim=True) / torch.where(kept == 0, 1, kept)
        return ids_TK, kept_TK * scale

    def _chosen(
        self, index_TN: Tensor, score_TN: Tensor, valid_T: Tensor | None, kernels: RowKernels
    ) -> tuple[Tensor, Tensor]:
        open_TN = torch.ones_like(index_TN, dtype=torch.bool)
        if self.closed_TN is not None:
            open_TN &= ~self.closed_TN
        if valid_T is not None:
            open_TN &= valid_T.unsqueeze(1)
        if kernels.reroute is not None:
            limits = {"top_k": self.top_k, "experts": self.experts, "capacity": self.capacity}
            return kernels.reroute(index_TN, score_TN, open_TN, **limits)
        got_TN = settle(index_TN, score_TN, open_TN, self.top_k, self.experts, self.capacity)
        column_TK = torch.argsort((~got_TN).byte(), dim=1, stable=True)[:, : self.top_k]
        got_TK = got_TN.gather(1, column_TK)
        return torch.where(got_TK, index_TN.gather(1, column_TK), self.experts), column_TK


class _Candidates(TopkHandler):
    """Makes the router's own code choose N experts, in order of its scores, where it asks for K."""

    def __init__(self, limiter: Limiter) -> None:
        self.limiter = limiter

    def handle(self, topk: Callable, input: Tensor, k: int, dim: int, *args: Any, **kw: Any) -> Any:
        limiter = self.limiter
        if input.shape[-1] != limiter.experts or k != limiter.top_k:
            return topk(input, k, dim, *args, **kw)
        found = topk(input, limiter.candidates)
        if limiter.grouped:  # those left out are masked with zero or minus infinity
            closed = (found.values == 0) | found.values.isneginf()
            limiter.closed_TN = closed.reshape(-1, limiter.candidates)
        return found


def limit_experts(model: Any, plan: Plan) -> dict[str, Limiter]:
    """Puts a limiter before every routed experts module; by name of the module. To be called before
    sharding. Raises InputError for a model whose experts cannot be limited."""
    from analyzers.experts import find_moes
    from analyzers.structure import decoder_layers

    limiters: dict[str, Limiter] = {}
    path, layers = decoder_layers(model)
    for number, layer in enumerate(layers):
        for moe in find_moes(layer, model.config.get_text_config()):
            name = f"{path}.{number}.{moe.experts}"
            if moe.layout != "stacked" or moe.zero_experts:
                fault = f"set, but {name} is no stacked bank of experts, all of them real"
                raise InputError("plan.json", field="capacity.factor", fault=fault, fix="null")
            limiters[name] = limiter = _limiter(name, moe, plan)
            experts: Any = model.get_submodule(name)
            experts.limiter = limiter
            if limiter.candidates > limiter.top_k:
                block: Any = layer.get_submodule(moe.path)
                block.forward = functools.partial(limiter.run_block, block.forward)
    for name in experts_of(model).keys() - limiters.keys():
        fault = f"set, but how tokens come to {name} is not known"
        raise InputError("plan.json", field="capacity.factor", fault=fault, fix="null")
    return limiters


def _limiter(name: str, moe: Moe, plan: Plan) -> Limiter:
    factor, overflow = plan.capacity.factor, plan.capacity.overflow
    assert factor is not None, "no limit"
    tokens = plan.micro_batch_size * plan.sequence_length
    tries = moe.top_k
    if overflow == "reroute":
        tries = min(moe.count, TRIES * moe.top_k)
    return Limiter(
        name=name,
        experts=moe.count,
        top_k=moe.top_k,
        candidates=tries,
        capacity=max(1, math.ceil(factor * tokens * moe.top_k / moe.count)),
        renormalize=moe.routing.renormalize,
        grouped=moe.routing.groups > 1,
    )
