"""Which field of config.json is at fault."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

SIZE = re.compile(r"(size|dim|heads?|experts?|rank|channels|kernel|layers)$")
OTHER = ("vision_config", "audio_config", "quantization_config")


def contradicted(
    config: Mapping[str, Any], resized: Iterable[tuple[int, int]], fitting: Collection[int]
) -> str | None:
    """The field that explains most of the dimensions that differ, in words; None when none does.

    `resized` are dimensions as the config needs them and as they are stored, `fitting` those that
    agree. A field of value v explains needed = v k, stored = w k with a whole w, the same w for
    all; a field that is itself a dimension which fits explains nothing.
    """
    pairs = Counter(resized)
    votes: dict[tuple[int, int], Counter[str]] = defaultdict(Counter)
    exact: Counter[tuple[int, int]] = Counter()
    for path, value in _sizes(config):
        if value in fitting:
            continue
        for (needed, stored), times in pairs.items():
            times_value, rest = divmod(needed, value)
            if rest or not times_value or stored % times_value or not stored:
                continue
            hypothesis = (value, stored // times_value)
            votes[hypothesis][path] += times
            exact[hypothesis] += times * (times_value == 1)
    if not votes:
        return None
    best = max(votes, key=lambda h: (max(votes[h].values()), exact[h]))
    most = max(votes[best].values())
    rivals = [h for h in votes if (max(votes[h].values()), exact[h]) == (most, exact[best])]
    if len(rivals) > 1:
        return None
    paths = [path for path, count in votes[best].items() if count == most]
    return f"{' or '.join(paths[:3])} is {best[0]} there, the checkpoint has {best[1]}"


def blamed(config: Mapping[str, Any], error: BaseException) -> tuple[str, str] | None:
    """The field, and what is wrong with it, that made a class raise: the value that it looked up
    and did not know, or a size of zero by which it divided. None where no field explains it."""
    leaves = list(_leaves(config))
    if isinstance(error, KeyError) and error.args and isinstance(error.args[0], str):
        unknown = error.args[0]
        fields = [path for path, value in leaves if value == unknown]
        return (fields[0], f"'{unknown:.60}' is not known") if fields else None
    if isinstance(error, ZeroDivisionError):
        zero = zero_sizes(config)
        return (zero, "is 0") if zero else None
    return None


def zero_sizes(config: Mapping[str, Any]) -> str | None:
    """The whole numbers of a config that are 0 and may be sizes, in words."""
    zero = [p for p, n in _leaves(config) if type(n) is int and not n and SIZE.search(p)]
    return " or ".join(zero[:3]) or None


def _leaves(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, Mapping) and key not in OTHER:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _sizes(config: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """Every whole number above one of a config, by its path."""
    for path, value in _leaves(config):
        if type(value) is int and value > 1 and not path.endswith("token_id"):
            yield path, value
