"""Whole steps against sums worked out by hand, and laws that any cost must keep."""

from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strategies.candidates import columns
from strategies.cluster import Host, flat_cluster
from strategies.cost import evaluate, memory_bound, time_bound
from strategies.cost.constants import load_constants
from strategies.cost.routing import Routing
from strategies.schema import Lora
from strategies.workload import MASTER_STATE, workload

TOKENS = 4096
WEIGHTS = 2 * 1024**2 + 2 * 1024 * 4096
"""Of one layer of the dense model."""
TABLE = 1000 * 1024
SLOWER_OF_TWO = 1 + 0.02 * (2 * np.log(2)) ** 0.5
"""Devices deviate by 2 %, and all wait for the slowest."""


def switch(device, world, gbps=100.0):
    made = flat_cluster("flat", device, world, bw_gbps=gbps, latency_us=0.0)
    (tier,) = made.tiers
    return replace(made, tiers=(replace(tier, fabric=replace(tier.fabric, efficiency=1.0)),))


def parts(costs):
    return {f.name: getattr(costs.time, f.name)[0] for f in fields(costs.time)}


def test_a_dense_step_on_one_device_by_hand(dense, device, plain):
    """100 TFLOPS and 1000 GB/s, 4096 tokens, full fine-tuning, two layers."""
    work = workload(dense, Lora(), training="full")
    step = parts(evaluate(work, switch(device, 1), columns(sequence_length=TOKENS), plain))
    products = 2 * TOKENS * WEIGHTS / 100e12
    core = 4 * 1024 * TOKENS**2 / 2 / 100e12
    # A norm, and the sums behind attention and feed-forward: two reads, one write of 2048 bytes.
    moved = (4096 + 2 * 3 * 2048) * TOKENS / 1000e9
    head = 2 * TOKENS * TABLE / 100e12
    loss = 14 * TOKENS * 1000 / 1000e9
    # Forward, gradient of the inputs, gradient of the weights; attention once and twice.
    assert step["compute"] == pytest.approx(
        2 * (3 * products + 3 * core + 2 * moved) + 3 * head + loss
    )
    # AdamW: gradient 4, moments 8 in and out, weight 4 in and out.
    assert step["optimizer"] == pytest.approx((2 * WEIGHTS + 2 * TABLE) * 28 / 1000e9)
    assert sum(step.values()) == pytest.approx(step["compute"] + step["optimizer"])


def test_sharded_weights_are_gathered_twice_and_reduced_once(dense, device, plain):
    """8 devices at 100 GB/s, nothing hidden: bf16 twice, float32 gradients once, 7/8 of each."""
    work = workload(dense, Lora(), training="full")
    plan = columns(fsdp=8, sequence_length=TOKENS)
    step = parts(evaluate(work, switch(device, 8), plan, plain))
    share = 7 / 8 / 100e9
    assert step["all_gather"] == pytest.approx((2 * 2 * WEIGHTS + 2 * TABLE) * 2 * share)
    assert step["reduce_scatter"] == pytest.approx((2 * WEIGHTS + 2 * TABLE) * 4 * share)
    kept = parts(
        evaluate(
            work, switch(device, 8), replace(plan, reshard_after_forward=np.array([False])), plain
        )
    )
    assert kept["all_gather"] == pytest.approx((2 * WEIGHTS + 2 * TABLE) * 2 * share)


def test_gathers_hide_behind_compute(dense, device, plain):
    work = workload(dense, Lora(), training="full")
    hidden = replace(plain, shard_overlap=1.0)
    step = parts(evaluate(work, switch(device, 8), columns(fsdp=8, sequence_length=TOKENS), hidden))
    # The layers' 0.4 ms lie behind 1.2 ms of forward; nothing precedes the gather of the tables.
    assert step["all_gather"] == pytest.approx(2 * TABLE * 2 * 7 / 8 / 100e9)


def test_without_prefetching_weights_travel_within_their_layer(dense, device, plain):
    """The mixer's weights are waited for. Those of the feed-forward take 147 us; a fifth of the
    mixer's 515 us (172 for its products, 344 for attention) hides 103 of them. Their float32
    gradients take 294 us, the mixer's backward pass 1031: 206 are hidden."""
    work = workload(dense, Lora(), training="full", prefetch=False)
    some = replace(plain, shard_overlap=0.2)
    step = parts(evaluate(work, switch(device, 8), columns(fsdp=8, sequence_length=TOKENS), some))
    share = 7 / 8 / 100e9
    mixer, rest = 2 * 1024**2, 2 * 1024 * 4096
    products, core = 2 * TOKENS * mixer / 100e12, 4 * 1024 * TOKENS**2 / 2 / 100e12
    gathered = mixer * 2 * share + rest * 2 * share - 0.2 * (products + core)
    assert step["all_gather"] == pytest.approx(2 * 2 * gathered + 2 * TABLE * 2 * share)
    reduced = mixer * 4 * share + rest * 4 * share - 0.2 * 2 * (products + core)
    assert step["reduce_scatter"] == pytest.approx(2 * reduced + 2 * TABLE * 4 * share)


def test_optimizer_sharding_gathers_and_reduces_once_a_step(dense, device, plain):
    """Without sharded parameters accumulation does not repeat the exchange."""
    work = workload(dense, Lora(), training="full", state=MASTER_STATE)
    plan = columns(fsdp=8, shard_parameters=False, sequence_length=TOKENS, gradient_accumulation=4)
    step = parts(evaluate(work, switch(device, 8), plan, plain))
    share = 7 / 8 / 100e9
    assert step["all_gather"] == pytest.approx((2 * WEIGHTS + 2 * TABLE) * 2 * share)
    assert step["reduce_scatter"] == pytest.approx((2 * WEIGHTS + 2 * TABLE) * 4 * share)


def test_token_exchange_by_hand(sparse, device, plain):
    """EP 4 of 4: 4 (1 - (3/4)^4) = 2.734 copies of 1024 x 2 bytes, 3/4 of them to others, there and
    back, forward and backward, in two layers; around it four copies of each visit."""
    work = workload(sparse, Lora(), training="full")
    plan = columns(fsdp=4, ep=4, dispatcher=1, sequence_length=TOKENS)
    step = parts(evaluate(work, switch(device, 4), plan, plain))
    copies = 4 * (1 - 0.75**4)
    once = TOKENS * 2048 * copies * 0.75 / 100e9
    assert step["all_to_all"] == pytest.approx(2 * 2 * 2 * once)
    full = parts(
        evaluate(work, switch(device, 4), replace(plan, recomputation=np.array([2])), plain)
    )
    assert full["all_to_all"] == pytest.approx(1.5 * step["all_to_all"])
    fixed = replace(plain, dispatch_seconds=1e-3)
    slower = parts(evaluate(work, switch(device, 4), plan, fixed))
    assert slower["all_to_all"] - step["all_to_all"] == pytest.approx(2 * 2 * 2 * 1e-3)


def test_sums_of_an_all_gather_are_cleared_and_read(sparse, device, plain):
    """EP 4 of 4: hidden states of all four ranks arrive in bfloat16 and leave as float32 sums, 3/4
    of them over the link; the sums are 4 * 4096 rows of 1024 x 4 bytes."""
    work = workload(sparse, Lora(), training="full")
    plan = columns(fsdp=4, ep=4, dispatcher=3, sequence_length=TOKENS)
    step = parts(evaluate(work, switch(device, 4), plan, plain))
    rows = 4 * TOKENS * 1024
    once = rows * (2 + 4) * 0.75 / 100e9 + rows * 4 * 2 / 1000e9
    assert step["all_to_all"] == pytest.approx(2 * 2 * once)


def test_products_of_experts_leave_a_tail_for_every_four(sparse, device, plain):
    """Half a wave of tiles of 128 x 256 on 10 processors: 16 experts leave 4 of them, attention's
    products and the head's none more than one."""
    work = workload(sparse, Lora(), training="full")
    one = replace(device.launch_overhead_us, value=10.0)
    plan = columns(sequence_length=TOKENS)
    whole, with_tails = (
        parts(evaluate(work, switch(replace(device, processors=p), 1), plan, plain))["compute"]
        for p in (None, one)
    )
    tile = 0.5 * 10 * 128 * 256 * 2 / 100e12
    # Forward and the inputs' gradient walk along the inputs, the weights' along 1024 rows an expert
    # or 4096 tokens, no longer than the inputs are wide.
    experts = 4 * (2 * (1024 + 512) + 1024 + 512)
    attention = 3 * (1024 + 1024)
    assert with_tails - whole == pytest.approx(2 * tile * (experts + attention))


def test_biases_of_experts_move_what_nothing_fuses(sparse, device, plain):
    """Experts of 16 x (512 + 1024) biases; a token visits four: 8 and 10 bytes for each of 512
    inputs of the gate, 28 and 40 for each of 1024 outputs. With frozen biases 28 backward."""
    (block,) = sparse.blocks
    mixer, experts = block.parts
    biased = replace(experts, parameters=experts.parameters + 16 * (512 + 1024))
    model = replace(sparse, blocks=[replace(block, parts=[mixer, biased])])
    plan = columns(sequence_length=TOKENS)
    for training, output in (("full", 28 + 40), ("lora", 28 + 28)):
        bare, more = (
            evaluate(workload(m, Lora(), training=training), switch(device, 1), plan, plain)
            for m in (sparse, model)
        )
        moved = 4 * TOKENS * (18 * 512 + output * 1024)
        assert more.time.compute - bare.time.compute == pytest.approx(2 * moved / 1000e9)
    fused = workload(model, Lora(), training="full", precision="mxfp8")
    assert "expert_biases" not in {part.name for part in fused.kinds[0].works}


def test_the_fullest_device_decides(sparse, device, plain):
    """Each of 16 devices has one expert, of loads 1, 1/2, ..., 1/16: the first exchanges 4.73 times
    the mean."""
    spread = Routing(exponent=1.0)
    plan = columns(fsdp=16, ep=16, dispatcher=1, sequence_length=TOKENS)
    even, skewed = (
        evaluate(
            workload(sparse, Lora(), training="full", routing=r), switch(device, 16), plan, plain
        )
        for r in (Routing(), spread)
    )
    overload = 1 / np.mean(1 / np.arange(1, 17))
    assert skewed.time.all_to_all / even.time.all_to_all == pytest.approx(overload)
    assert skewed.seconds > even.seconds
    assert skewed.peak > even.peak
    limited = replace(plan, capacity_factor=np.array([1.5]))
    work = workload(sparse, Lora(), training="full", routing=spread)
    capped = evaluate(work, switch(device, 16), limited, plain)
    assert even.seconds < capped.seconds < skewed.seconds
    assert 0 < capped.dropped[0] < 0.5
    compiled = evaluate(replace(work, static_shapes=True), switch(device, 16), limited, plain)
    assert compiled.time.all_to_all / even.time.all_to_all == pytest.approx(1.5), "full or not"
    rerouted = evaluate(work, switch(device, 16), replace(limited, reroute=np.array([True])), plain)
    assert rerouted.dropped[0] == pytest.approx(0.0)
    copied = evaluate(work, switch(device, 16), replace(plan, expert_copies=np.array([1])), plain)
    assert copied.seconds < skewed.seconds


def test_tensor_parallelism_by_hand(dense, device, plain):
    """TP 2: each layer gathers and reduce-scatters 4096 x 1024 x 2 bytes around attention and
    around the feed-forward, half of it over the link; forward, backward, and half again for the
    weights' gradients."""
    work = workload(dense, Lora(), training="full")
    plan = columns(tp=2, sequence_length=TOKENS)
    step = parts(evaluate(work, switch(device, 2), plan, plain))
    once = TOKENS * 2048 / 2 / 100e9
    assert step["tensor_parallel"] == pytest.approx(2 * 2.5 * 2 * 2 * once)
    alone = parts(evaluate(work, switch(device, 1), columns(sequence_length=TOKENS), plain))
    assert step["compute"] == pytest.approx(SLOWER_OF_TWO * alone["compute"] / 2)


def test_context_parallelism_passes_keys_and_values(dense, device, plain):
    """2 kv heads of 128 + 128; each of 4 ranks receives three quarters of the sequence's, forward
    once and backward twice; none of it hides behind a core that takes no time."""
    work = workload(dense, Lora(), training="full")
    fast = replace(plain, attention_share=1e9)
    plan = columns(fsdp=4, cp=4, sequence_length=TOKENS)
    step = parts(evaluate(work, switch(device, 4), plan, fast))
    once = TOKENS * 2 * 256 * 2 * 0.75 / 100e9
    assert step["context_parallel"] == pytest.approx(2 * 3 * once, rel=1e-3)


def test_a_pipeline_by_hand(dense, device, plain):
    """Two stages of one layer, 4 micro-batches, no head to speak of: (4 + 1) micro-batches of a
    stage, and sends of 4096 x 1024 x 2 bytes: two to fill and drain, two for each micro-batch."""
    work = replace(workload(dense, Lora(), training="full"), vocab_size=0)
    work = replace(work, head=replace(work.head, out_features=0))
    one = evaluate(work, switch(device, 1), columns(sequence_length=TOKENS), plain)
    plan = columns(pp=2, gradient_accumulation=4, sequence_length=TOKENS)
    two = evaluate(work, switch(device, 2), plan, plain)
    stage = SLOWER_OF_TWO * one.time.compute[0] / 2
    send = TOKENS * 2048 / 100e9
    assert two.time.compute[0] == pytest.approx(4 * stage)
    assert two.time.pipeline[0] == pytest.approx(stage + (2 + 8) * send)


def test_eight_bit_products_take_half_the_arithmetic_and_a_quantisation(dense, device, plain):
    bf16 = workload(dense, Lora(), training="full")
    fp8 = workload(dense, Lora(), training="full", precision="fp8")
    plan = columns(sequence_length=TOKENS)
    a, b = (parts(evaluate(w, switch(device, 1), plan, plain))["compute"] for w in (bf16, fp8))
    products = 3 * 2 * TOKENS * WEIGHTS / 100e12
    # Inputs of q, o, up and down are quantised, and as many gradients, at 10 bytes' time each.
    quantised = 2 * 10 * (3 * 1024 + 4096) * TOKENS / 1000e9
    assert a - b == pytest.approx(2 * (products / 2 - quantised))


def test_the_host_binds_short_kernels(dense, device, plain):
    """One token: 40 calls a layer of 10 us forward, as long backward, and no less."""
    work = workload(dense, Lora(), training="full")
    slow = replace(plain, host_calls=1.0)
    step = parts(evaluate(work, switch(device, 1), columns(sequence_length=1), slow))
    layers = 2 * 40 * 2 * 10e-6
    assert step["overhead"] + step["compute"] == pytest.approx(layers, rel=0.05)


def test_memory_of_a_full_fine_tune_by_hand(dense, device, plain):
    """8 shards of float32 weights, gradients and moments; two gathered layers and the tables; saved
    activations of 330 bytes a token and layer, and as many of the layer in its backward pass; 12
    bytes for each logit. Two micro-batches, so that gradients are there from the first."""
    work = workload(dense, Lora(), training="full")
    held = evaluate(
        work,
        switch(device, 8),
        columns(fsdp=8, sequence_length=TOKENS, gradient_accumulation=2),
        plain,
    ).memory
    every = 2 * WEIGHTS + 2 * TABLE
    assert held.trained_weights[0] == pytest.approx(4 * every / 8)
    assert held.gradients[0] == pytest.approx(4 * every / 8)
    assert held.optimizer[0] == pytest.approx(8 * every / 8)
    assert held.unsharded_blocks[0] == pytest.approx(2 * WEIGHTS * (2 + 4) + 2 * TABLE * 2)
    assert held.activations[0] == pytest.approx(3 * (110 + 220) * TOKENS)
    assert held.logits[0] == pytest.approx(12 * TOKENS * 1000)
    assert held.frozen_weights[0] == held.adapters[0] == held.dispatch[0] == 0


def test_weights_and_gradients_stay_whole_until_the_last_micro_batch(dense, device, plain):
    """Four layers of bfloat16 weights and float32 gradients instead of two, where gradients are
    reduced once a step of several micro-batches; the tables besides."""
    (block,) = dense.blocks
    deep = replace(dense, blocks=[replace(block, layers=[0, 1, 2, 3])])
    work = workload(deep, Lora(), training="full", reduces_last=True)
    plans = columns(fsdp=8, sequence_length=TOKENS, gradient_accumulation=[1, 2])
    held = evaluate(work, switch(device, 8), plans, plain).memory
    layer = WEIGHTS * (2 + 4)
    assert held.unsharded_blocks == pytest.approx(
        [2 * layer + 2 * TABLE * 2, 4 * layer + 2 * TABLE * 2]
    )


def test_a_loss_in_bfloat16_keeps_and_moves_half_the_log_softmax(dense, device, plain):
    """2 bytes less for each of two copies of 4096 x 1000 kept, and of one write and one read."""
    plan = columns(sequence_length=TOKENS)
    wide, narrow = (
        evaluate(
            workload(dense, Lora(), training="full", loss_size=n), switch(device, 1), plan, plain
        )
        for n in (4, 2)
    )
    assert wide.memory.logits - narrow.memory.logits == pytest.approx(2 * 2 * TOKENS * 1000)
    assert narrow.memory.logits == pytest.approx(8 * TOKENS * 1000)
    saved = wide.time.compute - narrow.time.compute
    assert saved == pytest.approx(2 * 2 * TOKENS * 1000 / 1000e9)


def test_gradients_come_as_activations_go(sparse, device, plain):
    """One micro-batch: what is kept counts only as far as it exceeds the gradients that are not
    there yet; 430 bytes a token and layer in two layers against 4 bytes for each parameter."""
    work = workload(sparse, Lora(), training="full")
    plans = columns(fsdp=8, sequence_length=4 * TOKENS, gradient_accumulation=[1, 2])
    held = evaluate(work, switch(device, 8), plans, plain).memory
    gradients = held.gradients[0]
    kept = 2 * 440 * 4 * TOKENS
    assert held.activations == pytest.approx([max(kept - gradients, 0) + kept / 2, kept + kept / 2])


def test_fused_experts_keep_what_their_products_read(sparse):
    """Four visits of 2 bytes: 512 outputs of the first product; where weights are trained the
    inputs of both too, 1024 and 512."""
    for training, targets, width in (
        ("full", ["attention"], 512 + 1024 + 512),
        ("lora", ["attention"], 512),
        ("lora", ["routed_experts"], 512 + 1024 + 512),
    ):
        lora = Lora(targets=targets)
        (kind,) = workload(sparse, lora, training=training, fused_experts=True).kinds
        assert kind.saved_routed.per_token == 4 * 2 * width, (training, targets)


def test_optimizer_sharding_keeps_weights_and_gradients_whole(dense, device, plain):
    work = workload(dense, Lora(), training="full", state=MASTER_STATE)
    plan = columns(fsdp=8, shard_parameters=False, sequence_length=TOKENS)
    held = evaluate(work, switch(device, 8), plan, plain).memory
    every = 2 * WEIGHTS + 2 * TABLE
    assert held.trained_weights[0] == pytest.approx(2 * every)
    assert held.gradients[0] == pytest.approx(4 * every)
    assert held.optimizer[0] == pytest.approx(12 * every / 8)
    assert held.unsharded_blocks[0] == 0


def test_optimizer_states_leave_a_device_whose_host_has_room_for_them(dense, device, plain):
    """12 bytes of an eighth of all parameters, there and back at 10 GB/s."""
    work = workload(dense, Lora(), training="full", state=MASTER_STATE)
    plan = columns(fsdp=8, shard_parameters=False, sequence_length=TOKENS, offload=True)
    states = 12 * (2 * WEIGHTS + 2 * TABLE) / 8
    here = evaluate(work, switch(device, 8), plan, plain)
    assert here.memory.optimizer[0] == pytest.approx(states), "a host of which nothing is known"
    for room, held in ((1.01, 0.0), (0.99, states)):
        host = Host(mem_gib=room * 8 * states / 2**30, d2h_gbps=10.0)  # shared by the eight
        there = evaluate(work, replace(switch(device, 8), host=host), plan, plain)
        assert there.memory.optimizer[0] == pytest.approx(held)
        moved = there.time.optimizer[0] - here.time.optimizer[0]
        assert moved == pytest.approx(2 * (states - held) / 10e9)


def test_the_first_stage_keeps_a_micro_batch_for_each_stage_behind_it(dense, device, plain):
    """Two stages of one layer: two micro-batches of half the layers, and the layer in backward."""
    work = workload(dense, Lora(), training="full")
    accumulated = columns(sequence_length=TOKENS, gradient_accumulation=8)
    whole = evaluate(work, switch(device, 1), accumulated, plain)
    plan = columns(pp=2, gradient_accumulation=8, sequence_length=TOKENS)
    piped = evaluate(work, switch(device, 2), plan, plain)
    assert piped.memory.activations == pytest.approx(whole.memory.activations)
    one = evaluate(work, switch(device, 2), columns(pp=2, sequence_length=TOKENS), plain)
    assert one.memory.activations == pytest.approx(2 * 330 * TOKENS)


def test_recomputation_trades_memory_for_time(dense, device, plain):
    work = workload(dense, Lora(), training="full")
    plan = columns(recomputation=[0, 1, 2], sequence_length=TOKENS, gradient_accumulation=2)
    costs = evaluate(work, switch(device, 1), plan, plain)
    # Full: the inputs of two layers, and one layer's 330 bytes a token with their gradients.
    assert costs.memory.activations[2] == pytest.approx((2 * 2048 + 2 * 330) * TOKENS)
    assert list(costs.seconds) == sorted(costs.seconds)


def test_chance_of_running_out_is_half_at_the_edge_and_falls_with_room(dense, device, plain):
    work = workload(dense, Lora(), training="full")
    costs = evaluate(work, switch(device, 1), columns(sequence_length=TOKENS), plain)
    at_edge = replace(costs, capacity=costs.peak)
    assert at_edge.oom_probability[0] == pytest.approx(0.5)
    rooms = [replace(costs, capacity=costs.peak * f).oom_probability[0] for f in (0.5, 1, 1.1, 2)]
    assert rooms == sorted(rooms, reverse=True)
    assert rooms[0] > 0.99
    assert rooms[-1] < 0.01
    # One standard deviation of room: 15.87 %.
    room = 1 + costs.deviations.peak
    sixth = replace(costs, capacity=costs.peak * room).oom_probability[0]
    assert sixth == pytest.approx(0.158655, abs=1e-5)


def powers(most):
    return st.sampled_from([2**i for i in range(most + 1)])


@st.composite
def plans(draw, experts: bool):
    fsdp, tp = draw(powers(3)), draw(powers(2))
    cp = draw(st.sampled_from([d for d in (1, 2, 4, 8) if fsdp % d == 0]))
    shards = fsdp * tp
    ep = draw(st.sampled_from([d for d in (1, 2, 4, 8, 16) if shards % d == 0])) if experts else 1
    return columns(
        pp=draw(st.sampled_from([1, 2])),
        dp_replicate=draw(powers(1)),
        fsdp=fsdp,
        tp=tp,
        cp=cp,
        ep=ep,
        micro_batch_size=draw(powers(3)),
        gradient_accumulation=draw(powers(3)),
        sequence_length=draw(st.sampled_from([64, 1024, 8192])),
        recomputation=draw(st.sampled_from([0, 1, 2])),
        reshard_after_forward=draw(st.booleans()),
        shard_parameters=draw(st.booleans()),
        dispatcher=draw(st.sampled_from([1, 2, 3])) if ep > 1 else 0,
        expert_format=draw(st.sampled_from([0, 2])),
        capacity_factor=draw(st.sampled_from([np.inf, 1.25])),
        offload=draw(st.booleans()),
    )


@given(data=st.data(), training=st.sampled_from(["lora", "full"]), moe=st.booleans())
@settings(max_examples=150, deadline=None)
def test_bounds_hold_and_better_hardware_never_costs_more(
    data, training, moe, dense, sparse, device
):
    plan = data.draw(plans(moe))
    work = workload(sparse if moe else dense, Lora(rank=4), training=training)
    fitted = load_constants()
    slow = switch(device, int(plan.devices[0]), 10.0)
    costs = evaluate(work, slow, plan, fitted)
    assert time_bound(work, slow, plan, fitted) <= costs.seconds * (1 + 1e-12)
    assert memory_bound(work, slow, plan, fitted).peak <= costs.peak * (1 + 1e-12)
    for part in (*vars(costs.time).values(), *vars(costs.memory).values()):
        assert part[0] >= 0

    quick = switch(device, int(plan.devices[0]), 100.0)
    assert evaluate(work, quick, plan, fitted).seconds <= costs.seconds * (1 + 1e-12)
    for name in ("memory_gbps", "matmul_tflops"):
        fact = getattr(device, name)
        doubled = (
            {k: replace(v, value=2 * v.value) for k, v in fact.items()}
            if isinstance(fact, dict)
            else replace(fact, value=2 * fact.value)
        )
        better = replace(slow, device=replace(device, **{name: doubled}))
        assert evaluate(work, better, plan, fitted).seconds <= costs.seconds * (1 + 1e-12)


def test_many_rows_cost_what_each_costs_alone(sparse, device):
    """Columns are priced by their distinct rows; every row must get its own price back."""
    rng = np.random.default_rng(7)
    n = 5000
    pick = {
        "fsdp": [4, 8],
        "tp": [1, 2],
        "ep": [1, 2, 4],
        "pp": [1, 2],
        "dispatcher": [1, 2, 3],
        "micro_batch_size": [1, 2, 4],
        "gradient_accumulation": [1, 4],
        "recomputation": [0, 1, 2],
        "reshard_after_forward": [True, False],
        "shard_parameters": [True, False],
        "expert_format": [0, 2],
        "capacity_factor": [np.inf, 1.5],
        "sequence_length": [512, 4096],
    }
    many = columns(**{name: rng.choice(np.array(v), n) for name, v in pick.items()})
    work = workload(sparse, Lora(), training="lora", routing=Routing(exponent=0.5))
    cluster = switch(device, 32)
    together = evaluate(work, cluster, many)
    for i in rng.integers(0, n, 25):
        alone = evaluate(work, cluster, many.take(slice(i, i + 1)))
        assert alone.seconds[0] == pytest.approx(together.seconds[i])
        assert alone.peak[0] == pytest.approx(together.peak[i])
