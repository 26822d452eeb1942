"""What a member of a family of kernels declares, and how its kernels are launched."""

from __future__ import annotations

import hashlib
import math
from dataclasses import field, replace
from importlib import resources
from typing import Literal

from analyzers.backends import Backend
from analyzers.documents import document, to_json
from analyzers.errors import InputError

TEMPLATES = resources.files("codegen") / "templates"
Strategy = Literal["split", "short", "fused"]
FUSED = "_fused"
SHORT = ("_prepare_short", "_recur_short")
SHORT_CHUNK = 16
"""Tokens of a chunk in these."""
OWN: dict[Strategy, tuple[str, ...]] = {"short": SHORT, "fused": (FUSED,)}
"""The kernels that only one strategy launches: the forward is theirs, the backward is shared."""

FLOORS = {"float32": 1e-5, "float16": 2.0**-11, "bfloat16": 2.0**-8}
"""Unit roundoff of the dtype, with room for the sums that any order of evaluation needs."""


@document
class Launch:
    """How one kernel is launched."""

    block: int
    """Tiled width: key channels in kernels parallel over chunks, value channels in those that walk
    along the sequence."""
    num_warps: int
    num_stages: int
    """Software pipelining of the kernel's loop; 1 is none."""


@document
class Tile:
    """How a chunk is laid on the device."""

    chunk: int
    """Tokens of a chunk; a power of two of at least 16."""
    strategy: Strategy
    """Of the forward: chunks prepared in parallel, then walked; the same in short chunks where no
    gradient is asked for; or one launch for both."""
    launches: dict[str, Launch]
    """By kernel of the rendered module."""
    keep: bool = False
    """The backward reads what the forward computed, instead of computing it again. A fused forward
    leaves nothing behind."""


@document
class Footprint:
    """What one program of a kernel holds at least: launches beyond a device's limits are not tried.

    A matrix is a pair of `chunk`, `short` (a short chunk), `block`, `key_dim`, `value_dim` (padded
    to powers of two), or `part`: the value channels that the gradients take at a time.
    """

    tiles: Literal["key_dim", "value_dim"]
    """What `block` cuts."""
    loop: Literal["chunks", "blocks", "none"]
    """What the pipelined loop runs over: all chunks of a sequence, the blocks of a width, or none:
    stages change nothing."""
    registers: list[tuple[str, str]]
    """float32 matrices that live at the same time."""
    staged: list[tuple[str, str]]
    """Matrices in the input's dtype that a step of the loop loads; a stage holds them all."""
    staged_by_delta: list[tuple[str, str]] = field(default_factory=list)
    """Those that it loads besides under the delta rule."""
    buffered: list[tuple[int, str, str]] = field(default_factory=list)
    """Float32 matrices (how many, rows, columns) that live at the peak besides `staged`, for
    devices that hold all in one buffer; what a step loads ahead is among them."""


@document
class Limits:
    key_dim: tuple[int, int]
    value_dim: tuple[int, int]


@document
class Member:
    """One operator that a family can generate: what the members of every family declare."""

    operator: str
    family: str
    title: str
    source: str
    """Paper that defines the operator."""
    function: str
    aliases: list[str] = field(default_factory=list)
    """Other names of the same operator."""
    recurrence: list[str]
    """The definition, a formula a line."""
    template: str
    """Folder under `templates/`."""
    dtypes: list[str]
    triton: str
    """Version range that the kernel is written for."""
    targets: list[str]
    """Triton targets that the template is written for."""
    around: str | None = None
    """Operator of the models beside which the runtime itself calls this one: it needs no site."""

    @property
    def rendered_for(self) -> list[str]:
        """Attributes of the operator that its kernel is rendered for."""
        raise NotImplementedError

    def refusal(self, attributes: dict, backend: Backend) -> str | None:
        """Why an operator of these attributes is not covered there, or None when it is."""
        raise NotImplementedError

    def refused_target(self, backend: Backend) -> str | None:
        """Why the kernels are not for that backend's compiler, or None when they are."""
        if backend.triton and backend.triton.backend not in self.targets:
            return f"it is written for {' and '.join(self.targets)}, not {backend.triton.backend}"
        return None


@document
class Spec(Member):
    """A member of the linear-attention family."""

    decay: Literal["none", "constant", "per_head", "per_channel"]
    """Of the state: none, one a head for all tokens (`g_gamma`), or one a token (`g`)."""
    delta: bool
    """What the state already holds for the key is subtracted from the value that is written."""
    beta: Literal["none", "per_head", "per_channel"]
    """Writing strength of the delta rule; per channel it scales the key that is written."""
    gate_in_kernel: bool = False
    """`g` may be raw: the operator computes the log decay from it, `A_log` and `dt_bias`."""
    limits: Limits
    kind: str
    """How a backend's known faults name this kind of kernel."""
    tiles: dict[str, Tile] = field(default_factory=dict)
    """By processor (`sm_80`, `gfx942`) or Triton target (`cuda`, `hip`), of one dtype (`sm_80
    bfloat16`) or all; all in chunks of one length for a target. `none` where there is no compiler;
    `default` serves the others."""
    chunk_elements: dict[str, int]
    """By strategy, tokens times key channels of a chunk at most: wider keys have shorter chunks."""
    footprints: dict[str, Footprint] = field(default_factory=dict)
    """By kernel of the rendered module."""
    chunks: list[int] = field(default_factory=list)
    """Chunk lengths that the tuner tries besides the tile's own."""
    strategies: list[Strategy] = field(default_factory=list)
    """Likewise."""
    precision: dict[str, list[str]]
    """`input_precision` of a dot by input dtype, best first; the last one serves every target."""
    cpu_chunk: int
    """Tokens of a chunk in the plain torch form."""

    @property
    def rendered_for(self) -> list[str]:
        return ["key_dim", "value_dim"]

    @property
    def inputs(self) -> list[str]:
        """The operator's positional tensors, all differentiable."""
        g = ["g"] if self.decay in ("per_head", "per_channel") else []
        beta = ["beta"] if self.beta != "none" else []
        return ["q", "k", "v", *g, *beta]

    def tile(
        self,
        backend: Backend,
        key_dim: int,
        dtype: str = "bfloat16",
        strategy: Strategy | None = None,
    ) -> Tile:
        """The tile for the backend and dtype, whose launches are `sound`; of its own strategy, or
        the same launches in another."""
        tile = self._tile(backend, dtype)
        strategy = strategy or tile.strategy
        known = self.strategies_on(backend, dtype)
        if strategy not in known:
            fix = f"take one of {', '.join(known)}"
            raise InputError(self.operator, fault=f"no {strategy} strategy", fix=fix)
        chunk = min(tile.chunk, max(16, self.chunk_elements[strategy] // power_of_two(key_dim)))
        others = {name for other, own in OWN.items() if other != strategy for name in own}
        launches = {
            name: self.sound(backend, name, launch, chunk, key_dim)
            for name, launch in tile.launches.items()
            if name not in others
        }
        keep = tile.keep and strategy != "fused"
        return replace(tile, chunk=chunk, strategy=strategy, launches=launches, keep=keep)

    def _tile(self, backend: Backend, dtype: str) -> Tile:
        triton = backend.triton
        target = triton.backend if triton else "none"
        arch = triton.arch_name if triton else target
        names = (f"{arch} {dtype}", f"{target} {dtype}", arch, target, "default")
        return next(self.tiles[name] for name in names if name in self.tiles)

    def strategies_on(self, backend: Backend, dtype: str = "bfloat16") -> list[Strategy]:
        """Those for whose kernels the backend has launches."""
        launches = self._tile(backend, dtype).launches.keys()
        return [s for s in self.strategies if launches >= set(OWN.get(s, ()))]

    def sound(
        self, backend: Backend, kernel: str, launch: Launch, chunk: int, key_dim: int
    ) -> Launch:
        """The launch, with the nearest number of warps that is right where a compiler is known to
        get the usual one wrong. Faults that do not depend on it are left to the gates."""
        triton = backend.triton
        if triton is None:
            return launch

        def faulty(tried: Launch) -> bool:
            fault = triton.fault(self.configuration(kernel, tried, chunk, key_dim))
            return fault is not None and "num_warps" in fault.condition

        def far(warps: int) -> tuple[float, int]:
            return abs(math.log2(warps / launch.num_warps)), -warps

        tried = [replace(launch, num_warps=n) for n in sorted(triton.num_warps, key=far)]
        return next((x for x in tried if not faulty(x)), launch)

    def configuration(
        self, kernel: str, launch: Launch, chunk: int, key_dim: int
    ) -> dict[str, int | str]:
        """A launch in the words of a backend's known faults."""
        footprint = self.footprints.get(kernel)
        whole = footprint is None or footprint.tiles == "value_dim"
        width = power_of_two(key_dim)
        return {
            "kernel": kernel.lstrip("_"),
            "family": self.kind,
            "gate": self.decay,
            "chunk": chunk,
            "block": launch.block,
            "block_k": width if whole else min(launch.block, width),
            "num_warps": launch.num_warps,
            "num_stages": launch.num_stages,
        }

    def dot_precision(self, backend: Backend) -> dict[str, str]:
        """By dtype, the first `input_precision` that the backend's compiler knows."""
        known = backend.triton.input_precision if backend.triton else []
        return {
            dtype: next((p for p in wanted if p in known), wanted[-1])
            for dtype, wanted in self.precision.items()
        }

    def refusal(self, attributes: dict, backend: Backend) -> str | None:
        """Why an operator of these attributes is not covered there, or None when it is."""
        if (fault := self.refused_target(backend)) is not None:
            return fault
        if attributes.get("gate", self.decay) != self.decay:
            return f"its gate is {attributes['gate']}, the family member has {self.decay}"
        for name in ("key_dim", "value_dim"):
            low, high = getattr(self.limits, name)
            if name not in attributes:
                return f"the analysis gives no {name}"
            if not low <= int(attributes[name]) <= high:
                return f"{name} {attributes[name]} is outside {low}..{high}"
        heads = int(attributes.get("heads", 1))
        values = int(attributes.get("value_heads", heads))
        if heads < 1 or values % heads:
            return f"{values} value heads are no multiple of {heads} heads"
        return None


def power_of_two(width: int) -> int:
    """The smallest block that holds `width`; a dot needs at least 16."""
    return max(16, 1 << (width - 1).bit_length())


def digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()


def spec_sha256(spec: Member) -> str:
    return digest(to_json(spec))


def backend_sha256(backend: Backend) -> str:
    return digest(to_json(backend))


def template_sha256(spec: Member) -> str:
    folders = (TEMPLATES / spec.template, TEMPLATES / "common")
    files = [f for folder in folders for f in sorted(folder.iterdir(), key=lambda f: f.name)]
    return digest(*(x for f in files for x in (f.name, f.read_text(encoding="utf-8"))))
