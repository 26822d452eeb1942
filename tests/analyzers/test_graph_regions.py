"""Regions against lists made by hand: what one kernel could do, and the traffic that it avoids."""

import itertools

import networkx as nx
import pytest
import torch
from torch import nn

from analyzers.graph.passes import canonicalise
from analyzers.graph.regions import calls_of, find_regions, to_document
from tests.analyzers.test_graph_passes import BATCH, LENGTH, WIDTH, RMSNorm, exported, hidden

INNER = 24
SIZE = 4  # bytes of a float32


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj = nn.Linear(WIDTH, INNER, bias=False)
        self.up_proj = nn.Linear(WIDTH, INNER, bias=False)
        self.down_proj = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x):
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Attention(nn.Module):
    """One head, its output gated."""

    def __init__(self):
        super().__init__()
        for name in ("q_proj", "k_proj", "v_proj", "g_proj", "o_proj"):
            setattr(self, name, nn.Linear(WIDTH, WIDTH, bias=False))

    def forward(self, x):
        shape = (*x.shape[:2], 1, WIDTH)
        q, k, v = (
            p(x).view(shape).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).reshape(x.shape) * self.g_proj(x).sigmoid())


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.input_layernorm = RMSNorm()
        self.self_attn = Attention()
        self.post_attention_layernorm = RMSNorm()
        self.mlp = Mlp()

    def forward(self, x):
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


def regions_of(module, *inputs, names=None):
    graph_module = canonicalise(exported(module, *inputs, names=names))
    for node in graph_module.graph.nodes:
        if node.meta.get("operator") == "aten.scaled_dot_product_attention.default":
            node.meta["operator"] = "scaled_dot_product_attention"
    calls = calls_of(graph_module)
    return calls, find_regions(calls, batch=BATCH, sequence=LENGTH)


@pytest.fixture(scope="module")
def block():
    return regions_of(Block(), hidden())


def test_the_regions_of_a_block_are_those_of_a_pencil(block):
    _, regions = block
    assert {r.name: set(r.nodes) for r in regions} == {
        "norm_projection_0": {
            "input_layernorm.rms_norm",
            *(f"self_attn.{p}_proj.linear" for p in "qkvg"),
        },
        "attention_norm_gate_projection_0": {
            "self_attn.scaled_dot_product_attention",
            "self_attn.sigmoid",
            "self_attn.mul",
            "self_attn.o_proj.linear",
        },
        "residual_mixing_0": {"add", "post_attention_layernorm.rms_norm"},
        "gated_activation_0": {"mlp.silu", "mlp.mul"},
    }


def test_bytes_avoided_are_those_of_a_pencil(block):
    avoided = {r.name: r.bytes_avoided for r in block[1]}
    # The norm's output is written once and read by four projections.
    assert avoided["norm_projection_0"].per_token == SIZE * WIDTH * 5
    # Attention, the gate's sigmoid and their product: each written and read once.
    assert avoided["attention_norm_gate_projection_0"].per_token == SIZE * WIDTH * 6
    # The sum is read outside too: it is still written, but the norm need not read it.
    assert avoided["residual_mixing_0"].per_token == SIZE * WIDTH
    assert avoided["gated_activation_0"].per_token == SIZE * INNER * 2
    assert all(w.per_pair == 0 and not w.per_window for w in avoided.values())


def test_names_are_unique_and_a_call_is_in_one_region_at_most(block):
    calls, regions = block
    document = to_document(calls, regions)
    names = [n.name for n in document.nodes]
    assert len(set(names)) == len(names)
    assert all(i in names for n in document.nodes for i in n.inputs)
    claimed = list(itertools.chain(*(r.nodes for r in document.regions)))
    assert len(set(claimed)) == len(claimed)
    assert {n.name: n.region for n in document.nodes if n.region} == {
        name: r.name for r in regions for name in r.nodes
    }


def test_views_are_no_calls(block):
    operators = {c.operator for c in block[0]}
    assert not {"aten.view.default", "aten.transpose.int", "aten.reshape.default"} & operators


def test_regions_can_run_one_after_the_other(block):
    assert_kernels_can_run(to_document(*block))


def assert_kernels_can_run(document):
    """With each region drawn together to one kernel, nothing waits for itself."""
    graph = nx.DiGraph()
    kernel = {n.name: n.region or n.name for n in document.nodes}
    graph.add_edges_from(
        (kernel[i], kernel[n.name])
        for n in document.nodes
        for i in n.inputs
        if kernel[i] != kernel[n.name]
    )
    assert nx.is_directed_acyclic_graph(graph)


def test_a_chain_ends_where_something_else_reads():
    class Chain(nn.Module):
        def forward(self, x):
            y = x.exp() + 1
            z = y * 2
            return z.tanh().cumsum(1), y.sum(-1)

    _, (first, second) = regions_of(Chain(), hidden())
    assert (first.kind, first.nodes) == ("pointwise_chain", ["exp", "add"])
    assert second.nodes == ["mul", "tanh"]


def test_a_chain_does_not_close_around_a_call_that_is_none():
    # mul reads exp directly and through cumsum: one kernel cannot hold both without cumsum.
    class Around(nn.Module):
        def forward(self, x):
            a = x.exp()
            return (a.neg() * a.sin().cumsum(1)).tanh()

    _, regions = regions_of(Around(), hidden())
    for region in regions:
        assert not {"sin", "mul"} <= set(region.nodes)
        assert not {"exp", "mul"} <= set(region.nodes) or "sin" not in region.nodes


def test_a_norm_that_a_gate_multiplies_is_a_region():
    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = RMSNorm()

        def forward(self, x, z):
            return (self.norm(x) * nn.functional.silu(z)).cumsum(1)

    _, regions = regions_of(Gated(), hidden(), hidden() + 1)
    assert [(r.kind, r.nodes) for r in regions] == [("norm_gate", ["norm.rms_norm", "silu", "mul"])]


def test_scores_of_all_pairs_count_by_pair():
    class Scores(nn.Module):
        def forward(self, x):
            return ((x @ x.transpose(1, 2)) * 0.5).tanh().softmax(-1)

    _, (region,) = regions_of(Scores(), hidden())
    assert region.nodes == ["mul", "tanh"]
    assert (region.bytes_avoided.per_pair, region.bytes_avoided.per_token) == (2 * SIZE, 0)


def test_symbolic_sizes_count_as_numbers_do():
    import sympy

    graph = torch.export.export(
        Block().eval(),
        (hidden(),),
        dynamic_shapes=({0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC},),
        strict=False,
    ).module(check_guards=False)
    for node in graph.graph.nodes:
        if node.op == "call_function":
            stack = list((node.meta.get("nn_module_stack") or {}).values())
            name = "linear" if "linear" in str(node.target) else str(node.target)
            name = "scaled_dot_product_attention" if "scaled" in name else name
            node.meta.update(operator=name, path=stack[-1][0], part="mixer")
    x = next(n for n in graph.graph.nodes if n.op == "placeholder").meta["val"]
    batch, sequence = (size.node.expr for size in x.shape[:2])
    assert isinstance(sequence, sympy.Symbol)
    calls = calls_of(canonicalise(graph))
    symbolic = find_regions(calls, batch=batch, sequence=sequence)
    fixed = regions_of(Block(), hidden())[1]
    assert symbolic == fixed
