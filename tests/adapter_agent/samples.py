"""Small documents made by hand, and a run directory that holds them."""

from __future__ import annotations

import math
from contextlib import contextmanager
from pathlib import Path

from adapter_agent.run_directory import RunDirectory, open_run
from analyzers.documents import write_document, write_text
from analyzers.schema import (
    Checkpoint,
    Experts,
    Graph,
    GraphNode,
    Layer,
    ModelAnalysis,
    Operator,
    Parameters,
    Region,
    Work,
)
from codegen.schema import Gate, Kernel, KernelSet, OperatorChoice, OperatorMap
from runtime.schema import Check, Evaluated, StepMetrics, ValidationReport
from strategies.schema import (
    Alternative,
    Job,
    Memory,
    Parallelism,
    Plan,
    Predicted,
    StepTime,
)
from tests.analyses import block, model, part


def layers(pattern: str) -> list[Layer]:
    """`K` is a KDA layer and `M` an MLA layer; a small letter has a dense feed-forward."""
    mixers = {"K": "kda", "M": "mla"}
    return [
        Layer(
            index=i,
            mixer=mixers[c.upper()],
            feed_forward="dense" if c.islower() else "moe",
        )
        for i, c in enumerate(pattern)
    ]


def graph() -> Graph:
    """A norm with its projection, and a chain beside them."""

    def node(name: str, operator: str, inputs: list[str], region: str | None = None) -> GraphNode:
        path = name.rpartition(".")[0]
        return GraphNode(
            name=name, operator=operator, path=path, part="mixer", inputs=inputs, region=region
        )

    first, second = "norm_projection_0", "pointwise_chain_0"
    return Graph(
        nodes=[
            node("input_layernorm.rms_norm", "rms_norm", [], first),
            node("self_attn.q_proj.linear", "linear", ["input_layernorm.rms_norm"], first),
            node("self_attn.kda", "kda", ["self_attn.q_proj.linear"]),
            node("self_attn.mul", "aten.mul.Tensor", ["self_attn.kda"], second),
            node("add", "aten.add.Tensor", ["self_attn.mul"], second),
        ],
        regions=[
            Region(
                name=first,
                kind="norm_projection",
                nodes=["input_layernorm.rms_norm", "self_attn.q_proj.linear"],
                bytes_avoided=Work(per_token=512),
            ),
            Region(
                name=second,
                kind="pointwise_chain",
                nodes=["self_attn.mul", "add"],
                bytes_avoided=Work(per_token=256, per_pair=0.5),
            ),
        ],
    )


def analysis(pattern: str = "kKKMKKKM") -> ModelAnalysis:
    """All layers as one block, whose graph is `graph()`."""
    parts = [part("mixer", 60_000), part("routed_experts", 290_000)]
    attributes = {"heads": 4, "key_dim": 32, "rope": False}
    blocks = [block("kda+moe", range(len(pattern)), parts, graph=graph(), **attributes)]
    return model(
        blocks,
        [part("embedding", 65_536), part("head", 65_536)],
        hidden=128,
        vocab=512,
        model_type="kimi_linear",
        architecture="KimiLinearForCausalLM",
        parameters=Parameters(total=3_000_000, active=1_000_000, routed_experts=2_000_000),
        checkpoint=Checkpoint(bytes=6_000_000, formats={"BF16": 6_000_000}, shards=4),
        layers=layers(pattern),
        experts=Experts(
            count=16,
            top_k=4,
            shared=1,
            hidden_size=128,
            intermediate_size=48,
            router_input_size=128,
        ),
        operators=[
            Operator(
                name="kda",
                count=6,
                flops=Work(per_token=1e6),
                bytes=Work(per_token=1e4),
                attributes={"heads": 4, "key_dim": 32},
            )
        ],
        notes=["a note with <angle> brackets & an ampersand"],
    )


def plan() -> Plan:
    memory = Memory(
        peak=1.5,
        frozen_weights=0.4,
        adapters=0.1,
        gradients=0.1,
        optimizer=0.2,
        unsharded_blocks=0.1,
        activations=0.3,
        logits=0.1,
        dispatch=0.1,
        reserved=0.1,
        capacity=4.0,
    )
    step = StepTime(
        compute=0.2,
        all_gather=0.05,
        reduce_scatter=0.03,
        all_to_all=0.04,
        optimizer=0.01,
        overhead=0.02,
    )
    return Plan(
        cluster="two-ranks",
        world_size=2,
        parallelism=Parallelism(fsdp=2, ep=2),
        micro_batch_size=2,
        sequence_length=128,
        gradient_accumulation=1,
        activation_checkpointing="none",
        reshard_after_forward=True,
        expert_weight_format="fp32",
        compute_dtype="float32",
        dispatcher="all_to_all",
        predicted=Predicted(
            step_seconds=0.35,
            step=step,
            tokens_per_second_per_device=731.0,
            memory_gib=memory,
            oom_probability=0.001,
            lower_bound_seconds=0.3,
            optimality_gap=0.0,
        ),
        alternatives=[
            Alternative(
                why="slower all-gather",
                parallelism=Parallelism(fsdp=2),
                micro_batch_size=1,
                activation_checkpointing="full",
                step_seconds=0.5,
                memory_gib=1.1,
            )
        ],
        rejected={"memory": 3},
        explanation=["experts stay on their ranks: the all-to-all is cheaper than the all-gather"],
        origins={"bandwidth": "default"},
    )


def kernel_set(text: str = "x = 1\n") -> KernelSet:
    import hashlib

    digest = hashlib.sha256(text.encode()).hexdigest()
    return KernelSet(
        generator="0.1.0",
        backend="cpu",
        kernels=[
            Kernel(
                operator="kda",
                family="gated_delta_rule",
                module="kda.py",
                function="chunk_kda",
                reference="kda_reference.py",
                test="test_kda.py",
                sha256=digest,
                spec_sha256=digest,
                template_sha256=digest,
                backend_sha256=digest,
                tuning_sha256=None,
                triton=">=3.6,<3.8",
                command="adapt kernels MODEL --backend cpu",
                attributes={},
                site=None,
                gates=[
                    Gate(
                        name="float64 reference",
                        passed=True,
                        ran_on="interpreter",
                        detail="forward",
                        measured=1e-7,
                        tolerance=1e-6,
                    )
                ],
                passed=True,
            )
        ],
    )


def validation(passed: bool = True) -> ValidationReport:
    check = Check(
        name="ep_invariance",
        passed=passed,
        measured=2e-7,
        expected=0.0,
        tolerance=1e-5,
        detail="loss of one rank and of two",
    )
    return ValidationReport(
        passed=passed,
        device="cpu",
        world_size=2,
        kept=["ep 2"],
        not_kept=["inter-node tier"],
        checks=[check],
    )


def metrics(step: int) -> StepMetrics:
    return StepMetrics(
        step=step,
        loss=6.0 / step,
        grad_norm=1.0,
        learning_rate=1e-3,
        tokens=100,
        step_seconds=0.5,
        tokens_per_second_per_device=100.0,
        peak_memory_gib=0.5,
        tokens_per_expert=[[(i * step) % 7 for i in range(16)] for _ in range(7)],
    )


INPUTS = {"model": "/models/tiny", "steps": 3, "trust_remote_code": False}


@contextmanager
def finished_run(path: Path):
    """A run directory with every document, as a finished run leaves it."""
    import json

    from analyzers.documents import to_data

    with open_run(path, INPUTS) as run:
        fill(run)
        lines = [json.dumps(to_data(metrics(step))) for step in range(1, 11)]
        write_text(run / "train/metrics.jsonl", "\n".join(lines) + "\n")
        evaluated = [
            Evaluated(step=step, loss=loss, perplexity=math.exp(loss), tokens=77)
            for step, loss in ((0, 5.5), (3, 2.25))
        ]
        lines = [json.dumps(to_data(e)) for e in evaluated]
        write_text(run / "train/evaluation.jsonl", "\n".join(lines) + "\n")
        yield run


def fill(run: RunDirectory) -> None:
    job = Job(model="/models/tiny", cluster="/clusters/two-ranks.yaml", backend="cpu")
    write_document(job, run / "job.json")
    write_document(analysis(), run / "analysis.json")
    choice = OperatorChoice(
        operator="kda",
        backend="cpu",
        decision="generated",
        provider="codegen:gated_delta_rule",
        reason="no | native operator",
        evidence="analyzers/backends/cpu.yaml",
    )
    write_document(OperatorMap(backend="cpu", operators=[choice]), run / "operators.json")
    write_kernels(run)
    write_document(plan(), run / "plan.json")
    write_document(validation(), run / "validation.json")


def write_kernels(run: RunDirectory) -> None:
    write_text(run / "kernels/kda.py", "x = 1\n")
    write_text(run / "kernels/kda_reference.py", "x = 1\n")
    write_document(kernel_set(), run / "kernels/manifest.json")
