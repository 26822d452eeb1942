"""Examples as token ids: tokenised once, kept in the run directory and mapped from there.

Legend of shapes: N tokens of all examples, E examples.
"""

from __future__ import annotations

import hashlib
import os
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from analyzers.errors import InputError
from runtime.data import read_records

if TYPE_CHECKING:
    from torch import Tensor

IGNORED = -100
FORMAT = 1
"""Of the files; another number tokenises anew."""
TOKENIZER_FILES = ("token*", "*.model", "vocab*", "merges*", "special_tokens*", "chat_template*")


@dataclass(frozen=True)
class Example:
    input_ids: Sequence[int]
    labels: Sequence[int]
    """The input ids where the token is learned, `IGNORED` elsewhere; not shifted."""


@dataclass(frozen=True)
class Tokens(Sequence[Example]):
    """Examples in one flat tensor, which may be mapped from a file."""

    ids_N: Tensor
    """int32"""
    learned_N: Tensor
    """bool"""
    start_E: Tensor
    """int64, first token of each example."""
    length_E: Tensor
    """int64"""

    @classmethod
    def of(cls, examples: Iterable[Example]) -> Tokens:
        import torch

        ids, learned, lengths = array("i"), array("b"), []
        for example in examples:
            ids.extend(example.input_ids)
            learned.extend(label != IGNORED for label in example.labels)
            lengths.append(len(example.input_ids))
        length_E = torch.tensor(lengths, dtype=torch.int64)
        if not ids:  # torch maps no empty buffer
            ids_N, learned_N = torch.empty(0, dtype=torch.int32), torch.empty(0, dtype=torch.bool)
        else:
            ids_N = torch.frombuffer(ids, dtype=torch.int32)
            learned_N = torch.frombuffer(learned, dtype=torch.bool)
        return cls(ids_N, learned_N, length_E.cumsum(0) - length_E, length_E)

    def __len__(self) -> int:
        return len(self.length_E)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        start, length = int(self.start_E[index]), int(self.length_E[index])
        ids = self.ids_N[start : start + length].tolist()
        learned = self.learned_N[start : start + length].tolist()
        return Example(ids, [t if kept else IGNORED for t, kept in zip(ids, learned, strict=True)])

    @property
    def lengths(self) -> list[int]:
        return self.length_E.tolist()

    def cut(self, length: int) -> Tokens:
        """No example longer than `length` tokens."""
        return Tokens(self.ids_N, self.learned_N, self.start_E, self.length_E.clamp(max=length))

    def select(self, indices: Sequence[int]) -> Tokens:
        import torch

        picked = torch.tensor(list(indices), dtype=torch.int64)
        return Tokens(self.ids_N, self.learned_N, self.start_E[picked], self.length_E[picked])

    def learned_E(self) -> Tensor:
        """Tokens to learn of each example; its first one has nothing to be predicted from."""
        from torch.nn.functional import pad

        before = pad(self.learned_N.long().cumsum(0), (1, 0))
        return (
            before[self.start_E + self.length_E]
            - before[(self.start_E + 1).clamp(max=len(self.ids_N))]
        )

    def write(self, file: Path) -> None:
        """Whole or not at all."""
        from safetensors.torch import save_file

        file.parent.mkdir(parents=True, exist_ok=True)
        temporary = file.with_suffix(f".{os.getpid()}")
        save_file(dict(vars(self)), temporary)
        temporary.replace(file)

    @classmethod
    def read(cls, file: Path) -> Tokens:
        from safetensors.torch import load_file

        return cls(**load_file(file))


def tokenise(path: str | Path, tokenizer: Any) -> Tokens:
    """All examples of a JSONL file, whole. Raises InputError for a broken line."""
    return Tokens.of(Example(*_tokenised(record, tokenizer)) for record in read_records(path))


def tokenise_once(path: str | Path, tokenizer: Any, folder: Path) -> tuple[Tokens, str]:
    """`tokenise`, kept in `folder` under the hash of the data and of the tokenizer, which is
    returned too.

    Rank 0 alone reads the data; all ranks call it together and map the same file.
    """
    import torch.distributed as dist

    alone = not dist.is_initialized()
    name = [""]
    if alone or dist.get_rank() == 0:
        name = [fingerprint(path, tokenizer)]
        if not (file := folder / f"{name[0]}.safetensors").is_file():
            tokenise(path, tokenizer).write(file)
    if not alone:
        dist.broadcast_object_list(name, src=0)
    return Tokens.read(folder / f"{name[0]}.safetensors"), name[0]


def fingerprint(path: str | Path, tokenizer: Any) -> str:
    """sha256 of everything that the tokens depend on: the data, the tokenizer's files, the version
    of transformers. Raises InputError when the data cannot be read."""
    import transformers

    digest = hashlib.sha256(f"{FORMAT} {transformers.__version__}".encode())
    folder = Path(tokenizer.name_or_path)
    files = {file for pattern in TOKENIZER_FILES for file in folder.glob(pattern)}
    for file in sorted(f for f in files if f.is_file()):
        digest.update(file.name.encode() + file.read_bytes())
    try:
        with open(path, "rb") as data:
            while block := data.read(1 << 24):
                digest.update(block)
    except OSError as e:
        raise InputError(path, fault=f"cannot be read: {e.strerror}") from e
    return digest.hexdigest()


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
