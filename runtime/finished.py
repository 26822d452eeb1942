"""The command line of what is made of a finished run."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from analyzers.errors import AdaptError
from runtime.build import Documents


def command(
    name: str,
    description: str | None,
    work: Callable[[Documents, Path, Path | None], int],
    *,
    folder: str,
    made: str,
) -> int:
    """`python -m runtime.NAME RUN_DIR FOLDER [--adapter DIR]`: runs `work` and says how many
    things were `made`; returns the exit status. `folder` is the help of FOLDER."""
    parser = argparse.ArgumentParser(prog=f"python -m runtime.{name}", description=description)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("folder", type=Path, help=folder)
    parser.add_argument("--adapter", type=Path, help="another adapter than RUN_DIR/adapter")
    given = parser.parse_args()
    try:
        count = work(Documents.read(given.run_dir), given.folder, given.adapter)
    except AdaptError as e:
        print(e, file=sys.stderr)
        return e.exit_status
    print(f"{count} {made}: {given.folder}")
    return 0
