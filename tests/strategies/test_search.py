from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from analyzers.backends import Fact, load_backend
from analyzers.documents import read_document, to_data, write_document
from analyzers.errors import InfeasibleError, InputError
from strategies import cost, load_cluster, search
from strategies.alternatives import pareto
from strategies.candidates import columns
from strategies.cluster import Cluster, Fabric, Tier, flat_cluster
from strategies.schema import Job, Lora, Parallelism, Plan, Routing
from strategies.solver import MAX_OOM_PROBABILITY, Points
from strategies.space import FEATURES
from strategies.workload import runtime_workload

CLUSTERS = Path(__file__).parents[2] / "examples" / "clusters"


def job(sequence_length=4096, **given):
    return Job(model="m", cluster="c", backend="b", sequence_length=sequence_length, **given)


@pytest.fixture(scope="module")
def k3_plan(k3):
    return search(k3, load_cluster(CLUSTERS / "supernode-128.yaml"), job())


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
        assert p.efsdp * p.ep == p.fsdp * p.tp
        assert p.pp * p.dp_replicate * p.fsdp * p.tp == cluster.world_size


@pytest.mark.parametrize("name", sorted(path.stem for path in CLUSTERS.glob("*.yaml")))
def test_a_plan_has_axes_that_the_runtime_lacks_only_when_they_are_allowed(tiny, name):
    plan = search(tiny, load_cluster(CLUSTERS / f"{name}.yaml"), job(256))
    assert plan.runnable
    offered = [plan, *(a for a in plan.alternatives if a.runnable)]
    assert {(o.parallelism.pp, o.parallelism.tp, o.parallelism.cp) for o in offered} == {(1, 1, 1)}


@pytest.mark.parametrize("ep", [24, 48, 72, 96])
def test_an_ep_that_does_not_divide_the_experts_is_refused(k3, ep):
    cluster = load_cluster(CLUSTERS / "cloudmatrix384.yaml")
    with pytest.raises(InputError, match="must divide 896 experts and 384 devices") as caught:
        search(k3, cluster, job(), fixed={"ep": ep})
    assert "one of: 1, 2, 4, 8, 16, 32, 64, 128" in str(caught.value)


def test_the_contract_of_the_document(k3_plan):
    data = to_data(k3_plan)
    keys = "world_size parallelism micro_batch_size sequence_length gradient_accumulation"
    keys += " activation_checkpointing expert_weight_format dispatcher capacity predicted"
    assert set(keys.split()) | {"alternatives", "rejected", "explanation"} <= data.keys()
    assert set(data["parallelism"]) == {"pp", "dp_replicate", "fsdp", "tp", "cp", "ep", "efsdp"}
    assert set(data["capacity"]) == {"factor", "overflow"}
    predicted = {"step_seconds", "tokens_per_second_per_device", "memory_gib", "oom_probability"}
    assert predicted | {"lower_bound_seconds", "optimality_gap"} <= data["predicted"].keys()
    assert "peak" in data["predicted"]["memory_gib"]


def test_packed_and_unpacked_experts_are_planned_side_by_side(k3, k3_plan):
    assert k3_plan.expert_weight_format == "bf16"
    assert k3_plan.runnable
    assert k3_plan.predicted.memory_gib.frozen_weights * 2**30 == pytest.approx(43.4e9, rel=0.01)
    packed = next(a for a in k3_plan.alternatives if a.why.startswith("with experts held packed"))
    assert packed.settings["expert_weight_format"] == "mxfp4"
    assert not packed.runnable
    assert packed.missing == ["experts held packed"]
    assert packed.predicted is not None
    assert packed.predicted.memory_gib.frozen_weights * 2**30 == pytest.approx(12.2e9, rel=0.01)
    cluster = load_cluster(CLUSTERS / "supernode-128.yaml")
    plain = replace(k3, experts=replace(k3.experts, weight_format="bf16"))
    assert not any("packed" in a.why for a in search(plain, cluster, job()).alternatives)


def test_what_the_runtime_cannot_run_is_planned_only_when_it_is_allowed(k3, k3_plan):
    assert k3_plan.missing == []
    assert k3_plan.parallelism.pp == k3_plan.parallelism.tp == k3_plan.parallelism.cp == 1
    cluster = load_cluster(CLUSTERS / "supernode-128.yaml")
    free = search(k3, cluster, job(), allow=FEATURES)
    assert not free.runnable
    assert free.missing
    assert seconds_per_token(free) < seconds_per_token(k3_plan)
    assert any(a.why.startswith("fastest that can be run") for a in free.alternatives)
    # What all features together gain is told beside the plan that can be run.
    told = [a for a in k3_plan.alternatives if a.why.startswith("with all of these")]
    assert told[0].predicted is not None
    speed = told[0].predicted.tokens_per_second_per_device
    assert speed == pytest.approx(free.predicted.tokens_per_second_per_device)
    assert free.searched is not None
    assert free.searched.priced < free.searched.plans // 10


def test_the_curve_of_a_plan_is_of_that_plan(k3, k3_plan, tmp_path):
    """Its own settings, seconds and constants, whatever was allowed; with EP alone another."""
    cluster = load_cluster(CLUSTERS / "supernode-128.yaml")
    free = search(k3, cluster, job(), allow=FEATURES)
    slow = replace(cost.load_constants(), matmul_share=0.5)
    refitted = search(k3, cluster, job(), constants=slow)
    for plan in (k3_plan, free, refitted):
        assert plan.ep_curve
        assert plan.explanation[1].startswith(plan.ep_curve.kept)
        tokens = plan.micro_batch_size * plan.sequence_length // plan.parallelism.cp
        row = next(r for r in plan.ep_curve.rows if r.tokens_per_rank == tokens)
        cell = row.by_ep[plan.parallelism.ep]
        # A step of one micro-batch; the dispatcher of the curve is the faster of two.
        assert cell.seconds == pytest.approx(plan.predicted.step_seconds, rel=0.03)
    assert refitted.ep_curve.rows[0].by_ep[32].seconds > k3_plan.ep_curve.rows[0].by_ep[32].seconds
    assert read_document(Plan, write_document(free, tmp_path / "plan.json")) == free


def test_a_plan_that_can_have_one_ep_alone_has_no_curve(tiny, dense):
    lone = flat_cluster("one", load_backend("h200"), 1, bw_gbps=1, latency_us=1)
    assert search(tiny, lone, job(256)).ep_curve is None
    assert search(dense, load_cluster(CLUSTERS / "hgx-h200-128.yaml"), job()).ep_curve is None


def test_full_fine_tuning_is_planned_and_marked(tiny):
    cluster = load_cluster(CLUSTERS / "two-ranks.yaml")
    lora = search(tiny, cluster, job(256))
    full = search(tiny, cluster, job(256, training="full"))
    assert lora.runnable
    assert full.missing == ["full fine-tuning"]
    assert full.predicted.memory_gib.optimizer > lora.predicted.memory_gib.optimizer


def test_uneven_routing_makes_the_step_longer_and_copies_worth_pricing(k3, k3_plan):
    cluster = load_cluster(CLUSTERS / "supernode-128.yaml")
    skewed = search(k3, cluster, job(routing=Routing(exponent=0.6)))
    assert seconds_per_token(skewed) > seconds_per_token(k3_plan)
    assert "power law of exponent 0.6" in skewed.explanation[-1]
    for feature in ("copies of the most loaded experts", "a limit on the tokens of an expert"):
        (found,) = [a for a in skewed.alternatives if a.why.startswith(f"with {feature}")]
        assert found.runnable


def test_alternatives_give_up_time_for_memory_or_simplicity(k3_plan):
    best = k3_plan.predicted
    per_token = best.step_seconds / k3_plan.micro_batch_size
    runnable = [a for a in k3_plan.alternatives if a.runnable]
    for a in runnable:
        assert a.step_seconds / a.micro_batch_size >= per_token
    assert min(a.memory_gib for a in runnable) < best.memory_gib.peak


def test_each_family_that_lost_names_the_limit_that_binds(k3_plan):
    families = k3_plan.families
    assert set(families) >= {"EP 1", "EP 64", "EP 128", "no recomputation", "replicas"}
    assert all(why.startswith(("time: ", "memory: ")) for why in families.values())
    # bf16 experts of all 92 layers do not fit beside one another's gathered blocks.
    assert families["EP 1"].startswith("memory: at least")
    assert "unsharded blocks" in families["EP 1"]


def test_the_survey_has_every_ep_and_micro_batch_once(k3, k3_plan):
    pairs = [(c.ep, c.micro_batch_size) for c in k3_plan.survey]
    assert sorted(pairs) == [
        (ep, n) for ep in (1, 2, 4, 8, 16, 32, 64, 128) for n in (1, 2, 4, 8, 16)
    ]
    fastest = max(
        (c for c in k3_plan.survey if c.fits), key=lambda c: c.tokens_per_second_per_device
    )
    assert fastest.ep == k3_plan.parallelism.ep
    assert fastest.step_seconds == pytest.approx(k3_plan.predicted.step_seconds)
    assert all(c.oom_probability > MAX_OOM_PROBABILITY for c in k3_plan.survey if not c.fits)


def test_intervals_hold_the_prediction(k3_plan):
    p = k3_plan.predicted
    assert p.step_seconds_interval[0] < p.step_seconds < p.step_seconds_interval[1]
    assert p.memory_gib_interval[0] < p.memory_gib.peak < p.memory_gib_interval[1]


def test_the_same_question_gets_the_same_answer(k3, k3_plan, tmp_path):
    again = search(k3, load_cluster(CLUSTERS / "supernode-128.yaml"), job())
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
        search(k3, load_cluster(CLUSTERS / "h200-x2.yaml"), job())
    message = str(caught.value)
    assert caught.value.exit_status == 3
    assert "\n" not in message
    cluster = load_cluster(CLUSTERS / "h200-x2.yaml")
    lean = columns(fsdp=2, ep=2, recomputation=2, dispatcher=3)
    held = cost.evaluate(runtime_workload(k3, Lora()), cluster, lean).memory
    peak = float(held.peak[0]) / 2**30
    assert f"needs {peak:.1f} of 140.4 GiB a device" in message
    assert f"{peak - 140.4:.1f} GiB too much" in message
    assert f"frozen weights {float(held.frozen_weights[0]) / 2**30:.1f}" in message
    # 5,178 GiB of weights and 162 of adapters in training, 137.4 GiB a device.
    assert "(use more devices: weights and adapters alone fill 39)" in message


def test_a_number_of_devices_that_divides_badly_is_told_of_idle_ones(k3):
    node = load_cluster(CLUSTERS / "supernode-128.yaml")
    odd = replace(node, tiers=(replace(node.tiers[0], size=127, devices=127),))
    with pytest.raises(InfeasibleError, match="EP 112 does not divide 127 devices: --allow-idle"):
        search(k3, odd, job())
    assert 0 < search(k3, odd, job(), allow_idle=True).idle_devices <= 127 - 112


def test_a_plan_whose_ep_the_number_of_devices_holds_down_says_so(k3):
    """15 nodes of 8: EP 8 on 120 is slower than a larger EP on 112, idle devices and all."""
    hgx = load_cluster(CLUSTERS / "hgx-h200-128.yaml")
    node, top = hgx.tiers
    fifteen = replace(hgx, tiers=(node, replace(top, size=15, devices=120)), node_names=())
    all_used = search(k3, fifteen, job())
    assert all_used.parallelism.ep == 8
    (hint,) = [line for line in all_used.explanation if "--allow-idle" in line]
    assert "EP 8 is the largest that divides 896 experts and 120 devices; on 112 EP 112" in hint
    some_idle = search(k3, fifteen, job(), allow_idle=True)
    assert seconds_per_token(some_idle) * 1.4 < seconds_per_token(all_used)
    for plan in (some_idle, search(k3, hgx, job())):
        assert not any("--allow-idle" in line for line in plan.explanation)


def test_nothing_fits_says_which_feature_would_help(k3):
    """2.8 T parameters in bf16 need 64 devices of 128 GiB; packed they lie on 32."""
    node = load_cluster(CLUSTERS / "supernode-128.yaml")
    half = replace(node.tiers[1], size=4, devices=32)
    with pytest.raises(InfeasibleError, match=r"experts held packed \(--allow packed_experts\)"):
        search(k3, replace(node, tiers=(node.tiers[0], half)), job(1024))


def test_a_global_batch_that_does_not_split_is_explained(tiny):
    cluster = load_cluster(CLUSTERS / "two-ranks.yaml")
    with pytest.raises(InfeasibleError, match=r"global batch of 3 sequences.*multiple of 2"):
        search(tiny, cluster, job(256, global_batch_size=3))


@pytest.mark.parametrize(
    ("fixed", "message"),
    [
        ({"epp": 2}, "--fix: epp: cannot be forced"),
        ({"ep": 0}, "--fix: ep: must be 1 to"),
        ({"tp": 2}, "--fix: tp: the runtime cannot run tensor parallelism yet"),
    ],
)
def test_forcing_what_cannot_be_is_bad_input(tiny, fixed, message):
    with pytest.raises(InputError, match=message):
        search(tiny, load_cluster(CLUSTERS / "two-ranks.yaml"), job(256), fixed=fixed)


def test_forcing_a_layout_that_is_not_on_offer_lists_those_that_are(tiny):
    cluster = load_cluster(CLUSTERS / "two-ranks.yaml")
    with pytest.raises(
        InfeasibleError, match=r"has dp_replicate=2, ep=2 .*on offer: 2x1x1, 1x2x1, 1x2x2"
    ):
        search(tiny, cluster, job(256), fixed={"dp_replicate": 2, "ep": 2})


def test_a_dense_model_takes_no_expert_parallelism(dense):
    cluster = load_cluster(CLUSTERS / "two-ranks.yaml")
    with pytest.raises(InputError, match="--fix: ep: the model has no experts"):
        search(dense, cluster, job(256), fixed={"ep": 2})
    plan = search(dense, cluster, job(256))
    said = [*plan.explanation, *plan.rejected, *plan.families]
    said += [a.why for a in plan.alternatives]
    assert not any("EP" in line or "expert" in line for line in said)


def test_what_the_job_fixes_is_kept(tiny):
    cluster = load_cluster(CLUSTERS / "two-ranks.yaml")
    assert search(tiny, cluster, job(256, fixed={"ep": 2})).parallelism.ep == 2
    assert search(tiny, cluster, job(256, fixed={"ep": 2}), fixed={"ep": 1}).parallelism.ep == 1


def test_a_feature_that_is_not_known_is_bad_input(tiny):
    with pytest.raises(InputError, match="--allow: ppp: nothing of that name"):
        search(tiny, load_cluster(CLUSTERS / "two-ranks.yaml"), job(256), allow=["ppp"])


def test_a_forced_axis_is_kept_where_it_is_allowed(k3):
    cluster = load_cluster(CLUSTERS / "supernode-128.yaml")
    plan = search(k3, cluster, job(), fixed={"pp": 4}, allow=["pp"])
    assert plan.parallelism.pp == 4
    assert plan.gradient_accumulation == 16
    assert plan.missing == ["pipeline parallelism"]


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        (Lora(rank=0), r"lora.rank: must be 1 to"),
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


def seconds_per_token(plan):
    return 1 / (plan.predicted.tokens_per_second_per_device * plan.world_size)


@given(
    st.lists(
        st.tuples(st.integers(1, 5), st.integers(1, 5), st.integers(0, 3)), min_size=1, max_size=20
    )
)
def test_the_pareto_front_is_what_nothing_else_beats(figures):
    time, peak, simplicity = (np.array(column, float) for column in zip(*figures, strict=True))
    points = Points(
        plans=columns(ep=np.arange(1, len(time) + 1)),
        seconds=time,
        per_token=time,
        peak=peak,
        deviation=0 * time,
        simplicity=simplicity,
        fits=time > 0,
    )

    def beaten(me):
        return any(o != me and all(a <= b for a, b in zip(o, me, strict=True)) for o in figures)

    front = pareto(points)
    found = zip(front.per_token, front.peak, front.simplicity, strict=True)
    assert set(found) == {f for f in figures if not beaten(f)}


def test_replicas_are_chosen_where_sharding_over_the_slow_tier_does_not_pay(tiny):
    def fact(value: float) -> Fact:
        return Fact(value=value, origin="measured", source="test")

    device = replace(
        load_backend("h200"),
        memory_gib=fact(16),
        reserved_gib=fact(0.1),
        memory_gbps=fact(1000),
        matmul_tflops={"bfloat16": fact(100)},
    )
    fast = Fabric(kind="switch", bw_gbps=400, latency_us=1, efficiency=0.8)
    slow = Fabric(kind="clos", bw_gbps=0.01, latency_us=100, efficiency=0.8)
    tiers = (
        Tier(name="node", size=4, devices=4, fabric=fast),
        Tier(name="cluster", size=2, devices=8, fabric=slow),
    )
    cluster = Cluster(name="split", device=device, tiers=tiers)
    adapters = Lora(rank=1, targets=["attention"])
    plan = search(tiny, cluster, job(1024, lora=adapters))
    assert plan.parallelism.dp_replicate >= 2
    assert plan.parallelism.fsdp <= 4


def test_idle_devices_are_counted(tiny):
    """Two nodes behind a link so slow that one of them alone is faster."""
    fast = Fabric(kind="switch", bw_gbps=400, latency_us=1, efficiency=0.8)
    slow = Fabric(kind="clos", bw_gbps=1e-6, latency_us=1e5, efficiency=0.8)
    tiers = (
        Tier(name="node", size=4, devices=4, fabric=fast),
        Tier(name="cluster", size=2, devices=8, fabric=slow),
    )
    names = ("a", "b")
    cluster = Cluster(
        name="split", device=load_backend("h200"), tiers=tiers, node_names=names, hostlist=names
    )
    plan = search(tiny, cluster, job(1024), allow_idle=True)
    assert (plan.world_size, plan.idle_devices) == (4, 4)
    assert seconds_per_token(plan) < seconds_per_token(search(tiny, cluster, job(1024)))


def test_planning_does_not_grow_with_the_number_of_devices(k3):
    """100,352 devices of one flat fabric: the tier list is all that is walked."""
    cluster = flat_cluster("big", load_backend("gb200"), 896 * 112, bw_gbps=100, latency_us=5)
    plan = search(k3, cluster, job(), fixed={"micro_batch_size": 1})
    assert plan.world_size == 100_352
    assert 896 % plan.parallelism.ep == 0


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"lora": Lora(rank=10**26)}, "lora.rank"),
        ({"global_batch_size": 10**26}, "global_batch_size"),
        ({"fixed": {"micro_batch_size": 10**26}}, "micro_batch_size"),
    ],
)
def test_numbers_beyond_all_use_are_bad_input_at_once(tiny, given, field):
    with pytest.raises(InputError, match=f"{field}: must be 1 to"):
        search(tiny, load_cluster(CLUSTERS / "two-ranks.yaml"), job(128, **given))


def test_a_forced_axis_that_cannot_be_lists_its_values(k3):
    cluster = load_cluster(CLUSTERS / "supernode-128.yaml")
    with pytest.raises(InfeasibleError, match=r"has tp=5 \(tp may be 1, 2, 4"):
        search(k3, cluster, job(), fixed={"tp": 5}, allow={"tp"})


def test_the_multiple_that_a_global_batch_lacks_is_that_of_the_forced_layout(k3):
    cluster = load_cluster(CLUSTERS / "supernode-128.yaml")
    with pytest.raises(InfeasibleError, match="give a multiple of 32,"):
        search(k3, cluster, job(global_batch_size=33), fixed={"tp": 4}, allow={"tp"})


def test_what_saves_time_is_not_said_to_save_none(k3):
    cluster = load_cluster(CLUSTERS / "hgx-h200-128.yaml")
    plan = search(k3, cluster, job(), fixed={"tp": 2}, allow={"tp", "packed_experts"})
    told = [a.why.removeprefix("with ").split(":")[0] for a in plan.alternatives]
    (vain,) = (said for said in plan.explanation if said.startswith("Alone, none"))
    assert "hierarchical dispatch" in told
    assert not [name for name in told if name in vain]
