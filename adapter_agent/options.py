"""Arguments and options that several commands take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ModelArg = Annotated[
    Path, typer.Argument(metavar="MODEL", help="Folder with config.json and safetensors.")
]
RunDirArg = Annotated[
    Path, typer.Argument(metavar="RUN_DIR", help="Run directory that `adapt MODEL` wrote.")
]
ClusterOpt = Annotated[
    Path, typer.Option("--cluster", metavar="TOPO.yaml", help="Description of the cluster.")
]
JsonOpt = Annotated[bool, typer.Option("--json", help="Print the result as JSON alone.")]
QuietOpt = Annotated[bool, typer.Option("--quiet", help="No progress on stderr.")]
TrustOpt = Annotated[
    bool,
    typer.Option("--trust-remote-code", help="Run Python code that the model folder brings."),
]
SequenceOpt = Annotated[
    int | None,
    typer.Option("--sequence-length", min=2, help="Tokens of a sequence; 4096 where it fits."),
]
BatchOpt = Annotated[
    int | None,
    typer.Option("--global-batch-size", min=1, help="Sequences a step over all devices."),
]
RankOpt = Annotated[
    int | None, typer.Option("--lora-rank", min=1, help="Rank of the adapters; 8 by default.")
]

SetOpt = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Any other field of job.json, e.g. lora.dropout=0.05, packing=false or "
        "'lora.targets=[attention, dense]'. Repeatable.",
    ),
]
FixOpt = Annotated[
    list[str] | None,
    typer.Option("--fix", metavar="KEY=N", help="Force a part of the plan, e.g. ep=2. Repeatable."),
]
