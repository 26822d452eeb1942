"""The LoRA backward graph against the costs of the operators."""

from collections import Counter
from pathlib import Path

import pytest
import torch

from analyzers import costs
from analyzers.graph.backward import RANK, backward, count
from analyzers.graph.capture import capture
from analyzers.models import build_on_meta, load_config
from analyzers.structure import kinds

EXAMPLES = Path(__file__).parents[2] / "examples" / "models"


@pytest.fixture(scope="module", params=["tiny-kimi-linear", "tiny-qwen3-next"])
def case(request):
    model = build_on_meta(load_config(EXAMPLES / request.param))
    found = kinds(model)
    calls = [costs.block_calls(kind, model.config.get_text_config()) for kind in found]
    graphs = capture(model, found).graphs
    return [(graph, c, backward(graph)) for graph, c in zip(graphs, calls, strict=True)]


def matrix_products(traced: torch.fx.GraphModule) -> float:
    """FLOPs of `[m, k] @ [k, n]`, from the shapes in the graph."""
    total = 0
    for node in traced.graph.nodes:
        if str(node.target) == "aten.mm.default":
            m, k = node.args[0].meta["val"].shape
            total += 2 * m * k * node.meta["val"].shape[1]
    return total


def test_matrix_products_are_those_of_the_costs(case):
    for graph, calls, traced in case:
        expected = 0.0
        for call in calls:
            if call.operator in ("linear", "router"):
                expected += call.backward.flops.per_token
            if call.operator == "linear" and call.adapter:
                expected += 4 * RANK * call.adapter.width
        assert matrix_products(traced) / graph.tokens == pytest.approx(expected, rel=1e-9)


def test_each_large_operator_goes_back_once(case):
    for graph, _, traced in case:
        forward = Counter(
            str(n.target).split(".")[1]
            for n in graph.calls()
            if str(n.target).startswith("analyzers.")
        )
        found = {n: k for n, k in count(traced).items() if n.removesuffix("_backward") in forward}
        assert found == {f"{name}_backward": times for name, times in forward.items()}


def test_every_factor_of_an_adapter_gets_a_gradient(case):
    for graph, _, traced in case:
        (outputs,) = next(n for n in traced.graph.nodes if n.op == "output").args
        linear = [n for n in graph.calls() if n.meta["operator"] == "linear"]
        matrices = [n for n in linear if n.meta["part"] != "router"]
        banks = 2 * sum(n.meta["operator"] == "experts" for n in graph.calls())
        gradients = [n for n in outputs if n is not None]
        assert len(gradients) == len(outputs)
        assert len(outputs) >= 2 * (len(matrices) + banks) + 1  # and of the hidden states
