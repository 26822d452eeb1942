"""Kernels with one thing wrong, each refused by the harness in Triton's interpreter."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from codegen.schema import Gate
from tests.codegen.proofs import DIED, failed, gates_of, subject


@dataclass(frozen=True, kw_only=True)
class Mutation:
    """One wrong kernel: what is changed in the rendered text, and the cases that can tell."""

    name: str
    changes: tuple[tuple[str, str], ...]
    cases: tuple[str, ...] = ("usual",)
    member: str = "gated_delta_rule"
    widths: tuple[int, int] = (16, 16)


def change(name: str, old: str, new: str, *cases: str, **others) -> Mutation:
    return Mutation(name=name, changes=((old, new),), cases=cases or ("usual",), **others)


RETAINED = "long memory"
MUTATIONS = [
    change("decay dropped", "h = h * decay + tl.dot", "h = h + tl.dot"),
    change(
        "mask of pairs lets the future in",
        "lower = r[:, None] >= r[None, :]",
        "lower = r[:, None] >= r[None, :] - 1",
    ),
    change(
        "a token does not see itself",
        "lower = r[:, None] >= r[None, :]",
        "lower = r[:, None] > r[None, :]",
    ),
    change(
        "chunks start one too late",
        "(chunk - tl.load(first_chunk_ptr + n)) * BT",
        "(chunk + 1 - tl.load(first_chunk_ptr + n)) * BT",
    ),
    change(
        "last chunk forgotten",
        "last = tl.load(first_chunk_ptr + n + 1)\n",
        "last = tl.load(first_chunk_ptr + n + 1) - 1\n",
    ),
    change(
        "tail not counted",
        "(self.bounds.diff() + CHUNK - 1) // CHUNK",
        "self.bounds.diff() // CHUNK",
    ),
    change(
        "chunks counted from the total",
        "self.count = length // CHUNK + cu_seqlens.numel() - 1",
        "self.count = length // CHUNK + 1",
        "packed with empty and one-token sequences",
    ),
    change(
        "values written without beta",
        "u = tl.dot(inverse, v * beta[:, None]",
        "u = tl.dot(inverse, v",
    ),
    change(
        "erased without beta",
        "tl.where(r[:, None] > r[None, :], a_kk, 0.0) * beta[:, None]",
        "tl.where(r[:, None] > r[None, :], a_kk, 0.0)",
    ),
    change("state not carried on", "h = h * decay + tl.dot", "h = tl.dot", RETAINED),
    change("initial state not read", "if h0_ptr is not None:", "if h0_ptr is None:"),
    change("scale forgotten", "q = q * (q_inv * scale)[:, None]", "q = q * q_inv[:, None]"),
    change(
        "value heads read the wrong key head",
        "h = hv // GROUP",
        "h = hv % (HV // GROUP)",
        "grouped value heads in a batch",
    ),
    change(
        "rows stored past the sequence",
        "mask = (row < end)[:, None] & (col < WIDTH)[None, :]\n    tl.store",
        "mask = (row < end + 2)[:, None] & (col < WIDTH)[None, :]\n    tl.store",
    ),
    change(
        "columns stored past the width",
        "mask = (row < end)[:, None] & (col < WIDTH)[None, :]\n    tl.store",
        "mask = (row < end)[:, None] & (col < WIDTH + 1)[None, :]\n    tl.store",
        widths=(12, 12),
    ),
    change(
        "gradient of the initial state never written",
        "    tl.store(dh0_ptr",
        "    if n < 0:\n        tl.store(dh0_ptr",
    ),
    change("gradient of the last state not read", "if dht_ptr is not None:", "if dht_ptr is None:"),
    change(
        "sign of the gate's gradient",
        "tl.store(dg_ptr + row * HV + hv, dg,",
        "tl.store(dg_ptr + row * HV + hv, -dg,",
    ),
    change(
        "gate's gradient by cancellation",
        "dg += tl.sum(tl.where(r[:, None] > r[None, :], d_from_row[None, :], 0.0), 1)",
        "dg += tl.cumsum(d_from_row, 0) - d_from_row",
        "gates of -8 a step",
    ),
    change(
        "normalisation of q forgotten in the backward",
        "dq = (dq - q * tl.sum(q * dq, 1)[:, None]) * q_inv[:, None]",
        "dq = dq * q_inv[:, None]",
    ),
    change(
        "normalisation without its small number",
        "tl.rsqrt(tl.sum(x * x, 1) + 1e-6)",
        "tl.rsqrt(tl.sum(x * x, 1) + 1e-12)",
        "inputs of 1e-3",
    ),
    change(
        "beta's gradient lacks the keys' share",
        "dbeta += tl.sum(dk_beta * k_to_row, 1)",
        "dbeta += 0.0",
    ),
    change(
        "inputs taken for contiguous",
        "(None if x is None else x.contiguous() for x in (q, k, v, g, beta, h0))",
        "q, k, v, g, beta, h0",
        "strided inputs",
    ),
    change(
        "decay from differences of running sums",
        "from_row = tl.exp(tl.cumsum(g_next, 0, reverse=True))",
        "from_row = tl.exp(tl.sum(g, 0)[None, :] - tl.cumsum(g, 0))",
        "hard resets",
        member="kda",
    ),
    change(
        "gradient of the gate's bias forgotten",
        "dg, dA_log, ddt_bias = _gate_gradients(dg, g, A_log, dt_bias, lower_bound)",
        "dg, dA_log, ddt_bias = _gate_gradients(dg, g, A_log, 0 * dt_bias, lower_bound)",
        "raw gates",
        member="kda",
    ),
]


@pytest.fixture(scope="module")
def judged(tmp_path_factory) -> dict[str, list[Gate]]:
    """Gates by mutation; by (member, widths), those of the right kernel in the same cases."""
    folder = tmp_path_factory.mktemp("mutations")
    right: dict = {}
    for m in MUTATIONS:
        right.setdefault((m.member, m.widths), {}).update(dict.fromkeys(m.cases))
    names = [*right, *(m.name for m in MUTATIONS)]
    subjects = [
        subject(folder / f"right{n}", member, widths=widths)
        for n, (member, widths) in enumerate(right)
    ]
    subjects += [
        subject(folder / f"wrong{n}", m.member, *m.changes, widths=m.widths)
        for n, m in enumerate(MUTATIONS)
    ]
    cases = [*(tuple(c) for c in right.values()), *(m.cases for m in MUTATIONS)]
    return dict(zip(names, gates_of(folder, subjects, cases, interpret=True), strict=True))


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.name)
def test_a_wrong_kernel_is_refused(mutation, judged):
    gates = judged[mutation.name]
    assert failed(gates)
    # Refused for what it computes or overwrites, not because it does not run.
    for gate in gates:
        assert not gate.name.startswith("accuracy") or gate.measured or gate.detail == DIED


@pytest.mark.parametrize("which", sorted({(m.member, m.widths) for m in MUTATIONS}))
def test_the_right_kernel_passes_what_the_wrong_ones_are_judged_by(which, judged):
    assert not failed(judged[which])
