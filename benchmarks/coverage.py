"""How far the analysis comes with every transformers architecture that has routed experts or a
linear, state-space or sparse mixer.

    python benchmarks/coverage.py [--only NAME ...] [--jobs 1] [--json FILE] [--write-docs]

Each architecture is analysed in a process of its own with a time limit, so that none can take the
sweep down. `--only` takes model types or class names; with `--json` the results of the others stay
in the file, so that a sweep can be taken up again. `--write-docs` writes docs/coverage.md and
docs/coverage.json. Exit status 1 when an analysis failed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import multiprocessing
import os
import platform
import sys
import time
import warnings
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from analyzers.coverage import (
    Architecture,
    Excluded,
    Result,
    enumerate_architectures,
    examine,
    failed,
    render,
)

TIME_LIMIT = 600  # seconds an architecture
DOCS = Path(__file__).resolve().parent.parent / "docs"
TRAINING = "<!-- training: begin -->"  # the section that coverage_training.py writes


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--write-docs", action="store_true")
    options = parser.parse_args(arguments)
    quiet()

    everything, excluded = enumerate_architectures()
    architectures = everything
    if options.only:
        known = {name for a in everything for name in (a.model_type, a.name)}
        if unknown := sorted(set(options.only) - known):
            parser.error(f"no such architecture: {', '.join(unknown)}")
        architectures = [a for a in everything if {a.model_type, a.name} & set(options.only)]
    results = kept(options.json, everything) if options.only else {}
    with ThreadPoolExecutor(options.jobs) as pool:
        for result in pool.map(limited, architectures):
            print(line(result), file=sys.stderr, flush=True)
            results[result.architecture] = result
            if options.json:
                options.json.write_text(document(results, excluded))
    if options.write_docs:
        if missing := {a.name for a in everything} - set(results):
            parser.error(f"--write-docs wants all architectures; missing: {sorted(missing)}")
        (DOCS / "coverage.json").write_text(document(results, excluded))
        before = (DOCS / "coverage.md").read_text()
        training = "\n" + before[before.index(TRAINING) :] if TRAINING in before else ""
        (DOCS / "coverage.md").write_text(page(results, excluded) + training)
    levels = Counter(result.level for result in results.values())
    print(f"{len(results)} architectures: {dict(levels)}")
    return int(levels["failed"] > 0)


def kept(file: Path | None, architectures: list[Architecture]) -> dict[str, Result]:
    """The results of an earlier run for architectures that are still listed."""
    if file is None or not file.exists():
        return {}
    rows = json.loads(file.read_text())["results"]
    found = [Result(**row) for row in rows]
    names = {a.name for a in architectures}
    return {result.architecture: result for result in found if result.architecture in names}


def document(results: dict[str, Result], excluded: list[Excluded]) -> str:
    data = {
        "versions": versions(),
        "machine": machine(),
        "results": [dataclasses.asdict(results[name]) for name in sorted(results)],
        "excluded": [dataclasses.asdict(e) for e in excluded],
    }
    return json.dumps(data, indent=1) + "\n"


def quiet() -> None:
    """Advice of transformers to authors of configs, and torch's accounts of failed exports."""
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)


def limited(architecture: Architecture) -> Result:
    """`examine` in a forked process: what is imported stays, and a crash stays in it."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(sender, architecture))
    start = time.monotonic()
    process.start()
    sender.close()
    try:
        if not receiver.poll(TIME_LIMIT):
            return failed(architecture, f"not done after {TIME_LIMIT} s", TIME_LIMIT)
        return receiver.recv()
    except EOFError:
        process.join()
        fault = f"the process ended with status {process.exitcode}"
        return failed(architecture, fault, time.monotonic() - start)
    finally:
        process.kill()
        process.join()


def _send(sender, architecture: Architecture) -> None:
    sender.send(examine(architecture))


def line(result: Result) -> str:
    words = f"{result.seconds:6.1f} s  {result.level:10}  {result.architecture}"
    return f"{words}  {result.reason}" if result.reason else words


def versions() -> dict[str, str]:
    import torch
    import transformers

    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def machine() -> str:
    return f"{platform.system()} {platform.machine()}, {os.cpu_count()} processors"


def page(results: dict[str, Result], excluded: list[Excluded]) -> str:
    tools = ", ".join(f"{name} {version}" for name, version in versions().items())
    minutes = sum(result.seconds for result in results.values()) / 60
    rows = [results[name] for name in sorted(results)]
    return render(rows, excluded, f"{tools}; {machine()}; {minutes:.0f} minutes")


if __name__ == "__main__":
    sys.exit(main())
