"""Dispatchers of four ranks against `Local`, and what travels."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from runtime.experts.capacity import Limiter
from runtime.experts.dispatch import AllGather, AllToAll, Hierarchical, Limit, Local
from runtime.experts.fan import TORCH
from tests.runtime.runs import row_kernels, torchrun

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
        assert rank[case]["kernels_apart"][what] <= 1e-6
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


def test_tokens_are_added_in_float32_whatever_they_are_in():
    # Adding 1 to 256 in bfloat16 gives 256, as often as one likes.
    x = torch.ones(1, 2, dtype=torch.bfloat16)
    index, weights = torch.tensor([[0, 1, 2]]), torch.tensor([[256.0, 1.0, 1.0]])
    route = Local().route(index, 3)
    y = route.combine(*route.dispatch(x, weights))
    assert y.dtype == torch.bfloat16
    assert y.tolist() == [[258.0, 258.0]]


def test_more_tokens_than_buffers_are_for_are_refused():
    with pytest.raises(ValueError, match="3 tokens on a rank whose buffers are for 2"):
        Local(Limit(2, 2)).route(torch.zeros(3, 1, dtype=torch.long), 2)


@pytest.fixture
def pretended_ranks():
    """Rank 1 of four that do nothing: the shapes of an exchange without the exchange."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    try:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rail", "node"))
        yield dist.group.WORLD, mesh.get_group("rail"), mesh.get_group("node")
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("rows", ["torch", "generated"])
@pytest.mark.parametrize("kind", ["local", "all_to_all", "hierarchical", "all_gather"])
def test_with_a_limit_the_host_waits_for_nothing(pretended_ranks, kind, rows, tmp_path):
    # Fake tensors have no values: whoever asks for one, or for a size that depends on one, fails.
    world, rail, node = pretended_ranks
    kernels = TORCH if rows == "torch" else row_kernels(tmp_path)

    def step(limit):
        dispatcher = {
            "local": lambda: Local(limit),
            "all_to_all": lambda: AllToAll(world, limit),
            "hierarchical": lambda: Hierarchical(rail, node, limit),
            "all_gather": lambda: AllGather(world, limit),
        }[kind]()
        x = torch.randn(12, 6, requires_grad=True)
        weights = torch.rand(12, 4, requires_grad=True)
        route = dispatcher.route(torch.rand(12, 8).topk(4).indices, 8, kernels)
        x_PD, weights_P = route.dispatch(x, weights, kernels)
        y_PD = torch.tanh(x_PD) * route.pairs.expert_P.unsqueeze(1)
        route.combine(y_PD, weights_P, kernels).sum().backward()
        return x.grad.shape, weights.grad.shape

    with FakeTensorMode():
        assert step(Limit(12, 3)) == ((12, 6), (12, 4))
        if kind != "local":  # which never has to ask
            with pytest.raises(DataDependentOutputException):
                step(None)


@pytest.mark.parametrize(("candidates", "kind"), [(2, "torch"), (2, "generated"), (4, "generated")])
def test_dropping_and_a_kernel_that_reroutes_wait_for_nothing_either(candidates, kind, tmp_path):
    limiter = Limiter("experts", 8, 2, candidates=candidates, capacity=3, renormalize=True)
    kernels = TORCH if kind == "torch" else row_kernels(tmp_path)
    with FakeTensorMode():
        weights, index = torch.rand(12, 8, requires_grad=True).topk(candidates)
        ids, scaled = limiter(index, weights, torch.ones(12, dtype=torch.bool), kernels)
        scaled.sum().backward()
        assert ids.shape == scaled.shape == (12, 2)
