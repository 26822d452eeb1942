"""Tokens of the fullest device over the mean while experts drift, with copies placed by a forecast.

    python benchmarks/expert_balance.py [--experts 256] [--ranks 32] [--slots 2] [--json FILE]

A synthetic trace: the logarithm of each expert's popularity is a random walk that returns to zero,
as wide as `--spread` and forgetting over `--forget` steps; tokens are drawn from it. Compared are
the owners alone, slots filled once by the first step's loads (equal memory), and slots filled anew
from the moving forecast every `--interval` steps, each measured on steps that it has not seen.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from runtime.experts.placement import Forecast, next_placement, owners_only, place


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--ranks", type=int, default=32)
    parser.add_argument("--slots", type=int, default=2)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--tokens", type=int, default=524_288, help="routed, of a step")
    parser.add_argument("--spread", type=float, default=1.2, help="of log popularity")
    parser.add_argument("--forget", type=float, default=100.0, help="steps")
    parser.add_argument("--interval", type=int, nargs="+", default=[1, 5, 10, 20])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the figures here too")
    given = parser.parse_args()
    settings = {k: v for k, v in vars(given).items() if k not in ("json", "interval")}
    rows = [measure(interval=interval, **settings) for interval in given.interval]
    for row in rows:
        print(
            f"every {row['interval']:>3} steps: owners {row['owners']:.2f}, slots of the first "
            f"step {row['static']:.2f}, forecast {row['forecast']:.2f} times the mean "
            f"({row['static'] / row['forecast']:.2f}x less); {row['copied']:.2f} experts copied a "
            "rank and look"
        )
    if given.json:
        machine = f"{platform.system()} {platform.machine()}, Python {platform.python_version()}"
        found = {"machine": machine, "settings": settings, "rows": rows}
        given.json.write_text(json.dumps(found, indent=2) + "\n")


def trace(
    experts: int, steps: int, tokens: int, spread: float, forget: float, seed: int
) -> Iterator[np.ndarray]:
    """Tokens by expert, a step at a time."""
    draw = np.random.default_rng(seed)
    keep = np.exp(-1 / forget)
    popularity = spread * draw.normal(size=experts)
    for _ in range(steps):
        moved = spread * np.sqrt(1 - keep**2) * draw.normal(size=experts)
        popularity = keep * popularity + moved
        share = np.exp(popularity)
        yield draw.multinomial(tokens, share / share.sum())


def measure(
    *,
    experts: int,
    ranks: int,
    slots: int,
    steps: int,
    tokens: int,
    spread: float,
    forget: float,
    seed: int,
    interval: int,
) -> dict[str, Any]:
    """Means over the steps after the first look."""
    forecast = Forecast(experts)
    owners = owners_only(experts, ranks, slots)
    static = now = owners
    overloads: list[tuple[float, ...]] = []
    copied = []
    for step, counts in enumerate(trace(experts, steps, tokens, spread, forget, seed), start=1):
        if step > interval:
            mean = counts.sum() / ranks
            overloads.append(tuple(p.loads(counts).max() / mean for p in (owners, static, now)))
        forecast.update(counts.tolist())
        if step == 1:
            static = place(counts, ranks, slots)
        if step % interval == 0:
            assert forecast.share_E is not None
            before, now = now, next_placement(now, forecast.share_E)
            new = [set(b) - set(a) for a, b in zip(before.slots, now.slots, strict=True)]
            copied.append(sum(map(len, new)) / ranks)
    mean = np.mean(overloads, axis=0)
    return {
        "interval": interval,
        "owners": float(mean[0]),
        "static": float(mean[1]),
        "forecast": float(mean[2]),
        "copied": float(np.mean(copied)),
    }


if __name__ == "__main__":
    main()
