from dataclasses import replace
from pathlib import Path

import pytest

from analyzers.backends import load_backend
from analyzers.documents import read_document, write_document
from analyzers.errors import InputError
from strategies import load_cluster, search, twin
from strategies.pricing import row_of
from strategies.schema import Job, Parallelism, Plan
from strategies.twin import TITLES

CLUSTERS = Path(__file__).parents[2] / "examples" / "clusters"


@pytest.fixture(scope="module")
def cpu():
    return load_backend("cpu")


@pytest.fixture(scope="module")
def big_plan(tiny):
    """The tiny model on 128 devices with experts over 8 ranks, 16 shards each."""
    cluster = load_cluster(CLUSTERS / "hgx-h200-128.yaml")
    job = Job(
        model="m", cluster="c", backend="h200", sequence_length=4096, global_batch_size=128 * 16
    )
    return search(tiny, cluster, job, fixed={"ep": 8, "fsdp": 128, "micro_batch_size": 4})


def test_the_twin_on_two_ranks_keeps_expert_parallelism(big_plan, tiny, cpu):
    small = twin(big_plan, tiny, 2, cpu)
    assert small.world_size == 2
    assert small.parallelism == Parallelism(fsdp=2, ep=2, efsdp=1)
    assert small.dispatcher == big_plan.dispatcher
    assert small.micro_batch_size <= 2
    assert small.gradient_accumulation <= 2
    assert small.sequence_length <= 256
    assert small.compute_dtype == "float32"
    assert small.expert_weight_format == "fp32"
    assert small.twin is not None
    assert small.twin.of_world_size == 128
    not_kept = " | ".join(small.twin.not_kept)
    assert "expert parallelism of 2 instead of 8" in not_kept
    assert "sequence length: 256 instead of 4096" in not_kept
    assert "compute dtype: float32 instead of bfloat16" in not_kept
    assert any("experts are spread over ranks" in line for line in small.twin.kept)
    assert f"dispatcher: {big_plan.dispatcher}" in small.twin.kept


def test_four_ranks_keep_experts_sharded_within_expert_parallelism(big_plan, tiny, cpu):
    small = twin(big_plan, tiny, 4, cpu)
    assert small.parallelism == Parallelism(fsdp=4, ep=2, efsdp=2)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 8])
def test_the_twin_is_a_runnable_plan_on_any_number_of_ranks(big_plan, tiny, cpu, ranks, tmp_path):
    small = twin(big_plan, tiny, ranks, cpu)
    p = small.parallelism
    assert p.pp * p.dp_replicate * p.fsdp * p.tp == ranks
    assert p.efsdp * p.ep == p.fsdp
    assert tiny.experts is not None
    assert tiny.experts.count % p.ep == 0
    assert (small.dispatcher == "none") == (p.ep == 1)
    assert read_document(Plan, write_document(small, tmp_path / "plan.json")) == small
    assert small.predicted.memory_gib.capacity == cpu.memory_gib.value


def test_every_setting_is_listed_as_kept_or_not(big_plan, tiny, cpu):
    small = twin(big_plan, tiny, 2, cpu)
    assert small.twin is not None
    for name, title in TITLES.items():
        before, after = getattr(big_plan, name), getattr(small, name)
        if before == after:
            assert f"{title}: {after}" in small.twin.kept
        else:
            assert f"{title}: {after} instead of {before}" in small.twin.not_kept


def test_a_plan_without_expert_parallelism_has_a_twin_without_it(tiny, cpu):
    cluster = load_cluster(CLUSTERS / "hgx-h200-128.yaml")
    job = Job(model="m", cluster="c", backend="h200", sequence_length=1024)
    plan = search(tiny, cluster, job, fixed={"ep": 1})
    small = twin(plan, tiny, 2, cpu)
    assert small.parallelism == Parallelism(fsdp=2, ep=1, efsdp=2)
    assert small.dispatcher == "none"


def test_the_twin_on_the_same_devices_is_the_plan_itself(tiny, cpu):
    cluster = load_cluster(CLUSTERS / "two-ranks.yaml")
    job = Job(model="m", cluster="c", backend="cpu", sequence_length=512, global_batch_size=16)
    plan = search(tiny, cluster, job, fixed={"ep": 2})
    same = twin(plan, tiny, 2, cpu)
    assert row_of(same).row(0) == row_of(plan).row(0)
    assert same.predicted == plan.predicted
    assert same.twin is not None
    assert same.twin.not_kept == ["fewer steps than the job"]


def test_the_adapters_of_the_twin_are_those_of_the_plan(big_plan, tiny, cpu):
    small = twin(replace(big_plan, lora=replace(big_plan.lora, rank=16)), tiny, 2, cpu)
    narrow = twin(big_plan, tiny, 2, cpu)
    assert small.predicted.memory_gib.adapters == pytest.approx(
        2 * narrow.predicted.memory_gib.adapters
    )


def test_a_twin_needs_ranks(big_plan, tiny, cpu):
    with pytest.raises(InputError, match="world_size: must be > 0"):
        twin(big_plan, tiny, 0, cpu)


def test_the_twin_of_a_dense_model_says_nothing_of_experts(dense, cpu):
    cluster = load_cluster(CLUSTERS / "hgx-h200-128.yaml")
    job = Job(model="m", cluster="c", backend="h200", sequence_length=4096)
    small = twin(search(dense, cluster, job), dense, 2, cpu)
    assert small.expert_weight_format is None
    assert small.twin is not None
    assert not any("expert" in line or "dispatch" in line for line in small.twin.kept)
    assert not any("expert" in line or "dispatch" in line for line in small.twin.not_kept)
