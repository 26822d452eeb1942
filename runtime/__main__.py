"""`torchrun ... -m runtime RUN_DIR --stage train|validate`: what each rank runs."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import NoReturn

from analyzers.errors import AdaptError
from runtime.launch import ERROR_LINE, die_with_parent


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m runtime", description=__doc__)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--stage", choices=["train", "validate"], default="train")
    parser.add_argument("--plan", type=Path, help="another plan than RUN_DIR/plan.json")
    parser.add_argument(
        "--profile",
        type=int,
        default=0,
        metavar="STEPS",
        help="trace so many steps of the training on rank 0, to RUN_DIR/train/profile",
    )
    arguments = parser.parse_args()
    die_with_parent()

    from runtime.build import Documents, process_group

    try:
        documents = Documents.read(arguments.run_dir, arguments.plan)
        with process_group() as device:
            if arguments.stage == "train":
                from runtime.training import train_rank

                train_rank(documents, device, profile_steps=arguments.profile)
            else:
                from runtime.validation import validate_rank

                validate_rank(documents, device)
    except AdaptError as e:
        print(f"{ERROR_LINE} {e.exit_status}: {e}", file=sys.stderr, flush=True)
        return e.exit_status
    return 0


def leave(status: int) -> NoReturn:
    """Ends this rank without tearing the interpreter down.

    While Python finalises, a thread of gloo or autograd that asks for the GIL is unwound by force,
    which C++ answers with abort(): a rank that had done its work then counts as failed, once in
    some dozens of runs (python/cpython#87135).
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    leave(main())
