"""Regions against lists made by hand: what one kernel could do, and the traffic that it avoids."""

import functools
import itertools
from collections import Counter
from pathlib import Path

import networkx as nx
import pytest
import torch
from torch import nn

from analyzers.graph.passes import canonicalise
from analyzers.graph.regions import calls_of, find_regions, to_document
from tests.analyzers.test_graph_passes import BATCH, LENGTH, WIDTH, RMSNorm, exported, hidden

EXAMPLES = Path("examples/models")
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


def test_a_norm_after_the_sublayer_is_mixed_into_the_residual():
    class PostNorm(nn.Module):
        def __init__(self):
            super().__init__()
            self.proj = nn.Linear(WIDTH, WIDTH)
            self.norm = RMSNorm()

        def forward(self, x):
            return x + self.norm(self.proj(x))

    _, (region,) = regions_of(PostNorm(), hidden())
    assert (region.kind, region.nodes) == ("residual_mixing", ["norm.rms_norm", "add"])
    assert region.bytes_avoided.per_token == 2 * SIZE * WIDTH


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


# ---------------------------------------------------------------------------------- real models

# By kind of layer: the regions that a reader of the model's code finds, by their telling members.
PENCIL = {
    "tiny-kimi-k3": {
        "kda+dense": {
            "residual_mixing": [
                "self_attention_res.attention_residual input_layernorm.rms_norm",
                "mlp_res.attention_residual post_attention_layernorm.rms_norm",
            ],
            "attention_norm_gate_projection": ["self_attn.kda self_attn.o_norm.gated_rms_norm"],
            "gated_activation": ["mlp.tanh mlp.sigmoid mlp.tanh_1"],
        },
        "kda+moe": {
            "residual_mixing": [
                "self_attention_res.attention_residual input_layernorm.rms_norm",
                "mlp_res.attention_residual post_attention_layernorm.rms_norm",
            ],
            "attention_norm_gate_projection": ["self_attn.kda self_attn.o_norm.gated_rms_norm"],
            "norm_projection": ["mlp.routed_expert_norm.rms_norm mlp.routed_expert_up_proj.linear"],
            "gated_activation": ["mlp.shared_experts.tanh mlp.shared_experts.sigmoid"],
            "pointwise_chain": ["mlp.add add_1"],
        },
        "mla+moe": {
            "residual_mixing": [
                "self_attention_res.attention_residual input_layernorm.rms_norm",
                "mlp_res.attention_residual post_attention_layernorm.rms_norm",
            ],
            "attention_norm_gate_projection": [
                "self_attn.scaled_dot_product_attention self_attn.sigmoid self_attn.o_proj.linear"
            ],
            "norm_projection": [
                "self_attn.q_a_layernorm.rms_norm self_attn.q_b_proj.linear",
                "self_attn.kv_a_layernorm.rms_norm self_attn.kv_b_proj.linear",
                "mlp.routed_expert_norm.rms_norm mlp.routed_expert_up_proj.linear",
            ],
            "gated_activation": ["mlp.shared_experts.tanh mlp.shared_experts.sigmoid"],
            "pointwise_chain": ["mlp.add add_1"],
        },
    },
    "tiny-kimi-linear": {
        "kda+dense": {
            "norm_projection": ["input_layernorm.rms_norm self_attn.q_proj.linear"],
            "attention_norm_gate_projection": ["self_attn.kda self_attn.forget_gate.softplus"],
            "residual_mixing": ["add post_attention_layernorm.rms_norm"],
            "gated_activation": ["mlp.act_fn.silu mlp.mul"],
        },
        "kda+moe": {
            "norm_projection": ["input_layernorm.rms_norm self_attn.b_proj.linear"],
            "attention_norm_gate_projection": ["self_attn.kda self_attn.o_proj.linear"],
            "residual_mixing": ["add post_attention_layernorm.rms_norm"],
            "gated_activation": ["mlp.shared_experts.act_fn.silu mlp.shared_experts.mul"],
            "pointwise_chain": ["mlp.add add_1"],
        },
        "mla+moe": {
            "norm_projection": [
                "input_layernorm.rms_norm self_attn.q_proj.linear",
                "self_attn.kv_a_layernorm.rms_norm self_attn.kv_b_proj.linear",
            ],
            "residual_mixing": ["add post_attention_layernorm.rms_norm"],
            "gated_activation": ["mlp.shared_experts.act_fn.silu mlp.shared_experts.mul"],
            "pointwise_chain": ["mlp.add add_1"],
        },
    },
    "tiny-qwen3-next": {
        "gated_delta_net+moe": {
            "norm_projection": ["input_layernorm.rms_norm linear_attn.in_proj_qkvz.linear"],
            "attention_norm_gate_projection": [
                "linear_attn.gated_delta_rule linear_attn.norm.gated_rms_norm"
            ],
            "residual_mixing": ["add post_attention_layernorm.rms_norm"],
            "gated_activation": ["mlp.shared_expert.act_fn.silu mlp.shared_expert.mul"],
            "pointwise_chain": ["mlp.sigmoid mlp.mul mlp.add add_1"],
        },
        "full_attention+moe": {
            "norm_projection": ["input_layernorm.rms_norm self_attn.v_proj.linear"],
            "attention_norm_gate_projection": [
                "self_attn.scaled_dot_product_attention self_attn.sigmoid self_attn.mul"
            ],
            "residual_mixing": ["add post_attention_layernorm.rms_norm"],
            "gated_activation": ["mlp.shared_expert.act_fn.silu mlp.shared_expert.mul"],
            "pointwise_chain": ["mlp.sigmoid mlp.mul mlp.add add_1"],
        },
    },
    "mixtral": {
        "full_attention+moe": {
            "norm_projection": ["input_layernorm.rms_norm self_attn.k_proj.linear"],
            "residual_mixing": ["add post_attention_layernorm.rms_norm"],
        },
    },
}


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
    """The graphs of these models by kind of layer, traced when first asked for."""
    from analyzers import models
    from analyzers.graph import trace_blocks
    from analyzers.structure import kinds
    from analyzers.tiny import tiny_config

    @functools.cache
    def traced(name):
        folder = EXAMPLES / name
        config = models.load_config(folder) if folder.is_dir() else tiny_config(name)
        model = models.build_on_meta(config)
        found = kinds(model)
        blocks = trace_blocks(model, found).blocks
        names = [f"{kind.mixer}+{kind.feed_forward}" for kind in found]
        return dict(zip(names, (block.document for block in blocks), strict=True))

    return traced


@pytest.mark.parametrize("model", PENCIL)
def test_real_models_have_the_regions_of_the_pencil(documents, model):
    found = documents(model)
    assert found.keys() == PENCIL[model].keys()
    for kind, expected in PENCIL[model].items():
        regions = found[kind].regions
        assert Counter(r.kind for r in regions) == {k: len(v) for k, v in expected.items()}
        for region_kind, members in expected.items():
            for words in members:
                holding = [r for r in regions if set(words.split()) <= set(r.nodes)]
                assert [r.kind for r in holding] == [region_kind], words


@pytest.mark.parametrize("model", PENCIL)
def test_regions_of_real_models_can_run_one_after_the_other(documents, model):
    for document in documents(model).values():
        assert_kernels_can_run(document)
        names = {n.name for n in document.nodes}
        assert len(names) == len(document.nodes)
        assert all(set(n.inputs) <= names for n in document.nodes)
