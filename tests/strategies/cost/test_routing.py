import numpy as np
import pytest

from strategies.cost.routing import (
    BALANCED,
    Choice,
    Routing,
    device_overload,
    distinct_domains,
    dropped_share,
    limited,
    replicated,
)


def test_a_power_law_of_two_experts_by_hand():
    # 1 and 2**-1, over their mean of 0.75.
    assert Routing(exponent=1.0).relative(2) == pytest.approx([4 / 3, 2 / 3])
    # One expert a device: the fuller one has 4/3 of the mean wherever it lies.
    assert device_overload(Routing(exponent=1.0), 2, 2) == pytest.approx(4 / 3)


def test_a_histogram_is_read_by_quantile():
    counts = Routing(loads=(30.0, 10.0, 20.0))
    assert counts.relative(3) == pytest.approx([1.5, 1.0, 0.5])
    finer = counts.relative(6)
    assert finer.mean() == pytest.approx(1.0)
    assert np.all(np.diff(finer) <= 0)
    # 20 of 60 assignments lie above a capacity of once the mean (20) only for the first: 10 of 60.
    assert dropped_share(counts, 3, 1.0) == pytest.approx(10 / 60)


def test_balanced_routing_overloads_nobody_and_drops_nothing():
    assert device_overload(BALANCED, 896, 64) == 1.0
    assert dropped_share(BALANCED, 896, 1.0) == 0.0


def test_more_devices_see_more_of_the_skew():
    skewed = Routing(exponent=0.5)
    overloads = [device_overload(skewed, 128, ep) for ep in (1, 2, 8, 32, 128)]
    assert overloads == sorted(overloads)
    # With one expert a device the fullest has the largest expert.
    assert overloads[-1] == pytest.approx(skewed.relative(128)[0])


def test_a_capacity_bounds_the_overload_and_a_tighter_one_drops_more():
    skewed = Routing(exponent=0.8)
    assert device_overload(skewed, 64, 64, capacity=1.25) == pytest.approx(1.25)
    dropped = [dropped_share(skewed, 64, f) for f in (np.inf, 2.0, 1.5, 1.0)]
    assert dropped[0] == 0.0
    assert dropped == sorted(dropped)


def test_a_reroute_fills_the_room_of_others():
    # Loads 1.5, 1, 0.5 at a capacity of 1.25: 0.25 too many find room in 0.25 + 0.75, a quarter of
    # each.
    counts = np.array([1.5, 1.0, 0.5])
    assert limited(counts, 1.25, reroute=False) == pytest.approx([1.25, 1.0, 0.5])
    assert limited(counts, 1.25, reroute=True) == pytest.approx([1.25, 1.0625, 0.6875])
    # At a capacity of the mean everything is full, and nothing is dropped.
    assert limited(counts, 1.0, reroute=True) == pytest.approx([1.0, 1.0, 1.0])
    skewed = Routing(loads=(30.0, 20.0, 10.0))
    assert dropped_share(skewed, 3, 1.0, True) == pytest.approx(0.0)
    assert dropped_share(skewed, 3, 0.8, True) == pytest.approx(0.2)


def test_copies_go_where_the_tokens_are():
    # 6 + 2: the first copy halves the six; of 3, 3, 2 the next copy makes 2, 2, 2, 2.
    assert sorted(replicated(np.array([6.0, 2.0]), 1)) == pytest.approx([2, 3, 3])
    assert sorted(replicated(np.array([6.0, 2.0]), 2)) == pytest.approx([2, 2, 2, 2])
    skewed = Routing(exponent=0.8)
    overloads = [device_overload(skewed, 64, 8, spare=spare) for spare in (0, 1, 2, 4)]
    assert overloads == sorted(overloads, reverse=True)


@pytest.mark.parametrize(("ranks", "top_k", "expected"), [(1, 8, 1), (2, 1, 1), (8, 16, 7.06)])
def test_independent_choices_meet(ranks, top_k, expected):
    choice = Choice(experts=896, top_k=top_k)
    assert distinct_domains(choice, ranks) == pytest.approx(expected, rel=1e-3)


def test_a_router_of_groups_reaches_few_nodes():
    """DeepSeek-V3 chooses 8 experts in 4 of 8 groups, so that a token goes to 4 nodes at most
    (arXiv 2412.19437, section 2.1.2)."""
    choice = Choice(experts=256, top_k=8, groups=8, top_groups=4)
    # Among 4 nodes 8 independent choices miss one with (3/4)^8.
    assert distinct_domains(choice, 8) == pytest.approx(4 * (1 - 0.75**8))
    # 64 ranks: 32 are reachable.
    assert distinct_domains(choice, 64) == pytest.approx(32 * (1 - (31 / 32) ** 8))
    # 4 nodes of two groups each: one is missed when all four groups lie in the other three.
    reachable = 4 * (1 - 15 / 70)
    expected = reachable * (1 - (1 - 1 / reachable) ** 8)
    assert distinct_domains(choice, 4) == pytest.approx(expected)


def test_neighbouring_experts_lie_together():
    choice = Choice(experts=128, top_k=4, consecutive=True)
    assert distinct_domains(choice, 32) == 1.0  # each rank holds the four
    assert distinct_domains(choice, 128) == 4.0
    # Runs of 6 of 96 experts over domains of 8 start at 0, 6, 12, 18: two of four cross a border.
    assert distinct_domains(Choice(experts=96, top_k=6, consecutive=True), 12) == 1.5
