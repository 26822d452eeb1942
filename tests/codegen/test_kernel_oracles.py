"""The plain torch form against what others wrote: flash-linear-attention's naive functions and
transformers' own.

The former are read from `.oracles`, where this puts them:

    pip install --no-deps --target .oracles fla-core==0.6.0

In the environment itself transformers would call that package's Triton kernels, on a CPU too.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import softplus
from transformers import MiniMaxConfig
from transformers.models.kimi_linear.modeling_kimi_linear import (
    KimiLinearForgetGate,
    chunk_kimi_delta_attention,
)
from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan
from transformers.models.minimax.modeling_minimax import MiniMaxLightningAttention
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

from analyzers.models.kimi_k3.attention import KimiK3ForgetGate
from tests.codegen.kernel_samples import arguments, form_of, load, outputs_and_gradients

ORACLES = Path(__file__).parents[2] / ".oracles"


def naive(operator: str):
    """The naive functions of an operator of flash-linear-attention."""
    path = ORACLES / "fla" / "ops" / operator / "naive.py"
    if not path.exists():
        pytest.skip("pip install --no-deps --target .oracles fla-core==0.6.0")
    return load(path)


def assert_the_same(form, theirs, given: dict, **options):
    """`theirs` takes and returns what our function does."""
    ours = outputs_and_gradients(form.kernel, given, output_final_state=True, **options)
    torch.testing.assert_close(ours, outputs_and_gradients(theirs, given), atol=3e-5, rtol=3e-4)


# --- flash-linear-attention -------------------------------------------------------------------


def fla_linear_attention(q, k, v, initial_state):
    return naive("linear_attn").naive_recurrent_linear_attn(
        q, k, v, None, initial_state, output_final_state=True
    )


def fla_simple_gla(q, k, v, g, initial_state):
    return naive("simple_gla").naive_chunk_simple_gla(
        q, k, v, g, initial_state, output_final_state=True
    )


def fla_constant_decay(q, k, v, g_gamma, initial_state):
    return fla_simple_gla(q, k, v, g_gamma.expand(v.shape[:3]), initial_state)


def fla_gla(q, k, v, g, initial_state):
    return naive("gla").naive_recurrent_gla(q, k, v, g, initial_state, output_final_state=True)


def fla_delta_rule(q, k, v, beta, initial_state):
    q, k, v, beta = (x.transpose(1, 2) for x in (q, k, v, beta))
    o, state = naive("delta_rule").delta_rule_recurrence(q, k, v, beta, initial_state)
    return o.transpose(1, 2), state


def fla_gated_delta_rule(q, k, v, g, beta, initial_state):
    return naive("gated_delta_rule").naive_recurrent_gated_delta_rule(
        q, k, v, beta, g, initial_state=initial_state, output_final_state=True
    )


def fla_kda(q, k, v, g, beta, initial_state):
    return naive("kda").naive_recurrent_kda(
        q, k, v, g, beta, None, initial_state, output_final_state=True
    )


FLA = {
    "linear_attention": fla_linear_attention,
    "lightning": fla_constant_decay,
    "simple_gla": fla_simple_gla,
    "mamba2": fla_simple_gla,
    "gla": fla_gla,
    "delta_rule": fla_delta_rule,
    "gated_delta_rule": fla_gated_delta_rule,
    "kda": fla_kda,
}


@pytest.mark.parametrize("member", FLA)
def test_matches_the_naive_function_of_flash_linear_attention(member, tmp_path):
    form = form_of(tmp_path, member)
    given = arguments(form.spec, form.widths, (67,), batch=2, heads=2, value_heads=2)
    assert_the_same(form, FLA[member], given)


def test_a_beta_per_channel_is_the_preconditioned_delta_rule(tmp_path):
    """Preconditioned DeltaNet, arXiv:2604.21100: beta_t is the scalar strength times a diagonal
    preconditioner of the keys seen so far."""
    form = form_of(tmp_path, "kda_channel_beta")
    x = arguments(form.spec, form.widths, (23,), heads=2, value_heads=2)
    torch.manual_seed(3)
    forget, strength = -softplus(torch.randn(1, 23, 2)), x.pop("beta")[..., 0]
    energy, scales = torch.zeros(1, 2, 20), []
    for t in range(23):
        energy = forget[:, t, :, None].exp() * energy + 0.5 * x["k"][:, t] ** 2
        distance = (energy + 1e-6).log() + 0.2
        scales.append(1.5 ** (-distance / (1 + distance.abs())))
    beta = strength[..., None] * torch.stack(scales, 1)
    o, state = form.kernel(**x, beta=beta, output_final_state=True)
    want, last, _ = naive("precond_kda").naive_recurrent_precond_kda(
        x["q"],
        x["k"],
        x["v"],
        x["g"],
        forget,
        torch.full_like(forget, 0.5),
        strength,
        initial_state=x["initial_state"],
        output_final_state=True,
    )
    torch.testing.assert_close(o, want)
    torch.testing.assert_close(state, last)


def test_retention_is_a_constant_decay(tmp_path):
    form = form_of(tmp_path, "lightning")
    x = arguments(form.spec, form.widths, (67,), heads=4, value_heads=4, state=False)
    x["g_gamma"] = (1 - 2.0 ** (-5 - torch.arange(4.0))).log()
    want = naive("retention").naive_retention(*(x[n].transpose(1, 2) for n in "qkv"))
    torch.testing.assert_close(form.kernel(**x)[0], want.transpose(1, 2))


# --- The gate inside the kernel ---------------------------------------------------------------

BOUNDS = pytest.mark.parametrize("lower_bound", [None, -5.0], ids=["unbounded", "bounded"])


def raw_gates(form, **options) -> dict:
    """Arguments with a raw gate, A_log and dt_bias of two heads."""
    x = arguments(form.spec, form.widths, (37,), heads=2, value_heads=2, **options)
    generator = torch.Generator().manual_seed(3)
    x["g"] = torch.randn(x["g"].shape, generator=generator)
    x["A_log"] = torch.rand(2, generator=generator)
    x["dt_bias"] = torch.randn(40, generator=generator)
    return x


@BOUNDS
def test_the_gate_is_that_of_the_reference(tmp_path, lower_bound):
    form = form_of(tmp_path, "kda")
    options = {"use_gate_in_kernel": True, "lower_bound": lower_bound}
    assert_the_same(form, partial(form.reference, **options), raw_gates(form), **options)


@BOUNDS
def test_the_gate_is_that_of_transformers_models(tmp_path, lower_bound):
    """Kimi-Linear's module and, bounded, Kimi-K3's: gradients of both parameters too."""
    form = form_of(tmp_path, "kda")
    kind = KimiLinearForgetGate if lower_bound is None else KimiK3ForgetGate
    module = kind.__new__(kind)
    nn.Module.__init__(module)
    module.f_a_proj = module.f_b_proj = nn.Identity()
    module.A_log, module.dt_bias = nn.Parameter(torch.empty(0)), nn.Parameter(torch.empty(0))
    module.head_dim, module.num_heads, module.lower_bound = 20, 2, lower_bound

    def theirs(g, A_log, dt_bias, **others):
        shape = (1, 1, 2, 1) if lower_bound is None else (2,)
        parameters = {"A_log": A_log.view(shape), "dt_bias": dt_bias}
        g = torch.func.functional_call(module, parameters, g.flatten(2))
        return form.reference(**others, g=g)

    options = {"use_gate_in_kernel": True, "lower_bound": lower_bound}
    assert_the_same(form, theirs, raw_gates(form), **options)


def test_a_gate_without_bias(tmp_path):
    form = form_of(tmp_path, "kda")
    x = raw_gates(form) | {"use_gate_in_kernel": True}
    none, zero = (form.kernel(**x | {"dt_bias": b})[0] for b in (None, torch.zeros(40)))
    assert torch.equal(none, zero)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"A_log": None}, "needs A_log"),
        ({"use_gate_in_kernel": False}, "need it"),
        ({"lower_bound": 1.0}, "below 0, got 1.0"),
        ({"A_log": torch.zeros(1, 1, 2, 1)}, "A_log must be"),
        ({"dt_bias": torch.zeros(2, 20)}, "dt_bias must be"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_a_gate_that_does_not_fit_is_refused(tmp_path, change, message):
    form = form_of(tmp_path, "kda")
    with pytest.raises(ValueError, match=message):
        form.kernel(**raw_gates(form) | {"use_gate_in_kernel": True} | change)


# --- transformers -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("member", "modules_own", "value_heads"),
    [
        ("kda", chunk_kimi_delta_attention, 2),
        ("gated_delta_rule", torch_chunk_gated_delta_rule, 4),
    ],
    ids=["kimi_linear", "qwen3_next"],
)
def test_matches_the_function_of_the_module(tmp_path, member, modules_own, value_heads):
    form = form_of(tmp_path, member)
    given = arguments(form.spec, form.widths, (70,), batch=2, heads=2, value_heads=value_heads)

    def theirs(q, k, v, **others):
        return modules_own(q, k, v, **others, output_final_state=True, use_qk_l2norm_in_kernel=True)

    assert_the_same(form, theirs, given, use_qk_l2norm_in_kernel=True)


def test_matches_mamba2(tmp_path):
    """C, B, x dt and A dt are q, k, v and g; its states are [V, K]."""
    form = form_of(tmp_path, "mamba2")
    given = arguments(form.spec, form.widths, (70,), batch=2, heads=2, value_heads=4)
    given.pop("g")
    torch.manual_seed(3)
    given["dt"], given["A"] = torch.rand(2, 70, 4), -torch.rand(4)

    def ours(v, dt, A, **others):
        return form.kernel(v=v * dt[..., None], g=A * dt, scale=1.0, **others)

    def theirs(q, k, v, dt, A, initial_state):
        o, state = mamba2_chunk_scan(
            v, dt, A, k, q, 16, initial_states=initial_state.mT, return_final_states=True
        )
        return o, state.mT

    mine = outputs_and_gradients(ours, given, output_final_state=True)
    torch.testing.assert_close(mine, outputs_and_gradients(theirs, given), atol=3e-5, rtol=3e-4)


def test_matches_minimax(tmp_path):
    """Its lightning attention, taken out of the module: identity projections and no output gate."""
    form = form_of(tmp_path, "lightning", (16, 16))
    config = MiniMaxConfig(
        hidden_size=96,
        num_attention_heads=2,
        head_dim=16,
        num_hidden_layers=4,
        block_size=8,
        hidden_act="silu",
        layer_types=["linear_attention"] * 4,
    )
    module = MiniMaxLightningAttention(config, layer_idx=1)
    module.act_fn = module.qkv_proj = module.norm = module.out_proj = nn.Identity()
    nn.init.zeros_(module.output_gate.weight)
    torch.manual_seed(3)
    packed = torch.randn(2, 29, 96)
    q, k, v = packed.view(2, 29, 2, 48).split(16, -1)
    with torch.no_grad():
        want = module(packed, None, None)[0]
    got, _ = form.kernel(q, k, v, g_gamma=-module.slope_rate.flatten(), scale=1.0)
    # The gate, a sigmoid of zero, halves the output.
    torch.testing.assert_close(0.5 * got.flatten(2), want)
