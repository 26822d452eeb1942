"""torchtitan: a function that puts the plan into a model's `Trainer.Config`."""

from __future__ import annotations

from strategies.exports.source import Export, Source, adapted_banks, common_losses, layers_per_chunk

NAME = "torchtitan_plan.py"
TARGET = "torchtitan 0.3"

MODELS = {
    "deepseek_v3": "deepseek_v3",
    "gpt_oss": "gpt_oss",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3",
    "qwen3_5": "qwen3_5",
    "qwen3_5_moe": "qwen3_5",
}
"""Model type -> module of `torchtitan.models`."""

_RECOMPUTATION = {
    "none": "None",
    "selective": "SelectiveAC.Config()",
    "full": "FullAC.Config()",
}

_BODY = """\
from torchtitan.components.lora import LoRAConverter
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.trainer import Trainer

PARALLELISM = ParallelismConfig(
{parallelism}
)

TRAINING = TrainingConfig(
{training}
)


def with_plan(base: Trainer.Config, *, lora_modules: list[str]) -> Trainer.Config:
    \"\"\"`base` with the plan in it.

    `lora_modules`: last parts of the names of the linear layers to adapt, as torchtitan names them
    (`wq`, `wo`, ...); none trains the whole model.
    \"\"\"
    base.parallelism = PARALLELISM
    base.training = TRAINING
    base.activation_checkpoint = {recomputation}
    if lora_modules:
        lora = LoRAConverter.Config(rank={rank}, alpha={alpha}, target_modules=lora_modules)
        base.model_spec.model = lora.build().convert(base.model_spec.model)
    return base
"""


def export(source: Source) -> Export:
    """The file `NAME`."""
    plan, job, p = source.plan, source.job, source.plan.parallelism
    micro = plan.micro_batch_size
    ranks = p.dp_replicate * p.fsdp // p.cp
    parallelism = {
        "data_parallel_replicate_degree": p.dp_replicate,
        "data_parallel_shard_degree": p.fsdp // p.cp,
        "context_parallel_degree": p.cp,
        "tensor_parallel_degree": p.tp,
        "enable_sequence_parallel": p.tp > 1,
        "pipeline_parallel_degree": p.pp,
        **_pipeline(source),
        "expert_parallel_degree": p.ep,
        "fsdp_reshard_after_forward": "always" if plan.reshard_after_forward else "never",
    }
    training = {
        # A pipeline takes all micro-batches of a step at once and cuts them itself.
        "local_batch_size": micro * (plan.gradient_accumulation if p.pp > 1 else 1),
        "global_batch_size": micro * plan.gradient_accumulation * ranks,
        "seq_len": plan.sequence_length,
        "steps": job.steps,
        "max_norm": job.optimizer.max_grad_norm,
        "dtype": plan.compute_dtype,
        "mixed_precision_param": plan.compute_dtype,
    }
    body = _BODY.format(
        parallelism=_lines(parallelism),
        training=_lines(training),
        recomputation=_RECOMPUTATION[plan.activation_checkpointing],
        rank=plan.lora.rank,
        alpha=plan.lora.alpha,
    )
    model = MODELS.get(source.analysis.model_type)
    registry = f"torchtitan.models.{model}" if model else "your model"
    modules = "[]" if plan.training == "full" else "[...]"
    return Export(
        body=body,
        usage=[
            f"In a module of yours in exports/, say my_job.py, on a config function of {registry}:",
            "    def job():",
            f"        return with_plan(CONFIG_FUNCTION(), lora_modules={modules})",
            "PYTHONPATH=exports launch/torchrun.sh -m torchtitan.train \\",
            "    --module my_job --config job",
            "Optimizer, data and checkpoints stay those of the base.",
        ],
        lost=_lost(source),
    )


def _pipeline(source: Source) -> dict[str, object]:
    """Up to two chunks a stage follow from the schedule."""
    plan = source.plan
    if plan.parallelism.pp == 1:
        return {}
    settings: dict[str, object] = {
        "pipeline_parallel_microbatch_size": plan.micro_batch_size,
        "pipeline_parallel_schedule": "1F1B" if plan.virtual_stages == 1 else "Interleaved1F1B",
        "pipeline_parallel_first_stage_less_layers": 0,
        "pipeline_parallel_last_stage_less_layers": 0,
    }
    if plan.virtual_stages > 2:
        settings["pipeline_parallel_layers_per_stage"] = layers_per_chunk(source)
    return settings


def _lines(settings: dict[str, object]) -> str:
    return "\n".join(f"    {key}={value!r}," for key, value in settings.items())


def _lost(source: Source) -> list[str]:
    plan = source.plan
    lost = common_losses(source)
    if source.analysis.model_type not in MODELS:
        lost.append(f"the model: {TARGET} is not known to have '{source.analysis.model_type}'")
    if plan.training == "lora":
        lost.append("names of the adapted layers: torchtitan's models have names of their own")
        if adapted_banks(source):
            lost.append("adapters of the routed experts: torchtitan adapts linear layers alone")
    if plan.compute_dtype != "float32":
        lost.append("what is trained in float32, optimizer states too: all is kept in bfloat16")
    if plan.expert_weight_format in ("mxfp4", "fp8"):
        lost.append(f"experts held as {plan.expert_weight_format}: they are held as bfloat16")
    if plan.dispatcher not in ("none", "all_to_all"):
        lost.append(
            f"{plan.dispatcher} dispatch: the base's model decides (moe_comm_backend of its "
            "model_registry)"
        )
    if plan.activation_checkpointing == "selective":
        lost.append("what is recomputed: torchtitan keeps the outputs of its own list of operators")
    if plan.virtual_stages > 2 and layers_per_chunk(source) is None:
        lost.append(f"{plan.virtual_stages} chunks a stage: the layers do not divide, it takes 2")
    return lost
