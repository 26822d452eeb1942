"""MXFP4 as Kimi-K3 ships it: E2M1 codes, two a byte, and one power-of-two scale for 32 values.

The even column is in the low nibble; a value is `code * 2 ** (scale - 127)`, scale 255 is NaN (OCP
Microscaling Formats 1.0). Groups run along the last dim.
"""

from __future__ import annotations

import torch

GROUP = 32
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def unpack_mxfp4(
    packed: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    """Decodes `packed` uint8 [..., K/2] with `scale` uint8 [..., K/32] to [..., K] in `dtype`.

    Exact in bfloat16 and float32. Raises ValueError when the shapes do not belong together.
    """
    columns = packed.shape[-1] * 2
    if scale.shape != (*packed.shape[:-1], columns // GROUP) or columns % GROUP:
        raise ValueError(
            f"weight_packed {tuple(packed.shape)} and weight_scale {tuple(scale.shape)}"
        )
    codes = torch.tensor([*_MAGNITUDES, *(-m for m in _MAGNITUDES)], device=packed.device)
    byte = torch.arange(256, device=packed.device)
    pairs = torch.stack([codes[byte & 0xF], codes[byte >> 4]], dim=-1)
    factors = torch.exp2(torch.arange(256, device=packed.device, dtype=torch.float64) - 127)
    factors[255] = torch.nan
    values = pairs[packed.int()].reshape(*scale.shape, GROUP) * factors.float()[
        scale.int()
    ].unsqueeze(-1)
    return values.reshape(*packed.shape[:-1], columns).to(dtype)


def pack_mxfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rounds `weight` [..., K] to MXFP4: uint8 [..., K/2] and scales uint8 [..., K/32].

    The scale puts the largest value of a group into [4, 8), codes round half to even and saturate at 6
    (OCP Microscaling Formats 1.0, section 6.3), so values that came from MXFP4 are kept exactly.
    Raises ValueError when K is no multiple of 32.
    """
    if weight.shape[-1] % GROUP:
        raise ValueError(f"last dim {weight.shape[-1]} is no multiple of {GROUP}")
    groups = weight.float().unflatten(-1, (-1, GROUP))
    _, exponent = torch.frexp(groups.abs().amax(-1))  # amax in [2**(exponent - 1), 2**exponent)
    scale = (exponent - 3 + 127).clamp(0, 254)
    scaled = (groups.double() * torch.exp2(127 - scale.double()).unsqueeze(-1)).abs().float()
    middles = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], device=weight.device)
    down, up = torch.bucketize(scaled, middles), torch.bucketize(scaled, middles, right=True)
    codes = torch.where(down % 2 == 0, down, up) + 8 * torch.signbit(groups)
    codes = codes.reshape(weight.shape).to(torch.uint8)
    return codes[..., 0::2] | codes[..., 1::2] << 4, scale.to(torch.uint8)
