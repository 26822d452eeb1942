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


STORE = "mask = (r < left)[:, None] & (col < WIDTH)[None, :]\n    at = ptr"
CARRY = "h = tl.dot(tl.trans(k_gated), v, h * decay,"
CARRY_BACK = "dh = tl.dot(tl.trans(q_gated), do, dh * decay,"
SEEN = "a_qk = tl.where(rr > ii, a_qk, tl.where(rr == ii, diagonal[:, None], 0.0))"
NORM = "q_factor = tl.rsqrt(tl.sum(q_row * q_row, 1) + 1e-6) * scale"
MUTATIONS = [
    change("decay dropped", CARRY, CARRY.replace("h * decay", "h")),
    change("mask lets the future in", SEEN, SEEN.replace("rr > ii", "rr >= ii - 1")),
    change("a token does not see itself", SEEN, SEEN.replace("diagonal[:, None]", "0.0")),
    change(
        "chunks start one too late",
        "(chunk - tl.load(first_chunk_ptr + n)) * BT",
        "(chunk + 1 - tl.load(first_chunk_ptr + n)) * BT",
    ),
    change(
        "last chunk forgotten",
        "tl.range(0, tl.cdiv(tokens, BT).to(tl.int32), num",
        "tl.range(0, tl.cdiv(tokens, BT).to(tl.int32) - 1, num",
    ),
    change("tail not counted", "(bounds.diff() + CHUNK - 1) // CHUNK", "bounds.diff() // CHUNK"),
    change(
        "chunks counted from the total",
        "length // CHUNK + bounds.numel() - 1",
        "length // CHUNK + 1",
        "packed with empty and one-token sequences",
    ),
    change("written without beta", "HALF, PRECISION) * beta[None, :]", "HALF, PRECISION)"),
    change(
        "erased without beta",
        "_unit_lower_inverse(-a_kk * beta[:, None],",
        "_unit_lower_inverse(-a_kk,",
    ),
    change("state not carried on", CARRY, CARRY.replace("h * decay", "0.0 * h"), "long memory"),
    change("initial state not read", "if h0_ptr is not None:", "if h0_ptr is None:"),
    change("scale forgotten", NORM, NORM.removesuffix(" * scale")),
    change("norm without its small number", NORM, NORM.replace("1e-6", "1e-12"), "inputs of 1e-3"),
    change(
        "value heads read the wrong key head",
        "at_k = (begin * (HV // GROUP) + hv // GROUP) * K",
        "at_k = (begin * (HV // GROUP) + hv % (HV // GROUP)) * K",
        "grouped value heads in a batch",
    ),
    change("rows stored past the sequence", STORE, STORE.replace("left", "left + 2")),
    change(
        "columns stored past the width", STORE, STORE.replace("WIDTH", "WIDTH + 1"), widths=(12, 12)
    ),
    change(
        "inputs taken for contiguous",
        "q, k, v, g, beta = (x.contiguous() for x in (q, k, v, g, beta))",
        "q, k, v, g, beta = q, k, v, g, beta",
        "strided inputs",
    ),
    change(
        "decay from differences of running sums",
        "between = tl.cumsum(tl.where(r[:, None] > r[None, :], g[:, None], 0.0), 0)",
        "between = tl.cumsum(g, 0)[:, None] - tl.cumsum(g, 0)[None, :]",
        "hard resets",
    ),
    change("last state's gradient not read", "if dht_ptr is not None:", "if dht_ptr is None:"),
    change(
        "initial state's gradient never written",
        "    tl.store(dh0_ptr",
        "    if n < 0:\n        tl.store(dh0_ptr",
    ),
    change(
        "gradient not carried back",
        CARRY_BACK,
        CARRY_BACK.replace("dh * decay", "0.0 * dh"),
        "long memory",
    ),
    change("erasure has the wrong sign on the way back", "(-dv).to(dtype)", "dv.to(dtype)"),
    change(
        "sign of the gate's gradient",
        "tl.store(dg_ptr + block * tokens * HV + at + r * HV, dg,",
        "tl.store(dg_ptr + block * tokens * HV + at + r * HV, -dg,",
    ),
    change(
        "gate's gradient through the state forgotten",
        "dg += tl.load(decay_ptr + pid) * tl.sum(carried, 0)",
        "dg += 0.0",
        "long memory",
    ),
    change(
        "norm of q forgotten in the backward",
        "dq -= q * (q_dq / (scale * scale))[:, None]",
        "dq -= 0.0 * q",
    ),
    change("half of beta's gradient", "dbeta += z / beta", "dbeta += 0.5 * z / beta"),
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
