"""Kimi-K2, which is DeepSeek-V3 in other sizes; transformers 5.24 knows it only inside Kimi-K2.5."""

from __future__ import annotations


def register() -> None:
    """Registers config, models and DeepSeek-V3's checkpoint conversion; may be repeated."""
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
    from transformers.conversion_mapping import (
        get_checkpoint_conversion_mapping,
        register_checkpoint_conversion_mapping,
    )

    from analyzers.models.kimi_k2.configuration_kimi_k2 import KimiK2Config
    from analyzers.models.kimi_k2.modeling_kimi_k2 import KimiK2ForCausalLM, KimiK2Model

    AutoConfig.register(KimiK2Config.model_type, KimiK2Config, exist_ok=True)
    AutoModel.register(KimiK2Config, KimiK2Model, exist_ok=True)
    AutoModelForCausalLM.register(KimiK2Config, KimiK2ForCausalLM, exist_ok=True)
    conversion = get_checkpoint_conversion_mapping("deepseek_v3") or []
    register_checkpoint_conversion_mapping(KimiK2Config.model_type, conversion, overwrite=True)


__all__ = ["register"]
