"""The inputs on which a gated-delta-rule kernel is proved, made alike in every process."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

OUTPUTS = ("o", "state", "dq", "dk", "dv", "dg", "dbeta", "dstate")


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What the kernel was rendered for, and how its operator's inputs look."""

    function: str
    key_dim: int
    value_dim: int
    chunk: int
    per_channel: bool
    grouped: bool


@dataclass(frozen=True, kw_only=True)
class Case:
    name: str
    lengths: tuple[int, ...]
    """Tokens of each sequence; more than one means packed, with B = 1."""
    batch: int = 1
    heads: int = 1
    value_heads: int = 1
    gate: str = "usual"
    """`usual`, `reset` (a fifth of the gates forget everything), `strong` (-8 a step), `none`."""
    scale: float = 1.0
    """Of q, k and v. Keys are normalised inside the kernel unless `normalize` is off."""
    normalize: bool = True
    repeated_keys: bool = False
    state: bool = True
    """Give an initial state and a gradient for the last one."""
    split_at: int | None = None
    """Run as two calls, the state carried over; judged against the whole."""
    perturb_from: int | None = None
    """Tokens from here on get other values."""
    gradient_until: int | None = None
    """Only tokens before this one have an output gradient."""
    only_row: int | None = None
    """Of the batch, run this row alone."""

    @property
    def tokens(self) -> int:
        return sum(self.lengths)


def all_cases(shape: Shape) -> list[Case]:
    """Small enough for the interpreter, yet two chunks, a ragged tail and every hostile gate."""
    C = shape.chunk
    odd = (C + 3,)
    usual = Case(name="odd length", lengths=odd)
    cases = [
        usual,
        Case(name="one token", lengths=(1,)),
        Case(name="packed with empty and one-token sequences", lengths=(0, 3, 1, C + 1, 0)),
        Case(name="inputs of 1e-3", lengths=odd, scale=1e-3),
        Case(name="inputs of 30", lengths=odd, scale=30.0),
        Case(name="hard reset gates", lengths=odd, gate="reset"),
        Case(name="gates of -8 a step", lengths=odd, gate="strong"),
        Case(name="no decay, repeated keys", lengths=odd, gate="none", repeated_keys=True),
        Case(name="keys normalised outside", lengths=odd, normalize=False, state=False),
        Case(name="state carried over a split", lengths=odd, split_at=C // 2 + 1),
        Case(
            name="several heads",
            lengths=(C // 2 + 1,),
            heads=2,
            value_heads=4 if shape.grouped else 2,
        ),
    ]
    batch = Case(name="batch", lengths=(C // 2 + 1,), batch=2)
    past = replace(
        usual, name="future as it is", gradient_until=C // 2 + 2, state=False, gate="strong"
    )
    future = replace(past, name="future changed", perturb_from=C // 2 + 2)
    return [*cases, batch, replace(batch, name="row alone", only_row=1), past, future]


def make_inputs(case: Case, shape: Shape, dtype: torch.dtype) -> dict[str, torch.Tensor | None]:
    """q, k, v, g, beta, h0, cu_seqlens and the gradients do, dht, on the CPU."""
    generator = torch.Generator().manual_seed(42)

    def normal(*size):
        return torch.randn(*size, generator=generator)

    B, T, H, HV, N = (
        case.batch,
        case.tokens,
        case.heads,
        case.value_heads,
        case.batch * len(case.lengths),
    )
    K, V = shape.key_dim, shape.value_dim
    q, k, v = normal(B, T, H, K), normal(B, T, H, K), normal(B, T, HV, V)
    gate = (B, T, HV, K) if shape.per_channel else (B, T, HV)
    g = -torch.nn.functional.softplus(normal(*gate))
    beta = torch.sigmoid(normal(B, T, HV))
    h0, do, dht = normal(N, HV, K, V), normal(B, T, HV, V), normal(N, HV, K, V)
    if case.gate == "reset":
        reset = torch.rand(gate, generator=generator) < 0.2
        g = torch.where(reset, -0.1 * torch.finfo(torch.float32).max, g)
    elif case.gate == "strong":
        g = torch.full(gate, -8.0)
    elif case.gate == "none":
        g = torch.zeros(gate)
    if case.repeated_keys:
        k = k[:, :1].expand_as(k).clone()
        beta = torch.full_like(beta, 0.99)
    q, k, v = q * case.scale, k * case.scale, v * case.scale
    if not case.normalize:
        q, k = torch.nn.functional.normalize(q, dim=-1), torch.nn.functional.normalize(k, dim=-1)
    if case.perturb_from is not None:
        for x in (q, k, v, beta, g):
            x[:, case.perturb_from :] = x[:, case.perturb_from :].flip(1) * 0.5
    if case.gradient_until is not None:
        do[:, case.gradient_until :] = 0
    packed = None
    if len(case.lengths) > 1:
        packed = torch.tensor([sum(case.lengths[:n]) for n in range(len(case.lengths) + 1)])
    if case.only_row is not None:
        one = slice(case.only_row, case.only_row + 1)
        q, k, v, g, beta, h0, do, dht = (x[one] for x in (q, k, v, g, beta, h0, do, dht))
    if not case.state:
        h0 = dht = None
    typed = {"q": q, "k": k, "v": v, "beta": beta, "do": do}
    return {
        **{name: x.to(dtype) for name, x in typed.items()},
        "g": g,
        "h0": h0,
        "dht": dht,
        "cu_seqlens": packed,
    }


def run(function, case: Case, inputs: dict, **options) -> dict[str, torch.Tensor]:
    """Forward and backward through a kernel or a reference; what `OUTPUTS` names.

    `options` go to the function, e.g. `output_final_state`.
    """
    names = ["q", "k", "v", "g", "beta"]
    leaves = [inputs[name].detach().requires_grad_() for name in names]
    h0 = inputs["h0"]
    h0 = None if h0 is None else h0.detach().requires_grad_()
    common = {"use_qk_l2norm_in_kernel": case.normalize, "cu_seqlens": inputs["cu_seqlens"]}

    def call(begin, end, state):
        part = [x[:, begin:end] for x in leaves]
        return function(*part, initial_state=state, **common, **options)

    if case.split_at is None:
        o, state = call(0, leaves[0].shape[1], h0)
    else:
        first, state = call(0, case.split_at, h0)
        second, state = call(case.split_at, leaves[0].shape[1], state)
        o = torch.cat([first, second], 1)
    outputs, gradients = [o], [inputs["do"].to(o)]
    if inputs["dht"] is not None:
        outputs.append(state)
        gradients.append(inputs["dht"].to(state))
        leaves.append(h0)
    grads = torch.autograd.grad(outputs, leaves, gradients)
    return dict(zip(OUTPUTS, (o.detach(), state.detach(), *grads), strict=False))
