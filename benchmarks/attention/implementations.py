"""The implementations by name: each gives, for a member, shape and gate, a function of the inputs.

Conventions of the others, read in their code: flash-linear-attention 0.6.0 takes the log decay as
it is (`safe_gate=True` promises -5 <= g < 0 and allows matrix units inside a sub-chunk; with
`use_gate_in_kernel` g is raw); its lightning attention derives the decay from layer numbers. NeMo
Automodel 0.7.0 takes bounded log decays and beta in float32 and normalises q and k itself.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from attention.workload import Shape, options, promise
from codegen.family import Spec

if TYPE_CHECKING:
    import torch

# Chunks of the torch form: [C, C, K] decays are held for per-channel ones.
TORCH_CHUNK = {"per_channel": 32}

Function = Callable[[dict], "torch.Tensor"]


class Unsupported(Exception):
    """The implementation does not serve this member, shape or gate."""


def build(name: str, spec: Spec, shape: Shape, gate: str, folder: Path) -> Function:
    """A function of the inputs (a dict, see `workload.inputs`) that returns o.

    `folder` holds our rendered files. Raises Unsupported with the reason, ImportError where the
    implementation is not installed.
    """
    if name == "ours":
        return ours(spec, shape, gate, folder)
    return _OTHERS[name](spec, shape, gate)


def render_ours(spec: Spec, shape: Shape, backend: str, folder: Path) -> str | None:
    """Writes the kernel and its reference, as `adapt kernels` does, for the shape's widths; returns
    the hash of the tuning record that serves it."""
    from analyzers.backends import load_backend
    from codegen.render import render
    from codegen.tuning.records import known_records, nearest

    device = load_backend(backend)
    record = None
    if device.triton is not None:
        record = nearest(known_records(), spec, device, *shape.widths, device.training_dtype)
    attributes = {"key_dim": shape.key_dim, "value_dim": shape.value_dim}
    rendered = render(spec, device, attributes, name=_stem(spec, shape), record=record)
    for file, text in rendered.files.items():
        (folder / file).write_text(text, "utf-8")
    return rendered.tuning_sha256


def _stem(spec: Spec, shape: Shape) -> str:
    return f"{spec.operator}_{shape.key_dim}x{shape.value_dim}"


@functools.cache
def _function(path: Path, name: str) -> Callable:
    from codegen.load import import_file

    module = f"benchmark_{path.stem}_{hashlib.sha256(path.read_bytes()).hexdigest()[:12]}"
    return getattr(import_file(path, module), name)


def ours(spec: Spec, shape: Shape, gate: str, folder: Path) -> Function:
    function = _function(folder / f"{_stem(spec, shape)}.py", spec.function)
    shared = {**options(spec, gate), **promise(spec, gate)}
    return lambda x: function(**x, **shared)[0]


def ours_with_state(spec: Spec, shape: Shape, gate: str, folder: Path) -> Callable:
    """A function of the inputs and the first state that returns o and the last state."""
    function = _function(folder / f"{_stem(spec, shape)}.py", spec.function)
    shared = {**options(spec, gate), **promise(spec, gate), "output_final_state": True}
    return lambda x, state: function(**x, initial_state=state, **shared)


def reference(spec: Spec, shape: Shape, gate: str, folder: Path) -> Function:
    """The recurrence token by token, in float64 for float64 inputs."""
    function = _function(folder / f"reference_{_stem(spec, shape)}.py", spec.function)
    shared = options(spec, gate)
    return lambda x: function(**x, **shared)[0]


def _nemo(spec: Spec, shape: Shape, gate: str) -> Function:
    if spec.operator != "kda" or gate != "bounded":
        raise Unsupported("it serves KDA with a bounded gate")
    if (shape.key_dim, shape.value_dim) != (128, 128) or shape.heads != shape.value_heads:
        raise Unsupported("it serves K = V = 128 without grouped value heads")
    fused = _import_nemo()

    def call(x):
        limits = x.get("cu_seqlens")
        limits = None if limits is None else limits.int()
        return fused.fused_chunk_kda(x["q"], x["k"], x["v"], x["g"], x["beta"], limits)[0]

    return call


@functools.cache
def _import_nemo():
    found = importlib.util.find_spec("nemo_automodel")
    if found is None or not found.submodule_search_locations:
        raise ImportError("nemo_automodel is not installed")
    # The packages above import the whole training stack; the kernels need their paths alone.
    root = Path(found.submodule_search_locations[0])
    inner = ("", "shared", "components", "components/models", "components/models/kimi_k3")
    for path in inner:
        name = ".".join(["nemo_automodel", *filter(None, path.split("/"))])
        package = types.ModuleType(name)
        package.__path__ = [str(root / path)]
        sys.modules[name] = package
    return importlib.import_module("nemo_automodel.components.models.kimi_k3.kda_fused")


def _import_fla(module: str):
    # flash-linear-attention's layers and models are not needed and slow to import.
    for name in ("fla.layers", "fla.models"):
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]
    return importlib.import_module(module)


# Their module, function and whether it takes fewer key heads than value heads.
_FLA = {
    "linear_attention": ("linear_attn", "chunk_linear_attn", False),
    "lightning": ("lightning_attn", "chunk_lightning_attn", False),
    "simple_gla": ("simple_gla", "chunk_simple_gla", False),
    "mamba2": ("simple_gla", "chunk_simple_gla", False),
    "gla": ("gla", "chunk_gla", False),
    "delta_rule": ("delta_rule", "chunk_delta_rule", False),
    "gated_delta_rule": ("gated_delta_rule", "chunk_gated_delta_rule", True),
    "kda": ("kda", "chunk_kda", True),
}


def _fla(spec: Spec, shape: Shape, gate: str) -> Function:
    if spec.operator not in _FLA:
        raise Unsupported("it has no such operator")
    module, name, grouped = _FLA[spec.operator]
    if shape.heads != shape.value_heads and not grouped:
        raise Unsupported(f"its {name} has no grouped value heads")
    function = getattr(_import_fla(f"fla.ops.{module}"), name)
    shared = options(spec, gate) if spec.delta else {}
    if spec.operator == "kda":
        shared["safe_gate"] = gate in ("bounded", "raw-bounded")
    if spec.operator == "linear_attention":
        shared["normalize"] = False

    def call(x):
        x = dict(x)
        if x.pop("g_gamma", None) is not None:
            x["layer_idx"], x["num_layers"] = 0, 1
        return function(**x, **shared)[0]

    return call


# As above.
_NAIVE = {
    "kda": ("kda", "naive_recurrent_kda", True),
    "gated_delta_rule": ("gated_delta_rule", "naive_recurrent_gated_delta_rule", False),
    "gla": ("gla", "naive_recurrent_gla", False),
}


def _fla_naive(spec: Spec, shape: Shape, gate: str) -> Function:
    """Their recurrences in torch: an oracle of another author, and the peer of a CPU rehearsal."""
    import torch

    if spec.operator not in _NAIVE or gate.startswith("raw") or shape.packed:
        raise Unsupported("no recurrence of theirs is used here")
    module, name, grouped = _NAIVE[spec.operator]
    if shape.heads != shape.value_heads and not grouped:
        raise Unsupported(f"its {name} has no grouped value heads")
    function = getattr(_import_fla(f"fla.ops.{module}.naive"), name)

    def call(x):
        q, k = x["q"], x["k"]
        if spec.delta:
            q, k = (y * torch.rsqrt((y * y).sum(-1, keepdim=True) + 1e-6) for y in (q, k))
        rest = {"gk" if spec.operator == "gla" else "g": x["g"]}
        rest |= {"beta": x["beta"]} if "beta" in x else {}
        return function(q=q, k=k, v=x["v"], **rest)[0]

    return call


def _torch(spec: Spec, shape: Shape, gate: str, compiled: bool) -> Function:
    if shape.packed:
        raise Unsupported("the plain chunked form takes no packed documents")
    if gate.startswith("raw"):
        raise Unsupported("the plain chunked form takes log decays")
    import torch

    from attention.chunked import Chunked

    torch.set_float32_matmul_precision("high")  # as one would; errors stay those of bf16
    chunk = TORCH_CHUNK.get(spec.decay, 64)
    function = Chunked(delta=spec.delta, chunk=chunk, compiled=compiled)
    scale = shape.key_dim**-0.5

    def call(x):
        g = x.get("g")
        if "g_gamma" in x:
            g = x["g_gamma"].expand(*x["v"].shape[:3])
        return function(x["q"], x["k"], x["v"], g, x.get("beta"), scale=scale, l2norm=spec.delta)

    return call


_OTHERS = {
    "nemo": _nemo,
    "fla": _fla,
    "fla-naive": _fla_naive,
    "compile": functools.partial(_torch, compiled=True),
    "eager": functools.partial(_torch, compiled=False),
}
NAMES = ["ours", *_OTHERS]
