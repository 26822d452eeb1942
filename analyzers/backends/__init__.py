"""What a device is and can do: one YAML file a device, read by codegen and strategies alike."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Mapping
from dataclasses import field
from importlib import resources
from typing import Literal

from analyzers.documents import document, from_data
from analyzers.errors import InputError

Origin = Literal["spec", "measured", "note", "uncertain", "default"]


@document
class Fact:
    """A number with its origin; `source` says where a reader can check it."""

    value: float
    origin: Origin
    source: str


@document
class KnownFault:
    """A configuration that a compiler version is known to get wrong."""

    triton: str
    """Version range, e.g. `>=3.6,<3.8`."""
    condition: dict[str, int | str]
    """Values that together trigger it, e.g. `{"block_k": 32, "num_warps": 4}`: tiled width `block`,
    key channels of a block `block_k`, `chunk`, `num_warps`, `num_stages`, `gate` (kind of decay),
    `family` (kind of operator), `kernel` (`prepare`, `recur`, `reverse`, `gradients`: its role in
    linear attention)."""
    reason: str


@document
class TritonTarget:
    """How Triton compiles for the device, and the limits that a kernel must keep."""

    backend: Literal["cuda", "hip", "npu"]
    arch: int | str
    warp_size: int
    num_warps: list[int]
    """Allowed values; empty where the backend takes none."""
    num_stages: list[int] = field(default_factory=list)
    """Depths of software pipelining worth trying; empty where the backend takes none."""
    registers_per_thread: int | None = None
    """Of 32 bits; what a program needs beyond them is spilled to memory."""
    shared_memory_bytes: int
    max_grid: list[int]
    """Largest grid in x, y, z."""
    max_grid_product: int | None = None
    min_dot: int = 16
    tensor_memory_columns: int | None = None
    input_precision: list[str] = field(default_factory=lambda: ["ieee", "tf32"])
    pointer_style: Literal["pointer", "block_pointer"] = "pointer"
    known_faults: list[KnownFault] = field(default_factory=list)

    @property
    def arch_name(self) -> str:
        """As compilers call it: `sm_90`, `gfx942`."""
        return f"sm_{self.arch}" if self.backend == "cuda" else str(self.arch)

    def fault(
        self, configuration: Mapping[str, int | str], triton: str | None = None
    ) -> KnownFault | None:
        """The first known fault that the configuration triggers; in that version of Triton, or in
        any when None."""
        from packaging.specifiers import SpecifierSet

        return next(
            (
                f
                for f in self.known_faults
                if all(configuration.get(name) == value for name, value in f.condition.items())
                and (triton is None or SpecifierSet(f.triton).contains(triton, prereleases=True))
            ),
            None,
        )


@document
class Backend:
    name: str
    title: str
    device_type: str
    """As `torch.accelerator` names it: `cpu`, `cuda`, `npu`."""
    status: Literal["verified", "cross-compiled", "declared"]
    memory_gib: Fact
    reserved_gib: Fact
    """Taken by driver, runtime and communication library before the first tensor."""
    memory_gbps: Fact
    """GB/s (1e9 bytes), read plus written."""
    matmul_tflops: dict[str, Fact]
    """Achievable dense rate by dtype: `bfloat16`, `float32`, and `float8`, `mxfloat8`, `nvfloat4`
    where the device multiplies them."""
    attention_ratio: Fact | None = None
    """Forward rate of causal attention kernels on long documents over that of matrix products, in
    bfloat16."""
    processors: Fact | None = None
    """Units that the tiles of one matrix product are spread over: streaming multiprocessors."""
    launch_overhead_us: Fact
    training_dtype: Literal["bfloat16", "float32"]
    triton: TritonTarget | None
    """None where Triton has no compiler for the device; kernels are then proved in the
    interpreter and the device runs the operator's plain torch form."""
    native: dict[str, str]
    """Operator name -> what serves it natively there."""
    notes: list[str] = field(default_factory=list)


@document
class Link:
    """How one device is joined to others; rates in one direction for each device."""

    kind: Literal["switch", "clos", "fullmesh"]
    gbps: Fact
    """GB/s (1e9), all links of the device together."""
    link_gbps: Fact | None = None
    """Of one of the links, where they can be counted."""
    latency_us: Fact
    efficiency: Fact
    """Share of the nominal rate that collectives reach."""


@document
class Links:
    """The usual machine around a device: what an imported topology does not say of it."""

    devices_per_node: int
    domain: int
    """Devices that the scale-up fabric can join."""
    scale_up: Link
    scale_out: Link


def backend_names() -> list[str]:
    folder = resources.files("analyzers.backends")
    return sorted(
        f.name.removesuffix(".yaml") for f in folder.iterdir() if f.name.endswith(".yaml")
    )


@functools.cache
def load_backend(name: str) -> Backend:
    """The backend of that name. Raises InputError that lists the known ones."""
    data = {key: value for key, value in _read(name).items() if key != "links"}
    return from_data(Backend, data, f"analyzers/backends/{name}.yaml")


@functools.cache
def load_links(name: str) -> Links | None:
    """How that backend's devices are joined; None where its file does not say. No part of the
    `Backend`: generated kernels do not depend on it. Raises InputError as `load_backend`."""
    data = _read(name).get("links")
    where = f"analyzers/backends/{name}.yaml"
    return None if data is None else from_data(Links, data, where)


def nearest_backend(name: str) -> str:
    """How to mend a name that no backend has, for an error of whoever asked for it."""
    known = backend_names()
    listed = ", ".join(known)
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean '{close[0]}'? known: {listed}" if close else f"one of: {listed}"


def _read(name: str) -> dict:
    import yaml

    if name not in backend_names():
        known = ", ".join(backend_names())
        raise InputError("backend", fault=f"'{name}' is not known", fix=f"one of: {known}")
    text = (resources.files("analyzers.backends") / f"{name}.yaml").read_text(encoding="utf-8")
    return yaml.safe_load(text)
