"""Each target's file is read by the target itself where it is installed: transformers always,
torchtitan and AutoModel where they are (`pip install torchtitan`, `pip install --no-deps
nemo-automodel`)."""

import dataclasses
import os
import runpy
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from analyzers.errors import InputError
from strategies import load_cluster
from strategies.exports import CONFIGS, FORMATS, Source, write_exports
from strategies.schema import Capacity, Job, Lora, Mapping, Optimizer, Parallelism, Plan
from tests.strategies.plans import make_plan

CLUSTERS = Path(__file__).parents[2] / "examples" / "clusters"

LAYOUTS = {
    "fsdp-128": Parallelism(fsdp=128, ep=32, efsdp=4),
    "hsdp-2x64": Parallelism(dp_replicate=2, fsdp=64, ep=16, efsdp=4),
    "ep-is-world": Parallelism(fsdp=128, ep=128, efsdp=1),
    "tp-8": Parallelism(fsdp=16, tp=8, ep=16, efsdp=8),
    "cp-4": Parallelism(fsdp=128, cp=4, ep=16, efsdp=8),
    "pp-4": Parallelism(pp=4, fsdp=32, ep=8, efsdp=4),
}


@pytest.fixture(scope="module")
def source_of(tiny):
    cluster = load_cluster(CLUSTERS / "hgx-h200-128.yaml")
    job = Job(model="/models/it's here", cluster="c", backend="h200")

    def make(analysis=tiny, **changes):
        return Source(plan=make_plan(**changes), cluster=cluster, analysis=analysis, job=job)

    return make


def text_of(source, folder, name):
    (written,) = write_exports(source, folder, [name])
    return written.paths[-1].read_text(), written


# What a plan decides about a run, each with another value. The rest of a Plan is what was found.
SETTINGS = {
    "world_size": {"world_size": 64, "parallelism": Parallelism(fsdp=64, ep=32, efsdp=2)},
    "parallelism": {"parallelism": LAYOUTS["hsdp-2x64"]},
    "micro_batch_size": {"micro_batch_size": 5},
    "sequence_length": {"sequence_length": 8192},
    "gradient_accumulation": {"gradient_accumulation": 7},
    "activation_checkpointing": {"activation_checkpointing": "selective"},
    "reshard_after_forward": {"reshard_after_forward": False},
    "expert_weight_format": {"expert_weight_format": "mxfp4"},
    "compute_dtype": {"compute_dtype": "float32"},
    "dispatcher": {"dispatcher": "all_gather"},
    "capacity": {"capacity": Capacity(factor=1.25, overflow="drop")},
    "offload_optimizer": {"offload_optimizer": True},
    "mapping": {"mapping": Mapping(shards_inside=True)},
    "expert_copies": {"expert_copies": 2},
    "training": {"training": "full"},
    "lora": {"lora": Lora(rank=4, alpha=8.0, targets=["shared_experts"])},
}
IN_A_PIPELINE = {"virtual_stages"}
FOUND = {
    "version", "cluster", "predicted", "alternatives", "rejected", "families", "survey", "ep_curve",
    "searched", "explanation", "origins", "backend", "twin", "runnable", "missing", "idle_devices",
    "routing", "measured", "searched_beyond", "node_size",
}  # fmt: skip


def test_every_field_of_a_plan_is_a_setting_or_a_finding():
    names = {f.name for f in dataclasses.fields(Plan)}
    assert not names - (SETTINGS.keys() | IN_A_PIPELINE | FOUND)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("setting", SETTINGS)
def test_no_setting_is_dropped_without_a_word(source_of, tmp_path, name, setting):
    before, after = (
        text_of(source, tmp_path, name)[0].partition("\n")[2]  # without the layout's own line
        for source in (source_of(), source_of(**SETTINGS[setting]))
    )
    assert after != before


@pytest.mark.parametrize("name", ["torchtitan", "automodel"])
def test_chunks_of_a_pipeline_stage_are_not_dropped(source_of, tmp_path, name):
    texts = {
        text_of(source_of(parallelism=LAYOUTS["pp-4"], virtual_stages=n), tmp_path, name)[0]
        for n in (1, 2, 4)
    }
    assert len(texts) == 3


@pytest.mark.parametrize("name", ["torchtitan", "automodel"])
def test_where_replicas_of_a_pipeline_lie_is_not_dropped(source_of, tmp_path, name):
    layout = Parallelism(pp=4, dp_replicate=2, fsdp=16, ep=8, efsdp=2)
    source = source_of(parallelism=layout, mapping=Mapping(replicas_outside=True))
    assert any("replicas around" in line for line in text_of(source, tmp_path, name)[1].lost)


@pytest.mark.parametrize("name", CONFIGS)
def test_what_a_target_cannot_say_is_in_the_header_and_handed_back(source_of, tmp_path, name):
    text, written = text_of(source_of(capacity=Capacity(factor=1.25)), tmp_path, name)
    header = text.partition("\n\n")[0]
    assert all(line.startswith("#") for line in header.splitlines())
    joined = " ".join(header.replace("#", "").split())
    assert written.lost
    for line in written.lost:
        assert line in joined
    assert any("capacity factor 1.25" in line for line in written.lost)


def test_all_formats_are_written_and_a_refused_one_is_reported(source_of, tmp_path):
    written = write_exports(source_of(parallelism=LAYOUTS["cp-4"]), tmp_path)
    assert [w.format for w in written] == list(FORMATS)
    by_format = {w.format: w for w in written}
    assert "context parallelism" in (by_format["transformers"].refused or "")
    assert by_format["transformers"].paths == []
    for name in FORMATS[1:]:
        assert by_format[name].refused is None
        assert all(path.is_file() for path in by_format[name].paths)
    with pytest.raises(InputError, match=r"parallelism\.cp"):
        write_exports(source_of(parallelism=LAYOUTS["cp-4"]), tmp_path, ["transformers"])


def test_the_file_of_an_earlier_plan_does_not_outlive_a_refusal(source_of, tmp_path):
    (before,) = write_exports(source_of(), tmp_path, ["transformers"])
    write_exports(source_of(parallelism=LAYOUTS["cp-4"]), tmp_path)
    assert not before.paths[0].exists()


def test_a_folder_that_cannot_be_written_is_no_refusal(source_of, tmp_path):
    (tmp_path / "exports").write_text("in the way")
    with pytest.raises(InputError, match="exports"):
        write_exports(source_of(), tmp_path)


def test_transformers_takes_no_pipeline_with_fsdp(source_of, tmp_path):
    from transformers.distributed import DistributedConfig

    with pytest.raises(ValueError, match="pipeline"):  # the reason is still there
        DistributedConfig(fsdp_size=32, pp_size=4)
    with pytest.raises(InputError, match="pipeline"):
        write_exports(source_of(parallelism=LAYOUTS["pp-4"]), tmp_path, ["transformers"])


@pytest.mark.parametrize("layout", ["fsdp-128", "hsdp-2x64", "ep-is-world", "tp-8"])
def test_transformers_reads_its_file(source_of, tmp_path, layout):
    from peft import LoraConfig
    from transformers import TrainingArguments

    p = LAYOUTS[layout]
    source = source_of(parallelism=p)
    (written,) = write_exports(source, tmp_path, ["transformers"])
    made = runpy.run_path(str(written.paths[0]))
    config = made["DISTRIBUTED"]
    assert (config.pp_size, config.dp_replicate_size, config.fsdp_size) == (
        1,
        p.dp_replicate,
        p.fsdp,
    )
    assert (config.tp_size, config.ep_size, config.efsdp_size) == (p.tp, p.ep, p.efsdp)
    assert config.dp_size * config.tp_size == source.plan.world_size
    arguments = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, **made["TRAINING"])
    assert arguments.per_device_train_batch_size == 2
    assert arguments.gradient_accumulation_steps == 3
    assert LoraConfig(**made["LORA"]).r == source.plan.lora.rank


def test_transformers_lora_adapts_the_layers_of_the_plan(source_of, tmp_path):
    from peft import LoraConfig, get_peft_model
    from torch import nn

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            for name in ("q_proj", "k_proj", "o_proj"):
                setattr(self, name, nn.Linear(4, 4))

    layer = nn.ModuleDict({"self_attn": Attention(), "gate": nn.Linear(4, 4)})
    model = nn.ModuleDict({"layers": nn.ModuleList([layer])})
    made = runpy.run_path(str(write_exports(source_of(), tmp_path, ["transformers"])[0].paths[0]))
    adapted = get_peft_model(model, LoraConfig(**made["LORA"]))
    touched = {n.split(".lora_A")[0][-18:] for n, _ in adapted.named_modules() if "lora_A." in n}
    assert {n.rpartition(".")[2] for n in touched} == {"q_proj", "k_proj", "o_proj"}


SCRIPT = """
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM
from transformers_plan import DISTRIBUTED, DTYPE, LORA

model = AutoModelForCausalLM.from_pretrained({model!r}, distributed_config=DISTRIBUTED, dtype=DTYPE)
experts = model.get_parameter("model.layers.1.mlp.experts.down_proj")
model = get_peft_model(model, LoraConfig(**LORA))
tokens = torch.arange(32)[None]
model(input_ids=tokens, labels=tokens).loss.backward()
moved = [p.grad is not None for n, p in model.named_parameters() if "lora_B" in n]
print("held", experts.to_local().shape[0], "of", experts.shape[0], "moved", all(moved))
"""


@pytest.mark.distributed
@pytest.mark.slow
def test_transformers_loads_a_model_by_its_file_on_the_ranks_of_the_script(tiny, tmp_path):
    """FSDP2 over two ranks with the experts spread over both, forward and backward."""
    cluster = load_cluster(CLUSTERS / "two-ranks.yaml")
    plan = make_plan(
        cluster=cluster.name,
        world_size=2,
        parallelism=Parallelism(fsdp=2, ep=2),
        expert_weight_format="fp32",
        compute_dtype="float32",
    )
    job = Job(model=str(CLUSTERS.parent / "models/tiny-kimi-linear"), cluster="c", backend="cpu")
    source = Source(plan=plan, cluster=cluster, analysis=tiny, job=job)
    write_exports(source, tmp_path, ["transformers", "torchrun"])
    (tmp_path / "exports" / "script.py").write_text(SCRIPT.format(model=job.model))
    ended = subprocess.run(
        [tmp_path / "launch/torchrun.sh", "exports/script.py"],
        cwd=tmp_path,
        env={
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "HOME": str(tmp_path),
            "MAX_RESTARTS": "0",
            "MASTER_PORT": str(free_port()),
        },
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert ended.stdout.count("held 8 of 16 moved True") == 2


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine"])
def test_transformers_gets_the_schedule_of_the_runtime(source_of, tmp_path, kind):
    import torch
    from transformers import get_scheduler

    from runtime.optim import learning_rate

    source = source_of()
    left = 0.0 if kind == "linear" else 0.2
    optimizer = Optimizer(warmup_steps=4, lr_scheduler_type=kind, min_lr_rate=left)
    source = replace(source, job=replace(source.job, optimizer=optimizer))
    (written,) = write_exports(source, tmp_path, ["transformers"])
    asked = runpy.run_path(str(written.paths[0]))["TRAINING"]
    stepped = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=asked["learning_rate"])
    schedule = get_scheduler(
        asked["lr_scheduler_type"],
        stepped,
        num_warmup_steps=asked["warmup_steps"],
        num_training_steps=asked["max_steps"],
        scheduler_specific_kwargs=asked.get("lr_scheduler_kwargs"),
    )
    for step in range(asked["max_steps"]):
        if step >= 4:  # theirs begins the warm-up with a step at rate zero
            rate = learning_rate(optimizer, step, asked["max_steps"])
            assert schedule.get_last_lr()[0] == pytest.approx(rate)
        stepped.step()
        schedule.step()


@pytest.mark.parametrize(("model_type", "said"), [("qwen3_moe", False), ("kimi_k3", True)])
def test_models_without_token_dispatch_in_transformers_are_named(
    source_of, tiny, tmp_path, model_type, said
):
    source = source_of(analysis=replace(tiny, model_type=model_type))
    (written,) = write_exports(source, tmp_path, ["transformers"])
    assert any("no plan with token dispatch" in line for line in written.lost) == said


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("", 0))
        return s.getsockname()[1]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("recomputation", ["none", "selective", "full"])
def test_torchtitan_reads_its_file(source_of, tmp_path, layout, recomputation):
    pytest.importorskip("torchtitan", reason="pip install torchtitan")
    from torchtitan.distributed.parallel_dims import ParallelDims
    from torchtitan.models.deepseek_v3.config_registry import deepseek_v3_debugmodel
    from torchtitan.protocols.module import Module

    p = LAYOUTS[layout]
    source = source_of(parallelism=p, activation_checkpointing=recomputation)
    (written,) = write_exports(source, tmp_path, ["torchtitan"])
    made = runpy.run_path(str(written.paths[0]))
    config = made["with_plan"](deepseek_v3_debugmodel(), lora_modules=["wo"])
    dims = ParallelDims.from_config(config.parallelism, world_size=128)
    assert (dims.pp, dims.dp_replicate, dims.tp, dims.cp, dims.ep) == (
        p.pp, p.dp_replicate, p.tp, p.cp, p.ep,
    )  # fmt: skip
    assert dims.dp_shard * dims.cp == p.fsdp
    ranks = p.dp_replicate * p.fsdp // p.cp
    assert config.training.global_batch_size == 2 * 3 * ranks
    assert config.training.global_batch_size % (config.training.local_batch_size * ranks) == 0
    policy = type(config.activation_checkpoint).__qualname__.partition(".")[0]
    assert (
        policy == {"none": "NoneType", "selective": "SelectiveAC", "full": "FullAC"}[recomputation]
    )
    adapted = [
        name
        for name, module, *_ in config.model_spec.model.traverse(Module.Config, recurse=True)
        if hasattr(module, "rank")
    ]
    assert adapted
    assert all(name.endswith("wo") for name in adapted)


@pytest.mark.parametrize(("model_type", "said"), [("qwen3_moe", False), ("kimi_k3", True)])
def test_models_that_torchtitan_lacks_are_named(source_of, tiny, tmp_path, model_type, said):
    source = source_of(analysis=replace(tiny, model_type=model_type))
    text, written = text_of(source, tmp_path, "torchtitan")
    assert any(line.startswith("the model:") for line in written.lost) == said
    assert ("torchtitan.models.qwen3" in text) != said


def test_the_models_of_torchtitan_are_there():
    pytest.importorskip("torchtitan", reason="pip install torchtitan")
    from torchtitan.models import _supported_models

    from strategies.exports.torchtitan import MODELS

    assert set(MODELS.values()) <= _supported_models


@pytest.mark.parametrize("layout", LAYOUTS)
def test_automodel_reads_its_file(source_of, tmp_path, layout):
    pytest.importorskip("nemo_automodel", reason="pip install --no-deps nemo-automodel")
    import torch
    from nemo_automodel.components._peft.lora import PeftConfig
    from nemo_automodel.components._peft.module_matcher import ModuleMatcher
    from nemo_automodel.components.optim.optimizer import LRSchedulerConfig
    from nemo_automodel.components.training.step_scheduler import StepSchedulerConfig
    from nemo_automodel.recipes._dist_utils import parse_distributed_section

    p = LAYOUTS[layout]
    (written,) = write_exports(source_of(parallelism=p), tmp_path, ["automodel"])
    made = yaml.safe_load(written.paths[0].read_text())
    parsed = parse_distributed_section(made["distributed"])
    sizes = parsed["parallelism_sizes"]
    assert (sizes.pp_size, sizes.tp_size, sizes.cp_size, sizes.ep_size) == (p.pp, p.tp, p.cp, p.ep)
    assert sizes.dp_size * sizes.cp_size * sizes.tp_size * sizes.pp_size == 128
    assert sizes.dp_replicate_size == p.dp_replicate
    assert parsed["activation_checkpointing"] is True
    assert parsed["strategy_config"].reshard_after_forward is True
    assert parsed["strategy_config"].mp_policy.param_dtype == torch.bfloat16
    steps = made["step_scheduler"]
    local = steps.pop("local_batch_size")
    assert StepSchedulerConfig(**steps).global_batch_size == local * sizes.dp_size * (
        1 if p.pp > 1 else 3
    )
    LRSchedulerConfig(**made["lr_scheduler"])
    peft = {k: v for k, v in made["peft"].items() if k != "_target_"}
    matcher = ModuleMatcher(PeftConfig.from_dict(peft).target_modules)
    assert matcher.match(None, "q_proj", "model.layers.3.self_attn")
    assert matcher.match(None, "experts", "model.layers.3")
    assert not matcher.match(None, "gate", "model.layers.3.mlp")


def test_automodel_says_where_it_shards_experts_over_replicas(source_of, tmp_path):
    (written,) = write_exports(source_of(parallelism=LAYOUTS["hsdp-2x64"]), tmp_path, ["automodel"])
    assert any("all of its 8 holders, not over 4" in line for line in written.lost)


def test_packed_experts_are_asked_for_where_automodel_keeps_them(source_of, tiny, tmp_path):
    for model_type, lost in (("deepseek_v4", False), ("kimi_k3", True)):
        source = source_of(
            analysis=replace(tiny, model_type=model_type), expert_weight_format="mxfp4"
        )
        text, written = text_of(source, tmp_path, "automodel")
        assert yaml.safe_load(text)["peft"]["expert_weight_format"] == "mxfp4"
        assert any("unpacks" in line for line in written.lost) == lost


def test_launch_scripts_say_what_the_runtime_lacks(source_of, tmp_path):
    source = source_of(
        parallelism=LAYOUTS["pp-4"], runnable=False, missing=["pipeline parallelism"]
    )
    (written,) = write_exports(source, tmp_path, ["slurm"])
    assert [path.name for path in written.paths] == ["torchrun.sh", "slurm.sbatch"]
    assert any("pipeline parallelism" in line for line in written.lost)
