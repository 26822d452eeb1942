"""Saved bytes read off a graph against what autograd keeps of the real model on CPU.

The large operators of the real model are replaced by stand-ins that keep what a fused kernel keeps,
its experts by the function that training runs; everything else is the model's own code.
"""

import contextlib
import inspect
from collections import Counter
from pathlib import Path
from unittest import mock

import pytest
import torch

from analyzers.graph.capture import capture
from analyzers.graph.saved import saved
from analyzers.models import build_on_meta, load_config, model_class
from analyzers.structure import decoder_layers, kinds
from analyzers.tiny import tiny_config
from runtime.experts import use_own_experts

EXAMPLES = Path(__file__).parents[2] / "examples" / "models"
TOKENS = 191
MODELS = ["tiny-kimi-linear", "tiny-qwen3-next", "tiny-kimi-k3", "qwen3_moe"]


def config_of(name: str):
    return load_config(EXAMPLES / name) if (EXAMPLES / name).is_dir() else tiny_config(name)


class StandIn(torch.autograd.Function):
    """Keeps its inputs and, if asked, its output with a float32 number a row."""

    @staticmethod
    def forward(ctx, shape, keeps_output, *inputs):
        output = inputs[0].new_zeros(shape)
        rows = output.new_zeros(output.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(*inputs, *([output, rows] if keeps_output else []))
        return output

    @staticmethod
    def backward(ctx, grad):
        raise NotImplementedError


def delta_rule(query, key, value, g, beta, **ignored):
    return StandIn.apply(value.shape, False, query, key, value, g, beta), None


def convolution(x, weight, bias=None, activation=None, **ignored):
    return StandIn.apply(x.shape, False, x, weight)


def attention(module, query, key, value, mask=None, **ignored):
    batch, heads, length, _ = query.shape
    shape = (batch, length, heads, value.shape[-1])
    return StandIn.apply(shape, True, query, key, value), None


STAND_INS = {
    "chunk_kimi_delta_attention": delta_rule,
    "torch_chunk_gated_delta_rule": delta_rule,
    "causal_conv1d_fn": convolution,
}


@pytest.fixture(autouse=True)
def stand_in_attention():
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as functions

    with mock.patch.dict(functions._global_mapping, {"stand_in": attention}):
        yield


def kept_by_torch(name: str, *, adapted: bool) -> list[float]:
    """Bytes a token that each layer of the real bfloat16 model keeps for its backward pass."""
    config = config_of(name)
    torch.manual_seed(0)
    cls = model_class(config)
    if cls.config_class is not type(config):  # a text-only class of a multimodal config
        config = config.get_text_config()
    model = cls._from_config(config, dtype=torch.bfloat16, attn_implementation="stand_in")
    model.eval()
    use_own_experts(model)
    model.requires_grad_(False)
    path, layers = decoder_layers(model)
    owner = model.get_submodule(path.rpartition(".")[0])
    if adapted:
        for module_name, module in layers.named_modules():
            router = module_name.endswith(".gate")
            if (isinstance(module, torch.nn.Linear) and not router) or hasattr(module, "has_gate"):
                module.requires_grad_(True)
    weights = {t.untyped_storage()._cdata for t in [*model.parameters(), *model.buffers()]}
    kept: list[dict[int, torch.UntypedStorage]] = [{} for _ in layers]
    current: list[int] = []
    for index, layer in enumerate(layers):
        layer.register_forward_pre_hook(lambda *_, i=index: current.append(i))
        layer.register_forward_hook(lambda *_: current.clear())

    def keep(tensor):
        storage = tensor.untyped_storage()
        if current and storage._cdata not in weights:
            kept[current[0]][storage._cdata] = storage
        return tensor

    hidden = model.config.get_text_config().hidden_size
    x = torch.randn(1, TOKENS, hidden, dtype=torch.bfloat16, requires_grad=True)
    with contextlib.ExitStack() as stack:
        for module in model.modules():
            own = inspect.unwrap(type(module).forward).__globals__
            found = {n: function for n, function in STAND_INS.items() if n in own}
            stack.enter_context(mock.patch.dict(own, found))
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t))
        owner(inputs_embeds=x, use_cache=False)
    # What several layers keep is made outside of them: rotary angles.
    shared = {key for key, times in Counter(key for k in kept for key in k).items() if times > 1}
    return [sum(s.nbytes() for key, s in k.items() if key not in shared) / TOKENS for k in kept]


@pytest.mark.parametrize("name", MODELS)
def test_kept_bytes_are_those_of_autograd(name):
    model = build_on_meta(config_of(name))
    graphs = capture(model, kinds(model)).graphs
    frozen = kept_by_torch(name, adapted=False)
    adapted = kept_by_torch(name, adapted=True)
    for graph in graphs:
        kept, besides = saved(graph)
        # The bank of attention residuals deepens with the layer; a kind has the mean of its layers.
        layers = graph.kind.layers
        assert sum(work.at(TOKENS) for work in kept.values()) / TOKENS == pytest.approx(
            sum(frozen[i] for i in layers) / len(layers), rel=0.02
        )
        both = sum(work.at(TOKENS) for work in [*kept.values(), *besides.values()]) / TOKENS
        assert both == pytest.approx(sum(adapted[i] for i in layers) / len(layers), rel=0.02)


def test_parts_by_pencil():
    """Kimi-Linear's first layer, hidden width 128, four heads of 32, dense width 256."""
    model = build_on_meta(config_of("tiny-kimi-linear"))
    kept, besides = saved(capture(model, kinds(model)).graphs[0])
    # Two RMS norms: the float32 copy of the input and one float32 number, each.
    assert kept["norm"].per_token == 2 * (4 * 128 + 4)
    # Gate and up projection and silu(gate), bfloat16; with adapters the input and the product.
    assert kept["dense"].per_token == 2 * 3 * 256
    assert besides["dense"].per_token == 2 * (128 + 256)
    assert besides["norm"].per_token == 0
    assert all(work.per_pair == 0 for work in kept.values())
