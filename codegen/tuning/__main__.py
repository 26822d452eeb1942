"""Tunes operators on the device that is here.

python -m codegen.tuning kda gla --backend h200 --key-dim 128 --value-dim 128 --minutes 4
python -m codegen.tuning --list
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from analyzers.backends import load_backend
from analyzers.errors import AdaptError, InputError
from codegen.family import Spec
from codegen.members import find_spec, load_specs
from codegen.tuning.bench import Workload
from codegen.tuning.records import known_records
from codegen.tuning.tune import summary, tune


def workload(text: str) -> Workload:
    """`B1T8192H32`, with `HV` where there are more value heads."""
    found = re.fullmatch(r"B(\d+)T(\d+)H(\d+)(?:HV(\d+))?", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text} is not of the form B1T8192H32 or B1T8192H4HV32")
    batch, tokens, heads, value_heads = (int(n) if n else 0 for n in found.groups())
    value_heads = value_heads or heads
    if not (batch and tokens and heads) or value_heads % heads:
        raise argparse.ArgumentTypeError(f"{text}: sizes are positive, HV is a multiple of H")
    return Workload(batch=batch, tokens=tokens, heads=heads, value_heads=value_heads)


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m codegen.tuning", description=__doc__)
    p.formatter_class = argparse.RawDescriptionHelpFormatter
    p.add_argument("operators", nargs="*", help="e.g. kda gated_delta_rule")
    p.add_argument("--backend", default="h200", help="the device that is here")
    p.add_argument("--key-dim", type=int, default=128)
    p.add_argument("--value-dim", type=int, default=128)
    p.add_argument("--dtype", help="the backend's training dtype by default")
    p.add_argument(
        "--workloads",
        nargs="+",
        type=workload,
        default=[workload("B1T8192H8"), workload("B1T8192H32"), workload("B4T4096H32")],
        help="training steps to be fast in, one for each number of heads times sequences",
    )
    p.add_argument("--minutes", type=float, help="for each operator; the best so far is kept")
    p.add_argument("--limit", type=int, default=16, help="candidates for each chunk length")
    p.add_argument("--again", action="store_true", help="although the result is in the cache")
    p.add_argument("--output", type=Path, help="folder of records; the user's cache by default")
    p.add_argument("--list", action="store_true", help="show the known records")
    return p


def main(arguments: list[str] | None = None) -> int:
    args = parser().parse_args(arguments)
    if args.list:
        for r in known_records():
            programs = ", ".join(str(c.programs) for c in r.classes)
            print(
                f"{r.backend} {r.operator} {r.key_dim}x{r.value_dim} {r.dtype}: "
                f"{programs} heads; chunk {r.chunk}, {r.strategy}; triton {r.triton}, {r.device}"
            )
        return 0
    status = 0
    for operator in args.operators:
        try:
            tune_one(operator, args)
        except AdaptError as e:  # the other operators can still be tuned
            print(f"error: {e}", file=sys.stderr, flush=True)
            status = e.exit_status
    return status


def tune_one(operator: str, args: argparse.Namespace) -> None:
    spec = find_spec(operator)
    if not isinstance(spec, Spec):
        known = ", ".join(load_specs())
        raise InputError("operator", fault=f"'{operator}' is not known", fix=f"one of: {known}")
    tuned = tune(
        spec,
        load_backend(args.backend),
        args.key_dim,
        args.value_dim,
        args.workloads,
        dtype=args.dtype,
        minutes=args.minutes,
        limit=args.limit,
        again=args.again,
        output=args.output,
        progress=lambda line: print(line, file=sys.stderr, flush=True),
    )
    for refused in tuned.record.refused:
        print(f"refused {refused.tile}: {refused.reason}", file=sys.stderr)
    print("\n".join(summary(tuned)), flush=True)


if __name__ == "__main__":
    sys.exit(main())
