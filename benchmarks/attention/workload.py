"""Shapes, members and inputs: the same seeded inputs for every implementation."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from codegen.family import Spec
from codegen.members import load_specs

if TYPE_CHECKING:
    import torch

# The four, one long sequence, few heads, grouped value heads, packed documents.
SHAPES = [
    "1x8192x32",
    "4x4096x32",
    "1x8192x96",
    "1x65536x32",
    "1x32768x4",
    "1x8192x16v32",
    "1x8192x32p",
    "1x1048576x8",
]
QUICK_SHAPES = ["1x2048x4"]
FIRST = ["kda", "gated_delta_rule", "gla", "simple_gla", "lightning", "mamba2"]
GATES = ["bounded", "unbounded", "raw", "raw-bounded"]
LOWER_BOUND = -5.0
CHUNK = 64  # tokens of a chunk in the count of operations

_PATTERN = re.compile(r"(\d+)x(\d+)x(\d+)(?:v(\d+))?(p)?(?::(\d+)x(\d+))?")


@dataclass(frozen=True)
class Shape:
    """`BxTxH[vHV][p][:KxV]`: batch, tokens, key heads, value heads, packed documents, widths."""

    batch: int
    tokens: int
    heads: int
    value_heads: int
    packed: bool = False
    key_dim: int = 128
    value_dim: int = 128

    @classmethod
    def parse(cls, text: str) -> Shape:
        match = _PATTERN.fullmatch(text)
        if match is None:
            raise ValueError(f"shape {text!r}: expected BxTxH[vHV][p][:KxV], e.g. 1x8192x16v32")
        b, t, h, hv, packed, k, v = match.groups()
        shape = cls(int(b), int(t), int(h), int(hv or h), packed is not None)
        if shape.value_heads % shape.heads:
            raise ValueError(f"shape {text!r}: {hv} value heads are no multiple of {h} heads")
        if shape.packed and shape.batch != 1:
            raise ValueError(f"shape {text!r}: packed documents need a batch of 1")
        return replace(shape, key_dim=int(k), value_dim=int(v)) if k else shape

    def __str__(self) -> str:
        heads = f"{self.heads}" + (f"v{self.value_heads}" if self.value_heads != self.heads else "")
        widths = "" if self.widths == (128, 128) else ":{}x{}".format(*self.widths)
        return f"{self.batch}x{self.tokens}x{heads}{'p' if self.packed else ''}{widths}"

    @property
    def widths(self) -> tuple[int, int]:
        return self.key_dim, self.value_dim

    def small(self, tokens: int) -> Shape:
        """Few enough tokens for the float64 recurrence; heads and widths stay."""
        return replace(self, batch=1, tokens=min(tokens, self.tokens))

    def limits(self) -> list[int]:
        """`cu_seqlens` of the packed documents: uneven, one empty, one of a single token."""
        T = self.tokens
        parts = [0.31, 0.31, 0.44, 0.83]
        return [0, *(int(T * p) for p in parts), T - 1, T]


def members(names: list[str] | None = None) -> list[Spec]:
    """The family's members of those names; all of them, the most wanted first."""
    specs = {n: s for n, s in load_specs().items() if s.family == "linear_attention"}
    if names is None:
        first = [specs[name] for name in FIRST]
        return first + [spec for spec in specs.values() if spec not in first]
    if unknown := [name for name in names if name not in specs]:
        raise ValueError(f"no such member: {', '.join(unknown)}; there are {', '.join(specs)}")
    return [specs[name] for name in names]


def gates_of(spec: Spec, wanted: list[str]) -> list[str]:
    """The gates that say something for this member; one without a data-dependent gate has one."""
    if spec.decay in ("none", "constant"):
        return ["none"]
    return [g for g in wanted if spec.gate_in_kernel or not g.startswith("raw")]


def inputs(spec: Spec, shape: Shape, gate: str, device: str, dtype: torch.dtype) -> dict:
    """Arguments by name; those that take a gradient require it.

    g: bounded in (-5, 0); unbounded -A softplus(x) with A in [1, 16] per head, as a trained model
    starts; `raw` and `raw-bounded` leave the gate to the kernel. All gates are float32.
    """
    import torch

    torch.manual_seed(0)
    B, T, H, HV = shape.batch, shape.tokens, shape.heads, shape.value_heads
    K, V = shape.key_dim, shape.value_dim

    def normal(*size):
        return torch.randn(size, device=device, dtype=dtype)

    x = {"q": normal(B, T, H, K), "k": normal(B, T, H, K), "v": normal(B, T, HV, V)}
    if spec.decay in ("per_head", "per_channel"):
        size = (B, T, HV, K) if spec.decay == "per_channel" else (B, T, HV)
        raw = torch.randn(size, device=device)
        rate = torch.rand(HV, device=device) * math.log(16)  # A_log
        by_head = rate.exp().view(HV, *[1] * (len(size) - 3))
        if gate == "bounded":
            x["g"] = LOWER_BOUND * torch.sigmoid(raw)
        elif gate == "unbounded":
            x["g"] = -by_head * torch.nn.functional.softplus(raw)
        else:
            x["g"] = raw.to(dtype)
            x["A_log"] = rate
            x["dt_bias"] = torch.randn(HV * K, device=device)
    if spec.beta != "none":
        size = (B, T, HV, K) if spec.beta == "per_channel" else (B, T, HV)
        x["beta"] = torch.rand(size, device=device)
    for tensor in x.values():
        tensor.requires_grad_()
    if spec.decay == "constant":
        x["g_gamma"] = -8 / HV * torch.arange(HV, device=device, dtype=torch.float32)
    if shape.packed:
        x["cu_seqlens"] = torch.tensor(shape.limits(), device=device)
    return x


def output_gradient(x: dict) -> torch.Tensor:
    import torch

    generator = torch.Generator(x["v"].device).manual_seed(1)
    v = x["v"]
    return torch.randn(v.shape, generator=generator, device=v.device, dtype=v.dtype)


def options(spec: Spec, gate: str) -> dict:
    """Keyword arguments that all implementations of the member share."""
    made: dict = {"use_qk_l2norm_in_kernel": spec.delta}
    if gate.startswith("raw"):
        made["use_gate_in_kernel"] = True
        made["lower_bound"] = LOWER_BOUND if gate == "raw-bounded" else None
    return made


def promise(spec: Spec, gate: str) -> dict:
    """What our kernels are told of log decays besides; the others are told it in their own way."""
    return {"lower_bound": LOWER_BOUND} if spec.gate_in_kernel and gate == "bounded" else {}


def floor_bytes(spec: Spec, shape: Shape, gate: str, item: int) -> tuple[int, int]:
    """Fewest bytes of a forward pass and of both: every input and output moved once.

    The backward pass reads the inputs again and the gradient of o, and writes one gradient an
    input. `item` is the size of an element of q in bytes; gates and beta are float32.
    """
    tokens = shape.batch * shape.tokens
    H, HV, K, V = shape.heads, shape.value_heads, shape.key_dim, shape.value_dim
    read = item * (2 * H * K + HV * V)
    gate_item = item if gate.startswith("raw") else 4
    read += {"per_channel": gate_item * HV * K, "per_head": gate_item * HV}.get(spec.decay, 0)
    read += {"per_channel": 4 * HV * K, "per_head": 4 * HV}.get(spec.beta, 0)
    o = item * HV * V
    forward = tokens * (read + o)
    return forward, forward + tokens * (read + o + read)


def floor_operations(spec: Spec, shape: Shape) -> tuple[int, int]:
    """Operations of the chunked form's matrix products, forward and both, at chunks of 64.

    A token and head: q against the keys of its chunk and their values, half of them in the future
    (C (K + V)), state read and update (4 K V); the delta rule adds k against keys, the triangular
    system's two right sides (C (2 K + V)) and w S (2 K V). A backward pass is twice a forward one.
    """
    K, V, C = shape.key_dim, shape.value_dim, CHUNK
    each = C * (K + V) + 4 * K * V
    if spec.delta:
        each += C * (2 * K + V) + 2 * K * V
    forward = shape.batch * shape.tokens * shape.value_heads * each
    return forward, 3 * forward
