"""Linear layers and what goes element by element between them.

A frozen weight has no gradient: the backward pass of a linear is the gradient of its input, one
matrix product as in forward, for which only the weight is needed. An adapted one keeps its input.
"""

from __future__ import annotations

from torch import nn

from analyzers.costs.call import ACTIVATION, FLOAT32, Call, a_token, one_way
from analyzers.schema import AdapterWork, PartName, Work


def linear(module: nn.Linear, part: PartName, *, keeps_input: bool = True) -> Call:
    """2 * in * out FLOPs a token, and as many backward.

    `keeps_input`: False when something else keeps the tensor that an adapter on it has to keep.
    A block-diagonal one, which counts its input by group, takes no adapter: a product of two thin
    matrices is not block-diagonal.
    """
    groups = getattr(module, "n_groups", 1)
    i, o = module.in_features * groups, module.out_features
    flops = a_token(2 * module.weight.numel())
    read, written = ACTIVATION * i, ACTIVATION * o
    saved = a_token(ACTIVATION * i if keeps_input else 0)
    return Call(
        operator="linear" if groups == 1 else "grouped_linear",
        part=part,
        forward=one_way(flops, read=read, written=written),
        backward=one_way(flops, read=written, written=read),
        adapter=AdapterWork(width=i + o, matrices=1, saved_bytes=saved) if groups == 1 else None,
        parameters=sum(p.numel() for p in module.parameters()),
        attributes={"in_features": module.in_features, "out_features": o},
    )


def embedding(vocabulary: int, hidden: int) -> Call:
    """A row is read and written; a frozen table has no backward pass."""
    row = ACTIVATION * hidden
    return Call(
        operator="embedding",
        part="embedding",
        forward=one_way(Work(), read=row, written=row),
        parameters=vocabulary * hidden,
        attributes={"vocabulary": vocabulary, "hidden": hidden},
    )


def norm(class_name: str, width: int, part: PartName, parameters: int, *, rows: int = 1) -> Call:
    """RMSNorm or LayerNorm of `rows` heads of `width` a token, with or without a gate.

    Keeps its input (and the gate), and the reciprocal deviation of a row in float32.
    """
    gated = "Gated" in class_name
    operator = "gated_rms_norm" if gated else "rms_norm" if "RMS" in class_name else "layer_norm"
    one = ACTIVATION * width * rows
    inputs = 2 * one if gated else one
    return Call(
        operator=operator,
        part=part,
        forward=one_way(Work(), read=inputs, written=one),
        backward=one_way(Work(), read=inputs + one, written=inputs),
        saved=a_token(inputs + FLOAT32 * rows),
        parameters=parameters,
        attributes={"width": width * rows},
    )


def activation(width: int, part: PartName, *, gated: bool) -> Call:
    """`act(gate) * up`, or `act(up)` without a gate. Keeps what it reads."""
    one = ACTIVATION * width
    inputs = 2 * one if gated else one
    return Call(
        operator="gated_activation" if gated else "activation",
        part=part,
        forward=one_way(Work(), read=inputs, written=one),
        backward=one_way(Work(), read=inputs + one, written=inputs),
        saved=a_token(inputs),
        attributes={"width": width},
    )


def short_convolution(module: nn.Conv1d, part: PartName) -> Call:
    """A causal convolution over time with its activation: 2 * taps * (in / groups) a channel.

    Keeps its input; what the activation reads is computed again.
    """
    channels, taps = module.in_channels, module.kernel_size[0]
    flops = a_token(2 * module.weight.numel())  # [out, in / groups, taps]
    read, written = ACTIVATION * channels, ACTIVATION * module.out_channels
    return Call(
        operator="short_convolution",
        part=part,
        forward=one_way(flops, read=read, written=written),
        backward=one_way(flops, read=read + written, written=read),
        saved=a_token(read),
        parameters=sum(p.numel() for p in module.parameters()),
        attributes={"channels": channels, "kernel_size": taps},
    )
