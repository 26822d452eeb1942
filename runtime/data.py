"""JSONL of examples, read and checked.

A line is one of `{"messages": [{"role": ..., "content": ...}, ...]}` (loss on what the assistant
says), `{"prompt": ..., "completion": ...}` (loss on the completion), `{"text": ...}` (loss on all).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from analyzers.errors import InputError

_HALF_PAIR = re.compile("[\ud800-\udfff]")
FORMS = "'messages', 'prompt' with 'completion', or 'text'"


def read_records(path: str | Path) -> Iterator[dict[str, Any]]:
    """The lines of the file one after another, checked. Raises InputError that names the file and
    the line."""
    path, number = Path(path), 0
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                yield _checked(line.removesuffix(b"\n"), path, number)
    except FileNotFoundError as e:
        raise InputError(path, fault="does not exist", fix="give --data a JSONL file") from e
    except OSError as e:
        raise InputError(path, fault=f"cannot be read: {e.strerror}") from e
    if number == 0:
        raise InputError(path, fault="is empty", fix="one JSON object a line")


def check_data(path: str | Path) -> int:
    """Reads and checks the whole file without a tokenizer; returns the number of examples."""
    return sum(1 for _ in read_records(path))


def _checked(line: bytes, path: Path, number: int) -> dict[str, Any]:
    field = f"line {number}"
    if not line.strip():
        raise InputError(path, field=field, fault="is empty", fix="remove it")
    try:
        record = json.loads(line)
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as e:
        fault = f"broken JSON: {getattr(e, 'msg', e)}"
        raise InputError(path, field=field, fault=fault, fix="one JSON object a line") from e
    if not isinstance(record, dict):
        raise InputError(path, field=field, fault="is not a JSON object", fix=f"with {FORMS}")
    if "messages" in record:
        messages = record["messages"]
        if not isinstance(messages, list) or not all(
            isinstance(m, dict) and isinstance(m.get("role"), str) and _is_text(m.get("content"))
            for m in messages
        ):
            fault = "'messages' must be a list of objects with text in 'role' and 'content'"
            fix = 'such as [{"role": "user", "content": "..."}]'
            raise InputError(path, field=field, fault=fault, fix=fix)
        if not any(m["role"] == "assistant" for m in messages):
            raise InputError(path, field=field, fault="has no assistant message to learn from")
    elif "prompt" in record or "completion" in record:
        if not (_is_text(record.get("prompt")) and _is_text(record.get("completion"))):
            raise InputError(path, field=field, fault="needs text in 'prompt' and 'completion'")
    elif not _is_text(record.get("text")):
        raise InputError(path, field=field, fault="has nothing to learn from", fix=f"add {FORMS}")
    return record


def _is_text(value: object) -> bool:
    """Text that is not empty and can be encoded: JSON also spells halves of surrogate pairs."""
    return isinstance(value, str) and bool(value) and not _HALF_PAIR.search(value)
