"""Rows of tokens to their experts and weighted sums back: generated kernels, torch, torch.compile.

    python benchmarks/expert_rows.py [--rows 8192] [--choices 8] [--experts 256] [--width 2304]
        [--peers ours,torch,compiled] [--sweep] [--seconds 0.5] [--output FILE.json]
    python benchmarks/expert_rows.py --tiny             a rehearsal on the CPU

`torch` is the runtime's own form without kernels, `compiled` is indexing and `index_add` under
`torch.compile`, whose sums are in no fixed order. The four parts are timed alone: both operators,
forward and backward. What a peer computes is compared with float64 first, and no time is reported
for what is wrong. `--sweep` times the generated kernels with other tiles too. The floor is every
array read and written once, at the memory rate of the backend's file.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from attention.measure import Device
from attention.report import machine

from analyzers.backends import Backend, load_backend
from codegen.layer import LayerSpec, RowTile
from codegen.load import import_file
from codegen.members import load_members
from codegen.render import render
from runtime.experts.fan import TORCH, Fan, Pairs, RowKernels

LIMITS = {torch.bfloat16: 2**-8, torch.float32: 1e-5}
"""Relative error of a result as a whole: a rounding of every number, with room for its sums."""
COLUMNS = 256
"""Float64 copies are made of so many columns at a time."""
# Kernel: elements of a tile, widest row, items loaded ahead, warps.
SWEEP = {
    "COPY": [
        (1024, 1024, 1, 4),
        (2048, 512, 1, 2),
        (2048, 1024, 1, 4),
        (4096, 512, 1, 4),
        (8192, 1024, 1, 8),
        (4096, 4096, 1, 4),
        (8192, 8192, 1, 8),
    ],
    "WEIGH": [
        (1024, 1024, 1, 2),
        (2048, 2048, 1, 4),
        (4096, 4096, 1, 8),
        (8192, 4096, 1, 8),
        (8192, 8192, 1, 8),
    ],
    "SUM": [
        (256, 256, 8, 1),
        (512, 512, 4, 2),
        (512, 512, 16, 2),
        (1024, 1024, 8, 4),
        (1024, 512, 8, 4),
        (2048, 2048, 8, 8),
        (4096, 4096, 4, 8),
    ],
}
LAUNCHED = {
    "COPY": ["spread"],
    "WEIGH": ["combine_backward"],
    "SUM": ["spread_backward", "combine"],
}


@dataclass(frozen=True, kw_only=True)
class Work:
    """One layer's tokens, what its experts return, and the gradients from above."""

    fan: Fan
    x: Tensor
    y: Tensor
    weights: Tensor
    dy: Tensor
    do: Tensor

    def floors(self) -> dict[str, int]:
        """Bytes of every array of a part, once."""
        rows, items = self.x.nbytes, self.y.nbytes
        moved = rows + items
        return {
            "spread": moved,
            "spread_backward": moved,
            "combine": moved,
            "combine_backward": moved + items,
        }


def work_of(args: argparse.Namespace, device: str, dtype: torch.dtype) -> Work:
    generator = torch.Generator(device).manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, device=device, dtype=dtype)

    scores = torch.rand(args.rows, args.experts, generator=generator, device=device)
    weights_RK, ids_RK = scores.topk(args.choices)
    pairs = Pairs.of(ids_RK, args.experts, ids_RK.numel())
    return Work(
        fan=pairs.fan,
        x=normal(args.rows, args.width).requires_grad_(),
        y=normal(pairs.size, args.width).requires_grad_(),
        weights=pairs.weights(weights_RK).detach().requires_grad_(),
        dy=normal(pairs.size, args.width),
        do=normal(args.rows, args.width),
    )


@dataclass(frozen=True)
class Peer:
    spread: Callable[[Tensor], Tensor]
    combine: Callable[[Tensor, Tensor], Tensor]

    def parts(self, work: Work) -> dict[str, Callable[[], Any]]:
        """The four parts, each alone; the backward ones return their gradients."""
        items, sums = self.spread(work.x), self.combine(work.y, work.weights)
        given = work.y, work.weights
        grad = torch.autograd.grad

        def forward(function: Callable, *inputs: Tensor) -> Tensor:
            with torch.no_grad():
                return function(*inputs)

        return {
            "spread": lambda: [forward(self.spread, work.x)],
            "spread_backward": lambda: grad(items, work.x, work.dy, retain_graph=True),
            "combine": lambda: [forward(self.combine, *given)],
            "combine_backward": lambda: grad(sums, given, work.do, retain_graph=True),
        }


def by_fan(work: Work, kernels: RowKernels) -> Peer:
    """What the runtime's experts call."""
    return Peer(
        lambda x: work.fan.spread(x, kernels),
        lambda y, weights: work.fan.collect(y, weights, kernels),
    )


def compiled(work: Work) -> Peer:
    source, rows = work.fan.source, work.x.shape[0]

    def combine(y: Tensor, weights: Tensor) -> Tensor:
        scaled = y.float() * weights.unsqueeze(1)
        total = scaled.new_zeros(rows, y.shape[1]).index_add(0, source, scaled)
        return total.to(y.dtype)

    return Peer(torch.compile(lambda x: x[source]), torch.compile(combine))


def generated(backend: Backend, folder: Path, tile: dict[str, RowTile] | None = None) -> RowKernels:
    found = []
    for name in ("moe_spread", "moe_combine"):
        made = render(load_members()[name], backend, {}, tile=tile)
        path = folder / f"{len(list(folder.iterdir()))}_{made.module}"
        path.write_text(made.files[made.module], "utf-8")
        found.append(getattr(import_file(path, path.stem), name))
    return RowKernels(*found)


def exact(work: Work) -> Iterator[tuple[slice, dict[str, list[Tensor]]]]:
    """Every part in float64, some columns at a time; the gradient of the weights is the columns'
    share of it."""
    source, weights = work.fan.source, work.weights.detach().double().unsqueeze(1)
    for first in range(0, work.x.shape[1], COLUMNS):
        part = slice(first, first + COLUMNS)
        x, y, dy, do = (t.detach()[:, part].double() for t in (work.x, work.y, work.dy, work.do))
        zero = torch.zeros_like(x)
        above = do[source]
        yield (
            part,
            {
                "spread": [x[source]],
                "spread_backward": [zero.index_add(0, source, dy)],
                "combine": [zero.index_add(0, source, y * weights)],
                "combine_backward": [above * weights, (above * y).sum(1)],
            },
        )


def errors(work: Work, parts: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """The largest relative error of each part's results."""
    got = {name: [t.detach() for t in call()] for name, call in parts.items()}
    apart, size = ({name: [0.0] * len(found) for name, found in got.items()} for _ in range(2))

    def add(name: str, n: int, result: Tensor, want: Tensor) -> None:
        apart[name][n] += float((result.double() - want).square().sum())
        size[name][n] += float(want.square().sum())

    dweights = torch.zeros_like(work.weights, dtype=torch.float64)
    for part, want in exact(work):
        dweights += want["combine_backward"][1]
        for name, (first, *_) in got.items():
            add(name, 0, first[:, part], want[name][0])
    if "combine_backward" in got:
        add("combine_backward", 1, got["combine_backward"][1], dweights)
    pairs = {name: zip(apart[name], size[name], strict=True) for name in got}
    return {name: max((a / b) ** 0.5 for a, b in found) for name, found in pairs.items()}


def measured(work: Work, peer: Peer, device: Device, seconds: float, only: list[str]) -> dict:
    """Error and milliseconds of each part; `status` is wrong where one is."""
    parts = {name: call for name, call in peer.parts(work).items() if name in only}
    found = errors(work, parts)
    limit = LIMITS[work.x.dtype]
    row: dict[str, Any] = {"status": "right", "errors": found}
    if not all(error <= limit for error in found.values()):
        return row | {"status": f"wrong: beyond {limit:.1e}"}
    row["ms"] = {name: device.median(call, seconds) for name, call in parts.items()}
    row["same_bits"] = all(
        torch.equal(a, b) for call in parts.values() for a, b in zip(call(), call(), strict=True)
    )
    row["extra_bytes"] = {n: device.extra_bytes(call) for n, call in parts.items()}
    return row


def said(name: str, row: dict, floors: dict[str, float]) -> str:
    if "ms" not in row:
        return f"{name:32} {row['status']} {row.get('errors', '')}"
    cells = [f"{part} {ms:8.3f} ({ms / floors[part]:.2f}x)" for part, ms in row["ms"].items()]
    return f"{name:32} {'  '.join(cells)}{'' if row['same_bits'] else '  not the same bits twice'}"


def candidates(spec: LayerSpec, backend: Backend) -> Iterator[tuple[str, list[str], dict]]:
    """Tiles that differ from the family's own in one kernel: name, parts that launch it, tile."""
    own = spec.tile(backend)
    for kernel, tiles in SWEEP.items():
        for elements, block, steps, warps in tiles:
            tile = RowTile(
                elements=elements, block=block, steps=steps, num_warps=warps, num_stages=1
            )
            name = f"{kernel} {elements} {block} {steps} {warps}"
            yield name, LAUNCHED[kernel], own | {kernel: tile}


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__)
    p.formatter_class = argparse.RawDescriptionHelpFormatter
    p.add_argument("--rows", type=int, default=8192)
    p.add_argument("--choices", type=int, default=8)
    p.add_argument("--experts", type=int, default=256)
    p.add_argument("--width", type=int, default=2304)
    p.add_argument("--peers", default="ours,torch,compiled")
    p.add_argument("--sweep", action="store_true", help="other tiles of ours too")
    p.add_argument("--seconds", type=float, default=0.5, help="of a measurement")
    p.add_argument("--backend", default="h200")
    p.add_argument("--tiny", action="store_true")
    p.add_argument("--output", type=Path)
    args = p.parse_args()
    if args.tiny:
        args.rows, args.experts, args.width, args.seconds = 64, 16, 100, 0.0
    device = Device("cpu" if args.tiny else "cuda")
    backend = load_backend("cpu" if args.tiny else args.backend)
    work = work_of(args, device.name, device.dtype)
    rate = 1e6 * backend.memory_gbps.value  # bytes a millisecond
    floors = {name: moved / rate for name, moved in work.floors().items()}
    rows: dict[str, dict] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        peers: dict[str, Callable[[], Peer]] = {
            "ours": lambda: by_fan(work, generated(backend, folder)),
            "torch": lambda: by_fan(work, TORCH),
            "compiled": lambda: compiled(work),
        }
        jobs = [(peer, list(floors), peers[peer]) for peer in args.peers.split(",")]
        if args.sweep:
            spec = load_members()["moe_combine"]
            assert isinstance(spec, LayerSpec)
            for tile_name, parts, tile in candidates(spec, backend):

                def other(tile: dict = tile) -> Peer:
                    return by_fan(work, generated(backend, folder, tile))

                jobs.append((tile_name, parts, other))
        print(f"floor: {', '.join(f'{n} {ms:.3f} ms' for n, ms in floors.items())}")
        for peer, parts, make in jobs:
            try:
                rows[peer] = measured(work, make(), device, args.seconds, parts)
            except Exception as fault:  # a compiler that is not there, say
                rows[peer] = {"status": f"failed: {type(fault).__name__}: {fault}"[:400]}
            print(said(peer, rows[peer], floors), flush=True)
    if args.output:
        document = {
            "arguments": {k: str(v) for k, v in vars(args).items() if v is not None},
            "machine": machine(device.name),
            "bytes": work.floors(),
            "floor_ms": floors,
            "results": rows,
        }
        args.output.write_text(json.dumps(document, indent=1) + "\n", "utf-8")
    return 0 if all(row["status"] == "right" for row in rows.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
