"""The LoRA backward pass of a layer's graph against the costs of the operators."""

from collections import Counter
from pathlib import Path

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from analyzers import costs
from analyzers.graph.backward import RANK, adapted, count_backward, gradients
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
    return list(zip(graphs, calls, strict=True))


class MatrixProducts(TorchDispatchMode):
    """FLOPs of every `[m, k] @ [k, n]`."""

    def __init__(self):
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if str(func) == "aten.mm.default":
            (m, k), (_, n) = args[0].shape, args[1].shape
            self.flops += 2 * m * k * n
        return func(*args, **(kwargs or {}))


def test_matrix_products_are_those_of_the_costs(case):
    for graph, calls in case:
        expected = 0.0
        for call in calls:
            if call.operator in ("linear", "router"):
                expected += call.backward.flops.per_token
            if call.operator == "linear" and call.adapter:
                expected += 4 * RANK * call.adapter.width
        backward = adapted(graph)
        with MatrixProducts() as products:
            gradients(*backward)
        assert products.flops / graph.tokens == pytest.approx(expected, rel=1e-9)


def test_each_large_operator_goes_back_once(case):
    for graph, _ in case:
        forward = Counter(
            str(n.target).split(".")[1]
            for n in graph.calls()
            if str(n.target).startswith("analyzers.")
        )
        found = {
            n: k for n, k in count_backward(graph).items() if n.removesuffix("_backward") in forward
        }
        assert found == {f"{name}_backward": times for name, times in forward.items()}


def test_every_factor_of_an_adapter_gets_a_gradient(case):
    for graph, _ in case:
        linear = [n for n in graph.calls() if n.meta["operator"] == "linear"]
        matrices = [n for n in linear if n.meta["part"] != "router"]
        banks = 2 * sum(n.meta["operator"] == "experts" for n in graph.calls())
        found = gradients(*adapted(graph))
        assert all(n is not None for n in found)
        assert len(found) >= 2 * (len(matrices) + banks) + 1  # and of the hidden states
