"""Kimi K3 (2.78 T parameters, 896 experts in a latent of 3584) on 128 devices of one supernode."""

from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

from analyzers.backends import load_backend
from strategies.candidates import columns
from strategies.cluster import flat_cluster, load_cluster
from strategies.cost import collectives, evaluate
from strategies.cost.communication import exchange
from strategies.cost.compute import PEAK_SHARE, rates, routed
from strategies.cost.routing import distinct_domains
from strategies.schema import Lora
from strategies.workload import workload

CLUSTERS = Path(__file__).parents[3] / "examples" / "clusters"


@pytest.fixture(scope="module")
def supernode():
    return load_cluster(CLUSTERS / "supernode-128.yaml")


@pytest.fixture(scope="module")
def work(k3):
    return workload(k3, Lora())


SLOWEST = 1 + 0.02 * 3.1151
"""Of 128 devices whose speeds deviate by 2 %: sqrt(2 ln 128) deviations above the mean."""


def plan(ep, tokens=4096, world=128, **settings):
    ep = np.atleast_1d(ep)
    given = {
        "fsdp": world,
        "ep": ep,
        "dispatcher": (ep > 1).astype(int),
        "sequence_length": tokens,
    }
    return columns(**given | settings)


def exchanged(work, cluster, c, plain):
    known = rates(cluster.device)
    return exchange(work, c, cluster, known, plain, routed(work, c))


def test_best_ep_on_a_supernode_falls_as_tokens_per_rank_rise(work, supernode, plain):
    """Seconds a micro-batch of expert communication alone, over 92 layers, worked out by hand from
    the supernode's measured exchange rates: expert weights gathered twice, tokens exchanged twice,
    nothing overlapped.

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
    kind = next(k for k in work.kinds if k.routed_parameters)
    best = []
    for tokens, expected in worked.items():
        c = plan([32, 64, 128], tokens)
        weights = kind.routed_parameters * 2 / c.ep
        gather = collectives.all_gather(supernode, weights, c.efsdp, c.ep)
        row = 92 * 2 * (gather + exchanged(work, supernode, c, plain))
        assert row == pytest.approx(expected, rel=0.02)
        best.append(int(c.ep[row.argmin()]))
    assert best == [128, 128, 64, 64, 32]


def test_tokens_are_exchanged_at_the_experts_width_once_for_each_rank(work, supernode, plain):
    # The latent is 3584 wide; a full-width dispatch would be priced twice as high.
    distinct = 64 * (1 - (1 - 1 / 64) ** 16)
    assert distinct_domains(work.choice, 64) == pytest.approx(distinct)
    size = 4096 * 3584 * 2 * distinct
    seconds = exchanged(work, supernode, plan(64), plain)[0]
    assert seconds == pytest.approx(size / 81e9 + size / 91e9, rel=1e-3)


def test_the_hand_written_k3_has_its_published_size(k3, work):
    assert k3.parameters.total == pytest.approx(2.78e12, rel=0.01)
    assert work.routed_parameters == k3.parameters.routed_experts
    assert work.dense_parameters + work.routed_parameters == k3.parameters.total


def test_frozen_k3_on_128_devices_is_43_gigabytes_and_12_packed(work, supernode):
    held = evaluate(work, supernode, plan(64, expert_format=[0, 2])).memory
    assert held.frozen_weights == pytest.approx([43.4e9, 12.2e9], rel=0.01)


def test_experts_are_priced_at_their_latent_width(work):
    # 33.03 M parameters an expert at width 3584; three public planners priced 7168 and were wrong
    # by a factor of two (vllm-project/vllm#50817, NVIDIA-NeMo/Automodel#3792).
    assert work.expert_width == 3584
    assert work.routed_parameters / (92 * 896) == 3 * 3584 * 3072


def test_the_parts_add_up(work, supernode):
    costs = evaluate(work, supernode, plan(64))
    for whole, parts in ((costs.peak, costs.memory), (costs.seconds, costs.time)):
        assert sum(getattr(parts, f.name)[0] for f in fields(parts)) == pytest.approx(whole[0])


def test_a_frozen_base_costs_two_forwards_and_recomputation_one_more(work, supernode, plain):
    both = evaluate(work, supernode, plan(64, recomputation=[0, 2]), plain).time
    assert both.compute[1] / both.compute[0] == pytest.approx(1.35, abs=0.15)
    assert both.all_to_all[1] == pytest.approx(1.5 * both.all_to_all[0])


def test_frozen_weights_are_gathered_but_never_reduced(work, supernode, plain):
    """Only the adapters' float32 gradients are reduce-scattered."""
    step = evaluate(work, supernode, plan(32), plain).time
    adapters = (work.dense_adapters + work.expert_adapters / 32) * 4
    assert step.reduce_scatter[0] == pytest.approx(adapters / 164e9, rel=0.2)
    kinds = tuple(replace(k, dense_adapter=0, expert_adapter=0) for k in work.kinds)
    without = evaluate(replace(work, kinds=kinds), supernode, plan(32), plain).time
    assert without.reduce_scatter[0] == 0


def test_adapters_multiply_in_every_expert_that_a_token_visits(k3, supernode, plain):
    """in + out of both banks are read and written for each of 16 experts, forward and twice
    backward; that binds before 2 * rank * (in + out) operations do."""
    attention = workload(k3, Lora(rank=8, targets=["attention"]))
    both = workload(k3, Lora(rank=8))
    known = rates(supernode.device)
    a, b = (evaluate(w, supernode, plan(64), plain).time.compute[0] for w in (attention, both))
    moved = 92 * 16 * 3 * 2 * (3584 + 6144 + 3072 + 3584) * 4096
    assert b - a == pytest.approx(SLOWEST * moved / known.bandwidth, rel=1e-4)


def test_packed_experts_are_unpacked_for_forward_and_for_backward(work, supernode, plain):
    both = evaluate(work, supernode, plan(64, expert_format=[0, 2]), plain).time.compute
    unpacked = work.routed_parameters / 64 * (0.53 + 2) / rates(supernode.device).bandwidth
    assert both[1] - both[0] == pytest.approx(SLOWEST * 2 * unpacked, rel=1e-4)


def test_replicas_reduce_their_shards_over_the_outer_tier(work, plain):
    cluster = load_cluster(CLUSTERS / "hgx-h200-128.yaml")
    step = evaluate(work, cluster, plan(8, world=8, dp_replicate=[1, 16]), plain).time
    # An all-reduce of a shard of 1/8 of each layer's float32 gradients at 45 GB/s.
    gradients = (work.dense_adapters + work.expert_adapters) * 4 / 8
    added = step.reduce_scatter[1] - step.reduce_scatter[0]
    assert added == pytest.approx(2 * gradients * 15 / 16 / 45e9, rel=0.05)


def test_adapter_state_of_every_expert_is_counted(work, supernode):
    """Factors r * (in + out) a bank: 8 * (3584 + 6144 + 3072 + 3584) for each of 82,432 experts,
    16 bytes each with gradient and AdamW, over 128 devices."""
    assert work.expert_adapters == 82_432 * 8 * 16_384
    held = evaluate(work, supernode, plan(64)).memory
    state = held.adapters + held.gradients + held.optimizer
    assert state[0] == pytest.approx((work.expert_adapters + work.dense_adapters) * 16 / 128)


def test_only_the_asked_for_targets_are_adapted(k3):
    attention = workload(k3, Lora(targets=["attention"]))
    assert attention.expert_adapters == 0
    assert attention.dense_adapters > 0
    assert workload(k3, Lora(targets=["routed_experts"])).dense_adapters == 0


def test_expert_parallelism_does_not_divide_routed_activations(work, supernode):
    # NVIDIA/Megatron-LM pull request 6782: every rank of the group brings its own micro-batch.
    held = evaluate(work, supernode, plan([8, 64, 128])).memory.activations
    assert held[0] == held[1] == held[2]


def test_tensor_parallelism_does_not_divide_routed_experts(work, supernode):
    # NVIDIA-NeMo/Megatron-Bridge#3744: routed experts were divided by TP as well as by EP.
    without, split = (
        evaluate(work, supernode, plan(64, world=128 // tp, tp=tp)).memory for tp in (1, 2)
    )
    assert split.frozen_weights == pytest.approx(without.frozen_weights)
    # Two blocks in flight: half of the dense parts and all of the rank's experts.
    block = (443.6e6 + 189.9e6) * 2 / 2 + 29.596e9 / 64 * 2
    root = (2 * 163840 * 7168 + 401e6) * 2 / 2
    assert split.unsharded_blocks[0] == pytest.approx(2 * block + root, rel=0.01)


def test_gathered_adapters_bring_their_gradients(k3, supernode):
    """bf16 copy and float32 gradient of two blocks' factors: experts over EP, the rest whole."""
    small, large = (workload(k3, Lora(rank=rank)) for rank in (8, 16))
    held = [evaluate(w, supernode, plan(64)).memory.unsharded_blocks[0] for w in (small, large)]
    dense, moe = small.kinds[0], small.kinds[1]
    factors = dense.dense_adapter + moe.dense_adapter + moe.expert_adapter / 64
    assert held[1] - held[0] == pytest.approx(6 * factors)


def test_resharding_holds_two_blocks_and_keeping_holds_all(work, supernode):
    c = plan(64, reshard_after_forward=[True, False])
    two, everything = evaluate(work, supernode, c).memory.unsharded_blocks
    block = (29.785e9 - 29.596e9 + 443.7e6) * 2 + 29.596e9 / 64 * 2
    root = (2 * 163840 * 7168 + 401e6) * 2
    assert two == pytest.approx(2 * block + root, rel=0.05)
    assert everything > 30 * (two - root)


def test_experts_that_are_not_sharded_within_a_rank_are_not_gathered(work, supernode):
    whole = evaluate(work, supernode, plan(128)).memory.unsharded_blocks[0]
    # The dense layer, the dense part of one other layer, and the root group.
    dense = (443.6e6 + 726.7e6) * 2 + (443.6e6 + 189.9e6) * 2
    root = (2 * 163840 * 7168 + 401e6) * 2
    assert whole == pytest.approx(dense + root, rel=0.01)


def test_float32_doubles_weights_and_activations(tiny):
    work = workload(tiny, Lora())
    c = columns(fsdp=2, ep=2, dispatcher=1, sequence_length=256, gradient_accumulation=2)
    narrow = load_backend("h200")
    wide = replace(narrow, training_dtype="float32")
    a, b = (
        evaluate(work, flat_cluster("two", d, 2, bw_gbps=1, latency_us=1), c).memory
        for d in (narrow, wide)
    )
    assert b.frozen_weights[0] == pytest.approx(2 * a.frozen_weights[0])
    assert b.activations[0] == pytest.approx(2 * a.activations[0])
    assert b.optimizer[0] == a.optimizer[0]


def test_accumulation_repeats_everything_but_the_optimizer(work, supernode):
    step = evaluate(work, supernode, plan(64, gradient_accumulation=[1, 3])).time
    for part in ("compute", "all_gather", "reduce_scatter", "all_to_all"):
        one, three = getattr(step, part)
        assert three == pytest.approx(3 * one)
    assert step.optimizer[0] == step.optimizer[1]


def test_few_tokens_are_bound_by_reading_the_weights(work, supernode, plain):
    """With one token a device the step takes at least the time to read every local weight."""
    step = evaluate(work, supernode, plan(128, tokens=1), plain).time
    layers = sum(k.layers * (k.dense_parameters + k.routed_parameters / 128) for k in work.kinds)
    assert step.compute[0] > 0.9 * 2 * layers * 2 / rates(supernode.device).bandwidth


def test_a_vendor_peak_is_not_taken_as_achievable():
    device = load_backend("ascend-910c")
    assert device.matmul_tflops["bfloat16"].origin == "spec"
    assert rates(device).matmul == pytest.approx(752e12 * PEAK_SHARE["matmul"])
    h200 = load_backend("h200")
    measured = h200.matmul_tflops["bfloat16"].value
    assert rates(h200).matmul == pytest.approx(measured * 1e12)


def test_gathering_all_tokens_wins_where_few_are_sent(work, supernode):
    """Few tokens on few ranks: an exchange needs counts first, an all-gather does not; with many
    tokens its float32 partial sums cost more."""
    few, many = (
        evaluate(work, supernode, plan([16, 16], tokens, dispatcher=[1, 3])).time.all_to_all
        for tokens in (128, 16384)
    )
    assert few[1] < few[0]
    assert many[1] > many[0]
