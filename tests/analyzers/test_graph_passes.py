"""Each pass before and after: the same bits from a graph with fewer and better named calls."""

from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from analyzers.graph.passes import (
    canonicalise,
    drop_noops,
    merge_modules,
    merge_norms,
    merge_rotary,
    merge_softplus,
    operator,
)

BATCH, LENGTH, WIDTH = 3, 13, 16


class RMSNorm(nn.Module):
    """As transformers writes it: in float32, with a weight."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width))

    def forward(self, x):
        dtype = x.dtype
        x = x.to(torch.float32)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * x.to(dtype)


def rotate_half(x):
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


class Rotated(nn.Module):
    def forward(self, q, cos, sin):
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        q = q.view(BATCH, LENGTH, 2, WIDTH // 2).transpose(1, 2)
        return (q * cos) + (rotate_half(q) * sin)


class HalvesRotated(nn.Module):
    """As gpt-oss writes it."""

    def forward(self, q, cos, sin):
        first, second = q.chunk(2, dim=-1)
        cos, sin = cos[..., : WIDTH // 2], sin[..., : WIDTH // 2]
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class ComplexRotated(nn.Module):
    def forward(self, q, angles):
        turned = torch.view_as_complex(q.reshape(BATCH, LENGTH, WIDTH // 2, 2))
        return torch.view_as_real(turned * torch.polar(torch.ones_like(angles), angles)).flatten(2)


class Useless(nn.Module):
    """Everything that is undone, around one product."""

    def forward(self, x):
        batch, length = x.shape[:2]
        y = x.to(torch.float32).contiguous().view(batch, length, -1).expand(batch, -1, -1)
        y = nn.functional.dropout(y.detach().clone(), 0.1, self.training)[:, :, :]
        return torch.ops.aten.alias(y * 2)


class DecomposedSoftplus(nn.Module):
    def forward(self, x):
        return -torch.where(x > 20.0, x, torch.log(torch.exp(x) + 1))


class Routed(nn.Module):
    """A router that masks its scores in place, as group-limited ones do."""

    def forward(self, x):
        scores = x.sigmoid()
        scores.masked_fill_(scores < 0.5, 0.0)
        weights, index = torch.topk(scores, 2)
        return weights / weights.sum(-1, keepdim=True), index


class Buffered(nn.Module):
    """A result put together in place, between two halves of a norm."""

    def __init__(self):
        super().__init__()
        self.norm = RMSNorm()

    def forward(self, x):
        buffer = x.new_zeros(x.shape)
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        buffer[..., :4].copy_(scale)
        before = buffer.sum(-1)
        y = x * scale
        buffer[..., 4:].copy_(y[..., 4:])
        return buffer + y, before, self.norm(buffer)


class Written(nn.Module):
    """A copy that is made to be written to."""

    def forward(self, x):
        y = x.clone()
        y.add_(1)
        return x * y


def exported(
    module: nn.Module,
    *inputs: torch.Tensor,
    names: dict[str, str] | None = None,
    clean: bool = True,
):
    """The graph of a module, its calls with the meta that the passes read. `names` gives the
    operator of modules, by path; `clean` drops no-ops, as comes first."""
    graph_module = torch.export.export(module.eval(), inputs, strict=False).module(
        check_guards=False
    )
    for node in graph_module.graph.nodes:
        if node.op == "call_function":
            stack = list((node.meta.get("nn_module_stack") or {}).values())
            path = stack[-1][0] if stack else ""
            name = (names or {}).get(path) or str(node.target)
            if name == "aten.linear.default":
                name = "linear"
            node.meta.update(operator=name, path=path, part="mixer")
    drop_noops(graph_module) if clean else None
    return graph_module


def hidden(dtype=torch.float32):
    return torch.randn(BATCH, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1)).to(dtype)


def operators(graph_module) -> Counter:
    calls = [n for n in graph_module.graph.nodes if n.op in ("call_function", "call_module")]
    return Counter(operator(n) for n in calls)


CASES = {
    "no-ops": (drop_noops, Useless(), (hidden(),)),
    "a copy to write to": (drop_noops, Written(), (hidden(),)),
    "norm": (merge_norms, RMSNorm(), (hidden(),)),
    "norm in bfloat16": (merge_norms, RMSNorm(), (hidden(torch.bfloat16),)),
    "rotary": (
        merge_rotary,
        Rotated(),
        (hidden(), *torch.rand(2, BATCH, LENGTH, WIDTH // 2)),
    ),
    "rotary of halves": (
        merge_rotary,
        HalvesRotated(),
        (hidden(), *torch.rand(2, BATCH, LENGTH, WIDTH)),
    ),
    "complex rotary": (
        merge_rotary,
        ComplexRotated(),
        (hidden(), torch.rand(LENGTH, 1).expand(LENGTH, WIDTH // 2).contiguous()),
    ),
    "all": (
        canonicalise,
        nn.Sequential(RMSNorm(), nn.Linear(WIDTH, WIDTH), Useless()),
        (hidden(),),
    ),
}


@pytest.mark.parametrize(("run", "module", "inputs"), CASES.values(), ids=CASES)
def test_a_pass_changes_no_bit(run, module, inputs):
    graph_module = exported(module, *inputs, clean=False)
    fewer = len(graph_module.graph.nodes)
    before = pytree.tree_leaves(graph_module(*inputs))
    run(graph_module)
    graph_module.graph.lint()
    after, eager = pytree.tree_leaves(graph_module(*inputs)), pytree.tree_leaves(module(*inputs))
    assert all(map(torch.equal, after, before))
    assert all(map(torch.equal, after, eager))
    assert len(graph_module.graph.nodes) <= fewer


def test_what_does_nothing_goes():
    graph_module = exported(Useless(), hidden(), clean=False)
    assert len(operators(graph_module)) > 6
    drop_noops(graph_module)
    assert operators(graph_module) == {"aten.mul.Tensor": 1}


def test_a_copy_that_is_written_to_stays():
    graph_module = exported(Written(), hidden())
    assert operators(graph_module)["aten.clone.default"] == 1


def test_a_copy_into_another_layout_and_a_cast_stay():
    class Copies(nn.Module):
        def forward(self, x):
            return x.transpose(1, 2).contiguous().to(torch.float64)

    graph_module = exported(Copies(), hidden())
    kept = {"aten.transpose.int": 1, "aten.contiguous.default": 1, "aten.to.dtype": 1}
    assert operators(graph_module) == kept


def test_a_square_transpose_is_no_noop():
    # Its result has the shape of its input, and is not its input.
    class Turned(nn.Module):
        def forward(self, x):
            return x.transpose(0, 1).contiguous() * 1.5, x[0:1] * 1.0

    x = torch.arange(9.0).view(3, 3)
    graph_module = exported(Turned(), x)
    assert torch.equal(graph_module(x)[0], x.T * 1.5)


def test_a_decomposed_norm_becomes_one_call():
    graph_module = exported(RMSNorm(), hidden(torch.bfloat16))
    merge_norms(graph_module)
    assert operators(graph_module) == {"rms_norm": 1}


def test_a_norm_without_weight_and_with_a_sum_is_an_l2_norm():
    class Unit(nn.Module):
        def forward(self, x):
            return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) * 0.5

    graph_module = exported(Unit(), hidden())
    merge_norms(graph_module)
    assert operators(graph_module) == {"l2_norm": 1, "aten.mul.Tensor": 1}


def test_rsqrt_of_something_else_is_no_norm():
    class Other(nn.Module):
        def forward(self, x):
            return x * torch.rsqrt(x.abs().mean(-1, keepdim=True) + 1e-6)

    graph_module = exported(Other(), hidden())
    merge_norms(graph_module)
    assert "rms_norm" not in operators(graph_module)


def test_the_calls_of_a_named_module_become_one():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = RMSNorm()
            self.proj = nn.Linear(WIDTH, WIDTH)

        def forward(self, x, y):
            return self.proj(self.norm(x)) + self.norm(y)

    inputs = (hidden(), hidden() + 1)
    graph_module = exported(Two(), *inputs, names={"norm": "rms_norm"})
    before = graph_module(*inputs)
    merge_modules(graph_module)
    assert operators(graph_module) == {"rms_norm": 2, "linear": 1, "aten.add.Tensor": 1}
    assert torch.equal(graph_module(*inputs), before)
    call = next(n for n in graph_module.graph.nodes if operator(n) == "rms_norm")
    assert (call.meta["path"], tuple(call.meta["val"].shape)) == ("norm", (BATCH, LENGTH, WIDTH))


def test_a_module_with_two_results_that_writes_in_place_becomes_one_call():
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate = Routed()

        def forward(self, x):
            weights, index = self.gate(x)
            return weights * index

    graph_module = exported(Outer(), hidden(), names={"gate": "router"})
    before = graph_module(hidden())
    merge_modules(graph_module)
    assert operators(graph_module)["router"] == 1
    assert torch.equal(graph_module(hidden()), before)


def test_a_decomposed_softplus_becomes_one_call():
    graph_module = exported(DecomposedSoftplus(), hidden())
    merge_softplus(graph_module)
    assert operators(graph_module) == {"aten.softplus": 1, "aten.neg.default": 1}


@pytest.mark.parametrize("form", ["rotary", "rotary of halves", "complex rotary"])
def test_rotary_is_one_call_a_tensor(form):
    _, module, inputs = CASES[form]
    graph_module = exported(module, *inputs)
    merge_rotary(graph_module)
    left = operators(graph_module)
    assert left["rotary"] == 1
    assert not {"aten.cat.default", "aten.add.Tensor", "aten.mul.Tensor"} & left.keys()
