"""The chunked form in plain torch, as a good user would write it: what eager and torch.compile run.

Products over a chunk take operands in the dtype of q; decays and states are float32.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F


def prepare(q, k, v, g, beta, scale: float, l2norm: bool, delta: bool):
    """Everything without the state, [B, HV, N, C, ...]; the last axis of g and beta is 1 or K."""
    dtype = q.dtype
    q, k = q.float(), k.float()
    if l2norm:
        q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q = q * scale
    written = k if beta is None else beta * k
    r = torch.arange(q.shape[-2], device=q.device)
    lower = (r[:, None] >= r[None, :])[..., None]
    G = g.cumsum(-2)
    lag = torch.where(lower, G.unsqueeze(-2) - G.unsqueeze(-3), -torch.inf).exp()  # [r, i, 1 or K]

    def pairs(x):
        if g.shape[-1] == 1:
            return (x.to(dtype) @ written.to(dtype).mT) * lag.squeeze(-1)
        return (x.unsqueeze(-2) * written.unsqueeze(-3) * lag).sum(-1)

    to_row, last = G.exp(), G[..., -1:, :]
    w, u = None, v
    if delta:
        system = torch.tril(pairs(k).float(), -1)
        right = torch.cat([k * to_row, v.float()], -1)
        solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
        w, u = solved.to(dtype).split([k.shape[-1], v.shape[-1]], -1)
    q_gated, k_gated = (q * to_row).to(dtype), (written * (last - G).exp()).to(dtype)
    return q_gated, k_gated, pairs(q).to(dtype), last, w, u


def step(state, k_gated, decay, w, u):
    """Delta rule: the state after a chunk, and the values that the chunk writes."""
    v_new = u - w @ state.to(w.dtype)
    return decay * state + (k_gated.mT @ v_new).float(), v_new


def scan(k_gated, log_decay, v):
    """No delta rule: the states before all chunks at once, sum over j < n of
    exp(L_(n-1) - L_j) k_j^T v_j with L the running log decay of the chunks."""
    updates = (k_gated.mT @ v).float()
    L = log_decay.cumsum(2).squeeze(-2).movedim(-1, 2)  # [B, HV, 1 or K, N]
    before = F.pad(L, (1, 0))[..., :-1]
    past = torch.ones(L.shape[-1], L.shape[-1], dtype=torch.bool, device=L.device).tril(-1)
    weights = torch.where(past, before.unsqueeze(-1) - L.unsqueeze(-2), -torch.inf).exp()
    if weights.shape[2] == 1:
        return (weights.squeeze(2) @ updates.flatten(-2)).view_as(updates)
    return (weights @ updates.transpose(2, 3)).transpose(2, 3)


def finish(q_gated, a_qk, states, v_new):
    return q_gated @ states.to(q_gated.dtype) + a_qk @ v_new


def without_delta(q, k, v, g, scale: float, l2norm: bool):
    q_gated, k_gated, a_qk, last, _, u = prepare(q, k, v, g, None, scale, l2norm, False)
    return finish(q_gated, a_qk, scan(k_gated, last, u), u)


class Chunked:
    """`compiled` hands the pieces to torch.compile. The delta rule's walk over chunks stays in
    Python: unrolling it would make one graph of thousands of steps."""

    def __init__(self, *, delta: bool, chunk: int, compiled: bool):
        self.delta, self.chunk = delta, chunk
        if compiled:
            torch._dynamo.reset()  # its limit of recompilations counts earlier shapes

        def wrap(function: Callable) -> Callable:
            return torch.compile(function, dynamic=False) if compiled else function

        self.prepare, self.finish = wrap(prepare), wrap(finish)
        self.without_delta = wrap(without_delta)

    def __call__(self, q, k, v, g=None, beta=None, *, scale: float, l2norm: bool) -> torch.Tensor:
        """q, k [B, T, H, K], v [B, T, HV, V], g [B, T, HV(, K)], beta [B, T, HV(, K)]."""
        T, HV = v.shape[1:3]
        if g is None:
            g = torch.zeros(v.shape[:3], device=q.device)
        g, beta = (x.unsqueeze(-1) if x is not None and x.ndim == 3 else x for x in (g, beta))

        def chunks(x):
            x = x.repeat_interleave(HV // x.shape[2], 2).transpose(1, 2)
            return F.pad(x, (0, 0, 0, -T % self.chunk)).unflatten(2, (-1, self.chunk))

        q, k, v, g = map(chunks, (q, k, v, g))
        if self.delta:
            o = self.walk(q, k, v, g, chunks(beta), scale, l2norm)
        else:
            o = self.without_delta(q, k, v, g, scale, l2norm)
        return o.flatten(2, 3)[:, :, :T].transpose(1, 2)

    def walk(self, q, k, v, g, beta, scale: float, l2norm: bool) -> torch.Tensor:
        prepared = self.prepare(q, k, v, g, beta, scale, l2norm, True)
        q_gated, k_gated, a_qk, last, w, u = prepared
        decay = last.exp().mT
        state = torch.zeros(*q.shape[:2], q.shape[-1], v.shape[-1], device=q.device)
        states, values = [], []
        for n in range(q.shape[2]):
            states.append(state)
            chunk = (x[:, :, n] for x in (k_gated, decay, w, u))
            state, v_new = step(state, *chunk)
            values.append(v_new)
        return self.finish(q_gated, a_qk, torch.stack(states, 2), torch.stack(values, 2))
