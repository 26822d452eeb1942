"""Bugs that other projects had in linear attention, replayed on ours: each named after how it
should behave. Here what can show on a CPU, in `test_gpu.py` what needs a device."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from codegen.members import load_specs
from codegen.verify.cases import Shape, make_inputs, run
from codegen.verify.families.linear_attention import LinearCase
from codegen.verify.harness import run_on
from tests.codegen.proofs import LINEAR, assert_as_exact, failed, function_of, subject

GATED = [n for n in LINEAR if "g" in load_specs()[n].inputs]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    """Every member as plain torch, with head widths that are no powers of two."""
    folder = tmp_path_factory.mktemp("known_bugs")
    return {n: subject(folder / n, n, widths=(12, 20)) for n in LINEAR}


def inputs_of(one, case: LinearCase) -> dict:
    return make_inputs(case, Shape(**one.shape), torch.float32)


@pytest.mark.parametrize("member", LINEAR)
def test_one_whole_chunk_has_right_gradients(kernels, member):
    # fla#984: dk and dbeta were half of what they should be for one chunk of 64 tokens.
    assert_as_exact(kernels[member], LinearCase(name="", lengths=(64,)), "float32")


def test_a_bounded_gate_of_the_future_leaves_the_past_alone(kernels):
    # fla#1240: outputs and gradients of the first 21 tokens changed with the gate of the 22nd.
    one = kernels["kda"]
    case = LinearCase(
        name="",
        lengths=(22,),
        heads=4,
        value_heads=4,
        gate_inside="bounded",
        initial=False,
        last="none",
        gradient_until=21,
    )
    before = inputs_of(one, case)
    after = before | {"g": before["g"].clone()}
    after["g"][:, 21:] += 3
    function = function_of(one)
    outputs, changed = run(function, case, before), run(function, case, after)
    for name in ("o", "dq", "dk", "dv", "dg", "dbeta"):
        assert torch.equal(outputs[name][:, :21], changed[name][:, :21]), name
    assert not torch.equal(outputs["o"], changed["o"])


@pytest.mark.parametrize("lengths", [(5, 0, 4), (0, 1, 0), (781, 1267), (0, 0)], ids=str)
@pytest.mark.parametrize("member", LINEAR)
def test_packed_sequences_are_what_they_are_alone(kernels, member, lengths):
    # fla#103, native-sparse-attention#23: repeated limits gave NaN; limits [0, 781, 2048] need 65
    # chunks of 32 tokens, counted from the total they were 64.
    one, function = kernels[member], function_of(kernels[member])
    case = LinearCase(name="", lengths=lengths)
    x = inputs_of(one, case)
    with torch.no_grad():
        packed = case.call(function, x, kernel=True)
        limits = x["cu_seqlens"].tolist()
        for n, (begin, end) in enumerate(pairwise(limits)):
            part = {
                name: t[:, begin:end] if case.INPUTS.get(name) == "token" and t is not None else t
                for name, t in x.items()
            }
            part |= {"h0": x["h0"][n : n + 1], "cu_seqlens": None}
            alone = case.call(function, part, kernel=True)
            torch.testing.assert_close(packed["o"][:, begin:end], alone["o"])
            torch.testing.assert_close(packed["state"][n : n + 1], alone["state"])


@pytest.mark.parametrize("member", LINEAR)
def test_a_batch_with_limits_of_packed_sequences_is_refused(kernels, member):
    # fla#837: gradients were huge, without a word.
    case = LinearCase(name="", lengths=(4,), batch=2, initial=False)
    x = inputs_of(kernels[member], case) | {"cu_seqlens": torch.tensor([0, 4])}
    with pytest.raises(ValueError, match="B = 1"):
        case.call(function_of(kernels[member]), x, kernel=True)


@pytest.mark.parametrize("member", LINEAR)
def test_offsets_in_kernels_are_of_64_bits(kernels, member):
    # fla#1080, #911, #769: finite wrong values where an offset passed 2^31. What it does beyond is
    # run on devices; here, that no program number stays at 32 bits.
    text = kernels[member].module.read_text(encoding="utf-8")
    wide = r"tl\.program_id\(0\)\.to\(tl\.int64\)|\(tl\.program_id\(0\) // \w+\)\.to\(tl\.int64\)"
    small = r"tl\.program_id\(0\) % \w+"
    assert "tl.program_id" in text
    assert "program_id" not in re.sub(f"{wide}|{small}", "", text)


@pytest.mark.parametrize("member", LINEAR)
def test_strong_decay_over_a_long_sequence(kernels, member):
    # fla#547, #122: NaN, and other values than the naive form has, for long sequences.
    case = LinearCase(name="", lengths=(300,), heads=2, value_heads=2, gates="strong")
    assert_as_exact(kernels[member], case, "float32")


@pytest.mark.parametrize("member", GATED)
def test_a_hard_reset_forgets_in_the_chunked_form_too(kernels, member):
    # fla#20: a gate of -0.1 of the largest number worked in the recurrence only. n = 8.
    assert_as_exact(kernels[member], LinearCase(name="", lengths=(8,), gates="reset"), "float32")


@pytest.mark.parametrize("step", [-4.0, -8.0, -30.0])
@pytest.mark.parametrize("member", GATED)
def test_errors_do_not_grow_with_the_decay(kernels, member, step):
    # FlashKDA#1: at -4 a step the error was ten times larger, at -8 it was NaN.
    one = kernels[member]
    case = LinearCase(name="", lengths=(70,))
    x = inputs_of(one, case)
    x["g"] = torch.full_like(x["g"], step)
    exact = {n: t.double() if t is not None and t.is_floating_point() else t for n, t in x.items()}
    got = run(function_of(one), case, x)
    want = run(function_of(one, "reference"), case, exact, kernel=False)
    for name, value in want.items():
        assert (got[name] - value).norm() <= 2e-6 * value.norm(), name


@pytest.mark.parametrize("member", LINEAR)
def test_compiled_is_what_eager_is(kernels, member):
    # fla#52: torch.compile gave other values.
    one = kernels[member]
    case = LinearCase(name="", lengths=(21,), last="value")
    x = inputs_of(one, case)
    compiled = torch.compile(function_of(one), backend="aot_eager", fullgraph=True)
    eager, graph = run(function_of(one), case, x), run(compiled, case, x)
    torch.testing.assert_close(graph, eager, atol=0, rtol=0)


@pytest.mark.parametrize("at", [1, 15, 16, 17, 36])
@pytest.mark.parametrize("member", LINEAR)
def test_a_carried_state_is_the_whole_sequence(kernels, member, at):
    # fla#494, #285, #83: a split sequence differed from the whole one.
    case = LinearCase(name="", lengths=(37,), gates="slow", split_at=at)
    one = kernels[member]
    x = inputs_of(one, case)
    split, whole = (run(function_of(one), c, x) for c in (case, replace(case, split_at=None)))
    for name, value in whole.items():
        assert (split[name] - value).norm() <= 1e-6 * value.norm(), name


@pytest.mark.parametrize("member", LINEAR)
def test_a_row_does_not_depend_on_its_batch(kernels, member):
    # fla#671: the same sample repeated in a batch differed by 1e-3.
    one = kernels[member]
    case = LinearCase(name="", lengths=(70,), heads=2, value_heads=2)
    x = inputs_of(one, case)
    shared = ("g_gamma",)
    many = {
        n: t if t is None or n in shared else t.repeat(5, *[1] * (t.ndim - 1)) for n, t in x.items()
    }
    alone = run(function_of(one), case, x)
    for name, value in run(function_of(one), replace(case, batch=5), many).items():
        for row in value:
            torch.testing.assert_close(row, alone[name][0], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("member", [n for n in LINEAR if n not in GATED])
def test_gradients_without_a_gate_go_to_their_own_inputs(kernels, member):
    # fla#245: without a gate the backward returned a tuple that was shifted by one.
    one = kernels[member]
    case = LinearCase(name="", lengths=(19,), last="none")
    assert_as_exact(one, case, "float32")
    got = run(function_of(one), case, inputs_of(one, case))
    assert {n for n in got if n != "o"} == {f"d{n}" for n in (*load_specs()[member].inputs, "h0")}


RETURNED = "    return o.view(v.shape).to(v.dtype), ht\n"


def test_a_kernel_that_writes_half_of_its_output_is_refused(tmp_path):
    # triton#9230: each of two candidates wrote a half, together they hid that neither is complete.
    half = (
        "    half = torch.empty_like(v)\n    half[..., ::2] = o.view(v.shape)[..., ::2]\n"
        "    return half, ht\n"
    )
    wrong = subject(tmp_path, "gla", (RETURNED, half))
    assert failed(run_on(wrong, "cpu", cases=["usual"], dtypes=["float32"]))


def test_a_kernel_whose_first_call_is_wrong_is_refused(tmp_path):
    # triton#4217, #6547, #5339, #781: what the tuner's runs had left in a buffer was added to.
    left = "    _CALLS.append(1)\n    o = o * (2 if len(_CALLS) == 1 else 1)\n"
    wrong = subject(
        tmp_path,
        "gla",
        ("def _torch_rows", "_CALLS = []\n\n\ndef _torch_rows"),
        (RETURNED, left + RETURNED),
    )
    assert failed(run_on(wrong, "cpu", cases=["usual"], dtypes=["float32"]))


def test_kernels_carry_no_tuner(kernels):
    # triton#4217, fla PR#663: tuning inside a kernel runs it on live buffers, and again a length.
    for one in kernels.values():
        assert "autotune" not in one.module.read_text(encoding="utf-8")
