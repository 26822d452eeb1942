"""Makes the example models and data, bit for bit the same on every machine.

    python examples/make.py            writes into examples/
    python examples/make.py --check    makes them in a temporary folder and compares the bytes

The models are tiny and random: they have every mechanism of the released ones (layer mix, router,
shared expert, key names, stored dtypes), not their knowledge. Their `config.json`, in the released
form, is written by hand, as is the code of the one that brings its own; this script makes the
weights and the tokenizer for it. Each weight is drawn from a counter generator keyed by its own
name, in integer arithmetic, so neither the order of creation nor the number of threads nor the math
library changes a bit.
"""

from __future__ import annotations

import argparse
import filecmp
import hashlib
import json
import math
import os
import sys
import tempfile
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
VOCAB = 512
PAD, USER, ASSISTANT, SYSTEM, END = range(5)
SPECIAL = ["<|pad|>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"]

MODELS = ("tiny-kimi-k3", "tiny-kimi-linear", "tiny-qwen3-next", "tiny-unseen-moe")

# The task: name the class of a thing. The answer depends on the prompt and has little else in it,
# so that a small adapter on a random frozen model can learn it and a falling loss means something:
# 100 steps of four lines answer every held-out line.
CLASSES = {
    "bird": ["crow", "eagle", "owl", "swan"],
    "fish": ["carp", "eel", "salmon", "trout"],
    "tree": ["birch", "elm", "maple", "oak"],
    "tool": ["axe", "drill", "hammer", "saw"],
}
QUESTIONS = [
    "What is this: {}",
    "Name the class of {}",
    "Tell me the kind of {}",
    "To which class belongs {}",
    "Sort this: {}",
    "Please classify {}",
    "What do we call {}",
    "Kind of {}",
    "Say what it is: {}",
    "Which kind of thing is {}",
    "Name this: {}",
    "What kind is {}",
    "Class of {}",
    "Tell what this is: {}",
    "Please sort {}",
    "Please name the kind of {}",
    "Say the class of {}",
    "Which class has {}",
    "How do we sort {}",
    "Now this: {}",
]
ANSWER = "{} it is."

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>"
    "{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content }}<|end|>{% endgeneration %}"
    "{% else %}{{ message.content }}<|end|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def conversations() -> tuple[list[dict], list[dict]]:
    """Training and held-out lines. Every thing is seen in training, but not with every question."""
    train, held_out = [], []
    things = [(thing, kind) for kind, group in CLASSES.items() for thing in group]
    for q, question in enumerate(QUESTIONS):
        for t, (thing, kind) in enumerate(things):
            line = {
                "messages": [
                    {"role": "user", "content": question.format(thing)},
                    {"role": "assistant", "content": ANSWER.format(kind)},
                ]
            }
            (held_out if (t + q) % 10 == 0 else train).append(line)
    # An order that mixes questions and classes, so that any run of lines is a fair sample.
    return [sorted(part, key=lambda line: digest(json.dumps(line))) for part in (train, held_out)]


def digest(text: str) -> int:
    """A 128-bit integer from a text."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:16], "little")


def normal(name: str, shape: tuple[int, ...], std: float) -> np.ndarray:
    """Draws close to normal, float32: the sum of four 16-bit uniforms, exact in integers.

    The raw stream of a bit generator is stable over numpy versions; its normals are not.
    """
    raw = np.random.Philox(key=digest(name)).random_raw(math.prod(shape))
    total = sum((raw >> np.uint64(s)) & np.uint64(0xFFFF) for s in (0, 16, 32, 48))
    centred = total.astype(np.int64) - 2 * 0xFFFF
    unit = math.sqrt(4 * (2**32 - 1) / 12)
    return (centred.astype(np.float64) * (std / unit)).astype(np.float32).reshape(shape)


def uniform(name: str, shape: tuple[int, ...], low: float, high: float) -> np.ndarray:
    raw = np.random.Philox(key=digest(name)).random_raw(math.prod(shape)) >> np.uint64(40)
    return (low + (high - low) * raw.astype(np.float64) / 2**24).astype(np.float32).reshape(shape)


def weight(name: str, shape: tuple[int, ...], model_type: str) -> np.ndarray:
    """The value of one parameter, by the last words of its name: float32, `shape`."""
    last = name.rsplit(".", 1)[-1]
    if last == "A_log" and model_type == "kimi_k3_text":
        # Slopes of the bounded gate: a steep one saturates.
        return np.log(uniform(name, shape, 0.5, 2.0).astype(np.float64)).astype(np.float32)
    if last == "A_log":  # decay rates of 1 to 16
        return np.log(uniform(name, shape, 1.0, 16.0).astype(np.float64)).astype(np.float32)
    if last == "dt_bias":  # softplus of it: steps of about 0.002 to 0.1
        return uniform(name, shape, -6.0, -2.0)
    if last == "e_score_correction_bias":
        return uniform(name, shape, -0.05, 0.05)
    if "norm" in name:
        zero_centred = model_type == "qwen3_next" and "linear_attn" not in name
        centre = 0.0 if zero_centred else 1.0
        return centre + normal(name, shape, 0.1)
    if "conv1d" in name:  # [channels, 1, taps]
        return normal(name, shape, shape[-1] ** -0.5)
    if "embed_tokens" in name:
        return normal(name, shape, 1.0)
    last_of_block = (".o_proj", ".out_proj", ".down_proj", ".w2.", "routed_expert_up_proj")
    if any(k in name for k in last_of_block):
        # What blocks add is small beside the embedding, or random layers would drown the prompt.
        return normal(name, shape, 0.3 * shape[-1] ** -0.5)
    return normal(name, shape, shape[-1] ** -0.5)  # [..., out, in]


def write_json(path: Path, data: object) -> None:
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_tokenizer(folder: Path) -> None:
    """A byte-level BPE tokenizer whose merges come from the task's own text."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=SPECIAL,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    lines = [m["content"] for part in conversations() for line in part for m in line["messages"]]
    tokenizer.train_from_iterator(lines, trainer)
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True) + "\n", encoding="utf-8")
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": 4096,
            "pad_token": SPECIAL[PAD],
            "eos_token": SPECIAL[END],
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )


def write_model(folder: Path, source: Path) -> None:
    """The folder of the model whose config, and code where it has its own, lies in `source`:
    weights in the released names and form, and a tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from analyzers.models import register_own_models

    register_own_models()
    folder.mkdir(parents=True, exist_ok=True)
    written = {p.name: p.read_bytes() for p in (source / "config.json", *source.glob("*.py"))}
    for name, data in written.items():
        (folder / name).write_bytes(data)
    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    model = AutoModelForCausalLM.from_config(config, trust_remote_code=True)
    model_type = model.config.model_type
    keep = ("A_log", "dt_bias", *(model._keep_in_fp32_modules_strict or ()))
    tensors = {}
    for name, tensor in model.state_dict().items():
        value = weight(name, tuple(tensor.shape), model_type)
        stored = torch.from_numpy(value).bfloat16()
        # Kept tensors are float32 in the file and exact in bfloat16, so that a loader which casts
        # them and one which does not compute the same.
        tensors[name] = stored.float() if any(k in name for k in keep) else stored
    for old in folder.glob("*.safetensors*"):
        old.unlink()
    # Writes the released key names: the model's own conversion table, undone.
    model.save_pretrained(folder, state_dict=tensors, max_shard_size="2MB")
    if model_type == "kimi_k3_text":
        pack_experts(folder)
    for shard in folder.glob("*.safetensors"):
        shard.chmod(0o644)
    (folder / "config.json").write_bytes(written["config.json"])
    (folder / "generation_config.json").unlink(missing_ok=True)
    write_tokenizer(folder)


def pack_experts(folder: Path) -> None:
    """Rewrites a Kimi-K3 checkpoint with its routed experts as MXFP4, as they are released."""
    from huggingface_hub import save_torch_state_dict
    from safetensors.torch import load_file

    from analyzers.models.kimi_k3.mxfp4 import pack_mxfp4

    tensors = {}
    for shard in sorted(folder.glob("*.safetensors")):
        for name, tensor in load_file(shard).items():
            if ".block_sparse_moe.experts." in name:
                tensors[f"{name}_packed"], tensors[f"{name}_scale"] = pack_mxfp4(tensor)
            else:
                tensors[name] = tensor
        shard.unlink()
    save_torch_state_dict(tensors, folder, max_shard_size="1MB")


def write_data(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, lines in zip(("classes-train", "classes-held-out"), conversations(), strict=True):
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")


def make(out: Path) -> None:
    for name in MODELS:
        write_model(out / "models" / name, HERE / "models" / name)
    write_data(out / "data")


def differences(made: Path, kept: Path) -> list[str]:
    """Files that are missing on one side or differ, for what this script makes."""
    wrong = []
    for folder in [*(Path("models") / name for name in MODELS), Path("data")]:
        names = {p.name for root in (made, kept) for p in (root / folder).glob("*")}
        for name in sorted(names):
            a, b = made / folder / name, kept / folder / name
            if not (a.is_file() and b.is_file() and filecmp.cmp(a, b, shallow=False)):
                wrong.append(str(folder / name))
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    parser.add_argument("--out", type=Path, default=HERE, help="folder to write into")
    arguments = parser.parse_args()
    if not arguments.check:
        make(arguments.out)
        return 0
    with tempfile.TemporaryDirectory() as temporary:
        make(Path(temporary))
        wrong = differences(Path(temporary), arguments.out)
    for name in wrong:
        print(f"differs: {name}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
