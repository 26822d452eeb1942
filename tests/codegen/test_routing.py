"""Routing: gates on a CPU, faults that are told, and laws that hold for any tokens."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from analyzers.backends import load_backend
from codegen.load import import_file
from codegen.members import load_members
from codegen.render import render
from codegen.verify.harness import compile_for, run_on
from runtime.experts.capacity import settle
from tests.codegen.kernel_samples import check_style
from tests.codegen.proofs import Forks, assert_refused, failed
from tests.codegen.test_moe_route import write

OPERATORS = ["moe_route", "moe_order", "moe_reroute"]


@pytest.fixture(scope="module")
def subjects(tmp_path_factory):
    folder = tmp_path_factory.mktemp("routing")
    return {name: write(folder / name, name) for name in OPERATORS}


@pytest.fixture(scope="module")
def kernels(subjects):
    return {n: getattr(import_file(s.module, f"{n}_routing"), n) for n, s in subjects.items()}


@pytest.mark.parametrize("operator", OPERATORS)
def test_all_gates_pass_on_a_cpu(operator, subjects):
    gates = run_on(subjects[operator], "cpu", dtypes=["float32", "bfloat16"])
    assert not failed(gates)
    assert len(gates) > 25


@pytest.fixture(scope="module")
def forks(tmp_path_factory, subjects):
    with Forks(tmp_path_factory.mktemp("forks"), interpret=True) as forks:
        assert not failed(forks.gates(subjects["moe_order"], ("one pair",)))
        yield forks


INTERPRETED = {
    "moe_route": ("usual", "softmax", "the best groups", "equal scores", "rows of a wider array"),
    "moe_order": ("usual", "padded", "all others", "no tokens"),
    "moe_reroute": ("closed candidates and padding", "equal scores", "a chain of refusals"),
}


@pytest.mark.parametrize("operator", OPERATORS)
def test_the_kernels_pass_in_the_interpreter(operator, forks, subjects):
    gates = forks.gates(subjects[operator], INTERPRETED[operator])
    assert not failed(gates)
    assert len(gates) > len(INTERPRETED[operator])


SCALED = "renormalised and scaled"
ROUTE, ORDER, REROUTE = OPERATORS
LATER = "(step[None, :] < local[:, None])"
MUTATIONS = {
    "the higher of equal experts": (ROUTE, "COLUMNS - 1 - col)", "col)", "equal scores"),
    "the worst group": (ROUTE, "_best(keys, GROUPS)", "_best(-keys, GROUPS)", "the best groups"),
    "weights of the biased scores": (
        ROUTE,
        "mine, score, 0.0), 1)",
        "mine, choice, 0.0), 1)",
        "a bias",
    ),
    "no scale": (ROUTE, "weights * scale", "weights", SCALED),
    "a gradient without the others": (ROUTE, "dscore - mean[:, None]", "dscore", SCALED),
    "softmax forward alone": (
        ROUTE,
        'if SCORE == "softmax":\n        dscore',
        'if SCORE == "":\n        dscore',
        "softmax",
    ),
    "one order for all strides": (ROUTE, "row * stride", "row * E", "rows of a wider array"),
    "unstable": (ORDER, LATER, LATER.replace("<", ">"), "usual"),
    "an expert that is none": (ORDER, "(id < keys * per)", "(id < keys * per - 1)", "usual"),
    "negative ids are experts": (ORDER, "(id >= 0) & ", "", "usual"),
    "each block for itself": (ORDER, "- count + total[None, :]", "- count", "usual"),
    "the padding is nobody's": (ORDER, "key == keys - 1, size", "key == keys, size", "padded"),
    "places not filled": (ORDER, "(pair < size)", "(pair < 0)", "padded"),
    "others count as before": (ORDER, ".to(tl.int32) - none", ".to(tl.int32)", "usual"),
    "room for one more": (REROUTE, "tl.int32) + capacity", "tl.int32) + capacity + 1", "usual"),
    "the later of equal tokens": (REROUTE, "(0x7FFFFFFF - pair)", "pair", "equal scores"),
    "padding takes room": (
        REROUTE,
        "given_ptr + pair, mask=there, other=0) != 0",
        "given_ptr + pair, mask=there, other=0) >= 0",
        "closed candidates and padding",
    ),
    "nobody asks again": (REROUTE, "(turn == 0) |", "(turn == 0) &", "usual"),
    "the end is not reached": (
        REROUTE,
        "while again != 0",
        "while again > 1",
        "a chain of refusals",
    ),
    "more than it needs": (REROUTE, "<= top_k)", "<= top_k + 1)", "usual"),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_wrong_kernel_is_refused(name, forks, tmp_path):
    operator, right, wrong, case = MUTATIONS[name]
    subject = write(tmp_path, operator, change=(right, wrong))
    assert subject.module.read_text() != write(tmp_path / "right", operator).module.read_text()
    gates = forks.gates(subject, (case,))
    assert_refused(gates)


@st.composite
def routings(draw):
    """Tokens, experts, candidates, choices, capacity and the seed of scores; many are equal."""
    experts = draw(st.integers(1, 12))
    tries = draw(st.integers(1, experts))
    top_k = draw(st.integers(1, tries))
    tokens, capacity = draw(st.integers(0, 40)), draw(st.integers(1, 30))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    liked = torch.rand(tokens, experts, generator=generator)
    liked = liked + torch.arange(experts) * draw(st.sampled_from([0.0, 0.1]))
    scores, ids = liked.topk(tries, 1)
    levels = draw(st.sampled_from([1, 3, 1000]))
    scores = (scores * levels).round() / levels
    given = torch.rand(tokens, tries, generator=generator) < draw(st.sampled_from([0.6, 1.0]))
    return ids, scores, given, top_k, experts, capacity


@settings(max_examples=80, deadline=None)
@given(routings())
def test_a_capacity_is_kept_and_used(kernels, routing):
    ids, scores, given, top_k, experts, capacity = routing
    call = {"top_k": top_k, "experts": experts, "capacity": capacity}
    chosen, columns = kernels["moe_reroute"](ids, scores, given, **call)
    again = kernels["moe_reroute"](ids, scores, given, **call)
    assert torch.equal(chosen, again[0])
    assert torch.equal(columns, again[1])
    counts = torch.bincount(chosen.flatten(), minlength=experts + 1)[:experts]
    assert bool((counts <= capacity).all())
    got = torch.zeros_like(given)
    for n, row in enumerate(chosen.tolist()):
        real = [e for e in row if e < experts]
        assert len(set(real)) == len(real), "a token twice on one expert"
        for e, column in zip(row, columns[n].tolist(), strict=True):
            if e < experts:
                assert given[n, column], "padding has a place"
                assert e == ids[n, column]
                got[n, column] = True
        if len(real) < top_k:  # dropped: whatever it did not get is full
            for column in range(ids.shape[1]):
                if given[n, column] and not got[n, column]:
                    assert counts[ids[n, column]] == capacity
    # What the runtime does without the kernel.
    assert torch.equal(got, settle(ids, scores, given, top_k, experts, capacity))


@settings(max_examples=30, deadline=None)
@given(routings())
def test_without_a_limit_every_token_gets_its_best(kernels, routing):
    ids, scores, _, top_k, experts, _ = routing
    call = {"top_k": top_k, "experts": experts, "capacity": 10**6}
    chosen, columns = kernels["moe_reroute"](ids, scores, None, **call)
    assert torch.equal(chosen, ids[:, :top_k])
    assert torch.equal(columns, torch.arange(top_k).expand(chosen.shape))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 30), st.integers(1, 5), st.integers(1, 9), st.integers(0, 2**31))
def test_an_order_and_back_is_nothing(kernels, tokens, choices, experts, seed):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, experts, (tokens, choices), generator=generator)
    choice, source, by_source, offsets, ends = kernels["moe_order"](ids, experts)
    pairs = torch.arange(ids.numel(), dtype=torch.int32)
    assert torch.equal(choice[by_source.long()], pairs)
    assert torch.equal(choice // choices, source)
    keys = ids.flatten()[choice.long()]
    assert bool((keys.diff() >= 0).all())
    assert bool(((keys.diff() > 0) | (choice.diff() > 0)).all()), "not stable"
    assert torch.equal(
        ends.diff(prepend=ends.new_zeros(1)).long(), torch.bincount(keys, minlength=experts)
    )
    assert torch.equal(offsets.long(), torch.arange(tokens + 1) * choices)


def test_room_may_be_that_of_a_device_or_of_all(kernels):
    ids = torch.tensor([[0, 1, 2], [0, 1, 2], [1, 0, 3], [0, 2, 3]])
    scores = torch.tensor([[0.9, 0.5, 0.1], [0.8, 0.5, 0.2], [0.7, 0.5, 0.3], [0.6, 0.5, 0.4]])
    call = {"top_k": 1, "experts": 4, "capacity": 2}
    want = {1: [0, 0, 1, 2], 2: [0, 0, 3, 2], 4: [0, 0, 4, 4]}
    for per, chosen in want.items():
        got, _ = kernels["moe_reroute"](ids, scores, None, per=per, **call)
        assert got.flatten().tolist() == chosen, per


def test_float32_routers_choose_as_torch_does(kernels):
    # A router in half precision or tf32 chooses other experts (shawntan/scattermoe#5).
    logits = torch.randn(64, 40, generator=torch.Generator().manual_seed(3))
    weights, ids = kernels["moe_route"](logits, 8, score="softmax", renormalize=True)
    want, places = logits.softmax(1).topk(8, 1)
    assert torch.equal(ids.long(), places)
    torch.testing.assert_close(weights, want / want.sum(1, keepdim=True))
    assert weights.dtype == torch.float32


def test_each_weight_has_a_gradient_of_its_own(kernels):
    # Liger-Kernel#968: a gradient from above that is not the same everywhere.
    logits = torch.randn(5, 12, generator=torch.Generator().manual_seed(3), requires_grad=True)
    weights, ids = kernels["moe_route"](logits, 3, score="sigmoid")
    above = torch.zeros_like(weights)
    above[2, 1] = 7.0
    (got,) = torch.autograd.grad(weights, logits, above)
    want = torch.zeros_like(logits)
    s = logits.detach()[2, ids[2, 1]].sigmoid()
    want[2, ids[2, 1]] = 7 * s * (1 - s)
    torch.testing.assert_close(got, want)
    assert int((got != 0).sum()) == 1


@pytest.mark.parametrize(
    ("operator", "call", "message"),
    [
        (ROUTE, {"logits": torch.zeros(4), "top_k": 1, "score": "sigmoid"}, "logits must be"),
        (ROUTE, {"logits": torch.zeros(2, 6), "top_k": 1, "score": "relu"}, "score must be one of"),
        (
            ROUTE,
            {"logits": torch.zeros(2, 6), "top_k": 7, "score": "none"},
            "top_k must be in 1 .. 6",
        ),
        (
            ROUTE,
            {"logits": torch.zeros(2, 6), "top_k": 1, "score": "none", "groups": 3},
            "power of two",
        ),
        (ROUTE, {"logits": torch.zeros(2, 6), "top_k": 4, "score": "none", "groups": 2}, "1 .. 3"),
        (
            ROUTE,
            {"logits": torch.zeros(2, 6), "top_k": 1, "score": "none", "bias": torch.zeros(5)},
            "bias must be",
        ),
        (ORDER, {"ids": torch.zeros(2, 2), "experts": 3}, "ids must be"),
        (
            ORDER,
            {"ids": torch.zeros(2, 2, dtype=torch.int32), "experts": 3, "size": 5},
            "at most 4",
        ),
        (
            REROUTE,
            {
                "ids": torch.zeros(2, 2, dtype=torch.int32),
                "scores": torch.zeros(2, 3),
                "top_k": 1,
                "experts": 1,
                "capacity": 1,
            },
            "scores must be",
        ),
        (
            REROUTE,
            {
                "ids": torch.zeros(2, 2, dtype=torch.int32),
                "scores": torch.zeros(2, 2),
                "top_k": 1,
                "experts": 1,
                "capacity": 0,
            },
            "a capacity of 0",
        ),
    ],
)
def test_refuses_what_does_not_fit(kernels, operator, call, message):
    with pytest.raises(ValueError, match=message):
        kernels[operator](**call)


@pytest.mark.parametrize("backend", ["cpu", "h200"])
@pytest.mark.parametrize("operator", OPERATORS)
def test_rendered_files_are_stable_and_formatted(operator, backend, tmp_path):
    spec, target = load_members()[operator], load_backend(backend)
    assert render(spec, target, {}) == render(spec, target, {})
    write(tmp_path, operator, backend)
    check_style(tmp_path)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("operator", OPERATORS)
def test_all_gates_pass_on_the_device(operator, tmp_path):
    subject = write(tmp_path, operator, "h200")
    gates = [*run_on(subject, "device", "cuda"), *compile_for(subject, load_backend("h200"))]
    assert not [g for g in gates if not g.passed]
