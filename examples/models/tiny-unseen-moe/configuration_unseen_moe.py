"""Configuration of Unseen-MoE."""

from transformers import PreTrainedConfig


class UnseenMoeConfig(PreTrainedConfig):
    """Sizes of a hybrid mixture-of-experts decoder.

    Every `full_attention_interval`-th layer is grouped-query softmax attention, the others are
    gated linear attention; the first `first_k_dense_replace` layers have a dense feed-forward.
    """

    model_type = "unseen_moe"

    def __init__(
        self,
        vocab_size: int = 512,
        hidden_size: int = 128,
        num_hidden_layers: int = 8,
        full_attention_interval: int = 4,
        num_attention_heads: int = 4,
        num_key_value_heads: int = 2,
        head_dim: int = 32,
        rope_theta: float = 10000.0,
        linear_num_heads: int = 4,
        linear_key_head_dim: int = 16,
        linear_value_head_dim: int = 32,
        linear_gate_rank: int = 16,
        intermediate_size: int = 256,
        first_k_dense_replace: int = 1,
        num_experts: int = 16,
        num_experts_per_tok: int = 4,
        num_shared_experts: int = 1,
        moe_intermediate_size: int = 48,
        hidden_act: str = "silu",
        rms_norm_eps: float = 1e-6,
        max_position_embeddings: int = 4096,
        initializer_range: float = 0.02,
        use_cache: bool = False,
        **kwargs,
    ):
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.num_hidden_layers = num_hidden_layers
        self.full_attention_interval = full_attention_interval
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads
        self.head_dim = head_dim
        self.rope_theta = rope_theta
        self.linear_num_heads = linear_num_heads
        self.linear_key_head_dim = linear_key_head_dim
        self.linear_value_head_dim = linear_value_head_dim
        self.linear_gate_rank = linear_gate_rank
        self.intermediate_size = intermediate_size
        self.first_k_dense_replace = first_k_dense_replace
        self.num_experts = num_experts
        self.num_experts_per_tok = num_experts_per_tok
        self.num_shared_experts = num_shared_experts
        self.moe_intermediate_size = moe_intermediate_size
        self.hidden_act = hidden_act
        self.rms_norm_eps = rms_norm_eps
        self.max_position_embeddings = max_position_embeddings
        self.initializer_range = initializer_range
        self.use_cache = use_cache
        super().__init__(**kwargs)

    def is_full_attention(self, layer_idx: int) -> bool:
        return (layer_idx + 1) % self.full_attention_interval == 0
