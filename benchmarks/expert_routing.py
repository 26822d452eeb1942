"""Routing of tokens to experts and back, without the experts: generated kernels beside torch.

    python benchmarks/expert_routing.py [--tokens 16384] [--experts 896] [--choices 16]
        [--width 2304] [--limited-width 3584] [--factor 1.1] [--tries 3] [--sweep]
        [--seconds 0.3] [--output FILE.json]
    python benchmarks/expert_routing.py --tiny             a rehearsal on the CPU

`routing` is scores to experts and weights, the order of the pairs, rows to items and weighted sums
back, forward: a sigmoid router with a bias whose weights are renormalised. `torch` is what routers
of transformers and the runtime do without kernels. `limited` is the same on a router whose experts
are liked as 1, 1/2, 1/3, ..., with a capacity: dropped, or asking so many times the experts first.
Every step is compared first with torch's own on the same inputs, what finds room under a capacity
exactly. `graph` is the time of a captured CUDA graph, which a wait for the
host would not let be captured; `ms` includes what Python takes where that is longer. The floor is
every array read and written once, at the memory rate of the backend's file.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from attention.job import Device
from attention.report import machine

from analyzers.backends import Backend, load_backend
from codegen.layer import LayerSpec, RowTile
from codegen.load import import_file
from codegen.members import load_members
from codegen.render import render
from runtime.experts.capacity import Limiter
from runtime.experts.dispatch import Limit, Local, Route
from runtime.experts.fan import TORCH, RowKernels

SCALE = 2.5
LIMITS = {torch.bfloat16: 2**-8, torch.float32: 1e-5}
"""Relative error of the sums."""
NEAR_TIES = 1e-3
"""Share of ids that two roundings of the same scores may choose otherwise."""
# Kernel of moe_route and moe_reroute: elements, block, warps.
SWEEP = {
    "moe_route": {"CHOOSE": [(1024, 1, 2), (1024, 1, 4), (2048, 1, 2), (4096, 1, 4)]},
    "moe_order": {"COUNT": [(128, 16, 4), (256, 32, 8), (512, 16, 8)]},
    "moe_reroute": {
        "REFUSE": [(1024, 4, 4), (2048, 4, 16), (1024, 8, 16)],
        "ASK": [(512, 1, 4), (2048, 1, 4)],
    },
}

Choose = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]
"""Logits, bias and k to weights and ids."""


def torch_choose(logits: Tensor, bias: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    scores = logits.sigmoid()
    ids = torch.topk(scores + bias, top_k, dim=-1).indices
    weights = scores.gather(1, ids)
    return weights / (weights.sum(1, keepdim=True) + 1e-20) * SCALE, ids


@dataclass(frozen=True)
class Peer:
    choose: Choose
    kernels: RowKernels = TORCH


def generated(backend: Backend, folder: Path, tiles: dict[str, dict] | None = None) -> Peer:
    """With other `tiles`, by operator."""
    found: dict[str, Callable] = {}
    for name in ("moe_route", "moe_order", "moe_reroute", "moe_spread", "moe_combine"):
        made = render(load_members()[name], backend, {}, tile=(tiles or {}).get(name))
        path = folder / f"{len(list(folder.iterdir()))}_{made.module}"
        path.write_text(made.files[made.module], "utf-8")
        found[name.removeprefix("moe_")] = getattr(import_file(path, path.stem), name)
    route = found.pop("route")

    def choose(logits: Tensor, bias: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
        how = {"score": "sigmoid", "renormalize": True, "scale": SCALE}
        return route(logits, top_k, bias=bias, **how)

    return Peer(choose, RowKernels(**found))


@dataclass(frozen=True, kw_only=True)
class Work:
    """A layer's tokens and logits; `limiter` where experts have a capacity."""

    x: Tensor
    logits: Tensor
    bias: Tensor
    dweights: Tensor
    top_k: int
    limiter: Limiter | None = None

    def candidates(self, peer: Peer) -> tuple[Tensor, Tensor]:
        top_k = self.top_k if self.limiter is None else self.limiter.candidates
        return peer.choose(self.logits, self.bias, top_k)

    def limited(self, weights: Tensor, ids: Tensor, peer: Peer) -> tuple[Tensor, Tensor]:
        if self.limiter is None:
            return weights, ids
        ids, weights = self.limiter(ids, weights, None, peer.kernels)
        return weights, ids

    def chosen(self, peer: Peer) -> tuple[Tensor, Tensor]:
        return self.limited(*self.candidates(peer), peer)

    def route(self, ids: Tensor, peer: Peer) -> Route:
        limit = self.limiter and Limit(self.x.shape[0], self.limiter.capacity)
        return Local(limit).route(ids, self.logits.shape[1], peer.kernels)

    def moved(self, weights: Tensor, ids: Tensor, peer: Peer) -> Tensor:
        """Rows to items and their weighted sums back."""
        route = self.route(ids, peer)
        y, weights_P = route.dispatch(self.x, weights, peer.kernels)
        return route.combine(y, weights_P, peer.kernels)

    @torch.no_grad()
    def whole(self, peer: Peer) -> list[Tensor]:
        weights, ids = self.chosen(peer)
        return [ids, weights, self.moved(weights, ids, peer)]

    def parts(self, peer: Peer) -> dict[str, Callable[[], Any]]:
        """Each alone, and the whole."""
        with torch.no_grad():
            weights, ids = self.chosen(peer)
            route = self.route(ids, peer)
            y, weights_P = route.dispatch(self.x, weights, peer.kernels)
        logits = self.logits.detach().requires_grad_()
        above, _ = peer.choose(logits, self.bias, self.top_k)
        inside = torch.no_grad()
        return {
            "whole": lambda: self.whole(peer),
            "choose": inside(lambda: self.chosen(peer)),
            "choose_backward": lambda: torch.autograd.grad(
                above, logits, self.dweights, retain_graph=True
            ),
            "order": inside(lambda: self.route(ids, peer).pairs.fan.offsets),
            "spread": inside(lambda: route.dispatch(self.x, weights, peer.kernels)),
            "combine": inside(lambda: route.combine(y, weights_P, peer.kernels)),
        }

    def floors(self) -> dict[str, int]:
        """Bytes of every array, once; ids and weights of four bytes."""
        rows, logits, pairs = self.x.nbytes, self.logits.nbytes, 4 * self.x.shape[0] * self.top_k
        items = rows * self.top_k
        floors = {
            "choose": logits + 2 * pairs,
            "choose_backward": 2 * logits + 2 * pairs,
            "order": 4 * pairs,
            "spread": rows + items + 3 * pairs,
            "combine": rows + items + 3 * pairs,
        }
        whole = sum(size for name, size in floors.items() if name != "choose_backward")
        return {"whole": whole, **floors}


def work_of(args: argparse.Namespace, device: str, dtype: torch.dtype, width: int) -> Work:
    generator = torch.Generator(device).manual_seed(0)
    shape = {"generator": generator, "device": device}
    noise = torch.rand(args.tokens, args.experts, **shape).clamp(min=1e-7)
    return Work(
        x=torch.randn(args.tokens, width, dtype=dtype, **shape),
        logits=noise.logit(),
        bias=torch.randn(args.experts, **shape) * 1e-2,
        dweights=torch.randn(args.tokens, args.choices, **shape),
        top_k=args.choices,
    )


def limited(args: argparse.Namespace, device: str, dtype: torch.dtype, tries: int) -> Work:
    """Choices by Gumbel noise on the logarithms of 1, 1/2, 1/3, ... in a random order."""
    work = work_of(args, device, dtype, args.limited_width)
    generator = torch.Generator(device).manual_seed(1)
    liked = -torch.arange(1, args.experts + 1, device=device).log()
    liked = liked[torch.randperm(args.experts, generator=generator, device=device)]
    noise = torch.rand(work.logits.shape, generator=generator, device=device).clamp(1e-7, 1 - 1e-6)
    limiter = Limiter(
        name="experts",
        experts=args.experts,
        top_k=args.choices,
        candidates=min(args.experts, tries * args.choices),
        capacity=math.ceil(args.factor * args.tokens * args.choices / args.experts),
        renormalize=True,
    )
    logits = liked - (-noise.log()).log()
    return replace(work, logits=logits, bias=work.bias * 0, limiter=limiter)


@torch.no_grad()
def wrong(work: Work, peer: Peer) -> str | None:
    """What differs from torch, each step on the same inputs; None when nothing does."""
    plain = Peer(torch_choose)
    weights, ids = work.candidates(peer)
    torch_weights, torch_ids = work.candidates(plain)
    alike = (ids == torch_ids).all(1)  # a near tie may fall the other way: other weights
    error = apart(weights[alike], torch_weights[alike])
    if not error <= LIMITS[torch.float32]:
        return f"weights are off by {error:.1e}"
    if (share := float((ids != torch_ids).float().mean())) > NEAR_TIES:
        return f"{share:.1e} of the ids differ"
    limited = work.limited(weights, ids, peer)
    for x, y in zip(limited, work.limited(weights, ids, plain), strict=True):
        if not torch.equal(x, y):
            return "a capacity gives other experts or weights"
    error = apart(work.moved(*limited, peer), work.moved(*limited, plain))
    if not error <= LIMITS[work.x.dtype]:
        return f"sums are off by {error:.1e}"
    pairs = zip(work.whole(peer), work.whole(peer), strict=True)
    return None if all(torch.equal(x, y) for x, y in pairs) else "not the same bits twice"


def apart(x: Tensor, y: Tensor) -> float:
    return float((x.double() - y.double()).norm() / y.double().norm())


def graph_of(call: Callable[[], Any]) -> Callable[[], Any]:
    """The call as a CUDA graph; raises where it waits for the host."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def measured(work: Work, peer: Peer, device: Device, args: argparse.Namespace) -> dict[str, Any]:
    ours = peer.kernels is not TORCH
    fault = wrong(work, peer) if ours else None
    if fault is not None:
        return {"status": f"wrong: {fault}"}
    parts = work.parts(peer)
    row: dict[str, Any] = {"status": "right"}
    row["ms"] = {name: device.median(call, args.seconds) for name, call in parts.items()}
    if device.cuda and ours:
        graphs = {n: graph_of(call) for n, call in parts.items() if n != "choose_backward"}
        row["graph_ms"] = {n: device.median(call, args.seconds) for n, call in graphs.items()}
    if work.limiter is not None:
        ids = work.whole(peer)[0]
        row["dropped"] = float((ids == work.limiter.experts).float().mean())
    return row


def candidates(backend: Backend) -> dict[str, dict[str, dict[str, RowTile]]]:
    """Tiles that differ from the family's own in one kernel."""
    found = {}
    for operator, kernels in SWEEP.items():
        spec = load_members()[operator]
        assert isinstance(spec, LayerSpec)
        own = spec.tile(backend)
        for kernel, tiles in kernels.items():
            for elements, block, warps in tiles:
                tile = RowTile(elements=elements, block=block, num_warps=warps, num_stages=1)
                name = f"{operator} {kernel} {elements} {block} {warps}"
                found[name] = {operator: own | {kernel: tile}}
    return found


def said(name: str, row: dict, floors: dict[str, float]) -> str:
    if "ms" not in row:
        return f"{name:36} {row['status']}"
    best = row["ms"] | row.get("graph_ms", {})
    cells = [
        f"{part} {row['ms'][part]:.3f} / {ms:.3f} ({ms / floors[part]:.2f}x)"
        for part, ms in best.items()
    ]
    dropped = f"  dropped {row['dropped']:.4f}" if "dropped" in row else ""
    return f"{name:36} {'  '.join(cells)}{dropped}"


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__)
    p.formatter_class = argparse.RawDescriptionHelpFormatter
    p.add_argument("--tokens", type=int, default=16384)
    p.add_argument("--experts", type=int, default=896)
    p.add_argument("--choices", type=int, default=16)
    p.add_argument("--width", type=int, default=2304)
    p.add_argument("--limited-width", type=int, default=3584)
    p.add_argument("--factor", type=float, default=1.1)
    p.add_argument("--tries", type=int, default=3)
    p.add_argument("--sweep", action="store_true", help="other tiles of ours too")
    p.add_argument("--seconds", type=float, default=0.3, help="of a measurement")
    p.add_argument("--backend", default="h200")
    p.add_argument("--tiny", action="store_true")
    p.add_argument("--output", type=Path)
    args = p.parse_args()
    if args.tiny:
        args.tokens, args.experts, args.choices, args.seconds = 64, 16, 2, 0.0
        args.width, args.limited_width = 40, 24
    device = Device("cpu" if args.tiny else "cuda")
    backend = load_backend("cpu" if args.tiny else args.backend)
    rate = 1e6 * backend.memory_gbps.value  # bytes a millisecond
    rows: dict[str, dict] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ours, plain = generated(backend, folder), Peer(torch_choose)
        usual = work_of(args, device.name, device.dtype, args.width)
        jobs: list[tuple[str, Work, Peer | None]] = [
            ("routing", usual, ours),
            ("torch", usual, plain),
        ]
        for tries, title in ((1, "dropped"), (args.tries, "rerouted")):
            work = limited(args, device.name, device.dtype, tries)
            jobs += [(f"{title}", work, ours), (f"{title}, torch", work, plain)]
        if args.sweep:
            jobs += [
                (name, work if name.startswith("moe_reroute") else usual, None)
                for name in candidates(backend)
            ]
        print("milliseconds as called / in a graph (times the floor)")
        for name, work, peer in jobs:
            floors = {n: moved / rate for n, moved in work.floors().items()}
            try:
                peer = peer or generated(backend, folder, candidates(backend)[name])
                rows[name] = measured(work, peer, device, args)
            except Exception as fault:
                rows[name] = {"status": f"failed: {type(fault).__name__}: {fault}"[:400]}
            print(said(name, rows[name], floors), flush=True)
    if args.output:
        document = {
            "arguments": {k: str(v) for k, v in vars(args).items() if v is not None},
            "machine": machine(device.name),
            "results": rows,
        }
        args.output.write_text(json.dumps(document, indent=1) + "\n", "utf-8")
    return 0 if all(row["status"] == "right" for row in rows.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
