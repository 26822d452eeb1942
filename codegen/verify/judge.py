"""The verdict: what a candidate handed back against the reference in float64.

Two measures of an output x against the exact R, both relative: over the whole tensor, and the worst
token, so that a few ruined tokens cannot hide in a norm. The kernel may have twice (per token four
times) the error of plain torch in the same dtype, or the floor of the dtype. In half precision that
is the reference's `in_dtype` where it has one, else the reference itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from codegen.family import FLOORS
from codegen.schema import Gate, OutputError
from codegen.verify.cases import Case, Kind, Shape, make_inputs, reorder, run


def errors(x: torch.Tensor, exact: torch.Tensor, tokenwise: bool) -> tuple[float, float]:
    """Relative error of the whole and of the worst row; inf where x is not finite.

    A row is a token (all its heads), or a sequence's state; its error is relative to its own norm,
    or to a tenth of the root mean square of all rows where its own is smaller.
    """
    if not exact.is_floating_point():  # ids and counts: exactly
        worst = 0.0 if torch.equal(x, exact) else float("inf")
        return worst, worst
    x, exact = x.double(), exact.double()
    if x.shape != exact.shape or not bool(x.isfinite().all()):
        return float("inf"), float("inf")
    if exact.numel() == 0:
        return 0.0, 0.0
    rows = (-1, exact[0, 0].numel()) if tokenwise else (exact.shape[0], -1)
    difference = (x - exact).reshape(rows).norm(dim=1)
    size = exact.reshape(rows).norm(dim=1)
    mean = size.square().mean().sqrt()
    if mean == 0:  # structurally zero: must be exactly that
        worst = 0.0 if bool((difference == 0).all()) else float("inf")
        return worst, worst
    whole = difference.norm() / size.norm()
    return whole.item(), (difference / size.clamp(min=0.1 * mean)).max().item()


def errors_of(x: torch.Tensor, exact: torch.Tensor, kind: Kind) -> tuple[float, float]:
    """`errors` of a tensor of that kind; one that is shared by all tokens is a single row."""
    if kind == "whole":
        return errors(x[None], exact[None], tokenwise=False)
    return errors(x, exact, kind == "token")


class Judge:
    """Holds the references of one kernel and judges what candidates hand back."""

    def __init__(self, reference, shape: Shape, cases: Sequence[Case]):
        """`cases` are those that ran."""
        self.function = getattr(reference, shape.function)
        self.in_dtype = getattr(reference, "in_dtype", self.function)
        self.shape = shape
        self.cases = {case.name: case for case in cases}
        self._references: dict[tuple[str, str], tuple[dict, dict]] = {}

    def references(self, case: Case, dtype: str) -> tuple[dict, dict]:
        """Outputs in float64, and in the dtype itself, from the same rounded inputs."""
        key = case.name, dtype
        if key not in self._references:
            whole = replace(case, split_at=None)
            inputs = make_inputs(case, self.shape, getattr(torch, dtype))
            exact = {
                n: x.double() if x is not None and x.dtype.is_floating_point else x
                for n, x in inputs.items()
            }
            same = self.function if dtype == "float32" else self.in_dtype
            self._references[key] = (
                run(self.function, whole, exact, kernel=False),
                run(same, whole, inputs, kernel=False),
            )
        return self._references[key]

    def gates(self, results: dict[tuple[str, str], dict], ran_on: str) -> list[Gate]:
        """Every gate that the run on one device decides; `results` by (dtype, case)."""
        gates = []
        for dtype in dict.fromkeys(dtype for dtype, _ in results):
            ran = {n: r for (d, n), r in results.items() if d == dtype and n != "opcheck"}
            for name, result in list(ran.items()):
                case = self.cases[name]
                if case.relation is None:
                    gates.append(self.accuracy(case, dtype, result, ran_on))
                elif case.relation.to in ran:
                    gates.append(self.related(case, dtype, ran, ran_on))
                for row, other in enumerate(result.get("launches", []), 2):
                    title = f"{name}, launches {row}"
                    gates.append(self.accuracy(case, dtype, other, ran_on, title))
                    ran[title] = other
            if ran:
                gates.append(self.same_twice(ran, dtype, ran_on))
                gates.append(self.own_memory(ran, dtype, ran_on))
            if (dtype, "opcheck") in results:
                fault = results[dtype, "opcheck"].get("error", "")
                detail = fault or "schema, fake tensors, autograd registration, dynamic tracing"
                gates.append(Gate(name="opcheck", passed=not fault, ran_on=ran_on, detail=detail))
        return gates

    def accuracy(
        self, case: Case, dtype: str, ran: dict, ran_on: str, title: str | None = None
    ) -> Gate:
        """What ran against float64; `title` names it where it is not the case alone."""
        name = f"accuracy, {dtype}: {title or case.name}"
        if "error" in ran:
            return Gate(name=name, passed=False, ran_on=ran_on, detail=ran["error"])
        exact, same = self.references(case, dtype)
        missing = exact.keys() - ran["runs"][0].keys()
        if missing:
            detail = f"not handed back: {', '.join(sorted(missing))}"
            return Gate(name=name, passed=False, ran_on=ran_on, detail=detail)
        floor = FLOORS[dtype]
        worst = (-1.0, "", 0.0, 0.0)
        found = []
        for output in exact:
            kind = case.kind(output)
            got = errors_of(ran["runs"][0][output], exact[output], kind)
            torch_has = errors_of(same[output], exact[output], kind)
            limits = max(2 * torch_has[0], floor), max(4 * torch_has[1], 2 * floor)
            found.append(
                OutputError(output=output, kernel=got[0], torch=torch_has[0], limit=limits[0])
            )
            for measured, limit, what in zip(got, limits, ("", ", worst row"), strict=True):
                if measured / limit > worst[0]:
                    worst = (measured / limit, output + what, measured, limit)
        ratio, output, measured, limit = worst
        return Gate(
            name=name,
            passed=ratio <= 1.0,
            ran_on=ran_on,
            detail=f"closest to its limit: {output}",
            measured=measured,
            tolerance=limit,
            errors=found,
        )

    def same_twice(self, ran: dict, dtype: str, ran_on: str) -> Gate:
        """Bit-equal over runs whose buffers began as NaN and as a large number."""
        unequal = [
            f"{name}: {output}"
            for name, r in ran.items()
            if "error" not in r
            for output in r["runs"][0]
            if not torch.equal(r["runs"][0][output], r["runs"][-1][output])
        ]
        failed = [name for name, r in ran.items() if "error" in r]
        return Gate(
            name=f"run twice, poisoned buffers, {dtype}",
            passed=not unequal and not failed,
            ran_on=ran_on,
            detail="; ".join(unequal or failed) or f"bit-equal in {len(ran)} cases",
        )

    def own_memory(self, ran: dict, dtype: str, ran_on: str) -> Gate:
        faults = [
            f"{name}: {r.get('broken_bands')} guard bands written, inputs changed: "
            f"{r.get('changed_inputs')}"
            for name, r in ran.items()
            if "error" in r or r["broken_bands"] or r["changed_inputs"]
        ]
        return Gate(
            name=f"guard bands and inputs untouched, {dtype}",
            passed=not faults,
            ran_on=ran_on,
            detail="; ".join(faults) or f"{len(ran)} cases",
        )

    def related(self, case: Case, dtype: str, ran: dict, ran_on: str) -> Gate:
        """A case against the one that it must agree with, bit by bit where the device allows."""
        assert case.relation is not None
        relation, floor = case.relation, FLOORS[dtype]
        faults, allowed = [], 0.0
        if "error" in ran[case.name] or "error" in ran[relation.to]:
            faults = ["did not run"]
        else:
            one, two = ran[relation.to]["runs"][0], ran[case.name]["runs"][0]
            # A CPU's matrix product takes another path for another batch.
            loose = ran_on == "cpu" and relation.kind in ("row", "documents")
            allowed = floor if loose else 0.0
            for name, x in two.items():
                kind = case.kind(name)
                wanted, got = expected(case, name, kind, one[name]), x
                if relation.kind == "past":
                    if kind != "token":
                        continue
                    wanted, got = wanted[:, : case.perturb_from], got[:, : case.perturb_from]
                elif relation.kind == "row" and kind == "whole":
                    continue
                # Sums over all tokens: in another order, other roundings.
                limit = floor if kind == "whole" else allowed
                if not (torch.equal(got, wanted) or errors_of(got, wanted, kind)[1] <= limit):
                    faults.append(name)
            if relation.kind == "past" and all(torch.equal(one[n], two[n]) for n in two):
                faults.append("the future itself does not depend on its inputs")
        return Gate(
            name=f"{RELATIONS[relation.kind]}, {dtype}: {case.name}",
            passed=not faults,
            ran_on=ran_on,
            detail="; ".join(faults) or (f"within {allowed:g}" if allowed else "bit-equal"),
        )


RELATIONS = {
    "past": "causality",
    "row": "batch row",
    "documents": "order of documents",
    "scaled": "linearity",
}


def expected(case: Case, name: str, kind: Kind, of_other: torch.Tensor) -> torch.Tensor:
    """The output `name` of a case, made from that of the case it is related to."""
    assert case.relation is not None
    if case.relation.kind == "row" and kind != "whole":
        assert case.only_row is not None
        return of_other[case.only_row : case.only_row + 1]
    if case.relation.kind == "documents":
        return reorder(of_other, kind, case.lengths, case.order)
    if case.relation.kind == "scaled" and name.removeprefix("d") not in case.LINEAR_IN:
        return of_other * case.times
    return of_other
