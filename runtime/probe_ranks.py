"""What each rank of `adapt cluster probe` does: `torchrun ... -m runtime.probe_ranks OUT.json`."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from runtime.__main__ import leave
from runtime.build import process_group, say
from runtime.launch import die_with_parent

MIB = 2**20
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
OPERATIONS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
WARM_UP, REPEATS = 2, 5
MATMUL_SECONDS = {"cpu": 0.02}
"""Long enough to be timed; the product doubles until one takes as long."""
LARGEST_MATMUL = 16384
DEFAULT_MATMUL_SECONDS = 2e-3


def steps(ranks: int, sizes_mib: list[float]) -> int:
    """How many lines of progress a probe prints."""
    return 4 + len(DTYPES) + len(groups(ranks)) * len(OPERATIONS) * len(sizes_mib)


def groups(ranks: int) -> list[int]:
    """Numbers of ranks that collectives are measured on: powers of two, and all."""
    return sorted({2**i for i in range(1, ranks.bit_length()) if 2**i <= ranks} | {ranks} - {1})


class Bench:
    """Times work on this rank's device; what all ranks do at once, at the pace of the slowest."""

    def __init__(self, device: torch.device, seconds: float, total: int) -> None:
        self.device, self.seconds = device, seconds
        self._done, self._total = 0, total

    def step(self, text: str) -> None:
        """Tells that one of `total` steps begins."""
        self._done += 1
        say(f"{self._done}/{self._total} {text}")

    def synchronize(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def time(self, work: Callable[[], Any], group: dist.ProcessGroup | None = None) -> float:
        """Seconds of one call: the median of repeated runs, each of the slowest rank of `group`.

        Runs are as many as fit into the time for one measurement, three to `REPEATS`; a call that
        is short is repeated inside a run, since a clock cannot see it.
        """
        for _ in range(WARM_UP):
            work()
        first = self._slowest(self._run(work, 1), group)
        inner = max(1, min(1000, round(self.seconds / REPEATS / max(first, 1e-6) / 2)))
        repeats = REPEATS if first * inner * REPEATS < 4 * self.seconds else 3
        times = []
        for _ in range(repeats):
            dist.barrier(group)
            times.append(self._slowest(self._run(work, inner), group) / inner)
        return statistics.median(times)

    def _run(self, work: Callable[[], Any], times: int) -> float:
        self.synchronize()
        start = time.perf_counter()
        for _ in range(times):
            work()
        self.synchronize()
        return time.perf_counter() - start

    def _slowest(self, seconds: float, group: dist.ProcessGroup | None) -> float:
        slowest = torch.tensor(seconds, dtype=torch.float32, device=self.device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=group)
        return slowest.item()


def measure_device(bench: Bench, copy_mib: float) -> dict[str, Any]:
    """Copy rate, matrix products, launches and host copies, of every rank at once."""
    device = bench.device
    found: dict[str, Any] = {"memory_bytes": _memory(device)}
    source = torch.ones(int(copy_mib * MIB), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    bench.step("copies in device memory")
    # Read plus written, as backends count it.
    found["memory_gbps"] = 2 * source.numel() / bench.time(lambda: target.copy_(source)) / 1e9
    bench.step("launches")
    small = torch.zeros(1, device=device)
    found["launch_overhead_us"] = bench.time(lambda: small.add_(1)) * 1e6
    found["matmul_tflops"] = {}
    for name, dtype in DTYPES.items():
        bench.step(f"matrix products in {name}")
        found["matmul_tflops"][name] = _matmul(bench, dtype)
    bench.step("copies to and from the host")
    found["host_gbps"] = None
    if device.type != "cpu":
        pinned = torch.empty(source.numel(), dtype=torch.uint8, pin_memory=True)
        out = bench.time(lambda: pinned.copy_(source, non_blocking=True))
        back = bench.time(lambda: source.copy_(pinned, non_blocking=True))
        found["host_gbps"] = source.numel() / max(out, back) / 1e9
    return found


def _matmul(bench: Bench, dtype: torch.dtype) -> float:
    """TFLOPS of the square product that takes long enough to be timed."""
    enough = MATMUL_SECONDS.get(bench.device.type, DEFAULT_MATMUL_SECONDS)
    n, seconds = 256, 0.0
    while True:
        a, b = (torch.randn(n, n, device=bench.device).to(dtype) for _ in range(2))
        seconds = bench.time(lambda a=a, b=b: a @ b)
        if seconds >= enough or n >= LARGEST_MATMUL:
            return 2 * n**3 / seconds / 1e12
        n *= 2


def _memory(device: torch.device) -> int:
    """Bytes of one device; on a processor this rank's share of the machine."""
    if device.type == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // dist.get_world_size()
    return torch.get_device_module(device).mem_get_info(device)[1]


def measure_collectives(bench: Bench, sizes_mib: list[float]) -> list[dict[str, Any]]:
    """Seconds by message size, for groups of the first ranks."""
    found = []
    for size in groups(dist.get_world_size()):
        group = dist.new_group(list(range(size)))
        points: dict[str, list[float]] = {op: [] for op in OPERATIONS}
        for op, mib in ((op, mib) for op in OPERATIONS for mib in sizes_mib):
            bench.step(f"{op} of {mib:g} MiB on {size} devices")
            if dist.get_rank() < size:
                assert isinstance(group, dist.ProcessGroup)  # of a member
                call = _collective(op, int(mib * MIB), size, group, bench.device)
                points[op].append(bench.time(call, group))
            dist.barrier()
        found += [{"op": op, "devices": size, "seconds": s} for op, s in points.items()]
    return found


def _collective(
    op: str, size: int, ranks: int, group: dist.ProcessGroup, device: torch.device
) -> Callable[[], Any]:
    """A call that moves a whole message of `size` bytes, as NCCL's tests count it."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    count = max(1, size // dtype.itemsize // ranks) * ranks
    whole = torch.ones(count, dtype=dtype, device=device)
    part = torch.ones(count // ranks, dtype=dtype, device=device)
    other = torch.empty_like(whole)
    calls: dict[str, Callable[[], Any]] = {
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part, group=group),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole, group=group),
        "all_reduce": lambda: dist.all_reduce(whole, op=dist.ReduceOp.MAX, group=group),
        "all_to_all": lambda: dist.all_to_all_single(other, whole, group=group),
    }
    return calls[op]


def names(device: torch.device) -> Iterator[str]:
    """What this machine calls its devices."""
    if device.type == "cpu":
        yield "cpu"
        return
    module = torch.get_device_module(device)
    yield from (module.get_device_name(i) for i in range(torch.accelerator.device_count()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--sizes", type=float, nargs="+", required=True, help="MiB")
    parser.add_argument("--copy-mib", type=float, required=True)
    parser.add_argument("--seconds", type=float, required=True, help="for one measurement")
    arguments = parser.parse_args()
    die_with_parent()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    with process_group() as device, torch.inference_mode():
        ranks = dist.get_world_size()
        bench = Bench(device, arguments.seconds, steps(ranks, arguments.sizes))
        found = measure_device(bench, arguments.copy_mib)
        found["collectives"] = measure_collectives(bench, arguments.sizes)
        bench.step("done")
        found |= {
            "ranks": ranks,
            "device_type": device.type,
            "names": list(names(device)),
            "sizes_mib": arguments.sizes,
            "backend": dist.get_backend(),
        }
        if dist.get_rank() == 0:
            arguments.out.write_text(json.dumps(found), encoding="utf-8")
    return 0


if __name__ == "__main__":
    leave(main())
