"""The adapter as PEFT stores it: names, packing of expert factors, configuration.

PEFT (`target_parameters`, its `ParamWrapper`) nests wrappers on an experts module: the bank that
is applied last is the outer one, the first lies under `base_layer`. It packs the factors of E
experts into two matrices: A with the expert index slowest, `[E * r, in]`; B with it fastest,
`[out, r * E]`.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from analyzers.errors import InputError
from runtime.adapters import LoraLinear, adapter_parameters, banks
from runtime.experts import experts_of
from runtime.experts.lists import ExpertList, under_own_names
from runtime.peft_names import FactorNames, taken_for_experts
from runtime.reader import Reader
from runtime.shards import local_rows
from runtime.weights import full_tensors

if TYPE_CHECKING:
    from strategies.schema import Job, Lora

PREFIX = "base_model.model."
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
LINEAR = ("lora_A", "lora_B")
"""Names of the factors of a linear layer."""
PLAIN = {
    "peft_type": "LORA",
    "bias": "none",
    "fan_in_fan_out": False,
    "use_dora": False,
    "lora_bias": False,
    "alpha_pattern": {},
    "modules_to_save": None,
}
"""What the configuration of a plain LoRA says, besides rank and scale."""


def pack_a(a_ErF: Tensor) -> Tensor:
    return a_ErF.reshape(-1, a_ErF.shape[-1]).contiguous()


def pack_b(b_EOr: Tensor) -> Tensor:
    return b_EOr.permute(1, 2, 0).reshape(b_EOr.shape[1], -1).contiguous()


class Names:
    """PEFT's names of a model's adapter factors on disk; one of an expert in a list is that of a
    linear layer."""

    def __init__(self, model: nn.Module) -> None:
        self.experts, self._names = experts_of(model), FactorNames(model)

    def __call__(self, name: str) -> str:
        """Of a factor by its name in this runtime."""
        module, _, factor = name.rpartition(".")
        side = factor[-1]
        key = f"{module}.lora_{side}.weight"
        if factor != f"lora_{side}":
            module = _experts_at(module, self.experts)
            first, last = banks(self.experts[module])
            inner = "base_layer." if factor == f"lora_{first}_{side}" else ""
            assert inner or factor == f"lora_{last}_{side}"
            key = f"{module}.{inner}lora_{side}.weight"
        stored = self._names.stored(key)
        assert stored is not None, f"{name} was adapted, but PEFT has no name for it"
        return f"{PREFIX}{stored}"


def _experts_at(module: str, experts: dict[str, Any]) -> str:
    """Experts by their name, or by that of the module that has a factor which they share."""
    if module in experts:
        return module
    return next(name for name in experts if name.rpartition(".")[0] == module)


def peft_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Every full factor under PEFT's name, on the CPU. All ranks must call it together."""
    names = Names(model)
    experts = names.experts
    packed: dict[str, Tensor] = {}
    for name, tensor in full_tensors(model, adapters=True):
        module, _, factor = name.rpartition(".")
        if factor not in LINEAR and module not in experts:  # PEFT has no shared factor
            count = experts[_experts_at(module, experts)].num_experts
            tensor = tensor.expand(count, *tensor.shape)
        if tensor.ndim == 3:
            tensor = pack_a(tensor) if name.endswith("_A") else pack_b(tensor)
        packed[names(name)] = tensor.contiguous()
    return packed


def peft_config(model: nn.Module, job: Job) -> dict[str, object]:
    lora, experts = job.lora, experts_of(model)
    modules, parameters, ranks = list[str](), list[str](), dict[str, int]()
    renamed = taken_for_experts(model)
    for name, module in model.named_modules():
        if isinstance(module, LoraLinear):
            by_weight = name.rpartition(".")[2] in renamed
            names = [f"{name}.weight" if by_weight else name]
            (parameters if by_weight else modules).extend(names)
            ranks |= dict.fromkeys(names, module.lora_A.shape[0])
        elif name in experts:
            adapted = [bank for bank in banks(module) if hasattr(module, f"lora_{bank}_B")]
            if isinstance(module, ExpertList):
                paths = [module.sources[bank] for bank in adapted]
                names = [f"{name}.{e}.{path}" for e in range(len(module)) for path in paths]
                modules += names
            else:
                names = [f"{name}.{bank}" for bank in adapted]
                parameters += names
            ranks |= dict.fromkeys(names, lora.rank_of("routed_experts"))
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": job.model,
        "r": lora.rank,
        "rank_pattern": {re.escape(n): r for n, r in ranks.items() if r != lora.rank},
        "lora_alpha": lora.alpha,
        "use_rslora": lora.rslora,
        # PEFT refuses to load adapters of parameters with a dropout, though it applies none.
        "lora_dropout": 0.0 if parameters else lora.dropout,
        "bias": "none",
        "inference_mode": True,
        "target_modules": modules,
        "target_parameters": parameters or None,
    }


def save_adapter(model: nn.Module, job: Job, folder: Path) -> None:
    """Writes the adapter's two files; rank 0 writes, all ranks call."""
    tensors = peft_tensors(model)
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        write_adapter(tensors, peft_config(model, job), folder)


def write_adapter(tensors: dict[str, Tensor], config: dict[str, object], folder: Path) -> None:
    """Each file is replaced as a whole or not at all."""
    from safetensors.torch import save_file

    from analyzers.documents import write_text

    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".{WEIGHTS}.tmp"
    save_file(tensors, temporary, metadata={"format": "pt"})
    temporary.replace(folder / WEIGHTS)
    write_text(folder / CONFIG, json.dumps(config, indent=2) + "\n")


class StoredAdapter:
    """An adapter in PEFT's format, read into the factors of a model that was given them.

    Raises InputError for a folder that holds none, for one that is not plain LoRA scaled as the
    job says, and for factors that the model does not have or in another shape.
    """

    def __init__(self, folder: str | Path, model: nn.Module, lora: Lora) -> None:
        from analyzers.checkpoint import parse_json

        config, self.file = Path(folder) / CONFIG, Path(folder) / WEIGHTS
        for path in (config, self.file):
            if not path.is_file():
                fix = "give the folder of an adapter in PEFT's format, as safetensors"
                raise InputError(folder, fault=f"has no {path.name}", fix=fix)
        found = parse_json(config.read_bytes(), config)
        for key, wanted in {"lora_alpha": lora.alpha, "use_rslora": lora.rslora, **PLAIN}.items():
            value = found.get(key)
            if value != wanted and (value or wanted):
                fault = f"{value}, but {wanted} is what the job has or this runtime reads"
                raise InputError(config, field=key, fault=fault, fix="change the job to it")
        self.model, self.names = model, Names(model)
        self.reader = Reader(self.file)
        expected = set[str]()
        for name, parameter in adapter_parameters(model).items():
            expected |= {own for own, _ in self._stored(name, parameter.shape)}
        if others := sorted(set(self.reader.tensors) - expected):
            fault = "is of a layer that the job does not adapt"
            raise InputError(
                self.file, field=others[0], fault=fault, fix="give the job its targets"
            )

    def _stored(self, name: str, shape: torch.Size) -> list[tuple[str, tuple[int, ...]]]:
        """Names and shapes on disk of a factor: one, or one an expert of a list."""
        module, _, factor = name.rpartition(".")
        owner = self.model.get_submodule(module)
        if isinstance(owner, ExpertList):
            names = [own for own, _ in under_own_names(self.model, name, torch.empty(len(owner)))]
            return [(self.names(own), tuple(shape[1:])) for own in names]
        packed = tuple(shape)
        if factor not in LINEAR:
            count = self.names.experts[_experts_at(module, self.names.experts)].num_experts
            rows, columns = shape[-2:]
            packed = (count * rows, columns) if factor.endswith("_A") else (rows, columns * count)
        return [(self.names(name), packed)]

    def rows(self, name: str, shape: torch.Size, low: int, high: int) -> Tensor:
        """Rows `[low, high)` of a factor of the model."""
        stored = self._stored(name, shape)
        for own, packed in stored:
            if own not in self.reader.tensors:
                fix = "give the job its targets"
                raise InputError(self.file, field=own, fault="is missing", fix=fix)
            found = self.reader.tensors[own].shape
            if found != packed:
                fault = f"has the shape {list(found)}, the job's is {list(packed)}"
                raise InputError(self.file, field=own, fault=fault, fix="give the job its rank")
        (own, packed), *others = stored
        if others:
            chosen = [self.reader.whole(own) for own, _ in stored[low:high]]
            return torch.stack(chosen) if chosen else torch.empty(0, *shape[1:])
        if packed == tuple(shape):
            return self.reader.rows(own, low, high)
        if len(shape) == 3 and name.endswith("_B"):
            out, rank = shape[1:]
            return self.reader.whole(own).view(out, rank, -1)[..., low:high].permute(2, 0, 1)
        rank = shape[-2]
        if len(shape) == 3:
            return self.reader.rows(own, low * rank, high * rank).view(-1, *shape[1:])
        every = self.reader.whole(own).view(-1, *shape)
        if not torch.equal(every, every[:1].expand_as(every)):
            fault = "differs from expert to expert, but the job shares it"
            raise InputError(self.file, field=own, fault=fault, fix="lora.shared_a: false")
        return every[0, low:high]


@torch.no_grad()
def load_adapter(model: nn.Module, lora: Lora) -> None:
    """Fills the factors of `model`, sharded or not, from the adapter `lora.init_from`; each rank
    reads what it holds."""
    assert lora.init_from is not None
    stored = StoredAdapter(lora.init_from, model, lora)
    for name, parameter in adapter_parameters(model).items():
        shard, low, high = local_rows(parameter)
        shard.copy_(stored.rows(name, parameter.shape, low, high))
