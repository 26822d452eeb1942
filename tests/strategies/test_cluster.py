from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from analyzers.documents import to_data
from analyzers.errors import InputError
from strategies.cluster import Fabric, Group, expand_hostlist, load_cluster, members

EXAMPLES = sorted((Path(__file__).parents[2] / "examples" / "clusters").glob("*.yaml"))
GOOD = {
    "version": 1,
    "name": "small",
    "device": "h200",
    "tiers": [
        {
            "name": "node",
            "size": 8,
            "fabric": {"kind": "switch", "bw_gbps": 450, "latency_us": 8, "efficiency": 0.8},
        },
        {"name": "cluster", "size": 2, "fabric": {"kind": "clos", "bw_gbps": 50}},
    ],
    "nodes": {"names": ["gpu[01-02]"]},
}


def write(folder, text_or_data):
    path = folder / "topo.yaml"
    text = text_or_data if isinstance(text_or_data, str) else yaml.safe_dump(text_or_data)
    path.write_text(text)
    return path


def changed(path, value):
    """GOOD with one value replaced, or removed when it is `...`; `path` like `tiers.0.size`."""
    data = yaml.safe_load(yaml.safe_dump(GOOD))
    *parents, last = [int(key) if key.isdigit() else key for key in path.split(".")]
    inner = data
    for key in parents:
        inner = inner[key]
    if value is ...:
        del inner[last]
    else:
        inner[last] = value
    return data


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_every_example_cluster_loads(path):
    cluster = load_cluster(path)
    assert cluster.name == path.stem
    assert cluster.nodes * cluster.devices_per_node == cluster.world_size
    assert len(cluster.node_names) == cluster.nodes


def test_tiers_multiply_and_overrides_reach_the_device(tmp_path):
    data = changed("name", "x") | {
        "device_overrides": {"memory_gib": 80, "matmul_tflops": {"bfloat16": 700}},
        "overrides": [{"match": "gpu02/nic3", "bw_scale": 0.5}],
    }
    cluster = load_cluster(write(tmp_path, data))
    assert [t.devices for t in cluster.tiers] == [8, 16]
    assert cluster.device.memory_gib.value == 80
    assert cluster.device.memory_gib.origin == "note"
    assert cluster.device.matmul_tflops["bfloat16"].value == 700
    assert "float32" in cluster.device.matmul_tflops
    # A degraded NIC slows what leaves the node and nothing inside it.
    assert [t.fabric.scale for t in cluster.tiers] == [1.0, 0.5]
    # No efficiency and no latency in the file: the product's own assumption, and it says so.
    assert [t.fabric.origin for t in cluster.tiers] == ["spec", "default"]


def test_a_cluster_can_be_printed_as_json(tmp_path):
    data = to_data(load_cluster(write(tmp_path, GOOD)))
    assert data["tiers"][1]["devices"] == 16


CURVE = {"within": "node", "op": "all_gather", "devices": 2, "size_mib": [1, 2], "ms": [0.1, 0.2]}
BAD = {
    "unknown key": ({**GOOD, "teirs": []}, "teirs: unknown key (did you mean 'tiers'?)"),
    "unknown inner key": (
        changed("tiers.0.fabric.latency_ms", 3),
        "tiers[0].fabric.latency_ms: unknown key (did you mean 'latency_us'?)",
    ),
    "missing key": (changed("device", ...), "device: is missing (add this key)"),
    "negative bandwidth": (
        changed("tiers.1.fabric.bw_gbps", -50),
        "tiers[1].fabric.bw_gbps: must be > 0, found -50 (correct the number)",
    ),
    "zero bandwidth": (
        changed("tiers.0.fabric.bw_gbps", 0),
        "tiers[0].fabric.bw_gbps: must be > 0",
    ),
    "infinite bandwidth": (changed("tiers.0.fabric.bw_gbps", float("inf")), "finite number"),
    "bandwidth in words": (changed("tiers.0.fabric.bw_gbps", "fast"), "valid number, found 'fast'"),
    "efficiency above one": (
        changed("tiers.0.fabric.efficiency", 1.2),
        "tiers[0].fabric.efficiency: must be <= 1, found 1.2",
    ),
    "zero devices": (changed("tiers.0.size", 0), "tiers[0].size: must be >= 1, found 0"),
    "fractional devices": (changed("tiers.0.size", 2.5), "tiers[0].size: "),
    "true is not a size": (changed("tiers.0.size", True), "tiers[0].size: "),
    "no tiers": (changed("tiers", []), "tiers: is empty (give at least one entry)"),
    "absurd size": (changed("tiers.1.size", 10**9), "tiers[1].size: must be <= 1000000"),
    "too many devices": (changed("tiers.1.size", 10**6), "makes 8,000,000 devices"),
    "two tiers of one name": (changed("tiers.1.name", "node"), "'node' is there twice"),
    "unknown fabric": (
        changed("tiers.0.fabric.kind", "mesh"),
        "'mesh' is not known (did you mean 'fullmesh'? one of: ",
    ),
    "unknown device": (
        changed("device", "h20"),
        "device: 'h20' is not a known backend (did you mean 'h200'?",
    ),
    "device far from any": (
        changed("device", "toaster"),
        "'toaster' is not a known backend (one of: ",
    ),
    "version of the future": (changed("version", 2), "version: 2 is not known (one of: 1)"),
    "a name of two lines": (changed("name", "a\nb"), "name: 'a\\nb' is not a name (use letters"),
    "hostlist too short": (
        changed("nodes.names", ["gpu[01-03]"]),
        "nodes.names: names 3 nodes, the tiers make 2 (correct the hostlist",
    ),
    "hostlist backwards": (changed("nodes.names", ["gpu[09-01]"]), "runs backwards: '09-01'"),
    "hostlist unclosed": (changed("nodes.names", ["gpu[01-02"]), "nodes.names[0]: 'gpu[01-02' is"),
    "hostlist with a command": (changed("nodes.names", ["a;reboot", "b"]), "is not a hostlist"),
    "hostlist of a billion": (changed("nodes.names", ["gpu[0-999999999]"]), "names more than"),
    "node named twice": (changed("nodes.names", ["gpu1", "gpu1"]), "node 'gpu1' is there twice"),
    "curve of unequal lengths": (
        {**GOOD, "measured": [{**CURVE, "ms": [0.1]}]},
        "measured[0].ms: has 1 values for the 2 of size_mib (give both lists the same length)",
    ),
    "curve unsorted": (
        {**GOOD, "measured": [{**CURVE, "size_mib": [2, 1]}]},
        "measured[0].size_mib: is not in rising order (sort the points)",
    ),
    "curve of a tier that is not there": (
        {**GOOD, "measured": [{**CURVE, "within": "rack"}]},
        "measured[0].within: no tier is called 'rack' (one of: node, cluster)",
    ),
    "curve without points": (
        {**GOOD, "measured": [{"within": "node", "op": "all_gather", "devices": 2}]},
        "measured[0].op: needs one curve",
    ),
    "override of no node": (
        {**GOOD, "overrides": [{"match": "gpu99/nic0", "bw_scale": 0.5}]},
        "overrides[0].match: 'gpu99/nic0' matches no node",
    ),
    "import": ({**GOOD, "import": [{"from": "slurm", "file": "t.yaml"}]}, "import[0].file: "),
    "unknown override": (
        {**GOOD, "device_overrides": {"mem_gib": 80}},
        "device_overrides.mem_gib: unknown key (did you mean 'memory_gib'?)",
    ),
    "more reserved than there is": (
        {**GOOD, "device_overrides": {"reserved_gib": 200}},
        "device_overrides.reserved_gib: 200 GiB reserved of 140.4 GiB leaves nothing",
    ),
    "broken yaml": ("version: 1\nname: [x\n", ":3: broken YAML"),
    "tabs": ("version: 1\n\tname: x\n", ":2: broken YAML"),
    "key twice": ("version: 1\nname: x\nname: y\n", ":3: broken YAML: the key 'name' is there"),
    "empty file": ("", "is empty (describe the cluster"),
    "only a comment": ("# later\n", "is empty"),
    "a list": ("- 1\n- 2\n", "must be a mapping of keys, found a list"),
    "a word": ("hello", "must be a mapping of keys, found a str"),
    "alias bomb": (
        "a: &a [1, 1]\nb: &b [*a, *a]\nc: [*b, *b]\n",
        ":1: broken YAML: anchors and aliases are not accepted",
    ),
    "python object": ("!!python/object/apply:os.getcwd []", "broken YAML"),
    "too deep": ("[" * 20000, "broken YAML"),
    "too large": ("#" * 300_000, "is larger than 256 KiB"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_topology_is_one_clear_line(tmp_path, name):
    content, expected = BAD[name]
    path = write(tmp_path, content)
    with pytest.raises(InputError) as caught:
        load_cluster(path)
    message = str(caught.value)
    assert message.startswith(f"{path}:")
    assert expected in message
    assert "\n" not in message
    assert caught.value.exit_status == 2


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(InputError, match="does not exist"):
        load_cluster(tmp_path / "none.yaml")
    with pytest.raises(InputError, match="is a folder"):
        load_cluster(tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"name: \xff\xfe")
    with pytest.raises(InputError, match="UTF-8"):
        load_cluster(tmp_path / "latin.yaml")


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("gpu0", ["gpu0"]),
        ("gpu[08-10]", ["gpu08", "gpu09", "gpu10"]),
        ("n[1,3-4].x", ["n1.x", "n3.x", "n4.x"]),
        ("r[0-1]-t[00-01]", ["r0-t00", "r0-t01", "r1-t00", "r1-t01"]),
    ],
)
def test_hostlists_expand_as_slurm_does(pattern, expected):
    assert expand_hostlist(pattern) == expected


def test_a_pair_of_a_full_mesh_gets_one_link():
    # MI300X: two devices all-reduce at 47.7 GB/s, eight at 312.9 (planning facts, section 5).
    mesh = Fabric(kind="fullmesh", bw_gbps=448, link_gbps=64, efficiency=1.0)
    assert mesh.rate(2) == 64e9
    assert mesh.rate(8) == 448e9


@pytest.mark.parametrize(
    ("group", "expected"),
    [
        (Group(4), (4,)),
        (Group(8), (8,)),
        (Group(16), (8, 16)),
        (Group(2, 4), (2,)),
        (Group(2, 8), (1, 2)),
        (Group(4, 4), (2, 4)),
    ],
)
def test_members_of_a_group_by_tier(tmp_path, group, expected):
    cluster = load_cluster(write(tmp_path, GOOD))
    assert members(cluster, group) == expected


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.dates()
    | st.binary(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=5,
)
PLACES = [
    *GOOD,
    *("host", "measured", "overrides", "import", "device_overrides"),
    *("tiers.0.name", "tiers.0.size", "tiers.1.fabric", "tiers.0.fabric.bw_gbps", "nodes.names"),
]


@settings(max_examples=60, deadline=None)
@given(place=st.sampled_from(PLACES), value=VALUES)
def test_any_value_in_any_place_is_read_or_refused(tmp_path_factory, place, value):
    path = write(tmp_path_factory.mktemp("any"), yaml.safe_dump(changed(place, value)))
    refusal = None
    try:
        assert load_cluster(path).world_size > 0
    except InputError as e:
        refusal = str(e)
    if refusal is not None:
        assert refusal.startswith(f"{path}:")
        assert "\n" not in refusal


@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=60))
def test_any_text_is_refused_in_one_line(tmp_path_factory, text):
    path = tmp_path_factory.mktemp("any") / "topo.yaml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(InputError) as caught:
        load_cluster(path)
    assert "\n" not in str(caught.value)
