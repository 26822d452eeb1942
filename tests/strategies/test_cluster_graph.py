from pathlib import Path

import networkx as nx
import pytest

from analyzers.backends import load_backend
from analyzers.errors import InputError
from strategies.cluster import Cluster, Fabric, Tier, load_cluster, lowest_common_tier
from strategies.cluster.graph import build_graph, levels_of

EXAMPLES = Path(__file__).parents[2] / "examples" / "clusters"


def make(*sizes):
    tiers, devices = [], 1
    for i, size in enumerate(sizes):
        devices *= size
        fabric = Fabric(kind="switch", bw_gbps=100.0 / (i + 1))
        tiers.append(Tier(name=f"t{i}", size=size, devices=devices, fabric=fabric))
    return Cluster(name="made", device=load_backend("h200"), tiers=tuple(tiers))


def test_a_small_cluster_is_drawn_whole():
    graph = build_graph(make(4, 3, 2))
    assert nx.is_arborescence(graph)
    assert [v for v, n in graph.out_degree() if n == 0] == [f"device:{i}" for i in range(24)]
    assert graph.number_of_nodes() == 24 + 6 + 2 + 1
    assert graph.edges["t1:0", "t0:4"]["gbps"] == 50


@pytest.mark.parametrize("sizes", [(8, 1250), (8, 16, 800), (64, 64, 24), (100_000,)])
def test_a_large_cluster_is_folded(sizes):
    cluster = make(*sizes)
    graph = build_graph(cluster, limit=100)
    assert graph.number_of_nodes() <= 100 or len(sizes) * 2 >= graph.number_of_nodes()
    counted = {v: graph.nodes[v]["count"] for v in graph}
    # Every device is drawn or counted: multiply the counts from the root to each leaf.
    root = next(v for v, n in graph.in_degree() if n == 0)
    leaves = [v for v, n in graph.out_degree() if n == 0]
    total = 0
    for leaf in leaves:
        product = 1
        for vertex in nx.shortest_path(graph, root, leaf):
            product *= counted[vertex]
        total += product
    assert total == cluster.world_size


def test_the_lowest_common_tier_is_that_of_the_graph():
    cluster = load_cluster(EXAMPLES / "gb200-nvl72-x2.yaml")
    graph = build_graph(cluster, limit=1000)
    for first, second in ((0, 1), (0, 5), (3, 4), (63, 64), (0, 127), (70, 71)):
        above = nx.lowest_common_ancestor(graph, f"device:{first}", f"device:{second}")
        assert lowest_common_tier(cluster, first, second).name == graph.nodes[above]["tier"]
    assert lowest_common_tier(cluster, 5, 5) is None
    with pytest.raises(ValueError, match="rank 128"):
        lowest_common_tier(cluster, 0, 128)


def tree(*edges):
    return nx.DiGraph(list(edges))


def test_levels_of_a_tree_with_a_level_that_says_nothing():
    # Each leaf switch has a switch of its own above it: that level is left out.
    made = tree(
        ("root", "m1"), ("root", "m2"), ("m1", "s1"), ("m2", "s2"),
        ("s1", "a"), ("s1", "b"), ("s2", "c"), ("s2", "d"),
    )  # fmt: skip
    levels = levels_of(made, Path("f"))
    assert levels.nodes == ("a", "b", "c", "d")
    assert levels.parents == ((0, 0, 1, 1), (0, 0))
    assert levels.names == ("leaf", "spine")
    assert levels_of(made, Path("f"), under="m2").nodes == ("c", "d")


@pytest.mark.parametrize(
    ("made", "fault"),
    [
        (tree(("s1", "a"), ("s2", "b")), "is 2 separate trees, from 's1', 's2' (import one of"),
        (tree(("r", "s1"), ("r", "s2"), ("s1", "a"), ("s2", "a")), "'a' hangs on 's1' and 's2'"),
        (tree(("x", "y"), ("y", "x")), "goes in a circle: x -> y"),
        (
            tree(("r", "a"), ("r", "s"), ("s", "b")),
            "is not one tree of equal depth: 'a' is 1 below 'r', 'b' 2",
        ),
        (nx.DiGraph(), "names no node"),
    ],
    ids=["disconnected", "two parents", "circle", "uneven depth", "empty"],
)
def test_what_is_no_tree_is_refused(made, fault):
    with pytest.raises(InputError) as caught:
        levels_of(made, Path("f"))
    assert fault in str(caught.value)


def test_a_switch_that_is_not_there():
    with pytest.raises(InputError, match="has no switch 'x'"):
        levels_of(tree(("r", "a")), Path("f"), under="x")
