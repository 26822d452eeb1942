"""Block attention residuals: what a layer reads is a mix of the running sum and of earlier ones.

Apart from the modelling file also because transformers looks there for attention classes and takes
a model whose `...Attention...` modules do not use its attention interface for one that cannot.
"""

import torch
from torch import nn

from analyzers.models.kimi_k3.configuration_kimi_k3 import KimiK3TextConfig


def block_attention_residual(
    hidden_states: torch.Tensor | None,
    bank: torch.Tensor,
    norm_weight: torch.Tensor,
    proj_weight: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """`sum_j softmax_j(w . RMSNorm(v_j)) v_j` over the block starts and the running sum, in float32.

    `hidden_states` [B, T, D] is the running sum of the block (None at its start), `bank` [B, T, M, D]
    the starts of the blocks so far, `norm_weight` [D], `proj_weight` [1, D]. Returns [B, T, D].
    """
    if hidden_states is not None:
        bank = torch.cat([bank, hidden_states.unsqueeze(2)], dim=2)
    values = bank.float()
    scores = (values * (norm_weight.float() * proj_weight.float())).sum(-1)
    scores = scores * torch.rsqrt(values.pow(2).mean(-1) + eps)
    return (scores.softmax(-1).unsqueeze(-1) * values).sum(2).to(bank.dtype)


class KimiK3AttentionResidual(nn.Module):
    """One site of the block attention residuals: `norm_weight` [D], `proj_weight` [1, D]."""

    def __init__(self, config: KimiK3TextConfig):
        super().__init__()
        self.norm_weight = nn.Parameter(torch.ones(config.hidden_size))
        self.proj_weight = nn.Parameter(torch.empty(1, config.hidden_size))
        self.eps = config.rms_norm_eps

    def forward(self, hidden_states: torch.Tensor | None, bank: torch.Tensor) -> torch.Tensor:
        return block_attention_residual(
            hidden_states, bank, self.norm_weight, self.proj_weight, self.eps
        )
