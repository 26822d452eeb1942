"""Reading files that nobody vouches for: bounded, without code, and with the line of each fault."""

from __future__ import annotations

import difflib
import json
import re
import types
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, RootModel, ValidationError

from analyzers.errors import InputError

M = TypeVar("M", bound=BaseModel)
Location = tuple[int | str, ...]

MAX_DEPTH = 32


def read_text(path: Path, limit: int, *, missing: str, larger: str) -> str:
    """The text of a file of at most `limit` bytes.

    Raises InputError when it does not exist (with the fix `missing`), is a folder or a device, is
    larger (with the fix `larger`), or is not UTF-8.
    """
    try:
        if path.is_dir():
            raise InputError(path, fault="is a folder, not a file", fix="name the file itself")
        if path.exists() and not path.is_file():
            raise InputError(path, fault="is not a regular file", fix="name a file on disk")
        with path.open("rb") as f:
            raw = f.read(limit + 1)
    except FileNotFoundError as e:
        raise InputError(path, fault="does not exist", fix=missing) from e
    except (OSError, ValueError) as e:
        fault = getattr(e, "strerror", None) or str(e)
        raise InputError(path, fault=f"cannot be read: {fault}", fix="check the path") from e
    if len(raw) > limit:
        raise InputError(path, fault=f"is larger than {limit // 1024} KiB", fix=larger)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as e:
        line = raw[: e.start].count(b"\n") + 1
        fix = "save it as UTF-8"
        raise InputError(f"{path}:{line}", fault="is not UTF-8 text", fix=fix) from e


@dataclass(frozen=True)
class YamlFile:
    """A YAML file's values, and the line that each stands on."""

    path: Path
    data: Any
    root: yaml.Node | None

    def error(self, location: Location, *, fault: str, fix: str | None = None) -> InputError:
        """An error at a key path such as `("tiers", 0, "size")`."""
        line = self._line(location)
        where = f"{self.path}:{line}" if line else self.path
        return InputError(where, field=key_path(location) or None, fault=fault, fix=fix)

    def checked(self, model: type[M]) -> M:
        """The values as `model`. Raises InputError for the first fault."""
        try:
            return model.model_validate(self.data)
        except ValidationError as e:
            raise self._as_input_error(e, model) from e
        except RecursionError as e:
            raise InputError(self.path, fault="broken YAML: nested too deeply") from e

    def _line(self, location: Location) -> int | None:
        """Of the innermost part of the path that the file has."""
        node, mark = self.root, None
        for part in location:
            if isinstance(node, yaml.MappingNode):
                pairs = [(k, v) for k, v in node.value if getattr(k, "value", None) == str(part)]
                if not pairs:
                    break
                mark, node = pairs[0][0].start_mark, pairs[0][1]
            elif isinstance(node, yaml.SequenceNode) and isinstance(part, int):
                if part >= len(node.value):
                    break
                node = node.value[part]
                mark = node.start_mark
            else:
                break
        return mark.line + 1 if mark else None

    def _as_input_error(self, error: ValidationError, model: type[BaseModel]) -> InputError:
        faults = error.errors(include_url=False)
        # A misspelt key is also a missing one: the spelling is what has to be mended.
        first = next((f for f in faults if f["type"] == "extra_forbidden"), faults[0])
        location = tuple(part for part in first["loc"] if not _is_branch(part))
        if first["type"] == "extra_forbidden":
            known = _known_keys(model, location[:-1])
            close = difflib.get_close_matches(str(location[-1]), known, n=1)
            fix = f"did you mean '{close[0]}'?" if close else f"known keys: {', '.join(known)}"
            return self.error(location, fault="unknown key", fix=fix)
        fault, fix = _explained(first["type"], first["msg"], first["input"], first.get("ctx", {}))
        return self.error(location, fault=fault, fix=fix)


_SIGNS = {"greater_than": ">", "greater_than_equal": ">=", "less_than_equal": "<="}


def _explained(kind: str, message: str, value: Any, context: dict[str, Any]) -> tuple[str, str]:
    """Fault and fix of one of pydantic's errors."""
    found = shown(value)
    if kind == "missing":
        return "is missing", "add this key"
    if kind in _SIGNS:
        limit = next(iter(context.values()))
        limit = int(limit) if limit == int(limit) else limit
        return f"must be {_SIGNS[kind]} {limit}, found {found}", "correct the number"
    if kind == "literal_error":
        words = re.findall(r"'([^']+)'", context["expected"])
        close = difflib.get_close_matches(str(value), words, n=1)
        fix = f"one of: {context['expected']}"
        return f"{found} is not known", f"did you mean '{close[0]}'? {fix}" if close else fix
    if kind == "string_pattern_mismatch":
        return f"{found} is not a name", "use letters, digits, '-', '_', '.' and '+'"
    if kind in ("too_short", "string_too_short"):
        return "is empty", "give at least one entry"
    if kind in ("too_long", "string_too_long"):
        return f"is longer than {context['max_length']}", "shorten it"
    return f"{message.lower()}, found {found}", "correct the value"


def read_yaml(path: Path, limit: int, *, missing: str, larger: str) -> YamlFile:
    """Reads YAML as its 1.2 core schema has it: no tags, no aliases, no repeated keys, `010` and
    `no` are words. Raises InputError that names the line."""
    return parse_yaml(path, read_text(path, limit, missing=missing, larger=larger))


def parse_yaml(path: Path, text: str) -> YamlFile:
    try:
        loader = _PlainLoader(text)
        root = loader.get_single_node()
        data = None if root is None else loader.construct_document(root)
    except yaml.MarkedYAMLError as e:
        mark = e.problem_mark or e.context_mark
        where = f"{path}:{mark.line + 1}" if mark else path
        fault = f"broken YAML: {' '.join(str(e.problem or e.context).split())[:200]}"
        raise InputError(where, fault=fault, fix="mend that line") from e
    except (yaml.YAMLError, ValueError, TypeError) as e:
        fault = f"broken YAML: {' '.join(str(e).split())[:200]}"
        raise InputError(path, fault=fault, fix="save it as plain text") from e
    return YamlFile(path, data, root)


class _PlainLoader(yaml.SafeLoader):
    """Safe YAML without aliases (they can grow without bound) and without repeated keys."""

    yaml_implicit_resolvers: typing.ClassVar[dict] = {}
    depth = 0

    def compose_node(self, parent, index):
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise _problem("anchors and aliases are not accepted", event.start_mark)
        if getattr(event, "tag", None):
            raise _problem("tags are not accepted", event.start_mark)
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise _problem("nested too deeply", event.start_mark)
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_mapping(self, node, deep=False):
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise _problem("a key must be a word", key.start_mark)
            if key.value in seen:
                raise _problem(f"the key {shown(key.value)} is there twice", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)

    def construct_yaml_int(self, node):
        if len(node.value) > 30:
            raise _problem(f"the number {shown(node.value)} is too long", node.start_mark)
        return int(node.value)


NUMBER = (
    r"[-+]?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?"
    r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
)
_CORE = [
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?(?:0|[1-9][0-9]*)", list("-+0123456789")),
    ("float", NUMBER, list("-+.0123456789")),
]
for _tag, _pattern, _first in _CORE:
    _PlainLoader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern})$"), _first
    )
_PlainLoader.add_constructor("tag:yaml.org,2002:int", _PlainLoader.construct_yaml_int)


def _problem(text: str, mark: yaml.Mark) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=text, problem_mark=mark)


def read_json(path: Path, text: str) -> Any:
    """Raises InputError that names the line."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as e:
        fault, fix = f"broken JSON: {e.msg.lower()}", "mend that line"
        raise InputError(f"{path}:{e.lineno}", fault=fault, fix=fix) from e
    except (RecursionError, ValueError) as e:
        fault = "broken JSON: nested too deeply or a huge number"
        raise InputError(path, fault=fault, fix="give the topology alone") from e


def _is_branch(part: int | str) -> bool:
    """pydantic names the member of a union that failed: no key of the file."""
    return isinstance(part, str) and (part.startswith(("literal[", "dict[")) or part == "[key]")


def _known_keys(model: type[BaseModel], location: Location) -> list[str]:
    """The keys that `model` takes at a path."""
    if issubclass(model, RootModel):
        model = _model_inside(model.model_fields["root"].annotation) or model
    for part in location:
        fields = {f.alias or n: f.annotation for n, f in model.model_fields.items()}
        if isinstance(part, str) and part in fields:
            model = _model_inside(fields[part]) or model
    return [f.alias or name for name, f in model.model_fields.items()]


def _model_inside(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and not isinstance(annotation, types.GenericAlias):
        return annotation if issubclass(annotation, BaseModel) else None
    inner = (_model_inside(a) for a in typing.get_args(annotation))
    return next((m for m in inner if m is not None), None)


def key_path(location: Location) -> str:
    """`("tiers", 0, "size")` -> `tiers[0].size`."""
    text = ""
    for part in location:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            name = part if part.isidentifier() else shown(part)
            text += f".{name}" if text else name
    return text


def shown(value: Any) -> str:
    """A value of the file on one short line."""
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
