"""What the stored tensors of a checkpoint are as weights: packed formats recognised and sized.

A packed weight lies in several tensors: codes, scales of groups or blocks of them, sometimes a
global scale, zero points or a shape. From names, dtypes and shapes alone this module says which
tensors belong together, the shape of the weight that they stand for, and which parts do not fit.

Conventions, all `[.., out, in]` with groups along `in`:

| format | codes                             | scales                                   |
|--------|-----------------------------------|------------------------------------------|
| mxfp4  | `X_packed` or `X` U8, I8 [N, K/2] | `X_scale` U8, F8_E8M0 [N, K/32]          |
| mxfp4  | `X_blocks` U8 [E, N, K/32, 16]    | `X_scales` U8 [E, N, K/32]; X: [E, K, N] |
| nvfp4  | `X_packed` or `X` U8 [N, K/2]     | `X_scale` F8_E4M3 [N, K/16], a global one|
| fp8    | `X` F8 [N, K]                     | `X_scale_inv`, `X_scale`: of blocks,     |
|        |                                   | rows or the whole                        |
| mxfp8  | `X` F8 [N, K]                     | U8, F8_E8M0 [N, K/32]                    |
| int4   | `X_packed` I32 [N, K/8]           | `X_scale` [N, K/group]; `X_shape` [2]    |
| int8   | `X_packed` I32 [N, K/4]           | the same                                 |
| int8   | `X` I8 [N, K]                     | `X_scale` of rows or the whole           |

Sources: compressed-tensors 0.18 `compressors/{mxfp4,nvfp4,pack_quantized,naive_quantized}`,
transformers 5.24 `integrations/{mxfp4,finegrained_fp8,compressed_tensors}.py`, ModelOpt's exports
(`weight_scale_2`).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from analyzers.checkpoint import CheckpointFolder, TensorInfo, collector_paused
from analyzers.schema import Difference

Shape = tuple[int, ...]

PLAIN = {"BF16": "bf16", "F16": "fp16", "F32": "fp32", "F64": "fp64"}
FLOATS = ("BF16", "F16", "F32")
FLOAT8 = ("F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ")
EXPONENTS = ("U8", "F8_E8M0")  # scales that are powers of two
READ_METHODS = ("fp8", "mxfp4", "compressed-tensors", "modelopt", "fbgemm_fp8", "quark")
CODES = frozenset((*FLOAT8, "U8", "I8"))

SCALES = ("_scale", "_scale_inv", "_scales")
GLOBAL = ("_scale_2", "_global_scale")
EXTRAS = ("_zero_point", "_shape", "_g_idx")
# Last words of names that stand beside a `weight` instead of beginning with its name.
SCALES_BESIDE = ("scale", "qscale_weight")
ACTIVATIONS = ("input_scale", "input_global_scale", "activation_scale", "qscale_act")


class Logical(NamedTuple):
    """One weight, however it is stored."""

    name: str
    """As an unpacked checkpoint would name it."""
    shape: tuple[int, ...]
    """Of the unpacked weight."""
    dtype: str
    """Of the stored codes, as safetensors names it."""
    format: str
    """`bf16, fp16, fp32, mxfp4, mxfp8, fp8, nvfp4, int4, int8`, or the dtype of anything else."""
    nbytes: int
    """Of all parts."""
    parts: tuple[str, ...]
    """Names of the stored tensors, the codes first."""


@dataclass(frozen=True)
class Stored:
    """The weights of a checkpoint, and the parts that do not fit together."""

    tensors: dict[str, Logical] = field(default_factory=dict)
    faults: list[Difference] = field(default_factory=list)

    @property
    def packed(self) -> dict[str, int]:
        """Bytes by packed format, scales included, largest first."""
        total: dict[str, int] = {}
        for t in self.tensors.values():
            if len(t.parts) > 1:
                total[t.format] = total.get(t.format, 0) + t.nbytes
        return dict(sorted(total.items(), key=lambda item: (-item[1], item[0])))


@dataclass(frozen=True)
class Scheme:
    """What a `quantization_config` says of sizes; what it leaves out is inferred from shapes."""

    block: tuple[int, int] | None = None
    """Rows and columns that share an fp8 scale."""
    group: int | None = None
    """Columns that share a scale of integers packed into I32."""
    bits: int = 4
    """Of integers packed into I32."""

    @classmethod
    def of(cls, quantization: Mapping[str, Any] | None) -> Scheme:
        told = quantization or {}
        groups = told.get("config_groups")
        weights = [
            entry["weights"]
            for entry in (groups.values() if isinstance(groups, dict) else ())
            if isinstance(entry, dict) and isinstance(entry.get("weights"), dict)
        ]
        integers = [w for w in weights if w.get("type") == "int"]
        blocks = [told.get("weight_block_size"), *(w.get("block_structure") for w in weights)]
        block = next((b for b in blocks if _is_block(b)), None)
        return cls(
            block=(block[0], block[1]) if block else None,
            group=_agreed(w.get("group_size") for w in integers),
            bits=_agreed(w.get("num_bits") for w in integers) or cls.bits,
        )


def quantization_of(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The `quantization_config` in a config.json, also where it lies in `text_config`."""
    text = config.get("text_config")
    for place in (config, text if isinstance(text, dict) else {}):
        for key in ("quantization_config", "checkpoint_quantization_config"):
            if isinstance(place.get(key), dict):
                return place[key]
    return None


def logical_tensors(
    checkpoint: CheckpointFolder, quantization: Mapping[str, Any] | None
) -> dict[str, Logical]:
    """The weights of a checkpoint by logical name; `quantization` is of `quantization_of`."""
    return stored_weights(checkpoint, quantization).tensors


def stored_weights(checkpoint: CheckpointFolder, quantization: Mapping[str, Any] | None) -> Stored:
    """The weights of a checkpoint, with a difference for each part that does not fit."""
    tensors, told, stored = checkpoint.tensors, Scheme.of(quantization), Stored()
    parts: set[str] = set()
    with collector_paused():
        for name, codes in tensors.items():
            stem = _stem(name, codes, tensors)
            if stem is None:
                continue
            scale = _scale(stem, tensors)
            if scale is None and name == stem:
                continue  # eight bits without a scale are stored as they are used
            if stem in stored.tensors:
                stored.faults.append(_twice(name, stored.tensors[stem]))
                parts.add(name)
                continue
            stored.tensors[stem] = packed = _packed(stem, codes, scale, told, stored.faults)
            parts.update(packed.parts)
        for name, info in tensors.items():
            if name in parts or _joined(info, stored, tensors):
                continue
            if name in stored.tensors:
                stored.faults.append(_twice(name, stored.tensors[name]))
            else:
                kind = PLAIN.get(info.dtype, info.dtype.lower())
                whole = Logical(name, info.shape, info.dtype, kind, info.nbytes, (name,))
                stored.tensors[name] = whole
    return stored


def _twice(name: str, other: Logical) -> Difference:
    detail = f"{name} and {other.parts[0]} are the same weight"
    return Difference(tensor=name, kind="unexpected", detail=detail)


def _stem(name: str, info: TensorInfo, tensors: Mapping[str, TensorInfo]) -> str | None:
    """The logical name of a tensor of codes; None for anything else."""
    if name.endswith("weight_packed"):
        return name[: -len("_packed")]
    if name.endswith("_blocks"):
        stem = name[: -len("_blocks")]
        return stem if info.dtype == "U8" or f"{stem}_scales" in tensors else None
    whole = info.dtype in CODES and len(info.shape) > 1 and not name.endswith(SCALES)
    return name if whole else None


def _scale(stem: str, tensors: Mapping[str, TensorInfo]) -> TensorInfo | None:
    for suffix in SCALES:
        if (found := tensors.get(stem + suffix)) is not None:
            return found
    module = stem.removesuffix("weight")
    if module != stem:
        for word in SCALES_BESIDE:
            if (found := tensors.get(module + word)) is not None:
                return found
    return None


def _packed(
    stem: str,
    codes: TensorInfo,
    scale: TensorInfo | None,
    told: Scheme,
    faults: list[Difference],
) -> Logical:
    """The weight of some codes and their scale; adds what does not fit to `faults`."""
    blocks = codes.name.endswith("_blocks")
    given = (scale.shape, scale.dtype) if scale else (None, None)
    form, shape, codes_dtypes, scale_dtypes, scale_shapes = _layout(
        blocks, codes.shape, codes.dtype, *given, told
    )
    if codes.dtype not in codes_dtypes:
        detail = f"stored as {codes.dtype}, {form} codes are {' or '.join(codes_dtypes)}"
        faults.append(Difference(tensor=codes.name, kind="dtype", detail=detail))
    if scale is None:
        detail = f"{codes.name} is packed as {form} and has no scales"
        name = f"{stem}_scales" if blocks else f"{stem}_scale"
        faults.append(Difference(tensor=name, kind="missing", detail=detail))
        return Logical(stem, shape, codes.dtype, form, codes.nbytes, (codes.name,))
    if scale.dtype not in scale_dtypes:
        detail = f"stored as {scale.dtype}, {form} scales are {' or '.join(scale_dtypes)}"
        faults.append(Difference(tensor=scale.name, kind="dtype", detail=detail))
    if scale.shape not in scale_shapes:
        detail = (
            f"stored as {list(scale.shape)}, the {form} codes {list(codes.shape)} need"
            f" {list(scale_shapes[0])}"
        )
        faults.append(Difference(tensor=scale.name, kind="shape", detail=detail))
    nbytes = codes.nbytes + scale.nbytes
    return Logical(stem, shape, codes.dtype, form, nbytes, (codes.name, scale.name))


class _Layout(NamedTuple):
    """How a weight is packed, and what its parts may be."""

    form: str
    shape: Shape
    codes_dtypes: tuple[str, ...]
    scale_dtypes: tuple[str, ...]
    scale_shapes: tuple[Shape, ...]
    """The usual one first."""


@functools.lru_cache(maxsize=4096)
def _layout(
    blocks: bool,
    shape: Shape,
    dtype: str,
    scale_shape: Shape | None,
    scale_dtype: str | None,
    told: Scheme,
) -> _Layout:
    lead, columns = shape[:-1], shape[-1] if shape else 1
    if blocks:
        # [E, N, G, 16] bytes of two codes each; the model's bank is the transpose [E, 32 G, N].
        *outer, rows, groups = lead if len(lead) > 1 else (1, 1)
        return _Layout("mxfp4", (*outer, groups * columns * 2, rows), ("U8",), EXPONENTS, (lead,))
    if dtype in ("I32", "I64"):
        wide = columns * 32 // told.bits
        scales = [(*lead, 1)]
        if told.group:
            scales = [(*lead, -(-wide // told.group))]
        elif scale_shape and scale_shape[:-1] == lead and 0 < scale_shape[-1] <= wide:
            scales = [scale_shape]
        return _Layout(f"int{told.bits}", (*lead, wide), ("I32",), FLOATS, tuple(scales))
    if dtype in FLOAT8:
        return _float8(shape, scale_shape, scale_dtype, told)
    if dtype == "I8" and scale_dtype in FLOATS:
        return _Layout("int8", shape, ("I8",), FLOATS, _by_row_or_matrix(shape))
    wide = 2 * columns
    if scale_dtype == "F8_E4M3":
        return _Layout("nvfp4", (*lead, wide), ("U8",), ("F8_E4M3",), ((*lead, -(-wide // 16)),))
    return _Layout("mxfp4", (*lead, wide), ("U8", "I8"), EXPONENTS, ((*lead, -(-wide // 32)),))


def _float8(
    shape: Shape, scale_shape: Shape | None, scale_dtype: str | None, told: Scheme
) -> _Layout:
    *outer, rows, columns = (1, 1, *shape)[-max(2, len(shape)) :]
    by_group = (*outer, rows, -(-columns // 32))
    if scale_dtype in EXPONENTS and scale_shape == by_group:
        return _Layout("mxfp8", shape, FLOAT8, EXPONENTS, (by_group,))
    height, width = told.block or (128, 128)
    by_block = (*outer, -(-rows // height), -(-columns // width))
    scales = (by_block, *_by_row_or_matrix(shape))
    return _Layout("fp8", shape, FLOAT8, (*FLOATS, *EXPONENTS), scales)


def _by_row_or_matrix(shape: Shape) -> tuple[Shape, ...]:
    """Shapes of a scale for each row or for each matrix."""
    lead, matrices = shape[:-1], shape[:-2]
    return ((*lead, 1), lead, (*matrices, 1, 1), (*matrices, 1), matrices)


def _joined(info: TensorInfo, stored: Stored, tensors: Mapping[str, TensorInfo]) -> bool:
    """Adds a part beside codes and scale to its weight, or a fault when it has no packed weight.

    False for a tensor that is a weight itself.
    """
    name = info.name
    module, _, word = name.rpartition(".")
    if word in ACTIVATIONS:
        suffix, stem = "", f"{module}.weight"
    else:
        suffix = next((s for s in (*GLOBAL, *EXTRAS, *SCALES) if name.endswith(s)), None)
        if suffix is None:
            return False
        stem = name.removesuffix(suffix)
    owner = stored.tensors.get(stem)
    if owner is None or owner.format in PLAIN.values():
        return bool(suffix) and _orphaned(info, stem, suffix, stored.faults, tensors)
    wanted: tuple[Shape, ...] = (info.shape,)
    if suffix in GLOBAL:
        wanted = ((1,), (), *_by_row_or_matrix(owner.shape)[2:])
    elif suffix == "_shape":
        wanted = ((len(owner.shape),),)
    if info.shape not in wanted:
        detail = f"stored as {list(info.shape)}, {owner.format} needs {list(wanted[0])}"
        stored.faults.append(Difference(tensor=name, kind="shape", detail=detail))
    stored.tensors[stem] = owner._replace(
        nbytes=owner.nbytes + info.nbytes, parts=(*owner.parts, name)
    )
    return True


def _orphaned(
    info: TensorInfo,
    stem: str,
    suffix: str,
    faults: list[Difference],
    tensors: Mapping[str, TensorInfo],
) -> bool:
    """Tells of a scale without codes; False when the name only looks like one."""
    blocks = suffix == "_scales" and any(name.endswith("_blocks") for name in tensors)
    if suffix not in SCALES or not (blocks or stem.endswith("weight")):
        return False
    if (weight := tensors.get(stem)) is not None:
        detail = f"stored as {weight.dtype}, packed codes belong to {info.name}"
        faults.append(Difference(tensor=stem, kind="dtype", detail=detail))
        return True
    packed = suffix == "_scale" and any(name.endswith("weight_packed") for name in tensors)
    codes = f"{stem}_blocks" if blocks else f"{stem}_packed" if packed else stem
    detail = f"{info.name} is there, its codes are not"
    faults.append(Difference(tensor=codes, kind="missing", detail=detail))
    return True


def _is_size(value: Any) -> bool:
    return type(value) is int and value > 0


def _is_block(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) == 2 and all(map(_is_size, value))


def _agreed(values: Iterable[Any]) -> int | None:
    """The size that all values agree on."""
    found = list(values)
    same = bool(found) and all(value == found[0] for value in found)
    return found[0] if same and _is_size(found[0]) else None
