"""The model as the planner sees it: per kind of layer, what is stored, computed and adapted."""

from __future__ import annotations

from dataclasses import dataclass

from analyzers.schema import Block, ModelAnalysis, Part
from strategies.schema import Lora

PART_OF_TARGET = {
    "attention": "mixer",
    "routed_experts": "routed_experts",
    "shared_experts": "shared_experts",
    "dense": "dense",
    "latent_projection": "latent_projection",
}
DEFAULT_CALLS = 40
"""Kernels of one layer's forward where the analysis lists no operators."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One kind of layer; every figure is for one such layer."""

    name: str
    layers: int
    parts: tuple[Part, ...]
    dense_parameters: int
    """Everything but the routed experts: sharded over fsdp."""
    routed_parameters: int
    """Sharded over ep, then efsdp."""
    saved_bytes_per_token: float
    """All activations kept for backward, bf16."""
    dense_adapter: int
    """Parameters of the low-rank factors of linear layers: r * (in + out) each."""
    expert_adapter: int
    """Of the experts' factors: count * r * (in + out) for each bank."""
    visited_width: int
    """Sum of in + out over the adapters that one token passes through (top_k experts of a bank);
    times the rank it is their parameters."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    kinds: tuple[Kind, ...]
    outer: tuple[Part, ...]
    outer_parameters: int
    layers: int
    hidden_size: int
    vocab_size: int
    lora_rank: int
    calls: int
    """Kernel launches of one forward pass."""
    experts: int
    """0 for a dense model."""
    top_k: int
    expert_width: int
    """Width of a dispatched token: the latent width where the experts are latent."""

    @property
    def dense_parameters(self) -> int:
        return self.outer_parameters + sum(k.layers * k.dense_parameters for k in self.kinds)

    @property
    def routed_parameters(self) -> int:
        return sum(k.layers * k.routed_parameters for k in self.kinds)

    @property
    def dense_adapters(self) -> int:
        return sum(k.layers * k.dense_adapter for k in self.kinds)

    @property
    def expert_adapters(self) -> int:
        return sum(k.layers * k.expert_adapter for k in self.kinds)


def workload(analysis: ModelAnalysis, lora: Lora) -> Workload:
    experts = analysis.experts
    layers = sum(len(b.layers) for b in analysis.blocks)
    calls = sum(o.count for o in analysis.operators) or DEFAULT_CALLS * layers
    return Workload(
        kinds=tuple(_kind(b, lora, experts.top_k if experts else 0) for b in analysis.blocks),
        outer=tuple(analysis.outer),
        outer_parameters=sum(p.parameters for p in analysis.outer),
        layers=layers,
        hidden_size=analysis.hidden_size,
        vocab_size=analysis.vocab_size,
        lora_rank=lora.rank,
        calls=calls,
        experts=experts.count if experts else 0,
        top_k=experts.top_k if experts else 0,
        expert_width=experts.hidden_size if experts else 0,
    )


def _kind(block: Block, lora: Lora, top_k: int) -> Kind:
    adapted = {PART_OF_TARGET[t] for t in lora.targets}
    dense = sum(x.in_features + x.out_features for x in block.linears if x.part in adapted)
    banks = block.banks if "routed_experts" in adapted else []
    one_expert = sum(bank.in_features + bank.out_features for bank in banks)
    all_experts = sum(bank.count * (bank.in_features + bank.out_features) for bank in banks)
    routed = sum(p.parameters for p in block.parts if p.name == "routed_experts")
    return Kind(
        name=block.kind,
        layers=len(block.layers),
        parts=tuple(block.parts),
        dense_parameters=sum(p.parameters for p in block.parts) - routed,
        routed_parameters=routed,
        saved_bytes_per_token=sum(p.saved_bytes.at(1) for p in block.parts),
        dense_adapter=lora.rank * dense,
        expert_adapter=lora.rank * all_experts,
        visited_width=dense + top_k * one_expert,
    )


def packed_experts_of(analysis: ModelAnalysis) -> bool:
    """Whether the experts are stored as MXFP4, so that they may stay packed in memory."""
    stored = analysis.checkpoint.formats if analysis.checkpoint else {}
    if any(name.upper() in ("F4", "MXFP4", "F4_E2M1") for name in stored):
        return True
    said = [
        *analysis.notes,
        *(str(o.attributes.get("weight_format", "")) for o in analysis.operators),
    ]
    return any("mxfp4" in text.lower() for text in said)
