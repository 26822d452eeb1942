from dataclasses import replace

import pytest

from analyzers.backends import load_backend
from strategies.memory import GIB, Candidate, memory, oom_probability
from strategies.schema import Lora, Parallelism
from strategies.workload import workload


def candidate(ep, *, world=128, tp=1, **settings):
    p = Parallelism(fsdp=world // tp, tp=tp, ep=ep, efsdp=world // ep)
    return Candidate(
        **{"micro_batch_size": 1, "sequence_length": 4096, "parallelism": p, **settings}
    )


@pytest.fixture(scope="module")
def work(k3):
    return workload(k3, Lora())


@pytest.fixture(scope="module")
def device():
    return load_backend("ascend-910c")


def test_the_hand_written_k3_has_its_published_size(k3, work):
    assert k3.parameters.total == pytest.approx(2.78e12, rel=0.01)
    assert work.routed_parameters == k3.parameters.routed_experts
    assert work.dense_parameters + work.routed_parameters == k3.parameters.total


def test_frozen_k3_on_128_devices_is_43_gigabytes_and_12_packed(work, device):
    bf16 = memory(work, candidate(64), device).frozen_weights * GIB
    packed = memory(work, candidate(64, expert_weight_format="mxfp4"), device).frozen_weights * GIB
    assert bf16 == pytest.approx(43.4e9, rel=0.01)
    assert packed == pytest.approx(12.2e9, rel=0.01)


def test_experts_are_priced_at_their_latent_width(work):
    # 33.03 M parameters an expert at width 3584; three public planners priced 7168 and were wrong
    # by a factor of two (vllm-project/vllm#50817, NVIDIA-NeMo/Automodel#3792).
    assert work.expert_width == 3584
    assert work.routed_parameters / (92 * 896) == 3 * 3584 * 3072


def test_the_parts_add_up_to_the_peak(work, device):
    held = memory(work, candidate(64, dispatcher="all_to_all"), device)
    parts = {k: v for k, v in vars(held).items() if k not in ("peak", "capacity")}
    assert sum(parts.values()) == pytest.approx(held.peak)
    assert all(v > 0 for v in parts.values())


def test_adapter_state_of_every_expert_is_counted(work, device):
    """Factors r * (in + out) a bank: 8 * (3584 + 6144 + 3072 + 3584) for each of 82,432 experts,
    16 bytes each with gradient and AdamW, over 128 devices."""
    assert work.expert_adapters == 82_432 * 8 * 16_384
    held = memory(work, candidate(64), device)
    state = (held.adapters + held.gradients + held.optimizer) * GIB
    assert state == pytest.approx((work.expert_adapters + work.dense_adapters) * 16 / 128)


def test_only_the_asked_for_targets_are_adapted(k3):
    attention = workload(k3, Lora(targets=["attention"]))
    assert attention.expert_adapters == 0
    assert attention.dense_adapters > 0
    latent = workload(k3, Lora(targets=["routed_experts"]))
    assert latent.dense_adapters == 0


def test_expert_parallelism_does_not_divide_routed_activations(work, device):
    # NVIDIA/Megatron-LM pull request 6782: every rank of the group brings its own micro-batch.
    held = [memory(work, candidate(ep), device).activations for ep in (8, 64, 128)]
    assert held[0] == held[1] == held[2]


def test_tensor_parallelism_does_not_divide_routed_experts(work, device):
    # NVIDIA-NeMo/Megatron-Bridge#3744: routed experts were divided by TP as well as by EP.
    without, with_tp = (memory(work, candidate(64, tp=tp), device) for tp in (1, 2))
    assert with_tp.frozen_weights == pytest.approx(without.frozen_weights)
    # Two blocks in flight: half of the dense parts and all of the rank's experts.
    block = (443.6e6 + 189.9e6) * 2 / 2 + 29.596e9 / 64 * 2
    root = (2 * 163840 * 7168 + 401e6) * 2 / 2
    assert with_tp.unsharded_blocks * GIB == pytest.approx(2 * block + root, rel=0.01)


def test_gathered_adapters_bring_their_gradients(k3, device):
    """bf16 copy and float32 gradient of two blocks' factors: experts over EP, the rest whole."""
    held = []
    for rank in (8, 16):
        work = workload(k3, Lora(rank=rank))
        held.append(memory(work, candidate(64), device).unsharded_blocks * GIB)
    work = workload(k3, Lora(rank=8))
    dense, moe = work.kinds[0], work.kinds[1]
    factors = dense.dense_adapter + moe.dense_adapter + moe.expert_adapter / 64
    assert held[1] - held[0] == pytest.approx(6 * factors)


def test_recomputation_keeps_inputs_and_one_block(work, device):
    none = memory(work, candidate(64), device)
    full = memory(work, candidate(64, activation_checkpointing="full"), device)
    inputs = 93 * 7168 * 2 * 4096 / GIB
    one_block = max(k.saved_bytes.at(4096) for k in work.kinds) / GIB
    assert full.activations == pytest.approx(inputs + one_block)
    assert none.activations > 10 * full.activations


def test_resharding_holds_two_blocks_and_keeping_holds_all(work, device):
    two = memory(work, candidate(64), device).unsharded_blocks
    everything = memory(work, candidate(64, reshard_after_forward=False), device).unsharded_blocks
    block = (29.785e9 - 29.596e9 + 443.7e6) * 2 + 29.596e9 / 64 * 2
    root = (2 * 163840 * 7168 + 401e6) * 2
    assert two * GIB == pytest.approx(2 * block + root, rel=0.05)
    assert everything > 30 * (two - root / GIB)


def test_experts_that_are_not_sharded_within_a_rank_are_not_gathered(work, device):
    whole = memory(work, candidate(128), device).unsharded_blocks * GIB
    # The dense layer, the dense part of one other layer, and the root group.
    dense = (443.6e6 + 726.7e6) * 2 + (443.6e6 + 189.9e6) * 2
    root = (2 * 163840 * 7168 + 401e6) * 2
    assert whole == pytest.approx(dense + root, rel=0.01)


def test_float32_doubles_weights_and_activations(tiny):
    work, cpu = workload(tiny, Lora()), load_backend("cpu")
    p = Parallelism(fsdp=2, ep=2)
    base = Candidate(parallelism=p, micro_batch_size=1, sequence_length=256)
    wide = replace(base, compute_dtype="float32", expert_weight_format="fp32")
    a, b = memory(work, base, cpu), memory(work, wide, cpu)
    assert b.frozen_weights == pytest.approx(2 * a.frozen_weights)
    assert b.activations == pytest.approx(2 * a.activations)
    assert b.optimizer == a.optimizer


def test_chance_of_running_out_is_half_at_the_edge_and_falls_with_room(work, device):
    held = memory(work, candidate(64), device)
    at_edge = replace(held, capacity=held.peak)
    assert oom_probability(at_edge, device) == pytest.approx(0.5)
    chances = [
        oom_probability(replace(held, capacity=held.peak + room), device)
        for room in (-50, 0, 50, 99)
    ]
    assert chances == sorted(chances, reverse=True)
    assert chances[0] > 0.5 > chances[-1]
