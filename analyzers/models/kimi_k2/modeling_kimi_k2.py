"""Kimi-K2's models are DeepSeek-V3's, under its own config."""

from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3ForCausalLM,
    DeepseekV3Model,
)

from analyzers.models.kimi_k2.configuration_kimi_k2 import KimiK2Config


class KimiK2Model(DeepseekV3Model):
    config_class = KimiK2Config


class KimiK2ForCausalLM(DeepseekV3ForCausalLM):
    config_class = KimiK2Config


__all__ = ["KimiK2ForCausalLM", "KimiK2Model"]
