"""What a trace says of overlap, on traces written by hand and on one of the profiler."""

import pytest
import torch

from runtime.profiling import StepProfile, overlap, read_trace


def event(name, start, duration, cat="kernel"):
    return {"ph": "X", "name": name, "cat": cat, "ts": start, "dur": duration}


GATHER = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
SCATTER = "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
EXCHANGE = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"


def test_the_share_that_is_hidden():
    found = overlap(
        [
            event("gemm", 0, 100),
            event(GATHER, 50, 100),  # half of it beside the product
            event("gemm", 200, 40),
            event("elementwise", 220, 40),  # overlaps the product: counted once
            event(SCATTER, 200, 60),  # all of it hidden
            event(EXCHANGE, 300, 50),  # exposed
            event("gemm", 350, 10),
            event("aten::mm", 0, 1000, cat="cpu_op"),  # of the host: not counted
            {"ph": "i", "name": GATHER, "ts": 0},
        ]
    )
    seconds = {k: round(1e6 * c.seconds) for k, c in found.collectives.items()}
    assert seconds == {"all_gather": 100, "reduce_scatter": 60, "all_to_all": 50}
    hidden = {k: c.hidden for k, c in found.collectives.items()}
    assert hidden == {"all_gather": 0.5, "reduce_scatter": 1.0, "all_to_all": 0.0}
    assert found.total.seconds == pytest.approx(210e-6)
    assert found.total.hidden == pytest.approx(110 / 210)
    assert found.computing == pytest.approx(170e-6)
    assert "profile: all_gather 0.1 ms, 50% hidden" in found.lines()


def test_collectives_that_overlap_one_another_hide_nothing():
    found = overlap([event(GATHER, 0, 100), event(GATHER, 50, 100), event(SCATTER, 0, 150)])
    assert found.collectives["all_gather"].seconds == pytest.approx(150e-6)
    assert found.total.seconds == pytest.approx(150e-6)
    assert found.total.hidden == 0


def test_a_collective_over_several_kernels_with_gaps():
    kernels = [event("gemm", 10 * i, 5) for i in range(10)]
    assert overlap([*kernels, event(GATHER, 0, 100)]).total.hidden == pytest.approx(0.5)


def test_a_run_without_collectives_says_so():
    assert overlap([event("gemm", 0, 5)]).lines() == ["profile: no collective was seen"]


def test_the_profiler_writes_a_trace_of_the_steps_asked_for(tmp_path):
    profile = StepProfile(tmp_path / "profile", range(2, 4), torch.device("cpu"))
    said = []
    for step in range(6):
        profile.begin(step)
        torch.ones(8 + step, 8 + step) @ torch.ones(8 + step, 8 + step)
        said.append(profile.end(step))
    assert [bool(s) for s in said] == [False, False, False, True, False, False]
    products = [
        e for e in read_trace(tmp_path / "profile" / "trace.json.gz") if e["name"] == "aten::mm"
    ]
    assert len(products) == 2
    assert (tmp_path / "profile" / "overlap.json").is_file()
