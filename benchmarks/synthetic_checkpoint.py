"""A Kimi-K3 checkpoint with true headers and no data, and how long its analysis takes.

    python benchmarks/synthetic_checkpoint.py write FOLDER [--damaged] [--config CONFIG.json]
    python benchmarks/synthetic_checkpoint.py measure FOLDER [--output FILE.json]

`write` makes the released tensor names with the shapes of a config: half a million tensors and
1.56 TB for the full model, of which only the headers and the index (about 150 MB) take space; the
rest are holes. Names, shapes and dtypes: the released Kimi-K3 folder, as NeMo AutoModel's
`components/models/kimi_k3/state_dict_adapter.py` and vLLM's `models/kimi_k3` read it.

`measure` runs `analyze` in a process of its own and writes seconds (of the clock, and of the
processor for machines that are shared), peak memory, machine and versions as JSON. A folder
written with `--damaged` has one tensor of a wrong shape, one of a wrong dtype and one missing; the
line that refuses it is in the JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

CONFIG = Path(__file__).parents[1] / "examples" / "models" / "kimi-k3" / "config.json"
BYTES = {"BF16": 2, "F32": 4, "U8": 1, "I32": 4}


class Tensor(NamedTuple):
    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        size = BYTES[self.dtype]
        for n in self.shape:
            size *= n
        return size


def released_tensors(config: dict[str, Any]) -> Iterator[Tensor]:
    """The tensors of a released Kimi-K3 folder, in the order of its layers."""
    text = config["text_config"]
    hidden, vocabulary = text["hidden_size"], text["vocab_size"]
    root = "language_model.model"
    yield Tensor(f"{root}.embed_tokens.weight", "BF16", (vocabulary, hidden))
    for layer in range(text["num_hidden_layers"]):
        for name, dtype, shape in _layer(text, layer):
            yield Tensor(f"{root}.layers.{layer}.{name}", dtype, shape)
    yield Tensor(f"{root}.norm.weight", "BF16", (hidden,))
    yield Tensor(f"{root}.output_attn_res_norm.weight", "BF16", (hidden,))
    yield Tensor(f"{root}.output_attn_res_proj.weight", "BF16", (1, hidden))
    yield Tensor("language_model.lm_head.weight", "BF16", (vocabulary, hidden))
    if "vision_config" in config:
        yield from _vision(config["vision_config"], hidden)


def _layer(text: dict[str, Any], layer: int) -> Iterator[Tensor]:
    hidden = text["hidden_size"]
    linear = layer + 1 in text["linear_attn_config"]["kda_layers"]
    for name, dtype, shape in _kda(text) if linear else _mla(text):
        yield Tensor(f"self_attn.{name}", dtype, shape)
    for norm in ("input_layernorm", "post_attention_layernorm"):
        yield Tensor(f"{norm}.weight", "BF16", (hidden,))
    for site in ("self_attention_res", "mlp_res"):
        yield Tensor(f"{site}_norm.weight", "BF16", (hidden,))
        yield Tensor(f"{site}_proj.weight", "BF16", (1, hidden))
    if layer < text["first_k_dense_replace"]:
        yield from _mlp("mlp", hidden, text["intermediate_size"])
    else:
        for name, dtype, shape in _experts(text):
            yield Tensor(f"block_sparse_moe.{name}", dtype, shape)


def _kda(text: dict[str, Any]) -> Iterator[Tensor]:
    hidden, linear = text["hidden_size"], text["linear_attn_config"]
    heads, head = linear["num_heads"], linear["head_dim"]
    width = heads * head
    for x in "qkv":
        yield Tensor(f"{x}_proj.weight", "BF16", (width, hidden))
        yield Tensor(f"{x}_conv1d.weight", "F32", (width, 1, linear["short_conv_kernel_size"]))
    yield Tensor("f_a_proj.weight", "BF16", (head, hidden))
    yield Tensor("f_b_proj.weight", "BF16", (width, head))
    yield Tensor("dt_bias", "F32", (width,))
    yield Tensor("A_log", "F32", (-(-heads // 128) * 128,))  # padded
    yield Tensor("b_proj.weight", "BF16", (heads, hidden))
    if linear.get("use_full_rank_gate", True):
        yield Tensor("g_proj.weight", "BF16", (width, hidden))
    else:
        yield Tensor("g_a_proj.weight", "BF16", (head, hidden))
        yield Tensor("g_b_proj.weight", "BF16", (width, head))
    yield Tensor("o_norm.weight", "F32", (head,))
    yield Tensor("o_proj.weight", "BF16", (hidden, width))


def _mla(text: dict[str, Any]) -> Iterator[Tensor]:
    hidden, heads = text["hidden_size"], text["num_attention_heads"]
    query, latent = text["q_lora_rank"], text["kv_lora_rank"]
    nope, rope, value = text["qk_nope_head_dim"], text["qk_rope_head_dim"], text["v_head_dim"]
    yield Tensor("q_a_proj.weight", "BF16", (query, hidden))
    yield Tensor("q_a_layernorm.weight", "BF16", (query,))
    yield Tensor("q_b_proj.weight", "BF16", (heads * (nope + rope), query))
    yield Tensor("kv_a_proj_with_mqa.weight", "BF16", (latent + rope, hidden))
    yield Tensor("kv_a_layernorm.weight", "BF16", (latent,))
    yield Tensor("kv_b_proj.weight", "BF16", (heads * (nope + value), latent))
    yield Tensor("g_proj.weight", "BF16", (heads * value, hidden))
    yield Tensor("o_proj.weight", "BF16", (hidden, heads * value))


def _mlp(name: str, hidden: int, width: int) -> Iterator[Tensor]:
    yield Tensor(f"{name}.gate_proj.weight", "BF16", (width, hidden))
    yield Tensor(f"{name}.up_proj.weight", "BF16", (width, hidden))
    yield Tensor(f"{name}.down_proj.weight", "BF16", (hidden, width))


def _experts(text: dict[str, Any]) -> Iterator[Tensor]:
    hidden, latent = text["hidden_size"], text["routed_expert_hidden_size"]
    width, experts = text["moe_intermediate_size"], text["num_experts"]
    yield Tensor("gate.weight", "F32", (experts, hidden))
    yield Tensor("gate.e_score_correction_bias", "F32", (experts,))
    yield Tensor("routed_expert_down_proj.weight", "BF16", (latent, hidden))
    yield Tensor("routed_expert_up_proj.weight", "BF16", (hidden, latent))
    if text["latent_moe_use_norm"]:
        yield Tensor("routed_expert_norm.weight", "BF16", (latent,))
    yield from _mlp("shared_experts", hidden, width * text["num_shared_experts"])
    matrices = {"w1": (width, latent), "w2": (latent, width), "w3": (width, latent)}
    for expert in range(experts):
        for name, (rows, columns) in matrices.items():
            weight = f"experts.{expert}.{name}.weight"
            yield Tensor(f"{weight}_packed", "U8", (rows, columns // 2))
            yield Tensor(f"{weight}_scale", "U8", (rows, columns // 32))


def _vision(vision: dict[str, Any], hidden: int) -> Iterator[Tensor]:
    """MoonViT3d without biases and the projector after it."""
    width, attention = vision["vt_hidden_size"], vision["qkv_hidden_size"]
    inner, patch = vision["vt_intermediate_size"], vision["patch_size"]
    high, wide = vision["init_pos_emb_height"], vision["init_pos_emb_width"]
    yield Tensor("vision_tower.patch_embed.proj.weight", "BF16", (width, 3, patch, patch))
    yield Tensor("vision_tower.patch_embed.pos_emb.weight", "BF16", (high, wide, width))
    for layer in range(vision["vt_num_hidden_layers"]):
        block = f"vision_tower.encoder.blocks.{layer}"
        yield Tensor(f"{block}.norm0.weight", "BF16", (width,))
        yield Tensor(f"{block}.norm1.weight", "BF16", (width,))
        yield Tensor(f"{block}.wqkv.weight", "BF16", (3 * attention, width))
        yield Tensor(f"{block}.wo.weight", "BF16", (width, attention))
        yield Tensor(f"{block}.mlp.fc0.weight", "BF16", (inner, width))
        yield Tensor(f"{block}.mlp.fc1.weight", "BF16", (width, inner))
    yield Tensor("vision_tower.encoder.final_layernorm.weight", "BF16", (width,))
    merged = width * vision["merge_kernel_size"][0] * vision["merge_kernel_size"][1]
    yield Tensor("mm_projector.proj.0.weight", "BF16", (merged, merged))
    yield Tensor("mm_projector.proj.2.weight", "BF16", (hidden, merged))
    yield Tensor("mm_projector.post_norm.weight", "BF16", (hidden,))


def damage(tensor: Tensor) -> Tensor | None:
    """One tensor of a wrong shape, one of a wrong dtype, one missing."""
    expert = "language_model.model.layers.{}.block_sparse_moe.experts.{}"
    if tensor.name == f"{expert.format(2, 7)}.w1.weight_packed":
        return tensor._replace(shape=(tensor.shape[0] - 1, tensor.shape[1]))
    if tensor.name == f"{expert.format(3, 5)}.w2.weight_packed":
        return tensor._replace(dtype="BF16")
    return None if tensor.name.endswith("layers.4.self_attn.k_conv1d.weight") else tensor


def write(
    folder: Path,
    config: dict[str, Any],
    shards: int,
    change: Callable[[Tensor], Tensor | None] = lambda tensor: tensor,
) -> list[Tensor]:
    """Writes config, index and shards of holes; `change` may damage or drop (None) a tensor."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    tensors = [t for t in map(change, released_tensors(config)) if t is not None]
    total = sum(t.nbytes for t in tensors)
    weight_map: dict[str, str] = {}
    for number, members in enumerate(_cut(tensors, total, shards), 1):
        file = f"model-{number:05}-of-{shards:05}.safetensors"
        _write_shard(folder / file, members)
        weight_map.update(dict.fromkeys((t.name for t in members), file))
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=0))
    return tensors


def _cut(tensors: list[Tensor], total: int, shards: int) -> Iterator[list[Tensor]]:
    """Consecutive runs of about equal bytes."""
    runs: list[list[Tensor]] = [[] for _ in range(shards)]
    before = 0
    for tensor in tensors:
        runs[min(before * shards // total, shards - 1)].append(tensor)
        before += tensor.nbytes
    yield from runs


def _write_shard(path: Path, tensors: Iterable[Tensor]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        begin, end = end, end + tensor.nbytes
        offsets = [begin, end]
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": offsets,
        }
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    with path.open("wb") as f:
        f.write(struct.pack("<Q", len(raw)) + raw)
        f.truncate(8 + len(raw) + end)


def measure(folder: Path) -> dict[str, Any]:
    """Seconds and peak memory of `analyze` in a process of its own."""
    command = [sys.executable, __file__, "run", str(folder)]
    result = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    apparent = sum(f.stat().st_size for f in folder.glob("*.safetensors"))
    held = sum(f.stat().st_blocks * 512 for f in folder.iterdir())
    return {
        "tensors": len(index["weight_map"]),
        "shards": len(set(index["weight_map"].values())),
        "apparent_bytes": apparent,
        "bytes_on_disk": held,
        **json.loads(result.stdout),
        "machine": {
            "cpu": _cpu(),
            "cores": os.cpu_count(),
            "load_average": round(os.getloadavg()[0], 1),
            "python": platform.python_version(),
            "torch": version("torch"),
            "transformers": version("transformers"),
        },
    }


def run(folder: Path) -> dict[str, Any]:
    """In this process, imports included: a person waits for them as well."""
    from analyzers.errors import InputError

    begin, used = time.perf_counter(), time.process_time()
    found: dict[str, Any] = {}
    try:
        from analyzers.analysis import analyze

        analysis = analyze(folder, progress=lambda line: print(line, file=sys.stderr))
    except InputError as refused:
        found["refused"] = str(refused)
    else:
        assert analysis.checkpoint is not None
        found["checkpoint_bytes"] = analysis.checkpoint.bytes
        found["packed"] = analysis.checkpoint.packed
        found["fidelity"] = analysis.fidelity
    clock, processor = time.perf_counter() - begin, time.process_time() - used
    found["seconds"] = {"clock": round(clock, 1), "processor": round(processor, 1)}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found["peak_memory_gib"] = round(peak / 2**20, 2)
    return found


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((l.partition(":")[2].strip() for l in lines if l.startswith("model name")), "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("action", choices=["write", "measure", "run"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--config", type=Path, default=CONFIG)
    parser.add_argument("--shards", type=int, default=96)
    parser.add_argument("--damaged", action="store_true", help="write three wrong tensors")
    parser.add_argument("--output", type=Path, help="JSON file; standard output by default")
    given = parser.parse_args()
    if given.action == "write":
        config = json.loads(given.config.read_text())
        change = damage if given.damaged else lambda tensor: tensor
        tensors = write(given.folder, config, given.shards, change)
        size = sum(t.nbytes for t in tensors)
        print(f"{len(tensors)} tensors, {size / 1e12:.3f} TB, {given.shards} shards")
        return
    found = (measure if given.action == "measure" else run)(given.folder)
    text = json.dumps(found, indent=2)
    if given.output:
        given.output.write_text(text + "\n")
    else:
        print(text)


if __name__ == "__main__":
    main()
