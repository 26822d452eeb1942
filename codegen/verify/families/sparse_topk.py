"""Cases of attention over selected keys and of the indexer that selects them: any widths, padding,
repeated keys, equal scores, documents."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch

from codegen.verify.cases import Case, Kind, Shape, future, limits, other_order, row_alone


def selected(
    lengths: tuple[int, ...], batch: int, top_k: int, generator: torch.Generator
) -> torch.Tensor:
    """At most `top_k` random keys of its document for every query, none later than itself, in a
    random order, the rest -1: int32 [B, T, K], counted from the begin of the document."""
    rows = []
    for length in lengths:
        order = torch.rand(batch, length, max(length, top_k), generator=generator)
        later = torch.arange(order.shape[2]) > torch.arange(length)[:, None]
        keys = order.masked_fill(later, 2.0).argsort(-1)[..., :top_k]
        real = order.masked_fill(later, 2.0).sort(-1).values[..., :top_k] < 2
        rows.append(torch.where(real, keys, -1))
    return torch.cat(rows, 1).to(torch.int32)


def in_the_row(indices: torch.Tensor, limits: torch.Tensor | None) -> torch.Tensor:
    """Keys counted from the begin of the row in place of the document's."""
    if limits is None:
        return indices
    begins = torch.repeat_interleave(limits[:-1], limits.diff()).to(indices)
    return torch.where(indices >= 0, indices + begins[None, :, None], indices)


@dataclass(frozen=True, kw_only=True)
class AttentionCase(Case):
    INPUTS: ClassVar[Mapping[str, Kind]] = {
        "q": "token",
        "kv": "token",
        "indices": "token",
        "sinks": "whole",
    }
    OUTPUTS: ClassVar = {"o": "token", "lse": "token"}
    GRADIENTS: ClassVar = ("q", "kv", "sinks")

    heads: int = 3
    widths: tuple[int, int] = (40, 24)
    """Of a key and of its value."""
    top_k: int = 11
    keys: int | None = None
    """As many as tokens when None; others are selected without regard to their place."""
    repeated: bool = False
    """Some keys are named several times in a row."""
    nothing: bool = False
    """Every third query has no key."""
    one_key: bool = False
    """All queries select the first key, and nothing else."""
    sinks: bool = True
    q_scale: float = 1.0
    kv_scale: float = 1.0
    """Where both are large a query has one key: its gradient is a difference of equal numbers, of
    which <o, do> loses more bits than a sum over the keys, in every kernel that saves no scores."""

    def make(self, shape, dtype):
        generator = torch.Generator().manual_seed(42)

        def normal(*size):
            return torch.randn(*size, generator=generator)

        (D, V), B, T, H = self.widths, self.batch, self.tokens, shape.heads * self.heads
        keys = T if self.keys is None else self.keys
        indices = selected(self.lengths, B, self.top_k, generator)
        if self.keys is not None:
            size = (B, T, self.top_k)
            # Every number outside 0 .. keys - 1 is padding.
            indices = torch.randint(-2, keys + 2, size, generator=generator).to(torch.int32)
        if self.repeated:
            indices[:, :, 1::2] = indices[:, :, : self.top_k - 1 : 2]
        if self.one_key:
            indices[:] = -1
            indices[:, :, self.top_k // 2] = 0
        if self.nothing:
            indices[:, ::3] = -1
        return {
            "q": (normal(B, T, H, D) * self.q_scale).to(dtype),
            "kv": (normal(B, keys, D) * self.kv_scale).to(dtype),
            "indices": indices,
            "sinks": normal(H) if self.sinks else None,
            "do": normal(B, T, H, V).to(dtype),
        }

    def call(self, function, x, kernel):
        indices = x["indices"]
        assert indices is not None
        limits = x["cu_seqlens"]
        indices = in_the_row(indices, None if limits is None else limits.to(indices.device))
        value_dim = self.widths[1]
        o, lse = function(x["q"], x["kv"], indices, value_dim=value_dim, sinks=x["sinks"])
        return {"o": o, "lse": lse.clamp(min=-1e3)}  # finite where there is no key


def cases(shape: Shape) -> list[Case]:
    if shape.operator == "lightning_indexer":
        return indexer_cases()
    if shape.operator == "indexer_loss":
        return loss_cases()
    return attention_cases()


def attention_cases() -> list[Case]:
    usual = AttentionCase(name="usual", lengths=(19,), compiled=True)
    latent = AttentionCase(
        name="latent of 576 and 512",
        lengths=(4,),
        heads=64,
        widths=(576, 512),
        top_k=40,
        compiled=True,
    )
    plain = replace(usual, compiled=False)
    packed = replace(plain, name="packed documents", lengths=(0, 1, 9, 3, 0, 6))
    batch = replace(plain, name="a batch", batch=2, lengths=(7,))
    return [
        usual,
        latent,
        packed,
        batch,
        replace(usual, name="values as wide as keys", widths=(32, 32)),
        replace(plain, name="widths that no vector divides", widths=(37, 19)),
        replace(plain, name="values wider than the rest", widths=(48, 1)),
        replace(plain, name="one head", heads=1),
        # cudnn-frontend#385: a key that several queries select lost all but one gradient.
        replace(plain, name="one key for all queries", one_key=True),
        replace(plain, name="keys named several times", repeated=True),
        replace(plain, name="every key", top_k=19),
        replace(plain, name="more places than keys", lengths=(5,), top_k=70),
        replace(plain, name="queries without keys", nothing=True),
        replace(plain, name="queries without keys or sinks", nothing=True, sinks=False),
        replace(plain, name="no sinks", sinks=False),
        replace(
            plain,
            name="another number of keys, and numbers of none",
            keys=50,
            top_k=43,
            lengths=(5,),
        ),
        replace(plain, name="one place", top_k=1),
        replace(plain, name="no places", top_k=0),
        replace(plain, name="one token", lengths=(1,), top_k=3),
        replace(plain, name="no tokens", lengths=(0,)),
        replace(plain, name="inputs of 1e-3", q_scale=1e-3, kv_scale=1e-3),
        replace(plain, name="keys of 30", q_scale=1 / 30, kv_scale=30.0),
        replace(plain, name="queries of 2", q_scale=2.0),
        replace(plain, name="strided inputs", batch=2, lengths=(9,), strided=True),
        *future(replace(plain, name="tokens apart"), 10),
        row_alone(batch),
        other_order(packed),
    ]


@dataclass(frozen=True, kw_only=True)
class IndexerCase(Case):
    """Selects by scores that are exact but for the last bits of a sum: the keys are the reference's
    own, in their order."""

    INPUTS: ClassVar[Mapping[str, Kind]] = {"q": "token", "k": "token", "w": "token"}
    OUTPUTS: ClassVar = {"indices": "token", "selected": "token"}
    GRADIENTS: ClassVar = ()

    heads: int = 3
    width: int = 24
    top_k: int = 9
    before: int = 0
    """Keys before the first query's own."""
    weights: Literal["usual", "negative", "typed"] = "usual"
    """`negative`: most scores are zero, and equal."""
    scale: float = 1.0

    def make(self, shape, dtype):
        generator = torch.Generator().manual_seed(42)

        def normal(*size):
            return torch.randn(*size, generator=generator)

        B, T, H, S = self.batch, self.tokens, shape.heads * self.heads, self.tokens + self.before
        w = normal(B, T, H) * H**-0.5
        if self.weights == "negative":
            w = torch.zeros_like(w)
            w[:, ::2, 0] = -1.0
        return {
            "q": (normal(B, T, H, self.width) * self.scale).to(dtype),
            "k": (normal(B, S, self.width) * self.scale).to(dtype),
            "w": w.to(dtype) if self.weights == "typed" else w,
        }

    def call(self, function, x, kernel):
        q, k = x["q"], x["k"]
        assert q is not None
        assert k is not None
        limits = x["cu_seqlens"]
        limits = None if limits is None else limits.to(q.device)
        indices = function(q, k, x["w"], top_k=self.top_k, cu_seqlens=limits)
        # One wrong key is much of the norm of what is selected, and little of that of the indices.
        S = k.shape[1]
        hits = torch.zeros(*q.shape[:2], S + 1)
        place = torch.where((indices >= 0) & (indices < S), indices, S)
        hits = hits.scatter_(2, place.long().cpu(), 1.0)
        if limits is not None:  # counted from the begin of the document, which may be moved
            begins = torch.repeat_interleave(limits[:-1], limits.diff()).to(indices)
            indices = torch.where(indices < 0, -1, indices - begins[None, :, None])
            hits = hits.sum(2, keepdim=True)
        return {"indices": indices.double(), "selected": hits}


def indexer_cases() -> list[Case]:
    usual = IndexerCase(name="usual", lengths=(37,), gradients=False, compiled=True)
    real = replace(usual, name="real width", lengths=(3,), heads=64, width=128, top_k=2)
    plain = replace(usual, compiled=False)
    packed = replace(plain, name="packed documents", lengths=(0, 1, 20, 3, 0, 17))
    batch = replace(plain, name="a batch", batch=2, lengths=(21,))
    return [
        usual,
        real,
        packed,
        batch,
        replace(plain, name="equal scores", weights="negative"),
        replace(plain, name="weights in the dtype of the inputs", weights="typed"),
        replace(plain, name="a width that no vector divides", width=19, heads=5),
        replace(plain, name="one head", heads=1),
        replace(plain, name="more heads than a program holds", heads=21, lengths=(17,)),
        replace(plain, name="one key", top_k=1),
        replace(plain, name="all but one key", top_k=36),
        replace(plain, name="every key", top_k=37),
        replace(plain, name="more than there are", lengths=(7,), top_k=50),
        replace(plain, name="keys before the queries", lengths=(11,), before=40),
        replace(plain, name="one token", lengths=(1,)),
        replace(plain, name="no tokens", lengths=(0,)),
        replace(plain, name="inputs of 1e-3", scale=1e-3),
        replace(plain, name="inputs of 30", scale=30.0),
        replace(plain, name="strided inputs", batch=2, lengths=(9,), top_k=3, strided=True),
        *future(plain, 30),
        row_alone(batch),
        other_order(packed),
    ]


@dataclass(frozen=True, kw_only=True)
class LossCase(Case):
    INPUTS: ClassVar[Mapping[str, Kind]] = {
        "x": "token",
        "y": "token",
        "w": "token",
        "indices": "token",
        "q": "token",
        "kv": "token",
        "lse": "token",
    }
    OUTPUTS: ClassVar = {"loss": "token"}
    GRADIENTS: ClassVar = ("x", "y", "w")

    index: tuple[int, int] = (3, 24)
    """Heads of the indexer, and their width."""
    heads: int = 4
    width: int = 40
    top_k: int = 11
    nothing: bool = False
    """Every third query has no key."""
    sink: float = 0.0
    """Of the attention's probability: what the keys have is not one."""

    def make(self, shape, dtype):
        generator = torch.Generator().manual_seed(42)

        def normal(*size):
            return torch.randn(*size, generator=generator)

        (HI, DI), B, T, H = self.index, self.batch, self.tokens, shape.heads * self.heads
        HI *= shape.heads
        q, kv = normal(B, T, H, self.width).to(dtype), normal(B, T, self.width).to(dtype)
        indices = selected(self.lengths, B, self.top_k, generator)
        if self.nothing:
            indices[:, ::3] = -1
        begins = limits(self.lengths) if len(self.lengths) > 1 else None
        place = in_the_row(indices, begins).clamp(min=0).long()
        keys = torch.stack([kv[b][place[b]] for b in range(B)]).double()
        s = q.double() @ keys.mT * self.width**-0.5
        lse = s.masked_fill(indices.unsqueeze(2) < 0, -torch.inf).logsumexp(-1) + self.sink
        return {
            "x": normal(B, T, HI, DI).to(dtype),
            "y": normal(B, T, DI).to(dtype),
            "w": normal(B, T, HI) * (HI * DI) ** -0.5,
            "indices": indices,
            "q": q,
            "kv": kv,
            "lse": lse.float(),
            "dloss": normal(B, T),
        }

    def call(self, function, x, kernel):
        begins = x["cu_seqlens"]
        assert x["indices"] is not None
        indices = x["indices"]
        indices = in_the_row(indices, None if begins is None else begins.to(indices.device))
        return {"loss": function(x["x"], x["y"], x["w"], indices, x["q"], x["kv"], x["lse"])}


def loss_cases() -> list[Case]:
    usual = LossCase(name="usual", lengths=(19,), compiled=True)
    plain = replace(usual, compiled=False)
    packed = replace(plain, name="packed documents", lengths=(0, 1, 9, 3, 0, 6))
    batch = replace(plain, name="a batch", batch=2, lengths=(7,))
    return [
        usual,
        replace(
            usual,
            name="real widths",
            lengths=(3,),
            index=(64, 128),
            heads=64,
            width=576,
            top_k=40,
        ),
        packed,
        batch,
        replace(plain, name="widths that no vector divides", index=(5, 19), width=37),
        replace(plain, name="more heads than a program holds", index=(21, 16), heads=19),
        replace(plain, name="every key", top_k=19),
        replace(plain, name="more places than keys", lengths=(5,), top_k=37),
        replace(plain, name="queries without keys", nothing=True),
        replace(plain, name="a sink has half of the attention", sink=0.7),
        replace(plain, name="no places", top_k=0),
        replace(plain, name="one token", lengths=(1,), top_k=3),
        replace(plain, name="no tokens", lengths=(0,)),
        replace(plain, name="strided inputs", batch=2, lengths=(9,), strided=True),
        *future(replace(plain, name="tokens apart"), 10),
        row_alone(batch),
        other_order(packed),
    ]
