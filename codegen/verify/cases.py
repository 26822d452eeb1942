"""The inputs on which kernels are proved, made alike in every process.

`Case` is what a family of operators subclasses (`families/`); this module knows nothing of any one
operator.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Literal

import torch

from codegen.members import load_members

Kind = Literal["token", "sequence", "whole"]
"""Of a tensor: [B, T, ...], [N, ...] with N = B or the number of packed sequences, or neither."""

Tensors = dict[str, torch.Tensor | None]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What a kernel was rendered for."""

    operator: str
    attributes: dict[str, int]
    """Head widths and the like."""
    chunk: int
    """Tokens that a program works on at once: hostile lengths lie around it."""
    heads: int = 1
    """Times as many as a case says. In half precision a single head has rows of one number, where
    all rounding may add up, or none."""

    @cached_property
    def spec(self) -> Any:
        """The family's own kind of `codegen.family.Member`."""
        return load_members()[self.operator]

    @property
    def function(self) -> str:
        return self.spec.function


@dataclass(frozen=True, kw_only=True)
class Relation:
    """What a case must have in common with the case `to`, bit by bit (on a CPU up to the floor)."""

    kind: Literal["past", "row", "documents", "scaled"]
    to: str


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call of an operator, forward and backward. A family subclasses it."""

    INPUTS: ClassVar[Mapping[str, Kind]]
    """Every tensor that may be given, without `cu_seqlens`."""
    OUTPUTS: ClassVar[Mapping[str, Kind]]
    """What `call` returns. The gradient that comes from above for an output x is the input `dx`."""
    GRADIENTS: ClassVar[tuple[str, ...]]
    """Inputs with a gradient, which is the output `dx` of the input x."""
    STATE: ClassVar[tuple[str, str] | None] = None
    """(input, output) that carry a sequence on into the next call."""
    LINEAR_IN: ClassVar[tuple[str, ...]] = ()
    """Inputs of which, taken together, all outputs but their own gradients are linear functions."""

    name: str
    lengths: tuple[int, ...]
    """Tokens of each sequence; more than one means packed, with B = 1."""
    batch: int = 1
    dtypes: tuple[str, ...] = ("float32", "float16", "bfloat16")
    """The case makes sense in these."""
    compiled: bool = False
    """Its launches, by every row of the module's table, are compiled for devices that are not here
    and run on the one that is."""
    strided: bool = False
    """The inputs are views of larger tensors with other strides."""
    split_at: int | None = None
    """Run as two calls, the state carried over; judged against the whole."""
    gradient_until: int | None = None
    """Only tokens before this one have an output gradient."""
    perturb_from: int | None = None
    """Tokens from here on get other values."""
    only_row: int | None = None
    """Of the batch, run this row alone."""
    order: tuple[int, ...] | None = None
    """The packed sequences in this order."""
    gradients: bool = True
    """Otherwise the forward alone: what is not to be differentiated may run by other kernels."""
    times: int = 1
    """The inputs in `LINEAR_IN` are multiplied by this power of two."""
    relation: Relation | None = None

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def sequences(self) -> int:
        return self.batch * len(self.lengths)

    def make(self, shape: Shape, dtype: torch.dtype) -> Tensors:
        """Every input and every gradient from above, on the CPU, None where it is not given."""
        raise NotImplementedError

    def call(self, function: Callable, x: Tensors, kernel: bool) -> dict[str, torch.Tensor]:
        """The outputs. `kernel` says whether `function` is a kernel's or a reference's."""
        raise NotImplementedError

    def kind(self, name: str) -> Kind:
        """Of an input, an output, or the gradient of either."""
        kinds: dict[str, Kind] = {**self.INPUTS, **self.OUTPUTS}
        return kinds[name if name in kinds else name.removeprefix("d")]


def all_cases(shape: Shape) -> list[Any]:
    """The cases of the shape's family."""
    module = importlib.import_module(f"codegen.verify.families.{shape.spec.family}")
    return module.cases(shape)


def future(past: Case, until: int) -> list[Case]:
    """`past` and the same with other values from token `until` on: the tokens before must not see
    them. `past` gives no gradient to what comes after the tokens, e.g. a last state."""
    name = f"{past.name}, gradients until {until}"
    before = replace(past, name=name, gradient_until=until)
    relation = Relation(kind="past", to=name)
    changed = f"{past.name}, other values from {until} on"
    return [before, replace(before, name=changed, perturb_from=until, relation=relation)]


def row_alone(batch: Case) -> Case:
    """The last row of `batch`."""
    relation = Relation(kind="row", to=batch.name)
    return replace(batch, name="row of a batch alone", only_row=batch.batch - 1, relation=relation)


def other_order(packed: Case) -> Case:
    """The sequences of `packed` from the last to the first."""
    order = tuple(reversed(range(len(packed.lengths))))
    relation = Relation(kind="documents", to=packed.name)
    return replace(packed, name="packed the other way round", order=order, relation=relation)


def forward_alone(case: Case) -> Case:
    """The same without gradients."""
    return replace(case, name=f"{case.name}, forward alone", gradients=False)


def scaled(usual: Case) -> Case:
    """Four times the inputs in which the operator is linear."""
    relation = Relation(kind="scaled", to=usual.name)
    return replace(usual, name="inputs times four", times=4, relation=relation)


def limits(lengths: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor([sum(lengths[:n]) for n in range(len(lengths) + 1)])


def reorder(x: torch.Tensor, kind: Kind, lengths: tuple[int, ...], order) -> torch.Tensor:
    """Packed sequences of these lengths in another order."""
    if kind == "token":
        return torch.cat([x.split(lengths, 1)[n] for n in order], 1)
    return x[list(order)] if kind == "sequence" else x


def make_inputs(case: Case, shape: Shape, dtype: torch.dtype) -> Tensors:
    """Inputs, gradients from above and cu_seqlens of a case, on the CPU."""
    made = case.make(shape, dtype)

    def change(name: str, x: torch.Tensor) -> torch.Tensor:
        kind = case.kind(name)
        upstream = name not in case.INPUTS
        if kind == "token" and not upstream and case.perturb_from is not None:
            x = x.clone()
            x[:, case.perturb_from :] = x[:, case.perturb_from :].flip(1) * 0.5
        if kind == "token" and upstream and case.gradient_until is not None:
            x = x.clone()
            x[:, case.gradient_until :] = 0
        if kind != "whole" and case.only_row is not None:
            x = x[case.only_row : case.only_row + 1]
        if case.order is not None:
            x = reorder(x, kind, case.lengths, case.order)
        return x * case.times if name in case.LINEAR_IN and not upstream else x

    x: Tensors = {n: None if t is None else change(n, t).contiguous() for n, t in made.items()}
    lengths = case.lengths if case.order is None else tuple(case.lengths[n] for n in case.order)
    return {**x, "cu_seqlens": limits(lengths) if len(lengths) > 1 else None}


def _forward(function, case: Case, x: Tensors, kernel: bool) -> dict[str, torch.Tensor]:
    if case.split_at is None:
        return case.call(function, x, kernel)
    assert case.STATE is not None
    given, got = case.STATE

    def part(begin, end):
        return {
            n: t[:, begin:end] if t is not None and case.INPUTS.get(n) == "token" else t
            for n, t in x.items()
        }

    first = case.call(function, part(0, case.split_at), kernel)
    second = part(case.split_at, None) | {given: first[got]}
    outputs = case.call(function, second, kernel)
    for name, kind in case.OUTPUTS.items():
        if kind == "token" and name in outputs:
            outputs[name] = torch.cat([first[name], outputs[name]], 1)
    return outputs


def run(function, case: Case, inputs: Tensors, kernel: bool = True) -> dict[str, torch.Tensor]:
    """Forward and backward: the outputs by name, and `dx` for every input x with a gradient."""
    if not case.gradients:
        with torch.no_grad():
            return _forward(function, case, inputs, kernel)
    names = [n for n in case.GRADIENTS if inputs.get(n) is not None]
    leaves = {n: inputs[n].detach().requires_grad_() for n in names}  # pyright: ignore
    outputs = _forward(function, case, {**inputs, **leaves}, kernel)
    above = {n: d for n in outputs if (d := inputs.get(f"d{n}")) is not None}
    grads = torch.autograd.grad(
        [outputs[n] for n in above],
        list(leaves.values()),
        [d.to(outputs[n]) for n, d in above.items()],
        allow_unused=True,
    )
    result = {n: t.detach() for n, t in outputs.items()}
    for name, grad in zip(names, grads, strict=True):
        result[f"d{name}"] = torch.zeros_like(leaves[name]) if grad is None else grad
    return result
