import copy
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from analyzers.documents import to_data
from analyzers.errors import InputError
from strategies import search
from strategies.cluster import (
    Fabric,
    Group,
    compress_hostlist,
    expand_hostlist,
    load_cluster,
    members,
)
from strategies.cluster.hostlist import split_hostlist
from strategies.cost import collectives
from strategies.schema import Job

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
    "curve twice": (
        {**GOOD, "measured": [CURVE, copy.deepcopy(CURVE)]},
        "measured[1]: all_gather of these devices within 'node' is there twice (keep one of",
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


LINES = """\
version: 1
name: lines
device: h200
tiers:
  - {name: node, size: 8, fabric: {kind: switch, bw_gbps: 450}}
  - name: cluster
    size: 2
    fabric:
      kind: clos
      bw_gbps: 50
nodes:
  names:
    - gpu1
    - gpu2
measured:
  - {within: node, op: all_gather, devices: 2, size_mib: [1, 2], ms: [0.1, 0.2]}
overrides:
  - match: gpu1
    bw_scale: 0.5
"""


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("size: 2\n", "size: -2\n", ":7: tiers[1].size: must be >= 1"),
        ("bw_gbps: 50\n", "bw_gpbs: 50\n", ":10: tiers[1].fabric.bw_gpbs: unknown key (did you"),
        ("      kind: clos\n", "", ":8: tiers[1].fabric.kind: is missing"),
        ("    - gpu2\n", "    - gpu[2\n", ":14: nodes.names[1]: 'gpu[2' is not a hostlist"),
        ("[0.1, 0.2]", "[0.1, -0.2]", ":16: measured[0].ms[1]: must be > 0"),
        ("within: node", "within: rack", ":16: measured[0].within: no tier is called 'rack'"),
        ("match: gpu1", "match: gpu7", ":18: overrides[0].match: 'gpu7' matches no node"),
        ("device: h200", "device: h20", ":3: device: 'h20' is not a known backend"),
        ("bw_gbps: 450", "bw_gbps: .inf", ":5: tiers[0].fabric.bw_gbps: input should be a finite"),
        ("bw_gbps: 450", "bw_gbps: .nan", ":5: tiers[0].fabric.bw_gbps: "),
        ("bw_gbps: 450", "bw_gbps: 1e400", ":5: tiers[0].fabric.bw_gbps: input should be a finite"),
        ("bw_gbps: 450", "bw_gbps: 1e13", ":5: tiers[0].fabric.bw_gbps: must be <= 1000000000000"),
        ("size: 8", "size: 010", ":5: tiers[0].size: input should be a valid integer, found '010'"),
        ("size: 8", f"size: {'9' * 5000}", ":5: broken YAML: the number '999"),
        ("name: lines", "name: !!str lines", ":2: broken YAML: tags are not accepted"),
        ("name: lines", "name: &n lines", ":2: broken YAML: anchors and aliases are not accepted"),
        ("version: 1", "<<: {version: 1}", ":1: '<<': unknown key"),
        ("version: 1", "? [1, 2]\n: 3", ":1: broken YAML: a key must be a word"),
        ("version: 1", "version: 1\nname: again", ":3: broken YAML: the key 'name' is there twice"),
        ("name: lines", f"name: {'[' * 40}", ":2: broken YAML: nested too deeply"),
    ],
)
def test_an_error_stands_on_its_line(tmp_path, old, new, expected):
    assert old in LINES
    path = write(tmp_path, LINES.replace(old, new, 1))
    with pytest.raises(InputError) as caught:
        load_cluster(path)
    assert str(caught.value).startswith(f"{path}{expected}")


def test_numbers_and_words_are_read_as_yaml_1_2_has_them(tmp_path):
    text = LINES.replace("bw_gbps: 50\n", "bw_gbps: 5e1\n").replace("gpu1", "no")
    cluster = load_cluster(write(tmp_path, text))
    assert cluster.tiers[1].fabric.bw_gbps == 50
    assert cluster.node_names == ("no", "gpu2")


def test_a_file_of_a_hundred_megabytes_is_not_read(tmp_path):
    path = tmp_path / "topo.yaml"
    with path.open("wb") as f:
        f.truncate(100 * 2**20)
    with pytest.raises(InputError, match="is larger than 256 KiB"):
        load_cluster(path)
    with pytest.raises(InputError, match="is not a regular file"):
        load_cluster("/dev/zero")


def test_host_memory_pools_and_rails_reach_the_cluster(tmp_path):
    cluster = load_cluster(EXAMPLES[0].parent / "supernode-128.yaml")
    assert cluster.host_bytes == 3072 / 8 * 2**30
    assert cluster.pool_bytes == 16384 / 128 * 2**30
    assert cluster.tiers[1].unified_memory.load_store
    assert cluster.measured[0].tokens == 4096
    rails = load_cluster(EXAMPLES[0].parent / "hgx-h200-128.yaml")
    assert [t.fabric.rails for t in rails.tiers] == [None, 8]
    assert rails.tiers[0].fabric.multicast
    plain = load_cluster(write(tmp_path, GOOD))
    assert (plain.host_bytes, plain.pool_bytes) == (0, 0)
    shared = {**GOOD, "host": {"mem_gib": 100, "d2h_gbps": 20, "share": "device"}}
    assert load_cluster(write(tmp_path, shared)).host_bytes == 100 * 2**30


def test_what_a_probe_of_two_h200_measured_is_what_plans_are_priced_with(tiny):
    """The file of a real machine: every number of it is measured, the host's too."""
    samples = Path(__file__).parents[1] / "data" / "topologies"
    cluster = load_cluster(samples / "probe-h200-x2.yaml")
    assert (cluster.world_size, cluster.nodes) == (2, 1)
    assert cluster.host_bytes == pytest.approx(251.769 / 2 * 2**30)
    assert (cluster.host.origin, cluster.host.source) == (
        "measured",
        "adapt cluster probe, NVIDIA H200, nccl",
    )
    # 1 GiB between the two takes the 2.00976 ms of the file, not 1 GiB / 2 at the link's rate.
    gathered = collectives.all_gather(cluster, np.array([2.0**30]), np.array([2]))
    assert gathered[0] == pytest.approx(2.00976e-3)
    job = Job(model="m", cluster="c", backend="h200", sequence_length=1024)
    plan = search(tiny, cluster, job, fixed={"fsdp": 2, "ep": 2})
    assert plan.predicted.memory_gib.capacity == pytest.approx(139.801)
    assert len(plan.origins) == 6
    assert set(plan.origins.values()) == {"measured"}


def test_a_host_whose_file_does_not_say_where_its_numbers_are_from_is_a_specification(tmp_path):
    given = {**GOOD, "host": {"mem_gib": 100, "d2h_gbps": 20}}
    assert load_cluster(write(tmp_path, given)).host.origin == "spec"
    given["host"]["origin"] = "guessed"
    with pytest.raises(InputError, match=r"host.origin: 'guessed' is not known"):
        load_cluster(write(tmp_path, given))


def test_every_number_of_a_fabric_knows_its_origin(tmp_path):
    fabric = {"kind": "switch", "bw_gbps": 450, "latency_us": 8, "source": "data sheet"}
    given = changed("tiers.0.fabric", fabric | {"origin": {"latency_us": "measured"}})
    first, second = (t.fabric for t in load_cluster(write(tmp_path, given)).tiers)
    assert [first.origin_of(n) for n in ("bw_gbps", "latency_us", "efficiency")] == [
        "spec",
        "measured",
        "default",
    ]
    assert (first.origin, first.source) == ("default", "data sheet")
    assert second.origin_of("latency_us") == "default"
    all_measured = changed("tiers.0.fabric", fabric | {"efficiency": 1.0, "origin": "measured"})
    assert load_cluster(write(tmp_path, all_measured)).tiers[0].fabric.origin == "measured"


NAMES = st.lists(
    st.from_regex(r"[a-z]{1,3}[0-9]{0,4}(-[a-z0-9]{1,3})?", fullmatch=True),
    max_size=12,
    unique=True,
)


@settings(max_examples=200, deadline=None)
@given(NAMES)
def test_compressed_hostlists_expand_to_the_same_names(names):
    patterns = compress_hostlist(names)
    assert [n for p in patterns for n in expand_hostlist(p)] == names
    assert len(patterns) <= len(names)


def test_hostlists_are_compressed_as_people_write_them():
    assert compress_hostlist(["n08", "n09", "n10", "n12"]) == ["n[08-10,12]"]
    assert compress_hostlist(["n9", "n10", "m1", "login"]) == ["n[9-10]", "m1", "login"]
    assert compress_hostlist([f"r0-t{i}" for i in range(16)]) == ["r0-t[0-15]"]
    assert split_hostlist("a[1,3],b,c[2-4]") == ["a[1,3]", "b", "c[2-4]"]


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
