"""What commands print, and the examples under their help."""

from __future__ import annotations

import json
import sys
from typing import Any

import typer


def examples(*lines: str) -> str:
    """An epilog of lines to copy, kept as they are by click's mark for unwrapped text."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)


def print_json(data: Any) -> None:
    plain = not (sys.stdout.encoding or "").lower().startswith("utf")  # \u.... is JSON anywhere
    typer.echo(json.dumps(data, indent=2, ensure_ascii=plain))


def print_json_of(document: Any) -> None:
    from analyzers.documents import to_data

    print_json(to_data(document))
