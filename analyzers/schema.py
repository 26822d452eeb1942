"""ModelAnalysis: what a model is made of and what each part costs (`analysis.json`).

Units: parameters and bytes are counts. `flops` count matrix products, a multiply-add as two, as
`torch.utils.flop_counter` does; what an operator does element by element is bound by memory and is
priced through its bytes. Activations are bfloat16 unless a docstring says otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import field
from typing import Literal

from analyzers.documents import document

Fidelity = Literal["traced", "structural", "headers"]
RegionKind = Literal[
    "pointwise_chain",
    "norm_gate",
    "norm_projection",
    "attention_norm_gate_projection",
    "gated_activation",
    "residual_mixing",
]
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
    """A quantity that grows with the lengths T of the documents in a batch, summed over them:

    `per_token * T + per_pair * T**2 + sum over w of per_window[w] * T * min(T, w)`

    `per_pair` counts full squares, `per_window` full windows (or top k): a causal kernel that skips
    what lies ahead does half of the pairs. Batch and packing enter through the documents: 4 x 4096
    tokens are four documents, and one row that packs 3 of them counts as those 3.
    """

    per_token: float = 0.0
    per_pair: float = 0.0
    per_window: dict[int, float] = field(default_factory=dict)

    def over(self, lengths: Iterable[int]) -> float:
        """For documents of these lengths, in tokens."""
        return sum(self.at(length) for length in lengths)

    def at(self, sequence_length: int) -> float:
        """For one document."""
        t = sequence_length
        windows = sum(value * t * min(t, w) for w, value in self.per_window.items())
        return self.per_token * t + self.per_pair * t**2 + windows

    def causal(self, sequence_length: int) -> float:
        """For one document when a token meets only those before it: half of the squares, and of
        windows what lies behind the token."""
        t = sequence_length
        seen = {w: t * min(t, w) - min(t, w) ** 2 / 2 for w in self.per_window}
        windows = sum(value * seen[w] for w, value in self.per_window.items())
        return self.per_token * t + self.per_pair * t**2 / 2 + windows

    def __add__(self, other: Work) -> Work:
        windows = {
            w: self.per_window.get(w, 0.0) + other.per_window.get(w, 0.0)
            for w in sorted(self.per_window.keys() | other.per_window.keys())
        }
        return Work(
            per_token=self.per_token + other.per_token,
            per_pair=self.per_pair + other.per_pair,
            per_window=windows,
        )

    def __mul__(self, times: float) -> Work:
        return Work(
            per_token=self.per_token * times,
            per_pair=self.per_pair * times,
            per_window={w: value * times for w, value in self.per_window.items()},
        )


@document
class Pass:
    """What one direction of an operator does, weights not counted in the bytes."""

    flops: Work = Work()
    bytes: Work = Work()
    """Activations and their gradients, read and written."""
    bytes_written: Work = Work()
    """The written share of `bytes`."""


@document
class AdapterWork:
    """What low-rank adapters on all weight matrices of an operator would add, at rank r:

    FLOPs a token: `2 * r * width` forward, `4 * r * width` backward. Kept for the backward pass:
    `saved_bytes`, and `2 * r` bytes a token for each of the `matrices`.
    """

    width: float
    """Sum of in + out over the matrices that one token passes (`top_k` experts of a bank)."""
    matrices: float
    saved_bytes: Work
    """Inputs of the matrices, which frozen weights do not need; shared inputs count once."""


FORWARD = "forward"
BANKS = "adapted_linear"


@document
class Site:
    """Where an operator lives in the model's code, so that a kernel can be bound in its place."""

    module_class: str
    """Class whose `forward` calls the operator, e.g. `KimiLinearDeltaAttention`."""
    function: str
    """Module-global name that the forward calls, e.g. `chunk_kimi_delta_attention`; `forward`
    where the module calls no function for it but is, or spells out, the operator; `adapted_linear`
    of stacked experts, whose banks the runtime itself multiplies."""


@document
class Operator:
    """One operator of the model, summed over all calls in the same shape. `flops` to
    `bytes_written` are the forward pass."""

    name: str
    """Normalised name: `kda`, `gated_delta_rule`, `scaled_dot_product_attention`, `experts`,
    `router`, `linear`, `short_convolution`, `rms_norm`, `gated_rms_norm`, `embedding`, ..."""
    count: int
    """Calls in one forward pass of the model."""
    flops: Work
    bytes: Work
    """Activations read and written."""
    bytes_written: Work = Work()
    """The written share of `bytes`."""
    backward: Pass = Pass()
    """With frozen weights: gradients of the inputs alone."""
    saved_bytes: Work = Work()
    """Kept for that backward pass by a fused kernel of the operator."""
    adapter: AdapterWork | None = None
    """None when the operator has no matrix to adapt."""
    weight_bytes: float = 0.0
    """Of the weights that are read, as bfloat16."""
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
    bytes: Work = Work()
    """Activations read and written in forward."""
    backward: Pass = Pass()
    """With frozen weights."""
    saved_bytes: Work = Work()
    """Kept for the backward pass when nothing is recomputed and all weights are frozen."""
    adapted_saved_bytes: Work = Work()
    """What is kept besides when every weight matrix of the part is adapted."""


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
class GraphNode:
    """One call in the graph of a block, after canonicalisation. Views are no calls: who reads a
    view reads the call behind it."""

    name: str
    """Unique in the graph."""
    operator: str
    """Normalised name, or the ATen name of what has none."""
    path: str
    """Module in the block that calls it, e.g. `self_attn.q_proj`."""
    part: PartName
    inputs: list[str]
    """Names of nodes; what comes from outside the block is not listed."""
    region: str | None = None


@document
class Region:
    """Calls that one kernel could do together."""

    name: str
    """Unique in the graph, e.g. `norm_projection_0`."""
    kind: RegionKind
    nodes: list[str]
    bytes_avoided: Work
    """Forward traffic of the intermediates: read once by each reader inside, and written once
    where nothing outside reads them."""


@document
class Graph:
    """The traced graph of one block."""

    nodes: list[GraphNode]
    regions: list[Region] = field(default_factory=list)
    dynamic: list[Literal["batch", "sequence"]] = field(default_factory=list)
    """Dimensions that stayed symbolic in the export."""
    backward: dict[str, int] = field(default_factory=dict)
    """Calls by operator in the graph of the LoRA backward pass."""


@document
class Block:
    """One distinct kind of layer, analysed once however often it occurs."""

    kind: str
    """`mixer+feed_forward`, e.g. `kda+moe`."""
    module_class: str
    layers: list[int]
    mixer: str
    mixer_attributes: dict[str, int | float | str | bool] = field(default_factory=dict)
    """Shape and variant of the mixer: heads, widths, window, rope, gate, indexer, ..."""
    feed_forward: Literal["dense", "moe", "none"]
    parts: list[Part]
    linears: list[Linear]
    """Without those that texts never run."""
    banks: list[ExpertBank]
    """Without those for images."""
    saved_from: Literal["graph", "formula"] = "formula"
    """Whether `saved_bytes` of the parts were measured on the graph, as autograd keeps them for
    the model's own code around the large operators, or summed from the operators' formulas."""
    graph: Graph | None = None
    """None when the block was not traced."""


@document
class Layer:
    index: int
    mixer: str
    """`full_attention, mla, sliding_attention, kda, gated_delta_net, lightning, gla, mamba2,
    sparse_topk, ...`; `none`, or names joined by `+` where a layer has several that differ."""
    feed_forward: str


@document
class Router:
    scoring: str
    """`softmax, sigmoid, sqrtsoftplus, hash, ...`; `unknown` where nothing says it."""
    input_size: int
    """Width that the router reads; equals the experts' `hidden_size` unless they are latent."""
    correction_bias: bool = False
    """Whether a bias that is not trained by the loss corrects the choice (aux-free balancing)."""
    groups: int = 1
    top_k_groups: int = 1
    renormalize: bool = False
    """Whether the weights of the chosen experts are scaled to sum to one."""
    scaling: float = 1.0
    auxiliary_loss: float = 0.0
    """Coefficient of a balancing loss; 0 for none."""


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
    shared_intermediate_size: int = 0
    """Of all shared experts together."""
    activation: str = "unknown"
    """As the config names it: `silu`, `situ`, `relu2`, ..."""
    gated: bool = True
    zero_experts: int = 0
    """Choices that compute nothing (identity or zero), besides `count`."""
    layout: Literal["stacked", "module_list"] = "stacked"
    """How the model's code holds them: one 3-D parameter a bank, or a list of modules."""
    weight_format: str = "bf16"
    """As stored, or as the config says: `bf16, fp32, mxfp4, fp8, int4, nvfp4`."""
    router: Router | None = None


@document
class Tower:
    """A part of a multimodal model that is not the decoder."""

    kind: Literal["vision", "audio", "projector"]
    parameters: int | None
    """None when it is only named by the config."""
    built: bool
    """False when the class here builds the text model alone."""


@document
class MultiToken:
    """Multi-token-prediction layers after the decoder."""

    layers: int
    parameters: int | None
    """As built or in the checkpoint, there with copies of embedding and head that it may hold; else
    of layers in DeepSeek-V3's form. None when nothing tells their size."""
    built: bool
    """False when they are in the checkpoint or config but not in the class."""


@document
class Residual:
    """What layers hand to one another, and where a pipeline may cut."""

    kind: Literal["plain", "attention_residual", "hyper_connection"]
    streams: int = 1
    """Hidden states that are carried at once."""
    carried_bytes_per_token: float
    """Between two layers, the largest over the depth, bf16."""
    cut_multiple: int = 1
    """Stages may begin only at layers whose index is a multiple of it."""


@document
class Parameters:
    total: int
    active: int
    """Used by one token of text: everything but the routed experts that it does not visit, towers
    and, since a token reads one row of it, the embedding table (unless it is also the head). Zero
    experts are taken to be chosen as often as the others."""
    routed_experts: int
    embedding: int = 0
    """Of the embedding tables, also of one that is the head."""


@document
class Difference:
    """A tensor that is not as the config says."""

    tensor: str
    """As the checkpoint names it; where it is missing, as the model does."""
    kind: Literal["missing", "unexpected", "shape", "dtype"]
    detail: str


@document
class Checkpoint:
    bytes: int
    formats: dict[str, int]
    """Bytes by stored dtype, e.g. `{"BF16": 8388608}`."""
    shards: int
    packed: dict[str, int] = field(default_factory=dict)
    """Bytes by packed format, scales included: `mxfp4, fp8, int4, nvfp4`."""
    differences: list[Difference] = field(default_factory=list)
    """What is unusual and harmless; what is wrong is an error."""


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
    tied_weights: list[list[str]] = field(default_factory=list)
    """Groups of parameter names that are one tensor."""
    parameters: Parameters
    checkpoint: Checkpoint | None
    """None when the folder has no weights (planning only)."""
    layers: list[Layer]
    blocks: list[Block]
    outer: list[Part]
    """What lies outside the blocks: embedding, head, final norm, vision tower."""
    experts: Experts | None
    residual: Residual | None = None
    towers: list[Tower] = field(default_factory=list)
    multi_token: MultiToken | None = None
    operators: list[Operator]
    float32_parameters: list[str] = field(default_factory=list)
    """Names that must stay float32 (`A_log`, `dt_bias`, router correction bias)."""
    notes: list[str] = field(default_factory=list)
    """What is unusual, in sentences for people."""
