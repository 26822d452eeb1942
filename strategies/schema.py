"""Job (`job.json`) and Plan (`plan.json`)."""

from __future__ import annotations

from dataclasses import field
from typing import Literal

from analyzers.documents import document

LoraTarget = Literal["attention", "routed_experts", "shared_experts", "dense", "latent_projection"]


@document
class Lora:
    """Everything else is frozen; the router and its correction bias always are, in float32."""

    rank: int = 8
    alpha: float = 16.0
    targets: list[LoraTarget] = field(default_factory=lambda: ["attention", "routed_experts"])
    ranks: dict[LoraTarget, int] = field(default_factory=dict)
    """Ranks of targets that differ from `rank`."""
    rslora: bool = False
    """The delta is scaled by alpha / sqrt(rank) instead of alpha / rank (arXiv:2312.03732)."""
    dropout: float = 0.0
    """Of the adapters' inputs, while training."""
    shared_a: bool = False
    """All routed experts of a layer share the factor A; each keeps its own B."""
    init_from: str | None = None
    """Absolute path of an adapter in PEFT's format to continue from, instead of a delta of zero."""

    def rank_of(self, target: LoraTarget) -> int:
        return self.ranks.get(target, self.rank)

    def scale_of(self, target: LoraTarget) -> float:
        """What the product of the factors is multiplied by."""
        rank = self.rank_of(target)
        return self.alpha / (rank**0.5 if self.rslora else rank)


@document
class Optimizer:
    """AdamW, and the schedule of its learning rate."""

    learning_rate: float = 2e-3
    """At the end of the warm-up."""
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "cosine"
    """How the rate falls from the end of the warm-up to the last step."""
    min_lr_rate: float = 0.1
    """Share of the rate that is left at the last step; `constant` keeps all of it."""
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    """Of matrices; vectors do not decay."""
    epsilon: float = 1e-8
    warmup_steps: int = 5
    max_grad_norm: float = 1.0


@document
class Evaluation:
    """Examples that are not learned from; their loss is measured before, during and after."""

    data: str | None = None
    """Absolute path of a JSONL file with examples of its own."""
    fraction: float = 0.0
    """Share of the job's data that is set apart instead."""
    every: int | None = None
    """Steps between two evaluations; None evaluates before the first step and after the last."""


@document
class Routing:
    """How tokens spread over experts: evenly, by a power law, or as measured."""

    exponent: float = 0.0
    """Load of the expert of rank i ~ i ** -exponent; 0 is even."""
    loads: list[float] = field(default_factory=list)
    """Tokens by expert, instead of the power law."""


@document
class Job:
    """What the user wants trained; written by the command line, read by every later stage."""

    version: Literal[1] = 1
    model: str
    """Absolute path of the model folder."""
    trust_remote_code: bool = False
    """Whether Python code that the model folder brings may run."""
    cluster: str
    """Absolute path of the topology file."""
    backend: str
    """Name of the backend that kernels are made for."""
    data: str | None = None
    """Absolute path of a JSONL file; None plans and proves without training."""
    packing: bool = True
    """Whether several examples share a sequence, where the model can keep them apart."""
    evaluation: Evaluation = field(default_factory=Evaluation)
    tensorboard: bool = False
    """Whether the metrics are written for TensorBoard too, which must be installed."""
    lora: Lora = field(default_factory=Lora)
    optimizer: Optimizer = field(default_factory=Optimizer)
    steps: int = 60
    sequence_length: int = 4096
    global_batch_size: int | None = None
    """Sequences a step over all devices; None takes one micro-batch a device."""
    training: Literal["lora", "full"] = "lora"
    """`full` trains every parameter; it is planned, but nothing here trains so."""
    routing: Routing = field(default_factory=Routing)
    """That the planner counts with."""
    checkpoint_every: int = 20
    seed: int = 0
    fixed: dict[str, int] = field(default_factory=dict)
    """Parts of the plan that are forced instead of searched, e.g. `{"ep": 2}`: any key of
    Parallelism, or `micro_batch_size`."""


@document
class Parallelism:
    """pp * dp_replicate * fsdp * tp = world_size; efsdp = fsdp * tp / ep; cp divides fsdp."""

    pp: int = 1
    dp_replicate: int = 1
    fsdp: int = 1
    tp: int = 1
    cp: int = 1
    ep: int = 1
    efsdp: int = 1


@document
class Mapping:
    """In which order the axes lie on the devices; tensor parallelism is always innermost."""

    shards_inside: bool = False
    """The shards of an expert on neighbouring devices, expert parallelism around them."""
    replicas_outside: bool = False
    """Replicas around the stages of a pipeline, not stages around replicas."""


@document
class Capacity:
    """Limit on the tokens that an expert takes of each rank, as a multiple of an even share of a
    full micro-batch; `factor` None is drop-free."""

    factor: float | None = None
    overflow: Literal["none", "drop", "reroute"] = "none"


@document
class Memory:
    """GiB on the fullest device, by part; `peak` is their sum with `reserved`."""

    peak: float
    frozen_weights: float
    adapters: float
    gradients: float
    optimizer: float
    unsharded_blocks: float
    activations: float
    logits: float
    dispatch: float
    reserved: float
    """Taken by driver and runtime before the first tensor."""
    trained_weights: float = 0.0
    """With full fine-tuning; adapters are counted apart."""
    communication: float = 0.0
    """Buffers of the communication library, outside the allocator."""
    fragmentation: float = 0.0
    """Held by the allocator without use."""
    capacity: float
    """What the device has."""

    @property
    def allocated(self) -> float:
        """What PyTorch's allocator reports as its peak."""
        return self.peak - self.reserved - self.communication - self.fragmentation


@document
class StepTime:
    """Seconds of one optimizer step, by part; overlapped time is not counted twice."""

    compute: float
    all_gather: float
    reduce_scatter: float
    all_to_all: float
    optimizer: float
    overhead: float
    tensor_parallel: float = 0.0
    context_parallel: float = 0.0
    pipeline: float = 0.0
    """Bubble of the schedule and what stages send one another."""


@document
class Predicted:
    step_seconds: float
    step: StepTime
    tokens_per_second_per_device: float
    memory_gib: Memory
    oom_probability: float
    lower_bound_seconds: float
    optimality_gap: float
    """(step_seconds - lower_bound_seconds) / step_seconds. The bound holds for every plan of the
    space and is known before any is priced; the search then proves that none of them is faster."""
    step_seconds_interval: tuple[float, float] | None = None
    """In which the measured step lies about four times in five, by the back-test's errors."""
    memory_gib_interval: tuple[float, float] | None = None
    """The same for the peak."""


@document
class Alternative:
    why: str
    parallelism: Parallelism
    micro_batch_size: int
    activation_checkpointing: str
    step_seconds: float
    memory_gib: float
    settings: dict[str, str | int | float | bool] = field(default_factory=dict)
    """What else differs from the plan: key of Plan -> value."""
    predicted: Predicted | None = None
    runnable: bool = True
    missing: list[str] = field(default_factory=list)
    """What it needs and the runtime lacks."""


@document
class Cell:
    """The best runnable plan with this EP and micro-batch; the leanest where none fits."""

    ep: int
    micro_batch_size: int
    fits: bool
    step_seconds: float
    tokens_per_second_per_device: float
    memory_gib: float
    oom_probability: float


@document
class EpCell:
    seconds: float
    """Of one micro-batch."""
    memory_gib: float
    fits: bool


@document
class EpRow:
    tokens_per_rank: int
    by_ep: dict[int, EpCell]
    fastest: int


@document
class EpWindows:
    """EP -> first and last tokens a rank at which it is the fastest, in steps of 4 %."""

    assumed: str
    windows: dict[int, tuple[int, int]]


@document
class EpCurve:
    """Seconds by EP over the tokens of a rank, and where another EP becomes better."""

    kept: str
    """The plan of which all but EP, dispatcher and tokens is kept."""
    rows: list[EpRow]
    windows: list[EpWindows]
    """As the plan is priced, then without what hides or repeats communication."""
    fits_up_to: int
    """Most tokens a rank that some EP can hold, exactly, of those that are looked at; 0 where none
    fits."""


@document
class Searched:
    """How the space was gone through; the counts are of plans."""

    plans: int
    priced: int
    too_large: int
    """Left out because a lower bound of their memory is above what the device has."""
    too_slow: int
    """Left out because a lower bound of their time is above the best plan's."""


@document
class Change:
    before: float
    after: float


@document
class Refit:
    """What a finished run changed."""

    steps: int
    """That were counted."""
    step_seconds: float
    """Measured, median."""
    step_seconds_before: float
    """As predicted with the constants of published runs."""
    step_seconds_after: float
    peak_gib: float | None
    """Measured; None on a CPU, where the whole process is counted."""
    peak_gib_before: float
    peak_gib_after: float
    overload: float | None
    """Tokens of the fullest expert-parallel rank over the mean, by the experts' measured loads."""
    overload_planned: float | None
    unexplained: float = 1.0
    """Times as long as with these constants that a step took; plans are priced with it too."""
    constants: dict[str, Change] = field(default_factory=dict)
    """Those that moved."""
    said: list[str] = field(default_factory=list)


@document
class Twin:
    """Set on a plan that proves a larger one on fewer devices."""

    of_world_size: int
    kept: list[str]
    not_kept: list[str]


@document
class Plan:
    version: Literal[1] = 1
    cluster: str
    world_size: int
    parallelism: Parallelism
    micro_batch_size: int
    sequence_length: int
    gradient_accumulation: int
    virtual_stages: int = 1
    """Chunks of layers that a pipeline stage holds."""
    activation_checkpointing: Literal["none", "selective", "full"]
    reshard_after_forward: bool
    expert_weight_format: Literal["bf16", "fp32", "mxfp4", "fp8"] | None
    """None for a model without experts."""
    compute_dtype: Literal["bfloat16", "float32"]
    dispatcher: Literal["none", "all_to_all", "hierarchical", "all_gather"]
    node_size: int | None = None
    """Neighbouring ranks that hierarchical dispatch takes for one node."""
    capacity: Capacity = field(default_factory=Capacity)
    expert_copies: int = 0
    """Slots of each expert-parallel rank for copies of the most loaded experts."""
    offload_optimizer: bool = False
    mapping: Mapping = field(default_factory=Mapping)
    runnable: bool = True
    missing: list[str] = field(default_factory=list)
    """What the plan needs and the runtime lacks; only plans that were asked for have any."""
    idle_devices: int = 0
    """Of the cluster, left out because fewer are faster."""
    predicted: Predicted
    alternatives: list[Alternative] = field(default_factory=list)
    rejected: dict[str, int] = field(default_factory=dict)
    families: dict[str, str] = field(default_factory=dict)
    """Family of plans that was not chosen, e.g. `EP 8` -> the limit that binds it."""
    survey: list[Cell] = field(default_factory=list)
    """Every EP and micro-batch that was priced."""
    ep_curve: EpCurve | None = None
    """Where this plan with another EP is better; None where it can have none."""
    searched: Searched | None = None
    searched_beyond: Searched | None = None
    """The same for the space with everything that the runtime lacks."""
    explanation: list[str] = field(default_factory=list)
    origins: dict[str, str] = field(default_factory=dict)
    """Where the rates came from: quantity -> `spec`, `measured`, `note`, `default`."""
    backend: str | None = None
    """Name of the devices' backend."""
    lora: Lora = field(default_factory=Lora)
    """The adapters that the prediction is for (the job's)."""
    training: Literal["lora", "full"] = "lora"
    routing: Routing = field(default_factory=Routing)
    """That the prediction counts with (the job's)."""
    measured: Refit | None = None
    """The finished run whose constants the prediction is made with."""
    twin: Twin | None = None

    @property
    def has_experts(self) -> bool:
        return self.expert_weight_format is not None
