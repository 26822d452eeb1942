"""A recomputed layer decides nothing again: it repeats the choices of its first forward.

With activation checkpointing a layer runs twice. A near tie in the router may fall the other way
the second time, and then rows that were sent are not those that gradients come back for. So every
`topk` of a layer and everything that follows from it (see `runtime.experts.dispatch.Route`) is kept
from the first forward and taken again, in order, by the second, which therefore also exchanges no
counts and waits for none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

T = TypeVar("T")

TOPK = (torch.topk, torch.Tensor.topk)


class _Tape(TorchFunctionMode):
    """Active while a layer runs: writes down its decisions, or gives those written down."""

    playing: _Tape | None = None

    def __init__(self, decisions: list[Any], replay: bool) -> None:
        super().__init__()
        self.decisions, self.replay = decisions, replay

    def __enter__(self) -> _Tape:
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

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in TOPK or "out" in kwargs:
            return func(*args, **kwargs)
        with torch.no_grad():
            indices = self.decide(lambda: func(*args, **kwargs).indices)
        return _at(indices, *args, **kwargs)


def _at(indices: Tensor, input: Tensor, k: int, dim: int = -1, *_: Any, **__: Any) -> Any:
    """What topk gives, in the same steps each time: checkpointing compares what they save."""
    return torch.return_types.topk((input.gather(dim, indices), indices))


def once(decide: Callable[[], T]) -> T:
    """What `decide` gives, or gave in the forward that is being repeated."""
    return decide() if _Tape.playing is None else _Tape.playing.decide(decide)


def replaying() -> tuple[_Tape, _Tape]:
    """For `context_fn` of `torch.utils.checkpoint.checkpoint`: one call of a layer, and its
    repetition."""
    decisions: list[Any] = []
    return _Tape(decisions, replay=False), _Tape(decisions, replay=True)
