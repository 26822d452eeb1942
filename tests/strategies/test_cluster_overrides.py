"""What degraded and missing parts leave of a cluster."""

import itertools
import math

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from analyzers.errors import InputError
from strategies import search
from strategies.cluster import degraded, load_cluster
from strategies.cluster.uniform import largest_uniform
from strategies.schema import Job

TIERS = [
    {"name": "node", "size": 8, "fabric": {"kind": "switch", "bw_gbps": 450}},
    {"name": "rack", "size": 4, "fabric": {"kind": "clos", "bw_gbps": 50, "rails": 8}},
    {"name": "cluster", "size": 2, "fabric": {"kind": "clos", "bw_gbps": 25, "rails": 8}},
]
CURVES = [
    {"within": "node", "op": "all_gather", "devices": 8, "size_mib": [1, 2], "ms": [1.0, 2.0]},
    {"within": "cluster", "op": "all_to_all", "devices": [8, 64], "gbps": [40, 20]},
]


def load(folder, *overrides, curves=()):
    path = folder / "topo.yaml"
    data = {
        "version": 1,
        "name": "racks",
        "device": "h200",
        "tiers": TIERS,
        "nodes": {"names": ["a[1-4]", "b[1-4]"]},
        "measured": list(curves),
        "overrides": list(overrides),
    }
    path.write_text(yaml.safe_dump(data))
    return load_cluster(path)


def test_a_node_that_is_down_leaves_the_even_part(tmp_path):
    cluster = load(tmp_path, {"match": "a2/*", "down": True})
    # Rack a has three nodes left, rack b four: two racks of three, 48 of 64 devices.
    assert [t.size for t in cluster.tiers] == [8, 3, 2]
    assert cluster.world_size == 48
    assert cluster.node_names == ("a1", "a3", "a4", "b1", "b2", "b3")
    assert cluster.hostlist == ("a[1,3-4]", "b[1-3]")
    assert "48 of 64 devices are used, as 8 x 3 x 2: devices are down on a2" in cluster.notes[0]


def test_a_rack_that_is_down_leaves_the_other(tmp_path):
    cluster = load(tmp_path, {"match": "a*", "down": True})
    assert [t.size for t in cluster.tiers] == [8, 4, 1]
    assert cluster.node_names == ("b1", "b2", "b3", "b4")


def test_a_device_that_is_down_costs_least_where_nodes_are_many(tmp_path):
    # 7 devices of every node are 56; two racks of three whole nodes would be 48.
    cluster = load(tmp_path, {"match": "a1/gpu3", "down": True})
    assert [t.size for t in cluster.tiers] == [7, 4, 2]
    assert cluster.world_size == 56
    assert cluster.notes[1:] == ("ranks on a1 may see devices 0,1,2,4,5,6,7 alone",)


def test_a_slow_nic_slows_the_tiers_with_rails_alone(tmp_path):
    cluster = load(tmp_path, {"match": "a1/nic3", "bw_scale": 0.25})
    assert [t.fabric.scale for t in cluster.tiers] == [1.0, 0.25, 0.25]


def test_a_slow_part_that_stays_idle_slows_nothing(tmp_path):
    # b4 is left over once a2 is down.
    overrides = ({"match": "a2", "down": True}, {"match": "b4/nic0", "bw_scale": 0.5})
    assert [t.fabric.scale for t in load(tmp_path, *overrides).tiers] == [1.0, 1.0, 1.0]
    overrides = ({"match": "a2", "down": True}, {"match": "b3/nic0", "bw_scale": 0.5})
    assert [t.fabric.scale for t in load(tmp_path, *overrides).tiers] == [1.0, 0.5, 0.5]


def test_a_nic_that_is_down_is_shared_by_two_devices(tmp_path):
    cluster = load(tmp_path, {"match": "a1/nic3", "down": True})
    assert [t.fabric.scale for t in cluster.tiers] == [1.0, 0.5, 0.5]
    assert cluster.world_size == 64
    # Five of eight down: three carry the traffic of eight, one of them that of three.
    cluster = load(tmp_path, {"match": "a1/nic[0-4]", "down": True})
    assert cluster.tiers[1].fabric.scale == pytest.approx(1 / 3)
    cluster = load(tmp_path, {"match": "a1/nic*", "down": True})
    assert [t.size for t in cluster.tiers] == [8, 3, 2]


def test_a_slow_part_slows_what_was_measured_over_it(tmp_path):
    whole = load(tmp_path, curves=CURVES)
    slow = load(tmp_path, {"match": "a1/nic0", "bw_scale": 0.5}, curves=CURVES)
    assert slow.measured[0] == whole.measured[0]
    assert slow.measured[1].rates == tuple(r / 2 for r in whole.measured[1].rates)


def test_a_what_if_slows_one_tier_and_its_curves(tmp_path):
    whole = load(tmp_path, curves=CURVES)
    slow = degraded(whole, "node", 0.5)
    assert [t.fabric.scale for t in slow.tiers] == [0.5, 1.0, 1.0]
    assert slow.tiers[0].fabric.rate(8) == whole.tiers[0].fabric.rate(8) / 2
    assert slow.measured[0].seconds == (2e-3, 4e-3)
    for tier, scale in (("row", 0.5), ("node", 0.0), ("node", math.nan)):
        with pytest.raises(ValueError, match=r"tier|scale"):
            degraded(whole, tier, scale)


def test_one_node_needs_no_nic(tmp_path):
    data = {
        "version": 1,
        "name": "one",
        "device": "h200",
        "tiers": TIERS[:1],
        "nodes": {"names": ["a"]},
        "overrides": [{"match": "a/nic*", "down": True}],
    }
    path = tmp_path / "one.yaml"
    path.write_text(yaml.safe_dump(data))
    assert load_cluster(path).world_size == 8


def test_a_plan_says_what_it_leaves_idle(tmp_path, tiny):
    cluster = load(tmp_path, {"match": "a2", "down": True})
    plan = search(tiny, cluster, Job(model="m", cluster="c", backend="b", sequence_length=4096))
    assert plan.world_size <= 48
    assert any("48 of 64 devices are used" in line for line in plan.explanation)


@pytest.mark.parametrize(
    ("override", "fault"),
    [
        ({"match": "c9", "down": True}, "overrides[0].match: 'c9' matches no node"),
        ({"match": "a1/gpu8", "down": True}, "'gpu8' matches no part of a node of 8 devices"),
        ({"match": "a1/psu0", "down": True}, "'psu0' matches no part"),
        ({"match": "a1/nic8", "bw_scale": 0.5}, "'nic8' matches no part of a node of 8 nics"),
        ({"match": "a1"}, "overrides[0]: says nothing (add bw_scale: 0.5 or down: true)"),
        ({"match": "a1", "down": True, "bw_scale": 0.5}, "what is down has no bw_scale"),
        ({"match": "*", "down": True}, "overrides: leave no device"),
    ],
)
def test_an_override_that_means_nothing_is_refused(tmp_path, override, fault):
    with pytest.raises(InputError) as caught:
        load(tmp_path, override)
    assert fault in str(caught.value)


def brute_force(devices, parents):
    """Devices of the largest even part: every choice of children at every level."""

    def even(level, domain):
        """The sets of shapes (devices, children, ...) that an even part of a domain can have."""
        if level == 0:
            return {(n,) for n in range(1, devices[domain] + 1)}
        children = [i for i, p in enumerate(parents[level - 1]) if p == domain]
        shapes = [even(level - 1, c) for c in children]
        found = set()
        for count in range(1, len(children) + 1):
            for chosen in itertools.combinations(shapes, count):
                found |= {(*s, count) for s in set.intersection(*chosen)}
        return found

    return max((math.prod(s) for s in even(len(parents), 0)), default=0)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3), min_size=1, max_size=3),
        min_size=1,
        max_size=3,
    )
)
def test_the_even_part_is_the_largest_one(tree):
    devices = [d for row in tree for rack in row for d in rack]
    racks = [rack for row in tree for rack in row]
    parents = [
        [i for i, rack in enumerate(racks) for _ in rack],
        [i for i, row in enumerate(tree) for _ in row],
        [0 for _ in tree],
    ]
    found = largest_uniform(devices, parents)
    expected = brute_force(devices, parents)
    if found is None:
        assert expected == 0
        return
    assert math.prod(found.sizes) == expected
    assert len(found.nodes) == math.prod(found.sizes[1:])
    assert all(devices[n] >= found.sizes[0] for n in found.nodes)
    # The nodes taken form the shape: as many in each domain of each tier.
    at, chosen = list(found.nodes), set(found.nodes)
    for level, size in enumerate(found.sizes[1:]):
        domains = [parents[level][i] for i in at]
        assert all(domains.count(d) == size for d in domains)
        at = sorted(set(domains))
    assert len(chosen) == len(found.nodes)
