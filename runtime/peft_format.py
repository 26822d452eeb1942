"""The adapter as PEFT stores it: names, packing of expert factors, configuration.

PEFT (`target_parameters`, its `ParamWrapper`) nests wrappers on an experts module: the bank that
is applied last is the outer one, the first lies under `base_layer`. It packs the factors of E
experts into two matrices: A with the expert index slowest, `[E * r, in]`; B with it fastest,
`[out, r * E]`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from runtime.adapters import LoraLinear, banks
from runtime.experts import experts_of
from runtime.experts.lists import ExpertList
from runtime.weights import full_tensors

if TYPE_CHECKING:
    from strategies.schema import Job

PREFIX = "base_model.model."


def pack_a(a_ErF: Tensor) -> Tensor:
    return a_ErF.reshape(-1, a_ErF.shape[-1]).contiguous()


def pack_b(b_EOr: Tensor) -> Tensor:
    return b_EOr.permute(1, 2, 0).reshape(b_EOr.shape[1], -1).contiguous()


def peft_name(name: str, experts: dict[str, nn.Module]) -> str:
    """PEFT's name of an adapter factor of this runtime; one of an expert in a list is that of a
    linear layer."""
    module, _, factor = name.rpartition(".")
    side = factor[-1]
    if module not in experts:
        return f"{PREFIX}{module}.lora_{side}.weight"
    first, last = banks(experts[module])
    inner = "base_layer." if factor == f"lora_{first}_{side}" else ""
    assert inner or factor == f"lora_{last}_{side}"
    return f"{PREFIX}{module}.{inner}lora_{side}.weight"


def peft_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Every full factor under PEFT's name, on the CPU. All ranks must call it together."""
    experts = experts_of(model)
    packed: dict[str, Tensor] = {}
    for name, tensor in full_tensors(model, adapters=True):
        if tensor.ndim == 3:
            tensor = pack_a(tensor) if name.endswith("_A") else pack_b(tensor)
        packed[peft_name(name, experts)] = tensor.contiguous()
    return packed


def peft_config(model: nn.Module, job: Job) -> dict[str, object]:
    linears = [n for n, m in model.named_modules() if isinstance(m, LoraLinear)]
    parameters = []
    for name, module in experts_of(model).items():
        adapted = [bank for bank in banks(module) if hasattr(module, f"lora_{bank}_A")]
        if isinstance(module, ExpertList):
            experts, paths = range(module.num_experts), [module.sources[b] for b in adapted]
            linears += [f"{name}.{e}.{path}" for e in experts for path in paths]
        else:
            parameters += [f"{name}.{bank}" for bank in adapted]
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": job.model,
        "r": job.lora.rank,
        "lora_alpha": job.lora.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
        "target_modules": linears,
        "target_parameters": parameters or None,
    }


def save_adapter(model: nn.Module, job: Job, folder: Path) -> None:
    """Writes `adapter_model.safetensors` and `adapter_config.json`; rank 0 writes, all ranks call.

    Each file is replaced as a whole or not at all.
    """
    from safetensors.torch import save_file

    from analyzers.documents import write_text

    tensors = peft_tensors(model)
    if torch.distributed.is_initialized() and torch.distributed.get_rank() != 0:
        return
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / ".adapter_model.safetensors.tmp"
    save_file(tensors, temporary, metadata={"format": "pt"})
    temporary.replace(folder / "adapter_model.safetensors")
    write_text(folder / "adapter_config.json", json.dumps(peft_config(model, job), indent=2) + "\n")
