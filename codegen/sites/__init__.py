"""How models call the operators that kernels are generated for, by the sites of an analysis.

A kernel has one signature; a site has the arguments, layouts and states of the model around it.
`CALLS` are adapters for functions that a forward looks up by name, `FORWARDS` for modules whose
whole forward is replaced.
"""

from codegen.sites.calls import BESIDE, CALLS
from codegen.sites.forwards import FORWARDS, delta_attention, is_delta_attention
from codegen.sites.gates import FORGET_GATES, raw_forward
from codegen.sites.kernels import Kernels

__all__ = [
    "BESIDE",
    "CALLS",
    "FORGET_GATES",
    "FORWARDS",
    "Kernels",
    "delta_attention",
    "is_delta_attention",
    "raw_forward",
]
