"""Names of nodes as Slurm writes them: `gpu[01-16]`."""

from __future__ import annotations

import re
from collections.abc import Iterable

from strategies.cluster.model import MAX_DEVICES

MAX_NAME = 253
"""Of a host, RFC 1123."""

_RANGE = re.compile(r"\[([^\[\]]*)\]")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_LAST_NUMBER = re.compile(r"(.*?)(\d+)(\D*)")


def expand_hostlist(pattern: str) -> list[str]:
    """`gpu[01-03,7]` -> gpu01 gpu02 gpu03 gpu7, as Slurm reads it; several brackets multiply.

    Raises ValueError for a pattern that is no hostlist or names more than MAX_DEVICES nodes.
    """
    names = [""]
    for i, piece in enumerate(_RANGE.split(pattern)):
        values = [piece] if i % 2 == 0 else _expand_ranges(piece, pattern)
        if len(names) * len(values) > MAX_DEVICES:
            raise ValueError(f"'{pattern}' names more than {MAX_DEVICES:,} nodes")
        names = [name + value for name in names for value in values]
    if not all(_NAME.fullmatch(name) for name in names):
        raise ValueError(f"'{pattern}' is not a hostlist")
    return names


def _expand_ranges(text: str, pattern: str) -> list[str]:
    values: list[str] = []
    for item in text.split(","):
        match = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", item.strip())
        if match is None:
            raise ValueError(f"'{pattern}' has a bad range '{item}'")
        first, last = match[1], match[2] or match[1]
        if int(last) < int(first):
            raise ValueError(f"'{pattern}' has a range that runs backwards: '{item}'")
        if int(last) - int(first) >= MAX_DEVICES:
            raise ValueError(f"'{pattern}' names more than {MAX_DEVICES:,} nodes")
        values += [str(n).zfill(len(first)) for n in range(int(first), int(last) + 1)]
    return values


def is_name(text: str) -> bool:
    """Whether it is one node's or switch's name, without brackets, blanks and control codes."""
    return len(text) <= MAX_NAME and _NAME.fullmatch(text) is not None


def split_hostlist(text: str) -> list[str]:
    """`n[1,3],m2` -> `n[1,3]`, `m2`: parts at the commas outside brackets."""
    parts, depth = [""], 0
    for character in text:
        depth += (character == "[") - (character == "]")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts if part.strip()]


def compress_hostlist(names: Iterable[str]) -> list[str]:
    """The shortest list of patterns that expands to the names in their order.

    Only the last number of a name is put into a range: gpu01 gpu02 gpu04 -> gpu[01-02,04].
    """
    patterns: list[str] = []
    before, after, width = "", "", 0
    runs: list[list[int]] = []

    def flush() -> None:
        if not runs:
            return
        text = ",".join(
            str(a).zfill(width) if a == b else f"{a:0{width}d}-{b:0{width}d}" for a, b in runs
        )
        single = len(runs) == 1 and runs[0][0] == runs[0][1]
        patterns.append(f"{before}{text}{after}" if single else f"{before}[{text}]{after}")
        runs.clear()

    for name in names:
        match = _LAST_NUMBER.fullmatch(name)
        if match is None or len(match[2]) > 9:
            flush()
            patterns.append(name)
            continue
        # gpu9 and gpu10 share a pattern, gpu09 and gpu10 too; gpu10 and gpu9 do not.
        same = (match[1], match[3]) == (before, after)
        if not (runs and same and match[2] == str(int(match[2])).zfill(width)):
            flush()
            before, after, width = match[1], match[3], len(match[2])
        number = int(match[2])
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    flush()
    return patterns
