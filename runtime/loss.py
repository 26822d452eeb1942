"""Cross entropy of a language model's head without the logits of all tokens in memory.

Legend of shapes: N tokens that carry a label, C tokens of a chunk, D hidden width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import register_fsdp_forward_method

from strategies.workload import LOSS_CHUNK

TILE = 256
PROBE_TOKENS = 8
METHOD = "cross_entropy_sum"


@dataclass(frozen=True)
class Head:
    """What stands between the last hidden state and the logits:
    `cap * tanh(scale * (h W^T + b) / cap)`, without the cap where it is None."""

    scale: float = 1.0
    cap: float | None = None

    def logits(self, y: Tensor) -> Tensor:
        z = y if self.scale == 1.0 else y * self.scale
        return z if self.cap is None else self.cap * torch.tanh(z / self.cap)


class _CrossEntropySum(torch.autograd.Function):
    """The gradient of the hidden states is made together with the loss, chunk by chunk: two
    products a chunk, where recomputing the logits in the backward pass would take three. The head
    itself gets no gradient."""

    @staticmethod
    def forward(
        ctx: Any, h_ND: Tensor, w_VD: Tensor, b_V: Tensor | None, target_N: Tensor, head: Head
    ) -> Tensor:
        total = h_ND.new_zeros((), dtype=torch.float32)
        grad_ND = torch.empty_like(h_ND) if ctx.needs_input_grad[0] else None
        loss = _compiled_loss if h_ND.device.type == "cuda" else chunk_loss
        chunk = chunk_tokens(w_VD.shape[0])
        for start in range(0, h_ND.shape[0], chunk):
            part = slice(start, start + chunk)
            x_CV = F.linear(h_ND[part], w_VD, b_V)
            sum_, g_CV = loss(x_CV, target_N[part], head.scale, head.cap, grad_ND is not None)
            total += sum_
            if grad_ND is not None and g_CV is not None:
                torch.mm(g_CV, w_VD, out=grad_ND[part])
        ctx.save_for_backward(grad_ND)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (grad_ND,) = ctx.saved_tensors
        return (grad * grad_ND.float()).to(grad_ND.dtype), None, None, None, None


def chunk_tokens(vocabulary: int) -> int:
    """Tokens of a chunk; whole tiles of a matrix product where there are several."""
    tokens = max(1, LOSS_CHUNK // vocabulary)
    return tokens if tokens < TILE else tokens // TILE * TILE


def chunk_loss(
    x_CV: Tensor, target_C: Tensor, scale: float, cap: float | None, gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """Sum of the cross entropy of a head's logits, float32, and its gradient by what the head's
    linear layer gave, in the dtype of that."""
    z_CV = Head(scale, cap).logits(x_CV).float()
    log_CV = z_CV - z_CV.logsumexp(1, keepdim=True)
    loss = -log_CV.gather(1, target_C.unsqueeze(1)).sum()
    if not gradient:
        return loss, None
    right_CV = torch.arange(z_CV.shape[1], device=z_CV.device) == target_C.unsqueeze(1)
    g_CV = log_CV.exp() - right_CV.float()
    if cap is not None:
        g_CV = g_CV * (1 - (z_CV / cap).square())
    return loss, (g_CV if scale == 1.0 else g_CV * scale).to(x_CV.dtype)


_compiled_loss = torch.compile(chunk_loss)
"""Two passes over the logits, where single operations make ten."""


def cross_entropy_sum(
    h_ND: Tensor, w_VD: Tensor, b_V: Tensor | None, target_N: Tensor, head: Head
) -> Tensor:
    """Sum over the tokens of the cross entropy of `head`'s logits, in float32 -> []."""
    return _CrossEntropySum.apply(h_ND, w_VD, b_V, target_N, head)  # type: ignore[return-value]


def fuse_head(model: Any, device: torch.device) -> str | None:
    """Gives `model` the method `cross_entropy_sum(index_N, target_N, **arguments)`, which runs it
    without its head and sums the loss of the tokens `index_N` of its flattened output.

    Whether the head is what `Head` describes is measured: the model runs once on a few tokens, and
    what it does around its linear layer must give its own logits. Returns why it cannot be done,
    None where it was done. All ranks call it together.
    """
    linear, base = model.get_output_embeddings(), model.base_model
    if type(linear) is not nn.Linear or linear.weight.requires_grad:
        return f"its head is {_named(linear)}, not a frozen linear layer"
    if base is model:
        return "its decoder is no module of its own"
    head = measured_head(model, linear, base, device)
    if head is None:
        return "its logits are not a known function of its last hidden state"

    def method(index_N: Tensor, target_N: Tensor, **arguments: Any) -> Tensor:
        h_BTD = base(**arguments).last_hidden_state
        h_ND = h_BTD.flatten(0, 1).index_select(0, index_N)
        return cross_entropy_sum(h_ND, linear.weight, linear.bias, target_N, head)

    setattr(model, METHOD, method)
    register_fsdp_forward_method(model, METHOD)
    return None


def _named(module: nn.Module | None) -> str:
    if module is None:
        return "missing"
    return "trained" if type(module) is nn.Linear else f"a {type(module).__name__}"


@torch.no_grad()
def measured_head(
    model: Any, linear: nn.Linear, base: nn.Module, device: torch.device
) -> Head | None:
    """The head that turns the output of `linear`, which reads the last hidden state of `base`, into
    the logits of `model`; None where no head that its config may mean does."""
    seen: dict[str, Any] = {}

    def at_head(module: nn.Module, arguments: tuple, output: Tensor) -> None:
        seen["input"], seen["output"] = arguments[0], output

    def at_base(module: nn.Module, arguments: tuple, output: Any) -> None:
        seen["hidden"] = getattr(output, "last_hidden_state", None)

    hooks = [linear.register_forward_hook(at_head), base.register_forward_hook(at_base)]
    try:
        ids = torch.arange(PROBE_TOKENS, device=device).unsqueeze(0) % linear.out_features
        logits = model(input_ids=ids, use_cache=False).logits
    finally:
        for hook in hooks:
            hook.remove()
    hidden = seen.get("hidden")
    if hidden is None or "input" not in seen or not torch.equal(hidden, seen["input"]):
        return None
    wanted, close = logits.float(), 4 * torch.finfo(seen["output"].dtype).eps
    for head in _candidates(model.config.get_text_config(decoder=True)):
        made = head.logits(seen["output"]).float()
        if made.shape == wanted.shape and torch.allclose(made, wanted, rtol=close, atol=1e-6):
            return head
    return None


def _candidates(config: Any) -> list[Head]:
    """Heads that the config may mean, under the names that transformers' models have for them."""
    scales = [1.0]
    for name in ("logit_scale", "lm_head_multiplier"):
        if isinstance(value := getattr(config, name, None), int | float):
            scales.append(float(value))
    if value := getattr(config, "logits_scaling", None):
        scales.append(1 / float(value))
    cap = getattr(config, "final_logit_softcapping", None)
    caps = [None] if not cap else [None, float(cap)]
    return [Head(scale, cap) for scale in scales for cap in caps]
