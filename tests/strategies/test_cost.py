from dataclasses import replace
from pathlib import Path

import pytest

from analyzers.backends import load_backend
from strategies import collectives, cost
from strategies.cluster import Group, flat_cluster, load_cluster
from strategies.memory import Candidate
from strategies.schema import Lora, Parallelism
from strategies.workload import workload

CLUSTERS = Path(__file__).parents[2] / "examples" / "clusters"


@pytest.fixture(scope="module")
def supernode():
    return load_cluster(CLUSTERS / "supernode-128.yaml")


@pytest.fixture(scope="module")
def work(k3):
    return workload(k3, Lora())


def candidate(ep, tokens=4096, world=128, **settings):
    p = Parallelism(fsdp=world, ep=ep, efsdp=world // ep)
    dispatcher = "all_to_all" if ep > 1 else "none"
    base = Candidate(
        parallelism=p, micro_batch_size=1, sequence_length=tokens, dispatcher=dispatcher
    )
    return replace(base, **settings)


def expert_communication(work, cluster, ep, tokens):
    """Seconds a micro-batch over 92 layers: expert weights gathered twice, tokens exchanged twice,
    nothing overlapped."""
    kind = next(k for k in work.kinds if k.routed_parameters)
    shard = Group(128 // ep, ep)
    gather = collectives.all_gather(cluster, kind.routed_parameters * 2 / ep, shard).seconds
    return 92 * 2 * (gather + cost.exchange(work, candidate(ep, tokens), cluster).seconds)


def test_best_ep_on_a_supernode_falls_as_tokens_per_rank_rise(work, supernode):
    """Seconds a micro-batch of Kimi K3 on 128 devices (measured exchange rates of the supernode):

        tokens a rank   EP 32   EP 64   EP 128
                 1024    1.90    0.97    0.61
                 2048    2.25    1.42    1.22
                 4096    2.95    2.31    2.44
                 8192    4.35    4.11    4.88
                16384    7.15    7.71    9.75

    EP 128 wins at first (no weights to gather), then EP 64, then EP 32 (fewer copies of a token).
    """
    worked = {
        1024: (1.91, 0.97, 0.61),
        2048: (2.26, 1.42, 1.22),
        4096: (2.96, 2.32, 2.44),
        8192: (4.36, 4.11, 4.88),
        16384: (7.16, 7.71, 9.75),
    }
    best = []
    for tokens, expected in worked.items():
        row = [expert_communication(work, supernode, ep, tokens) for ep in (32, 64, 128)]
        assert row == pytest.approx(expected, rel=0.02)
        best.append((32, 64, 128)[row.index(min(row))])
    assert best == [128, 128, 64, 64, 32]


def test_tokens_are_exchanged_at_the_experts_width_once_for_each_rank(work, supernode):
    # The latent is 3584 wide; a full-width dispatch would be priced twice as high.
    distinct = 64 * (1 - (1 - 1 / 64) ** 16)
    assert cost.distinct_destinations(64, 16) == pytest.approx(distinct)
    size = 4096 * 3584 * 2 * distinct
    seconds = cost.exchange(work, candidate(64), supernode).seconds
    assert seconds == pytest.approx(size / 81e9 + size / 91e9, rel=1e-3)


@pytest.mark.parametrize(("ranks", "top_k", "expected"), [(1, 8, 1), (2, 1, 1), (8, 16, 7.06)])
def test_distinct_destinations(ranks, top_k, expected):
    assert cost.distinct_destinations(ranks, top_k) == pytest.approx(expected, rel=1e-3)


def test_a_frozen_base_costs_two_forwards_and_recomputation_one_more(work, supernode):
    known = cost.rates(supernode.device, "bfloat16")
    plain, again = (
        cost.step_time(work, candidate(64, activation_checkpointing=mode), supernode, known)
        for mode in ("none", "full")
    )
    assert again.compute / plain.compute == pytest.approx(1.5, rel=0.05)
    assert again.all_to_all == pytest.approx(1.5 * plain.all_to_all)


def test_frozen_weights_are_gathered_but_never_reduced(work, supernode):
    """Only the adapters' float32 gradients are reduce-scattered."""
    known = cost.rates(supernode.device, "bfloat16")
    step = cost.step_time(work, candidate(32), supernode, known)
    adapters = (work.dense_adapters + work.expert_adapters / 32) * 4
    bandwidth_alone = adapters / 164e9
    assert step.reduce_scatter < 2 * bandwidth_alone + 93 * 2 * 200e-6
    without = cost.step_time(
        replace(
            work, kinds=tuple(replace(k, dense_adapter=0, expert_adapter=0) for k in work.kinds)
        ),
        candidate(32),
        supernode,
        known,
    )
    assert without.reduce_scatter == 0


def test_adapters_multiply_in_every_expert_that_a_token_visits(k3, supernode):
    """Forward and two gradients: 3 * 2 * rank * (in + out) for the top 16 of 896."""
    known = cost.rates(supernode.device, "bfloat16")
    experts = workload(k3, Lora(rank=8, targets=["routed_experts"]))
    attention = workload(k3, Lora(rank=8, targets=["attention"]))
    both = workload(k3, Lora(rank=8))
    c = candidate(64)
    added = cost.lower_bound(both, c, known) - cost.lower_bound(attention, c, known)
    flops = 92 * 16 * 6 * 8 * (3584 + 6144 + 3072 + 3584) * 4096
    assert added == pytest.approx(flops / known.flops)
    compute = [cost.step_time(w, c, supernode, known).compute for w in (experts, both)]
    assert compute[0] < compute[1]


def test_packed_experts_are_unpacked_for_forward_and_for_backward(work, supernode):
    known = cost.rates(supernode.device, "bfloat16")
    plain, packed = (
        cost.step_time(work, candidate(64, expert_weight_format=form), supernode, known).compute
        for form in ("bf16", "mxfp4")
    )
    unpacked = work.routed_parameters / 64 * (0.53 + 2) / known.bandwidth
    assert packed - plain == pytest.approx(2 * unpacked)


def test_replicas_reduce_their_shards_over_the_outer_tier(work):
    cluster = load_cluster(CLUSTERS / "hgx-h200-128.yaml")
    known = cost.rates(cluster.device, "bfloat16")
    c = candidate(8, world=8)
    alone = cost.step_time(work, c, cluster, known).reduce_scatter
    copied = replace(c, parallelism=replace(c.parallelism, dp_replicate=16))
    added = cost.step_time(work, copied, cluster, known).reduce_scatter - alone
    # An all-reduce of a shard of 1/8 of each layer's float32 gradients at 45 GB/s, 2 x 15 hops.
    gradients = (work.dense_adapters + work.expert_adapters) * 4 / 8
    expected = 2 * gradients * 15 / 16 / 45e9 + 93 * 2 * 15 * 12e-6
    assert added == pytest.approx(expected, rel=1e-3)


def test_gathers_hide_behind_compute_and_only_the_rest_counts(work):
    device = load_backend("h200")
    known = cost.rates(device, "bfloat16")
    fast = flat_cluster("fast", device, 128, bw_gbps=1e6, latency_us=0)
    slow = flat_cluster("slow", device, 128, bw_gbps=1, latency_us=0)
    # Behind the fast fabric only the root group's gather, which nothing precedes, is seen.
    root = collectives.all_gather(fast, work.outer_parameters * 2, Group(128)).seconds
    assert cost.step_time(work, candidate(64), fast, known).all_gather == pytest.approx(root)
    step = cost.step_time(work, candidate(64), slow, known)
    gathers = sum(
        2 * k.layers * cost.gather_block(k, candidate(64), slow).seconds for k in work.kinds
    )
    root = collectives.all_gather(slow, work.outer_parameters * 2, Group(128)).seconds
    layers = gathers + root - step.all_gather
    assert 0 < layers < step.compute  # what was hidden is at most the compute of the layers


def test_keeping_weights_after_forward_saves_the_second_gather(work):
    device = load_backend("h200")
    known = cost.rates(device, "bfloat16")
    slow = flat_cluster("slow", device, 128, bw_gbps=1, latency_us=0)
    twice = cost.step_time(work, candidate(64), slow, known).all_gather
    once = cost.step_time(work, candidate(64, reshard_after_forward=False), slow, known).all_gather
    assert once < 0.6 * twice


def test_accumulation_repeats_everything_but_the_optimizer(work, supernode):
    known = cost.rates(supernode.device, "bfloat16")
    one = cost.step_time(work, candidate(64), supernode, known)
    three = cost.step_time(work, candidate(64, gradient_accumulation=3), supernode, known)
    for part in ("compute", "all_gather", "reduce_scatter", "all_to_all", "overhead"):
        assert getattr(three, part) == pytest.approx(3 * getattr(one, part))
    assert three.optimizer == one.optimizer


def test_few_tokens_are_bound_by_reading_the_weights(work, supernode):
    """With one token a device the step takes at least the time to read every local weight."""
    known = cost.rates(supernode.device, "bfloat16")
    c = candidate(128, tokens=1)
    step = cost.step_time(work, c, supernode, known)
    layers = sum(k.layers * (k.dense_parameters + k.routed_parameters / 128) for k in work.kinds)
    assert step.compute > 2 * layers * 2 / known.bandwidth
    assert cost.lower_bound(work, c, known) < step.compute / 10


def test_every_rate_says_where_it_came_from(work, supernode):
    found = cost.origins(work, candidate(64), supernode)
    assert found["token_exchange"] == "measured"
    assert found["weight_gather"] == "spec"
    assert found["matmul"] == supernode.device.matmul_tflops["bfloat16"].origin
    assumed = flat_cluster("assumed", supernode.device, 128, bw_gbps=50, latency_us=5)
    assert cost.origins(work, candidate(64), assumed)["token_exchange"] == "default"


def test_a_vendor_peak_is_not_taken_as_achievable():
    device = load_backend("ascend-910c")
    assert device.matmul_tflops["bfloat16"].origin == "spec"
    assert cost.rates(device, "bfloat16").flops == pytest.approx(752e12 * cost.PEAK_SHARE["matmul"])
    h200 = load_backend("h200")
    measured = h200.matmul_tflops["bfloat16"].value
    assert cost.rates(h200, "bfloat16").flops == pytest.approx(measured * 1e12)
