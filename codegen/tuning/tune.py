"""Tunes one operator on the device that is here, or recalls what an earlier run found."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from analyzers.backends import Backend
from analyzers.errors import InputError
from codegen.family import Spec
from codegen.members import find_spec
from codegen.schema import OperatorMap
from codegen.tuning.records import Record, content_of, known_records, recall, save
from codegen.tuning.space import Space, triton_version

TOKENS = 8192
MOST_CLASSES = 4
"""A kernel's launches stand on one line of the rendered module."""


@dataclass(frozen=True, kw_only=True)
class Tuned:
    record: Record
    path: Path | None
    """Where the record was written; None when an earlier run had found it."""


def device_here(backend: Backend) -> tuple[str, str]:
    """Type and name of the accelerator that is here.

    Raises InputError when none of the backend's kind is.
    """
    import torch

    fix = "tune on a machine with one; elsewhere the nearest shipped or cached record is used"
    if backend.triton is None or not backend.triton.num_stages:
        fault = "Triton launches there have nothing to tune"
        raise InputError("--tune", field=backend.name, fault=fault, fix="leave --tune out")
    here = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if here is None or here.type != backend.device_type:
        found = "no accelerator" if here is None else f"only {here.type}"
        raise InputError(
            "--tune", field=backend.name, fault=f"no {backend.title} is here, {found}", fix=fix
        )
    module = torch.get_device_module(here.type)
    name = module.get_device_name() if hasattr(module, "get_device_name") else here.type
    if backend.triton.backend == "cuda":
        major, minor = module.get_device_capability()
        if 10 * major + minor != backend.triton.arch:
            fault = f"the device here is an {name}, compute capability {major}.{minor}"
            raise InputError("--tune", field=backend.name, fault=fault, fix=fix)
    return here.type, name


def tune(
    spec: Spec,
    backend: Backend,
    key_dim: int,
    value_dim: int,
    workloads: list,
    *,
    dtype: str | None = None,
    minutes: float | None = None,
    limit: int = 16,
    again: bool = False,
    output: Path | None = None,
    progress: Callable[[str], None] | None = None,
) -> Tuned:
    """The record for these widths, from the user's cache or from a search.

    `workloads` (`bench.Workload`) are the training steps to be fast in, one for each number of
    programs; `minutes` bounds the search, `limit` its candidates for a chunk length. `again`
    searches although the result is known. The record goes to `output` or to the user's cache.
    Raises InputError when no device of the backend is here, ProofError when nothing passes.
    """
    from codegen.tuning.bench import Bench
    from codegen.tuning.search import search

    if len({workload.programs for workload in workloads}) > MOST_CLASSES:
        fault = f"more than {MOST_CLASSES} different numbers of heads times sequences"
        raise InputError("workloads", fault=fault, fix="leave some out: the nearest one serves")
    device, name = device_here(backend)
    triton = triton_version()
    dtype = dtype or backend.training_dtype
    content = content_of(spec, backend, triton, name)
    programs = [workload.programs for workload in workloads]
    known = recall(known_records(), content, key_dim, value_dim, dtype, programs)
    if known is not None and not again:
        return Tuned(record=known, path=None)
    space = Space(
        spec=spec,
        backend=backend,
        key_dim=key_dim,
        value_dim=value_dim,
        dtype=dtype,
        triton=triton,
    )
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(space=space, workloads=workloads, folder=Path(folder), device=device)
        options = {"limit": limit, "progress": progress}
        if minutes is not None:
            options["deadline"] = time.monotonic() + 60 * minutes
        record = search(bench, name, **options)
    return Tuned(record=record, path=save(record, output))


def tune_operators(
    operators: OperatorMap,
    backend: Backend,
    *,
    minutes: float | None = None,
    progress: Callable[[str], None] | None = None,
) -> list[Tuned]:
    """A record for every operator that is to be generated, into the user's cache.

    `minutes` bounds the search of each. Raises as `tune` does.
    """
    tuned, seen = [], set()
    for choice in operators.operators:
        spec = find_spec(choice.operator)
        if choice.decision != "generated" or not isinstance(spec, Spec):
            continue
        widths = int(choice.attributes["key_dim"]), int(choice.attributes["value_dim"])
        if (spec.operator, widths) not in seen:
            seen.add((spec.operator, widths))
            workloads = usual_workloads(choice.attributes)
            found = tune(spec, backend, *widths, workloads, minutes=minutes, progress=progress)
            tuned.append(found)
    return tuned


def usual_workloads(attributes: dict) -> list:
    """A single long sequence, and a batch of four, with the operator's own heads."""
    from codegen.tuning.bench import Workload

    heads = int(attributes.get("heads", 1))
    value_heads = int(attributes.get("value_heads", heads))
    return [
        Workload(batch=batch, tokens=TOKENS // batch, heads=heads, value_heads=value_heads)
        for batch in (1, 4)
    ]


def summary(tuned: Tuned) -> list[str]:
    """What was found against the family's own tile, a line a class of shapes."""
    record = tuned.record
    widths = f"{record.operator} {record.key_dim}x{record.value_dim} {record.dtype}"
    lines = []
    for c in record.classes:
        was, now = c.default_milliseconds["step"], c.milliseconds["step"]
        lines.append(
            f"{widths}, {c.programs} heads x {c.tokens} tokens: {now:.3g} ms a step, "
            f"{was / now:.2f}x the family's own tile ({was:.3g} ms)"
        )
    if tuned.path is None:
        lines.append(f"{widths}: found before; nothing was measured")
    else:
        tried = f"{record.tried} candidates, {len(record.refused)} refused"
        lines.append(f"{widths}: {tried}; record {tuned.path}")
    return lines
