"""What each operator of a block costs: FLOPs, bytes and what the backward pass must keep.

Costs are functions of the lengths of documents (`schema.Work`). FLOPs are matrix products, a
multiply-add as two; what goes element by element is priced by its bytes: activations and their
gradients read and written, in bfloat16, weights apart. The backward pass is that of frozen weights,
the gradients of inputs alone; `saved` is what a fused kernel of the operator keeps for it, and what
low-rank adapters add is in `adapter`. docs/costs.md has the formulas in one table.
"""

from analyzers.costs.blocks import FORMULAS, NO_FORMULA, block_calls
from analyzers.costs.call import ACTIVATION, Call
from analyzers.costs.linear import embedding, linear, norm
from analyzers.costs.linear_attention import CHUNK
from analyzers.costs.residual import residual_site

__all__ = [
    "ACTIVATION",
    "CHUNK",
    "FORMULAS",
    "NO_FORMULA",
    "Call",
    "block_calls",
    "embedding",
    "linear",
    "norm",
    "residual_site",
]
