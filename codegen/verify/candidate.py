"""Runs a candidate kernel in this process of its own and hands back numbers, never a verdict.

    python -m codegen.verify.candidate REQUEST.json RESULT.pt

The request names the module file, its shape, the device and the dtypes. Every case runs twice: with
fresh buffers full of NaN, then of a large number, each between guard bands.
"""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path

import torch

from codegen.load import import_file
from codegen.verify.cases import Case, Shape, all_cases, make_inputs, run

GUARD = 64  # elements on either side of a buffer
POISONS = (float("nan"), -1.7e4)


class Poison:
    """While active, `torch.empty` and its kin return poisoned memory between guard bands."""

    def __init__(self, value: float):
        self.value = value
        self.bands: list[torch.Tensor] = []
        self.empty = torch.empty

    def guarded(self, shape, dtype, device) -> torch.Tensor:
        shape = torch.Size(shape)
        count = shape.numel()
        whole = self.empty(count + 2 * GUARD, dtype=dtype, device=device)
        whole.fill_(self.value if dtype.is_floating_point else -7)
        self.bands += [whole[:GUARD], whole[GUARD + count :]]
        return whole[GUARD : GUARD + count].view(shape)

    def place(self, x: torch.Tensor | None) -> torch.Tensor | None:
        """A copy of an input between guard bands."""
        if x is None or not x.dtype.is_floating_point:
            return x
        return self.guarded(x.shape, x.dtype, x.device).copy_(x)

    def broken_bands(self) -> int:
        def intact(band):
            if band.dtype.is_floating_point:
                wanted = torch.full_like(band, self.value)
                return torch.equal(torch.nan_to_num(band, 1.0), torch.nan_to_num(wanted, 1.0))
            return bool((band == -7).all())

        return sum(not intact(band) for band in self.bands)

    @contextlib.contextmanager
    def active(self):
        def empty(*shape, dtype=None, device=None, **_):
            shape = shape[0] if shape and not isinstance(shape[0], int) else shape
            return self.guarded(shape, dtype or torch.get_default_dtype(), device or "cpu")

        def empty_like(x, dtype=None, device=None, **_):
            return self.guarded(x.shape, dtype or x.dtype, device or x.device)

        saved = torch.empty, torch.empty_like
        torch.empty, torch.empty_like = empty, empty_like
        try:
            yield
        finally:
            torch.empty, torch.empty_like = saved


def run_case(module, shape: Shape, case: Case, dtype: torch.dtype, device: str) -> dict:
    """Outputs of both runs, and what the runs did to memory that was not theirs."""
    result: dict = {"runs": []}
    try:
        for value in POISONS:
            poison = Poison(value)
            inputs = {
                name: poison.place(None if x is None else x.to(device))
                for name, x in make_inputs(case, shape, dtype).items()
            }
            before = {name: x.clone() for name, x in inputs.items() if x is not None}
            with poison.active():
                function = getattr(module, shape.function)
                outputs = run(function, case, inputs, output_final_state=True)
            result["runs"].append({name: x.cpu().clone() for name, x in outputs.items()})
            result["broken_bands"] = result.get("broken_bands", 0) + poison.broken_bands()
            after = {name: x for name, x in inputs.items() if x is not None}
            changed = [n for n, x in before.items() if not torch.equal(x, after[n])]
            result["changed_inputs"] = result.get("changed_inputs", []) + changed
    except Exception as e:
        result["error"] = f"{type(e).__name__}: {e}"[:500]
    return result


def opcheck(module, shape: Shape, device: str) -> str:
    """torch's own checks of a registered operator; empty when they pass."""
    case = all_cases(shape)[1]
    inputs = make_inputs(case, shape, torch.float32)
    x = {n: t if t is None else t.to(device) for n, t in inputs.items()}
    operator, calls = module._op, []
    module._op = lambda *given: calls.append(given) or operator(*given)
    try:
        run(getattr(module, shape.function), case, x, output_final_state=True)
        torch.library.opcheck(operator, calls[0])
    except Exception as e:
        return f"{type(e).__name__}: {e}"[:500]
    finally:
        module._op = operator
    return ""


def main(request_path: str, result_path: str) -> None:
    request = json.loads(Path(request_path).read_text(encoding="utf-8"))
    torch.set_num_threads(1)
    module = import_file(Path(request["module"]), "candidate_kernel")
    shape = Shape(**request["shape"])
    result: dict = {"interpreted": bool(module._INTERPRETED), "cases": {}}
    for name in request["dtypes"]:
        dtype = getattr(torch, name)
        for case in all_cases(shape):
            if request["cases"] and case.name not in request["cases"]:
                continue
            ran = run_case(module, shape, case, dtype, request["device"])
            result["cases"][f"{case.name}/{name}"] = ran
    if request["opcheck"]:
        result["opcheck"] = opcheck(module, shape, request["device"])
    torch.save(result, result_path)


if __name__ == "__main__":
    main(*sys.argv[1:])
