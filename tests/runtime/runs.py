"""Run directories for the runtime's tests: real documents around very small models."""

import json
import os
import subprocess
import sys
from pathlib import Path

from analyzers.documents import write_document
from strategies.schema import (
    Job,
    Memory,
    Parallelism,
    Plan,
    Predicted,
    StepTime,
)

EXAMPLES = Path(__file__).parents[2] / "examples"


def plan_for(ranks, *, ep=1, dp_replicate=1, dispatcher="all_to_all", **rest):
    """A plan by hand: tests choose the arrangement, not the search."""
    zero = dict.fromkeys(Memory.__dataclass_fields__, 0.0)
    times = dict.fromkeys(StepTime.__dataclass_fields__, 0.0)
    fsdp = ranks // dp_replicate
    fields = {
        "micro_batch_size": 2,
        "sequence_length": 64,
        "gradient_accumulation": 1,
        "activation_checkpointing": "none",
        "reshard_after_forward": True,
        "expert_weight_format": "fp32",
        "compute_dtype": "float32",
    }
    return Plan(
        cluster="test",
        world_size=ranks,
        parallelism=Parallelism(dp_replicate=dp_replicate, fsdp=fsdp, ep=ep, efsdp=fsdp // ep),
        dispatcher=dispatcher if ep > 1 else "none",
        predicted=Predicted(
            step_seconds=0.0,
            step=StepTime(**times),
            tokens_per_second_per_device=0.0,
            memory_gib=Memory(**zero),
            oom_probability=0.0,
            lower_bound_seconds=0.0,
            optimality_gap=0.0,
        ),
        **(fields | rest),
    )


def job_for(model, **rest):
    fields = {
        "cluster": str(EXAMPLES / "clusters" / "two-ranks.yaml"),
        "backend": "cpu",
        "data": str(EXAMPLES / "data" / "classes-train.jsonl"),
        "sequence_length": 64,
    }
    return Job(model=str(model), **(fields | rest))


def write_run(run_dir, model, plan, analysis, **job):
    write_document(job_for(model, **job), run_dir / "job.json")
    write_document(analysis, run_dir / "analysis.json")
    write_document(plan, run_dir / "plan.json")
    return run_dir


def write_kernels(run_dir, analysis, backend="cpu", prefer=None):
    """Rendered kernels with a manifest, unproved: the gates have tests of their own."""
    from unittest.mock import patch

    from analyzers.backends import load_backend
    from codegen import generate, map_operators
    from codegen.schema import Gate

    target = load_backend(backend)
    rendered = Gate(name="rendered", passed=True, ran_on="", detail="no proof was asked for")
    with patch("codegen.verify.harness.verify", lambda *_: [rendered]):
        operators = map_operators(analysis, target, prefer=prefer)
        return generate(analysis, operators, target, run_dir / "kernels").kernels


def row_kernels(folder):
    """The generated kernels around experts, unproved, in their CPU form."""
    from analyzers.backends import load_backend
    from codegen.load import import_file
    from codegen.members import load_members
    from codegen.render import render
    from runtime.experts.fan import RowKernels

    found = {}
    for name in ("spread", "combine", "order", "reroute"):
        name = f"moe_{name}"
        rendered = render(load_members()[name], load_backend("cpu"), {})
        path = folder / rendered.module
        path.write_text(rendered.files[rendered.module], "utf-8")
        function = getattr(import_file(path, f"{name}_of_{folder.name}"), name)
        found[name.removeprefix("moe_")] = function
    return RowKernels(**found)


def save_small(model_type, folder, **changes):
    """A random model of four layers in the released key format, with the example's tokenizer."""
    import shutil

    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    example = EXAMPLES / "models" / f"tiny-{model_type.replace('_', '-')}"
    config = AutoConfig.from_pretrained(example)
    config.num_hidden_layers = 4
    config.layer_types = config.layer_types[:4]
    if getattr(config, "mlp_layer_types", None):
        config.mlp_layer_types = config.mlp_layer_types[:4]
    for key, value in changes.items():
        setattr(config, key, value)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1 and "A_log" not in name:
            torch.nn.init.normal_(parameter, std=0.05)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(example / name, folder / name)
    return folder


def save_qwen(folder, *, experts=0):
    """A random Qwen3 of two layers, dense or with `experts`, with the example's tokenizer."""
    import shutil

    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

    example = EXAMPLES / "models" / "tiny-kimi-linear"
    shape = {
        "vocab_size": json.loads((example / "config.json").read_text())["vocab_size"],
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "initializer_range": 0.2,
    }
    config = Qwen3Config(**shape)
    if experts:
        config = Qwen3MoeConfig(
            **shape, moe_intermediate_size=16, num_experts=experts, num_experts_per_tok=2
        )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(example / name, folder / name)
    return folder


def torchrun(ranks, *arguments, timeout=560):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), *map(str, arguments)]
    # A script's own folder is its path; the ranks find the project also where it isn't installed.
    path = os.pathsep.join(filter(None, [str(EXAMPLES.parent), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        env=os.environ | {"PYTHONPATH": path},
    )
    faults = [line for line in done.stderr.splitlines() if "Warning" not in line]
    assert done.returncode == 0, "\n".join(faults[:60])
