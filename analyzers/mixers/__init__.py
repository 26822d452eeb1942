"""The token mixers that are recognised, in one table keyed by module structure.

Each reader takes its sizes from the attributes that transformers' modules carry; what it needs from
the config is named the same in every config. Mixers without a reader stay unnamed: better `other`
than wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from analyzers.mixers import attention, linear, sparse
from analyzers.mixers.mixer import Attributes, Mixer, first_of

__all__ = ["MIXERS", "Attributes", "Mixer", "first_of", "is_mixer", "recognise"]

Test = Callable[[Any], bool]
Reader = Callable[[Any, Any], Mixer]

# The first test that holds decides.
MIXERS: list[tuple[Test, Reader]] = [
    (linear.is_mamba2, linear.mamba2),
    (linear.is_mamba1, linear.mamba1),
    (linear.is_delta_rule, linear.delta_rule),
    (linear.is_gla, linear.gla),
    (linear.is_lightning, linear.lightning),
    (linear.is_mlstm, linear.mlstm),
    (linear.is_rg_lru, linear.rg_lru),
    (linear.is_rwkv, linear.rwkv),
    (linear.is_short_convolution, linear.short_convolution),
    (sparse.is_compressed_attention, sparse.compressed_attention),
    (sparse.is_sparse_attention, sparse.sparse_attention),
    (sparse.is_dynamic_mask_attention, sparse.dynamic_mask_attention),
    (attention.is_latent_attention, attention.latent_attention),
    (attention.is_attention, attention.attention),
]


def _reader(module: Any) -> Reader | None:
    return next((read for test, read in MIXERS if test(module)), None)


def is_mixer(module: Any) -> bool:
    if hasattr(module, "inferred_mixer"):
        return module.inferred_mixer is not None
    return _reader(module) is not None


def recognise(module: Any, config: Any) -> Mixer | None:
    """The mixer that a module is, by the table above; None when it is none of them."""
    if hasattr(module, "inferred_mixer"):  # a module without a class, see `analyzers.headers`
        return module.inferred_mixer
    read = _reader(module)
    return read(module, config) if read else None
