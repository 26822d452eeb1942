"""Cases of routing: the choice of experts, the order of what was chosen, and what finds no room."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch

from codegen.verify.cases import Case, Shape


@dataclass(frozen=True, kw_only=True)
class ChooseCase(Case):
    """Scores that lie far enough apart for one order in all dtypes, or are equal.

    `lengths` counts the tokens.
    """

    INPUTS: ClassVar = {"z": "sequence", "bias": "whole"}
    OUTPUTS: ClassVar = {"w": "sequence", "ids": "sequence"}
    GRADIENTS: ClassVar = ("z",)

    experts: int = 24
    top_k: int = 4
    how: Mapping[str, Any] = field(default_factory=lambda: {"score": "sigmoid"})
    bias: bool = False
    levels: int | None = None
    """So many different logits, so that many are equal."""
    apart: bool = False
    """The rows lie in a wider array."""

    def make(self, shape, dtype):
        generator = torch.Generator().manual_seed(42)
        wide = self.experts + 5 * self.apart
        ranks = torch.rand(self.tokens, wide, generator=generator).argsort(1)
        levels = self.levels or wide
        # Multiples of 1/16 around zero: exact in all dtypes up to 256 levels.
        z = (ranks % levels - levels // 2) / 16
        bias = torch.randint(0, 3, (self.experts,), generator=generator) * 0.33
        above = torch.randn(self.tokens, self.top_k, generator=generator)
        bias = bias.to(dtype) if self.bias else None
        return {"z": z.to(dtype), "bias": bias, "dw": above, "dids": None}

    def call(self, function, x, kernel):
        z = x["z"]
        assert z is not None
        weights, ids = function(z[:, : self.experts], self.top_k, bias=x["bias"], **self.how)
        return {"w": weights, "ids": ids}


@dataclass(frozen=True, kw_only=True)
class OrderCase(Case):
    """Random experts, some of them of other devices; `lengths` counts the tokens."""

    INPUTS: ClassVar = {"ids": "sequence"}
    OUTPUTS: ClassVar = dict.fromkeys(("choice", "source", "by_source", "offsets", "ends"), "whole")
    GRADIENTS: ClassVar = ()

    experts: int = 7
    choices: int = 3
    others: int = 2
    """Ids beyond the experts; -1 is among them."""
    padded: int | None = None
    """So many places more than pairs."""
    ids: torch.dtype = torch.int64

    def make(self, shape, dtype):
        generator = torch.Generator().manual_seed(42)
        limit = self.experts + self.others
        ids = torch.randint(0, limit, (self.tokens, self.choices), generator=generator)
        ids[ids == self.experts] = -1 if self.others > 1 else self.experts
        return {"ids": ids.to(self.ids)}

    def call(self, function, x, kernel):
        ids = x["ids"]
        assert ids is not None
        size = int(((ids >= 0) & (ids < self.experts)).sum()) + (self.padded or 0)
        found = function(ids, self.experts, size=size, padded=self.padded is not None)
        return dict(zip(self.OUTPUTS, found, strict=True))


@dataclass(frozen=True, kw_only=True)
class RerouteCase(Case):
    """Tokens that all like the same experts; `lengths` counts them."""

    INPUTS: ClassVar = {"ids": "sequence", "scores": "sequence", "given": "sequence"}
    OUTPUTS: ClassVar = {"chosen": "sequence", "columns": "sequence"}
    GRADIENTS: ClassVar = ()

    experts: int = 6
    tries: int = 4
    top_k: int = 2
    capacity: int = 4
    per: int = 1
    levels: int = 1000
    """So many different scores."""
    closed: bool = False
    """Some candidates are closed, and some tokens are padding."""
    chain: bool = False
    """Every token drives away the next: one is refused in each round."""
    ids: torch.dtype = torch.int64

    def make(self, shape, dtype):
        if self.chain:
            n = torch.arange(self.tokens).unsqueeze(1)
            ids = torch.cat([(n - 1).clamp(min=0), n], 1)
            scores = torch.tensor([[0.25, 0.75]]).repeat(self.tokens, 1)
            scores[0] = 1.0
            return {"ids": ids.to(self.ids), "scores": scores.to(dtype), "given": None}
        generator = torch.Generator().manual_seed(42)
        liked = torch.rand(self.tokens, self.experts, generator=generator)
        liked = liked * torch.linspace(0.3, 1.0, self.experts)
        ids = liked.argsort(1, descending=True)[:, : self.tries]
        scores = torch.randint(0, self.levels, ids.shape, generator=generator) / self.levels
        given = None
        if self.closed:
            given = torch.rand(ids.shape, generator=generator) < 0.8
            given[::4] = False
        return {"ids": ids.to(self.ids), "scores": scores.to(dtype), "given": given}

    def call(self, function, x, kernel):
        limits = {"experts": self.experts, "per": self.per, "capacity": self.capacity}
        found = function(x["ids"], x["scores"], x["given"], top_k=self.top_k, **limits)
        return dict(zip(self.OUTPUTS, found, strict=True))


def cases(shape: Shape) -> list[Case]:
    return {"moe_route": _choose, "moe_order": _order, "moe_reroute": _reroute}[shape.operator]()


def _choose() -> list[Case]:
    plain = ChooseCase(name="usual", lengths=(9,))
    compiled = replace(plain, compiled=True)
    grouped = {"score": "sigmoid", "groups": 4, "top_groups": 2, "renormalize": True}
    return [
        plain,
        replace(plain, name="softmax", how={"score": "softmax"}),
        replace(plain, name="the logits themselves", how={"score": "none"}),
        replace(
            plain,
            name="renormalised and scaled",
            how={"score": "sigmoid", "renormalize": True, "scale": 2.5},
        ),
        replace(
            plain, name="softmax over the chosen", how={"score": "softmax", "renormalize": True}
        ),
        replace(plain, name="a bias", bias=True),
        replace(compiled, name="the best groups", how=grouped),
        replace(plain, name="the best groups by one", bias=True, how={**grouped, "group_top": 1}),
        replace(plain, name="equal scores", levels=3),
        replace(plain, name="equal groups", levels=1, how=grouped),
        replace(plain, name="all experts", experts=5, top_k=5),
        replace(plain, name="one expert", experts=1, top_k=1, how={"score": "softmax"}),
        replace(
            compiled,
            name="896 experts",
            experts=896,
            top_k=16,
            levels=40,
            bias=True,
            lengths=(2,),
            how={"score": "softmax", "renormalize": True},
        ),
        replace(plain, name="rows of a wider array", apart=True),
        replace(plain, name="more tokens than a program has", lengths=(131,), experts=4),
        replace(plain, name="one token", lengths=(1,)),
        replace(plain, name="no tokens", lengths=(0,)),
    ]


def _order() -> list[Case]:
    usual = OrderCase(
        name="usual",
        compiled=True,
        lengths=(50,),
        gradients=False,
        dtypes=("float32", "bfloat16"),
    )
    plain = replace(usual, compiled=False)
    return [
        usual,
        replace(usual, name="padded", padded=21),
        replace(plain, name="int32 ids", ids=torch.int32),
        replace(plain, name="no others", others=0),
        replace(plain, name="no others, padded to nothing", others=0, padded=0),
        replace(plain, name="all others", experts=1, others=40, lengths=(3,)),
        replace(plain, name="all others, padded", experts=1, others=40, lengths=(3,), padded=2),
        replace(plain, name="one expert", experts=1, others=0),
        replace(plain, name="many experts", experts=896, choices=16, lengths=(40,)),
        replace(plain, name="one choice", choices=1),
        replace(plain, name="one pair", choices=1, others=0, lengths=(1,)),
        replace(plain, name="a block of pairs exactly", choices=4, lengths=(64,)),
        replace(plain, name="no tokens", lengths=(0,)),
    ]


def _reroute() -> list[Case]:
    usual = RerouteCase(
        name="usual",
        compiled=True,
        lengths=(14,),
        gradients=False,
    )
    plain = replace(usual, compiled=False)
    return [
        usual,
        replace(usual, name="closed candidates and padding", closed=True),
        replace(plain, name="equal scores", levels=3),
        replace(plain, name="all scores equal", levels=1),
        replace(plain, name="no candidate but the first", tries=2),
        replace(plain, name="a capacity of one", capacity=1),
        replace(plain, name="room for all", capacity=1000),
        replace(plain, name="a capacity of devices", per=3, capacity=8, closed=True),
        replace(plain, name="one pool", per=6, capacity=17),
        replace(plain, name="all candidates", tries=6, capacity=4),
        replace(plain, name="int32 ids", ids=torch.int32),
        replace(
            usual,
            name="a chain of refusals",
            chain=True,
            experts=12,
            tries=2,
            top_k=1,
            capacity=1,
            lengths=(12,),
        ),
        replace(plain, name="one token", lengths=(1,)),
        replace(plain, name="no tokens", lengths=(0,)),
    ]
