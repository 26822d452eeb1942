"""Experts with a limit: who gets what, what becomes of the weights, and what is dropped."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from runtime.experts import recorder, use_own_experts
from runtime.experts.capacity import Limiter, limit_experts, settle
from runtime.experts.dispatch import Limit, Local
from runtime.experts.fan import TORCH
from strategies.cost.routing import Routing, dropped_share
from strategies.schema import Capacity
from tests.runtime.runs import plan_for, row_kernels


def one_by_one(index, score, open_, top_k, experts, capacity):
    """Deferred acceptance as Gale and Shapley tell it: one proposal at a time."""
    tokens, tries = index.shape
    held = {e: [] for e in range(experts)}
    asked = [0] * tokens
    has = [set() for _ in range(tokens)]
    waiting = list(range(tokens))
    while waiting:
        token = waiting.pop()
        while len(has[token]) < top_k and asked[token] < tries:
            column = asked[token]
            asked[token] += 1
            if not open_[token, column]:
                continue
            expert = int(index[token, column])
            held[expert].append((-float(score[token, column]), token))
            has[token].add(column)
            if len(held[expert]) > capacity:
                worst = max(held[expert])
                held[expert].remove(worst)
                _, loser = worst
                (lost,) = [c for c in has[loser] if int(index[loser, c]) == expert]
                has[loser].remove(lost)
                waiting.append(loser)
    got = torch.zeros(tokens, tries, dtype=torch.bool)
    for token, columns in enumerate(has):
        got[token, list(columns)] = True
    return got


@st.composite
def markets(draw):
    experts = draw(st.integers(1, 6))
    tries = draw(st.integers(1, experts))
    top_k = draw(st.integers(1, tries))
    tokens = draw(st.integers(0, 20))
    capacity = draw(st.integers(1, 6))
    seed = draw(st.integers(0, 2**16))
    generator = torch.Generator().manual_seed(seed)
    index = torch.stack(
        [torch.randperm(experts, generator=generator)[:tries] for _ in range(tokens)]
        or [torch.zeros(0, dtype=torch.long)]
    ).view(tokens, tries)
    # Few distinct scores, so that ties are common.
    score = torch.randint(0, draw(st.sampled_from([1, 3, 1000])), index.shape, generator=generator)
    open_ = torch.rand(index.shape, generator=generator) < draw(st.sampled_from([1.0, 0.8]))
    return index, score.float(), open_, top_k, experts, capacity


@given(markets())
def test_tokens_and_experts_agree_as_by_one_proposal_at_a_time(market):
    index, score, open_, top_k, experts, capacity = market
    got = settle(index, score, open_, top_k, experts, capacity)
    assert torch.equal(got, one_by_one(index, score, open_, top_k, experts, capacity))
    # No expert has too many, and a token lacks one only where all that it may ask are full.
    load = torch.bincount(index[got], minlength=experts)
    assert int(load.max()) <= capacity
    for experts_N, open_N, mine_N in zip(index, open_, got, strict=True):
        if int(mine_N.sum()) < top_k:
            assert all(int(load[e]) == capacity for e in experts_N[open_N & ~mine_N])


def limiter(**fields):
    defaults = {"name": "experts", "experts": 4, "top_k": 2, "candidates": 4, "capacity": 2}
    return Limiter(**(defaults | {"renormalize": True} | fields))


def test_by_hand():
    # Three tokens want expert 0 and there is room for two: the one with the lowest score, token 1,
    # takes its third choice instead, and its weights sum to what they did.
    index = torch.tensor([[0, 1, 2, 3], [0, 1, 2, 3], [0, 2, 1, 3]])
    weights = torch.tensor([[0.6, 0.2, 0.1, 0.1], [0.4, 0.3, 0.2, 0.1], [0.5, 0.3, 0.1, 0.1]])
    ids, scaled = limiter()(index, weights, None)
    assert ids.tolist() == [[0, 1], [1, 2], [0, 2]]
    torch.testing.assert_close(scaled[1], torch.tensor([0.6, 0.4]))
    torch.testing.assert_close(scaled[0], torch.tensor([0.75, 0.25]))


def test_weights_that_the_router_does_not_normalise_keep_their_sum():
    index = torch.tensor([[0, 1, 2, 3]] * 3)
    weights = torch.tensor([[0.8, 0.4, 0.2, 0.1], [0.9, 0.3, 0.2, 0.1], [0.7, 0.5, 0.2, 0.1]])
    ids, scaled = limiter(renormalize=False)(index, weights, None)
    assert ids.tolist() == [[0, 1], [0, 2], [1, 2]]
    # Untouched where nothing was lost.
    torch.testing.assert_close(scaled[0], torch.tensor([0.8, 0.4]))
    torch.testing.assert_close(scaled.sum(1), weights[:, :2].sum(1))


def test_padding_takes_no_place_and_gets_nothing():
    index = torch.tensor([[0, 1, 2, 3]] * 4)
    weights = torch.full((4, 4), 0.25, requires_grad=True)
    valid = torch.tensor([False, False, True, True])
    ids, scaled = limiter()(index, weights, valid)
    assert ids.tolist() == [[4, 4], [4, 4], [0, 1], [0, 1]]
    assert scaled[:2].abs().max() == 0
    scaled.square().sum().backward()
    assert torch.isfinite(weights.grad).all()


def test_gradients_go_through_the_weights():
    index = torch.rand(8, 4, generator=torch.Generator().manual_seed(0)).argsort(1)
    weights = torch.rand(8, 4, dtype=torch.float64).sort(1, descending=True).values
    weights.requires_grad_()

    def scaled(weights):
        return limiter(capacity=3)(index, weights, None)[1]

    assert torch.autograd.gradcheck(scaled, weights)


@pytest.mark.parametrize("candidates", [2, 6])
def test_a_kernel_gives_the_same_to_the_last_bit(candidates, tmp_path):
    draw = torch.Generator().manual_seed(0)
    scores = torch.rand(64, 8, generator=draw) + torch.linspace(0, 0.8, 8)
    weights, index = scores.softmax(1).topk(candidates)
    valid = torch.arange(64) % 5 > 0
    kernels = row_kernels(tmp_path)
    found = []
    for rows in (TORCH, kernels):
        twin = weights.clone().requires_grad_()
        limit = limiter(experts=8, candidates=candidates, capacity=9)
        ids, scaled = limit(index, twin, valid, rows)
        scaled.square().sum().backward()
        found.append((ids, scaled.detach(), twin.grad))
    assert bool((found[0][0] == 8).any())
    for one, two in zip(*found, strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("factor", [0.5, 1.0, 1.5])
def test_what_is_dropped_is_what_the_planner_counts(factor):
    # One group: the planner's histogram of its own router's choices.
    draw = torch.Generator().manual_seed(0)
    tokens, experts, top_k = 256, 8, 2
    scores = torch.rand(tokens, experts, generator=draw) + torch.linspace(0, 0.8, experts)
    weights, index = scores.topk(top_k)
    capacity = int(factor * tokens * top_k / experts)
    ids, _ = limiter(
        experts=experts, top_k=top_k, candidates=top_k, capacity=capacity, renormalize=False
    )(index, weights, None)
    dropped = float((ids == experts).float().mean())
    loads = torch.bincount(index.reshape(-1), minlength=experts)
    planned = dropped_share(Routing(loads=tuple(loads.tolist())), experts, factor)
    assert dropped == pytest.approx(planned, abs=1e-9)
    assert dropped > 0


@pytest.mark.parametrize(("factor", "left"), [(0.5, 0.5), (1.25, 0.0)])
def test_what_is_rerouted_is_dropped_only_for_want_of_room_as_the_planner_counts(factor, left):
    draw = torch.Generator().manual_seed(0)
    tokens, experts, top_k = 256, 8, 2
    scores = torch.rand(tokens, experts, generator=draw) + torch.linspace(0, 0.8, experts)
    weights, index = scores.topk(experts)
    capacity = int(factor * tokens * top_k / experts)
    ids, _ = limiter(
        experts=experts, top_k=top_k, candidates=experts, capacity=capacity, renormalize=False
    )(index, weights, None)
    loads = torch.bincount(index[:, :top_k].reshape(-1), minlength=experts)
    planned = dropped_share(Routing(loads=tuple(loads.tolist())), experts, factor, reroute=True)
    assert planned == pytest.approx(left, abs=1e-9)
    assert float((ids == experts).float().mean()) == pytest.approx(planned, abs=1e-9)


SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts_per_tok": 2,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
MODELS = {
    "qwen3_moe": {"norm_topk_prob": True},
    "qwen3_moe-raw": {"norm_topk_prob": False},
    "gpt_oss": {"layer_types": ["full_attention"] * 2},
    "deepseek_v3": {
        **LATENT,
        "v_head_dim": 16,
        "head_dim": 8,
        "first_k_dense_replace": 0,
        "n_group": 4,
        "topk_group": 2,
        "n_shared_experts": 1,
    },
}
IDS = torch.arange(40).view(2, 20) % 64


def small(kind, **changes):
    torch.manual_seed(0)
    fields = SMALL | MODELS[kind] | changes
    config = AutoConfig.for_model(kind.removesuffix("-raw"), **fields)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    use_own_experts(model)
    return model


def limited(model, capacity):
    plan = plan_for(1, micro_batch_size=2, sequence_length=20, capacity=capacity)
    limiters = limit_experts(model, plan)
    for name, found in limiters.items():
        model.get_submodule(name).dispatcher = Local(Limit(40, found.capacity))
    return limiters


def outcome(model):
    model.zero_grad()
    recorder.take()
    with recorder.recording(torch.ones_like(IDS, dtype=torch.bool)):
        result = model(IDS, labels=IDS)
    result.loss.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return result.logits.detach(), gradients, [c[:-1] for c in recorder.take()]


@pytest.mark.parametrize("overflow", ["drop", "reroute"])
@pytest.mark.parametrize("kind", MODELS)
def test_a_limit_that_nobody_meets_changes_nothing(kind, overflow):
    model = small(kind)
    logits, gradients, counts = outcome(model)
    limited(model, Capacity(factor=8.0, overflow=overflow))
    own, found, load = outcome(model)
    torch.testing.assert_close(own, logits, rtol=1e-5, atol=1e-5)
    for name, gradient in gradients.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-5)
    assert [c.tolist() for c in load] == [c.tolist() for c in counts]


@pytest.mark.parametrize("kind", MODELS)
def test_an_expert_takes_no_more_than_its_capacity(kind):
    model = small(kind)
    _, _, free = outcome(model)
    (capacity, *_) = {
        found.capacity for found in limited(model, Capacity(factor=1.0, overflow="drop")).values()
    }
    assert capacity == 10
    _, _, dropping = outcome(model)
    model = small(kind)
    limited(model, Capacity(factor=1.0, overflow="reroute"))
    _, gradients, rerouting = outcome(model)
    assert all(torch.isfinite(g).all() for g in gradients.values())
    assert max(int(c.max()) for c in free) > capacity
    assert max(int(c.max()) for c in [*dropping, *rerouting]) <= capacity
    first = [int(c[0].sum()) for c in (free, dropping, rerouting)]
    assert first[1] < first[2] <= first[0] == 80


def test_choices_without_room_are_counted():
    model = small(next(iter(MODELS)))
    limited(model, Capacity(factor=1.0, overflow="drop"))
    recorder.take()
    valid = torch.ones_like(IDS, dtype=torch.bool)
    valid[:, 15:] = False  # padding takes no room and is left out of nothing
    with torch.no_grad(), recorder.recording(valid):
        model(IDS)
    counts = recorder.take()
    assert all(int(c.sum()) == 30 * 2 for c in counts)
    assert any(int(c[-1]) > 0 for c in counts)


def test_experts_of_groups_that_the_router_left_out_get_no_tokens():
    model = small("deepseek_v3", topk_group=1)
    limiters = limited(model, Capacity(factor=0.5, overflow="reroute"))
    _, _, counts = outcome(model)
    for found, load in zip(limiters.values(), counts, strict=True):
        # One of four groups of two experts is open to a token: two of its four candidates.
        assert found.closed_TN.sum(1).tolist() == [2] * 40
        assert int(load.max()) <= found.capacity == 5
