"""Times the kernels of one candidate, in this process of its own.

    python -m codegen.tuning.timing REQUEST.json RESULT.pt

Compiles and runs the candidate on every workload, says `ready` on stdout, waits for a line on stdin
(nothing else may use the device while it measures), measures, and hands back numbers, never a
verdict.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from codegen.load import import_file
from codegen.verify.cases import Shape, all_cases, forward_alone, make_inputs, run

SAMPLES = 4096
CACHE_BYTES = 256 * 2**20
"""What is written between two runs where the device does not say how large its cache is."""

Clock = Callable[[Callable[[], Any], int], list[float]]
"""(call, repeats) -> milliseconds of each run."""


class Recorded:
    """Stands in for a kernel: runs its launches and, while `remembers`, keeps them."""

    def __init__(self, kernel):
        self.kernel = kernel
        self.remembers = False  # what is kept holds its tensors alive
        self.launches: list[tuple] = []

    def __getitem__(self, grid):
        def launch(*args, **options):
            if self.remembers:
                self.launches.append((grid, args, options))
            return self.kernel[grid](*args, **options)

        return launch

    def warmup(self, *args, **options):
        return self.kernel.warmup(*args, **options)

    def replay(self) -> None:
        for grid, args, options in self.launches:
            self.kernel[grid](*args, **options)

    def bytes(self) -> int:
        """Of all tensors that the launches are given, each counted once a launch."""
        total = 0
        for _, args, options in self.launches:
            tensors = {
                x.data_ptr(): x.numel() * x.element_size()
                for x in (*args, *options.values())
                if isinstance(x, torch.Tensor)
            }
            total += sum(tensors.values())
        return total


def device_clock(device: str) -> Clock:
    """Events on the device's stream; its last cache is overwritten before each run."""
    module = torch.get_device_module(device)
    flush = torch.empty(4 * cache_bytes(device), dtype=torch.int8, device=device)

    def measure(call, repeats):
        marks = [[module.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
        for begin, end in marks:
            flush.zero_()  # also hides how long the launch takes on the host
            begin.record()
            call()
            end.record()
        module.synchronize()
        return [begin.elapsed_time(end) for begin, end in marks]

    return measure


def host_clock(call, repeats):
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - begin))
    return times


def cache_bytes(device: str) -> int:
    if device == "cpu":
        return 0
    properties = torch.get_device_module(device).get_device_properties()
    return getattr(properties, "L2_cache_size", 0) or CACHE_BYTES


def median(call: Callable[[], Any], clock: Clock, budget: float) -> float:
    """Median milliseconds of a run; about `budget` milliseconds are spent on it."""
    estimate = statistics.median(clock(call, 3))
    return statistics.median(clock(call, max(5, min(100, int(budget / max(estimate, 1e-3))))))


def sample(x: torch.Tensor) -> torch.Tensor:
    """A few thousand values from all over a tensor; the odd stride visits every channel."""
    flat = x.detach().flatten()
    return flat[:: max(1, flat.numel() // SAMPLES) | 1].double().cpu()


class Candidate:
    """One module on one device, ready to be measured."""

    def __init__(self, request: dict):
        self.module = import_file(Path(request["module"]), "candidate_kernel")
        self.shape = Shape(**request["shape"])
        self.dtype = getattr(torch, request["dtype"])
        self.device = request["device"]
        self.seed = request["seed"]
        self.budget = request["milliseconds"]
        self.kernels = {
            name: Recorded(vars(self.module)[name])
            for name in request["kernels"]
            if name in vars(self.module)
        }
        vars(self.module).update(self.kernels)

    def step(self, workload: dict) -> Callable[[], dict[str, torch.Tensor]]:
        """A training step, forward and backward, and a forward alone, which may run by other
        kernels; on the first case's kind of data."""
        first = all_cases(self.shape)[0]
        known = {f.name for f in dataclasses.fields(first)}
        size = {n: workload[n] for n in ("batch", "heads", "value_heads") if n in known}
        case = dataclasses.replace(first, name="timing", lengths=(workload["tokens"],), **size)
        torch.manual_seed(self.seed)
        order = torch.randperm(workload["tokens"])
        inputs = {}
        for name, x in make_inputs(case, self.shape, self.dtype).items():
            if x is not None:
                x = x[:, order] if case.kind(name) == "token" else x
                x = x.to(self.device)
            inputs[name] = x
        function = getattr(self.module, self.shape.function)
        alone = forward_alone(case)

        def both() -> dict[str, torch.Tensor]:
            outputs = run(function, case, inputs)
            without = run(function, alone, inputs)
            return outputs | {f"{name}, forward alone": x for name, x in without.items()}

        return both

    def measure(self, step: Callable[[], dict[str, torch.Tensor]], clock: Clock) -> dict:
        """Milliseconds by kernel and of the whole step, bytes, and what came out."""
        once, twice = step(), step()
        result = {
            "outputs": {name: sample(x) for name, x in once.items()},
            "unequal": [name for name in once if not torch.equal(once[name], twice[name])],
            "step": median(step, clock, self.budget),
        }
        del once, twice
        for kernel in self.kernels.values():
            kernel.remembers = True
        step()
        launched = {name: kernel for name, kernel in self.kernels.items() if kernel.launches}
        result["bytes"] = {name: kernel.bytes() for name, kernel in launched.items()}
        result["kernels"] = {
            name: median(kernel.replay, clock, self.budget) for name, kernel in launched.items()
        }
        for kernel in self.kernels.values():
            kernel.remembers = False
            kernel.launches.clear()
        return result


def main(request_path: str, result_path: str) -> None:
    request = json.loads(Path(request_path).read_text(encoding="utf-8"))
    parent = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    torch.set_num_threads(1)
    candidate = Candidate(request)
    steps = [candidate.step(workload) for workload in request["workloads"]]
    for step in steps:
        step()
    device = request["device"]
    if device != "cpu":
        torch.get_device_module(device).empty_cache()  # others get ready beside this one
    clock = host_clock if device == "cpu" else device_clock(device)
    print("ready", file=parent, flush=True)
    if not sys.stdin.readline():
        return
    measured = [candidate.measure(step, clock) for step in steps]
    torch.save({"workloads": measured, "cache_bytes": cache_bytes(device)}, result_path)
    print("done", file=parent, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
