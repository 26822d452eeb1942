"""`torchrun ... -m runtime RUN_DIR --stage train|validate`: what each rank runs."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from analyzers.errors import AdaptError


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m runtime", description=__doc__)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--stage", choices=["train", "validate"], default="train")
    arguments = parser.parse_args()

    from runtime.build import fail, process_group

    try:
        with process_group() as device:
            if arguments.stage == "train":
                from runtime.train import train_rank

                train_rank(arguments.run_dir, device)
            else:
                from runtime.validate import validate_rank

                validate_rank(arguments.run_dir, device)
    except AdaptError as e:
        fail(e)
        return e.exit_status
    return 0


if __name__ == "__main__":
    sys.exit(main())
