"""transformers: `DistributedConfig`, with the arguments of its Trainer and of PEFT."""

from __future__ import annotations

from pprint import pformat
from textwrap import indent
from typing import TYPE_CHECKING

from strategies.exports.source import (
    Export,
    Source,
    adapted_banks,
    adapted_linears,
    common_losses,
    refuse,
)

if TYPE_CHECKING:
    from strategies.schema import Optimizer

NAME = "transformers_plan.py"
TARGET = "transformers 5.24"

_BODY = """\
from transformers.distributed import DistributedConfig

DISTRIBUTED = DistributedConfig(
{distributed}
)

SEQUENCE_LENGTH = {sequence_length}
DTYPE = {dtype!r}

# Of TrainingArguments: TrainingArguments(output_dir=..., **TRAINING).
TRAINING = dict(
{training}
)
"""

_LORA = """
# Of peft.LoraConfig: LoraConfig(**LORA).
LORA = dict(
{lora}
)
"""


def export(source: Source) -> Export:
    """The file `NAME`. Raises InputError for layouts that transformers cannot run."""
    plan, p = source.plan, source.plan.parallelism
    if p.cp > 1:
        raise refuse(TARGET, "parallelism.cp", "has no context parallelism")
    if p.pp > 1 and p.dp_replicate * p.fsdp > 1:
        raise refuse(TARGET, "parallelism.pp", "runs no pipeline together with FSDP")
    body = _BODY.format(
        distributed=_lines(_distributed(source)),
        sequence_length=plan.sequence_length,
        dtype=plan.compute_dtype,
        training=_lines(_training(source)),
    )
    usage = [
        "In a script of yours in exports/, started with launch/torchrun.sh exports/SCRIPT.py:",
        "from transformers_plan import DISTRIBUTED, DTYPE, TRAINING",
        "model = AutoModelForCausalLM.from_pretrained(",
        f"    {source.job.model!r}, distributed_config=DISTRIBUTED, dtype=DTYPE)",
    ]
    if plan.training == "lora":
        body += _LORA.format(lora=_lines(_lora(source)))
        usage += ["model = get_peft_model(model, LoraConfig(**LORA))"]
    return Export(body=body, usage=usage, lost=_lost(source))


def _distributed(source: Source) -> dict[str, object]:
    p = source.plan.parallelism
    return {
        "dp_replicate_size": p.dp_replicate,
        "fsdp_size": p.fsdp,
        "tp_size": p.tp,
        "pp_size": p.pp,
        "ep_size": p.ep,
        "ep_implementation": "all_to_all" if p.ep > 1 else "auto",
        "fsdp_mixed_precision": source.plan.compute_dtype == "bfloat16",
    }


def _training(source: Source) -> dict[str, object]:
    plan, job, optimizer = source.plan, source.job, source.job.optimizer
    return {
        "per_device_train_batch_size": plan.micro_batch_size,
        "gradient_accumulation_steps": plan.gradient_accumulation,
        "activation_checkpointing": plan.activation_checkpointing != "none",
        "bf16": plan.compute_dtype == "bfloat16",
        "max_steps": job.steps,
        "save_steps": job.checkpoint_every,
        "seed": job.seed,
        "learning_rate": optimizer.learning_rate,
        "adam_beta1": optimizer.betas[0],
        "adam_beta2": optimizer.betas[1],
        "adam_epsilon": optimizer.epsilon,
        "weight_decay": optimizer.weight_decay,
        "max_grad_norm": optimizer.max_grad_norm,
        "warmup_steps": optimizer.warmup_steps,
        **_schedule(optimizer),
    }


def _schedule(optimizer: Optimizer) -> dict[str, object]:
    if optimizer.lr_scheduler_type == "constant":
        return {"lr_scheduler_type": "constant_with_warmup"}
    if optimizer.lr_scheduler_type == "linear":
        return {"lr_scheduler_type": "linear"}
    kwargs = {"min_lr_rate": optimizer.min_lr_rate}
    return {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": kwargs}


def _lora(source: Source) -> dict[str, object]:
    lora = source.plan.lora
    return {
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": adapted_linears(source),
    }


def _lines(settings: dict[str, object]) -> str:
    lines = (f"{key}={pformat(value, width=88)}," for key, value in settings.items())
    return indent("\n".join(lines), "    ")


def _lost(source: Source) -> list[str]:
    plan, p = source.plan, source.plan.parallelism
    lost = common_losses(source)
    if plan.training == "lora":
        lost.append("sharded adapters: PEFT adds them after sharding, each device holds them all")
    if banks := adapted_banks(source):
        lost.append(
            f"adapters of the routed experts ({', '.join(banks)}): PEFT 0.21 fails on sharded ones "
            "(a product of a tensor and a DTensor)"
        )
    if p.ep > 1 and not _dispatches(source.analysis.model_type):
        lost.append(
            f"EP {p.ep} x {p.efsdp}: transformers has no plan with token dispatch for "
            f"'{source.analysis.model_type}'; give the model's modules in DistributedConfig.ep_plan"
        )
    if p.tp > 1:
        lost.append("norms split over the tensor-parallel ranks: each of them computes them whole")
    if plan.dispatcher not in ("none", "all_to_all"):
        lost.append(f"{plan.dispatcher} dispatch: tokens travel by a plain all-to-all")
    if plan.activation_checkpointing == "selective":
        lost.append("selective recomputation: whole blocks are recomputed")
    if plan.virtual_stages > 1:
        lost.append(f"{plan.virtual_stages} chunks a pipeline stage: a stage is one run of layers")
    optimizer = source.job.optimizer
    if optimizer.lr_scheduler_type == "linear" and optimizer.min_lr_rate:
        rate = optimizer.min_lr_rate
        lost.append(f"{rate:g} of the learning rate at the end: its linear schedule falls to zero")
    if not plan.reshard_after_forward:
        lost.append("weights kept whole after forward: experts and layers are resharded")
    if plan.expert_weight_format in ("mxfp4", "fp8"):
        lost.append(f"experts held as {plan.expert_weight_format}: they are loaded as bfloat16")
    return lost


def _dispatches(model_type: str) -> bool:
    """Whether the model's own expert plan moves tokens, which sharding within EP needs."""
    from transformers import CONFIG_MAPPING

    if model_type not in CONFIG_MAPPING:
        return False
    config = CONFIG_MAPPING[model_type]
    if not config.__module__.startswith("transformers."):  # registered by somebody here
        return False
    kinds = [config, *getattr(config, "sub_configs", {}).values()]
    plans = [getattr(kind, "base_model_ep_plan", None) or {} for kind in kinds]
    return any("ep_dispatch_experts" in plan.values() for plan in plans)
