"""Which architectures the runtime LoRA-trains under FSDP x EP, proved on four CPU ranks.

    python benchmarks/coverage_training.py [--only NAME ... | --missing] [--json F] [--write-docs]

Every architecture of docs/coverage.md is built tiny with random weights, saved under its released
names, and taken through `adapt validate`'s own proofs on four gloo ranks in float32 (EP 2 x FSDP 2
where it has experts, FSDP 4 where not), LoRA on every part that it has: the weights against
transformers' from_pretrained, three steps against one process, the adapter in stock PEFT. Then the
merged checkpoint, loaded by transformers, against base + adapter in PEFT. A class that transformers
itself does not run on token ids is not taken further. `--only` takes model types or class names;
the file's results of the others stay. `--missing` takes what the file does not have: a sweep that
was stopped goes on. A launch serves many architectures; one that ends or hangs it is named, and the
next launch goes on behind it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

RANKS = 4
LAUNCH = 6  # architectures
TIME_LIMIT = 90  # seconds an architecture
LARGEST = 30_000_000  # parameters of what still counts as tiny
DOCS = ROOT / "docs"
BEGIN, END = "<!-- training: begin -->", "<!-- training: end -->"
PROOFS = (
    "weights_equal_single_process",
    "ep_invariance_loss",
    "ep_invariance_gradients",
    "ep_invariance_norm",
    "ep_invariance_update",
    "replicas_equal",
    "adapters_moved",
    "peft_round_trip",
    "merged_equals_base_plus_adapter",
)


@dataclasses.dataclass
class Row:
    architecture: str
    model_type: str
    ep: int = 0
    targets: list[str] = dataclasses.field(default_factory=list)
    proofs: dict[str, bool] = dataclasses.field(default_factory=dict)
    worst: float = 0.0
    """Largest relative distance of a gradient from one process."""
    reason: str = ""
    """Why it was not trained, or which proofs failed."""
    seconds: float = 0.0

    @property
    def proved(self) -> bool:
        return set(PROOFS) <= set(self.proofs) and all(self.proofs[p] for p in PROOFS)


# -------------------------------------------------------------------------------- preparation


def prepare(architecture: Any, folder: Path) -> Row:
    """A run directory for a tiny model, or a row that says why there is none."""
    import torch

    from analyzers import analyze
    from analyzers.coverage import write_tiny
    from analyzers.models import build_on_meta, load_config
    from runtime.experts import experts_of
    from runtime.experts.lists import stack_expert_lists
    from strategies.schema import Lora
    from tests.runtime.runs import plan_for, write_run

    row = Row(architecture.name, architecture.model_type)
    model = folder / "model"
    try:
        write_tiny(architecture, model)
        still(model / "config.json")
        meta = build_on_meta(load_config(model))
        count = sum(p.numel() for p in meta.parameters())
        if count > LARGEST:
            row.reason = f"its tiny form still has {count / 1e9:.1f} B parameters"
            return row
        torch.manual_seed(0)
        built = type(meta)._from_config(meta.config, dtype=torch.float32)
        for name, parameter in built.named_parameters():
            drawn = parameter.ndim > 1 and not re.search(r"A_log|position", name)
            # What starts at zero may keep whole layers without a gradient.
            if drawn or not parameter.any():
                torch.nn.init.normal_(parameter, std=0.05)
        if fault := stock_fault(built):
            row.reason = fault
            return row
        built.save_pretrained(model)
        analysis = analyze(model)
        parts = {x.part for b in analysis.blocks for x in b.linears}
        if analysis.experts:
            stack_expert_lists(meta, analysis.experts.count)
        counts = [experts.num_experts for experts in experts_of(meta).values()]
        row.ep = math.gcd(2, *counts) if counts else 1
        row.targets = ["attention"] if "mixer" in parts else []
        row.targets += [t for t in ("shared_experts", "dense", "latent_projection") if t in parts]
        row.targets += ["routed_experts"] if experts_of(meta) else []
        if not row.targets:
            row.reason = "has no linear layer that the analysis names"
            return row
        plan = plan_for(RANKS, ep=row.ep, sequence_length=64)
        lora = Lora(targets=row.targets, rank=4)  # type: ignore[arg-type]
        write_run(folder, model, plan, analysis, lora=lora, data=None)
    except Exception as e:  # a sweep goes on whatever a class raises
        row.reason = _in_a_line(e)
    return row


def stock_fault(model: Any) -> str:
    """Why transformers' own model gives no logits for token ids alone, as training has them; empty
    where it does."""
    import torch

    name, config = type(model).__name__, model.config
    if type(model).forward is torch.nn.Module.forward:
        return "transformers' class has no forward pass: it generates through its parts"
    ids = torch.randint(0, config.get_text_config().vocab_size, (2, 64))
    try:
        with torch.no_grad():
            output = model.train()(input_ids=ids, use_cache=False)
    except Exception as e:  # a sweep goes on whatever a class raises
        kind = "an encoder-decoder whose decoder wants ids of its own; " * config.is_encoder_decoder
        return f"{kind}transformers' own {name} does not run on token ids alone: {_in_a_line(e)}"
    if getattr(output, "logits", None) is None:
        return "has no head for language: it gives hidden states, of which there is no loss"
    return ""


def still(file: Path) -> None:
    """Turns off, in a config, what the model's own code draws at random while it trains."""

    def quiet(value: Any) -> Any:
        if isinstance(value, list):
            return [quiet(v) for v in value]
        if not isinstance(value, dict):
            return value
        drawn = re.compile("drop(out|path)|layer_?drop|jitter")
        off = {
            k: type(v)(0) for k, v in value.items() if drawn.search(k) and type(v) in (int, float)
        }
        return {k: quiet(v) for k, v in value.items()} | off

    file.write_text(json.dumps(quiet(json.loads(file.read_text())), indent=1))


def _in_a_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


# --------------------------------------------------------------------------------------- ranks


def run_ranks(folders: list[Path]) -> None:
    """What each rank runs: the proofs of one run directory after another."""
    import torch.distributed as dist

    from runtime.build import Documents, process_group
    from runtime.validation import validate_rank

    _quiet()
    with process_group() as device:
        for folder in folders:
            (folder / "started").touch()
            try:
                validate_rank(Documents.read(folder), device)
                if dist.get_rank() == 0:
                    check_merged(folder)
            except Exception as e:
                (folder / f"failed-{dist.get_rank()}").write_text(_in_a_line(e))
                raise
            dist.barrier()
            (folder / "done").touch()


def check_merged(folder: Path) -> None:
    """The merged checkpoint, loaded by transformers, has the weights of PEFT's own merge."""
    import torch
    from peft import PeftModel

    from analyzers.models import load_config, model_class
    from runtime.build import Documents
    from runtime.merge import merge

    adapter = folder / "validate" / "adapter"
    merge(Documents.read(folder), folder / "merged", adapter)
    cls: Any = model_class(load_config(folder / "model"))
    kwargs = {"dtype": torch.float32, "local_files_only": True}
    base, found = (cls.from_pretrained(folder / n, **kwargs) for n in ("model", "merged"))
    before = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    adapted: Any = PeftModel.from_pretrained(base, str(adapter))
    expected, found = adapted.merge_and_unload().state_dict(), found.state_dict()
    apart = {n: float((t - found[n]).abs().max()) for n, t in expected.items() if t.numel()}
    moved = sum(not torch.equal(t, before[n]) for n, t in expected.items())
    worst = max(apart, key=apart.__getitem__)
    result = {
        "detail": f"{worst} is {apart[worst]:.1e} from PEFT's merge, which changes {moved} tensors",
        "passed": expected.keys() == found.keys() and apart[worst] < 1e-6 and moved > 0,
    }
    (folder / "merged.json").write_text(json.dumps(result))


def launch(rows: list[Row], work: Path) -> None:
    """Runs the proofs of some prepared architectures and fills their rows."""
    left = list(rows)
    while left:
        folders = [str(work / row.architecture) for row in left]
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(RANKS), __file__, "--ranks", *folders]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        process = subprocess.Popen(
            command,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=(work / "stderr").open("w"),
            start_new_session=True,
        )
        try:
            process.wait(TIME_LIMIT * len(left))
        except subprocess.TimeoutExpired:
            pass
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        while left:
            row = left.pop(0)
            folder = work / row.architecture
            done = (folder / "done").exists()
            collect(row, folder, done)
            print(line(row), file=sys.stderr, flush=True)
            shutil.rmtree(folder)
            if not done:
                break  # this one ended the launch


def collect(row: Row, folder: Path, done: bool) -> None:
    faults = sorted(folder.glob("failed-*"))
    if not done:
        row.reason = faults[0].read_text() if faults else f"not done after {TIME_LIMIT} s"
        return
    times = [(folder / mark).stat().st_mtime for mark in ("started", "done")]
    row.seconds = round(times[1] - times[0], 1)
    checks = json.loads((folder / "validation.json").read_text())["checks"]
    merged = json.loads((folder / "merged.json").read_text())
    row.proofs = {c["name"]: c["passed"] for c in checks if c["name"] in PROOFS}
    row.proofs["merged_equals_base_plus_adapter"] = merged["passed"]
    details = {c["name"]: c["detail"] for c in checks} | {PROOFS[-1]: merged["detail"]}
    row.worst = max((c["measured"] for c in checks if c["name"] == PROOFS[2]), default=0.0)
    failed = [p for p in PROOFS if not row.proofs.get(p)]
    row.reason = "; ".join(f"{p}: {details.get(p)}" for p in failed)[:300]


# ---------------------------------------------------------------------------------------- page


def render(rows: list[Row], unrun: list[str]) -> str:
    """The section of docs/coverage.md."""
    proved = [r for r in rows if r.proved]
    tools = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "peft"))
    lines = [
        BEGIN,
        "## Trained with LoRA under FSDP2 and expert parallelism",
        "",
        "Made by `python benchmarks/coverage_training.py --write-docs`; do not edit.",
        "",
        f"**{len(proved)} of {len(rows)} architectures, {sum(r.ep > 1 for r in proved)} of them",
        f"with adapted experts under EP 2 x FSDP 2.** {tools}; four gloo ranks, float32.",
        "",
        "Each row passed all of these proofs: every weight bit-equal to transformers'",
        "`from_pretrained` in one process; three steps whose loss, adapter gradients, norm and",
        "update are those of one process (1e-5); replicas bit-equal; every adapter moved; the",
        "saved adapter in stock PEFT on the stock model gives the same logits; the merged",
        "checkpoint, loaded by transformers, has the weights of PEFT's own merge (1e-6). Dropout",
        "and jitter of the models themselves are off. [Layers that are never adapted](adapters.md)",
        "are left out. `worst` is the largest relative distance of a gradient from one process.",
        "",
        "| architecture | model type | ep | adapters on | worst | seconds |",
        "|---|---|--:|---|--:|--:|",
    ]
    for r in proved:
        cells = [r.architecture, r.model_type, str(r.ep), ", ".join(r.targets)]
        lines.append(f"| {' | '.join([*cells, f'{r.worst:.0e}', f'{r.seconds:.0f}'])} |")
    lines += [
        "",
        "### Not proved",
        "",
        "| architecture | why |",
        "|---|---|",
    ]
    cleaned = {r.architecture: r.reason.replace("|", "\\|") for r in rows if not r.proved}
    lines += [f"| {name} | {reason} |" for name, reason in cleaned.items()]
    if unrun:
        lines += ["", f"Not run in this sweep: {', '.join(unrun)}."]
    return "\n".join([*lines, END]) + "\n"


def write_docs(rows: list[Row], unrun: list[str]) -> None:
    page = DOCS / "coverage.md"
    text = page.read_text()
    if BEGIN in text:
        text = text[: text.index(BEGIN)] + text[text.index(END) + len(END) + 1 :]
    page.write_text(text.rstrip("\n") + "\n\n" + render(rows, unrun))


def line(row: Row) -> str:
    state = "proved" if row.proved else "no"
    return f"{row.seconds:6.1f} s  {state:7} ep {row.ep}  {row.architecture}  {row.reason}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--only", nargs="+", default=[], metavar="NAME")
    which.add_argument("--missing", action="store_true")
    parser.add_argument("--json", type=Path, default=DOCS / "coverage-training.json")
    parser.add_argument("--write-docs", action="store_true")
    parser.add_argument("--ranks", nargs="+", type=Path, help=argparse.SUPPRESS)  # what a rank runs
    given = parser.parse_args()
    if given.ranks:
        run_ranks(given.ranks)
        return 0
    from analyzers.coverage import enumerate_architectures

    _quiet()
    everything, _ = enumerate_architectures()
    kept = json.loads(given.json.read_text()) if given.json.exists() else []
    rows = {row["architecture"]: Row(**row) for row in kept}
    names = set(given.only) or {
        a.name for a in everything if not given.missing or a.name not in rows
    }
    chosen = [a for a in everything if {a.name, a.model_type} & names]
    for start in range(0, len(chosen), LAUNCH):
        with tempfile.TemporaryDirectory() as work:
            part = [prepare(a, Path(work) / a.name) for a in chosen[start : start + LAUNCH]]
            for row in part:
                if row.reason:
                    print(line(row), file=sys.stderr, flush=True)
            launch([row for row in part if not row.reason], Path(work))
        rows |= {row.architecture: row for row in part}
        ordered = [rows[a.name] for a in everything if a.name in rows]
        given.json.write_text(json.dumps([dataclasses.asdict(r) for r in ordered], indent=1) + "\n")
    ordered = [rows[a.name] for a in everything if a.name in rows]
    if given.write_docs:
        write_docs(ordered, [a.name for a in everything if a.name not in rows])
    print(f"{sum(r.proved for r in ordered)} of {len(ordered)} proved")
    return 0


def _quiet() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)


if __name__ == "__main__":
    sys.exit(main())
