"""A recomputed layer decides nothing again: it repeats the choices of its first forward.

With activation checkpointing a layer runs twice. A near tie in the router may fall the other way
the second time, and then rows that were sent are not those that gradients come back for. So every
`topk` of a layer and everything that follows from it (see `runtime.experts.dispatch.Route`) is kept
from the first forward and taken again, in order, by the second, which therefore also exchanges no
counts and waits for none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class TopkHandler:
    """Sees every topk while it is entered; the one that was entered last sees it first.

    It takes the function's place: a mode would be asked about every function of a layer, which
    costs a step on a fast device more time than it has.
    """

    def handle(self, topk: Callable, input: Tensor, k: int, dim: int, *args: Any, **kw: Any) -> Any:
        """What to give for `topk(input, k, dim, ...)`, where `topk` is what was there before."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        self.before = torch.topk, torch.Tensor.topk
        inner = torch.topk

        def topk(input: Tensor, k: int, dim: int = -1, *args: Any, **kwargs: Any) -> Any:
            if "out" in kwargs:
                return inner(input, k, dim, *args, **kwargs)
            return self.handle(inner, input, k, dim, *args, **kwargs)

        self._put(topk, topk)
        return self

    def __exit__(self, *_: Any) -> None:
        self._put(*self.before)

    @staticmethod
    def _put(function: Any, method: Any) -> None:
        torch.topk, torch.Tensor.topk = function, method


class _Tape(TopkHandler):
    """Active while a layer runs: writes down its decisions, or gives those written down."""

    playing: _Tape | None = None

    def __init__(self, decisions: list[Any], replay: bool) -> None:
        self.decisions, self.replay = decisions, replay

    def __enter__(self) -> Self:
        self.at, self.outer, _Tape.playing = 0, _Tape.playing, self
        if not self.replay:
            self.decisions.clear()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        _Tape.playing = self.outer
        super().__exit__(*error)

    def decide(self, what: Callable[[], T]) -> T:
        if not self.replay:
            self.decisions.append(what())
        self.at += 1
        return self.decisions[self.at - 1]

    def handle(self, topk: Callable, input: Tensor, k: int, dim: int, *args: Any, **kw: Any) -> Any:
        with torch.no_grad():
            indices = self.decide(lambda: topk(input, k, dim, *args, **kw).indices)
        # In the same steps each time: checkpointing compares what they save.
        return torch.return_types.topk((input.gather(dim, indices), indices))


def once(decide: Callable[[], T]) -> T:
    """What `decide` gives, or gave in the forward that is being repeated."""
    return decide() if _Tape.playing is None else _Tape.playing.decide(decide)


def replaying() -> tuple[_Tape, _Tape]:
    """For `context_fn` of `torch.utils.checkpoint.checkpoint`: one call of a layer, and its
    repetition."""
    decisions: list[Any] = []
    return _Tape(decisions, replay=False), _Tape(decisions, replay=True)
