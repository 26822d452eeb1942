"""The search is exact: what it finds is what trying everything finds, with the real cost model."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from analyzers.backends import Backend, Fact, load_backend
from strategies import cost
from strategies.candidates import columns
from strategies.cluster import Cluster, Fabric, Host, Tier
from strategies.parts import parts
from strategies.problem import make_problem
from strategies.schema import Job, Routing
from strategies.solver import Prices, price_all, solve
from strategies.space import FEATURES


def job(sequence_length=512, **given):
    return Job(model="m", cluster="c", backend="b", sequence_length=sequence_length, **given)


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
def small_clusters(draw, most=16):
    sizes = draw(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=3))
    assume(math.prod(sizes) <= most)
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
    memory_gib = draw(st.sampled_from([1.0, 3.0, 4.0, 6.0, 9.0, 20.0]))
    tflops = draw(st.sampled_from([0.1, 10.0, 1000.0]))
    host = draw(
        st.sampled_from([None, Host(mem_gib=0.5, d2h_gbps=1), Host(mem_gib=99, d2h_gbps=9)])
    )
    return Cluster(name="random", device=device(memory_gib, tflops), tiers=tuple(tiers), host=host)


jobs = st.builds(
    job,
    global_batch_size=st.sampled_from([None, 12, 32]),
    training=st.sampled_from(["lora", "full"]),
    routing=st.builds(Routing, exponent=st.sampled_from([0.0, 0.4, 1.0])),
)


def every_plan(analysis, cluster, job, allow):
    """All rows, enumerated without the product's own enumeration: by counting through all axes."""
    world, layers, experts = cluster.world_size, 3, analysis.experts.count
    rows = []
    ones = [1]
    for pp, replicas, tp in itertools.product(
        range(1, world + 1) if "pp" in allow else ones,
        range(1, world + 1),
        [1, 2, 4] if "tp" in allow else ones,  # the models have four heads
    ):
        if pp > layers or world % (pp * replicas * tp):
            continue
        fsdp = world // (pp * replicas * tp)
        for cp, ep, chunks, inside, outside, batch in itertools.product(
            range(1, fsdp + 1) if "cp" in allow else ones,
            range(1, fsdp * tp + 1),
            (1, 2, 4) if "pp" in allow else ones,
            (0, 1) if "mapping" in allow and len(cluster.tiers) > 1 else (0,),
            (0, 1) if "pp" in allow else (0,),
            range(1, 65) if job.global_batch_size else (1, 2, 4, 8, 16),
        ):
            if fsdp % cp or (cp > 1 and job.sequence_length % (2 * cp)):
                continue
            if (
                (fsdp * tp) % ep
                or experts % ep
                or (chunks > 1 and (pp == 1 or pp * chunks > layers))
            ):
                continue
            if (inside and not 1 < ep < fsdp * tp) or (outside and (pp == 1 or replicas == 1)):
                continue
            steps = 4 * pp if pp > 1 else 1
            if job.global_batch_size:
                steps, rest = divmod(job.global_batch_size, replicas * fsdp // cp * batch)
                if rest or not steps or (chunks > 1 and steps % pp):
                    continue
            rows.append((pp, replicas, fsdp, tp, cp, ep, chunks, batch, steps, inside, outside))
    if not rows:
        return columns().take(slice(0, 0))
    uneven = job.routing.exponent > 0
    capacities = [(math.inf, False)]
    if "capacity" in allow and uneven:
        capacities += [(2.0, True), (1.5, True), (1.25, True)]
    settings = list(
        itertools.product(
            (0, 1, 2) if "selective" in allow else (0, 2),
            (True, False),
            (0, 1, 2, 3) if "hierarchical" in allow else (0, 1, 3),
            capacities,
            (0, 1, 2, 4) if "copies" in allow and uneven else (0,),
            (False, True) if "offload" in allow and cluster.host else (False,),
        )
    )
    layout = np.repeat(np.array(rows, dtype=int).reshape(-1, 11), len(settings), axis=0).T
    recompute, reshard, dispatcher, capacity, copies, offload = (
        np.array(column * len(rows)) for column in map(list, zip(*settings, strict=True))
    )
    capacity = capacity.reshape(-1, 2)
    names = "pp dp_replicate fsdp tp cp ep virtual_stages micro_batch_size gradient_accumulation"
    c = columns(
        **dict(zip(names.split(), layout, strict=False)),
        shards_inside=layout[9] > 0,
        replicas_outside=layout[10] > 0,
        sequence_length=job.sequence_length,
        recomputation=recompute,
        reshard_after_forward=reshard,
        dispatcher=dispatcher,
        capacity_factor=capacity[:, 0],
        reroute=capacity[:, 1] > 0,
        expert_copies=copies,
        offload=offload,
    )
    valid = (c.dispatcher == 0) == (c.ep == 1)
    valid &= c.reshard_after_forward | (c.fsdp > 1)
    valid &= (np.isinf(c.capacity_factor) & (c.expert_copies == 0)) | (c.ep > 1)
    return c.take(valid)


def fastest_of(c, problem):
    """Seconds a token of the best row that fits, None where none does."""
    if not len(c):
        return None
    costs = cost.evaluate(problem.work, problem.cluster, c)
    fits = (costs.peak <= costs.capacity) & (costs.oom_probability <= 0.05)
    if not fits.any():
        return None
    sequences = c.micro_batch_size * c.gradient_accumulation * c.dp_replicate * (c.fsdp // c.cp)
    return float((costs.seconds / (sequences * c.sequence_length))[fits].min())


@settings(max_examples=200, deadline=None)
@given(
    cluster=small_clusters(),
    experts=st.sampled_from([4, 6, 8]),
    job=jobs,
    allow=st.sampled_from([(), ("pp",), ("tp", "cp"), ("capacity", "copies"), tuple(FEATURES)]),
)
def test_the_search_finds_what_brute_force_finds(small_models, cluster, experts, job, allow):
    analysis = small_models[experts]
    problem = make_problem(analysis, cluster, job, allow=allow)
    found = solve(problem.space(allow), problem.pricing)
    rows = every_plan(analysis, cluster, job, allow)
    # Within one node a hierarchical exchange is the direct one, so it is not searched there.
    assert found.plans >= len(rows.take(rows.dispatcher != 2))
    expected = fastest_of(rows, problem)
    if expected is None:
        assert found.best is None
        return
    assert found.best is not None
    assert float(found.best.per_token[0]) == pytest.approx(expected, rel=1e-9)
    assert 0 < found.bound <= expected * (1 + 1e-9)
    assert found.priced + found.too_large + found.too_slow == found.plans


@settings(max_examples=60, deadline=None)
@given(cluster=small_clusters(), experts=st.sampled_from([4, 6, 8]), job=jobs)
def test_no_plan_is_below_its_bounds(small_models, cluster, experts, job):
    problem = make_problem(small_models[experts], cluster, job)
    space = problem.space(FEATURES)
    if not len(space.layouts):
        return
    rows, picks = space.branches(slice(0, len(space.layouts)))
    c = space.leaves(space.stems(rows, picks))
    costs = cost.evaluate(problem.work, cluster, c)
    pricing = problem.pricing
    for even in (False, True):
        assert (pricing.time_bound(c, even=even) <= costs.seconds * (1 + 1e-9)).all()
    assert (cost.memory_bound(problem.work, cluster, c).peak <= costs.peak * (1 + 1e-9)).all()
    assert (cost.memory_bound(pricing.even, cluster, c).peak <= costs.peak * (1 + 1e-9)).all()


@settings(max_examples=60, deadline=None)
@given(
    cluster=small_clusters(),
    job=jobs,
    memory_x=st.floats(1, 8),
    links_x=st.floats(1, 8),
    device_x=st.floats(1, 8),
)
def test_more_memory_or_bandwidth_never_makes_the_best_plan_slower(
    small_models, cluster, job, memory_x, links_x, device_x
):
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
        host=cluster.host
        and Host(mem_gib=cluster.host.mem_gib * memory_x, d2h_gbps=cluster.host.d2h_gbps * links_x),
    )
    before, after = (
        _best(make_problem(small_models[8], c, job, allow=FEATURES)) for c in (cluster, richer)
    )
    assert after <= before * (1 + 1e-9)


@settings(max_examples=40, deadline=None)
@given(cluster=small_clusters(most=8), job=jobs, tier=st.integers(0, 2), more=st.integers(1, 2))
def test_more_devices_never_make_it_slower_where_some_may_stay_idle(
    small_models, cluster, job, tier, more
):
    """The outermost tier grows; a part of the smaller cluster is a part of the larger one."""
    last = cluster.tiers[-1]
    size = last.size + more
    grown = replace(last, size=size, devices=last.devices // last.size * size)
    larger = replace(cluster, tiers=(*cluster.tiers[:-1], grown))
    best = [
        min(_best(make_problem(small_models[8], part, job)) for part in parts(c))
        for c in (cluster, larger)
    ]
    assert best[1] <= best[0] * (1 + 1e-9)


def _best(problem) -> float:
    found = solve(problem.space(problem.allow), problem.pricing)
    return float(found.best.per_token[0]) if found.best else math.inf


class Scattered:
    """A cost without any structure: what it adds to the bound is a hash of the settings."""

    def __init__(self, seed: int, capacity: float) -> None:
        self.seed, self.capacity = seed, capacity

    def _noise(self, c, names) -> np.ndarray:
        key = np.full(len(c), self.seed, dtype=np.uint64)
        for name in names:
            key = (key ^ getattr(c, name).astype(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
            key ^= key >> np.uint64(29)
        return (key % np.uint64(1 << 20)).astype(float) / (1 << 20)

    def time_bound(self, c, *, even=False):
        return 1e-3 + self._noise(c, ("fsdp", "ep", "micro_batch_size", "recomputation"))

    def memory_bound(self, c, *, even=False):
        return self._noise(c, ("fsdp", "tp", "micro_batch_size"))

    def evaluate(self, c):
        names = ("fsdp", "ep", "pp", "cp", "recomputation", "dispatcher", "reshard_after_forward")
        return Prices(
            seconds=self.time_bound(c) + 0.3 * self._noise(c, names),
            peak=self.memory_bound(c) + 0.3 * self._noise(c, (*names, "offload")),
            deviation=np.zeros(len(c)),
        )


@settings(max_examples=50, deadline=None)
@given(cluster=small_clusters(), seed=st.integers(1, 1 << 40), capacity=st.floats(0, 1.3))
def test_the_solver_is_exact_for_any_cost_with_true_bounds(small_models, cluster, seed, capacity):
    problem = make_problem(small_models[8], cluster, job(), allow=FEATURES)
    pricing, space = Scattered(seed, capacity), problem.space(FEATURES)
    table = price_all(space, pricing)
    found = solve(space, pricing)
    if not table.fits.any():
        assert found.best is None
        return
    assert found.best is not None
    assert found.best.per_token[0] == table.per_token[table.fits].min()
    # A plan to beat is only ever beaten or equalled.
    target = float(np.median(table.per_token))
    again = solve(space, pricing, to_beat=target)
    if found.best.per_token[0] <= target:
        assert again.best is not None
        assert again.best.plans.row(0) == found.best.plans.row(0)
    else:
        assert again.best is None


def test_equal_plans_are_told_apart_by_simplicity_then_memory(small_models):
    class Flat(Scattered):
        def time_bound(self, c, *, even=False):
            return c.micro_batch_size * c.gradient_accumulation * (c.dp_replicate * c.fsdp // c.cp)

        def evaluate(self, c):
            zero = np.zeros(len(c))
            return Prices(seconds=self.time_bound(c), peak=zero, deviation=zero)

        def memory_bound(self, c, *, even=False):
            return np.zeros(len(c))

    fabric = Fabric(kind="switch", bw_gbps=10)
    cluster = Cluster(
        name="flat", device=device(4), tiers=(Tier(name="n", size=8, devices=8, fabric=fabric),)
    )
    problem = make_problem(small_models[8], cluster, job(), allow=FEATURES)
    best = solve(problem.space(FEATURES), Flat(0, 1.0)).best
    assert best is not None
    row = best.plans.row(0)
    assert (row["pp"], row["tp"], row["cp"], row["ep"], row["fsdp"]) == (1, 1, 1, 1, 8)
    assert row["reshard_after_forward"]
    assert row["recomputation"] == 0


def test_the_order_of_ep_and_shards_decides_which_of_them_crosses_the_slow_tier(k3):
    """EP 4 x 4 shards on 4 nodes of 4: what lies inside a node is fast, the other is slow."""
    fast = Fabric(kind="switch", bw_gbps=400, latency_us=1, efficiency=1)
    slow = Fabric(kind="switch", bw_gbps=4, latency_us=1, efficiency=1)
    tiers = (
        Tier(name="node", size=4, devices=4, fabric=fast),
        Tier(name="cluster", size=4, devices=16, fabric=slow),
    )
    cluster = Cluster(name="two", device=load_backend("h200"), tiers=tiers)
    problem = make_problem(k3, cluster, job())
    rows = columns(fsdp=16, ep=4, dispatcher=1, shards_inside=np.array([False, True]))
    assert rows.ep_stride.tolist() == [1, 4]
    assert rows.efsdp_stride.tolist() == [4, 1]
    time = cost.evaluate(problem.work, cluster, rows).time
    # The same bytes at a hundredth of the rate, but for fixed costs.
    ratio = time.all_to_all[1] / time.all_to_all[0]
    assert 50 < ratio < 100
    assert time.all_gather[1] < time.all_gather[0] / 4


def test_replicas_around_stages_make_stages_neighbours():
    rows = columns(pp=4, dp_replicate=2, fsdp=8, replicas_outside=np.array([False, True]))
    assert rows.stage_stride.tolist() == [16, 8]
    assert rows.replica_stride.tolist() == [8, 32]
