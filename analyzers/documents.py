"""How every document of the product is read and written.

Inside the product a document is a frozen dataclass; at the file boundary pydantic checks it. A file
is replaced as a whole or not at all, so a reader never sees half of one.
"""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from pathlib import Path
from typing import Any, TypeVar, dataclass_transform

from analyzers.errors import InputError

T = TypeVar("T")


@dataclass_transform(frozen_default=True, kw_only_default=True)
def document(cls: type[T]) -> type[T]:
    """A frozen, keyword-only dataclass whose unknown keys are refused when it is read from a file.

    A plain dataclass: pydantic is imported only when a file is read or written.
    """
    made = dataclasses.dataclass(frozen=True, kw_only=True)(cls)
    made.__pydantic_config__ = {"extra": "forbid"}  # type: ignore[attr-defined]
    return made


def write_text(path: str | Path, text: str) -> Path:
    """Writes `text` to `path` atomically: a temporary file in the same folder, then a rename.

    Raises InputError when the folder cannot be written.
    """
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fd, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as e:
        fault = f"cannot be written: {e.strerror}"
        raise InputError(path, fault=fault, fix="choose another folder") from e
    try:
        with os.fdopen(fd, "w", encoding="utf-8") as f:
            f.write(text)
            f.flush()
            os.fsync(f.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return path


def to_data(document: Any) -> Any:
    """The document as plain JSON data."""
    from pydantic import TypeAdapter

    return TypeAdapter(type(document)).dump_python(document, mode="json")


def to_json(document: Any) -> str:
    return json.dumps(to_data(document), indent=2, ensure_ascii=False) + "\n"


def write_document(document: Any, path: str | Path) -> Path:
    """Writes a dataclass document as JSON, atomically."""
    return write_text(path, to_json(document))


def read_document(cls: type[T], path: str | Path) -> T:
    """Reads and checks a JSON document.

    Raises InputError that names the file, the field and the fault.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as e:
        raise InputError(path, fault="does not exist", fix="run the stage that writes it") from e
    except (OSError, UnicodeDecodeError) as e:
        raise InputError(path, fault=f"cannot be read: {e}") from e
    try:
        data = json.loads(text)
    except json.JSONDecodeError as e:
        raise InputError(path, field=f"line {e.lineno}", fault=f"broken JSON: {e.msg}") from e
    return from_data(cls, data, path)


def from_data(cls: type[T], data: Any, path: str | Path, *, fix: str | None = None) -> T:
    """Checks plain data (from JSON or YAML) against a dataclass; unknown keys are refused."""
    from pydantic import TypeAdapter, ValidationError

    try:
        return TypeAdapter(cls).validate_python(data)
    except ValidationError as e:
        first = e.errors(include_url=False)[0]
        field = ".".join(str(part) for part in first["loc"]) or None
        raise InputError(path, field=field, fault=first["msg"], fix=fix) from e
