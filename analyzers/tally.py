"""Operator calls summed up: into the parts of a block, and into the operators of the model."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable

from analyzers import costs
from analyzers.costs import Call
from analyzers.schema import AdapterWork, Operator, Part, PartName, Pass, Work
from analyzers.structure import Kind


def parts(count: Counter[PartName], calls: list[Call]) -> list[Part]:
    """Every part that has parameters (`count`) or calls."""
    names: dict[PartName, None] = dict.fromkeys(count)
    names.update(dict.fromkeys(call.part for call in calls))
    return [_part(name, count[name], calls) for name in names]


def _part(name: PartName, parameters: int, calls: list[Call]) -> Part:
    mine = [call for call in calls if call.part == name]
    return Part(
        name=name,
        parameters=parameters,
        flops=_sum(call.forward.flops for call in mine),
        bytes=_sum(call.forward.bytes for call in mine),
        backward=_sum_passes((call.backward, 1) for call in mine),
        saved_bytes=_sum(call.saved for call in mine),
        adapted_saved_bytes=_sum(call.adapter.saved_bytes for call in mine if call.adapter),
    )


def measured(
    parts: list[Part], saved: dict[PartName, Work], adapted: dict[PartName, Work]
) -> list[Part]:
    """The parts with the saved bytes of a graph in place of those of formulas. A part that only the
    graph has is glue between the others (the additions of a residual)."""
    names = [p.name for p in parts]
    glue = [Part(name=n, parameters=0, flops=Work()) for n in saved if n not in names]
    return [
        dataclasses.replace(
            part,
            saved_bytes=saved.get(part.name, Work()),
            adapted_saved_bytes=adapted.get(part.name, Work()),
        )
        for part in [*parts, *glue]
    ]


def operators(
    kinds: list[Kind], calls: list[list[Call]], outer_calls: list[Call]
) -> list[Operator]:
    """All calls of the model; those of one operator in one shape are one entry."""
    groups: dict[tuple, list[tuple[Call, int]]] = {}
    pairs = [(c, len(k.layers)) for k, cs in zip(kinds, calls, strict=True) for c in cs]
    for call, times in [*pairs, *((c, 1) for c in outer_calls)]:
        key = (call.operator, tuple(sorted(call.attributes.items())), call.site)
        groups.setdefault(key, []).append((call, times))
    found = []
    for (name, _, site), members in groups.items():
        forward = _sum_passes((call.forward, times) for call, times in members)
        found.append(
            Operator(
                name=name,
                count=sum(times for _, times in members),
                flops=forward.flops,
                bytes=forward.bytes,
                bytes_written=forward.bytes_written,
                backward=_sum_passes((call.backward, times) for call, times in members),
                saved_bytes=_sum(call.saved * times for call, times in members),
                adapter=_adapter(members),
                weight_bytes=float(
                    costs.ACTIVATION * sum(call.parameters * times for call, times in members)
                ),
                attributes=members[0][0].attributes,
                site=site,
            )
        )
    # Most work first, at a length where both terms count.
    return sorted(found, key=lambda o: (-o.flops.at(4096), o.name))


def _adapter(members: list[tuple[Call, int]]) -> AdapterWork | None:
    adapted = [(call.adapter, times) for call, times in members if call.adapter]
    if not adapted:
        return None
    return AdapterWork(
        width=sum(a.width * times for a, times in adapted),
        matrices=sum(a.matrices * times for a, times in adapted),
        saved_bytes=_sum(a.saved_bytes * times for a, times in adapted),
    )


def _sum(work: Iterable[Work]) -> Work:
    return sum(work, Work())


def _sum_passes(passes: Iterable[tuple[Pass, int]]) -> Pass:
    """Each pass as often as it occurs."""
    pairs = list(passes)
    return Pass(
        flops=_sum(p.flops * times for p, times in pairs),
        bytes=_sum(p.bytes * times for p, times in pairs),
        bytes_written=_sum(p.bytes_written * times for p, times in pairs),
    )
