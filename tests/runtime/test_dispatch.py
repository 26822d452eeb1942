"""Dispatchers of four ranks against `Local`, and what travels."""

import json
from pathlib import Path

import pytest
import torch

from runtime.dispatch import Local
from tests.runtime.runs import torchrun

CASES = ["all_to_all", "all_to_all-skewed", "all_to_all-uneven", "all_gather", "all_gather-skewed"]
ALL_TO_ALL = CASES[:3]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    results = tmp_path_factory.mktemp("dispatch") / "results.json"
    torchrun(4, Path(__file__).with_name("dispatch_ranks.py"), results)
    return json.loads(results.read_text())


@pytest.mark.distributed
@pytest.mark.parametrize("case", ALL_TO_ALL)
def test_a_token_travels_once_to_each_rank_that_has_its_experts(ranks, case):
    found = [rank[case] for rank in ranks]
    assert [f["sent"] for f in found] == [f["distinct"] for f in found]
    assert all(max(f["sent"]) <= f["tokens"] for f in found)
    # Four choices a token, so there was something to save.
    assert sum(sum(f["sent"]) for f in found) < 4 * sum(f["tokens"] for f in found)


@pytest.mark.distributed
@pytest.mark.parametrize("what", ["y", "x", "weights", "bank"])
@pytest.mark.parametrize("case", CASES)
def test_output_and_gradients_are_those_of_one_process(ranks, case, what):
    # `weights`: a routing weight is used on another rank, its gradient must come home.
    for rank in ranks:
        assert rank[case]["apart"][what] <= 1e-6
    assert sum(rank[case]["size"][what] for rank in ranks) > 1


@pytest.mark.distributed
@pytest.mark.parametrize("case", CASES)
def test_the_same_call_gives_the_same_bits(ranks, case):
    assert all(rank[case]["again"] for rank in ranks)


def test_local_is_the_plain_sum_over_choices():
    torch.manual_seed(0)
    x, bank = torch.randn(9, 5, requires_grad=True), torch.randn(6, 5)
    index, weights = torch.rand(9, 6).topk(3).indices, torch.rand(9, 3, requires_grad=True)
    x_PD, sent = Local().dispatch(x, index, weights, 6)
    scales = torch.cat([bank[e].expand(n, -1) for e, n in enumerate(sent.pairs.counts)])
    y = Local().combine(x_PD * scales, sent)
    plain = torch.einsum("td,tkd,tk->td", x, bank[index], weights)
    torch.testing.assert_close(y, plain)
    grad = torch.randn(9, 5)
    for got, want in zip(
        torch.autograd.grad(y, (x, weights), grad),
        torch.autograd.grad(plain, (x, weights), grad),
        strict=True,
    ):
        torch.testing.assert_close(got, want)


def test_sums_are_float32_whatever_the_tokens_are():
    # 257 is no bfloat16; adding 1 to 256 in bfloat16 gives 256.
    x = torch.ones(1, 2, dtype=torch.bfloat16)
    index, weights = torch.tensor([[0, 1]]), torch.tensor([[256.0, 1.0]])
    x_PD, sent = Local().dispatch(x, index, weights, 2)
    y = Local().combine(x_PD, sent)
    assert y.dtype == torch.float32
    assert y.tolist() == [[257.0, 257.0]]
