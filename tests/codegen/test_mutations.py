"""Kernels with one thing wrong, each refused by the harness in Triton's interpreter."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from codegen.family import Strategy
from tests.codegen.proofs import DIED, Forks, failed, subject


@dataclass(frozen=True, kw_only=True)
class Mutation:
    """One wrong kernel: what is changed in the rendered text, and the cases that can tell."""

    name: str
    changes: tuple[tuple[str, str], ...]
    cases: tuple[str, ...] = ("usual",)
    member: str = "gated_delta_rule"
    widths: tuple[int, int] = (16, 16)
    backend: str = "cpu"
    """Whose tile is taken; the interpreter's own has chunks of one block of rows."""
    strategy: Strategy = "split"


def change(name: str, old: str, new: str, *cases: str, **others) -> Mutation:
    return Mutation(name=name, changes=((old, new),), cases=cases or ("usual",), **others)


STORE = "mask = (r < left)[:, None] & (col < WIDTH)[None, :]\n    at = ptr"
CARRY = "h = tl.dot(tl.trans(k_gated), v, h * decay,"
CARRY_BACK = "dh = tl.dot(tl.trans(q_gated), do, dh * decay,"
SEEN = "a_qk = tl.where(rr > ii, a_qk, tl.where(rr == ii, diagonal[:, None], 0.0))"
SCALE = "q_factor = tl.full([BT], 1.0, tl.float32) * scale"
NORM = "q_factor *= tl.rsqrt(tl.sum(qq, 1) + 1e-6)"
PREPARED = "for exact in _passes(q.dtype, gate):\n        _run(\n            _prepare,"
PAIR = "tl.static_range(LOW, LEVELS):\n        e = tl.exp2(_sums(sums_ptr, 4 + level,"
GRADIENTS = "for exact in _passes(q.dtype, gate):\n            _run(\n                _gradients,"
MUTATIONS = [
    change("decay dropped", CARRY, CARRY.replace("h * decay", "h"), "one token"),
    change(
        "mask lets the future in",
        SEEN,
        SEEN.replace("rr > ii", "rr >= ii - 1"),
        "last state without a gradient",
    ),
    change(
        "a token does not see itself", SEEN, SEEN.replace("diagonal[:, None]", "0.0"), "one token"
    ),
    change(
        "chunks start one too late",
        "(chunk - tl.load(first_chunk_ptr + n)) * BT",
        "(chunk + 1 - tl.load(first_chunk_ptr + n)) * BT",
    ),
    change(
        "last chunk forgotten",
        "tl.range(0, tl.cdiv(tokens, BT).to(tl.int32), num",
        "tl.range(0, tl.cdiv(tokens, BT).to(tl.int32) - 1, num",
        "one token",
    ),
    change(
        "tail not counted",
        "(self.bounds.diff() + self.rows - 1) // self.rows",
        "self.bounds.diff() // self.rows",
        "one token",
    ),
    change(
        "chunks counted from the total",
        "return length // rows + sequences",
        "return length // rows + 1",
        "packed, few",
    ),
    change(
        "written without beta",
        "solve *= beta[None, :]",
        "solve *= 1.0",
        "one token",
    ),
    change(
        "erased without beta",
        "a_kk *= _load_strength(beta_ptr + at, HV, left, BT)[:, None]",
        "a_kk *= 1.0",
        "last state without a gradient",
    ),
    change(
        "state not carried on",
        CARRY,
        CARRY.replace("h * decay", "0.0 * h"),
        "state carried over a split",
    ),
    change("initial state not read", "if h0_ptr is not None:", "if h0_ptr is None:", "one token"),
    change("scale forgotten", SCALE, SCALE.removesuffix(" * scale"), "one token"),
    change("norm without its small number", NORM, NORM.replace("1e-6", "1e-12"), "inputs of 1e-3"),
    change(
        "value heads read the wrong key head",
        "at_k = (begin * (HV // GROUP) + hv // GROUP) * K",
        "at_k = (begin * (HV // GROUP) + hv % (HV // GROUP)) * K",
        "grouped value heads in a batch",
    ),
    change("rows stored past the sequence", STORE, STORE.replace("left", "left + 2"), "one token"),
    change(
        "columns stored past the width",
        STORE,
        STORE.replace("WIDTH", "WIDTH + 1"),
        "one token",
        widths=(12, 12),
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
    change(
        "last state's gradient not read",
        "if dht_ptr is not None:",
        "if dht_ptr is None:",
        "one token",
    ),
    change(
        "initial state's gradient never written",
        "    _store(dh0_ptr",
        "    if n < 0:\n        _store(dh0_ptr",
        "one token",
    ),
    change(
        "gradient not carried back",
        CARRY_BACK,
        CARRY_BACK.replace("dh * decay", "0.0 * dh"),
        "state carried over a split",
    ),
    change(
        "erasure has the wrong sign on the way back", "(-dv).to(dtype)", "dv.to(dtype)", "one token"
    ),
    change(
        "sign of the gate's gradient",
        "_store_row(dg_ptr + block * tokens * HV + at, dg,",
        "_store_row(dg_ptr + block * tokens * HV + at, -dg,",
        "one token",
    ),
    change(
        "gate's gradient through the state forgotten",
        "tl.load(decay_ptr + pid) * tl.sum(carried, 0)",
        "0.0 * tl.sum(carried, 0)",
        "state carried over a split",
    ),
    change(
        "norm of q forgotten in the backward",
        "dq -= q * (q_dq / (scale * scale))[:, None]",
        "dq -= 0.0 * q",
        "one token",
    ),
    change(
        "half of beta's gradient",
        "_store_row(dbeta_ptr + at, z_dz / beta",
        "_store_row(dbeta_ptr + at, 0.5 * z_dz / beta",
        "one token",
    ),
    change(
        "gradient of the gate's bias forgotten",
        "_store_row(ddt_bias_ptr + pid * K + block * BK, tl.sum(dg, 0)",
        "_store_row(ddt_bias_ptr + pid * K + block * BK, 0 * tl.sum(dg, 0)",
        "raw gates",
        member="kda",
    ),
    change(
        "gate's bias of the first head for all",
        "tl.load(dt_bias_ptr + hv * WIDTH + col,",
        "tl.load(dt_bias_ptr + col,",
        "raw gates",
        member="kda",
    ),
    change(
        "rows past the sequence decay",
        "g = tl.where(inside, g, 0.0)",
        "g = tl.where(inside, g, -1.0)",
        "raw gates above -5",
        member="kda",
    ),
    change(
        "rows past the sequence have a gradient",
        "dg = tl.where(inside, dg, 0.0)",
        "dg = dg + 0 * inside",
        "raw gates above -5",
        member="kda",
    ),
    change(
        "strong gates left to the usual pass",
        PREPARED,
        PREPARED.replace("_passes(q.dtype, gate)", "(False,)"),
        "hard resets",
        member="kda",
    ),
    change(
        "gradients of strong gates left to the usual pass",
        GRADIENTS,
        GRADIENTS.replace("_passes(q.dtype, gate)", "(False,)"),
        "hard resets",
        member="kda",
    ),
    change(
        "strong gates not marked",
        "(tl.max(reach, 0) > FAR).to(tl.int8)",
        "(tl.max(reach, 0) > 1e9).to(tl.int8)",
        "hard resets",
        member="kda",
    ),
    change(
        "pairs of wide blocks decay as narrow ones",
        PAIR,
        PAIR.replace("4 + level", "4 + LOW"),
        "state carried over a split",
        member="kda",
        backend="h200",
    ),
    change(
        "gradients of pairs of wide blocks decay as narrow ones",
        "e = tl.exp2(_sums(sums_ptr, 4 + level, g, BT, PRECISION))\n        k_here",
        "e = tl.exp2(_sums(sums_ptr, 4 + LOW, g, BT, PRECISION))\n        k_here",
        "state carried over a split",
        member="kda",
        backend="h200",
    ),
    change(
        "what is kept in another order",
        "out = dict(zip(PREPARED + STATES, kept, strict=True))",
        "out = dict(zip(PREPARED[1::-1] + PREPARED[2:] + STATES, kept, strict=True))",
        "one token",
        member="gla",
        backend="h200",
    ),
    change(
        "decays of a pair of blocks up to its end",
        "(1 << level) - 1 for level",
        "(2 << level) - 1 for level",
        "hard resets",
        member="kda",
    ),
    change(
        "pairs across blocks counted twice",
        "near = (rr >> LOW) == (ii >> LOW)",
        "near = rr >= 0 * ii",
        "hard resets",
        member="gla",
    ),
    change(
        "chunk's decay lacks its last token",
        "mask=(rr == BT - 1) & (col < K)",
        "mask=(rr == left - 2) & (col < K)",
        "state carried over a split",
        member="gla",
    ),
    change(
        "gate's gradient ends before its own token",
        "from_row, before = between(r - 1, rows), ",
        "from_row, before = between(r, rows), ",
        "last state without a gradient",
        member="gla",
    ),
    change(
        "read key takes the gradient of the written one",
        "dk += dk_write * beta",
        "dk += dk_write",
        "one token",
        member="kda_channel_beta",
    ),
    change(
        "constant decay counted from zero",
        "g, before, after, between = _load_decay(",
        "g, before, after, between = _load_decay(0.0 * ",
        "one token",
        member="lightning",
    ),
    change(
        "inverse lacks its widest blocks",
        "for level in tl.static_range(1, 4):\n        x",
        "for level in tl.static_range(1, 3):\n        x",
        member="delta_rule",
    ),
    change(
        "erasure counted once in k . dk",
        "k_dk + 2 * z_dz",
        "k_dk + z_dz",
        "one token",
        member="delta_rule",
    ),
    change(
        "diagonal's gradient dropped",
        "dq = diagonal * k",
        "dq = 0.0 * k",
        "one token",
        member="simple_gla",
    ),
    change(
        "gradient of q sees its own token twice",
        "d_qk = tl.where(rr > ii, d_qk, 0.0)",
        "d_qk = tl.where(rr >= ii - 1, d_qk, 0.0)",
        "last state without a gradient",
        member="linear_attention",
    ),
    change(
        "short: strong gates left to the usual products",
        "if STRONG and tl.max(reach, 0) > FAR:",
        "if STRONG and tl.max(reach, 0) > 1e9:",
        "hard resets, forward alone",
        member="kda",
        strategy="short",
    ),
    change(
        "short: chunk's decay lacks its last token",
        "mask=(rr == BT - 1) & (col < K)",
        "mask=(rr == BT - 2) & (col < K)",
        "long memory, forward alone",
        member="gla",
        strategy="short",
    ),
    change(
        "short: the state does not decay",
        "h = tl.dot(v, writes, h * decay",
        "h = tl.dot(v, writes, h",
        "usual, forward alone",
        strategy="short",
    ),
    change(
        "short: a value is written whatever the state holds",
        "tl.trans(reads), input",
        "tl.trans(0.0 * reads).to(dtype), input",
        "usual, forward alone",
        member="delta_rule",
        strategy="short",
    ),
    change(
        "short: what is read and what is subtracted change places",
        "y, o = _halves",
        "o, y = _halves",
        "usual, forward alone",
        strategy="short",
    ),
    change(
        "short: the chunk itself is not seen",
        "o += more",
        "o += 0.0 * more",
        "usual, forward alone",
        strategy="short",
    ),
    change(
        "short: every block of values writes the first",
        "_store(o_ptr + at * V, tl.trans(o), HV * V, left, col_v, V)",
        "_store(o_ptr + at * V, tl.trans(o), HV * V, left, col_v % BV, V)",
        "usual, forward alone",
        widths=(16, 72),
        strategy="short",
    ),
    change(
        "fused: strong gates left to the usual blocks",
        "if STRONG and tl.max(reach, 0) > FAR:",
        "if STRONG and tl.max(reach, 0) > 1e9:",
        "hard resets",
        member="kda",
        strategy="fused",
    ),
    change(
        "fused: chunk's decay lacks its last token",
        "tl.where(rr == BT - 1, e_before, 0.0)",
        "tl.where(rr == left - 2, e_before, 0.0)",
        "state carried over a split",
        member="gla",
        strategy="fused",
    ),
    change(
        "fused: state decays as its first token",
        "decay = tl.exp2(tl.sum(g, 0))",
        "decay = tl.exp2(tl.max(g, 0))",
        "state carried over a split",
        strategy="fused",
    ),
    change(
        "fused: blocks of the diagonal from the wrong columns",
        "== part[None, None, :, None]\n    parts",
        "== BT // 16 - 1 - part[None, None, :, None]\n    parts",
        member="delta_rule",
        backend="h200",
        strategy="fused",
    ),
    change(
        "fused: written without beta",
        "solve *= beta[None, :]\n        solve = solve.to",
        "solve = solve.to",
        "one token",
        strategy="fused",
    ),
    change(
        "fused: every block of values writes the first",
        "_store(o_ptr + at * V, o, HV * V, left, col_v, V)\n        h = tl.dot",
        "_store(o_ptr + at * V, o, HV * V, left, col_v % BV, V)\n        h = tl.dot",
        widths=(16, 40),
        strategy="fused",
    ),
]
RIGHT = sorted(
    {(m.member, m.widths, m.backend, m.strategy, case) for m in MUTATIONS for case in m.cases}
)


@pytest.fixture(scope="module")
def forks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mutations")
    with Forks(folder, interpret=True) as forks:
        assert not failed(
            forks.gates(subject(folder / "first", "linear_attention"), ("one token",))
        )
        yield forks


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.name)
def test_a_wrong_kernel_is_refused(mutation, forks, tmp_path):
    wrong = subject(
        tmp_path,
        mutation.member,
        *mutation.changes,
        widths=mutation.widths,
        backend=mutation.backend,
        strategy=mutation.strategy,
    )
    gates = forks.gates(wrong, mutation.cases)
    assert failed(gates)
    # Refused for what it computes or overwrites, not because it does not run.
    for gate in gates:
        assert not gate.name.startswith("accuracy") or gate.measured or gate.detail == DIED


@pytest.mark.parametrize(("member", "widths", "backend", "strategy", "case"), RIGHT)
def test_the_right_kernel_passes_what_the_wrong_ones_are_judged_by(
    member, widths, backend, strategy, case, forks, tmp_path
):
    right = subject(tmp_path, member, widths=widths, backend=backend, strategy=strategy)
    assert not failed(forks.gates(right, (case,)))
