"""Graphs of layers: operators that stay whole, sizes that stay symbolic, no growth with length."""

import inspect
from collections import Counter
from pathlib import Path

import pytest
import torch

from analyzers.graph import capture as tracing
from analyzers.graph.capture import capture
from analyzers.graph.layer import LayerGraph
from analyzers.graph.opaque import ATTENTION, FUNCTIONS, replaced
from analyzers.models import build_on_meta, load_config
from analyzers.structure import decoder_layers, kinds
from analyzers.tiny import tiny_config

EXAMPLES = Path(__file__).parents[2] / "examples" / "models"

# Opaque operators of each kind of layer, in the order of the kinds, read off the model's papers.
CONV, EXPERTS = "short_convolution", "experts"
EXPECTED = {
    "tiny-kimi-linear": [
        {"kda", CONV},
        {"kda", CONV, EXPERTS},
        {"attention", EXPERTS},
    ],
    "tiny-kimi-k3": [{"kda", CONV}, {"kda", CONV, EXPERTS}, {"attention", EXPERTS}],
    "tiny-qwen3-next": [{"gated_delta_rule", CONV, EXPERTS}, {"attention", EXPERTS}],
    "minimax": [{"attention", EXPERTS}, {"lightning", EXPERTS}],
    "nemotron_h": [{"mamba2", CONV}, {EXPERTS}, {"attention"}, set()],
    "deepseek_v32": [{"attention"}, {"attention", EXPERTS}],
    "gpt_oss": [{"attention", EXPERTS}, {"attention", EXPERTS}],
}
MOST_CALLS = 200
"""Of one layer, getitem and sizes included; with the delta rule inlined a layer has 800."""


def model_of(name: str):
    if (EXAMPLES / name).is_dir():
        return build_on_meta(load_config(EXAMPLES / name))
    return build_on_meta(tiny_config(name))


def traced(name: str) -> tracing.Capture:
    model = model_of(name)
    return capture(model, kinds(model))


@pytest.fixture(scope="module")
def captured():
    found: dict[str, tracing.Capture] = {}

    def of(name: str) -> tracing.Capture:
        if name not in found:
            found[name] = traced(name)
        return found[name]

    return of


def opaque(graph: LayerGraph) -> set[str]:
    names = (str(node.target) for node in graph.calls())
    return {name.split(".")[1] for name in names if name.startswith("analyzers.")}


@pytest.mark.parametrize("name", EXPECTED)
def test_large_operators_stay_whole(captured, name):
    graphs = captured(name).graphs
    by_content = sorted(sorted(opaque(g)) for g in graphs)
    assert by_content == sorted(sorted(names) for names in EXPECTED[name])
    for graph in graphs:
        calls = Counter(str(node.target) for node in graph.calls())
        assert all(n == 1 for target, n in calls.items() if target.startswith("analyzers."))
        assert sum(calls.values()) < MOST_CALLS


@pytest.mark.parametrize("name", EXPECTED)
def test_batch_and_sequence_stay_symbolic(captured, name):
    found = captured(name)
    assert found.by == "export"
    assert found.reason == ""
    for graph in found.graphs:
        assert graph.dynamic == ["batch", "sequence"]
        # The graph runs at lengths that it was not exported at.
        for batch, tokens in ((1, 64), (3, 200)):
            inputs = graph.arguments(batch, tokens)
            results = torch.fx.Interpreter(graph.module).run(*inputs)
            hidden = next(r for r in results if r.ndim == 3)
            assert hidden.shape[:2] == (batch, tokens)


def test_every_call_says_where_it_belongs(captured):
    for graph in captured("tiny-kimi-k3").graphs:
        for node in graph.calls():
            assert node.meta["operator"]
            assert node.meta["part"] == "routed_experts" or (
                node.meta["part"] == graph.kind.part(node.meta["path"])
            )
            graph.kind.module.get_submodule(node.meta["path"])
        weights = {n.meta["path"] for n in graph.placeholders() if n.meta["role"] == "parameter"}
        assert weights == {n for n, _ in graph.kind.module.named_parameters()}


def test_calls_without_gradient_are_inlined_and_marked(captured):
    # An indexer runs under no_grad, so export puts its calls into a subgraph of the layer.
    graph = captured("deepseek_v32").graphs[0]
    indexer = [n for n in graph.calls() if n.meta["path"].startswith("self_attn.indexer")]
    assert {"aten.relu.default", "aten.topk.default"} <= {str(n.target) for n in indexer}
    assert not any(n.meta["grad"] for n in indexer)
    attention = next(n for n in graph.calls() if n.meta["operator"] == "sparse_attention")
    assert attention.meta["grad"]
    chosen = attention.args[0][3]
    assert chosen.meta["val"].dtype == torch.int32


@pytest.mark.parametrize("name", ["minimax", "tiny-qwen3-next"])
def test_graph_does_not_grow_with_the_length(monkeypatch, name):
    # MiniMax unrolls its blocks of 256 tokens in Python: one block at 61 tokens, three at 541.
    monkeypatch.setattr(tracing, "ATTEMPTS", ((),))
    counts = []
    for tokens in (61, 541):
        monkeypatch.setattr(tracing, "PRIMES", (tokens,))
        found = traced(name)
        assert found.graphs[0].tokens == tokens
        counts.append([Counter(str(n.target) for n in g.calls()) for g in found.graphs])
    assert counts[0] == counts[1]


def test_make_fx_follows_where_export_does_not(monkeypatch, captured):
    def refuse(*args, **kwargs):
        raise torch._dynamo.exc.UserError(
            torch._dynamo.exc.UserErrorType.DYNAMIC_CONTROL_FLOW, "cannot follow"
        )

    expected = captured("gpt_oss").graphs
    monkeypatch.setattr(torch.export, "export", refuse)
    found = traced("gpt_oss")
    assert found.by == "make_fx"
    assert "cannot follow" in found.reason
    for graph, other in zip(found.graphs, expected, strict=True):
        assert graph.dynamic == []
        assert opaque(graph) == opaque(other)
        linears = [[n for n in g.calls() if n.meta["operator"] == "linear"] for g in (graph, other)]
        assert len(linears[0]) == len(linears[1])


def test_the_model_is_as_before_when_tracing_ends():
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    model = model_of("tiny-kimi-linear")
    path, layers = decoder_layers(model)
    owner = model.get_submodule(path.rpartition(".")[0])
    before = inspect.unwrap(type(layers[0].self_attn).forward).__globals__
    functions = {name: before[name] for name in FUNCTIONS if name in before}
    implementation = model.config._attn_implementation
    with replaced(owner, kinds(model)):
        assert before["chunk_kimi_delta_attention"] is FUNCTIONS["chunk_kimi_delta_attention"]
        assert model.config._attn_implementation == ATTENTION
    assert {name: before[name] for name in functions} == functions
    assert model.config._attn_implementation == implementation
    assert ATTENTION not in ALL_ATTENTION_FUNCTIONS
    assert "forward" not in vars(layers[1].mlp.experts)
