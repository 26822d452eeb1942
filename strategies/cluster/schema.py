"""The shape of topo.yaml. Units are in the keys: GB/s (1e9 bytes, one direction, per device),
microseconds, GiB, TFLOPS."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

Positive = Annotated[float, Field(gt=0, le=1e12)]
Name = Annotated[str, Field(max_length=100, pattern=r"^[\w.+-][\w .+-]*$")]
Line = Annotated[str, Field(max_length=300, pattern=r"^[^\x00-\x1f\x7f]*$")]
Operation = Literal[
    "all_gather",
    "reduce_scatter",
    "all_reduce",
    "all_to_all",
    "all_to_all_dispatch",
    "all_to_all_combine",
]
Product = Literal["bfloat16", "float32", "float8", "mxfloat8", "nvfloat4"]
Origin = Literal["spec", "measured", "note", "default"]
FabricNumber = Literal["bw_gbps", "latency_us", "efficiency", "oversubscription", "link_gbps"]
MAX_POINTS = 1000


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class FabricEntry(Strict):
    kind: Literal["switch", "clos", "fullmesh", "ring"]
    bw_gbps: Positive
    latency_us: float | None = Field(default=None, ge=0, le=1e9)
    efficiency: float | None = Field(default=None, gt=0, le=1)
    oversubscription: float = Field(default=1.0, ge=1, le=1000)
    rails: int | None = Field(default=None, ge=1, le=1024)
    link_gbps: Positive | None = None
    multicast: bool = False
    origin: Origin | dict[FabricNumber, Origin] | None = None
    """Of all numbers, or of each; `spec` where the file does not say."""
    source: Line | None = None


class UnifiedMemoryEntry(Strict):
    pool_gib: Positive
    bw_gbps: Positive
    load_store: bool = False


class TierEntry(Strict):
    name: Name
    size: int = Field(ge=1, le=1_000_000)
    fabric: FabricEntry
    unified_memory: UnifiedMemoryEntry | None = None


class HostEntry(Strict):
    mem_gib: Positive
    d2h_gbps: Positive
    share: Literal["node", "device"] = "node"
    origin: Origin = "spec"
    source: Line = ""


class NodesEntry(Strict):
    names: list[str] = Field(min_length=1, max_length=100_000)


class MeasuredEntry(Strict):
    within: Annotated[str, Field(max_length=100)]
    op: Operation
    devices: Annotated[
        list[Annotated[int, Field(ge=2, le=1_000_000)]],
        BeforeValidator(lambda v: [v] if isinstance(v, int) else v),
        Field(min_length=1, max_length=MAX_POINTS),
    ]
    size_mib: list[Positive] | None = Field(default=None, max_length=MAX_POINTS)
    ms: list[Positive] | None = Field(default=None, max_length=MAX_POINTS)
    tokens: int | None = Field(default=None, ge=1)
    gbps: list[Positive] | None = Field(default=None, max_length=MAX_POINTS)
    source: Line | None = None


class DeviceOverridesEntry(Strict):
    memory_gib: Positive | None = None
    reserved_gib: float | None = Field(default=None, ge=0)
    memory_gbps: Positive | None = None
    launch_overhead_us: float | None = Field(default=None, ge=0)
    matmul_tflops: dict[Product, Positive] | None = None
    origin: Origin = "note"
    source: Line | None = None


class OverrideEntry(Strict):
    match: str = Field(min_length=1, max_length=200)
    bw_scale: float | None = Field(default=None, gt=0, le=1)
    down: bool = False


class ImportEntry(Strict):
    source: Literal["slurm", "topograph", "nccl_xml", "nvidia_smi"] = Field(alias="from")
    file: str = Field(min_length=1, max_length=1000)


class TopologyFile(Strict):
    version: Literal[1]
    name: Name
    device: Annotated[str, Field(max_length=100)]
    tiers: list[TierEntry] | None = Field(default=None, min_length=1, max_length=16)
    device_overrides: DeviceOverridesEntry | None = None
    host: HostEntry | None = None
    nodes: NodesEntry | None = None
    measured: list[MeasuredEntry] = []
    overrides: list[OverrideEntry] = []
    imports: list[ImportEntry] = Field(default=[], alias="import")
