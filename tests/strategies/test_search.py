import itertools
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analyzers.backends import Backend, Fact, load_backend
from analyzers.documents import read_document, write_document
from analyzers.errors import InfeasibleError, InputError
from strategies import cost, load_cluster, search
from strategies.cluster import Cluster, Fabric, Tier, flat_cluster
from strategies.explain import MAX_OOM_PROBABILITY, Point, pareto
from strategies.memory import Candidate, memory, oom_probability
from strategies.schema import Job, Lora, Parallelism, Plan
from strategies.space import MICRO_BATCHES
from strategies.workload import workload

CLUSTERS = Path(__file__).parents[2] / "examples" / "clusters"


def job(sequence_length=4096, **given):
    return Job(model="m", cluster="c", backend="b", sequence_length=sequence_length, **given)


@pytest.fixture(scope="module")
def k3_plan(k3):
    return search(k3, load_cluster(CLUSTERS / "supernode-128.yaml"), job(), packed_experts=True)


def test_kimi_k3_on_a_supernode_of_128(k3_plan):
    p = k3_plan.parallelism
    assert p.pp * p.dp_replicate * p.fsdp * p.tp == k3_plan.world_size == 128
    assert p.efsdp * p.ep == p.fsdp * p.tp
    held = k3_plan.predicted.memory_gib
    assert held.peak < held.capacity == 128
    assert k3_plan.predicted.oom_probability <= MAX_OOM_PROBABILITY
    step = k3_plan.predicted.step
    assert sum(asdict(step).values()) == pytest.approx(k3_plan.predicted.step_seconds)
    assert len(k3_plan.explanation) > 3


@pytest.mark.parametrize(
    "name", ["supernode-128", "hgx-h200-128", "gb200-nvl72-x2", "cloudmatrix384"]
)
def test_every_offered_ep_divides_experts_and_devices(k3, name):
    # 24, 48, 72 and 96 divide 384 devices but not 896 experts.
    cluster = load_cluster(CLUSTERS / f"{name}.yaml")
    plan = search(k3, cluster, job())
    offered = [plan.parallelism, *(a.parallelism for a in plan.alternatives)]
    assert len({p.ep for p in offered}) > 2
    for p in offered:
        assert 896 % p.ep == 0
        assert p.fsdp % p.ep == 0
        assert p.dp_replicate * p.fsdp == cluster.world_size


@pytest.mark.parametrize("ep", [24, 48, 72, 96])
def test_an_ep_that_does_not_divide_the_experts_is_refused(k3, ep):
    cluster = load_cluster(CLUSTERS / "cloudmatrix384.yaml")
    with pytest.raises(InputError, match="must divide 896 experts and 384 devices") as caught:
        search(k3, cluster, job(), fixed={"ep": ep})
    assert "one of: 1, 2, 4, 8, 16, 32, 64, 128" in str(caught.value)


def test_packed_experts_are_offered_only_where_they_are_stored_packed(k3):
    cluster = load_cluster(CLUSTERS / "supernode-128.yaml")
    unpacked = search(k3, cluster, job())
    assert unpacked.expert_weight_format == "bf16"
    assert any("--packed-experts" in said for said in unpacked.explanation)
    assert unpacked.predicted.memory_gib.frozen_weights * 2**30 == pytest.approx(43.4e9, rel=0.01)
    packed = search(k3, cluster, job(), packed_experts=True)
    assert packed.expert_weight_format == "mxfp4"
    assert packed.predicted.memory_gib.frozen_weights * 2**30 == pytest.approx(12.2e9, rel=0.01)
    plain = replace(k3, experts=replace(k3.experts, weight_format="bf16"))
    assert search(plain, cluster, job(), packed_experts=True).expert_weight_format == "bf16"


def test_alternatives_give_up_time_for_memory_or_simplicity(k3_plan):
    best = k3_plan.predicted
    per_token = best.step_seconds / k3_plan.micro_batch_size
    for a in k3_plan.alternatives:
        assert a.step_seconds / a.micro_batch_size >= per_token
    assert min(a.memory_gib for a in k3_plan.alternatives) < best.memory_gib.peak


def test_the_same_question_gets_the_same_answer(k3, k3_plan, tmp_path):
    again = search(k3, load_cluster(CLUSTERS / "supernode-128.yaml"), job(), packed_experts=True)
    assert again == k3_plan
    assert read_document(Plan, write_document(again, tmp_path / "plan.json")) == k3_plan


def test_the_explanation_names_what_was_left_out(k3, k3_plan):
    assert k3_plan.rejected["needs more memory than the device has"] > 0
    assert all(count > 0 for count in k3_plan.rejected.values())
    cloud = search(k3, load_cluster(CLUSTERS / "cloudmatrix384.yaml"), job())
    assert cloud.rejected["expert parallelism does not divide 896 experts"] > 0


def test_two_cpu_ranks_share_a_tiny_model(tiny):
    cluster = load_cluster(CLUSTERS / "two-ranks.yaml")
    plan = search(tiny, cluster, job(256, global_batch_size=4))
    assert plan.parallelism.fsdp == 2
    assert plan.parallelism.ep in (1, 2)
    assert plan.compute_dtype == "float32"
    assert plan.expert_weight_format == "fp32"
    assert plan.micro_batch_size * plan.gradient_accumulation * 2 == 4
    forced = search(tiny, cluster, job(256, global_batch_size=4), fixed={"ep": 2})
    assert forced.parallelism == Parallelism(fsdp=2, ep=2, efsdp=1)
    assert forced.dispatcher in ("all_to_all", "all_gather")
    assert forced.predicted.step_seconds >= plan.predicted.step_seconds


def test_nothing_fits_says_which_limit_binds_and_by_how_much(k3):
    with pytest.raises(InfeasibleError) as caught:
        search(k3, load_cluster(CLUSTERS / "h200-x2.yaml"), job(), packed_experts=True)
    message = str(caught.value)
    assert caught.value.exit_status == 3
    assert "\n" not in message
    work = workload(k3, Lora())
    lean = Candidate(
        parallelism=Parallelism(fsdp=2, ep=2),
        micro_batch_size=1,
        sequence_length=4096,
        activation_checkpointing="full",
        expert_weight_format="mxfp4",
        dispatcher="all_gather",
    )
    held = memory(work, lean, load_backend("h200"))
    assert f"needs {held.peak:.1f} of 140.4 GiB a device" in message
    assert f"{held.peak - 140.4:.1f} GiB too much" in message
    assert f"frozen weights {held.frozen_weights:.1f}" in message


def test_a_global_batch_that_does_not_split_is_explained(tiny):
    cluster = load_cluster(CLUSTERS / "two-ranks.yaml")
    with pytest.raises(InfeasibleError, match=r"global batch of 3 sequences.*multiple of 2"):
        search(tiny, cluster, job(256, global_batch_size=3))


@pytest.mark.parametrize(
    ("fixed", "message"),
    [
        ({"epp": 2}, "--fix: epp: cannot be forced"),
        ({"ep": 0}, "--fix: ep: must be > 0"),
        ({"tp": 2}, "--fix: tp: is not searched yet"),
    ],
)
def test_forcing_what_cannot_be_is_bad_input(tiny, fixed, message):
    with pytest.raises(InputError, match=message):
        search(tiny, load_cluster(CLUSTERS / "two-ranks.yaml"), job(256), fixed=fixed)


def test_forcing_a_layout_that_is_not_on_offer_lists_those_that_are(tiny):
    cluster = load_cluster(CLUSTERS / "two-ranks.yaml")
    with pytest.raises(InfeasibleError, match=r"has dp_replicate=2 .*on offer: 1x2x1, 1x2x2"):
        search(tiny, cluster, job(256), fixed={"dp_replicate": 2})


def test_what_the_job_fixes_is_kept(tiny):
    cluster = load_cluster(CLUSTERS / "two-ranks.yaml")
    assert search(tiny, cluster, job(256, fixed={"ep": 2})).parallelism.ep == 2
    assert search(tiny, cluster, job(256, fixed={"ep": 2}), fixed={"ep": 1}).parallelism.ep == 1


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        (Lora(rank=0), r"lora.rank: must be > 0"),
        (Lora(targets=["latent_projection"]), r"lora.targets: latent_projection: the model has no"),
        (Lora(targets=[]), r"lora.targets: nothing: the model has no such layer"),
    ],
)
def test_adapters_that_adapt_nothing_are_bad_input(tiny, lora, message):
    with pytest.raises(InputError, match=message):
        search(tiny, load_cluster(CLUSTERS / "two-ranks.yaml"), job(256, lora=lora))


def test_a_sequence_longer_than_the_model_takes_is_bad_input(tiny):
    with pytest.raises(InputError, match="sequence_length: 8192 tokens; the model takes 1 to 4096"):
        search(tiny, load_cluster(CLUSTERS / "two-ranks.yaml"), job(8192))


def device(memory_gib: float, tflops: float = 1.0, scale: float = 1.0) -> Backend:
    def fact(value: float) -> Fact:
        return Fact(value=value, origin="measured", source="test")

    return replace(
        load_backend("h200"),
        memory_gib=fact(memory_gib),
        reserved_gib=fact(0.1),
        memory_gbps=fact(10 * tflops * scale),
        matmul_tflops={"bfloat16": fact(tflops * scale)},
    )


@st.composite
def small_clusters(draw):
    sizes = draw(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=3))
    tiers, devices = [], 1
    for i, size in enumerate(sizes):
        devices *= size
        fabric = Fabric(
            kind=draw(st.sampled_from(["switch", "clos", "ring", "fullmesh"])),
            bw_gbps=draw(st.floats(0.01, 100)),
            latency_us=draw(st.floats(0, 500)),
            efficiency=draw(st.floats(0.1, 1)),
        )
        tiers.append(Tier(name=f"t{i}", size=size, devices=devices, fabric=fabric))
    memory_gib = draw(st.sampled_from([0.1, 0.12, 0.15, 0.2, 0.4, 4.0]))
    tflops = draw(st.sampled_from([0.1, 10.0, 1000.0]))
    return Cluster(name="random", device=device(memory_gib, tflops), tiers=tuple(tiers))


def brute_force(analysis, cluster, job):
    """Seconds a token of every plan that fits, enumerated without the product's own enumeration."""
    work = workload(analysis, job.lora)
    known = cost.rates(cluster.device, "bfloat16")
    world = cluster.world_size
    found = []
    tier_sizes = {t.devices for t in cluster.tiers}
    for replicas, fsdp, ep in itertools.product(range(1, world + 1), repeat=3):
        if replicas * fsdp != world or fsdp not in tier_sizes:
            continue
        if fsdp % ep or analysis.experts.count % ep:
            continue
        p = Parallelism(dp_replicate=replicas, fsdp=fsdp, ep=ep, efsdp=fsdp // ep)
        for batch, mode, reshard, dispatcher in itertools.product(
            MICRO_BATCHES, ("none", "full"), (True, False), ("none", "all_to_all", "all_gather")
        ):
            if (dispatcher == "none") != (ep == 1):
                continue
            c = Candidate(
                parallelism=p,
                micro_batch_size=batch,
                sequence_length=job.sequence_length,
                activation_checkpointing=mode,
                reshard_after_forward=reshard,
                dispatcher=dispatcher,
            )
            held = memory(work, c, cluster.device)
            fits = held.peak <= held.capacity
            if fits and oom_probability(held, cluster.device) <= MAX_OOM_PROBABILITY:
                seconds = cost.total(cost.step_time(work, c, cluster, known))
                found.append(seconds / (batch * job.sequence_length * world))
    return min(found, default=None)


def seconds_per_token(plan):
    return 1 / (plan.predicted.tokens_per_second_per_device * plan.world_size)


@settings(max_examples=40, deadline=None)
@given(cluster=small_clusters(), experts=st.sampled_from([4, 6, 8]))
def test_the_search_finds_what_brute_force_finds(small_models, cluster, experts):
    analysis = small_models[experts]
    expected = brute_force(analysis, cluster, job(512))
    if expected is None:
        with pytest.raises(InfeasibleError):
            search(analysis, cluster, job(512))
        return
    plan = search(analysis, cluster, job(512))
    assert seconds_per_token(plan) == pytest.approx(expected)
    predicted = plan.predicted
    assert 0 < predicted.lower_bound_seconds <= predicted.step_seconds
    gap = 1 - predicted.lower_bound_seconds / predicted.step_seconds
    assert predicted.optimality_gap == pytest.approx(gap)


@settings(max_examples=40, deadline=None)
@given(
    cluster=small_clusters(),
    memory_x=st.floats(1, 8),
    links_x=st.floats(1, 8),
    device_x=st.floats(1, 8),
)
def test_more_of_anything_never_makes_the_best_plan_slower(
    small_models, cluster, memory_x, links_x, device_x
):
    analysis = small_models[8]
    richer = replace(
        cluster,
        device=device(
            cluster.device.memory_gib.value * memory_x,
            cluster.device.matmul_tflops["bfloat16"].value,
            device_x,
        ),
        tiers=tuple(
            replace(t, fabric=replace(t.fabric, bw_gbps=t.fabric.bw_gbps * links_x))
            for t in cluster.tiers
        ),
    )
    try:
        before = search(analysis, cluster, job(512))
    except InfeasibleError:
        return
    after = search(analysis, richer, job(512))
    assert seconds_per_token(after) <= seconds_per_token(before) * (1 + 1e-9)


@given(
    st.lists(
        st.tuples(st.integers(1, 5), st.integers(1, 5), st.integers(0, 3)), min_size=1, max_size=20
    )
)
def test_the_pareto_front_is_what_nothing_else_beats(figures):
    c = Candidate(parallelism=Parallelism(), micro_batch_size=1, sequence_length=1)
    points = [Point(c, *(float(x) for x in f[:2]), f[2]) for f in figures]

    def beaten(p):
        me = (p.seconds_per_token, p.peak_gib, p.simplicity)
        others = ((q.seconds_per_token, q.peak_gib, q.simplicity) for q in points)
        return any(o != me and all(a <= b for a, b in zip(o, me, strict=True)) for o in others)

    assert set(pareto(points)) == {p for p in points if not beaten(p)}


def test_replicas_are_chosen_where_sharding_over_the_slow_tier_does_not_pay(tiny):
    fast = Fabric(kind="switch", bw_gbps=400, latency_us=1, efficiency=0.8)
    slow = Fabric(kind="clos", bw_gbps=0.01, latency_us=100, efficiency=0.8)
    tiers = (
        Tier(name="node", size=4, devices=4, fabric=fast),
        Tier(name="cluster", size=2, devices=8, fabric=slow),
    )
    cluster = Cluster(name="split", device=device(16, 100), tiers=tiers)
    adapters = Lora(rank=1, targets=["attention"])
    plan = search(tiny, cluster, job(1024, lora=adapters))
    assert plan.parallelism.dp_replicate == 2
    assert plan.parallelism.fsdp == 4


def test_planning_does_not_grow_with_the_number_of_devices(k3):
    """100,352 devices of one flat fabric: the tier list is all that is walked."""
    cluster = flat_cluster("big", load_backend("gb200"), 896 * 112, bw_gbps=100, latency_us=5)
    plan = search(k3, cluster, job(), fixed={"micro_batch_size": 1})
    assert plan.world_size == 100_352
    assert 896 % plan.parallelism.ep == 0
