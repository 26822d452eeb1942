"""The graph of each distinct kind of layer, what autograd keeps of it, and its backward pass."""

from analyzers.graph.blocks import BlockGraph, Trace, trace_blocks

__all__ = ["BlockGraph", "Trace", "trace_blocks"]
