"""Device files: readable, sourced, and with the limits that kernels must keep."""

import pytest

from analyzers.backends import backend_names, load_backend, load_links
from analyzers.errors import InputError


def test_backends():
    known = {"cpu", "h100", "h200", "b200", "gb200", "mi300x", "ascend-910c"}
    assert set(backend_names()) >= known


@pytest.mark.parametrize("name", backend_names())
def test_every_figure_has_a_source(name):
    backend = load_backend(name)
    assert backend.name == name
    facts = [backend.memory_gib, backend.reserved_gib, backend.memory_gbps]
    facts += [backend.launch_overhead_us, *backend.matmul_tflops.values()]
    assert all(fact.value > 0 and len(fact.source) > 10 for fact in facts)
    assert backend.training_dtype in backend.matmul_tflops
    assert backend.reserved_gib.value < backend.memory_gib.value


@pytest.mark.parametrize("name", backend_names())
def test_links_have_sources_and_a_network_slower_than_the_devices_own(name):
    links = load_links(name)
    if links is None:
        assert load_backend(name).device_type == "cpu"
        return
    for link in (links.scale_up, links.scale_out):
        facts = [link.gbps, link.latency_us, link.efficiency]
        facts += [link.link_gbps] if link.link_gbps else []
        assert all(fact.value > 0 and len(fact.source) > 5 for fact in facts)
        assert link.efficiency.value <= 1
    assert links.scale_out.gbps.value < links.scale_up.gbps.value
    assert links.domain % links.devices_per_node == 0


@pytest.mark.parametrize(
    ("name", "count", "one"),
    # Links of a device and GB/s of each one way, by data sheet: NVLink 3, 4, 5; Infinity Fabric.
    [("a100", 12, 25), ("h100", 18, 25), ("h200", 18, 25), ("b200", 18, 50), ("mi300x", 7, 64)],
)
def test_links_add_up_to_what_data_sheets_say(name, count, one):
    link = load_links(name).scale_up
    assert link.link_gbps.value == one
    assert link.gbps.value == count * one


def test_unknown_backend_lists_the_known():
    with pytest.raises(InputError, match="h200"):
        load_backend("h2000")


def test_ascend_takes_no_warps_and_small_grids():
    triton = load_backend("ascend-910c").triton
    assert triton.num_warps == []
    assert triton.max_grid_product == 65535
    assert triton.shared_memory_bytes == 196608


def test_hopper_names_the_compiler_faults_of_its_triton():
    # triton-lang/triton#11366: several dots on blocks of 32 with eight warps access illegal memory.
    wanted = {"kernel": "prepare", "block_k": 32, "num_warps": 8}
    for name in ("h100", "h200"):
        faults = load_backend(name).triton.known_faults
        assert any(f.condition == wanted for f in faults)


def test_blackwell_bounds_tensor_memory():
    # A kernel over 512 columns compiles without an error and only traps.
    assert load_backend("gb200").triton.tensor_memory_columns == 512
