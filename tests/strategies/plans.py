"""A plan made by hand, so that what reads plans is tested without the search."""

from dataclasses import fields, replace

from strategies.schema import Memory, Parallelism, Plan, Predicted, StepTime


def make_plan(**changes):
    nothing = dict.fromkeys((f.name for f in fields(Memory)), 1.0)
    step = StepTime(
        compute=1.0, all_gather=0.1, reduce_scatter=0.0, all_to_all=0.3, optimizer=0.0, overhead=0.1
    )
    predicted = Predicted(
        step_seconds=1.5,
        step=step,
        tokens_per_second_per_device=5461.0,
        memory_gib=Memory(**nothing),
        oom_probability=0.0,
        lower_bound_seconds=1.0,
        optimality_gap=0.3,
    )
    plan = Plan(
        cluster="hgx-h200-128",
        world_size=128,
        parallelism=Parallelism(fsdp=128, ep=32, efsdp=4),
        micro_batch_size=2,
        sequence_length=4096,
        gradient_accumulation=3,
        activation_checkpointing="full",
        reshard_after_forward=True,
        expert_weight_format="bf16",
        compute_dtype="bfloat16",
        dispatcher="all_to_all",
        predicted=predicted,
        backend="h200",
    )
    return replace(plan, **changes)
