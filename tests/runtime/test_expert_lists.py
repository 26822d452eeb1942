"""Experts in a list of modules give what the model's own code gives, values and gradients."""

import pytest
import torch
from torch import nn

from analyzers.errors import InputError
from runtime.adapters import banks
from runtime.experts import experts_of
from runtime.experts.lists import stack_expert_lists, under_own_names

D, EXPERTS, TOP_K = 16, 6, 2


class Expert(nn.Module):
    def __init__(self, bias=False):
        super().__init__()
        self.up = nn.ModuleDict({"gate": nn.Linear(D, 24, bias=bias), "value": nn.Linear(D, 24)})
        self.down = nn.Linear(24, D, bias=bias)

    def forward(self, x):
        return self.down(torch.tanh(self.up["gate"](x)) * self.up["value"](x))


class Block(nn.Module):
    """Visits only the experts that have rows, in an order of its own, with weights before them."""

    def __init__(self, bias=False, experts=EXPERTS):
        super().__init__()
        self.gate = nn.Linear(D, experts)
        self.experts = nn.ModuleList(Expert(bias) for _ in range(experts))

    def forward(self, x):
        rows = x.flatten(0, 1)
        weights, chosen = self.gate(rows).sigmoid().topk(TOP_K, dim=-1)
        out = torch.zeros_like(rows)
        for expert in reversed(chosen.unique().tolist()):
            token, choice = torch.where(chosen == expert)
            scaled = rows[token] * weights[token, choice, None]
            out.index_add_(0, token, self.experts[expert](scaled))
        return out.view_as(x)


def model_of(*blocks):
    model = nn.Module()
    model.layers = nn.ModuleList(blocks)
    return model


@pytest.fixture(params=[False, True], ids=["plain", "bias"])
def pair(request):
    """A block and its twin with stacked experts."""
    torch.manual_seed(0)
    plain, stacked = Block(request.param), Block(request.param)
    stacked.load_state_dict(plain.state_dict())
    assert stack_expert_lists(stacked, EXPERTS) == ["experts"]
    return plain, stacked


@pytest.mark.parametrize("shape", [(2, 9), (1, 1), (3, 0)])
def test_output_and_gradients_are_those_of_the_list(pair, shape):
    plain, stacked = pair
    x, twin = (torch.randn(*shape, D, generator=torch.Generator().manual_seed(1)) for _ in "ab")
    x.requires_grad_(), twin.requires_grad_()
    expected, found = plain(x), stacked(twin)
    torch.testing.assert_close(found, expected)
    (expected.square().sum() + x.sum()).backward()
    (found.square().sum() + twin.sum()).backward()
    torch.testing.assert_close(twin.grad, x.grad)
    if x.numel():
        torch.testing.assert_close(stacked.gate.weight.grad, plain.gate.weight.grad)
    for bank, path in stacked.experts.sources.items():
        rows = [e.get_submodule(path).weight for e in plain.experts]
        wanted = torch.stack([torch.zeros_like(w) if w.grad is None else w.grad for w in rows])
        torch.testing.assert_close(getattr(stacked.experts, bank).grad, wanted)


def test_banks_go_by_the_paths_of_the_linear_layers(pair):
    plain, stacked = pair
    experts = experts_of(stacked)["experts"]
    assert banks(experts) == ["up_gate", "up_value", "down"]
    own = {}
    for name, parameter in stacked.named_parameters():
        own |= dict(under_own_names(stacked, name, parameter))
    wanted = dict(plain.named_parameters())
    assert own.keys() == wanted.keys()
    assert all(torch.equal(own[name], wanted[name]) for name in own)


def test_a_block_that_changes_its_mind_is_refused():
    class Fickle(Block):
        def forward(self, x):
            self.visits = getattr(self, "visits", 0) + 1
            return self.experts[self.visits % EXPERTS](x)

    block = Fickle()
    stack_expert_lists(block, EXPERTS)
    with pytest.raises(RuntimeError, match="another way the second time"):
        block(torch.randn(1, 3, D))


def test_experts_that_are_not_alike_are_refused():
    block = Block()
    block.experts[2].down = nn.Linear(24, D, bias=True)
    with pytest.raises(InputError, match="its experts differ"):
        stack_expert_lists(block, EXPERTS)


def test_weights_besides_linear_layers_are_refused():
    block = Block()
    for expert in block.experts:
        expert.norm = nn.LayerNorm(D)
    with pytest.raises(InputError, match="besides their linear layers"):
        stack_expert_lists(block, EXPERTS)


def test_lists_that_are_no_experts_stay():
    model = model_of(*(Block() for _ in range(EXPERTS)))
    assert stack_expert_lists(model, EXPERTS) == [f"layers.{i}.experts" for i in range(EXPERTS)]
    assert type(model.layers) is nn.ModuleList
