"""Helpers for columns: distinct rows, and the analysis' symbolic quantities over lengths."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import fields, replace

import numpy as np

from analyzers.schema import Work
from strategies.candidates import DEFAULTS, Candidates, Column

MIN_ROWS = 4096
"""Fewer rows are cheaper to evaluate than to compare."""
SMALL = 1 << 20
"""Columns of smaller integers are coded through a table."""


def distinct(c: Candidates, names: Iterable[str]) -> tuple[Candidates, slice | np.ndarray]:
    """The rows that differ in these columns, and where each row of `c` is among them.

    The other columns of what is returned are their defaults: nothing may read them.
    """
    if len(c) < MIN_ROWS:
        return c, slice(None)
    key = np.zeros(len(c), dtype=np.int64)
    for name in names:
        codes, count = codes_of(getattr(c, name))
        if count > 1:
            if key.max() * count > np.iinfo(np.int64).max // 2:
                key = codes_of(key)[0]
            key = key * count + codes
    codes, count = codes_of(key)
    first = np.empty(count, dtype=np.int64)
    first[codes[::-1]] = np.arange(len(c) - 1, -1, -1)
    kept = set(names)
    rows = {
        f.name: getattr(c, f.name)[first] if f.name in kept else np.full(count, DEFAULTS[f.name])
        for f in fields(c)
    }
    return replace(c, **rows), codes


def codes_of(column: Column) -> tuple[np.ndarray, int]:
    """Small integers that are equal where the column is, and how many there are."""
    if column.dtype == bool:
        return column.astype(np.int64), 2
    low, high = column.min(), column.max()
    if low == high:
        return np.zeros(len(column), dtype=np.int64), 1
    if np.issubdtype(column.dtype, np.integer) and high - low < SMALL:
        shifted = column - low
        seen = np.zeros(int(high - low) + 1, dtype=bool)
        seen[shifted] = True
        return (np.cumsum(seen) - 1)[shifted], int(seen.sum())
    found, codes = np.unique(column, return_inverse=True)
    return codes, len(found)


def total(columns: Iterable[Column]) -> Column:
    return functools.reduce(np.add, columns)


def at(work: Work, length: Column) -> Column:
    """`Work.at` of every length."""
    return _over(work, length, 1.0)


def causal(work: Work, length: Column) -> Column:
    """`Work.causal` of every length: half of the pairs."""
    return _over(work, length, 0.5)


def _over(work: Work, length: Column, pairs: float) -> Column:
    total = work.per_token * length
    if work.per_pair:
        total = total + pairs * work.per_pair * np.square(length, dtype=float)
    for window, value in work.per_window.items():
        reach = np.minimum(length, window)
        total = total + value * (length * reach - (1 - pairs) * np.square(reach, dtype=float))
    return total
