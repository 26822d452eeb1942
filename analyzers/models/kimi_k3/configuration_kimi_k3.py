# ruff: noqa: RUF012  (class attributes as transformers spells them)
"""Configuration of Kimi-K3, read from the released `config.json` as it stands.

The released `text_config` carries model_type `kimi_linear`, which transformers maps to the smaller
Kimi-Linear; here it becomes a `KimiK3TextConfig`, which adds the latent experts, SiTU, the bounded
forget gate, the output gates and the block attention residuals.
"""

from typing import Any

from huggingface_hub.dataclasses import strict
from transformers.configuration_utils import PreTrainedConfig, SubConfigSpec
from transformers.models.kimi_linear.configuration_kimi_linear import KimiLinearConfig


def _hold_back_mxfp4(kwargs: dict[str, Any]) -> dict[str, Any] | None:
    """Takes an MXFP4 `quantization_config` out of `kwargs`; any other format stays for transformers.

    The conversion mapping unpacks MXFP4 experts while loading, so no quantizer may claim the model,
    and a model saved afterwards is not packed and must not say that it is.
    """
    quantization = kwargs.get("quantization_config")
    if isinstance(quantization, dict) and quantization.get("format") == "mxfp4-pack-quantized":
        return kwargs.pop("quantization_config")
    return None


@strict
class KimiK3TextConfig(KimiLinearConfig):
    r"""
    The released `linear_attn_config` is read into `linear_head_dim`, `linear_num_heads`,
    `linear_conv_kernel_dim`, `linear_lower_bound`, `linear_full_rank_gate` and, with its 1-indexed layer
    lists, `layer_types`; an explicit `layer_types` or `mlp_layer_types` wins.

    linear_lower_bound (`float`, *optional*, defaults to -5.0):
        Lower bound of the log decay, `lower_bound * sigmoid(exp(A_log) * (f + dt_bias))`. `None` is
        Kimi-Linear's unbounded `-exp(A_log) * softplus(f + dt_bias)`.
    linear_full_rank_gate (`bool`, *optional*, defaults to `True`):
        Whether the output gate of linear attention is one projection (`g_proj`) or two of low rank.
    mla_use_output_gate (`bool`, *optional*, defaults to `True`):
        Whether latent attention multiplies its output with `sigmoid(g_proj(x))`.
    routed_expert_hidden_size (`int`, *optional*, defaults to 3584):
        Width in which the routed experts work. `None` is `hidden_size`, without projections or norm.
    latent_moe_use_norm (`bool`, *optional*, defaults to `True`):
        Whether the sum of the routed experts is normalised before it is projected up.
    attn_res_block_size (`int`, *optional*, defaults to 12):
        Number of layers in one block of the attention residuals.
    activation_situ_beta, activation_situ_linear_beta (`float`):
        Bounds of the two halves of SiTU-GLU.
    dsa_config (`dict`, *optional*):
        The top-k indexer of Kimi-K3.1-Pro, on every layer of full attention: `index_n_heads`,
        `index_head_dim`, `index_topk`, `index_rope` (only false) and the 1-indexed `dsa_layers`, which must
        equal `full_attn_layers`. No config of that model was at hand: what it says is documented, the names
        of the keys are a guess after DeepSeek-V3.2's.
    index_n_heads, index_head_dim, index_topk (`int`, *optional*):
        Read from `dsa_config`.
    checkpoint_quantization_config (`dict`, *optional*):
        How the experts of the checkpoint are packed; the loader unpacks them.
    """

    model_type = "kimi_k3_text"
    base_config_key = "text_config"
    # A stage begins at one of `pipeline_cuts`, and is handed the bank of block starts too.
    base_model_pp_plan = {
        "embed_tokens": (["input_ids"], ["inputs_embeds"]),
        "layers": (["hidden_states", "bank", "attention_mask"], ["hidden_states", "bank"]),
        "output_attn_res": (["hidden_states", "bank"], ["hidden_states"]),
        "norm": (["hidden_states"], ["hidden_states"]),
    }
    attribute_map = {
        "norm_topk_prob": "moe_renormalize",
        "n_group": "num_expert_group",
        "num_local_experts": "num_experts",
        "num_experts_per_tok": "num_experts_per_token",
        "n_shared_experts": "num_shared_experts",
    }

    hidden_size: int = 7168
    intermediate_size: int = 33792
    moe_intermediate_size: int = 3072
    num_hidden_layers: int = 93
    num_attention_heads: int = 96
    num_key_value_heads: int | None = None
    n_shared_experts: int = 2
    routed_scaling_factor: float = 1.0
    q_lora_rank: int | None = 1536
    num_experts_per_tok: int | None = 16
    num_local_experts: int = 896
    hidden_act: str = "situ"
    linear_num_heads: int = 96

    linear_lower_bound: float | None = -5.0
    linear_full_rank_gate: bool = True
    mla_use_nope: bool = True
    mla_use_output_gate: bool = True
    routed_expert_hidden_size: int | None = 3584
    latent_moe_use_norm: bool = True
    attn_res_block_size: int = 12
    activation_situ_beta: float = 4.0
    activation_situ_linear_beta: float = 25.0
    moe_router_activation_func: str = "sigmoid"
    first_k_dense_replace: int = 1
    moe_layer_freq: int = 1
    dsa_config: dict | None = None
    index_n_heads: int | None = None
    index_head_dim: int | None = None
    index_topk: int | None = None
    checkpoint_quantization_config: dict | None = None

    def __post_init__(self, **kwargs):
        # As released: model_type kimi_linear, and the names of code files beside the checkpoint.
        for released in ("model_type", "auto_map"):
            kwargs.pop(released, None)
        if (quantization := _hold_back_mxfp4(kwargs)) is not None:
            self.checkpoint_quantization_config = quantization
        linear = kwargs.get("linear_attn_config") or {}
        self.linear_lower_bound = linear.get("gate_lower_bound", self.linear_lower_bound)
        self.linear_full_rank_gate = linear.get("use_full_rank_gate", self.linear_full_rank_gate)
        if self.layer_types is None:
            self.layer_types = self._layer_types(linear)
        if self.dsa_config is not None:
            self._read_indexer(self.dsa_config)
        if self.mlp_layer_types is None:
            self.mlp_layer_types = [
                "sparse"
                if i >= self.first_k_dense_replace and i % self.moe_layer_freq == 0
                else "dense"
                for i in range(self.num_hidden_layers)
            ]
        super().__post_init__(**kwargs)

    def _layer_types(self, linear: dict[str, Any]) -> list[str]:
        """The mixer of every layer, from the released 1-indexed lists or, without them, three to one."""
        number = self.num_hidden_layers
        full, kda = linear.get("full_attn_layers"), linear.get("kda_layers")
        if full is None or kda is None:
            full = [i for i in range(1, number + 1) if i % 4 == 0 or i == number]
            kda = [i for i in range(1, number + 1) if i not in set(full)]
        if sorted([*full, *kda]) != list(range(1, number + 1)):
            raise ValueError(
                "linear_attn_config: full_attn_layers and kda_layers must name every layer from 1 to "
                f"num_hidden_layers ({number}) once"
            )
        full = set(full)
        return ["full_attention" if i + 1 in full else "linear_attention" for i in range(number)]

    def _read_indexer(self, dsa: dict[str, Any]) -> None:
        """Turns the layers of full attention into layers of attention over selected keys."""
        for field in ("index_n_heads", "index_head_dim", "index_topk"):
            value = dsa.get(field)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"dsa_config: {field} must be a positive integer, found {value!r}")
            setattr(self, field, value)
        if dsa.get("index_rope"):
            raise ValueError("dsa_config: index_rope is not supported, the model has no positions")
        if self.q_lora_rank is None:
            raise ValueError("dsa_config: the indexer reads the query latent, so needs q_lora_rank")
        types = self.layer_types or []
        full = [i for i, kind in enumerate(types, 1) if kind != "linear_attention"]
        if sorted(dsa.get("dsa_layers", full)) != full:
            raise ValueError(f"dsa_config: dsa_layers must be the layers of full attention, {full}")
        self.layer_types = [
            kind if kind == "linear_attention" else "indexed_attention" for kind in types
        ]

    @property
    def pipeline_cuts(self) -> list[int]:
        """Layers (0-indexed) at which a pipeline stage may begin besides the first: there the running
        sum becomes an entry of the bank and a new one begins."""
        return list(
            range(self.attn_res_block_size, self.num_hidden_layers, self.attn_res_block_size)
        )

    def validate_architecture(self):
        """Part of `@strict`'s validation: refuses what the modelling code does not compute."""
        for field in ("layer_types", "mlp_layer_types"):
            kinds = getattr(self, field)
            if kinds is not None and len(kinds) != self.num_hidden_layers:
                raise ValueError(
                    f"{field}: {len(kinds)} entries for {self.num_hidden_layers} layers"
                )
        if "indexed_attention" in (self.layer_types or []) and self.dsa_config is None:
            raise ValueError("layer_types: indexed_attention needs a dsa_config")
        if self.attn_res_block_size < 1:
            raise ValueError(f"attn_res_block_size: {self.attn_res_block_size} is not positive")
        for field, only in (
            ("hidden_act", "situ"),
            ("moe_router_activation_func", "sigmoid"),
            ("mla_use_nope", True),
        ):
            if getattr(self, field) != only:
                raise ValueError(
                    f"{field}: {getattr(self, field)!r} is not supported, only {only!r}"
                )


@strict
class KimiK3Config(PreTrainedConfig):
    r"""
    The released top-level configuration: a `text_config`, and a `vision_config` that is kept as data.
    """

    model_type = "kimi_k3"
    sub_configs_defaults = {"text_config": SubConfigSpec(config_class=KimiK3TextConfig)}

    text_config: dict | PreTrainedConfig | None = None
    vision_config: dict | None = None
    tie_word_embeddings: bool = False
    checkpoint_quantization_config: dict | None = None

    def __post_init__(self, **kwargs):
        if (quantization := _hold_back_mxfp4(kwargs)) is not None:
            self.checkpoint_quantization_config = quantization
        if isinstance(self.text_config, dict):
            # Token ids stand at the top level; the text model needs them too.
            ids = {
                k: v
                for k, v in kwargs.items()
                if k in ("pad_token_id", "bos_token_id", "eos_token_id")
            }
            self.text_config = {**ids, **self.text_config}
        super().__post_init__(**kwargs)


__all__ = ["KimiK3Config", "KimiK3TextConfig"]
