"""Formulas of operators against torch's counter on the computation that they price."""

import ast
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from analyzers.costs import CHUNK, FORMULAS, NO_FORMULA, Call, residual_site
from analyzers.mixers import Mixer

ROOT = Path(__file__).parents[2]


def mixed(operator: str, **attributes) -> Call:
    """The call of the mixing itself, by the table of formulas."""
    return FORMULAS[operator](Mixer(operator, operator, attributes))[-1]


@pytest.mark.parametrize(("key", "value"), [(128, 128), (192, 128)])
def test_attention_is_priced_as_torch_prices_its_fused_kernels(key, value):
    q, k, v = (1, 8, 96, key), (1, 8, 96, key), (1, 8, 96, value)
    call = mixed("scaled_dot_product_attention", heads=8, kv_heads=2, key_dim=key, value_dim=value)
    assert call.forward.flops.at(96) == sdpa_flop_count(q, k, v)
    grad = (1, 8, 96, value)
    assert call.backward.flops.at(96) == sdpa_backward_flop_count(grad, q, k, v)


def test_grouped_keys_cost_flops_by_heads_and_bytes_by_key_heads():
    shape = {"heads": 32, "key_dim": 128, "value_dim": 128}
    many = mixed("scaled_dot_product_attention", kv_heads=32, **shape)
    few = mixed("scaled_dot_product_attention", kv_heads=4, **shape)
    assert few.forward.flops == many.forward.flops
    assert many.saved.at(1) - few.saved.at(1) == 2 * 28 * (128 + 128)
    # q, k, v and o in bfloat16, and a float32 log-sum-exp a head.
    assert few.saved.at(1) == 2 * (32 * 128 + 4 * 256 + 32 * 128) + 4 * 32


def counted(function, *inputs: torch.Tensor) -> tuple[int, int]:
    """FLOPs of a forward and of its backward to all inputs, by torch's counter."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    with FlopCounterMode(display=False) as counter:
        out = function(*leaves)
        forward = counter.get_total_flops()
        torch.autograd.backward(out, [torch.ones_like(x) for x in out])
    return forward, counter.get_total_flops() - forward


def wy(k, v, beta, s):
    """[C, K], [C, V], [C, 1], [K, V] -> values that the state lacks, and the inverse's products."""
    system = torch.eye(len(k)) + (beta * k @ k.T).tril(-1)
    inverse = torch.linalg.inv(system)
    return inverse @ (beta * v) - (inverse @ (beta * k)) @ s


def test_delta_rule_is_priced_as_its_chunked_form_multiplies():
    c, key, value = CHUNK, 24, 40
    q, k = torch.randn(2, c, key)
    v, beta, s = torch.randn(c, value), torch.rand(c, 1), torch.randn(key, value)

    def chunk(q, k, v, beta, s):
        new = wy(k, v, beta, s)
        return q @ s + (q @ k.T).tril() @ new, s + k.T @ new

    forward, backward = counted(chunk, q, k, v, beta, s)
    # The kernel keeps its inputs: before the gradients it makes the state and both squares again.
    again, _ = counted(
        lambda q, k, v, beta, s: ((q @ k.T).tril(), s + k.T @ wy(k, v, beta, s)), q, k, v, beta, s
    )
    heads = {"heads": 1, "value_heads": 1, "key_dim": key, "value_dim": value}
    for operator, gate in (("kda", "per_channel"), ("gated_delta_rule", "per_head")):
        call = mixed(operator, gate=gate, **heads)
        assert call.forward.flops.at(c) == forward
        assert call.backward.flops.at(c) == backward + again


@pytest.mark.parametrize("operator", ["lightning", "mamba2"])
def test_linear_attention_is_priced_as_its_chunked_form_multiplies(operator):
    c, heads, groups, key, value = 32, 6, 6 if operator == "lightning" else 2, 24, 40
    q, k = torch.randn(2, groups, c, key)
    v, s = torch.randn(heads, c, value), torch.randn(heads, key, value)

    def square(q, k):
        return (q @ k.mT).tril()

    def state(k, v, s):
        return s + k.repeat_interleave(heads // groups, 0).mT @ v

    def chunk(q, k, v, s):
        inside = square(q, k).repeat_interleave(heads // groups, 0) @ v
        return inside + q.repeat_interleave(heads // groups, 0) @ s, state(k, v, s)

    forward, backward = counted(chunk, q, k, v, s)
    again = counted(lambda q, k, v, s: (square(q, k), state(k, v, s)), q, k, v, s)[0]
    shape = {"value_heads": heads, "key_dim": key, "value_dim": value, "chunk_size": c}
    call = mixed(operator, heads=groups, **shape)
    assert call.forward.flops.at(c) == forward
    assert call.backward.flops.at(c) == backward + again


def test_hyper_connections_are_priced_as_their_code_multiplies():
    from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HyperConnection

    config = DeepseekV4Config(hidden_size=96, hc_mult=4)
    module = DeepseekV4HyperConnection(config)
    nn.init.normal_(module.fn).requires_grad_(False)
    nn.init.zeros_(module.base).requires_grad_(False)
    nn.init.ones_(module.scale).requires_grad_(False)

    def site(streams, attended):
        post, comb, collapsed = module(streams)
        return post.unsqueeze(-1) * attended.unsqueeze(-2) + comb.mT @ streams, collapsed

    tokens = 5
    forward, backward = counted(site, torch.randn(1, tokens, 4, 96), torch.randn(1, tokens, 96))
    call = residual_site("attn_hc", module, "other", [0], config)
    assert call.forward.flops.at(tokens) == forward
    assert call.backward.flops.at(tokens) == backward


def test_attention_residuals_of_inkling_are_priced_as_their_code_multiplies():
    from transformers.models.inkling2.configuration_inkling2 import Inkling2TextConfig
    from transformers.models.inkling2.modeling_inkling2 import Inkling2BlockAttentionResidual

    config = Inkling2TextConfig(hidden_size=96, n_layers_per_attn_res_block=2)
    config._attn_implementation = "eager"
    module = Inkling2BlockAttentionResidual(config, num_queries=3).requires_grad_(False)
    # Before the mixer of layer 3: the starts of two blocks, and the running sum.
    states = torch.randn(1, 5, 2, 96), torch.randn(1, 5, 96)
    forward, backward = counted(module, *states)
    call = residual_site("attention_input", module, "other", [3], config)
    assert call.forward.flops.at(5) == forward
    assert call.backward.flops.at(5) == backward + forward / 2  # a fused one makes scores again


def test_gates_of_rg_lru_are_priced_as_their_code_multiplies():
    from transformers.models.recurrent_gemma.configuration_recurrent_gemma import (
        RecurrentGemmaConfig,
    )
    from transformers.models.recurrent_gemma.modeling_recurrent_gemma import RecurrentGemmaRglru

    config = RecurrentGemmaConfig(hidden_size=64, lru_width=64, num_attention_heads=4)
    module = RecurrentGemmaRglru(config)
    for parameter in module.parameters():
        nn.init.normal_(parameter).requires_grad_(False)
    tokens, positions = 6, torch.arange(6)[None]
    forward, backward = counted(lambda x: (module(x, positions),), torch.randn(1, tokens, 64))
    call = mixed("rg_lru", channels=64, heads=4)
    assert call.forward.flops.at(tokens) == forward
    assert call.backward.flops.at(tokens) == backward + forward  # makes its gates again


def test_short_convolution_of_torch_is_counted_as_priced():
    from analyzers.costs.linear import short_convolution

    module = nn.Conv1d(48, 48, 4, groups=48, bias=False).requires_grad_(False)
    forward, backward = counted(lambda x: (F.conv1d(x, module.weight, groups=48),), _padded(16))
    call = short_convolution(module, "mixer")
    assert call.forward.flops.at(16) == forward
    assert call.backward.flops.at(16) == backward


def _padded(tokens: int) -> torch.Tensor:
    return torch.randn(1, 48, tokens + 3)


def operators_of_mixers() -> set[str]:
    """Every operator that code here gives a Mixer: its second argument, by value or by name."""
    found: set[str] = set()
    for path in (ROOT / "analyzers").rglob("*.py"):
        tree = ast.parse(path.read_text())
        strings: dict[str, set[str]] = {}  # that a name may stand for
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign):
                names, values = node.targets, [node.value] * len(node.targets)
                if isinstance(names[0], ast.Tuple) and isinstance(node.value, ast.Tuple):
                    names, values = names[0].elts, node.value.elts
                for name, value in zip(names, values, strict=True):
                    strings.setdefault(getattr(name, "id", ""), set()).update(literals(value))
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Mixer":
                named = [k.value for k in node.keywords if k.arg == "operator"]
                operator = named[0] if named else node.args[1]
                found |= literals(operator) | strings.get(getattr(operator, "id", ""), set())
    return found


def literals(node: ast.AST) -> set[str]:
    """Strings that an expression may be: a constant, or either side of a choice."""
    if isinstance(node, ast.IfExp):
        return literals(node.body) | literals(node.orelse)
    return {node.value} if isinstance(node, ast.Constant) and isinstance(node.value, str) else set()


def test_every_operator_that_is_recognised_has_a_formula():
    made = operators_of_mixers()
    assert made >= {"kda", "gated_delta_rule", "mamba2", "sparse_attention", "other_mixer"}
    assert made <= FORMULAS.keys() | NO_FORMULA
