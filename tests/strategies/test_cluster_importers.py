"""Each importer on a sample of its format; tests/data/topologies/README.md says whence its shape.

Expected values are read off the samples by hand, and device rates off their data sheets.
"""

import json
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from analyzers.errors import InputError
from strategies.cluster import copy_topology, load_cluster
from strategies.cluster.importers import assemble, read_foreign
from strategies.cluster.writing import to_yaml

SAMPLES = Path(__file__).parents[1] / "data" / "topologies"


def take(*names, device, topology=None, **asked):
    founds = [read_foreign(SAMPLES / n, topology=topology) for n in names]
    return assemble(founds, device=device, **asked)


def shape(made):
    return [(t["name"], t["size"], t["fabric"]["kind"], t["fabric"]["bw_gbps"]) for t in made.tiers]


def test_slurm_tree():
    made = take("slurm-tree.conf", device="h200")
    assert shape(made) == [
        ("node", 8, "switch", 450),
        ("leaf", 4, "clos", 50),
        ("spine", 2, "clos", 50),
    ]
    assert made.hostlist == ("gpu[01-08]",)
    assert made.notes == ()


def test_slurm_spines_over_the_same_leaves_are_one_clos(tmp_path):
    path = tmp_path / "t.conf"
    path.write_text(
        "SwitchName=leaf1 Nodes=a[1-2]\nSwitchName=leaf2 Nodes=b[1-2]\n"
        "SwitchName=spine1 Switches=leaf[1-2]\nSwitchName=spine2 Switches=leaf[1-2]\n"
    )
    made = assemble([read_foreign(path)], device="h200")
    assert [(t["name"], t["size"]) for t in made.tiers] == [("node", 8), ("leaf", 2), ("spine", 2)]
    assert made.notes == ("switches with the children of another are one with it: spine2",)


def test_slurm_blocks_of_an_nvlink_domain_are_scale_up():
    made = take("slurm-block.conf", device="gb200")
    assert shape(made)[:2] == [("node", 4, "switch", 900), ("block", 18, "switch", 900)]
    assert shape(made)[2][:3] == ("cluster", 2, "clos")
    assert made.hostlist == ("node[1101-1118,1201-1218]",)
    assert any("between blocks: one fabric is assumed" in n for n in made.notes)
    # The same blocks of eight-GPU nodes are joined by the network.
    assert shape(take("slurm-block.conf", device="h100"))[1] == ("block", 18, "clos", 50)


def test_slurm_yaml_takes_the_default_or_the_named_topology():
    assert [t["size"] for t in take("slurm.yaml", device="h100").tiers] == [8, 2, 2]
    blocks = take("slurm.yaml", device="h100", topology="topo-block")
    assert [t["name"] for t in blocks.tiers] == ["node", "block", "cluster"]
    assert [t["size"] for t in blocks.tiers] == [8, 4, 4]
    with pytest.raises(InputError, match="'topo-flat' is flat: it says nothing of the network"):
        take("slurm.yaml", device="h100", topology="topo-flat")
    with pytest.raises(InputError, match="one of: topo-switch, topo-block, topo-flat"):
        take("slurm.yaml", device="h100", topology="topo")


def test_topograph_model():
    made = take("topograph-nvl72.yaml", device="gb200")
    assert [(t["name"], t["size"]) for t in made.tiers] == [
        ("node", 4), ("domain", 18), ("spine", 2), ("core", 2),
    ]  # fmt: skip
    assert [t["fabric"]["kind"] for t in made.tiers] == ["switch", "switch", "clos", "clos"]
    assert made.hostlist == ("node[1101-1118,1201-1218,2101-2118,2201-2218]",)


def test_topograph_model_of_before_is_uneven_and_says_so():
    made = take("topograph-old.yaml", device="gb200")
    assert [(t["name"], t["size"]) for t in made.tiers] == [("node", 4), ("domain", 2)]
    assert made.hostlist == ("n[1-2]",)
    assert made.notes[-1] == "the tree is uneven: 2 of 3 nodes are used, as 2 x 1; idle: n3"


def test_topograph_labels_on_kubernetes_nodes():
    made = take("topograph-labels.yaml", device="h200")
    assert [(t["name"], t["size"]) for t in made.tiers] == [
        ("node", 8), ("leaf", 2), ("spine", 2), ("core", 2),
    ]  # fmt: skip
    assert made.notes == ("1 nodes without labels are left out: control-plane",)


def test_nvlink_domains_across_leaf_switches_stand_under_the_common_one(tmp_path):
    # Rails: the four nodes of a domain hang on two leaf switches.
    model = {
        "switches": {"spine": {"switches": ["l1", "l2"]}},
        "blocks": [
            {"switch": leaf, "nodes": nodes, "annotations": {"accelerator.topology.test/domain": d}}
            for leaf, nodes, d in (
                ("l1", ["a[1-2]"], "x"), ("l2", ["a[3-4]"], "x"),
                ("l1", ["b[1-2]"], "y"), ("l2", ["b[3-4]"], "y"),
            )
        ],
    }  # fmt: skip
    path = tmp_path / "model.yaml"
    path.write_text(yaml.safe_dump(model))
    made = assemble([read_foreign(path)], device="gb200")
    assert [(t["name"], t["size"]) for t in made.tiers] == [
        ("node", 4), ("domain", 4), ("spine", 2),
    ]  # fmt: skip
    assert "1 level(s) of switches lie inside accelerator domains" in made.notes[0]


def test_nccl_xml_of_a_node_behind_nvswitches():
    made = take("nccl-h200.xml", device="h200")
    assert shape(made) == [("node", 8, "switch", 450)]  # 18 links of 25 GB/s
    assert made.tiers[0]["fabric"]["origin"]["bw_gbps"] == "spec"
    assert made.hostlist == ()
    # Eight 400 Gb/s NICs for eight GPUs; the 25 Gb/s one of the host is not counted.
    whole = take("slurm-tree.conf", "nccl-h200.xml", device="h200")
    assert [t["fabric"].get("rails") for t in whole.tiers] == [None, 8, 8]
    assert whole.tiers[1]["fabric"]["source"] == "8 NICs of 50 GB/s for 8 devices"


def test_nccl_xml_of_gpus_in_pairs_is_planned_at_pcie():
    made = take("nccl-pairs.xml", device="a100")
    [(name, size, kind, gbps)] = shape(made)
    assert (name, size, kind) == ("node", 4, "switch")
    assert gbps == pytest.approx(16 * 16 / 8 * 128 / 130, abs=1e-3)  # PCIe 4 x16
    assert "do not join every pair" in made.notes[0]
    # One 100 Gb/s NIC for four GPUs.
    named = take("nccl-pairs.xml", device="a100", nodes=["a", "b"])
    assert named.tiers[1]["fabric"]["bw_gbps"] == 100 / 8 / 4


def test_rccl_xml_of_a_full_mesh():
    made = take("rccl-mi300x.xml", device="mi300x")
    assert shape(made) == [("node", 8, "fullmesh", 448)]
    assert made.tiers[0]["fabric"]["link_gbps"] == 64


def test_nvidia_smi_matrix():
    made = take("nvidia-smi-h200.txt", device="h200", nodes=[f"n{i}" for i in range(4)])
    assert shape(made)[0] == ("node", 8, "switch", 450)
    assert made.tiers[1]["fabric"]["rails"] == 8  # one NIC beside each GPU
    assert made.tiers[1]["fabric"]["origin"]["bw_gbps"] == "spec"  # of the device, not the matrix


def matrix(*rows):
    head = "\t".join(["", *(f"GPU{i}" for i in range(len(rows)))]) + "\tCPU Affinity\n"
    return head + "".join(f"GPU{i}\t{row}\t0-31\n" for i, row in enumerate(rows))


def read_matrix(folder, text, device="a100", **asked):
    path = folder / "m.txt"
    path.write_text(text)
    return assemble([read_foreign(path)], device=device, **asked)


def test_nvidia_smi_tells_a_full_mesh_from_a_switch(tmp_path):
    # Four A100s joined each with each by 4 of their 12 links: 4 x 25 GB/s a pair.
    four = ["X NV4 NV4 NV4", "NV4 X NV4 NV4", "NV4 NV4 X NV4", "NV4 NV4 NV4 X"]
    made = read_matrix(tmp_path, matrix(*four))
    assert shape(made) == [("node", 4, "fullmesh", 300)]
    assert made.tiers[0]["fabric"]["link_gbps"] == 100


def test_nvidia_smi_without_nvlink_asks_for_the_rate(tmp_path):
    text = matrix("X PHB", "PHB X")
    with pytest.raises(InputError, match=r"does not carry the bandwidth.*give --node-gbps"):
        read_matrix(tmp_path, text)
    assert shape(read_matrix(tmp_path, text, node_gbps=20)) == [("node", 2, "switch", 20)]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (matrix("X NV4", "NV4"), "m.txt:3: GPU1: '0-31' is no kind of link"),
        (matrix("X NV4", "NV2 X"), "GPU0 to GPU1 is NV4, the way back NV2"),
        (matrix("X NV4", "NV4 X").rsplit("GPU1", 1)[0], "has no row for GPU1"),
    ],
)
def test_a_matrix_that_does_not_fit_is_refused(tmp_path, text, fault):
    with pytest.raises(InputError) as caught:
        read_matrix(tmp_path, text)
    assert fault in str(caught.value)


@pytest.mark.parametrize(
    ("files", "device", "topology"),
    [
        (["slurm-tree.conf", "nccl-h200.xml"], "h200", None),
        (["slurm-block.conf"], "gb200", None),
        (["slurm.yaml"], "h100", "topo-block"),
        (["topograph-nvl72.yaml"], "gb200", None),
        (["topograph-labels.yaml", "nvidia-smi-h200.txt"], "h200", None),
        (["rccl-mi300x.xml"], "mi300x", None),
    ],
    ids=lambda v: v[0] if isinstance(v, list) else None,
)
def test_what_is_written_reads_back(tmp_path, files, device, topology):
    made = take(*files, device=device, topology=topology)
    data = {"version": 1, "name": "back", "device": device, "tiers": made.tiers}
    if made.hostlist:
        data["nodes"] = {"names": list(made.hostlist)}
    path = tmp_path / "topo.yaml"
    path.write_text(to_yaml(data, made.notes))
    cluster = load_cluster(path)
    assert [(t.name, t.size, t.fabric.bw_gbps) for t in cluster.tiers] == [
        (t["name"], t["size"], t["fabric"]["bw_gbps"]) for t in made.tiers
    ]
    for tier, written in zip(cluster.tiers, made.tiers, strict=True):
        for number, origin in written["fabric"]["origin"].items():
            assert tier.fabric.origin_of(number) == origin


def topo(folder, **changes):
    data = {"version": 1, "name": "imported", "device": "h200", **changes}
    path = folder / "topo.yaml"
    path.write_text(yaml.safe_dump(data))
    return path


def test_a_topology_file_may_leave_its_tiers_to_imported_files(tmp_path):
    for name in ("slurm-tree.conf", "nccl-h200.xml"):
        (tmp_path / name).write_text((SAMPLES / name).read_text())
    files = [
        {"from": "slurm", "file": "slurm-tree.conf"},
        {"from": "nccl_xml", "file": "nccl-h200.xml"},
    ]
    cluster = load_cluster(topo(tmp_path, **{"import": files}))
    assert [t.size for t in cluster.tiers] == [8, 4, 2]
    assert cluster.node_names == tuple(f"gpu0{i}" for i in range(1, 9))
    # Tiers of its own count, where their sizes are those of the imported files.
    own = [
        {"name": n, "size": s, "fabric": {"kind": "clos", "bw_gbps": 99}}
        for n, s in (("node", 8), ("row", 4), ("hall", 2))
    ]
    cluster = load_cluster(topo(tmp_path, tiers=own, **{"import": files[:1]}))
    assert cluster.tiers[1].fabric.bw_gbps == 99
    own[1]["size"] = 2
    with pytest.raises(InputError, match=r"have the sizes \[8, 2, 2\], the imported ones \[8, 4"):
        load_cluster(topo(tmp_path, tiers=own, **{"import": files[:1]}))


def test_a_copy_of_a_topology_file_stands_alone(tmp_path):
    for name in ("slurm-tree.conf", "nccl-h200.xml"):
        (tmp_path / name).write_text((SAMPLES / name).read_text())
    files = [
        {"from": "slurm", "file": "slurm-tree.conf"},
        {"from": "nccl_xml", "file": "nccl-h200.xml"},
    ]
    override = {"match": "gpu02/nic1", "bw_scale": 0.5}
    path = topo(tmp_path, overrides=[override], **{"import": files})
    (tmp_path / "run").mkdir()
    copy = copy_topology(path, tmp_path / "run" / "cluster.yaml")
    assert load_cluster(copy) == load_cluster(path)
    plain = Path(__file__).parents[2] / "examples" / "clusters" / "h200-x2.yaml"
    assert copy_topology(plain, copy).read_text() == plain.read_text()


def test_a_fault_in_an_imported_file_names_both_files(tmp_path):
    (tmp_path / "t.conf").write_text("SwitchName=s1 Node=a[1-2]\n")
    path = topo(tmp_path, **{"import": [{"from": "slurm", "file": "t.conf"}]})
    with pytest.raises(InputError) as caught:
        load_cluster(path)
    message = str(caught.value)
    assert message.startswith(f"{path}:3: import[0].file: ")
    assert "t.conf:1: unknown key 'Node' (did you mean 'nodes'?)" in message


@pytest.mark.parametrize("gbps", [0, -1, float("nan"), float("inf"), 1e9])
def test_a_rate_that_is_none_is_refused(gbps):
    with pytest.raises(InputError, match=r"--network-gbps: .* is no rate"):
        take("slurm-tree.conf", device="h200", network_gbps=gbps)


def test_a_comment_stays_a_comment():
    assert yaml.safe_load(to_yaml({"version": 1}, ["a\nname: b", "c\r\nd"])) == {"version": 1}


def test_what_an_import_does_not_say_is_asked_for_in_the_file(tmp_path):
    (tmp_path / "t.conf").write_text("SwitchName=s1 Nodes=a[1-2]\n")
    files = [{"from": "slurm", "file": "t.conf"}]
    path = topo(tmp_path, **{"import": files, "device": "cpu"})
    with pytest.raises(InputError) as caught:
        load_cluster(path)
    assert f"{path}:2: import: " in str(caught.value)
    assert "does not say how many devices a node has (write the tiers in" in str(caught.value)


def test_one_node_alone_is_one_tier(tmp_path):
    path = tmp_path / "t.conf"
    path.write_text("SwitchName=s0 Switches=s1\nSwitchName=s1 Nodes=a\n")
    made = assemble([read_foreign(path)], device="h200")
    assert (shape(made), made.hostlist) == ([("node", 8, "switch", 450)], ("a",))
    assert assemble([], device="h200", nodes=["a"]) == made


REFUSED = {
    "two parents": (
        "t.conf",
        "SwitchName=s0 Switches=s[1-2]\nSwitchName=s1 Nodes=a,b\nSwitchName=s2 Nodes=a,c\n",
        "is no tree: 'a' hangs on 's1' and 's2'",
    ),
    "separate trees": (
        "t.conf",
        "SwitchName=s1 Nodes=a[1-2]\nSwitchName=s2 Nodes=b[1-2]\n",
        "is 2 separate trees, from 's1', 's2' (import one of them with --under SWITCH)",
    ),
    "uneven depth": (
        "t.conf",
        "SwitchName=r Switches=s1,s2\nSwitchName=s1 Switches=s3\nSwitchName=s3 Nodes=a1\n"
        "SwitchName=s2 Nodes=b1\n",
        "is not one tree of equal depth",
    ),
    "misspelt": ("t.conf", "SwitchNam=s1 Nodes=a\n", "is in no format that is known"),
    "misspelt later": (
        "t.conf",
        "SwitchName=s1 Nodes=a\nSwitchNam=s2 Nodes=b\n",
        "t.conf:2: 'SwitchNam' starts no line of topology.conf (did you mean 'SwitchName'?)",
    ),
    "no value": ("t.conf", "SwitchName=s1 Nodes\n", "t.conf:1: 'Nodes' has no '='"),
    "switch twice": (
        "t.conf",
        "SwitchName=s1 Nodes=a\n# s1 again\nSwitchName=s1 Nodes=b\n",
        "t.conf:3: switch 's1' is there twice",
    ),
    "unknown switch": ("t.conf", "SwitchName=s0 Switches=s[1-2]\n", "names the switch 's1' but"),
    "hostlist bomb": (
        "t.conf",
        "SwitchName=s1 Nodes=a[1-9999][1-9999][1-9999]\n",
        "t.conf:1: 'a[1-9999][1-9999][1-9999]' names more than 1,000,000 nodes",
    ),
    "blocks and switches": (
        "t.conf",
        "SwitchName=s1 Nodes=a\nBlockName=b1 Nodes=b\n",
        "mixes switches and blocks",
    ),
    "node in two blocks": (
        "t.conf",
        "BlockName=b1 Nodes=a[1-2]\nBlockName=b2 Nodes=a[2-3]\n",
        "t.conf:2: 'a2' is in two blocks",
    ),
    "yaml key": (
        "t.yaml",
        "- topology: t\n  tree:\n    switches:\n      - switch: s1\n        node: a\n",
        "t.yaml:5: [0].tree.switches[0].node: unknown key (did you mean 'nodes'?)",
    ),
    "yaml bomb": (
        "t.yaml",
        "- &a [x, x]\n- &b [*a, *a]\n- [*b, *b]\n",
        "t.yaml:1: broken YAML: anchors and aliases are not accepted",
    ),
    "yaml tag": (
        "t.yaml",
        "switches: !!python/object/apply:os.system [reboot]\n",
        "t.yaml:1: broken YAML: tags are not accepted",
    ),
    "no default topology": (
        "t.yaml",
        "- topology: a\n  flat: true\n- topology: b\n  flat: true\n",
        "holds 2 topologies and none is cluster_default (--topology one of: a, b)",
    ),
    "topograph switch unknown": (
        "t.yaml",
        "switches:\n  s0:\n    switches: [s1]\nblocks:\n- switch: s2\n  nodes: [a]\n",
        "t.yaml:5: blocks[0].switch: no switch is called 's2' (one of: s0, s1)",
    ),
    "topograph node twice": (
        "t.yaml",
        "switches:\n  s0:\n    switches: [s1, s2]\nblocks:\n- switch: s1\n  nodes: [a]\n"
        "- switch: s2\n  nodes: [a]\n",
        "t.yaml:7: blocks[1]: node 'a' is in 's1' and in 's2'",
    ),
    "topograph circle": (
        "t.yaml",
        "switches:\n  s0:\n    switches: [s1]\n  s1:\n    switches: [s0]\n"
        "blocks:\n- switch: s1\n  nodes: [a]\n",
        "is above itself",
    ),
    "labels of nobody": (
        "t.yaml",
        "items:\n- metadata:\n    name: a\n",
        "has no node with labels of topograph",
    ),
    "entity bomb": (
        "t.xml",
        '<!DOCTYPE s [<!ENTITY a "aa"><!ENTITY b "&a;&a;">]><system>&b;</system>',
        "t.xml:1: a document type or entity is not accepted",
    ),
    "external entity": (
        "t.xml",
        '<?xml version="1.0"?>\n<!DOCTYPE s SYSTEM "file:///etc/passwd"><system/>',
        "t.xml:2: a document type or entity is not accepted",
    ),
    "deep xml": ("t.xml", "<system>" * 500, "is nested too deeply"),
    "broken xml": ("t.xml", '<system>\n<cpu numaid="0">\n</system>', "t.xml:3: broken XML"),
    "other xml": ("t.xml", "<html></html>", "starts with <html>, not with NCCL's <system>"),
    "no gpu": ("t.xml", "<system><cpu/></system>", "names no GPU"),
    "links of nan": (
        "t.xml",
        '<system><cpu><pci busid="1"><gpu dev="0" sm="90">\n<nvlink target="2" count="nan" '
        'tclass="0x068000"/></gpu></pci></cpu></system>',
        "t.xml:2: <nvlink> has count=nan",
    ),
    "links without a count": (
        "t.xml",
        '<system><cpu><gpu dev="0"><nvlink target="2"/></gpu></cpu></system>',
        "<nvlink> has no number 'count'",
    ),
    "a switch of two lines": (
        "t.json",
        json.dumps(
            {
                "items": [
                    {
                        "metadata": {
                            "name": "a",
                            "labels": {"fabric.topograph.run/tier-0": "s\nx: 1"},
                        }
                    }
                ]
            }
        ),
        "'s\\nx: 1' is not a name",
    ),
    "a switch with a colour": (
        "t.conf",
        "SwitchName=\x1b[31ms1 Nodes=a\n",
        "t.conf:1: '\\x1b[31ms1' is not a name",
    ),
    "broken json": ("t.json", '{"items": [\n}', "t.json:2: broken JSON: expecting value (mend"),
    "deep json": ("t.json", "[" * 200_000, "broken JSON: nested too deeply"),
    "empty": ("t.conf", " \n", "is empty"),
    "prose": ("t.txt", "the cluster has 8 nodes", "is in no format that is known"),
    "binary": ("t.xml", None, "is not UTF-8 text"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_broken_or_hostile_file_is_one_clear_line(tmp_path, name):
    file, text, fault = REFUSED[name]
    path = tmp_path / file
    path.write_bytes(b"<system>\xff\xfe" if text is None else text.encode())
    with pytest.raises(InputError) as caught:
        assemble([read_foreign(path)], device="h200")
    message = str(caught.value)
    assert message.startswith(str(path))
    assert fault in message
    assert "\n" not in message


def test_a_tree_too_uneven_to_be_cut_is_refused(tmp_path):
    # Of 8, 4, 3, 2, 1 and 1 nodes the largest even part is three leaves of three: 9 of 19.
    path = tmp_path / "t.conf"
    leaves = "".join(
        f"SwitchName=s{i} Nodes=n{i}x[1-{n}]\n" for i, n in enumerate((8, 4, 3, 2, 1, 1))
    )
    path.write_text(f"SwitchName=root Switches=s[0-5]\n{leaves}")
    with pytest.raises(InputError, match="holds 9 of 19 nodes"):
        assemble([read_foreign(path)], device="h200")
    part = assemble([read_foreign(path)], device="h200", under="s0")
    assert [(t["name"], t["size"]) for t in part.tiers] == [("node", 8), ("cluster", 8)]


def test_which_levels_are_the_devices_own_fabric():
    # Two nodes of four are as many devices as NVLink joins on an HGX board, and yet two machines.
    small = take("slurm.yaml", device="h200", devices_per_node=4)
    assert [t["fabric"]["bw_gbps"] for t in small.tiers] == [450, 50, 50]
    said = take("slurm-tree.conf", device="ascend-910c", scale_up=["leaf"])
    assert [t["fabric"]["bw_gbps"] for t in said.tiers] == [392, 392, 50]
    with pytest.raises(InputError, match=r"has no level 'rack' \(one of: leaf, spine"):
        take("slurm-tree.conf", device="ascend-910c", scale_up=["rack"])


def test_a_file_too_large_to_be_a_topology_is_not_read(tmp_path):
    path = tmp_path / "t.yaml"
    with path.open("wb") as f:
        f.truncate(100 * 2**20)
    with pytest.raises(InputError, match="is larger than 32768 KiB"):
        read_foreign(path)
    with pytest.raises(InputError, match="is not a regular file"):
        read_foreign(Path("/dev/zero"))
    path.write_text("switches:\n" + "  s: {}\n" * 200_000)
    with pytest.raises(InputError, match=r"is YAML of more than 1024 KiB \(give it as JSON"):
        read_foreign(path)


def test_labels_as_json_are_those_as_yaml(tmp_path):
    text = (SAMPLES / "topograph-labels.yaml").read_text()
    path = tmp_path / "nodes.json"
    path.write_text(json.dumps(yaml.safe_load(text), indent=2))
    assert assemble([read_foreign(path)], device="h200") == take(
        "topograph-labels.yaml", device="h200"
    )


def test_gpus_of_another_kind_are_noticed():
    with pytest.raises(InputError, match="its GPUs are sm 90, those of a100 sm 80"):
        take("nccl-h200.xml", device="a100")


def test_two_files_that_say_the_same_are_refused():
    with pytest.raises(InputError, match=r"nvidia-smi-h200.txt: says the same as .*nccl-h200.xml"):
        take("nccl-h200.xml", "nvidia-smi-h200.txt", device="h200")
    with pytest.raises(InputError, match="a node has 4 and 8 devices, by what was given"):
        take("nccl-h200.xml", device="h200", devices_per_node=4)
    with pytest.raises(InputError, match="a node has 4 and 8 devices, by what was given"):
        take("topograph-labels.yaml", "nccl-pairs.xml", device="a100")


def test_one_switch_of_a_model_is_imported_by_its_own_name():
    made = take("topograph-nvl72.yaml", device="gb200", under="spine-2")
    assert [(t["name"], t["size"]) for t in made.tiers] == [
        ("node", 4), ("domain", 18), ("spine", 2),
    ]  # fmt: skip
    assert made.hostlist == ("node[2101-2118,2201-2218]",)
    with pytest.raises(
        InputError, match=r"has no switch 'spine' \(some: nvl-1-1, leaf-1-1, spine-1, core"
    ):
        take("topograph-nvl72.yaml", device="gb200", under="spine")


def test_what_no_file_and_no_backend_says_is_asked_for():
    with pytest.raises(InputError, match="--devices-per-node"):
        take("slurm-tree.conf", device="cpu")
    with pytest.raises(InputError, match="--node-gbps"):
        take("slurm-tree.conf", device="cpu", devices_per_node=2)
    with pytest.raises(InputError, match="--network-gbps"):
        take("slurm-tree.conf", device="cpu", devices_per_node=2, node_gbps=1)
    made = take("slurm-tree.conf", device="cpu", devices_per_node=2, node_gbps=1, network_gbps=0.1)
    assert shape(made)[-1] == ("spine", 2, "clos", 0.1)


TEXTS = st.text(
    alphabet=st.sampled_from("<>/=\"'[]{}:,-# \n\tSwitchName=s1Nodes GPU0NV18Xswitches"),
    max_size=120,
)


@settings(max_examples=80, deadline=None)
@given(text=TEXTS, format=st.sampled_from([None, "slurm", "topograph", "nccl_xml", "nvidia_smi"]))
def test_any_text_is_read_or_refused(tmp_path_factory, text, format):
    path = tmp_path_factory.mktemp("any") / "t"
    path.write_text(text, encoding="utf-8")
    refusal = ""
    try:
        assemble([read_foreign(path, format)], device="h200")
    except InputError as e:
        refusal = str(e)
    assert "\n" not in refusal
