"""Cases of linear attention: every decay, with the delta rule and without it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F

from codegen.verify.cases import (
    Case,
    Shape,
    forward_alone,
    future,
    other_order,
    row_alone,
    scaled,
)


@dataclass(frozen=True, kw_only=True)
class LinearCase(Case):
    INPUTS: ClassVar = {
        "q": "token",
        "k": "token",
        "v": "token",
        "g": "token",
        "beta": "token",
        "g_gamma": "whole",
        "A_log": "whole",
        "dt_bias": "whole",
        "h0": "sequence",
    }
    OUTPUTS: ClassVar = {"o": "token", "state": "sequence"}
    GRADIENTS: ClassVar = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "h0")
    STATE: ClassVar = ("h0", "state")
    LINEAR_IN: ClassVar = ("v", "h0")

    heads: int = 1
    value_heads: int = 1
    gates: Literal["usual", "slow", "reset", "strong", "none"] = "usual"
    """`slow` remembers over chunks, `reset`: a fifth of the gates forget everything, `strong`: -8
    a step."""
    gate_inside: Literal["", "bounded", "unbounded"] = ""
    """The kernel computes the log decay from raw gates."""
    promised: bool = False
    """The call says that log decays are -5 at least."""
    typed_gates: bool = False
    """The gates have the dtype of q, and some tokens write nothing (beta of zero)."""
    scale: float = 1.0
    """Of q, k and v."""
    factor: float | None = None
    """What the call says `scale` is."""
    normalize: bool = True
    """q and k are normalised by the kernel; otherwise before it, unless `raw`."""
    raw: bool = False
    repeated_keys: bool = False
    initial: bool = True
    """Give an initial state."""
    last: Literal["gradient", "value", "none"] = "gradient"
    """Of the last state: asked for with a gradient from above, without one, not asked for."""
    output_gradient: bool = True

    def make(self, shape, dtype):
        generator = torch.Generator().manual_seed(42)

        def normal(*size):
            return torch.randn(*size, generator=generator)

        spec = shape.spec
        B, T, N = self.batch, self.tokens, self.sequences
        H, HV = shape.heads * self.heads, shape.heads * self.value_heads
        K, V = shape.attributes["key_dim"], shape.attributes["value_dim"]
        q, k, v = normal(B, T, H, K), normal(B, T, H, K), normal(B, T, HV, V)
        beta = torch.sigmoid(normal(B, T, HV, *((K,) if spec.beta == "per_channel" else ())))
        h0, do, dstate = normal(N, HV, K, V), normal(B, T, HV, V), normal(N, HV, K, V)
        if self.repeated_keys:
            k = k[:, :1].expand_as(k)
            beta = torch.full_like(beta, 0.99)
        if self.typed_gates:
            beta = torch.where(torch.rand(beta.shape, generator=generator) < 0.3, 0.0, beta)
        if not self.normalize and not self.raw:
            q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        q, k, v = q * self.scale, k * self.scale, v * self.scale
        gates = dtype if self.typed_gates else torch.float32
        g = g_gamma = A_log = dt_bias = None
        if spec.decay == "constant":
            g_gamma = self._log_decay((HV,), generator)
        elif spec.decay != "none":
            channels = (K,) if spec.decay == "per_channel" else ()
            if self.gate_inside:
                g = normal(B, T, HV, *channels).to(gates)
                A_log = normal(HV) * 0.5
                dt_bias = normal(HV * K)
            else:
                g = self._log_decay((B, T, HV, *channels), generator).to(gates)
        return {
            "q": q.to(dtype),
            "k": k.to(dtype),
            "v": v.to(dtype),
            "g": g,
            "beta": None if spec.beta == "none" else beta.to(dtype),
            "g_gamma": g_gamma,
            "A_log": A_log,
            "dt_bias": dt_bias,
            "h0": h0 if self.initial else None,
            "do": do.to(dtype) if self.output_gradient else None,
            "dstate": dstate if self.last == "gradient" else None,
        }

    def _log_decay(self, size, generator) -> torch.Tensor:
        g = -F.softplus(torch.randn(size, generator=generator))
        if self.promised:
            return -5 * torch.rand(size, generator=generator)
        match self.gates:
            case "slow":
                return g * 0.02
            case "reset":
                hit = torch.rand(size, generator=generator) < 0.2
                return torch.where(hit, -0.1 * torch.finfo(torch.float32).max, g)
            case "strong":
                return torch.full(size, -8.0)
            case "none":
                return torch.zeros(size)
        return g

    def call(self, function, x, kernel):
        names = [n for n in ("q", "k", "v", "g", "beta") if x.get(n) is not None]
        options = {
            "initial_state": x["h0"],
            "use_qk_l2norm_in_kernel": self.normalize,
            "cu_seqlens": x["cu_seqlens"],
            "scale": self.factor,
        }
        if x.get("g_gamma") is not None:
            options["g_gamma"] = x["g_gamma"]
        if self.gate_inside:
            options |= {
                "use_gate_in_kernel": True,
                "A_log": x["A_log"],
                "dt_bias": x["dt_bias"],
                "lower_bound": -5.0 if self.gate_inside == "bounded" else None,
            }
        if self.promised:
            options["lower_bound"] = -5.0
        if kernel:
            options["output_final_state"] = self.last != "none" or self.split_at is not None
        o, state = function(*(x[n] for n in names), **options)
        return (
            {"o": o} if self.last == "none" and self.split_at is None else {"o": o, "state": state}
        )


ALONE = (
    "usual",
    "grouped value heads in a batch",
    "packed with empty and one-token sequences",
    "long memory",
    "inputs of 30",
    "no decay, repeated keys",
    "state carried over a split",
    "strided inputs",
    "hard resets",
    "raw gates above -5",
    "gates above -5, as promised",
)
"""Cases that are also run without gradients."""


def cases(shape: Shape) -> list[Case]:
    """Small enough for the interpreter, yet two chunks, a ragged tail and every hostile gate."""
    spec, C = shape.spec, shape.chunk
    odd = (C + 3,)
    gated = spec.decay in ("per_head", "per_channel")
    usual = LinearCase(name="usual", lengths=odd, compiled=True)
    several = LinearCase(
        name="grouped value heads in a batch",
        lengths=(C // 2 + 1,),
        batch=2,
        heads=2,
        value_heads=4,
        compiled=True,
    )
    # Every length that is hostile to a chunk or to its blocks of 16 tokens.
    hostile = sorted({1, 15, 16, 17, C - 1, C, C + 1})
    packed = LinearCase(
        name="packed with empty and one-token sequences", lengths=(0, *hostile, 0, 1)
    )
    few = LinearCase(name="packed, few", lengths=(3, 0, C + 1, 1), gates="slow")
    past = replace(
        usual, name="strong gates", gates="strong", initial=False, last="none", compiled=False
    )
    found: list[Case] = [
        usual,
        several,
        packed,
        few,
        LinearCase(name="one token", lengths=(1,)),
        LinearCase(name="long memory", lengths=(4 * C + 1,), gates="slow", factor=0.3),
        LinearCase(name="inputs of 1e-3", lengths=odd, scale=1e-3),
        LinearCase(name="inputs of 30", lengths=odd, scale=30.0),
        LinearCase(name="no decay, repeated keys", lengths=odd, gates="none", repeated_keys=True),
        replace(past, name="gates of -8 a step", last="gradient", initial=True),
        LinearCase(
            name="q and k normalised outside, no states",
            lengths=odd,
            normalize=False,
            initial=False,
            last="none",
        ),
        LinearCase(
            name="state carried over a split", lengths=odd, gates="slow", split_at=C // 2 + 1
        ),
        LinearCase(
            name="gradient of the last state alone", lengths=(C + 1,), output_gradient=False
        ),
        LinearCase(name="last state without a gradient", lengths=(C // 2,), last="value"),
        LinearCase(
            name="strided inputs", lengths=(17,), batch=2, heads=2, value_heads=2, strided=True
        ),
    ]
    if gated or spec.beta != "none":
        found.append(
            LinearCase(
                name="gates in the inputs' dtype, beta of zero", lengths=(C + 1,), typed_gates=True
            )
        )
    if gated:
        found.append(LinearCase(name="hard resets", lengths=odd, gates="reset"))
    if not spec.delta:
        # Under the delta rule keys longer than one let the state explode, in exact numbers too.
        wide = ("float32", "bfloat16")
        found.append(
            LinearCase(
                name="inputs of 30 as they are",
                lengths=(C // 2 + 1,),
                scale=30.0,
                normalize=False,
                raw=True,
                dtypes=wide,
            )
        )
    if spec.gate_in_kernel:
        # Several heads: A_log has one number a head, and one alone may nearly cancel.
        raw = replace(usual, name="raw gates", heads=2, value_heads=4, compiled=False)
        above = replace(raw, gate_inside="bounded")
        found += [
            replace(raw, gate_inside="unbounded"),
            replace(above, name="raw gates above -5", compiled=True),
            replace(above, name="raw gates, packed", lengths=(0, 5, C, 1)),
            replace(usual, name="gates above -5, as promised", promised=True, compiled=False),
            # fla#1240: the past changed with a future gate where gates were bounded.
            *future(replace(above, initial=False, last="none"), C // 2 + 1),
        ]
    until = C // 2 + 2
    found += [*future(past, until), row_alone(several), other_order(few), scaled(usual)]
    found += [forward_alone(case) for case in found if case.name in ALONE]
    found += future(forward_alone(past), until)
    return [replace(case, compiled=case.compiled and case.relation is None) for case in found]
