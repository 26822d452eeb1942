"""Launches of a step of a linear-attention kernel and the bytes that they move, by formula.

    python -m codegen.traffic kda [--shape 1x8192x32] [--widths 128x128] [--backend h200]

A tensor counts once a launch: who reads it again soon finds it in a cache. Beside that stands what
all programs ask for, cached or not.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from analyzers.backends import load_backend
from codegen.family import FUSED, SHORT, SHORT_CHUNK, Spec, Tile, power_of_two
from codegen.members import load_specs

PREPARE_SHORT, RECUR_SHORT = SHORT
CUTS = {FUSED: "v", RECUR_SHORT: "v", "_recur": "v", "_reverse": "v", "_gradients": "k"}
"""The width of a kernel that is cut into blocks, each of them a program."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """What a step is of. A number of the inputs has `item` bytes, one of the decays `gate_item`."""

    batch: int
    tokens: int
    heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    item: int = 2
    gate_item: int = 4


@dataclass(frozen=True, kw_only=True)
class Moved:
    """What a launch reads and writes, and what its programs ask for together, in bytes."""

    kernel: str
    read: int
    written: int
    asked: int


def tensors(spec: Spec, step: Step) -> dict[str, tuple[str, int]]:
    """Dimensions and bytes a number of everything that kernels hand to one another.

    t tokens, h heads, w value heads, k and v their channels, c rows of a chunk, n chunks, s
    sequences, b blocks of key channels; numbers are themselves.
    """
    item, g_item = step.item, step.gate_item
    per_channel = spec.decay == "per_channel"
    raw = spec.gate_in_kernel and g_item < 4
    parts = "2" if spec.delta else ""
    partial = item if step.heads == step.value_heads else 4
    beta = "twk" if spec.beta == "per_channel" else "tw"
    return {
        **dict.fromkeys(("q", "k"), ("thk", item)),
        **dict.fromkeys(("v", "o", "do", "dv", "v_new"), ("twv", item)),
        **dict.fromkeys(("q_gated", "k_gated", "k_read"), ("twk", item)),
        **dict.fromkeys(("a_qk", "solve", "d_qk", "d_kk"), ("twc", item)),
        "reads": (f"{parts}nwck", item),
        "writes": ("nwck", item),
        "mixes": (f"{parts}nwcc", item),
        "h": ("nwkv", item),
        "dh": ("nwkv", 4 if step.key_dim > 128 and "g" in spec.inputs else item),
        **dict.fromkeys(("ht", "dh0"), ("swkv", 4)),
        **dict.fromkeys(("dq", "dk"), ("twk", partial)),
        **dict.fromkeys(("beta", "dbeta"), (beta, item)),
        **dict.fromkeys(("dA_log", "ddt_bias"), ("nwk", 4)),
        "g": {"constant": ("w", 4), "per_channel": ("twk", g_item)}.get(spec.decay, ("tw", g_item)),
        "dg": ("twk", g_item if raw else 4) if per_channel else ("btw", 4),
        "decay": ("nwk" if per_channel else "nw", 4),
        "a_kk": ("twc", 4),
        "v_rest": ("twv", item if item < 4 else 0),
        "exact_dv": ("twv", 4),
        "norms": ("2tw", 4),
        "rows": ("3tw", 4),
        "far": ("nw", 1),
    }


def kernels(spec: Spec) -> dict[str, tuple[list[str], list[str]]]:
    """What each kernel of a member reads and writes."""

    def having(condition: bool, *names: str) -> list[str]:
        return list(names) if condition else []

    delta, decays, per_channel = spec.delta, spec.decay != "none", spec.decay == "per_channel"
    g = having(decays, "g")
    keys = ["q", "k", *g, *having("beta" in spec.inputs, "beta")]
    decay = having(decays, "decay")
    walked = ["q_gated", "k_gated", *having(delta, "k_read", "solve"), "a_qk", *decay]
    products = ["q_gated", "k_gated", *having(delta, "k_read", "a_kk"), "a_qk", *decay, "norms"]
    short = ["reads", "writes", "mixes", *decay]
    values = ["v", "o", "do", *(["v_new", "v_rest", "exact_dv"] if delta else ["dv"])]
    states = ["do", "dv", "v_new" if delta else "v", "h", "dh", "d_qk", "d_kk", "rows", "norms"]
    by_key = having(spec.beta == "per_channel", "dbeta")
    raw = having(spec.gate_in_kernel, "dA_log", "ddt_bias")
    scalar = having(spec.beta == "per_head", "beta")
    d_scalar = having(spec.beta == "per_head", "dbeta")
    dg, own_decay = (["dg"], ["decay"]) if "g" in spec.inputs else ([], [])
    return {
        "_prepare": (keys, [*products, *having(per_channel, "far")]),
        "_solve": (["a_kk", *scalar], ["solve"]),
        "_recur": (["v", *walked], ["o", "ht"]),
        PREPARE_SHORT: (keys, short),
        RECUR_SHORT: (["v", *short], ["o", "ht"]),
        FUSED: ([*keys, "v"], ["o", "ht"]),
        "_reverse": (["do", *walked], ["exact_dv" if delta else "dv", "dh", "dh0"]),
        "_pairs": (
            [*values, *having(not per_channel, *g), *scalar],
            [*having(delta, "dv"), "d_qk", "d_kk", "rows", *d_scalar],
        ),
        "_gradients": ([*keys, *states, *own_decay], ["dq", "dk", *dg, *raw, *by_key]),
    }


def moved(
    spec: Spec, tile: Tile, step: Step, kernel: str, *, states: bool = False, passed: bool = False
) -> Moved:
    """Of one launch. `states`: `_recur` also leaves what gradients need; `passed`: the second pass
    for strong decays, where no chunk is marked."""
    chunk = SHORT_CHUNK if kernel in SHORT else tile.chunk
    sizes = {
        "t": step.batch * step.tokens,
        "h": step.heads,
        "w": step.value_heads,
        "k": step.key_dim,
        "v": step.value_dim,
        "c": chunk,
        "n": step.batch * math.ceil(step.tokens / chunk),
        "s": step.batch,
    }
    cut = CUTS.get(kernel, "")
    blocks = 1
    if cut:
        blocks = math.ceil(sizes[cut] / min(tile.launches[kernel].block, power_of_two(sizes[cut])))
    known = tensors(spec, step)

    def size(name: str) -> int:
        dims, item = known[name]
        counts = sizes | {"b": blocks}
        return item * math.prod(counts[d] if d in counts else int(d) for d in dims)

    def readers(name: str) -> int:
        dims, _ = known[name]
        group = step.value_heads // step.heads if "h" in dims else 1
        return group * (1 if cut in dims else blocks)

    reads, writes = kernels(spec)[kernel]
    if passed:
        reads, writes = ["far"], []
    if states:
        writes = [*writes, "h", *(["v_new", "v_rest"] if spec.delta else [])]
    written = sum(map(size, writes))
    return Moved(
        kernel=kernel,
        read=sum(map(size, reads)),
        written=written,
        asked=written + sum(size(name) * readers(name) for name in reads),
    )


def launches(
    spec: Spec, tile: Tile, step: Step, *, gradients: bool, bounded: bool = False
) -> list[Moved]:
    """Every launch of a forward, with `gradients` of a training step, in order. `bounded`: the
    gate's bound makes a second pass for strong decays unnecessary."""
    twice = spec.decay == "per_channel" and not bounded

    def passes(kernel: str) -> list[Moved]:
        first = moved(spec, tile, step, kernel)
        return [first, *([moved(spec, tile, step, kernel, passed=True)] if twice else [])]

    def split(states: bool) -> list[Moved]:
        solve = [moved(spec, tile, step, "_solve")] if spec.delta else []
        return [*passes("_prepare"), *solve, moved(spec, tile, step, "_recur", states=states)]

    if tile.strategy == "fused":
        forward = [moved(spec, tile, step, FUSED)]
    elif tile.strategy == "short" and not (gradients and tile.keep):
        forward = [moved(spec, tile, step, kernel) for kernel in SHORT]
    else:
        forward = split(states=gradients and tile.keep)
    if not gradients:
        return forward
    again = [] if tile.keep else split(states=True)
    reverse, pairs = (moved(spec, tile, step, kernel) for kernel in ("_reverse", "_pairs"))
    return [*forward, *again, reverse, pairs, *passes("_gradients")]


def table(spec: Spec, tiles: Iterable[Tile], step: Step) -> str:
    """Markdown: a line a strategy."""
    lines = [
        "| strategy | chunk | forward: launches | read | written | asked for "
        "| step: launches | read | written |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for tile in tiles:
        name = f"{tile.strategy}, kept" if tile.keep else tile.strategy
        short = f"{SHORT_CHUNK} or " if tile.strategy == "short" else ""
        cells = [name, f"{short}{tile.chunk}"]
        for gradients in (False, True):
            made = launches(spec, tile, step, gradients=gradients)
            read, written = sum(x.read for x in made), sum(x.written for x in made)
            cells += [str(len(made)), f"{read / 1e9:.2f}", f"{written / 1e9:.2f}"]
            if not gradients:
                cells.append(f"{sum(x.asked for x in made) / 1e9:.2f}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m codegen.traffic", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("operator", choices=sorted(load_specs()))
    parser.add_argument("--shape", default="1x8192x32", metavar="BxTxH")
    parser.add_argument("--widths", default="128x128", metavar="KxV")
    parser.add_argument("--backend", default="h200")
    given = parser.parse_args(arguments)
    batch, tokens, heads = map(int, given.shape.split("x"))
    key_dim, value_dim = map(int, given.widths.split("x"))
    spec, backend = load_specs()[given.operator], load_backend(given.backend)
    step = Step(
        batch=batch,
        tokens=tokens,
        heads=heads,
        value_heads=heads,
        key_dim=key_dim,
        value_dim=value_dim,
    )
    split, *own = (spec.tile(backend, key_dim, strategy=s) for s in spec.strategies_on(backend))
    tiles = [replace(split, keep=True), replace(split, keep=False), *own]
    print(f"{spec.title}, B{batch} T{tokens} H{heads}, K {key_dim}, V {value_dim}; GB by formula\n")
    print(table(spec, tiles, step))


if __name__ == "__main__":
    main()
