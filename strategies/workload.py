"""The model as the planner sees it: per kind of layer, what is stored, computed and adapted."""

from __future__ import annotations

from dataclasses import dataclass

from analyzers.schema import Block, ModelAnalysis, Part, Work
from strategies.schema import Lora

PART_OF_TARGET = {
    "attention": "mixer",
    "routed_experts": "routed_experts",
    "shared_experts": "shared_experts",
    "dense": "dense",
    "latent_projection": "latent_projection",
}
BFLOAT16 = 2
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
    saved_bytes: Work
    """All activations kept for backward, bf16, those that adapters need included."""
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
    layer_input_bytes: float
    """Kept per token for each layer that is recomputed: its own input, bf16."""
    shared_input_bytes: float
    """Kept per token once for all layers: what they hand on unchanged, such as the bank of block
    starts of attention residuals."""

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
    own, shared = _handed_on(analysis)
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
        layer_input_bytes=own,
        shared_input_bytes=shared,
    )


def _handed_on(analysis: ModelAnalysis) -> tuple[float, float]:
    """Bytes a token that each layer keeps as its own input, and that all layers share."""
    hidden = float(BFLOAT16 * analysis.hidden_size)
    residual = analysis.residual
    if residual is None or residual.kind == "plain":
        return hidden, 0.0
    if residual.kind == "attention_residual":
        return hidden, residual.carried_bytes_per_token - hidden
    return residual.carried_bytes_per_token, 0.0


def _kind(block: Block, lora: Lora, top_k: int) -> Kind:
    adapted = {PART_OF_TARGET[t] for t in lora.targets}
    dense = sum(x.in_features + x.out_features for x in block.linears if x.part in adapted)
    banks = block.banks if "routed_experts" in adapted else []
    one_expert = sum(bank.in_features + bank.out_features for bank in banks)
    all_experts = sum(bank.count * (bank.in_features + bank.out_features) for bank in banks)
    routed = sum(p.parameters for p in block.parts if p.name == "routed_experts")
    inputs = [p.adapted_saved_bytes for p in block.parts if p.name in adapted]
    visited = sum(x.part in adapted for x in block.linears) + top_k * len(banks)
    ranks = Work(per_token=float(BFLOAT16 * lora.rank * visited))
    return Kind(
        name=block.kind,
        layers=len(block.layers),
        parts=tuple(block.parts),
        dense_parameters=sum(p.parameters for p in block.parts) - routed,
        routed_parameters=routed,
        saved_bytes=sum((p.saved_bytes for p in block.parts), sum(inputs, ranks)),
        dense_adapter=lora.rank * dense,
        expert_adapter=lora.rank * all_experts,
        visited_width=dense + top_k * one_expert,
    )


def packed_experts_of(analysis: ModelAnalysis) -> bool:
    """Whether the experts are stored as MXFP4, so that they may stay packed in memory."""
    return analysis.experts is not None and analysis.experts.weight_format == "mxfp4"
