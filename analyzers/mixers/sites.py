"""Where the models of transformers use linear attention, and what stands around it: data.

The analysis finds sites by the structure of modules, so that a model's own code has them too; this
is the inventory that it is checked against, and that the installation of kernels is tested on.
"""

from __future__ import annotations

from dataclasses import dataclass

from analyzers.schema import FORWARD

CONVOLUTION = "causal_conv1d_fn"


@dataclass(frozen=True)
class MixerSite:
    """A mixer of one model type. Tensors are [B, T, heads, width], gates in log space; the
    convolution is [B, channels, T]."""

    model_type: str
    module_class: str
    operator: str
    function: str
    """Module-global name that the forward calls, or `forward` where it spells the operator out."""
    norm: str | None = None
    """Class of the gated norm after it."""
    convolution: str | None = CONVOLUTION
    """Function of the short convolution before it."""


def _kda(model_type: str, module_class: str, norm: str) -> MixerSite:
    return MixerSite(model_type, module_class, "kda", "chunk_kimi_delta_attention", norm)


def _delta(model_type: str, prefix: str) -> MixerSite:
    return MixerSite(
        model_type,
        f"{prefix}GatedDeltaNet",
        "gated_delta_rule",
        "torch_chunk_gated_delta_rule",
        f"{prefix}RMSNormGated",
    )


def _mamba2(model_type: str, module_class: str, norm: str) -> MixerSite:
    return MixerSite(model_type, module_class, "mamba2", "mamba2_chunk_scan", norm)


def _convolution(model_type: str, module_class: str) -> MixerSite:
    return MixerSite(model_type, module_class, "short_convolution", CONVOLUTION)


SITES = (
    _kda("kimi_linear", "KimiLinearDeltaAttention", "KimiLinearRMSNormGated"),
    _kda("kimi_k3", "KimiK3DeltaAttention", "KimiLinearRMSNormGated"),
    _kda("bailing_hybrid", "BailingHybridDeltaAttention", "BailingHybridRMSNormGated"),
    _kda("glm5_next_text", "Glm5NextTextLinearAttention", "Glm5NextTextRMSNormGated"),
    _delta("qwen3_next", "Qwen3Next"),
    _delta("qwen3_5_text", "Qwen3_5"),
    _delta("qwen3_5_moe_text", "Qwen3_5Moe"),
    _delta("qwen4_exp_text", "Qwen4ExpText"),
    _delta("olmo_hybrid", "OlmoHybrid"),
    _delta("lara_mini", "LaraMini"),
    _mamba2("mamba2", "Mamba2Mixer", "MambaRMSNormGated"),
    _mamba2("bamba", "BambaMixer", "BambaRMSNormGated"),
    _mamba2("falcon_h1", "FalconH1Mixer", "FalconH1RMSNormGated"),
    _mamba2("granitemoehybrid", "GraniteMoeHybridMambaLayer", "GraniteMoeHybridRMSNormGated"),
    _mamba2("nemotron_h", "NemotronHMamba2Mixer", "NemotronHRMSNormGated"),
    _mamba2("zamba2", "Zamba2MambaMixer", "Zamba2RMSNormGated"),
    MixerSite("minimax", "MiniMaxLightningAttention", "lightning", FORWARD, convolution=None),
    # A decay per channel and state is not in the family; the convolution before it is.
    MixerSite("mamba", "MambaMixer", "selective_scan", "mamba_selective_scan"),
    MixerSite("falcon_mamba", "FalconMambaMixer", "selective_scan", "mamba_selective_scan"),
    MixerSite("jamba", "JambaMambaMixer", "selective_scan", "mamba_selective_scan"),
    MixerSite("zamba", "ZambaMambaMixer", "selective_scan", "mamba_selective_scan"),
    _convolution("lfm2", "Lfm2ShortConv"),
    _convolution("lfm2_moe", "Lfm2MoeShortConv"),
    _convolution("lfm3", "Lfm3ShortConv"),
    _convolution("inkling_text", "InklingShortConvolution"),
    _convolution("inkling2_text", "Inkling2ShortConvolution"),
    _convolution("inkling2_loop_text", "Inkling2LoopShortConvolution"),
)
