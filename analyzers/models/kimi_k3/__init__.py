"""The text model of Kimi-K3 in transformers' own form, which transformers 5.24 does not have.

`register()` makes transformers' Auto classes build it from a released `config.json` and load it from
a released checkpoint. The vision tower is not built; its tensors are left out with a note.
"""

from __future__ import annotations


def register() -> None:
    """Registers configs, models and the checkpoint conversion with transformers; may be repeated.

    `AutoModelForCausalLM` builds the text-only `KimiK3ForCausalLM` for the top-level `kimi_k3` config.
    """
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
    from transformers.conversion_mapping import register_checkpoint_conversion_mapping
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING

    from analyzers.models.kimi_k3.configuration_kimi_k3 import KimiK3Config, KimiK3TextConfig
    from analyzers.models.kimi_k3.conversion import checkpoint_conversion
    from analyzers.models.kimi_k3.modeling_kimi_k3 import KimiK3ForCausalLM, KimiK3TextModel

    for config in (KimiK3Config, KimiK3TextConfig):
        AutoConfig.register(config.model_type, config, exist_ok=True)
    AutoModel.register(KimiK3TextConfig, KimiK3TextModel, exist_ok=True)
    AutoModelForCausalLM.register(KimiK3TextConfig, KimiK3ForCausalLM, exist_ok=True)
    # The Auto classes descend to text_config by themselves when the model class asks for a text config;
    # their own `register` refuses such a pair, the mappings do not.
    for mapping, model in (
        (MODEL_MAPPING, KimiK3TextModel),
        (MODEL_FOR_CAUSAL_LM_MAPPING, KimiK3ForCausalLM),
    ):
        mapping.register(KimiK3Config, model, exist_ok=True)  # pyright: ignore[reportArgumentType]
    register_checkpoint_conversion_mapping(
        KimiK3TextConfig.model_type, checkpoint_conversion(), overwrite=True
    )


__all__ = ["register"]
