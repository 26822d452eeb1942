"""Which field of config.json a wrong shape contradicts."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

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


def _sizes(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, int]]:
    """Every whole number above one of a config, by its path."""
    for key, value in config.items():
        if isinstance(value, Mapping) and key not in OTHER:
            yield from _sizes(value, f"{prefix}{key}.")
        elif type(value) is int and value > 1 and not key.endswith("token_id"):
            yield f"{prefix}{key}", value
