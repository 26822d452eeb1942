"""A model's name in a published table -> the shape that is meant."""

from __future__ import annotations

import functools
import re
from importlib import resources

import yaml

from analyzers.documents import document, from_data


@document
class Named:
    names: str
    """Pattern that the whole plain name must match."""
    shape: str
    """Name in `shapes`."""
    towers: bool = False
    """Images or sound are part of the run, which the planner does not price."""


@functools.cache
def known_models() -> tuple[Named, ...]:
    where = resources.files("strategies.calibration") / "models.yaml"
    data = yaml.safe_load(where.read_text(encoding="utf-8"))
    return tuple(from_data(Named, entry, "models.yaml") for entry in data)


def plain(name: str) -> str:
    """In lower case, letters and digits only; versions and sizes in brackets are left out."""
    name = re.sub(r"\((\d\d\.\d\d|~?\d+(\.\d+)?[BT])\)", "", name)
    return re.sub(r"[^a-z0-9]", "", name.lower())


def find_model(name: str) -> Named | None:
    return next((m for m in known_models() if re.fullmatch(m.names, plain(name))), None)
