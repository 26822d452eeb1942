"""Dispatchers of four ranks against `Local`, and what travels."""

import json
from pathlib import Path

import pytest
import torch

from runtime.experts.dispatch import Limit, Local
from tests.runtime.runs import torchrun

KINDS = ["all_to_all", "hierarchical", "all_gather"]
KINDS += [f"{kind}-limit" for kind in KINDS]
HOW = ["", "-skewed", "-none", "-one", "-single", "-nobody"]
CASES = [kind + how for kind in KINDS for how in HOW]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    results = tmp_path_factory.mktemp("dispatch") / "results.json"
    torchrun(4, Path(__file__).with_name("dispatch_ranks.py"), results)
    return json.loads(results.read_text())


@pytest.mark.distributed
@pytest.mark.parametrize("how", HOW)
def test_a_token_travels_once_to_each_rank_that_has_its_experts(ranks, how):
    for rank in ranks:
        found = rank[f"all_to_all{how}"]
        ((_, sent),) = found["sent"][:1]
        assert sent == [sum(r in owners for owners in found["owners"]) for r in range(4)]
        assert max(sent) <= found["tokens"]
    # Four choices a token, so there was something to save.
    tokens = sum(rank[f"all_to_all{how}"]["tokens"] for rank in ranks)
    total = sum(sum(rank[f"all_to_all{how}"]["sent"][0][1]) for rank in ranks)
    assert total < 4 * tokens or not tokens


@pytest.mark.distributed
@pytest.mark.parametrize("how", HOW)
def test_a_token_crosses_once_to_each_node_that_has_its_experts(ranks, how):
    # Ranks 0 and 1 are one node, 2 and 3 the other.
    for number, rank in enumerate(ranks):
        found = rank[f"hierarchical{how}"]
        (rail, across), (node, inside), *back = found["sent"]
        assert rail == [number % 2, number % 2 + 2]
        assert node == [number // 2 * 2, number // 2 * 2 + 1]
        reached = [{r // 2 for r in owners} for owners in found["owners"]]
        assert across == [sum(n in nodes for nodes in reached) for n in range(2)]
        # The way back starts inside, with as many rows as came.
        assert [group for group, _ in back[:2]] == [node, rail]
        assert back[1][1][number // 2] == across[number // 2]
        # What crosses never crosses twice: not more than with a plain all-to-all.
        plain = rank[f"all_to_all{how}"]["sent"][0][1]
        other = 1 - number // 2
        assert across[other] <= sum(plain[2 * other : 2 * other + 2])
        assert inside


@pytest.mark.distributed
@pytest.mark.parametrize("what", ["y", "x", "weights", "bank"])
@pytest.mark.parametrize("case", CASES)
def test_output_and_gradients_are_those_of_one_process(ranks, case, what):
    # `weights`: a routing weight is used on another rank, its gradient must come home.
    for rank in ranks:
        assert rank[case]["apart"][what] <= 1e-6
    if not case.endswith("nobody"):
        assert sum(rank[case]["size"][what] for rank in ranks) > 0.1


@pytest.mark.distributed
@pytest.mark.parametrize("case", CASES)
def test_the_same_call_gives_the_same_bits(ranks, case):
    assert all(rank[case]["again"] for rank in ranks)


@pytest.mark.parametrize("dispatcher", [Local(), Local(Limit(9, 9))], ids=["plain", "limit"])
def test_local_is_the_plain_sum_over_choices(dispatcher):
    torch.manual_seed(0)
    x, bank = torch.randn(9, 5, requires_grad=True), torch.randn(7, 5)
    index, weights = torch.rand(9, 6).topk(3).indices, torch.rand(9, 3, requires_grad=True)
    if dispatcher.limit:
        index[4, 1] = 6  # no expert: computed by none
    route = dispatcher.route(index, 6)
    x_PD, weights_P = route.dispatch(x, weights)
    y = route.combine(x_PD * bank[route.pairs.expert_P], weights_P)
    bank[6] = 0
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
    route = Local().route(index, 2)
    y = route.combine(*route.dispatch(x, weights))
    assert y.dtype == torch.float32
    assert y.tolist() == [[257.0, 257.0]]


def test_more_tokens_than_buffers_are_for_are_refused():
    with pytest.raises(ValueError, match="3 tokens on a rank whose buffers are for 2"):
        Local(Limit(2, 2)).route(torch.zeros(3, 1, dtype=torch.long), 2)
