"""The search: proves every candidate, times each kernel, keeps the fastest launch of each.

Kernels speak to one another through memory alone, so the launch of one does not change the time of
another: each kernel's launches are compared by that kernel's own time, and what is put together
from the winners is proved and timed once more as a whole.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from analyzers.errors import ProofError
from codegen.family import FLOORS, Launch, Tile
from codegen.tuning.bench import Workload
from codegen.tuning.records import Class, Record, Refused, content_of
from codegen.tuning.space import Space, describe, one_at_a_time

WORTH = 0.99
"""A launch replaces the tile's own when it takes at most this share of its time."""
BEYOND_MEMORY = 0.8
"""A kernel that takes less than this share of what its bytes take at the backend's measured copy
rate did not do its work. (No copy reaches the data sheet's rate: an H200's copies reach 0.89.)"""


class Proving(Protocol):
    """What the search asks of a bench."""

    space: Space
    workloads: list[Workload]
    jobs: int

    def prove(self, tiles: list[Tile]) -> list[str]: ...

    def time(self, tiles: list[Tile]) -> list[dict[str, Any] | str]: ...


@dataclass
class Search:
    bench: Proving
    deadline: float = math.inf
    """Of `time.monotonic()`: no candidate is begun after it."""
    limit: int = 16
    """Most candidates for a chunk length and strategy, those nearest to the family's tile."""
    progress: Callable[[str], None] | None = None
    measured: dict[str, dict[str, Any]] = field(default_factory=dict)
    """What was timed, by `describe(tile)`."""
    tiles: list[Tile] = field(default_factory=list)
    """What was timed, in order."""
    refused: dict[str, str] = field(default_factory=dict)

    def run(self) -> tuple[Tile, list[Tile]]:
        """The tile that all else is compared with, and the fastest one for each workload.

        Raises ProofError when no chunk length and strategy passes with any launch.
        """
        bases = self.bench.space.bases()
        found: list[list[Tile]] = []
        for base in bases:
            if not found or time.monotonic() < self.deadline:
                found += self._tune(base)
        if not found:
            first = next(iter(self.refused.items()), ("", "no time was left"))
            raise ProofError(f"no tile passes its proofs; {first[0]}: {first[1]}")

        def total(tiles: list[Tile]) -> float:
            return sum(math.log(self.step(tile, n)) for n, tile in enumerate(tiles))

        return self.tiles[0], min(found, key=total)

    def _tune(self, base: Tile) -> list[list[Tile]]:
        """The fastest tile for each workload with the chunk and strategy of `base`."""
        candidates = list(itertools.islice(self.bench.space.candidates(base), self.limit))
        self.attempt([base])
        mixed = self._attempt_all(candidates)
        passed = [t for t in (base, *candidates) if describe(t) in self.measured]
        if not passed:
            return []
        base = passed[0]
        # A candidate that was refused may hold good launches beside the bad one.
        singles = [x for tile in mixed for x in one_at_a_time(base, tile)]
        self._attempt_all(singles)
        best = [self._assemble(base, n) for n in range(len(self.bench.workloads))]
        self.attempt(best)
        self._retime([base, *best])
        return [[tile if self.is_faster(tile, base, n) else base for n, tile in enumerate(best)]]

    def _attempt_all(self, tiles: list[Tile]) -> list[Tile]:
        """Those that were refused. Stops at the deadline."""
        for first in range(0, len(tiles), self.bench.jobs):
            if time.monotonic() >= self.deadline:
                self._say("out of time: what was tried so far decides")
                break
            self.attempt(tiles[first : first + self.bench.jobs])
        return [tile for tile in tiles if describe(tile) in self.refused]

    def attempt(self, tiles: list[Tile]) -> None:
        """Proves and then times what was not tried before."""
        new = list({describe(t): t for t in tiles if not self._known(t)}.values())
        for tile, fault in zip(new, self.bench.prove(new), strict=True):
            if fault:
                self.refused[describe(tile)] = fault
        proved = [tile for tile in new if describe(tile) not in self.refused]
        for tile, result in zip(proved, self.bench.time(proved), strict=True):
            fault = result if isinstance(result, str) else self.verdict(result)
            if fault or isinstance(result, str):
                self.refused[describe(tile)] = fault
            else:
                self.measured[describe(tile)] = result
                self.tiles.append(tile)
        if new:
            self._say()

    def _retime(self, tiles: list[Tile]) -> None:
        """What is compared in the end is measured side by side: a device's clock drifts."""
        sound = list({describe(t): t for t in tiles if describe(t) in self.measured}.values())
        for tile, result in zip(sound, self.bench.time(sound), strict=True):
            if not isinstance(result, str):
                self.measured[describe(tile)] = result

    def _known(self, tile: Tile) -> bool:
        return describe(tile) in self.measured or describe(tile) in self.refused

    def verdict(self, result: dict[str, Any]) -> str:
        """Why what was timed cannot be right; empty when it can."""
        reference = self.measured[describe(self.tiles[0])] if self.tiles else None
        for n, workload in enumerate(self.bench.workloads):
            mine = result["workloads"][n]
            if mine["unequal"]:
                return f"{workload}: two runs differ in {', '.join(mine['unequal'])}"
            for name, x in mine["outputs"].items():
                if not bool(x.isfinite().all()):
                    return f"{workload}: {name} is not finite"
                if reference is None:
                    continue
                wanted = reference["workloads"][n]["outputs"][name]
                error = ((x - wanted).norm() / wanted.norm().clamp(min=1e-30)).item()
                if error > 4 * FLOORS[self.bench.space.dtype]:
                    return f"{workload}: {name} is {error:.2g} off the family's own tile"
            for kernel, milliseconds in mine["kernels"].items():
                moved = max(0, mine["bytes"][kernel] - result["cache_bytes"])
                floor = moved / (self.bench.space.backend.memory_gbps.value * 1e6)
                if milliseconds < BEYOND_MEMORY * floor:
                    return (
                        f"{workload}: {kernel} takes {milliseconds:.3g} ms, its "
                        f"{mine['bytes'][kernel] / 1e6:.0f} MB take {floor:.3g}"
                    )
        return ""

    def step(self, tile: Tile, n: int) -> float:
        """Milliseconds of the training step and the forward alone of workload n."""
        return self.measured[describe(tile)]["workloads"][n]["step"]

    def milliseconds(self, tile: Tile, n: int) -> dict[str, float]:
        mine = self.measured[describe(tile)]["workloads"][n]
        return {
            name: round(ms, 5) for name, ms in (mine["kernels"] | {"step": mine["step"]}).items()
        }

    def is_faster(self, tile: Tile, base: Tile, n: int) -> bool:
        known = describe(tile) in self.measured
        return known and self.step(tile, n) < WORTH * self.step(base, n)

    def _assemble(self, base: Tile, n: int) -> Tile:
        """The fastest launch of every kernel on workload n."""
        same = [t for t in self.tiles if (t.chunk, t.strategy) == (base.chunk, base.strategy)]

        def took(tile: Tile, kernel: str) -> float:
            return self.measured[describe(tile)]["workloads"][n]["kernels"].get(kernel, math.inf)

        def best(kernel: str) -> Launch:
            tile = min(same, key=lambda t: took(t, kernel))
            faster = took(tile, kernel) < WORTH * took(base, kernel)
            return (tile if faster else base).launches[kernel]

        return replace(base, launches={kernel: best(kernel) for kernel in base.launches})

    def _say(self, line: str = "") -> None:
        if self.progress is None:
            return
        space = self.bench.space
        what = f"tuning {space.spec.operator} {space.key_dim}x{space.value_dim} {space.dtype}"
        if not line:
            line = f"{len(self.measured) + len(self.refused)} tried, {len(self.refused)} refused"
            if self.tiles:
                times = [self.step(tile, 0) for tile in self.tiles]
                line += f", best {min(times):.3g} ms, first {times[0]:.3g} ms"
                line += f" at {self.bench.workloads[0]}"
        self.progress(f"{what}: {line}")


def search(bench: Proving, device_name: str, **options) -> Record:
    """Tunes and returns the record. `options` are those of `Search`."""
    space = bench.space
    searched = Search(bench, **options)
    default, best = searched.run()
    classes = [
        Class(
            programs=workload.programs,
            tokens=workload.tokens,
            launches=best[n].launches,
            milliseconds=searched.milliseconds(best[n], n),
            default_milliseconds=searched.milliseconds(default, n),
        )
        for n, workload in enumerate(bench.workloads)
    ]
    return Record(
        operator=space.spec.operator,
        backend=space.backend.name,
        device=device_name,
        triton=space.triton,
        key_dim=space.key_dim,
        value_dim=space.value_dim,
        dtype=space.dtype,
        content=content_of(space.spec, space.backend, space.triton, device_name),
        chunk=best[0].chunk,
        strategy=best[0].strategy,
        classes=classes,
        tried=len(searched.measured) + len(searched.refused),
        keep=best[0].keep,
        refused=[Refused(tile=t, reason=r) for t, r in searched.refused.items()],
    )
