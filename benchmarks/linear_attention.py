"""Our linear-attention kernels against their peers, torch and the device's own floors.

    python benchmarks/linear_attention.py --output DIR [--budget SECONDS] [--members NAME,...]
        [--shapes BxTxH,...] [--peers NAME,...] [--gates NAME,...] [--parts NAME,...] [--quick]
    python benchmarks/linear_attention.py --plot DIR/linear_attention.json

Every implementation runs in a process of its own, on the same seeded inputs, and is compared with
the recurrence in float64 before it is timed; one that is wrong is reported as wrong, one that is
not ready within --peer-timeout as not ready. Medians of device events from a cold cache; extra
memory beyond inputs and results. Results are written after every row, so that a run that is cut
short keeps what it has; what the budget leaves out is named. Shapes are BxTxH, with `vHV` for
grouped value heads, `p` for packed documents and `:KxV` for other widths than 128.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from attention.implementations import NAMES, render_ours
from attention.processes import Worker, Workers, serve
from attention.report import Report, error_table, table
from attention.workload import (
    GATES,
    QUICK_SHAPES,
    SHAPES,
    Shape,
    floor_bytes,
    floor_operations,
    gates_of,
    members,
)

PARTS = ["measure", "carried", "first-call", "layer"]
AUTOTUNED = ["fla"]
LAYERS = ["transformers", "ours"]
LONG = "1x1048576x8"
UNSEEN = "2x5000x24"
LAYER = "1x8192x32"


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if options.worker:
        from attention.measure import work

        serve(work)
        return 0
    if options.plot:
        from attention.plot import plot

        print(plot(options.plot))
        return 0
    report = Report(options)
    with tempfile.TemporaryDirectory(prefix="linear-attention-") as folder:
        Benchmark(options, report, Path(folder)).run()
    print(table(report.data), error_table(report.data), sep="\n\n")
    if any("forward_ms" in row for row in report.data["rows"]):
        from attention.plot import plot

        try:
            print(plot(report.file))
        except ImportError:
            print(f"no picture: install matplotlib or plotly and use --plot {report.file}")
    mine = [row for row in report.data["rows"] if row["implementation"] == "ours"]
    mine += report.data["carried"]
    return int(any(row["status"] in ("wrong", "failed") for row in mine))


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )

    def listed(text: str) -> list[str]:
        return [part for part in text.split(",") if part]

    add = parser.add_argument
    add("--output", type=Path, default=Path("."), help="folder of the JSON, the log, the picture")
    add("--budget", type=float, default=1800.0, help="seconds for everything")
    add("--members", type=listed, help="operators of the family; all of them")
    add("--shapes", type=listed, help=f"in place of {','.join(SHAPES)}")
    add("--peers", type=listed, default=NAMES, help=f"implementations, of {','.join(NAMES)}")
    add("--gates", type=listed, default=GATES[:2], help=f"of {','.join(GATES)}")
    add("--parts", type=listed, default=PARTS, help=f"of {','.join(PARTS)}")
    add("--tokens", type=int, default=197, help="of the comparison with float64")
    add("--peer-timeout", type=float, default=300.0, help="seconds for one row")
    add("--warm-up", type=float, default=150.0, help="seconds for compiling autotuned peers first")
    add("--long", default=LONG, help="shape that is compared with pieces that carry the state")
    add("--unseen", default=UNSEEN, help="shape of the first call")
    add("--layer", default=LAYER, help="shape of the layer")
    add("--device", choices=["cuda", "cpu"], help="where to run; cuda if there is one")
    add("--backend", default="h200", help="whose kernels to render")
    add("--commit", default="", help="what to name as the measured commit; git is asked")
    add("--quick", action="store_true", help="one small shape and few repeats")
    add("--plot", type=Path, metavar="JSON", help="draw the picture of a report, and stop")
    add("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker or options.plot:
        return options
    options.shapes = options.shapes or (QUICK_SHAPES if options.quick else SHAPES)
    if options.device is None:
        import torch

        options.device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        options.members = [spec.operator for spec in members(options.members)]
        for name in (*options.shapes, options.long, options.unseen, options.layer):
            Shape.parse(name)
        for wanted, known in (
            (options.peers, NAMES),
            (options.gates, GATES),
            (options.parts, PARTS),
        ):
            if unknown := sorted(set(wanted) - set(known)):
                raise ValueError(
                    f"no such name: {', '.join(unknown)}; there are {', '.join(known)}"
                )
    except ValueError as fault:
        parser.error(str(fault))
    return options


class Benchmark:
    """The parts in their order; each row is written as it comes."""

    def __init__(self, options: argparse.Namespace, report: Report, folder: Path):
        self.options = options
        self.report = report
        self.folder = folder
        self.specs = members(options.members)
        self.made: set[tuple] = set()

    def run(self) -> None:
        parts = {
            "measure": self.measure,
            "carried": self.carried,
            "first-call": self.first_call,
            "layer": self.layer,
        }
        self.render()
        with Workers(self.start, self.report.left) as self.workers:
            self.report.set_rates(self.ask("rates", part="rates"))
            for name in self.options.parts:
                parts[name]()

    def render(self) -> None:
        named = (*self.options.shapes, self.options.long, self.options.unseen)
        for spec in self.specs:
            for shape in {Shape.parse(name).widths: Shape.parse(name) for name in named}.values():
                record = render_ours(spec, shape, self.options.backend, self.folder)
                self.report.data["kernels"].append(
                    {"member": spec.operator, "widths": shape.widths, "tuning_sha256": record}
                )

    def start(self, **environment: str) -> Worker:
        return Worker(Path(__file__).resolve(), self.report.log, environment)

    def ask(self, worker: str, **task) -> dict:
        return self.workers.ask(worker, self.task(**task), self.options.peer_timeout)

    def task(self, **fields) -> dict:
        shared = {
            "device": self.options.device,
            "folder": str(self.folder),
            "backend": self.options.backend,
            "tokens": self.options.tokens,
            "seconds": 0.1 if self.options.quick else 0.5,
        }
        return shared | fields

    def workloads(self) -> Iterator[dict]:
        """Member, gate and shape, the most wanted first."""
        for spec in self.specs:
            for gate in gates_of(spec, self.options.gates):
                for shape in self.options.shapes:
                    yield {"member": spec.operator, "gate": gate, "shape": shape}

    def small_workloads(self) -> Iterator[dict]:
        """One for each comparison with float64: they have few tokens."""
        names = {str(Shape.parse(s).small(self.options.tokens)) for s in self.options.shapes}
        for spec in self.specs:
            for gate in gates_of(spec, self.options.gates):
                for shape in sorted(names):
                    yield {"member": spec.operator, "gate": gate, "shape": shape}

    def measure(self) -> None:
        """Errors, times and memory."""
        if self.options.device == "cuda":
            self.warm_up(self.warm_up_tasks())
        for load in self.workloads():
            self.reference(load)
            for name in self.options.peers:
                row = {"implementation": name, **load}
                row |= self.ask(name, part="measure", **row)
                self.report.add("rows", row | self.floors(load))

    def reference(self, load: dict) -> None:
        """Makes the exact results that this workload's implementations are compared with, once."""
        small = load | {"shape": str(Shape.parse(load["shape"]).small(self.options.tokens))}
        key = tuple(small.values())
        if key not in self.made:
            self.made.add(key)
            self.report.add("references", small | self.ask("reference", part="reference", **small))

    def warm_up_tasks(self) -> list[dict]:
        names = [name for name in AUTOTUNED if name in self.options.peers]
        return [
            self.task(part="warm-up", implementation=name, **load)
            for load in self.small_workloads()
            for name in names
        ]

    def warm_up(self, tasks: list[dict]) -> None:
        """Compiles what autotuned peers will try, on all processors, so that their time limit goes
        to choosing. Their own choice is not kept: they choose again, alone on the device."""
        processors = os.cpu_count() or 1
        shares = max(4, processors // max(1, len(tasks)))
        waiting = [task | {"share": [i, shares]} for task in tasks for i in range(shares)]
        running: list[Worker] = []
        deadline = time.monotonic() + min(self.options.warm_up, self.report.left() / 2)
        while (waiting or running) and time.monotonic() < deadline:
            for worker in [worker for worker in running if not worker.running()]:
                running.remove(worker)
                worker.drain()
            while waiting and len(running) < processors:
                running.append(self.start(FLA_CACHE_RESULTS="0"))
                running[-1].send(waiting.pop(0), last=True)
            time.sleep(0.2)
        if late := len(waiting) + len(running):
            self.report.note(f"warm-up of autotuned peers: {late} processes were not finished")
        for worker in running:
            worker.kill()

    def floors(self, load: dict) -> dict:
        """Milliseconds, forward and both, that the measured rates allow at best."""
        rates, shape = self.report.data["rates"], Shape.parse(load["shape"])
        if rates["status"] != "right":
            return {}
        (spec,) = members([load["member"]])
        item = 2 if rates["dtype"] == "bfloat16" else 4
        moved = floor_bytes(spec, shape, load["gate"], item)
        done = floor_operations(spec, shape)
        return {
            "memory_floor_ms": [1e3 * x / rates["copy_bytes_per_s"] for x in moved],
            "matrix_floor_ms": [1e3 * x / rates["matrix_flops_per_s"] for x in done],
        }

    def carried(self) -> None:
        for spec in self.specs:
            for gate in gates_of(spec, self.options.gates):
                load = {"implementation": "ours", "member": spec.operator, "gate": gate}
                load["shape"] = self.options.long
                self.report.add("carried", load | self.ask("ours", part="carried", **load))

    def first_call(self) -> None:
        """Every implementation in a new process with empty caches, one after the other."""
        caches = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "NEMO_KDA_FUSED_BUILD_DIR")
        for spec in self.specs:
            for gate in gates_of(spec, self.options.gates):
                for name in self.options.peers:
                    load = {"implementation": name, "member": spec.operator, "gate": gate}
                    load["shape"] = self.options.unseen
                    with tempfile.TemporaryDirectory(dir=self.folder) as empty:
                        row = self.workers.ask(
                            "first call",
                            self.task(part="first-call", **load),
                            self.options.peer_timeout,
                            **dict.fromkeys(caches, empty),
                        )
                        self.workers.end("first call")
                    self.report.add("first_call", load | row)

    def layer(self) -> None:
        if self.options.device == "cuda":
            load = {"implementation": "transformers", "shape": self.options.layer}
            self.warm_up([self.task(part="warm-up", **load)])
        for name in ("reference", *LAYERS):
            load = {"implementation": name, "shape": self.options.layer}
            self.report.add("layer", load | self.ask(f"layer {name}", part="layer", **load))
            self.workers.end(f"layer {name}")


if __name__ == "__main__":
    sys.exit(main())
