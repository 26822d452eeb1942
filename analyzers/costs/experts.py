"""Routed experts and their router, a token of `top_k` visits."""

from __future__ import annotations

from torch import nn

from analyzers.costs.call import ACTIVATION, FLOAT32, INDEX, Call, a_token, one_way
from analyzers.schema import BANKS, AdapterWork, PartName, Site
from analyzers.structure import Moe


def router(moe: Moe, module: nn.Module) -> Call:
    """Scores of all experts in float32, 2 * in * experts, and as many back to its input.

    Keeps the scores and the choice. What merely balances (bias, groups) is not differentiated.
    """
    i, e = moe.router_input_size, moe.count + moe.zero_experts
    scores, choice = FLOAT32 * e, (FLOAT32 + INDEX) * moe.top_k
    flops = a_token(2 * i * e)
    return Call(
        operator="router",
        part="router",
        forward=one_way(flops, read=ACTIVATION * i, written=scores + choice),
        backward=one_way(flops, read=scores + choice + FLOAT32 * moe.top_k, written=ACTIVATION * i),
        saved=a_token(scores + choice),
        parameters=sum(p.numel() for p in module.parameters()),
        attributes={"experts": moe.count, "top_k": moe.top_k, "in_features": i},
    )


def experts(moe: Moe, module: nn.Module) -> Call:
    """`top_k` experts a token, each 2 * (elements of its matrices), at the experts' own width;
    choices of an expert that computes nothing are as frequent as the others.

    Backward is the gradient of the inputs, as much again. A fused path keeps the output of the up
    projection of each visit: the activation is computed again from it, and the gradient of a
    routing weight is the product of the activation with its gradient, so that no expert's output
    is kept (SonicMoE, arXiv 2512.14080). An adapted bank keeps its input too, for each visit.
    """
    h, inner = moe.hidden_size, moe.intermediate_size
    k = moe.top_k * moe.count / (moe.count + moe.zero_experts)
    up = sum(bank.out_features for bank in moe.banks[:-1])  # gate and up
    flops = a_token(2 * k * sum(bank.in_features * bank.out_features for bank in moe.banks))
    visit_in, visit_up, visit_inner = (ACTIVATION * k * width for width in (h, up, inner))
    token = ACTIVATION * h
    return Call(
        operator="experts",
        part="routed_experts",
        # Two grouped products with the activation between them, and the weighted sum of the visits.
        forward=one_way(
            flops,
            read=2 * visit_in + visit_up + visit_inner,
            written=visit_in + visit_up + visit_inner + token,
        ),
        backward=one_way(
            flops,
            read=2 * visit_in + 2 * visit_up + visit_inner,
            written=visit_in + visit_up + visit_inner + token,
        ),
        saved=a_token(visit_up),
        adapter=AdapterWork(
            width=k * sum(bank.in_features + bank.out_features for bank in moe.banks),
            matrices=k * len(moe.banks),
            saved_bytes=a_token(visit_in + visit_inner),
        ),
        parameters=sum(moe.held(p) for p in module.parameters()),
        attributes={
            "experts": moe.count,
            "top_k": moe.top_k,
            "hidden_size": h,
            "intermediate_size": inner,
            "gated": moe.gated,
        },
        site=Site(module_class=type(module).__name__, function=BANKS)
        if moe.layout == "stacked"
        else None,
    )


def stacked_linear(weights: list[nn.Parameter], part: PartName) -> Call:
    """Shared experts in stacked weights [E, out, in], which every token passes all of; keeps what
    the activation reads, as routed ones do."""
    flops = a_token(2 * sum(w.numel() for w in weights))
    read = ACTIVATION * sum(w.shape[0] * w.shape[2] for w in weights)
    written = ACTIVATION * sum(w.shape[0] * w.shape[1] for w in weights)
    return Call(
        operator="stacked_linear",
        part=part,
        forward=one_way(flops, read=read, written=written),
        backward=one_way(flops, read=written, written=read),
        saved=a_token(ACTIVATION * sum(w.shape[0] * w.shape[1] for w in weights[:-1])),
        parameters=sum(w.numel() for w in weights),
        attributes={"experts": weights[0].shape[0], "matrices": len(weights)},
    )
