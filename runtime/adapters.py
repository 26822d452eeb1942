"""LoRA on linear layers and on banks of experts, inserted before sharding.

A linear layer changes its class in place and gains two parameters, so the names of the base weights
stay those of the model. An experts module gains factors that `experts.run_experts` applies. A
factor A that all experts of a layer share belongs to the module around them: whoever owns which
experts, it is sharded and its gradient summed like any weight of the layer.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from analyzers.errors import InputError
from analyzers.experts import for_images
from analyzers.structure import decoder_layers
from runtime.experts import experts_of
from runtime.peft_names import FactorNames
from runtime.shards import local_rows, shared_parameters

if TYPE_CHECKING:
    from analyzers.schema import ModelAnalysis
    from strategies.schema import Lora, LoraTarget

PART_OF_TARGET = {
    "attention": "mixer",
    "shared_experts": "shared_experts",
    "dense": "dense",
    "latent_projection": "latent_projection",
}


MAMBA_READS = ("out_proj", "dt_proj")


class LoraLinear(nn.Linear):
    """`x W^T + b + scale * (dropout(x) A^T) B^T`; factors are float32, computed in the dtype of x.

    A layer that is recomputed in backward sees the mask of its forward: checkpointing restores the
    random state.
    """

    lora_A: nn.Parameter
    lora_B: nn.Parameter
    lora_scale: float
    lora_dropout: float

    @staticmethod
    def product(
        x_NF: Tensor,
        kept_NF: Tensor,
        w_OF: Tensor,
        bias_O: Tensor | None,
        a_rF: Tensor,
        b_Or: Tensor,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        """-> [N, O], and what goes into B [N, r]. The low-rank product is added inside of a matrix
        product to what the base gave, which is neither read nor written once more."""
        low_Nr = kept_NF @ a_rF.t()
        return F.linear(x_NF, w_OF, bias_O).addmm_(low_Nr, b_Or.t(), alpha=scale), low_Nr

    def forward(self, input: Tensor) -> Tensor:
        x_NF = input.reshape(-1, input.shape[-1])
        dropped = self.training and self.lora_dropout > 0
        kept_NF = F.dropout(x_NF, self.lora_dropout) if dropped else x_NF
        factors = self.lora_A, self.lora_B, self.lora_scale
        y_NO = _LowRank.apply(x_NF, kept_NF, self.weight, self.bias, *factors, self.product)
        return y_NO.view(*input.shape[:-1], y_NO.shape[-1])  # type: ignore[union-attr]


_library = torch.library.Library("adapter_agent", "DEF")
_library.define(
    "adapted_linear(Tensor x, Tensor kept, Tensor w, Tensor? bias, Tensor a, Tensor b, float scale)"
    " -> (Tensor, Tensor)"
)
_library.impl("adapted_linear", LoraLinear.product, "CompositeExplicitAutograd")
product_as_one = torch.ops.adapter_agent.adapted_linear.default
"""`LoraLinear.product` as one operator, for who looks at operators; calling it takes longer."""


class _LowRank(torch.autograd.Function):
    """Gradients of a layer with its adapter: as in forward, the low-rank product is added inside of
    a matrix product to what goes through the base."""

    @staticmethod
    def forward(
        ctx: Any,
        x_NF: Tensor,
        kept_NF: Tensor,
        w_OF: Tensor,
        bias_O: Tensor | None,
        a_rF: Tensor,
        b_Or: Tensor,
        scale: float,
        product: Callable[..., tuple[Tensor, Tensor]],
    ) -> Tensor:
        a, b = a_rF.to(x_NF.dtype), b_Or.to(x_NF.dtype)
        y_NO, low_Nr = product(x_NF, kept_NF, w_OF, bias_O, a, b, scale)
        ctx.save_for_backward(kept_NF, w_OF, a, b, low_Nr)
        ctx.scale, ctx.dropped, ctx.dtype = scale, kept_NF is not x_NF, a_rF.dtype
        return y_NO

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NO: Tensor) -> tuple[Tensor | None, ...]:
        kept_NF, w_OF, a, b, low_Nr = ctx.saved_tensors
        grad_low_Nr = (grad_NO @ b).mul_(ctx.scale)
        grad_a = (grad_low_Nr.t() @ kept_NF).to(ctx.dtype)
        grad_b = (grad_NO.t() @ low_Nr).to(ctx.dtype).mul_(ctx.scale)
        grad_x = grad_kept = None
        if ctx.needs_input_grad[0]:
            grad_x = grad_NO @ w_OF
            if ctx.dropped:
                grad_kept = grad_low_Nr @ a
            else:
                grad_x.addmm_(grad_low_Nr, a)
        return grad_x, grad_kept, None, None, grad_a, grad_b, None, None


def is_adapter(name: str) -> bool:
    """Whether a parameter name is that of an adapter factor."""
    return name.rpartition(".")[2].startswith("lora_")


def insert_adapters(model: nn.Module, lora: Lora, analysis: ModelAnalysis) -> list[str]:
    """Freezes the model, adds the factors that `lora.targets` names, returns the modules' names.

    Raises InputError when a target has nothing to adapt in this model.
    """
    _check(lora)
    model.requires_grad_(False)
    touched: list[str] = []
    for target in lora.targets:
        if target == "routed_experts":
            names = _adapt_experts(model, lora)
        else:
            names = _linear_names(model, analysis, PART_OF_TARGET[target])
            for name in names:
                _adapt_linear(model.get_submodule(name), lora, target)
        if not names and target in ("attention", "routed_experts"):
            why = ": its layers share their weights with others" * _all_shared(model)
            raise InputError(
                "job.json",
                field="lora.targets",
                fault=f"'{target}' names nothing in {analysis.architecture} that can be adapted"
                + why,
                fix="leave it out; docs/adapters.md says what is never adapted",
            )
        touched += names
    return touched


def _check(lora: Lora) -> None:
    """Raises InputError for values that no adapter can have."""
    for field, fault in (
        ("rank", "must be positive" if lora.rank < 1 else ""),
        ("ranks", "must be positive" if min(lora.ranks.values(), default=1) < 1 else ""),
        ("ranks", "of what is no target" if set(lora.ranks) - set(lora.targets) else ""),
        ("dropout", "must be at least 0 and below 1" if not 0 <= lora.dropout < 1 else ""),
        (
            "shared_a",
            "set, but routed_experts is no target"
            if lora.shared_a and "routed_experts" not in lora.targets
            else "",
        ),
    ):
        if fault:
            value = getattr(lora, field)
            raise InputError("job.json", field=f"lora.{field}", fault=f"{value}: {fault}")


def _linear_names(model: nn.Module, analysis: ModelAnalysis, part: str) -> list[str]:
    """Linear layers of a part, without those that an adapter would not reach or be wrong for, that
    share their weight (merging adds what each of them learned to all), or whose adapter stock PEFT
    could not read."""
    prefix, _ = decoder_layers(model)
    names = [
        f"{prefix}.{layer}.{linear.name}"
        for block in analysis.blocks
        for layer in block.layers
        for linear in block.linears
        if linear.part == part
    ]
    on_disk, shared = FactorNames(model), shared_parameters(model)
    return [
        name
        for name in names
        if _reached(model, name)
        and model.get_parameter(f"{name}.weight") not in shared
        and on_disk.stored(f"{name}.lora_A.weight")
    ]


def _all_shared(model: nn.Module) -> bool:
    linears = [m for m in decoder_layers(model)[1].modules() if isinstance(m, nn.Linear)]
    return {m.weight for m in linears} <= shared_parameters(model)


def _reached(model: nn.Module, name: str) -> bool:
    """Whether a layer is a plain product that the model calls. A class of its own may compute
    something else; Mamba's fused kernels take these weights and leave the layer out."""
    owner, _, last = name.rpartition(".")
    mixer = model.get_submodule(owner)
    mamba = hasattr(mixer, "conv1d") and hasattr(mixer, "D")
    return type(model.get_submodule(name)) is nn.Linear and not (mamba and last in MAMBA_READS)


def _adapt_linear(module: Any, lora: Lora, target: LoraTarget) -> None:
    module.__class__ = LoraLinear
    assert isinstance(module, LoraLinear)
    rank, device = lora.rank_of(target), module.weight.device
    module.lora_A = _factor(rank, module.in_features, device=device)
    module.lora_B = _factor(module.out_features, rank, device=device)
    module.lora_scale, module.lora_dropout = lora.scale_of(target), lora.dropout


def _adapt_experts(model: nn.Module, lora: Lora) -> list[str]:
    rank = lora.rank_of("routed_experts")
    on_disk, shared = FactorNames(model), shared_parameters(model)
    found = {
        name: experts
        for name, experts in experts_of(model).items()
        if _for_texts(model, name)
        and shared.isdisjoint(experts.parameters())
        and on_disk.stored(f"{name}.lora_A.weight")
    }
    for name, module in found.items():
        owner = module
        if lora.shared_a:
            owner = model.get_submodule(name.rpartition(".")[0])
            module.lora_shared = (owner,)  # in a tuple, so that it does not become a submodule
        for bank in banks(module):
            weight = getattr(module, bank)
            first, second = weight.shape[1:]
            outs, ins = (second, first) if module.is_transposed else (first, second)
            count, device = weight.shape[0], weight.device
            shape = (rank, ins) if lora.shared_a else (count, rank, ins)
            setattr(owner, f"lora_{bank}_A", _factor(*shape, device=device))
            setattr(module, f"lora_{bank}_B", _factor(count, outs, rank, device=device))
        module.lora_scale, module.lora_dropout = lora.scale_of("routed_experts"), lora.dropout
    return list(found)


def _for_texts(model: nn.Module, experts: str) -> bool:
    """Whether texts reach experts: they are not of a tower, nor a layer's own for images."""
    prefix = f"{decoder_layers(model)[0]}."
    return experts.startswith(prefix) and not for_images(experts.removeprefix(prefix))


def banks(experts: Any) -> list[str]:
    """Names of the stacked weights of an experts module, in the order in which they are applied."""
    if (names := getattr(experts, "bank_names", None)) is not None:
        return names
    return ["gate_up_proj" if experts.has_gate else "up_proj", "down_proj"]


def _factor(*shape: int, device: torch.device) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape, dtype=torch.float32, device=device))


@torch.no_grad()
def initialise_adapters(model: nn.Module, seed: int) -> None:
    """A uniform in +-1/sqrt(in) (Kaiming with a = sqrt(5), as PEFT does), B zero.

    Every factor, and every expert of a bank, has its own generator, seeded by name: the same values
    whatever the number of ranks, and no two experts alike.
    """
    for name, parameter in model.named_parameters():
        if not is_adapter(name):
            continue
        shard, low, high = local_rows(parameter)
        if name.endswith("_B"):
            shard.zero_()
        elif parameter.ndim == 3:
            for row, expert in enumerate(range(low, high)):
                shard[row].copy_(_uniform(parameter.shape[1:], f"{seed}:{name}:{expert}"))
        else:
            shard.copy_(_uniform(parameter.shape, f"{seed}:{name}")[low:high])


def _uniform(shape: torch.Size, key: str) -> Tensor:
    digest = hashlib.sha256(key.encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    bound = 1 / math.sqrt(shape[-1])
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)


@dataclass(frozen=True)
class Adapted:
    """A base weight with its adapter."""

    a: str
    """Names of the factors in the model."""
    b: str
    scale: float
    bank: bool
    """Stacked experts: factors `[E, r, in]`, or `[r, in]` when shared, and `[E, out, r]`."""
    transposed: bool
    """The weight is `[E, in, out]`."""


def adapted_weights(model: nn.Module) -> dict[str, Adapted]:
    """What is adapted, by the name of the base weight."""
    found: dict[str, Adapted] = {}
    for name, module in model.named_modules():
        if isinstance(module, LoraLinear):
            a, b = f"{name}.lora_A", f"{name}.lora_B"
            found[f"{name}.weight"] = Adapted(a, b, module.lora_scale, False, False)
    for name, module in experts_of(model).items():
        owner = name.rpartition(".")[0] if hasattr(module, "lora_shared") else name
        for bank in banks(module):
            if hasattr(module, f"lora_{bank}_B"):
                a, b = f"{owner}.lora_{bank}_A", f"{name}.lora_{bank}_B"
                scale, turned = module.lora_scale, module.is_transposed
                found[f"{name}.{bank}"] = Adapted(a, b, scale, True, turned)
    return found


def adapter_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if is_adapter(name)}
