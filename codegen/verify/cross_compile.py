"""Compiles a kernel for devices that are not here, in a process of its own.

    python -m codegen.verify.cross_compile REQUEST.json ANSWERS    (without TRITON_INTERPRET)

The module's own launches are recorded, not run, so that what is compiled is what would be launched:
the same argument types, constants and options. One JSON line per kernel, dtype and target is
appended to ANSWERS/lines.jsonl as soon as it is known.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from codegen.load import import_file
from codegen.verify import launches as rows
from codegen.verify.cases import Shape, all_cases, make_inputs, run

OPTIONS = ("num_warps", "num_stages")
POINTERS = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.int8: "*i8",
    torch.uint8: "*u8",
}


class Recorder:
    """Stands in for a jitted kernel: notes each distinct launch, runs nothing."""

    def __init__(self, kernel, name: str, launches: dict):
        self.kernel, self.name, self.launches = kernel, name, launches

    def __getitem__(self, grid):
        return self.launch

    def launch(self, *args, **kwargs):
        signature, constants, aligned = {}, {}, {}
        names = [p.name for p in self.kernel.params]
        constexprs = {p.name for p in self.kernel.params if p.is_constexpr}
        values = dict(zip(names, args, strict=False))
        values |= {n: v for n, v in kwargs.items() if n not in OPTIONS}
        for index, name in enumerate(names):
            value = values[name]
            if name in constexprs or value is None:
                signature[name], constants[name] = "constexpr", value
            elif isinstance(value, torch.Tensor):
                signature[name] = POINTERS[value.dtype]
                aligned[(index,)] = [["tt.divisibility", 16]]
            else:
                signature[name] = "fp32" if isinstance(value, float) else "i32"
        options = {n: kwargs[n] for n in OPTIONS if n in kwargs}
        key = (self.name, str(signature), str(constants), str(options))
        source = ASTSource(self.kernel, signature, constants, aligned)
        self.launches[key] = (self.name, source, options)


def record(module, shape: Shape, dtypes: list[str]) -> list[tuple]:
    """(dtype, kernel name, source, options) of every launch of the compiled cases in each dtype."""
    found: list[tuple] = []
    kernels = {n: f for n, f in vars(module).items() if isinstance(f, triton.JITFunction)}
    module._INTERPRETED = True  # CPU tensors take the path of the launches
    cases = [case for case in all_cases(shape) if case.compiled]
    for dtype in dtypes:
        launches: dict = {}
        for name, kernel in kernels.items():
            setattr(module, name, Recorder(kernel, name, launches))
        for case in cases:
            inputs = make_inputs(case, shape, getattr(torch, dtype))
            for row in range(rows.count(module)):
                with rows.only(module, row):
                    run(getattr(module, shape.function), case, inputs)
        found += [(dtype, *launch) for launch in launches.values()]
        vars(module).update(kernels)
    return found


def resources(target: dict, compiled) -> dict:
    """Registers and stack (spills) of a compiled kernel, as the vendor's tools count them."""
    if target["backend"] == "hip":
        text = compiled.asm["amdgcn"]
        keys = {"registers": "vgpr_count", "stack": "private_segment_fixed_size"}
        found = {n: re.findall(rf"\.{key}:\s+(\d+)", text) for n, key in keys.items()}
        return {name: int(values[0]) for name, values in found.items() if values}
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        ran = subprocess.run(
            [str(tool), "-res-usage", file.name], capture_output=True, text=True, timeout=30
        )
    found = re.search(r"REG:(\d+) STACK:(\d+)", ran.stdout)
    return {"registers": int(found[1]), "stack": int(found[2])} if found else {}


def compile_one(target: dict, source: ASTSource, options: dict) -> dict:
    arch = GPUTarget(target["backend"], target["arch"], target["warp_size"])
    begin = time.monotonic()
    compiled = triton.compile(source, target=arch, options=options)
    # A tensor memory overflow on sm_100 compiles without an error into a kernel that only traps.
    return {
        "seconds": round(time.monotonic() - begin, 2),
        "shared": compiled.metadata.shared,
        "tensor_memory": getattr(compiled.metadata, "tmem_size", 0) or 0,
        "traps": "trap;" in compiled.asm.get("ptx", ""),
        **resources(target, compiled),
    }


def main(request_path: str, answers: str) -> None:
    request = json.loads(Path(request_path).read_text(encoding="utf-8"))
    torch.set_num_threads(1)
    module = import_file(Path(request["module"]), "candidate_kernel")
    launches = record(module, Shape(**request["shape"]), request["dtypes"])
    with (Path(answers) / "lines.jsonl").open("w", encoding="utf-8") as lines:

        def say(line: dict) -> None:
            print(json.dumps(line), file=lines, flush=True)

        say({"launches": Counter(dtype for dtype, *_ in launches)})
        for target in request["targets"]:
            for dtype, name, *launch in launches:
                if dtype not in target["dtypes"]:
                    continue
                line = {"target": target["name"], "dtype": dtype, "kernel": name, **launch[1]}
                try:
                    line |= compile_one(target, *launch)
                except Exception as e:
                    line["error"] = f"{type(e).__name__}: {e}"[:300]
                say(line)


if __name__ == "__main__":
    main(*sys.argv[1:])
