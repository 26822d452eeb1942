"""The probe on two real gloo ranks of this machine; timings are not judged, only what they mean."""

import itertools

import pytest
import torch

from analyzers.backends import load_backend
from analyzers.errors import InputError
from runtime.probe import describe, measure
from runtime.probe_ranks import OPERATIONS, groups, steps
from strategies.cluster import load_cluster
from strategies.cluster.writing import to_yaml

SIZES = [0.0625, 0.25]


@pytest.fixture(scope="module")
def found():
    lines = []
    made = measure(ranks=2, sizes_mib=SIZES, copy_mib=1, seconds=0.005, progress=lines.append)
    return made, lines


@pytest.mark.distributed
def test_two_ranks_are_measured_and_read_back(found, tmp_path):
    made, lines = found
    # Every step is told, in order, out of as many as there are.
    done = [line.split(" ")[0] for line in lines]
    assert done == [f"{i}/{steps(2, SIZES)}" for i in range(1, steps(2, SIZES) + 1)]
    path = tmp_path / "topo.yaml"
    path.write_text(to_yaml(describe(made, name="here", host="my host!")))
    cluster = load_cluster(path)
    assert cluster.world_size == 2
    assert cluster.node_names == ("my-host",)
    assert {c.op for c in cluster.measured} == set(OPERATIONS)
    for curve in cluster.measured:
        assert curve.devices == (2,)
        assert curve.bytes == tuple(s * 2**20 for s in SIZES)
        assert all(0 < s < 60 for s in curve.seconds)
    device = cluster.device
    for fact in (device.memory_gbps, device.launch_overhead_us, *device.matmul_tflops.values()):
        assert fact.value > 0
        assert fact.origin == "measured"
        assert "probe" in fact.source
    assert cluster.tiers[0].fabric.origin == "measured"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")
def test_every_device_here_is_measured(tmp_path):
    made = measure(sizes_mib=[0.0625, 16.0])
    path = tmp_path / "topo.yaml"
    path.write_text(to_yaml(describe(made, name="here")))
    cluster = load_cluster(path)
    count = torch.accelerator.device_count()
    assert cluster.world_size == count
    assert {c.devices[0] for c in cluster.measured} == set(groups(count))
    assert cluster.host is not None
    assert cluster.device.device_type == torch.accelerator.current_accelerator().type
    # No device copies or multiplies faster than its data sheet says by half, or at a hundredth.
    spec = load_backend(cluster.device.name)
    for measured, known in (
        (cluster.device.memory_gbps, spec.memory_gbps),
        (cluster.device.matmul_tflops["bfloat16"], spec.matmul_tflops["bfloat16"]),
    ):
        assert 0.01 < measured.value / known.value < 1.5


def sample(ranks=4, latency=20e-6, rate=100e9):
    """What the probe would find on a machine of known latency and rate."""
    sizes = [0.0625, 1.0, 64.0]
    curves = []
    for devices in groups(ranks):
        steps = devices - 1
        seconds = [steps * latency + s * 2**20 * steps / devices / rate for s in sizes]
        curves += [{"op": op, "devices": devices, "seconds": seconds} for op in OPERATIONS]
    return {
        "ranks": ranks,
        "device_type": "cuda",
        "names": ["NVIDIA H200"] * ranks,
        "backend": "nccl",
        "sizes_mib": sizes,
        "memory_bytes": 140 * 2**30,
        "memory_gbps": 4200.0,
        "launch_overhead_us": 4.0,
        "matmul_tflops": {"bfloat16": 700.0, "float32": 50.0},
        "host_gbps": 55.0,
        "collectives": curves,
    }


def test_a_known_machine_is_described_as_it_is(tmp_path):
    path = tmp_path / "topo.yaml"
    path.write_text(to_yaml(describe(sample(), name="known")))
    cluster = load_cluster(path)
    fabric = cluster.tiers[0].fabric
    # The largest message still holds three latencies: 60 us of 563.
    assert fabric.bw_gbps == pytest.approx(100, rel=0.12)
    assert fabric.latency_us == pytest.approx(20, rel=0.02)
    assert cluster.device.name == "h200"
    assert cluster.device.matmul_tflops["bfloat16"].value == 700
    assert cluster.device.training_dtype == "bfloat16"
    assert cluster.host.d2h_gbps == 55
    assert (cluster.host.origin, cluster.host.source) == (fabric.origin, fabric.source)
    assert {c.devices for c in cluster.measured} == {(2,), (4,)}
    for curve, made in zip(cluster.measured, sample()["collectives"], strict=True):
        assert curve.seconds == pytest.approx(made["seconds"], rel=1e-5)


def test_one_device_has_no_link_to_measure(tmp_path):
    one = sample(ranks=1) | {"collectives": []}
    path = tmp_path / "topo.yaml"
    path.write_text(to_yaml(describe(one, name="one")))
    cluster = load_cluster(path)
    assert cluster.world_size == 1
    assert cluster.measured == ()
    assert cluster.tiers[0].fabric.origin == "default"


@pytest.mark.parametrize(
    ("name", "backend"),
    [("NVIDIA GB200", "gb200"), ("NVIDIA B200", "b200"), ("NVIDIA H100 80GB HBM3", "h100")],
)
def test_a_backend_is_recognised_by_the_device_name(name, backend):
    assert describe(sample() | {"names": [name]}, name="x")["device"] == backend


def test_an_unknown_device_has_to_be_named():
    unknown = sample() | {"names": ["NVIDIA T4"]}
    with pytest.raises(InputError, match=r"no backend is known for 'NVIDIA T4' \(.*--device: a100"):
        describe(unknown, name="x")
    assert describe(unknown, name="x", device="a100")["device"] == "a100"


def test_groups_are_powers_of_two_and_all():
    assert groups(1) == []
    assert groups(2) == [2]
    assert groups(6) == [2, 4, 6]
    assert groups(8) == [2, 4, 8]
    assert all(a < b for a, b in itertools.pairwise(groups(24)))


def test_more_ranks_than_devices_are_refused(monkeypatch):
    monkeypatch.setattr("runtime.probe.local_devices", lambda: ("cuda", 2))
    with pytest.raises(InputError, match="ranks: 4, but here are 2 cuda devices"):
        measure(ranks=4)
