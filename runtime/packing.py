"""Examples in rows of equal length, rows in batches.

A row holds one document or, packed, several: whole documents, so that nothing is cut that fits.
Which rows a step gets follows from (seed, step, global batch) alone, never from the number of
ranks or from what ran before: the number of the step is all that a checkpoint must keep.

Legend of shapes: B rows, T tokens a row.
"""

from __future__ import annotations

import bisect
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from analyzers.errors import InputError
from runtime.tokens import IGNORED, Example, Tokens, tokenise, tokenise_once

if TYPE_CHECKING:
    import torch

OPEN_ROWS = 256
"""Rows that a document may still go to; more pack tighter, and tie what lies further apart."""
ROUNDING = 64
"""Rows are padded to a multiple of so many tokens."""


@dataclass(frozen=True)
class Row:
    """Documents that share a row, in order; none in a row that only fills a batch."""

    source: Sequence[Example]
    indices: tuple[int, ...]
    length: int

    @property
    def documents(self) -> list[Example]:
        return [self.source[i] for i in self.indices]


@dataclass(frozen=True)
class Dataset:
    examples: Sequence[Example]
    truncated: int
    """Examples that were longer than the sequence length."""
    row_length: int | None = None
    """Documents are packed to so many tokens; None keeps one document a row."""
    fingerprint: str = ""
    """Of what was tokenised, where it is kept."""
    _recent: dict[tuple[int, int], list[Row]] = field(default_factory=dict, repr=False)
    """The rows of the last epochs asked for, by (seed, epoch)."""
    _counts: dict[tuple[int, int], int] = field(default_factory=dict, repr=False)
    """Rows of every epoch met: packed, an epoch has now more and now fewer."""

    def packed(self, row_length: int) -> Dataset:
        return replace(self, row_length=row_length, _recent={}, _counts={})

    def rows(self, indices: Sequence[int]) -> list[Row]:
        """The examples `indices`, in that order, in rows."""
        whole = self.examples
        lengths = whole.lengths if isinstance(whole, Tokens) else [len(e.input_ids) for e in whole]
        packs = [[i] for i in indices]
        if self.row_length is not None:
            packs = pack(lengths, indices, self.row_length)
        return [Row(self.examples, tuple(p), sum(lengths[i] for i in p)) for p in packs]

    def epoch(self, seed: int, epoch: int) -> list[Row]:
        """All rows, in an order that depends on (seed, epoch) alone."""
        key = seed, epoch
        if key not in self._recent:
            indices = list(range(len(self.examples)))
            random.Random(f"{seed}:{epoch}").shuffle(indices)
            if len(self._recent) > 1:
                self._recent.pop(next(iter(self._recent)))
            self._recent[key] = self.rows(indices)
            self._counts[key] = len(self._recent[key])
        return self._recent[key]

    def batch(self, step: int, size: int, seed: int) -> list[Row]:
        """The global batch of step `step` (from 0): the next `size` rows of the epochs laid end to
        end. The same on any number of ranks, and after any number of restarts."""
        found: list[Row] = []
        epoch, skip = 0, step * size
        while len(found) < size:
            count = self._counts.get((seed, epoch)) or len(self.epoch(seed, epoch))
            if skip < count:
                found += self.epoch(seed, epoch)[skip : skip + size - len(found)]
            skip, epoch = max(0, skip - count), epoch + 1
        return found

    def split(self, fraction: float, seed: int) -> tuple[Dataset, Dataset]:
        """What is learned and what is set apart, at least one example of each."""
        assert isinstance(self.examples, Tokens)
        count = len(self.examples)
        apart = min(max(1, round(fraction * count)), count - 1)
        chosen = set(random.Random(f"{seed}:evaluation").sample(range(count), apart))
        learned = [i for i in range(count) if i not in chosen]
        select = self.examples.select
        rest = replace(self, examples=select(learned), _recent={}, _counts={})
        return rest, Dataset(select(sorted(chosen)), truncated=0)


def pack(lengths: Sequence[int], order: Sequence[int], row_length: int) -> list[list[int]]:
    """Best fit over the rows that are open: each document goes to the fullest row that has room.
    Rows come in the order in which they were begun."""
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (free tokens, row), fullest first
    for index in order:
        length = lengths[index]
        at = bisect.bisect_left(room, (length, -1))
        if at < len(room):
            free, row = room.pop(at)
        else:
            free, row = row_length, len(rows)
            rows.append([])
            if len(room) == OPEN_ROWS:
                room.pop(0)
        rows[row].append(index)
        bisect.insort(room, (free - length, row))
    return rows


def load_dataset(
    path: str | Path, tokenizer: Any, sequence_length: int, *, cache: Path | None = None
) -> Dataset:
    """Tokenised examples, cut at `sequence_length` tokens; with `cache`, tokenised once for all
    ranks and runs.

    Raises InputError for a broken line, and for one of which no token to learn is left.
    """
    if cache is None:
        whole, fingerprint = tokenise(path, tokenizer), ""
    else:
        whole, fingerprint = tokenise_once(path, tokenizer, cache)
    tokens = whole.cut(sequence_length)
    empty = (tokens.learned_E() <= 0).nonzero().flatten().tolist()
    if empty:
        raise InputError(
            path,
            field=f"line {empty[0] + 1}",
            fault=f"leaves no token to learn within {sequence_length} tokens",
            fix="raise --sequence-length or shorten the example",
        )
    truncated = int((whole.length_E > sequence_length).sum())
    return Dataset(tokens, truncated, fingerprint=fingerprint)


@dataclass(frozen=True)
class Batch:
    """One micro-batch, padded on the right; what is behind a token does not reach it."""

    input_ids_BT: torch.Tensor
    labels_BT: torch.Tensor
    """Shifted: the label of a position is the token that follows it in the same document."""
    valid_BT: torch.Tensor
    """True on real tokens."""
    lengths: tuple[int, ...]
    """Of the documents, in order."""
    positions_BT: torch.Tensor | None = None
    """In its document; None where no row has several."""
    limits: torch.Tensor | None = None
    """int32 [documents + 1], where documents and padding begin and end in the one row of a batch
    that was laid end to end; None for one of rows."""

    def arguments(self, device: torch.device) -> dict[str, Any]:
        """What a model of transformers is called with."""
        made: dict[str, Any] = {
            "input_ids": on_device(self.input_ids_BT, device),
            "use_cache": False,
        }
        if self.positions_BT is not None:
            made["position_ids"] = on_device(self.positions_BT, device)
        if self.limits is not None:
            limits, longest = on_device(self.limits, device), int(self.limits.diff().max())
            made |= {"cu_seq_lens_q": limits, "cu_seq_lens_k": limits}
            made |= {"max_length_q": longest, "max_length_k": longest}
        return made


def on_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """On `device`, without waiting for what the device still has to do."""
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def collate(rows: Sequence[Row], length: int, pad: int, *, flat: bool = False) -> Batch:
    """Rows of `length` tokens; with `flat`, packed rows are laid end to end in one row, as kernels
    for documents of many lengths take them."""
    import torch

    ids = torch.full((len(rows), length), pad, dtype=torch.long)
    labels = torch.full((len(rows), length), IGNORED, dtype=torch.long)
    valid = torch.zeros((len(rows), length), dtype=torch.bool)
    positions = torch.zeros((len(rows), length), dtype=torch.long)
    lengths, pieces = [], []
    for row, packed in enumerate(rows):
        start = 0
        for document in packed.documents:
            count = len(document.input_ids)
            end = start + count
            ids[row, start:end] = torch.tensor(document.input_ids)
            labels[row, start : max(start, end - 1)] = torch.tensor(document.labels[1:])
            positions[row, start:end] = torch.arange(count)
            lengths.append(count)
            pieces.append(count)
            start = end
        valid[row, :start] = True
        positions[row, start:] = torch.arange(length - start)
        if start < length:
            pieces.append(length - start)
    if all(len(row.indices) <= 1 for row in rows):
        return Batch(ids, labels, valid, tuple(lengths))
    if not flat:
        return Batch(ids, labels, valid, tuple(lengths), positions)
    limits = torch.tensor([0, *pieces], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    ids, labels, valid, positions = (x.view(1, -1) for x in (ids, labels, valid, positions))
    return Batch(ids, labels, valid, tuple(lengths), positions, limits)


def micro_batches(
    rows: Sequence[Row],
    rank: int,
    ranks: int,
    micro: int,
    sequence_length: int,
    pad: int,
    *,
    flat: bool = False,
) -> Iterator[Batch]:
    """This rank's part of a global batch, `micro` rows at a time.

    All ranks pad to one length, the longest of the global batch rounded up to 64 tokens.
    """
    longest = max(row.length for row in rows)
    length = min(sequence_length, -(-longest // ROUNDING) * ROUNDING)
    mine = rows[rank * len(rows) // ranks : (rank + 1) * len(rows) // ranks]
    for start in range(0, len(mine), micro):
        yield collate(mine[start : start + micro], length, pad, flat=flat)
