"""topo.yaml: the file's shape, and reading it without trusting it.

Units are in the keys: GB/s (1e9 bytes, one direction, per device), microseconds, GiB, TFLOPS.
"""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from analyzers.errors import InputError

MAX_FILE_BYTES = 256 * 1024
"""A description of 100,000 devices by tiers is a few kilobytes; more is not a topology."""

Positive = Annotated[float, Field(gt=0)]
Name = Annotated[str, Field(max_length=100, pattern=r"^[\w.+-][\w .+-]*$")]
Operation = Literal[
    "all_gather",
    "reduce_scatter",
    "all_reduce",
    "all_to_all",
    "all_to_all_dispatch",
    "all_to_all_combine",
]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class FabricEntry(_Strict):
    kind: Literal["switch", "clos", "fullmesh", "ring"]
    bw_gbps: Positive
    latency_us: float | None = Field(default=None, ge=0)
    efficiency: float | None = Field(default=None, gt=0, le=1)
    oversubscription: float = Field(default=1.0, ge=1)
    rails: int | None = Field(default=None, ge=1)
    link_gbps: Positive | None = None
    multicast: bool = False


class UnifiedMemoryEntry(_Strict):
    pool_gib: Positive
    load_store: bool = False
    bw_gbps: Positive


class TierEntry(_Strict):
    name: Name
    size: int = Field(ge=1, le=1_000_000)
    fabric: FabricEntry
    unified_memory: UnifiedMemoryEntry | None = None


class HostEntry(_Strict):
    mem_gib: Positive
    d2h_gbps: Positive
    share: Literal["node", "device"] = "node"


class NodesEntry(_Strict):
    names: list[str] = Field(min_length=1)


class MeasuredEntry(_Strict):
    within: str
    op: Operation
    devices: Annotated[
        list[Annotated[int, Field(ge=2)]],
        BeforeValidator(lambda v: [v] if isinstance(v, int) else v),
        Field(min_length=1),
    ]
    size_mib: list[Positive] | None = None
    ms: list[Positive] | None = None
    tokens: int | None = Field(default=None, ge=1)
    gbps: list[Positive] | None = None


class DeviceOverridesEntry(_Strict):
    memory_gib: Positive | None = None
    reserved_gib: float | None = Field(default=None, ge=0)
    memory_gbps: Positive | None = None
    launch_overhead_us: float | None = Field(default=None, ge=0)
    matmul_tflops: dict[Literal["bfloat16", "float32"], Positive] | None = None


class OverrideEntry(_Strict):
    match: str = Field(min_length=1)
    bw_scale: float | None = Field(default=None, gt=0, le=1)
    down: bool = False


class ImportEntry(_Strict):
    source: Literal["slurm", "topograph", "nccl_xml", "nvidia_smi"] = Field(alias="from")
    file: str


class TopologyFile(_Strict):
    version: Literal[1]
    name: Name
    device: str
    tiers: list[TierEntry] = Field(min_length=1)
    device_overrides: DeviceOverridesEntry | None = None
    host: HostEntry | None = None
    nodes: NodesEntry | None = None
    measured: list[MeasuredEntry] = []
    overrides: list[OverrideEntry] = []
    imports: list[ImportEntry] = Field(default=[], alias="import")


_MODEL_OF_KEY: dict[str, type[BaseModel]] = {
    "tiers": TierEntry,
    "fabric": FabricEntry,
    "unified_memory": UnifiedMemoryEntry,
    "host": HostEntry,
    "nodes": NodesEntry,
    "measured": MeasuredEntry,
    "device_overrides": DeviceOverridesEntry,
    "overrides": OverrideEntry,
    "import": ImportEntry,
}


class _PlainLoader(yaml.SafeLoader):
    """Safe YAML without aliases (they can grow without bound) and without repeated keys."""

    def compose_node(self, parent, index):
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark
            raise yaml.MarkedYAMLError(problem="aliases are not accepted", problem_mark=mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node, deep=False):
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"the key {_shown(key.value)} is there twice",
                    problem_mark=key.start_mark,
                )
            seen.add(getattr(key, "value", None) if isinstance(key, yaml.ScalarNode) else id(key))
        return super().construct_mapping(node, deep)


def read_topology(path: Path) -> TopologyFile:
    """Reads and checks the shape of a topology file.

    Raises InputError that names the file, the key path, the fault and the fix.
    """
    data = _read_yaml(path)
    if data is None:
        fix = "describe the cluster: version, name, device, tiers"
        raise InputError(path, fault="is empty", fix=fix)
    if not isinstance(data, dict):
        fault = f"must be a mapping of keys, found a {type(data).__name__}"
        raise InputError(path, fault=fault, fix="start with 'version: 1'")
    try:
        return TopologyFile.model_validate(data)
    except ValidationError as e:
        raise _as_input_error(path, e) from e


def _read_yaml(path: Path) -> Any:
    try:
        if path.is_dir():
            fix = "name the .yaml file itself"
            raise InputError(path, fault="is a folder, not a topology file", fix=fix)
        with path.open("rb") as f:
            raw = f.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError as e:
        fix = "give --cluster the path of a topology file, e.g. one of examples/clusters/"
        raise InputError(path, fault="does not exist", fix=fix) from e
    except OSError as e:
        raise InputError(path, fault=f"cannot be read: {e.strerror}") from e
    if len(raw) > MAX_FILE_BYTES:
        fault = f"is larger than {MAX_FILE_BYTES // 1024} KiB"
        raise InputError(path, fault=fault, fix="describe tiers by size instead of every device")
    try:
        return yaml.load(raw.decode("utf-8"), _PlainLoader)
    except UnicodeDecodeError as e:
        raise InputError(path, fault="is not UTF-8 text") from e
    except yaml.MarkedYAMLError as e:
        mark = e.problem_mark or e.context_mark
        field = f"line {mark.line + 1}" if mark else None
        fault = f"broken YAML: {' '.join(str(e.problem or e.context).split())}"
        raise InputError(path, field=field, fault=fault, fix="mend that line") from e
    except (yaml.YAMLError, ValueError, TypeError) as e:
        raise InputError(path, fault=f"broken YAML: {' '.join(str(e).split())[:200]}") from e
    except RecursionError as e:
        raise InputError(path, fault="broken YAML: nested too deeply") from e


def _as_input_error(path: Path, error: ValidationError) -> InputError:
    faults = error.errors(include_url=False)
    # A misspelt key is also a missing one: the spelling is what has to be mended.
    first = next((f for f in faults if f["type"] == "extra_forbidden"), faults[0])
    location = first["loc"]
    kind, context = first["type"], first.get("ctx", {})
    shown = _shown(first["input"])
    if kind == "extra_forbidden":
        known = _known_keys(location[:-1])
        close = difflib.get_close_matches(str(location[-1]), known, n=1)
        fix = f"did you mean '{close[0]}'?" if close else f"known keys: {', '.join(known)}"
        fault = "unknown key"
    elif kind == "missing":
        fault, fix = "is missing", "add this key"
    elif kind in ("greater_than", "greater_than_equal", "less_than_equal"):
        sign = {"greater_than": ">", "greater_than_equal": ">=", "less_than_equal": "<="}[kind]
        limit = next(iter(context.values()))
        limit = int(limit) if limit == int(limit) else limit
        fault, fix = f"must be {sign} {limit}, found {shown}", "correct the number"
    elif kind == "literal_error":
        fault, fix = f"{shown} is not known", f"one of: {context['expected']}"
    elif kind == "string_pattern_mismatch":
        fault, fix = f"{shown} is not a name", "use letters, digits, '-', '_', '.' and '+'"
    elif kind in ("too_short", "string_too_short"):
        fault, fix = "is empty", "give at least one entry"
    else:
        fault, fix = f"{first['msg'].lower()}, found {shown}", "correct the value"
        if kind == "float_type" and re.fullmatch(
            r"[-+]?[0-9.]+[eE][-+]?[0-9]+", str(first["input"])
        ):
            fix = "YAML takes an exponent as a number only with a point and a sign, e.g. 1.0e+3"
    return InputError(path, field=key_path(location), fault=fault, fix=fix)


def _known_keys(location: tuple[int | str, ...]) -> list[str]:
    key = next((part for part in reversed(location) if part in _MODEL_OF_KEY), "")
    model = _MODEL_OF_KEY.get(str(key), TopologyFile)
    return [field.alias or name for name, field in model.model_fields.items()]


def key_path(location: tuple[int | str, ...]) -> str:
    """`("tiers", 0, "size")` -> `tiers[0].size`."""
    text = ""
    for part in location:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            shown = part if part.isidentifier() else _shown(part)
            text += f".{shown}" if text else shown
    return text


def _shown(value: Any) -> str:
    """A value of the file on one short line."""
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
