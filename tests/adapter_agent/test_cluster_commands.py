import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from typer.testing import CliRunner

from adapter_agent.cli import app
from analyzers.errors import InputError
from strategies.cluster import load_cluster

ROOT = Path(__file__).parents[2]
SAMPLES = ROOT / "tests" / "data" / "topologies"
SUPERNODE = ROOT / "examples" / "clusters" / "supernode-128.yaml"


def adapt(*words):
    """Standard output; errors that a user can cause come through."""
    result = CliRunner().invoke(app, ["cluster", *map(str, words)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


def test_show_prints_the_tree_and_every_number_with_its_origin():
    text = adapt("show", SUPERNODE)
    assert "16 x node, 8 devices" in text
    # 392 GB/s at 42 percent.
    assert any("rate of a collective" in line and "164.6" in line for line in text.splitlines())
    assert any("pooled memory" in line and "16384" in line for line in text.splitlines())
    assert any("host memory of a device" in line and "384" in line for line in text.splitlines())
    assert "146 GB/s" in text
    probed = adapt("show", SAMPLES / "probe-h200-x2.yaml").splitlines()
    for words in (("host memory", "125.9", "251.769 GiB a node"), ("copy to the host", "52.9")):
        assert any(all(w in line for w in (*words, "measured")) for line in probed)
    assert json.loads(adapt("show", SUPERNODE, "--json"))["tiers"][1]["devices"] == 128


@pytest.mark.parametrize("name", ["supernode-128", "cloudmatrix384", "gb200-nvl72-x2"])
def test_show_draws_every_tier(tmp_path, name):
    path = ROOT / "examples" / "clusters" / f"{name}.yaml"
    adapt("show", path, "--figure", tmp_path / "c.svg")
    drawn = ET.parse(tmp_path / "c.svg").getroot()
    space = "{http://www.w3.org/2000/svg}"
    titles = [t.text for t in drawn.iter(f"{space}title")]
    cluster = load_cluster(path)
    for node in cluster.node_names:
        assert any(t.startswith(node) for t in titles) or any("x node" in t for t in titles)
    texts = [t.text for t in drawn.iter(f"{space}text")]
    for tier in cluster.tiers:
        assert any(t.startswith(f"{tier.name}: ") for t in texts)
    adapt("show", path, "--figure", tmp_path / "c.html")
    page = (tmp_path / "c.html").read_text()
    assert "<svg" in page
    assert "http" not in page.replace("http://www.w3.org", "")  # nothing is loaded from elsewhere


def test_a_drawing_of_another_kind_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"ends in .html or .svg"):
        adapt("show", SUPERNODE, "--figure", tmp_path / "c.gif")


def test_import_prints_or_writes_a_file_that_loads(tmp_path):
    files = (SAMPLES / "slurm-tree.conf", SAMPLES / "nccl-h200.xml")
    printed = adapt("import", *files, "--device", "h200")
    out = tmp_path / "topo.yaml"
    shown = adapt("import", *files, "--device", "h200", "--name", "hall-2", "-o", out)
    assert "8 nodes of 8" in shown
    cluster = load_cluster(out)
    assert (cluster.name, cluster.world_size) == ("hall-2", 64)
    assert out.read_text().replace("hall-2", "slurm-tree") == printed
    with pytest.raises(InputError, match="is there already"):
        adapt("import", *files, "--device", "h200", "-o", out)
    adapt("import", *files, "--device", "h200", "-o", out, "--force")


def test_import_of_one_node_and_a_hostlist(tmp_path):
    out = tmp_path / "topo.yaml"
    words = ("--device", "h200", "--nodes", "gpu[01-16]", "-o", out)
    adapt("import", SAMPLES / "nvidia-smi-h200.txt", *words)
    cluster = load_cluster(out)
    assert [t.size for t in cluster.tiers] == [8, 16]
    assert cluster.node_names[-1] == "gpu16"


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (("--device", "h20"), "--device: 'h20' is not a known backend (did you mean 'h200'?"),
        (("--device", "h200", "--nodes", "a[2-1]"), "--nodes: 'a[2-1]' has a range that runs"),
        (("--device", "h200", "--nodes", "a[1-2]"), "names the nodes already"),
        (("--device", "h200", "--name", "a b/c"), "--name: 'a b/c' is not a name"),
        (("--device", "h200", "--under", "leaf9"), "has no switch 'leaf9' (some: leaf1"),
        (("--device", "h200", "--format", "nvidia_smi"), "has no line of GPU0 GPU1"),
    ],
)
def test_import_says_what_is_wrong(words, fault):
    with pytest.raises(InputError) as caught:
        adapt("import", SAMPLES / "slurm-tree.conf", *words)
    assert fault in str(caught.value)


@pytest.mark.distributed
def test_probe_writes_what_it_measured(tmp_path):
    out = tmp_path / "topo.yaml"
    shown = adapt("probe", "--ranks", 2, "--sizes", "0.0625", "--name", "here", "-o", out)
    assert "here: 2 x" in shown
    cluster = load_cluster(out)
    assert len(cluster.measured) == 4
    assert cluster.device.memory_gbps.origin == "measured"


@pytest.mark.parametrize("sizes", ["", "1,x", "2,1", "0,1", "1e9", "nan"])
def test_probe_refuses_sizes_that_are_none(sizes):
    with pytest.raises(InputError, match="is no list of sizes"):
        adapt("probe", "--sizes", sizes)
