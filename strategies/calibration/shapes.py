"""The models that published runs name, as analysed: read from the package, made from their configs.

`python -m strategies.calibration.shapes [NAME ...]` analyses `models/NAME.json` again (some take a
minute) and writes `shapes/NAME.json`: the analysis without the graphs of its blocks.
"""

from __future__ import annotations

import functools
import json
import sys
import tempfile
from dataclasses import replace
from importlib import resources
from pathlib import Path

from analyzers.documents import from_data, to_data, write_text
from analyzers.schema import ModelAnalysis

FOLDER = resources.files("strategies.calibration")


def names() -> list[str]:
    return sorted(json.loads((FOLDER / "models" / "SOURCES.json").read_text(encoding="utf-8")))


@functools.cache
def shape(name: str) -> ModelAnalysis:
    """The analysis of a model of `names()`."""
    path = FOLDER / "shapes" / f"{name}.json"
    return from_data(ModelAnalysis, json.loads(path.read_text(encoding="utf-8")), str(path))


def analyzed(name: str) -> ModelAnalysis:
    """The same, analysed now from the model's config."""
    from analyzers import analyze

    with tempfile.TemporaryDirectory() as folder:
        text = (FOLDER / "models" / f"{name}.json").read_text(encoding="utf-8")
        (Path(folder) / "config.json").write_text(text, encoding="utf-8")
        found = analyze(folder)
    return replace(found, blocks=[replace(block, graph=None) for block in found.blocks])


def main(wanted: list[str]) -> None:
    for name in wanted or names():
        text = json.dumps(to_data(analyzed(name)), separators=(",", ":"), ensure_ascii=False)
        write_text(Path(str(FOLDER / "shapes" / f"{name}.json")), text + "\n")
        print(name, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
