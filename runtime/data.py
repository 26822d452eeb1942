"""JSONL of examples -> token ids with labels on the tokens to learn.

A line is one of `{"messages": [{"role": ..., "content": ...}, ...]}` (loss on what the assistant
says), `{"prompt": ..., "completion": ...}` (loss on the completion), `{"text": ...}` (loss on all).
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from analyzers.errors import InputError

if TYPE_CHECKING:
    import torch

IGNORED = -100
_HALF_PAIR = re.compile("[\ud800-\udfff]")
FORMS = "'messages', 'prompt' with 'completion', or 'text'"


def read_records(path: str | Path) -> list[dict[str, Any]]:
    """All lines of the file, checked. Raises InputError that names the file and the line."""
    path = Path(path)
    try:
        raw = path.read_bytes()
    except FileNotFoundError as e:
        raise InputError(path, fault="does not exist", fix="give --data a JSONL file") from e
    except OSError as e:
        raise InputError(path, fault=f"cannot be read: {e.strerror}") from e
    records = []
    for number, line in enumerate(raw.removesuffix(b"\n").split(b"\n"), start=1):
        if not raw:
            break
        records.append(_checked(line, path, number))
    if not records:
        raise InputError(path, fault="is empty", fix="one JSON object a line")
    return records


def check_data(path: str | Path) -> int:
    """Reads and checks the whole file without a tokenizer; returns the number of examples."""
    return len(read_records(path))


def _checked(line: bytes, path: Path, number: int) -> dict[str, Any]:
    field = f"line {number}"
    if not line.strip():
        raise InputError(path, field=field, fault="is empty", fix="remove it")
    try:
        record = json.loads(line)
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as e:
        fault = f"broken JSON: {getattr(e, 'msg', e)}"
        raise InputError(path, field=field, fault=fault, fix="one JSON object a line") from e
    if not isinstance(record, dict):
        raise InputError(path, field=field, fault="is not a JSON object", fix=f"with {FORMS}")
    if "messages" in record:
        messages = record["messages"]
        if not isinstance(messages, list) or not all(
            isinstance(m, dict) and isinstance(m.get("role"), str) and _is_text(m.get("content"))
            for m in messages
        ):
            fault = "'messages' must be a list of objects with text in 'role' and 'content'"
            fix = 'such as [{"role": "user", "content": "..."}]'
            raise InputError(path, field=field, fault=fault, fix=fix)
        if not any(m["role"] == "assistant" for m in messages):
            raise InputError(path, field=field, fault="has no assistant message to learn from")
    elif "prompt" in record or "completion" in record:
        if not (_is_text(record.get("prompt")) and _is_text(record.get("completion"))):
            raise InputError(path, field=field, fault="needs text in 'prompt' and 'completion'")
    elif not _is_text(record.get("text")):
        raise InputError(path, field=field, fault="has nothing to learn from", fix=f"add {FORMS}")
    return record


def _is_text(value: object) -> bool:
    """Text that is not empty and can be encoded: JSON also spells halves of surrogate pairs."""
    return isinstance(value, str) and bool(value) and not _HALF_PAIR.search(value)


@dataclass(frozen=True)
class Example:
    input_ids: list[int]
    labels: list[int]
    """The input ids where the token is learned, `IGNORED` elsewhere; not shifted."""


@dataclass(frozen=True)
class Dataset:
    examples: list[Example]
    truncated: int
    """Examples that were longer than the sequence length."""

    def order(self, seed: int, epoch: int) -> list[int]:
        """A shuffle that depends on (seed, epoch) alone."""
        indices = list(range(len(self.examples)))
        random.Random(f"{seed}:{epoch}").shuffle(indices)
        return indices

    def batch(self, step: int, size: int, seed: int) -> list[Example]:
        """The global batch of step `step` (from 0): the next `size` examples of the epochs laid end
        to end. The same on any number of ranks, and after any number of restarts."""
        count = len(self.examples)
        positions = range(step * size, (step + 1) * size)
        orders = {p // count: self.order(seed, p // count) for p in positions}
        return [self.examples[orders[p // count][p % count]] for p in positions]


def load_dataset(path: str | Path, tokenizer: Any, sequence_length: int) -> Dataset:
    """Tokenised examples, cut at `sequence_length` tokens.

    Raises InputError for a broken line, and for one of which no token to learn is left.
    """
    examples, truncated = [], 0
    for number, record in enumerate(read_records(path), start=1):
        ids, labels = _tokenised(record, tokenizer)
        if len(ids) > sequence_length:
            truncated += 1
            ids, labels = ids[:sequence_length], labels[:sequence_length]
        # The first token has no predecessor to be predicted from.
        if all(label == IGNORED for label in labels[1:]):
            raise InputError(
                path,
                field=f"line {number}",
                fault=f"leaves no token to learn within {sequence_length} tokens",
                fix="raise --sequence-length or shorten the example",
            )
        examples.append(Example(ids, labels))
    return Dataset(examples, truncated)


def _tokenised(record: dict[str, Any], tokenizer: Any) -> tuple[list[int], list[int]]:
    if "messages" in record:
        return _chat(record["messages"], tokenizer)
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    if "prompt" in record:
        prompt = tokenizer(record["prompt"])["input_ids"]
        answer = tokenizer(record["completion"], add_special_tokens=False)["input_ids"] + end
        return prompt + answer, [IGNORED] * len(prompt) + answer
    ids = tokenizer(record["text"])["input_ids"] + end
    return ids, list(ids)


def _chat(messages: list[dict[str, str]], tokenizer: Any) -> tuple[list[int], list[int]]:
    """Ids of the whole conversation; labels on what each assistant turn adds to its prompt."""
    if tokenizer.chat_template is None:
        fault = "has no chat template for 'messages'"
        raise InputError(tokenizer.name_or_path, fault=fault, fix="use 'prompt' and 'completion'")
    ids: list[int] = []
    labels: list[int] = []
    for end, message in enumerate(messages, start=1):
        if message["role"] != "assistant":
            continue
        prompt = _template(tokenizer, messages[: end - 1], add_generation_prompt=True)
        turn = _template(tokenizer, messages[:end])
        # Where the template rewrites history, the longest common start is context.
        start = _common(prompt, turn)
        keep = _common(ids, turn)
        labels = labels[:keep] + [IGNORED] * (start - keep) + turn[max(start, keep) :]
        ids = turn
    return ids, labels


def _template(tokenizer: Any, messages: list[dict[str, str]], **options: bool) -> list[int]:
    out = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True, **options)
    return list(out["input_ids"])


def _common(a: list[int], b: list[int]) -> int:
    count = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        count += 1
    return count


@dataclass(frozen=True)
class Batch:
    """One micro-batch, padded on the right: a causal model needs no mask for that."""

    input_ids_BT: torch.Tensor
    labels_BT: torch.Tensor
    """Shifted: the label of a position is the token that follows it."""
    valid_BT: torch.Tensor
    """True on real tokens."""


def collate(examples: list[Example], length: int, pad: int) -> Batch:
    import torch

    ids = torch.full((len(examples), length), pad, dtype=torch.long)
    labels = torch.full((len(examples), length), IGNORED, dtype=torch.long)
    valid = torch.zeros((len(examples), length), dtype=torch.bool)
    for row, example in enumerate(examples):
        count = len(example.input_ids)
        ids[row, :count] = torch.tensor(example.input_ids)
        labels[row, : count - 1] = torch.tensor(example.labels[1:])
        valid[row, :count] = True
    return Batch(ids, labels, valid)


def micro_batches(
    examples: list[Example], rank: int, ranks: int, micro: int, sequence_length: int, pad: int
) -> Iterator[Batch]:
    """This rank's part of a global batch, `micro` sequences at a time.

    All ranks pad to one length, the longest of the global batch rounded up to 64 tokens.
    """
    longest = max(len(e.input_ids) for e in examples)
    length = min(sequence_length, -(-longest // 64) * 64)
    mine = examples[rank * len(examples) // ranks : (rank + 1) * len(examples) // ranks]
    for start in range(0, len(mine), micro):
        yield collate(mine[start : start + micro], length, pad)
