"""The model as the planner sees it: per kind of layer, what is stored, computed and adapted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from analyzers.schema import Block, ExpertBank, Linear, ModelAnalysis, Part, Work
from strategies.cost.routing import BALANCED, Choice, Routing
from strategies.schema import Lora

Training = Literal["lora", "full"]
Precision = Literal["bf16", "fp8", "mxfp8", "nvfp4"]

FUSED_EXPERTS = ("mxfp8", "nvfp4")
"""Precisions whose grouped products of Transformer Engine add biases, clamp and gate themselves
(pytorch/ops/fused/forward_grouped_mlp.py, from 2.15)."""
PART_OF_TARGET = {
    "attention": "mixer",
    "routed_experts": "routed_experts",
    "shared_experts": "shared_experts",
    "dense": "dense",
    "latent_projection": "latent_projection",
}
BFLOAT16 = 2
BIAS_BYTES, BIAS_BYTES_BACKWARD, BIAS_GRADIENT_BYTES = 28.0, 28.0, 12.0
"""Moved for one output of an expert with a bias. The bias is scaled by the token's probability in
float32 (4 written), added (6 read, 4 written), the experts' pieces joined (4 + 4) and made bfloat16
(4 + 2): Megatron-Core's and NeMo AutoModel's `_apply_bias` (transformer/moe/experts.py,
components/moe/experts.py). Backward: the two casts and the split (6 + 6 + 4), the product with the
bias for the probability (8 + 4), and, trained, the product with the probability and its sum."""
CLAMP_BYTES, CLAMP_BYTES_BACKWARD = 8.0, 10.0
"""Moved for one input of a clamped gate: clamped (2 + 2) and joined (2 + 2); backward masks (4 + 2)
and joins (2 + 2). `weighted_bias_quick_geglu_impl` of Megatron-Core, fusions/fused_bias_geglu.py;
of the models here those with biased experts clamp."""
LOSS_CHUNK = 2**27
"""Logits that the runtime holds at once: a quarter of a GiB in bf16."""
DEFAULT_CALLS = 40
"""Kernels of one layer's forward where the analysis lists no operators."""


@dataclass(frozen=True, kw_only=True)
class State:
    """Bytes of one trained parameter on the rank that owns it."""

    weight: float = 4.0
    gradient: float = 4.0
    optimizer: float = 8.0
    """Moments, and a master copy where the weight is not one itself."""


FLOAT32_STATE = State()
"""PyTorch's FSDP2 with mixed precision: float32 weights, gradients and two moments."""
MASTER_STATE = State(weight=2.0, gradient=4.0, optimizer=12.0)
"""Megatron-Core's distributed optimizer: bfloat16 weights, float32 gradients, float32 master copy
and moments."""


@dataclass(frozen=True)
class Gemm:
    """A matrix product of every token (or every visit of an expert) with a weight [in, out]."""

    in_features: int
    out_features: int

    @property
    def flops(self) -> float:
        return 2.0 * self.in_features * self.out_features

    @property
    def bytes(self) -> float:
        """Activations read and written, bf16."""
        return float(BFLOAT16 * (self.in_features + self.out_features))


@dataclass(frozen=True, kw_only=True)
class PartWork:
    """One part of a layer split by what bounds it. FLOPs and bytes are of one token or document."""

    name: str
    parameters: int
    visits: float
    """How often a token passes the products: `top_k` for routed experts, else 1."""
    gemms: tuple[Gemm, ...]
    """Those that read one tensor are one product, as frameworks fuse them."""
    core: Work
    """Forward FLOPs that multiply no weight: attention and linear-attention cores."""
    core_backward: Work
    moved: Work
    """Bytes of the forward operators that are no products."""
    moved_backward: Work


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One kind of layer; every figure is for one such layer."""

    name: str
    layers: int
    works: tuple[PartWork, ...]
    dense_parameters: int
    """Everything but the routed experts: sharded over fsdp."""
    routed_parameters: int
    """Sharded over ep, then efsdp."""
    saved_bytes: Work
    """All activations kept for backward, bf16, those that training needs included."""
    saved_routed: Work
    """The share of `saved_bytes` that the routed experts keep."""
    selective_bytes: Work
    """Kept under selective recomputation: outputs of every second product and of attention
    cores, as torchtitan's policy for single operators does."""
    selective_routed: Work
    """The share of `selective_bytes` that the routed experts keep."""
    kv_width: int
    """Elements of keys and values a token that context parallelism passes on; 0 without attention
    over pairs."""
    dense_adapter: int
    """Parameters of the low-rank factors of linear layers, r * (in + out) each, and of those that
    the experts of a layer share, r * in."""
    expert_adapter: int
    """Of the experts' own factors: count * r * (in + out) for each bank."""
    visited_width: int
    """Sum of in + out over the adapters that one token passes through (top_k experts of a bank)."""
    visited_adapter: int
    """Their parameters: the same with each in + out times its rank."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    kinds: tuple[Kind, ...]
    head: Gemm
    outer_parameters: int
    layers: int
    hidden_size: int
    vocab_size: int
    calls: int
    """Operator calls of one forward pass."""
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
    training: Training = "lora"
    precision: Precision = "bf16"
    """Of the products of layers; attention cores, router and head stay in bf16."""
    state: State = FLOAT32_STATE
    """Of what is trained."""
    loss_size: int = 4
    """Bytes of an entry of the log-softmax: 2 where the loss is not taken in float32."""
    loss_chunk: int | None = None
    """Logits that exist at once, where a frozen head and the loss go through the tokens in chunks;
    None where all do."""
    grouped_kernel: bool = False
    """The products of all experts of a bank are one launch, `torch.nn.functional.grouped_mm`,
    instead of one an expert."""
    prefetch: bool = True
    """The next layer's weights are gathered while one computes, as FSDP2 does. A loop over layers
    that XLA compiles keeps collectives in the iteration that needs them: its pipelining of
    collectives and double buffering of loops are off unless a flag asks for them
    (docs.nvidia.com/jax-toolbox/performance-profiling/gpu-performance)."""
    reduces_last: bool = False
    """Gradients are reduced, and weights given back, after the last micro-batch of a step alone."""
    static_shapes: bool = False
    """Experts with a capacity compute all of it, filled or not, as what XLA compiles does."""
    routing: Routing = BALANCED
    router_groups: int = 1
    router_top_groups: int = 1
    """A token chooses among the experts of so many of the router's groups."""

    @property
    def choice(self) -> Choice:
        return Choice(
            experts=self.experts,
            top_k=self.top_k,
            groups=self.router_groups,
            top_groups=self.router_top_groups,
            consecutive=self.routing.consecutive,
        )

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


def workload(
    analysis: ModelAnalysis,
    lora: Lora,
    *,
    training: Training = "lora",
    precision: Precision = "bf16",
    state: State = FLOAT32_STATE,
    loss_size: int = 4,
    loss_chunk: int | None = None,
    grouped_kernel: bool = False,
    prefetch: bool = True,
    reduces_last: bool = False,
    static_shapes: bool = False,
    fused_experts: bool = False,
    routing: Routing = BALANCED,
) -> Workload:
    """`lora` is ignored by full fine-tuning, which trains every parameter.

    `fused_experts`: experts run as grouped products with one kernel between them, which keeps less
    for backward than the operators of the model's code (`_kept_by_experts`).
    """
    experts = analysis.experts
    top_k = experts.top_k if experts else 0
    router = experts.router if experts else None
    layers = sum(len(b.layers) for b in analysis.blocks)
    calls = sum(o.count for o in analysis.operators) or DEFAULT_CALLS * layers
    own, shared = _handed_on(analysis)
    return Workload(
        kinds=tuple(
            _kind(b, lora, training, top_k, analysis.hidden_size, precision, fused_experts)
            for b in analysis.blocks
        ),
        head=Gemm(analysis.hidden_size, analysis.vocab_size),
        outer_parameters=sum(p.parameters for p in analysis.outer),
        layers=layers,
        hidden_size=analysis.hidden_size,
        vocab_size=analysis.vocab_size,
        calls=calls,
        experts=experts.count if experts else 0,
        top_k=top_k,
        expert_width=experts.hidden_size if experts else 0,
        layer_input_bytes=own,
        shared_input_bytes=shared,
        training=training,
        precision=precision,
        state=state,
        loss_size=loss_size,
        loss_chunk=loss_chunk,
        grouped_kernel=grouped_kernel,
        prefetch=prefetch,
        reduces_last=reduces_last,
        static_shapes=static_shapes,
        routing=routing,
        router_groups=router.groups if router else 1,
        router_top_groups=router.top_k_groups if router else 1,
    )


def runtime_workload(
    analysis: ModelAnalysis, lora: Lora, *, training: Training = "lora", routing: Routing = BALANCED
) -> Workload:
    """What a plan prices: LoRA as this project's runtime and its kernels do it."""
    own = training == "lora"
    return workload(
        analysis,
        lora,
        training=training,
        loss_chunk=LOSS_CHUNK if own else None,
        grouped_kernel=own,
        fused_experts=own,
        routing=routing,
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


def _kind(
    block: Block,
    lora: Lora,
    training: Training,
    top_k: int,
    hidden: int,
    precision: Precision,
    fused_experts: bool,
) -> Kind:
    ranks = {PART_OF_TARGET[t]: lora.rank_of(t) for t in lora.targets}
    ranks = ranks if training == "lora" else {}
    linears = [x for x in block.linears if x.part in ranks]
    banks = block.banks if "routed_experts" in ranks else []
    rank = ranks.get("routed_experts", 0)
    dense_adapter = sum(ranks[x.part] * _width(x) for x in linears)
    visited_adapter = dense_adapter + top_k * rank * sum(_width(bank) for bank in banks)
    expert_adapter = rank * sum(bank.count * _width(bank) for bank in banks)
    if lora.shared_a:
        dense_adapter += rank * sum(bank.in_features for bank in banks)
        expert_adapter = rank * sum(bank.count * bank.out_features for bank in banks)
    routed = sum(p.parameters for p in block.parts if p.name == "routed_experts")
    trained = set(ranks) if training == "lora" else {p.name for p in block.parts}
    saved = {
        p.name: p.saved_bytes + (p.adapted_saved_bytes if p.name in trained else Work())
        for p in block.parts
    }
    inner = sum(ranks[x.part] for x in linears) + top_k * rank * len(banks)
    low = Work(per_token=float(BFLOAT16 * inner))
    works = tuple(_part_work(p, block.linears, block.banks, top_k, hidden) for p in block.parts)
    if fused_experts and block.banks:
        visits = next(w.visits for w in works if w.name == "routed_experts")
        kept = _kept_by_experts(block.banks, "routed_experts" in trained)
        saved["routed_experts"] = Work(per_token=visits * kept)
    works = (*works, _between(block, hidden))
    if precision not in FUSED_EXPERTS:
        works = (*works, *_biased_experts(block, training, top_k))
    selective = {
        w.name: Work(per_token=min(_outputs(w), saved[w.name].per_token))
        for w in works
        if w.name in saved
    }
    attributes = block.mixer_attributes
    pairs = any(p.flops.per_pair or p.flops.per_window for p in block.parts)
    heads = int(attributes.get("kv_heads") or attributes.get("heads") or 0)
    head_width = int(attributes.get("key_dim") or 0) + int(attributes.get("value_dim") or 0)
    return Kind(
        name=block.kind,
        layers=len(block.layers),
        works=works,
        dense_parameters=sum(p.parameters for p in block.parts) - routed,
        routed_parameters=routed,
        saved_bytes=sum(saved.values(), low),
        saved_routed=saved.get("routed_experts", Work()),
        selective_bytes=sum(selective.values(), Work()),
        selective_routed=selective.get("routed_experts", Work()),
        kv_width=heads * head_width if pairs else 0,
        dense_adapter=dense_adapter,
        expert_adapter=expert_adapter,
        visited_width=sum(map(_width, linears)) + top_k * sum(map(_width, banks)),
        visited_adapter=visited_adapter,
    )


def _width(matrix: Linear | ExpertBank) -> int:
    return matrix.in_features + matrix.out_features


def _part_work(
    part: Part, linears: Iterable[Linear], banks: Iterable[ExpertBank], top_k: int, hidden: int
) -> PartWork:
    """Splits a part's sums by its matrices: what they do not explain is a mixer's core, or products
    of matrices that the analysis does not list."""
    routed = part.name == "routed_experts"
    visits = float(top_k) if routed else 1.0
    own = banks if routed else [x for x in linears if x.part == part.name]
    gemms = [Gemm(x.in_features, x.out_features) for x in own]
    flops = visits * sum(g.flops for g in gemms)
    if flops > part.flops.per_token * 1.001:  # e.g. choices that compute nothing
        visits *= part.flops.per_token / flops
        flops = part.flops.per_token
    rest = max(part.flops.per_token - flops, 0.0)
    core = Work()
    if part.name == "mixer":
        core = Work(per_token=rest, per_pair=part.flops.per_pair, per_window=part.flops.per_window)
    elif rest > 0.001 * part.flops.per_token:
        gemms.append(Gemm(hidden, max(round(rest / visits / 2 / hidden), 1)))
        flops = part.flops.per_token
    backward = part.backward.flops
    moved = visits * sum(g.bytes for g in gemms)
    return PartWork(
        name=part.name,
        parameters=part.parameters,
        visits=visits,
        gemms=_fused(gemms),
        core=core,
        core_backward=_less(backward, flops) if part.name == "mixer" else Work(),
        moved=_less(part.bytes, moved),
        moved_backward=_less(part.backward.bytes, moved),
    )


def _between(block: Block, hidden: int) -> PartWork:
    """What lies between the operators, which the analysis counts in none: the residual sum behind
    mixer and feed-forward (two reads, one write) and rotary positions (queries and keys read and
    written). As much for the gradients."""
    attributes = block.mixer_attributes
    sums = sum(name != "none" for name in (block.mixer, block.feed_forward))
    rotated = 0
    if attributes.get("rope"):
        heads = int(attributes.get("heads") or 0) + int(attributes.get("kv_heads") or 0)
        rotated = heads * int(attributes.get("rope_dim") or attributes.get("key_dim") or 0)
    moved = Work(per_token=float(BFLOAT16 * (3 * hidden * sums + 2 * rotated)))
    return PartWork(
        name="between",
        parameters=0,
        visits=1.0,
        gemms=(),
        core=Work(),
        core_backward=Work(),
        moved=moved,
        moved_backward=moved,
    )


def _kept_by_experts(banks: Sequence[ExpertBank], trained: bool) -> float:
    """Bytes of one visit: the output of the up projection, from which backward computes the
    activation again, and what goes into products whose weights are trained. The routing weight is
    multiplied in before the down projection, so that its output is not kept (Megatron-Core's
    `TEGroupedMLP`, NeMo AutoModel's `GroupedExpertsDeepEP`, arXiv 2512.14080)."""
    *ups, down = banks
    inputs = ups[0].in_features + down.in_features if trained else 0
    return float(BFLOAT16 * (inputs + sum(b.out_features for b in ups)))


def _biased_experts(block: Block, training: Training, top_k: int) -> tuple[PartWork, ...]:
    """What biases of experts and their clamped gates move beside the products, by visits: no
    kernel fuses them in bfloat16."""
    weights = sum(b.count * b.in_features * b.out_features for b in block.banks)
    routed = sum(p.parameters for p in block.parts if p.name == "routed_experts")
    if not block.banks or routed <= weights:  # an analysis may leave the banks unlisted
        return ()
    *gates, down = block.banks
    gate, out = top_k * sum(b.out_features for b in gates), top_k * down.out_features
    bias = BIAS_BYTES_BACKWARD + (BIAS_GRADIENT_BYTES if training == "full" else 0.0)
    return (
        PartWork(
            name="expert_biases",
            parameters=0,
            visits=1.0,
            gemms=(),
            core=Work(),
            core_backward=Work(),
            moved=Work(per_token=CLAMP_BYTES * gate + BIAS_BYTES * out),
            moved_backward=Work(per_token=CLAMP_BYTES_BACKWARD * gate + bias * out),
        ),
    )


def _less(work: Work, per_token: float) -> Work:
    return Work(
        per_token=max(work.per_token - per_token, 0.0),
        per_pair=work.per_pair,
        per_window=work.per_window,
    )


def _fused(gemms: list[Gemm]) -> tuple[Gemm, ...]:
    """Neighbours that read one tensor as one product; the part's last reads its own."""
    made: list[Gemm] = []
    for i, g in enumerate(gemms):
        last = i == len(gemms) - 1
        if made and made[-1].in_features == g.in_features and not last:
            made[-1] = Gemm(g.in_features, made[-1].out_features + g.out_features)
        else:
            made.append(g)
    return tuple(made)


def _outputs(work: PartWork) -> float:
    """Bytes a token of the outputs of every second product, and of the core before the last one."""
    outputs = sum(g.out_features for g in work.gemms) / 2
    if work.name == "mixer" and work.gemms:
        outputs += work.gemms[-1].in_features
    return BFLOAT16 * work.visits * outputs
