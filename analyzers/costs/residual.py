"""Residual connections that do more than add."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from analyzers.costs.call import ACTIVATION, Call, a_token, one_way
from analyzers.mixers import first_of
from analyzers.schema import PartName

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def residual_site(
    path: str, module: nn.Module, part: PartName, layers: list[int], config: PreTrainedConfig
) -> Call | None:
    """The call of a module that mixes residual streams or block starts, if it is one, on average
    over these layers (the last one for a site after them)."""
    own = dict(module.named_parameters(recurse=False))
    parameters = sum(p.numel() for p in own.values())
    block = first_of(config, "attn_res_block_size", "n_layers_per_attn_res_block")
    if block and "AttentionResidual" in type(module).__name__:
        # Each layer has a site before its mixer and one before its feed-forward.
        entries = block_starts(layers, block, before_mixer="attention" in path)
        queries = own["query"].numel() // config.hidden_size if "query" in own else 0
        return attention_residual(config.hidden_size, entries, queries, part, parameters)
    if own.keys() == {"fn", "base", "scale"}:
        return hyper_connection(own["fn"], part, parameters)
    if own.keys() == {"hc_fn", "hc_base", "hc_scale"}:
        return hyper_head(own["hc_fn"], part, parameters)
    return None


def attention_residual(
    hidden: int, entries: float, queries: int, part: PartName, parameters: int
) -> Call:
    """Softmax mix of `entries` block starts and running sum: element by element (Kimi-K3), or by
    attention of learned `queries` (Inkling 2), 4 * queries * entries * hidden, and in backward all
    products of attention but the gradient of the queries, 8 * queries * entries * hidden.

    Keeps the running sum, or the block start where it replaces one; the other starts are kept by
    the layers that made them. Backward adds to the gradient of every entry.
    """
    one, product = ACTIVATION * hidden, 2 * queries * entries * hidden
    made = max(queries, 1) * one
    return Call(
        operator="attention_residual",
        part=part,
        forward=one_way(a_token(2 * product), read=entries * one, written=made),
        backward=one_way(
            a_token(4 * product), read=2 * entries * one + made, written=entries * one
        ),
        saved=a_token(one),
        parameters=parameters,
        attributes={"width": hidden},
    )


def block_starts(layers: list[int], block_size: int, *, before_mixer: bool) -> float:
    """Entries that one site mixes, on average over these layers.

    Layer i sees the starts of i // block_size + 1 blocks, and the running sum of its own block,
    which a layer that starts one does not have before its mixer.
    """

    def entries(i: int) -> int:
        return i // block_size + 1 + (not before_mixer or i % block_size != 0)

    return sum(map(entries, layers)) / len(layers)


def hyper_connection(weight: nn.Parameter, part: PartName, parameters: int) -> Call:
    """Manifold-constrained hyper-connection of N streams of width D (Xie et al., arXiv 2512.24880).

    `weight` [(2 + N) N, N D] makes the mixing weights of a token, 2 (2 + N) N N D; the streams are
    mixed with N x N of them, 2 N N D; collapsing, expanding and Sinkhorn go element by element.
    Backward: once the first, twice the second. Keeps the streams and what the layer between made.
    """
    out, flat = weight.shape
    streams = round((1 + out) ** 0.5) - 1  # (2 + N) N = out
    hidden = flat // streams
    weights, mixed = 2 * out * flat, 2 * streams * flat
    one = ACTIVATION * hidden
    return Call(
        operator="hyper_connection",
        part=part,
        # Before the layer the streams are read and one is written, after it all are read again.
        forward=one_way(
            a_token(weights + mixed), read=(2 * streams + 1) * one, written=(streams + 1) * one
        ),
        backward=one_way(
            a_token(weights + 2 * mixed),
            read=(2 * streams + 2) * one,
            written=(streams + 1) * one,
        ),
        saved=a_token((streams + 1) * one),
        parameters=parameters,
        attributes={"width": hidden, "streams": streams},
    )


def hyper_head(weight: nn.Parameter, part: PartName, parameters: int) -> Call:
    """The streams made one after the last layer: `weight` [N, N D] makes their N weights."""
    streams, flat = weight.shape
    hidden = flat // streams
    flops, one = a_token(2 * streams * flat), ACTIVATION * hidden
    return Call(
        operator="hyper_connection",
        part=part,
        forward=one_way(flops, read=streams * one, written=one),
        backward=one_way(flops, read=(streams + 1) * one, written=streams * one),
        saved=a_token(streams * one),
        parameters=parameters,
        attributes={"width": hidden, "streams": streams, "head": True},
    )
