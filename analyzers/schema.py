"""ModelAnalysis: what a model is made of and what each part costs (`analysis.json`).

Units: parameters and bytes are counts; `flops` count a multiply-add as two. Work is for the forward
pass of one sequence unless a name says otherwise.
"""

from __future__ import annotations

from dataclasses import field
from typing import Literal

from analyzers.documents import document

Fidelity = Literal["traced", "structural", "headers"]
PartName = Literal[
    "mixer",  # attention or linear attention with its projections
    "router",
    "routed_experts",
    "shared_experts",
    "latent_projection",  # around experts that work in a narrower space
    "dense",  # the feed-forward of a layer without experts
    "norm",
    "embedding",
    "head",
    "vision",
    "other",
]


@document
class Work:
    """A quantity that grows with T, the tokens of one sequence: `per_token * T + per_pair * T**2`.

    `per_pair` counts full squares; a causal kernel that skips the upper half does half of it.
    """

    per_token: float = 0.0
    per_pair: float = 0.0

    def at(self, sequence_length: int) -> float:
        return self.per_token * sequence_length + self.per_pair * sequence_length**2


@document
class Site:
    """Where an operator lives in the model's code, so that a kernel can be bound in its place."""

    module_class: str
    """Class whose `forward` calls the operator, e.g. `KimiLinearDeltaAttention`."""
    function: str
    """Module-global name that the forward calls, e.g. `chunk_kimi_delta_attention`."""


@document
class Operator:
    """One operator of the model, summed over all layers that use it in the same shape."""

    name: str
    """Normalised name: `kda`, `gated_delta_rule`, `scaled_dot_product_attention`, `experts`,
    `router`, `linear`, `short_convolution`, `rms_norm`, `gated_rms_norm`, `embedding`, ..."""
    count: int
    """Calls in one forward pass of the model."""
    flops: Work
    """Of all calls together."""
    bytes: Work
    """Activations read and written by all calls together, in the checkpoint's compute dtype."""
    weight_bytes: float = 0.0
    attributes: dict[str, int | float | str | bool] = field(default_factory=dict)
    """Shape and variant, e.g. `{"heads": 4, "key_dim": 32, "value_dim": 32}`."""
    site: Site | None = None


@document
class Part:
    """The share of one block (or of the model outside its blocks) that is planned as one thing."""

    name: PartName
    parameters: int
    flops: Work
    """Forward; routed experts count the `top_k` experts that a token visits."""
    saved_bytes_per_token: float
    """Activations kept for the backward pass when nothing is recomputed, bf16."""


@document
class Linear:
    """A linear layer that an adapter can be put on."""

    name: str
    """Path inside the block, e.g. `self_attn.q_proj`."""
    in_features: int
    out_features: int
    part: PartName


@document
class ExpertBank:
    """The stacked weights of all experts of a block, `[count, out, in]` or its transpose."""

    name: str
    """Path inside the block, e.g. `mlp.experts.gate_up_proj`."""
    count: int
    in_features: int
    out_features: int


@document
class Block:
    """One distinct kind of layer, analysed once however often it occurs."""

    kind: str
    """`mixer+feed_forward`, e.g. `kda+moe`."""
    module_class: str
    layers: list[int]
    mixer: str
    feed_forward: Literal["dense", "moe", "none"]
    parts: list[Part]
    linears: list[Linear]
    banks: list[ExpertBank]
    graph_nodes: int | None = None
    """Nodes of the traced graph; None when the block was not traced."""


@document
class Layer:
    index: int
    mixer: str
    """`full_attention, mla, sliding_attention, kda, gated_delta_net, lightning, gla, mamba2,
    sparse_topk, ...`"""
    feed_forward: str


@document
class Experts:
    count: int
    top_k: int
    shared: int
    hidden_size: int
    """Width of an expert's input and output: the latent width where the model has one."""
    intermediate_size: int
    router_input_size: int
    """Width that the router reads; equals `hidden_size` unless the experts are latent."""


@document
class Parameters:
    total: int
    active: int
    """Used by one token: everything but the routed experts that it does not visit."""
    routed_experts: int


@document
class Checkpoint:
    bytes: int
    formats: dict[str, int]
    """Bytes by stored dtype, e.g. `{"BF16": 8388608}`."""
    shards: int


@document
class ModelAnalysis:
    version: Literal[1] = 1
    model_type: str
    architecture: str
    """The class that is built, e.g. `KimiLinearForCausalLM`."""
    fidelity: Fidelity
    fidelity_reason: str
    dtype: str
    """Of the weights as configured: `bfloat16`, `float32`, ..."""
    hidden_size: int
    vocab_size: int
    max_sequence_length: int | None = None
    tied_embeddings: bool = False
    parameters: Parameters
    checkpoint: Checkpoint | None
    """None when the folder has no weights (planning only)."""
    layers: list[Layer]
    blocks: list[Block]
    outer: list[Part]
    """What lies outside the blocks: embedding, head, final norm, vision tower."""
    experts: Experts | None
    operators: list[Operator]
    float32_parameters: list[str] = field(default_factory=list)
    """Names that must stay float32 (`A_log`, `dt_bias`, router correction bias)."""
    notes: list[str] = field(default_factory=list)
    """What is unusual, in sentences for people."""
