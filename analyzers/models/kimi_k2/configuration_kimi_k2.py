"""Configuration of Kimi-K2: DeepSeek-V3's, with the sizes of the released model as defaults."""

from huggingface_hub.dataclasses import strict
from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config


@strict
class KimiK2Config(DeepseekV3Config):
    model_type = "kimi_k2"

    vocab_size: int = 163840
    num_attention_heads: int = 64
    num_key_value_heads: int | None = 64
    n_routed_experts: int = 384
    routed_scaling_factor: float = 2.827
    n_group: int | None = 1
    topk_group: int | None = 1
    first_k_dense_replace: int | None = 1
    max_position_embeddings: int = 131072
    num_mtp_layers: int = 0


__all__ = ["KimiK2Config"]
