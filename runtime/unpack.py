"""Packed weights, decoded to float32 some rows at a time.

The formats are those that `analyzers.formats` recognises, with its conventions: weights
`[.., out, in]`, groups of codes along `in`. A row is a row of a matrix, or an expert of a stack.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from analyzers.errors import InputError
from analyzers.formats import Logical, Scheme
from analyzers.models.kimi_k3.mxfp4 import unpack_mxfp4

Read = Callable[[str, int, int], Tensor]
"""Rows `[low, high)` of a stored tensor."""
FORMATS = ("mxfp4", "mxfp8", "fp8", "int8", "int4")


def rows_of(
    weight: Logical,
    low: int,
    high: int,
    read: Read,
    shapes: Mapping[str, tuple[int, ...]],
    scheme: Scheme,
) -> Tensor:
    """Rows `[low, high)` of a packed weight.

    Raises InputError for formats and parts (zero points, global scales) that are not decoded here.
    """
    codes_name, *rest = weight.parts
    extra = [part for part in rest[1:] if not part.endswith(("_shape", "input_scale"))]
    if weight.format not in FORMATS or not rest or extra:
        what = f"packed as {weight.format}" + (f" with {extra[0]}" if extra else "")
        fault, fix = f"{what}, which is not unpacked here", "use bfloat16 weights"
        raise InputError(codes_name, fault=fault, fix=fix)
    codes, scale_name = read(codes_name, low, high), rest[0]
    if weight.format == "mxfp4":
        scale = read(scale_name, low, high).view(torch.uint8)
        if codes_name.endswith("_blocks"):  # [E, N, G, 16], of a weight [E, K, N]
            return unpack_mxfp4(codes.flatten(-2), scale, torch.float32).transpose(1, 2)
        return unpack_mxfp4(codes.view(torch.uint8), scale, torch.float32)
    if codes.dtype == torch.int32:
        codes = _nibbles(codes)[..., : weight.shape[-1]]
    matrix, shape = (shapes[codes_name][-2], codes.shape[-1]), shapes[scale_name]
    if math.prod(shape) == 1:
        return codes.float() * _numbers(read(scale_name, 0, 1)).reshape(())
    if codes.ndim == 3:
        scale = _numbers(read(scale_name, low, high)).reshape(high - low, *_form(shape[1:]))
        return codes.float() * _spread(scale, matrix, _block(weight, matrix, scale.shape, scheme))
    height, width = _block(weight, matrix, _form(shape), scheme)
    first, last = low // height, -(-high // height)
    scale = _numbers(read(scale_name, first, last)).reshape(last - first, _form(shape)[1])
    spread = _spread(scale, ((last - first) * height, matrix[1]), (height, width))
    return codes.float() * spread[low - first * height : high - first * height]


def _form(shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows and columns of the scales of one matrix."""
    rows, columns = (*shape, 1, 1)[:2]
    return rows, columns


def _block(
    weight: Logical, matrix: tuple[int, int], scales: tuple[int, ...], scheme: Scheme
) -> tuple[int, int]:
    """Rows and columns of a matrix that one scale is for."""
    rows, columns = matrix
    if weight.format == "mxfp8":
        return 1, 32
    if weight.format in ("int4", "int8") and scales[-1] > 1:
        return 1, scheme.group or columns // scales[-1]
    height, width = scheme.block or (128, 128)
    if tuple(scales[-2:]) == (-(-rows // height), -(-columns // width)):
        return height, width
    return (1 if scales[-2] == rows else rows), columns


def _numbers(scale: Tensor) -> Tensor:
    """Scales as numbers: eight bits without a sign are exponents of two."""
    return torch.exp2(scale.float() - 127) if scale.dtype == torch.uint8 else scale.float()


def _spread(scale: Tensor, matrix: tuple[int, int], block: tuple[int, int]) -> Tensor:
    """Each scale over its block, the last blocks cut: [.., h, w] -> [.., rows, columns]."""
    scale = scale.repeat_interleave(block[0], -2)[..., : matrix[0], :]
    return scale.repeat_interleave(block[1], -1)[..., : matrix[1]]


def _nibbles(packed: Tensor) -> Tensor:
    """int32 [.., K / 8] -> int8 [.., K] in [-8, 8): the first value lowest, stored plus 8."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    values = (packed.unsqueeze(-1) >> shifts) & 0xF
    return (values.flatten(-2) - 8).to(torch.int8)
