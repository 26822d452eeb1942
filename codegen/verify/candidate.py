"""Runs a candidate kernel in this process of its own and hands back numbers, never a verdict.

    python -m codegen.verify.candidate REQUEST.json ANSWERS

The request names the module file, its shape, the device and the work: pairs of dtype and case, or
of dtype and `opcheck`. Each answer is written to the folder ANSWERS, as `<number of the pair>.pt`,
as soon as it is known, so that a crash loses no more than the case that caused it. Every case runs
twice: with fresh buffers full of NaN, then of a large number, each between guard bands.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from codegen.load import import_file
from codegen.verify import launches
from codegen.verify.cases import Case, Shape, all_cases, make_inputs, run

GUARD = 64  # elements on either side of a buffer
POISONS = (float("nan"), -1.7e4)


class Poison:
    """While active, fresh tensors are poisoned memory between guard bands."""

    def __init__(self, value: float):
        self.value = value
        self.bands: list[torch.Tensor] = []
        self.empty = torch.empty

    def guarded(self, shape, dtype, device) -> torch.Tensor:
        shape = torch.Size(shape)
        if torch.device(device).type == "meta":  # a kernel is compiled for it, nothing is written
            return self.empty(shape, dtype=dtype, device=device)
        count = shape.numel()
        whole = self.empty(count + 2 * GUARD, dtype=dtype, device=device)
        whole.fill_(self.value if dtype.is_floating_point else -7)
        self.bands += [whole[:GUARD], whole[GUARD + count :]]
        return whole[GUARD : GUARD + count].view(shape)

    def place(self, x: torch.Tensor | None, strided: bool) -> torch.Tensor | None:
        """A copy of an input between guard bands; `strided`: heads before tokens, rows apart."""
        if x is None or not x.dtype.is_floating_point:
            return x
        if not strided or x.ndim < 3:
            return self.guarded(x.shape, x.dtype, x.device).copy_(x)
        B, T, H, *width = x.shape
        apart = [w + 3 for w in width]
        held = self.guarded((B, H, T, *apart), x.dtype, x.device)
        if width:
            self.bands.append(held[..., width[-1] :])
            held = held[..., : width[-1]]
        return held.transpose(1, 2).copy_(x)

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
            # As torch does, with the strides of x where x leaves no gaps.
            order = sorted(range(x.ndim), key=lambda n: (-x.stride(n), n))
            dense = x.permute(order).is_contiguous()
            order = order if dense else list(range(x.ndim))
            shape = [x.shape[n] for n in order]
            made = self.guarded(shape, dtype or x.dtype, device or x.device)
            return made.permute([order.index(n) for n in range(x.ndim)])

        def new_empty(x, *shape, dtype=None, device=None, **_):
            return empty(*shape, dtype=dtype or x.dtype, device=device or x.device)

        saved = torch.empty, torch.empty_like, torch.Tensor.new_empty
        torch.empty, torch.empty_like = empty, empty_like
        torch.Tensor.new_empty = new_empty  # pyright: ignore[reportAttributeAccessIssue]
        try:
            yield
        finally:
            torch.empty, torch.empty_like, torch.Tensor.new_empty = saved


def run_case(module, shape: Shape, case: Case, dtype: torch.dtype, device: str) -> dict:
    """Outputs of both runs, and what the runs did to memory that was not theirs.

    A case that is only compared with another one runs once.
    """
    result: dict = {"runs": [], "broken_bands": 0, "changed_inputs": []}
    function = getattr(module, shape.function)
    for value in POISONS if case.relation is None else POISONS[:1]:
        poison = Poison(value)
        inputs = {
            name: poison.place(None if x is None else x.to(device), case.strided)
            for name, x in make_inputs(case, shape, dtype).items()
        }
        before = {name: x.clone() for name, x in inputs.items() if x is not None}
        with poison.active():
            outputs = run(function, case, inputs)
        result["runs"].append({name: x.cpu().clone() for name, x in outputs.items()})
        result["broken_bands"] += poison.broken_bands()
        after = {name: x for name, x in inputs.items() if x is not None}
        result["changed_inputs"] += [n for n, x in before.items() if not torch.equal(x, after[n])]
    return result


def opcheck(module, shape: Shape, dtype: torch.dtype, device: str) -> dict:
    """torch's own checks of the operators that a call goes through, on the first case."""
    case = all_cases(shape)[0]
    x = {n: t if t is None else t.to(device) for n, t in make_inputs(case, shape, dtype).items()}
    checks: dict[str, Any] = {
        "_op": (
            "test_schema",
            "test_autograd_registration",
            "test_faketensor",
            "test_aot_dispatch_dynamic",
        )
    }
    if hasattr(module, "_op_backward") and (device != "cpu" or module._INTERPRETED):
        # On a CPU it may have none of its own: its plain torch form differentiates inside, which
        # the checks do not support.
        checks["_op_backward"] = ("test_schema", "test_faketensor")
    operators = {name: getattr(module, name) for name in checks}
    traced = module._traced
    calls = {}
    try:
        for name, operator in operators.items():

            def noted(*args, name=name, operator=operator):
                calls[name] = args
                return operator(*args)

            setattr(module, name, noted)
        module._traced = lambda x: True  # calls go through the registered operators
        run(getattr(module, shape.function), case, x)
    finally:
        vars(module).update(operators, _traced=traced)
    for name, wanted in checks.items():
        torch.library.opcheck(operators[name], calls[name], test_utils=wanted)
    return {}


def device_is_lost() -> bool:
    """Whether nothing runs on the device any more in this process, as after an illegal access."""
    try:
        torch.accelerator.synchronize()
    except RuntimeError:
        return True
    return False


def main(request_path: str, answers: str) -> None:
    request = json.loads(Path(request_path).read_text(encoding="utf-8"))
    torch.set_num_threads(1)
    module = import_file(Path(request["module"]), "candidate_kernel")
    Path(answers, "ready").touch()
    shape = Shape(**request["shape"])
    device = request["device"]
    cases = {case.name: case for case in all_cases(shape)}
    for number, (dtype, name) in request["work"]:
        given = module, shape, getattr(torch, dtype), device
        answer: dict
        try:
            if name == "opcheck":
                answer = opcheck(*given)
            else:
                case = cases[name]
                answer = run_case(*given[:2], case, *given[2:])
                if case.compiled and device != "cpu":
                    answer["launches"] = []
                    for row in range(1, launches.count(module)):
                        with launches.only(module, row):
                            answer["launches"].append(run_case(*given[:2], case, *given[2:]))
        except Exception as e:
            answer = {"error": f"{type(e).__name__}: {e}"[:500]}
        answer["interpreted"] = bool(module._INTERPRETED)
        answer["lost"] = "error" in answer and device != "cpu" and device_is_lost()
        part = Path(answers) / f"{number}.part"
        torch.save(answer, part)
        part.rename(part.with_suffix(".pt"))
        if answer["lost"]:
            os._exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
