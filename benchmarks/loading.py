"""Host memory and seconds of loading a checkpoint, each rank its own part.

    python benchmarks/loading.py [--gigabytes 10] [--ranks 4] [--ep 2] [--folder FOLDER]
        [--output FILE.json]

Writes a Kimi-Linear checkpoint of random bytes in the released key format, loads it on CPU ranks
as training does, and deletes it. A rank reports the bytes of its shards, its memory before (the
imports) and the most while loading, from /proc. Then all ranks compare random rows of every tensor
of their shards with safetensors' own reader; a wrong byte is an error, not a row of the table.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SHARD = 2**30
sys.path.insert(0, str(ROOT))


def config_of(gigabytes: float) -> Any:
    """Kimi-Linear with as many layers as the size asks for; 64 experts, 0.79 GB a layer."""
    from analyzers.models import load_config

    config = load_config(ROOT / "examples" / "models" / "tiny-kimi-linear")
    layers = max(2, math.ceil(gigabytes / 0.79))
    changes = {
        "vocab_size": 32768,
        "hidden_size": 2048,
        "intermediate_size": 4096,
        "moe_intermediate_size": 1024,
        "num_hidden_layers": layers,
        "layer_types": (config.layer_types * layers)[:layers],
        "mlp_layer_types": ["dense", *["sparse"] * (layers - 1)],
        "num_experts": 64,
        "dtype": "bfloat16",
    }
    for key, value in changes.items():
        setattr(config, key, value)
    return config


def write(folder: Path, gigabytes: float) -> int:
    """Random weights under the released names; returns their bytes."""
    import torch
    from safetensors.torch import save_file
    from transformers.core_model_loading import revert_weight_conversion

    from analyzers.models import build_on_meta

    config = config_of(gigabytes)
    config.save_pretrained(folder)
    model = build_on_meta(config, dtype=torch.bfloat16)
    released = revert_weight_conversion(model, dict(model.state_dict()))
    generator = torch.Generator().manual_seed(0)
    weight_map: dict[str, str] = {}
    held: dict[str, torch.Tensor] = {}

    def flush() -> None:
        file = f"model-{len(set(weight_map.values())) + 1:05}.safetensors"
        save_file(held, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(held, file))
        held.clear()

    for name, tensor in released.items():  # positive and finite
        bits = torch.randint(0, 2**14, tensor.shape, dtype=torch.int16, generator=generator)
        held[name] = bits.view(torch.bfloat16)
        if sum(t.nbytes for t in held.values()) > SHARD:
            flush()
    flush()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return sum(t.numel() for t in released.values()) * 2


def memory(field: str) -> int:
    """Bytes of a field of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(l.split()[1]) * 1024 for l in lines if l.startswith(f"{field}:"))


def load(folder: Path, ep: int, output: Path) -> None:
    """What each rank runs."""
    import torch
    import torch.distributed as dist

    from analyzers.models import build_on_meta, load_config
    from runtime.build import process_group
    from runtime.sharding import parallelize
    from runtime.shards import local_rows
    from runtime.weights import load_weights
    from tests.runtime.runs import plan_for

    with process_group() as device:
        model = build_on_meta(load_config(folder), dtype=torch.bfloat16)
        parallelize(model, plan_for(dist.get_world_size(), ep=ep, compute_dtype="bfloat16"))
        before = memory("VmRSS")
        model.to_empty(device=device)
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts again
        began = time.perf_counter()
        load_weights(model, folder)
        seconds = time.perf_counter() - began
        row = {
            "own_bytes": sum(local_rows(t)[0].nbytes for t in model.state_dict().values()),
            "before": before,
            "peak": memory("VmHWM"),
            "seconds": round(seconds, 1),
        }
        compare(model, folder)
        rows = [None] * dist.get_world_size()
        dist.all_gather_object(rows, row)
        if dist.get_rank() == 0:
            output.write_text(json.dumps(rows))


def compare(model: Any, folder: Path) -> None:
    """A first and a last row of every shard, read and converted by safetensors and transformers."""
    import torch
    from safetensors import safe_open

    from analyzers.conversion import plan_conversion
    from runtime.shards import local_rows

    files = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    state = model.state_dict()
    for name, recipe in plan_conversion(model, files, state).recipes.items():
        shard, low, high = local_rows(state[name])
        if low == high:
            continue

        def whole(source: str) -> torch.Tensor:
            with safe_open(folder / files[source], framework="pt") as file:
                return file.get_tensor(source)

        for at in {low, high - 1}:
            experts = (at, at + 1) if recipe.by_expert else None
            made = recipe.convert(whole, model, experts=experts)
            row = made[0] if recipe.by_expert else made[at]
            if not torch.equal(shard[at - low], row.to(shard.dtype)):
                raise SystemExit(f"{name}: row {at} is wrong")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--gigabytes", type=float, default=10)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--ep", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="where there is room; /tmp by default")
    parser.add_argument("--output", type=Path, help="JSON file; standard output by default")
    parser.add_argument("--load", type=Path, help=argparse.SUPPRESS)  # what a rank runs
    given = parser.parse_args()
    if given.load:
        load(given.load, given.ep, given.output)
        return
    with tempfile.TemporaryDirectory(dir=given.folder) as work:
        folder, rows = Path(work) / "model", Path(work) / "rows.json"
        folder.mkdir()
        if shutil.disk_usage(work).free < 1.2e9 * given.gigabytes:
            parser.error(f"--folder: no room for {given.gigabytes} GB")
        size = write(folder, given.gigabytes)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(given.ranks), __file__, "--load", str(folder)]
        command += ["--ep", str(given.ep), "--output", str(rows)]
        subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
        found = json.loads(rows.read_text())
    text = json.dumps(
        {
            "checkpoint_bytes": size,
            "ranks": found,
            "peak_of_all_ranks": sum(r["peak"] for r in found),
            "most_over_own_bytes": max(r["peak"] - r["own_bytes"] for r in found),
            "ep": given.ep,
            "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} processors",
            "versions": {name: version(name) for name in ("torch", "transformers")},
        },
        indent=1,
    )
    if given.output:
        given.output.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
