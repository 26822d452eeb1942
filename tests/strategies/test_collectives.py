from pathlib import Path

import pytest

from analyzers.backends import load_backend
from strategies import collectives
from strategies.cluster import Cluster, Curve, Fabric, Group, Tier, load_cluster

CLUSTERS = Path(__file__).parents[2] / "examples" / "clusters"


def tier(name, size, devices, bw, **fabric):
    made = Fabric(
        **{"kind": "switch", "bw_gbps": bw, "latency_us": 0.0, "efficiency": 1.0} | fabric
    )
    return Tier(name=name, size=size, devices=devices, fabric=made)


@pytest.fixture
def two_tiers():
    """Nodes of 4 at 100 GB/s, 2 nodes at 10 GB/s, no latency."""
    tiers = (tier("node", 4, 4, 100), tier("cluster", 2, 8, 10))
    return Cluster(name="two", device=load_backend("h200"), tiers=tiers)


def test_inside_one_tier_a_gather_moves_n_minus_1_of_n(two_tiers):
    assert collectives.all_gather(two_tiers, 8e9, Group(4)).seconds == pytest.approx(6 / 100)


def test_across_tiers_each_stage_moves_its_share(two_tiers):
    # 8 GB: over the slow tier each device first gets its counterpart's 1 GB, then 3 x 2 GB inside.
    seconds = collectives.all_gather(two_tiers, 8e9, Group(8)).seconds
    assert seconds == pytest.approx(1 / 10 + 6 / 100)
    assert collectives.reduce_scatter(two_tiers, 8e9, Group(8)).seconds == pytest.approx(seconds)
    assert collectives.all_reduce(two_tiers, 8e9, Group(8)).seconds == pytest.approx(2 * seconds)


def test_a_strided_group_uses_only_the_outer_tier(two_tiers):
    assert collectives.all_gather(two_tiers, 8e9, Group(2, 4)).seconds == pytest.approx(4 / 10)


def test_all_to_all_is_bound_by_the_slowest_tier(two_tiers):
    # Half of what a device hands in leaves its node.
    assert collectives.all_to_all(two_tiers, 8e9, Group(8)).seconds == pytest.approx(4 / 10)
    assert collectives.all_to_all(two_tiers, 8e9, Group(4)).seconds == pytest.approx(6 / 100)


def test_latency_counts_once_for_each_step():
    tiers = (tier("node", 4, 4, 100, latency_us=10.0),)
    cluster = Cluster(name="one", device=load_backend("h200"), tiers=tiers)
    assert collectives.all_gather(cluster, 1e-9, Group(4)).seconds == pytest.approx(30e-6)
    assert collectives.all_to_all(cluster, 1e-9, Group(4)).seconds == pytest.approx(10e-6)


def test_a_group_of_one_and_an_empty_message_cost_nothing(two_tiers):
    assert collectives.all_gather(two_tiers, 1e9, Group(1)).seconds == 0
    assert collectives.all_to_all(two_tiers, 0.0, Group(8)).seconds == 0


def test_a_measured_curve_wins_over_the_formula_and_says_so():
    cluster = load_cluster(CLUSTERS / "h200-x2.yaml")
    for op, ms in [("all_gather", 1.9776), ("reduce_scatter", 2.0026), ("all_reduce", 3.2209)]:
        timing = getattr(collectives, op)(cluster, 2**30, Group(2))
        assert timing.origin == "measured"
        assert timing.seconds == pytest.approx(ms * 1e-3)
    half_way = collectives.all_to_all(cluster, 128 * 2**20, Group(2))
    assert 0.1409e-3 < half_way.seconds < 0.4727e-3
    # Below the smallest measured message its time, beyond the largest its rate.
    assert collectives.all_gather(cluster, 8, Group(2)).seconds == pytest.approx(0.0475e-3)
    assert collectives.all_gather(cluster, 2**31, Group(2)).seconds == pytest.approx(3.9552e-3)


def test_the_formula_is_close_to_what_was_measured_on_two_h200():
    """One GiB: within a quarter of NCCL's time, so the formula ranks as the measurement does."""
    cluster = load_cluster(CLUSTERS / "h200-x2.yaml")
    formula = Cluster(name="formula", device=cluster.device, tiers=cluster.tiers)
    for op in (collectives.all_gather, collectives.reduce_scatter, collectives.all_to_all):
        measured, computed = op(cluster, 2**30, Group(2)), op(formula, 2**30, Group(2))
        assert computed.origin == "spec"
        assert computed.seconds == pytest.approx(measured.seconds, rel=0.25)


def test_rates_by_group_size_are_interpolated_and_never_rise_beyond_the_curve():
    curve = Curve(within=0, op="all_to_all", devices=(8, 32), rates=(100e9, 50e9))
    tiers = (tier("pod", 64, 64, 1000),)
    cluster = Cluster(name="pod", device=load_backend("h200"), tiers=tiers, measured=(curve,))

    def rate(devices):
        return 1e9 / collectives.all_to_all(cluster, 1e9, Group(devices)).seconds / 1e9

    assert rate(8) == pytest.approx(100)
    assert rate(4) == pytest.approx(100)
    assert rate(16) == pytest.approx(100 / 2**0.5)
    assert rate(32) == pytest.approx(50)
    assert rate(64) == pytest.approx(100 / 2**1.5)
