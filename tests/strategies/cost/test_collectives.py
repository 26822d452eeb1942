from pathlib import Path

import numpy as np
import pytest

from analyzers.backends import load_backend
from strategies.cluster import Cluster, Curve, Fabric, Tier, load_cluster
from strategies.cost import collectives
from strategies.cost.routing import Choice

CLUSTERS = Path(__file__).parents[3] / "examples" / "clusters"


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


def seconds(op, cluster, size, ranks, stride=1, **more):
    column = getattr(collectives, op)(
        cluster, np.array([size]), np.array([ranks]), np.array([stride]), **more
    )
    return column[0]


def test_inside_one_tier_a_gather_moves_n_minus_1_of_n(two_tiers):
    assert seconds("all_gather", two_tiers, 8e9, 4) == pytest.approx(6 / 100)


def test_across_tiers_each_stage_moves_its_share(two_tiers):
    # 8 GB: over the slow tier each device first gets its counterpart's 1 GB, then 3 x 2 GB inside.
    gather = seconds("all_gather", two_tiers, 8e9, 8)
    assert gather == pytest.approx(1 / 10 + 6 / 100)
    assert seconds("reduce_scatter", two_tiers, 8e9, 8) == pytest.approx(gather)
    assert seconds("all_reduce", two_tiers, 8e9, 8) == pytest.approx(2 * gather)


def test_a_strided_group_uses_only_the_outer_tier(two_tiers):
    assert seconds("all_gather", two_tiers, 8e9, 2, 4) == pytest.approx(4 / 10)


def test_all_to_all_is_bound_by_the_slowest_tier(two_tiers):
    # Half of what a device hands in leaves its node.
    assert seconds("all_to_all", two_tiers, 8e9, 8) == pytest.approx(4 / 10)
    assert seconds("all_to_all", two_tiers, 8e9, 4) == pytest.approx(6 / 100)
    assert seconds("all_to_all", two_tiers, 8e9, 4, share=0.5) == pytest.approx(12 / 100)


def test_a_token_crosses_to_another_node_once_when_the_exchange_is_hierarchical(two_tiers):
    """2 nodes of 4, top 8: direct sends 8 (1 - (7/8)^8) = 5.251 copies, half of which leave the
    node; hierarchical sends the other node its 2 (1 - 2^-8) / 2 = 0.996 copies."""
    row = np.array([1e9])
    choice, ranks = Choice(experts=64, top_k=8), np.array([8])
    direct = collectives.all_to_all(two_tiers, row * collectives.destinations(choice, ranks), ranks)
    staged = collectives.hierarchical(two_tiers, row, choice, ranks, op="all_to_all_dispatch")
    assert direct[0] == pytest.approx(5.2511 / 2 / 10, rel=1e-3)
    assert staged[0] == pytest.approx(0.9961 / 10, rel=1e-3)


def test_rows_of_different_groups_are_priced_each_by_its_own(two_tiers):
    sizes, ranks = np.array([8e9, 8e9, 0.0, 8e9]), np.array([4, 8, 8, 1])
    column = collectives.all_gather(two_tiers, sizes, ranks)
    assert column == pytest.approx([6 / 100, 1 / 10 + 6 / 100, 0.0, 0.0])


@pytest.mark.parametrize(("kind", "hops"), [("ring", 3), ("switch", 2)])
def test_latency_counts_by_hop(kind, hops):
    tiers = (tier("node", 4, 4, 100, latency_us=10.0, kind=kind),)
    cluster = Cluster(name="one", device=load_backend("h200"), tiers=tiers)
    assert seconds("all_gather", cluster, 1e-9, 4) == pytest.approx(hops * 10e-6)


def test_a_message_to_the_next_stage_takes_the_closest_tier_that_joins_them(two_tiers):
    sent = collectives.send(two_tiers, np.array([1e9, 1e9]), np.array([1, 4]))
    assert sent == pytest.approx([1 / 100, 1 / 10])


def test_a_measured_curve_wins_over_the_formula_and_says_so():
    cluster = load_cluster(CLUSTERS / "h200-x2.yaml")
    for op, ms in [("all_gather", 1.9776), ("reduce_scatter", 2.0026), ("all_reduce", 3.2209)]:
        assert collectives.origin(cluster, op, 2) == "measured"
        assert seconds(op, cluster, 2**30, 2) == pytest.approx(ms * 1e-3)
    assert 0.1409e-3 < seconds("all_to_all", cluster, 128 * 2**20, 2) < 0.4727e-3
    # Below the smallest measured message its time, beyond the largest its rate.
    assert seconds("all_gather", cluster, 8, 2) == pytest.approx(0.0475e-3)
    assert seconds("all_gather", cluster, 2**31, 2) == pytest.approx(3.9552e-3)


def test_the_formula_is_close_to_what_was_measured_on_two_h200():
    """One GiB: within a quarter of NCCL's time, so the formula ranks as the measurement does."""
    cluster = load_cluster(CLUSTERS / "h200-x2.yaml")
    formula = Cluster(name="formula", device=cluster.device, tiers=cluster.tiers)
    for op in ("all_gather", "reduce_scatter", "all_to_all"):
        assert collectives.origin(formula, op, 2) == "spec"
        measured, computed = (seconds(op, c, 2**30, 2) for c in (cluster, formula))
        assert computed == pytest.approx(measured, rel=0.25)


def test_rates_by_group_size_are_interpolated_and_never_rise_beyond_the_curve():
    curve = Curve(within=0, op="all_to_all", devices=(8, 32), rates=(100e9, 50e9))
    cluster = Cluster(
        name="pod",
        device=load_backend("h200"),
        tiers=(tier("pod", 64, 64, 1000),),
        measured=(curve,),
    )

    def rate(devices):
        return 1 / seconds("all_to_all", cluster, 1e9, devices)

    assert rate(8) == pytest.approx(100)
    assert rate(4) == pytest.approx(100)
    assert rate(16) == pytest.approx(100 / 2**0.5)
    assert rate(32) == pytest.approx(50)
    assert rate(64) == pytest.approx(100 / 2**1.5)
