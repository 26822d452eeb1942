"""The verdict: what a candidate handed back against the reference in float64.

Two measures of an output x against the exact R, both relative: over the whole tensor, and the worst
token, so that a few ruined tokens cannot hide in a norm. The kernel may have twice (per token four
times) the error of the same-dtype torch reference, or the floor of the dtype.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from codegen.render import FLOORS
from codegen.schema import Gate
from codegen.verify.cases import Case, Shape, all_cases, make_inputs, run

TOKENWISE = {"o", "dq", "dk", "dv", "dg", "dbeta"}


def errors(x: torch.Tensor, exact: torch.Tensor, tokenwise: bool) -> tuple[float, float]:
    """Relative error of the whole and of the worst row; inf where x is not finite.

    A row is a token (all its heads), or a sequence's state; its error is relative to its own norm,
    or to a tenth of the root mean square of all rows where its own is smaller.
    """
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


class Judge:
    """Holds the references of one kernel and judges what candidates hand back."""

    def __init__(self, reference, shape: Shape, names: list[str] | None = None):
        """`names` are the cases that ran; all of them when None."""
        self.function = getattr(reference, shape.function)
        self.shape = shape
        self.cases = [c for c in all_cases(shape) if names is None or c.name in names]
        self._references: dict[tuple[str, str], tuple[dict, dict]] = {}

    def references(self, case: Case, dtype: str) -> tuple[dict, dict]:
        """Outputs in float64, and in the dtype itself, from the same rounded inputs."""
        key = (case.name, dtype)
        if key not in self._references:
            whole = replace(case, split_at=None)
            inputs = make_inputs(case, self.shape, getattr(torch, dtype))
            exact = {
                n: x.double() if x is not None and x.dtype.is_floating_point else x
                for n, x in inputs.items()
            }
            self._references[key] = (
                run(self.function, whole, exact),
                run(self.function, whole, inputs),
            )
        return self._references[key]

    def gates(self, result: dict, dtypes: list[str], ran_on: str) -> list[Gate]:
        """Every gate that the run on one device decides."""
        gates = []
        for dtype in dtypes:
            ran = {c.name: result["cases"][f"{c.name}/{dtype}"] for c in self.cases}
            gates += [self.accuracy(c, dtype, ran[c.name], ran_on) for c in self.cases]
            gates.append(self.same_twice(ran, dtype, ran_on))
            gates.append(self.own_memory(ran, dtype, ran_on))
            if "future changed" in ran:
                gates.append(self.causality(ran, dtype, ran_on))
            if "row alone" in ran:
                gates.append(self.batch_row(ran, dtype, ran_on))
        if "opcheck" in result:
            fault = result["opcheck"]
            detail = fault or "schema, fake tensors, autograd registration, dynamic tracing"
            gates.append(Gate(name="opcheck", passed=not fault, ran_on=ran_on, detail=detail))
        return gates

    def accuracy(self, case: Case, dtype: str, ran: dict, ran_on: str) -> Gate:
        name = f"accuracy, {dtype}: {case.name}"
        if "error" in ran:
            return Gate(name=name, passed=False, ran_on=ran_on, detail=ran["error"])
        exact, same = self.references(case, dtype)
        floor = FLOORS[dtype]
        worst = (-1.0, "", 0.0, 0.0)
        for output in exact:
            tokenwise = output in TOKENWISE
            got = errors(ran["runs"][0][output], exact[output], tokenwise)
            torch_has = errors(same[output], exact[output], tokenwise)
            for measured, reference, times, what in zip(
                got, torch_has, (2, 4), ("", ", worst token"), strict=True
            ):
                allowed = max(times * reference, times / 2 * floor)
                if measured / allowed > worst[0]:
                    worst = (measured / allowed, output + what, measured, allowed)
        ratio, output, measured, allowed = worst
        detail = f"{', '.join(exact)}; closest to its limit: {output}"
        return Gate(
            name=name,
            passed=ratio <= 1.0,
            ran_on=ran_on,
            detail=detail,
            measured=measured,
            tolerance=allowed,
        )

    def same_twice(self, ran: dict, dtype: str, ran_on: str) -> Gate:
        """Bit-equal over runs whose buffers began as NaN and as a large number."""
        unequal = [
            f"{name}: {output}"
            for name, r in ran.items()
            if "error" not in r
            for output in r["runs"][0]
            if not torch.equal(r["runs"][0][output], r["runs"][1][output])
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

    def causality(self, ran: dict, dtype: str, ran_on: str) -> Gate:
        """Other values in the future leave outputs and gradients of the past bit-equal."""
        base, other = ran["future as it is"], ran["future changed"]
        until = next(c.perturb_from for c in self.cases if c.name == "future changed")
        if "error" in base or "error" in other:
            faults = ["did not run"]
        else:
            one, two = base["runs"][0], other["runs"][0]
            faults = [n for n in TOKENWISE if not torch.equal(one[n][:, :until], two[n][:, :until])]
            if torch.equal(one["o"], two["o"]):
                faults.append("the future itself does not depend on its inputs")
        return Gate(
            name=f"causality, {dtype}",
            passed=not faults,
            ran_on=ran_on,
            detail="; ".join(sorted(faults)) or f"tokens before {until} bit-equal",
        )

    def batch_row(self, ran: dict, dtype: str, ran_on: str) -> Gate:
        """A row of a batch equals the row alone: bit by bit, on a CPU up to the floor."""
        batch, alone = ran["batch"], ran["row alone"]
        if "error" in batch or "error" in alone:
            faults, allowed = ["did not run"], 0.0
        else:
            one, two = batch["runs"][0], alone["runs"][0]
            # A CPU's matrix product takes another path for another batch size.
            allowed = FLOORS[dtype] if ran_on == "cpu" else 0.0
            faults = [n for n in one if errors(two[n], one[n][1:2], n in TOKENWISE)[1] > allowed]
        return Gate(
            name=f"batch row, {dtype}",
            passed=not faults,
            ran_on=ran_on,
            detail="; ".join(faults) or f"as the row alone, relative difference at most {allowed}",
        )
