"""NeMo AutoModel: the recipe's YAML, without the parts that only the user knows."""

from __future__ import annotations

from typing import Any

import yaml

from strategies.exports.source import (
    Export,
    Source,
    adapted_banks,
    adapted_linears,
    common_losses,
    layers_per_chunk,
)

NAME = "automodel.yaml"
TARGET = "NeMo AutoModel 0.7"

_DISPATCHERS = {
    "none": "torch",
    "all_gather": "torch",
    "all_to_all": "deepep",
    "hierarchical": "hybridep",
}
_BACKENDS = {"cuda": "nccl", "npu": "hccl", "cpu": "gloo"}
PACKED_MODELS = ("deepseek_v4",)
"""Model types whose checkpoint adapter hands packed experts through."""


def export(source: Source) -> Export:
    """The file `NAME`."""
    sections = {
        "recipe": "TrainFinetuneRecipeForNextTokenPrediction",
        "rng": {
            "_target_": "nemo_automodel.components.training.rng.StatefulRNG",
            "seed": source.job.seed,
            "ranked": True,
        },
        "step_scheduler": _steps(source),
        "distributed": _distributed(source),
        "dist_env": {"backend": _BACKENDS.get(source.cluster.device.device_type, "nccl")},
        "model": _model(source),
        **({"peft": _peft(source)} if source.plan.training == "lora" else {}),
        "optimizer": _optimizer(source),
        "lr_scheduler": {
            "lr_decay_style": source.job.optimizer.lr_scheduler_type,
            "lr_warmup_steps": source.job.optimizer.warmup_steps,
            "lr_decay_steps": source.job.steps,
            "min_lr": source.job.optimizer.learning_rate * source.job.optimizer.min_lr_rate,
        },
        "clip_grad_norm": {"max_norm": source.job.optimizer.max_grad_norm},
    }
    return Export(
        body=yaml.safe_dump(sections, sort_keys=False, width=96),
        usage=[
            "launch/torchrun.sh -m nemo_automodel.cli.app exports/automodel.yaml",
            f"Add dataset (sequences of {source.plan.sequence_length} tokens), dataloader, loss_fn "
            "and checkpoint.",
        ],
        lost=_lost(source),
    )


def _steps(source: Source) -> dict[str, Any]:
    plan, p = source.plan, source.plan.parallelism
    ranks = p.dp_replicate * p.fsdp // p.cp
    micro, times = plan.micro_batch_size, plan.gradient_accumulation
    return {
        "global_batch_size": micro * times * ranks,
        # A pipeline takes all micro-batches of a step at once and cuts them itself.
        "local_batch_size": micro * times if p.pp > 1 else micro,
        "max_steps": source.job.steps,
        "ckpt_every_steps": source.job.checkpoint_every,
    }


def _distributed(source: Source) -> dict[str, Any]:
    plan, p = source.plan, source.plan.parallelism
    recomputation = plan.activation_checkpointing
    section: dict[str, Any] = {
        "strategy": "fsdp2",
        "dp_size": p.dp_replicate * p.fsdp // p.cp,
        "dp_replicate_size": p.dp_replicate,
        "tp_size": p.tp,
        "pp_size": p.pp,
        "cp_size": p.cp,
        "ep_size": p.ep,
        "sequence_parallel": p.tp > 1,
        "activation_checkpointing": {"none": False, "full": True}.get(recomputation, recomputation),
        "reshard_after_forward": plan.reshard_after_forward,
        "mp_policy": {
            "_target_": "torch.distributed.fsdp.MixedPrecisionPolicy",
            "param_dtype": plan.compute_dtype,
            "reduce_dtype": "float32",
        },
    }
    if p.pp > 1:
        section["pipeline"] = {
            "pp_schedule": "1f1b" if plan.virtual_stages == 1 else "interleaved1f1b",
            "pp_microbatch_size": plan.micro_batch_size,
            "layers_per_stage": layers_per_chunk(source),
        }
    if p.ep > 1:
        section["moe"] = {"reshard_after_forward": plan.reshard_after_forward}
    return section


def _model(source: Source) -> dict[str, Any]:
    plan = source.plan
    return {
        "_target_": "nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained",
        "pretrained_model_name_or_path": source.job.model,
        "torch_dtype": plan.compute_dtype,
        "trust_remote_code": source.job.trust_remote_code,
        "backend": {
            "_target_": "nemo_automodel.components.models.common.BackendConfig",
            "experts": "torch_mm",
            "dispatcher": _DISPATCHERS[plan.dispatcher],
        },
    }


def _peft(source: Source) -> dict[str, Any]:
    lora = source.plan.lora
    paths = [*adapted_linears(source), *adapted_banks(source)]
    section: dict[str, Any] = {
        "_target_": "nemo_automodel.components._peft.lora.PeftConfig",
        "target_modules": [f"*.{path}" for path in paths],
        "dim": lora.rank,
        "alpha": lora.alpha,
        "lora_dtype": "float32",
    }
    if source.plan.expert_weight_format == "mxfp4":
        section["expert_weight_format"] = "mxfp4"
    return section


def _optimizer(source: Source) -> dict[str, Any]:
    o = source.job.optimizer
    return {
        "_target_": "torch.optim.AdamW",
        "lr": o.learning_rate,
        "betas": list(o.betas),
        "eps": o.epsilon,
        "weight_decay": o.weight_decay,
    }


def _lost(source: Source) -> list[str]:
    plan, p = source.plan, source.plan.parallelism
    model = source.analysis.model_type
    lost = common_losses(source)
    if plan.training == "lora":
        lost.append(
            "names of the adapted layers: the file has those of the model folder's own class"
        )
    if p.ep > 1 and p.dp_replicate > 1:
        shards = p.dp_replicate * p.efsdp
        lost.append(
            f"replicas of experts: AutoModel shards an expert over all of its {shards} holders, "
            f"not over {p.efsdp}"
        )
    if plan.dispatcher == "all_to_all":
        lost.append("a plain all-to-all: the file asks for DeepEP, which must be installed")
    if plan.dispatcher == "hierarchical":
        lost.append("which tiers tokens cross: the file asks for HybridEP, which must be installed")
    if plan.activation_checkpointing == "selective":
        lost.append("what is recomputed: AutoModel keeps the outputs of its own list of operators")
    if p.pp > 1 and layers_per_chunk(source) is None:
        lost.append(f"{plan.virtual_stages} chunks a stage: the layers do not divide evenly")
    if plan.expert_weight_format == "fp8":
        lost.append("experts held as fp8: they are held as bfloat16")
    if plan.expert_weight_format == "mxfp4" and model not in PACKED_MODELS:
        lost.append(f"packed experts of '{model}': AutoModel unpacks them when it loads")
    return lost
