"""The launches worth trying: what a backend's profile allows, nearest to a given tile first."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib import metadata

from analyzers.backends import Backend, TritonTarget
from analyzers.errors import InputError
from codegen.family import SHORT_CHUNK, Footprint, Launch, Spec, Tile, power_of_two

BLOCKS = (16, 32, 64, 128, 256)
PART = 64
"""Value channels that the gradients take at a time where all is held in one buffer."""
BUFFER_SHARE = 0.8
"""Of a buffer, what kernels may plan with: the rest is the compiler's (the rule of Liger-Kernel and
flash-linear-attention for Ascend's unified buffer)."""
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def triton_version() -> str:
    """Of the installed compiler."""
    try:
        return metadata.version("triton")
    except metadata.PackageNotFoundError:  # another distribution of it
        import triton

        return triton.__version__


@dataclass(frozen=True, kw_only=True)
class Space:
    """What can be launched for kernels of these widths on this backend."""

    spec: Spec
    backend: Backend
    key_dim: int
    value_dim: int
    dtype: str
    triton: str = field(default_factory=triton_version)
    """Version of the compiler: its known faults are left out."""

    @property
    def target(self) -> TritonTarget:
        assert self.backend.triton is not None
        return self.backend.triton

    def refusal(self, kernel: str, launch: Launch, chunk: int) -> str | None:
        """Why this launch is not tried, or None."""
        target = self.target
        if target.num_warps and launch.num_warps not in target.num_warps:
            return f"{self.backend.name} takes no {launch.num_warps} warps"
        if target.num_stages and launch.num_stages not in target.num_stages:
            return f"{launch.num_stages} stages are not tried on {self.backend.name}"
        fault = target.fault(
            self.spec.configuration(kernel, launch, chunk, self.key_dim), self.triton
        )
        if fault is not None:
            return f"triton {fault.triton}: {fault.reason}"
        return self._beyond_limits(kernel, launch, chunk)

    def _beyond_limits(self, kernel: str, launch: Launch, chunk: int) -> str | None:
        """Lower bounds by the kernel's footprint; the compiler has the last word."""
        footprint = self.spec.footprints.get(kernel)
        if footprint is None:
            return None
        target = self.target
        sizes = {
            "chunk": chunk,
            "short": SHORT_CHUNK,
            "block": launch.block,
            "key_dim": power_of_two(self.key_dim),
            "value_dim": power_of_two(self.value_dim),
        }
        width = sizes[footprint.tiles]
        if in_one_buffer(self.backend):
            return self._beyond_buffer(footprint, sizes)
        threads = launch.num_warps * target.warp_size
        if launch.block < target.min_dot:
            return f"a block of {launch.block} is too narrow for a dot"
        if launch.block > width:
            # Loads beyond a tensor were prefetched without their mask (fla#989).
            return f"a block of {launch.block} is wider than {footprint.tiles} {width}"
        if launch.block * chunk < threads:
            return f"{threads} threads for {chunk} x {launch.block} elements"
        if footprint.loop == "none" and launch.num_stages > 1:
            return "none of its loops is pipelined"
        if footprint.loop == "blocks" and launch.block == width and launch.num_stages > 1:
            return "a loop of one block has nothing to pipeline"
        held = sum(sizes[a] * sizes[b] for a, b in footprint.registers) / threads
        if target.registers_per_thread and held > target.registers_per_thread:
            return f"{held:.0f} registers a thread, {target.registers_per_thread} are there"
        loaded = [*footprint.staged, *(footprint.staged_by_delta if self.spec.delta else [])]
        staged = sum(sizes[a] * sizes[b] for a, b in loaded)
        needed = staged * ITEM_BYTES[self.dtype] * (launch.num_stages if staged else 0)
        if launch.num_stages > 1 and needed > target.shared_memory_bytes:
            return f"{needed} bytes of shared memory, {target.shared_memory_bytes} are there"
        return None

    def _beyond_buffer(self, footprint: Footprint, sizes: dict[str, int]) -> str | None:
        """Where there are no registers and no stages: all is in one buffer, and what a step loads
        is there twice, for this step and for the next."""
        sizes = sizes | {"part": min(PART, sizes["value_dim"])}
        loaded = [*footprint.staged, *(footprint.staged_by_delta if self.spec.delta else [])]
        needed = 2 * ITEM_BYTES[self.dtype] * sum(sizes[a] * sizes[b] for a, b in loaded)
        needed += 4 * sum(count * sizes[a] * sizes[b] for count, a, b in footprint.buffered)
        room = int(BUFFER_SHARE * self.target.shared_memory_bytes)
        if needed > room:
            return f"{needed} bytes in blocks of {sizes['block']}, {room} of the buffer are there"
        return None

    def fitted(self, kernel: str, launch: Launch, chunk: int) -> Launch:
        """With a block no wider than what it cuts, no more stages than fit, and warps that are
        right for both."""
        launch = clipped(self.spec, kernel, launch, self.key_dim, self.value_dim)
        while launch.num_stages > 1 and self._beyond_limits(kernel, launch, chunk):
            launch = replace(launch, num_stages=launch.num_stages - 1)
        if in_one_buffer(self.backend):
            while launch.block > self.target.min_dot and self._beyond_limits(kernel, launch, chunk):
                launch = replace(launch, block=launch.block // 2)
        return self.spec.sound(self.backend, kernel, launch, chunk, self.key_dim)

    def launches(self, kernel: str, base: Launch, chunk: int) -> tuple[list[Launch], Counter[str]]:
        """What may be tried for one kernel, nearest to `base` first; and refusals, counted by
        reason."""
        target = self.target
        every = [
            Launch(block=block, num_warps=warps, num_stages=stages)
            for block, warps, stages in itertools.product(
                BLOCKS, target.num_warps or [base.num_warps], target.num_stages or [base.num_stages]
            )
        ]
        refusals = {launch: self.refusal(kernel, launch, chunk) for launch in every}
        allowed = [launch for launch, reason in refusals.items() if reason is None]

        def far(launch: Launch) -> float:
            return (
                abs(math.log2(launch.block / base.block))
                + abs(math.log2(launch.num_warps / base.num_warps))
                + abs(launch.num_stages - base.num_stages) / 2
            )

        return sorted(allowed, key=far), Counter(r for r in refusals.values() if r)

    def bases(self) -> list[Tile]:
        """The family's own tile, then the same launches in other chunk lengths and strategies."""
        own = self.spec.tile(self.backend, self.key_dim, self.dtype)
        known = self.spec.strategies_on(self.backend, self.dtype)
        bases = [
            self._fitted(self.spec.tile(self.backend, self.key_dim, self.dtype, strategy))
            for strategy in dict.fromkeys((own.strategy, *known))
        ]
        others = [
            self._sound(replace(base, chunk=chunk))
            for chunk in sorted({own.chunk, *self.spec.chunks})
            for base in bases
            if (chunk, base.strategy) != (own.chunk, own.strategy)
        ]
        return [bases[0], *others]

    def _fitted(self, tile: Tile) -> Tile:
        launches = {k: self.fitted(k, x, tile.chunk) for k, x in tile.launches.items()}
        return replace(tile, launches=launches)

    def _sound(self, tile: Tile) -> Tile:
        """With the nearest launch that is allowed wherever the tile's own is not."""
        launches = {}
        for kernel, launch in tile.launches.items():
            allowed, _ = self.launches(kernel, launch, tile.chunk)
            launches[kernel] = allowed[0] if allowed else launch
        return replace(tile, launches=launches)

    def candidates(self, base: Tile) -> Iterator[Tile]:
        """Tiles whose kernels all differ from `base` at once.

        A launch of one kernel does not change the time of another, so the n-th candidate takes the
        n-th launch of every kernel: as many candidates as the kernel with most launches has.
        """
        rows = {
            kernel: [x for x in self.launches(kernel, launch, base.chunk)[0] if x != launch]
            for kernel, launch in base.launches.items()
        }
        for n in range(max(map(len, rows.values()), default=0)):
            launches = {
                kernel: rows[kernel][n] if n < len(rows[kernel]) else launch
                for kernel, launch in base.launches.items()
            }
            yield replace(base, launches=launches)

    def pruned(self, base: Tile) -> Counter[str]:
        """How many launches of all kernels were left out, by reason."""
        return sum(
            (self.launches(k, launch, base.chunk)[1] for k, launch in base.launches.items()),
            Counter(),
        )


def clipped(spec: Spec, kernel: str, launch: Launch, key_dim: int, value_dim: int) -> Launch:
    """With a block no wider than what it cuts."""
    footprint = spec.footprints.get(kernel)
    if footprint is None:
        return launch
    width = key_dim if footprint.tiles == "key_dim" else value_dim
    return replace(launch, block=min(launch.block, power_of_two(width)))


def one_at_a_time(base: Tile, tile: Tile) -> list[Tile]:
    """`base` with the launch of one kernel of `tile`, for each kernel in which they differ."""
    return [
        replace(base, launches=base.launches | {kernel: launch})
        for kernel, launch in tile.launches.items()
        if launch != base.launches[kernel]
    ]


def describe(tile: Tile) -> str:
    """E.g. `chunk 64 split, prepare 64/4/2, recur 32/4/3` (block/warps/stages)."""
    return f"chunk {tile.chunk} {tile.strategy}, {describe_launches(tile.launches)}"


def describe_launches(launches: Mapping[str, Launch]) -> str:
    return ", ".join(
        f"{kernel.lstrip('_')} {x.block}/{x.num_warps}/{x.num_stages}"
        for kernel, x in launches.items()
    )


def in_one_buffer(backend: Backend) -> bool:
    """A device without warps holds all that a program works on in one buffer."""
    return backend.triton is not None and not backend.triton.num_warps


def buffered_tile(spec: Spec, backend: Backend, key_dim: int, value_dim: int) -> Tile:
    """The family's tile on a device that holds all in one buffer: in the longest chunks whose
    kernels fit. Raises InputError, with the kernel that is too large, where none do."""
    tile = spec.tile(backend, key_dim)
    fault = None
    chunk = tile.chunk
    while chunk >= 16:
        fault = _beyond(spec, backend, key_dim, value_dim, replace(tile, chunk=chunk))
        if fault is None:
            return replace(tile, chunk=chunk)
        chunk //= 2
    raise InputError(
        f"kernel {spec.operator}",
        field=f"key_dim {key_dim}, value_dim {value_dim}",
        fault=f"does not fit {backend.title}: {fault}",
        fix="narrower heads, or a backend with a larger buffer",
    )


def _beyond(spec: Spec, backend: Backend, key_dim: int, value_dim: int, tile: Tile) -> str | None:
    for dtype in spec.dtypes:
        space = Space(spec=spec, backend=backend, key_dim=key_dim, value_dim=value_dim, dtype=dtype)
        for kernel, launch in tile.launches.items():
            launch = space.fitted(kernel, launch, tile.chunk)
            if fault := space._beyond_limits(kernel, launch, tile.chunk):
                return f"{kernel} in {dtype}, chunks of {tile.chunk}, needs {fault}"
    return None
