"""What the ranks of `test_dispatch.py` run: each dispatcher beside `Local`, on made-up experts.

`torchrun ... dispatch_ranks.py RESULTS.json`; rank 0 writes what every rank found.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from runtime import dispatch
from runtime.__main__ import leave
from runtime.build import process_group
from runtime.checks import distance

EXPERTS, CHOICES, WIDTH = 8, 4, 6


def routed(rank, skewed, tokens):
    """Tokens, choices and weights of one rank; skewed: every token to experts 0 .. K-1."""
    torch.manual_seed(rank)
    scores = torch.rand(tokens, EXPERTS)
    index = scores.topk(CHOICES).indices
    if skewed:
        index = torch.arange(CHOICES).expand(tokens, -1).contiguous()
    return torch.randn(tokens, WIDTH), index, torch.rand(tokens, CHOICES)


def through(dispatcher, x, index, weights, bank):
    """Expert e multiplies by row e of the bank; output and gradients, the bank's of this rank."""
    x, weights, bank = (t.clone().requires_grad_() for t in (x, weights, bank))
    x_PD, sent = dispatcher.dispatch(x, index, weights, EXPERTS)
    scales = [bank[e].expand(n, -1) for e, n in enumerate(sent.pairs.counts)]
    y = dispatcher.combine(torch.tanh(x_PD) * torch.cat(scales), sent)
    (y * torch.arange(1.0, WIDTH + 1)).square().sum().backward()
    return {"y": y.detach(), "x": x.grad, "weights": weights.grad, "bank": bank.grad}


def counted(dispatcher, *arguments):
    """`through`, and the rows of tokens that were sent on the way, forward, by destination."""
    plain, sent = dispatch._exchange, []

    def exchange(x, receive, send, group):
        if x.shape[1] == WIDTH:
            sent.append(send)
        return plain(x, receive, send, group)

    dispatch._exchange = exchange
    try:
        return through(dispatcher, *arguments), sent
    finally:
        dispatch._exchange = plain


def case(dispatcher, skewed, tokens):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    share = EXPERTS // ranks
    bank = torch.linspace(0.5, 2.0, EXPERTS * WIDTH).view(EXPERTS, WIDTH)
    x, index, weights = routed(rank, skewed, tokens)
    own = bank[rank * share : (rank + 1) * share]
    found, sent = counted(dispatcher, x, index, weights, own)
    again = through(dispatcher, x, index, weights, own)
    expected = through(dispatch.Local(), x, index, weights, bank)
    dist.all_reduce(expected["bank"])
    expected["bank"] = expected["bank"][rank * share : (rank + 1) * share]
    pairs = {(t, e // share) for t, row in enumerate(index.tolist()) for e in row}
    return {
        "apart": {name: distance(found[name], expected[name]) for name in found},
        "size": {name: float(expected[name].abs().sum()) for name in found},
        "again": all(torch.equal(found[name], again[name]) for name in found),
        "sent": sent[0] if sent else None,
        "distinct": [sum(r == to for _, r in pairs) for to in range(ranks)],
        "tokens": tokens,
    }


def main():
    results = {}
    with process_group():
        rank, group = dist.get_rank(), dist.group.WORLD
        kinds = {"all_to_all": dispatch.AllToAll(group), "all_gather": dispatch.AllGather(group)}
        for name, dispatcher in kinds.items():
            for skewed in (False, True):
                results[f"{name}{'-skewed' * skewed}"] = case(dispatcher, skewed, 33)
        # Rank 0 has no tokens; an all-gather needs as many on every rank.
        results["all_to_all-uneven"] = case(kinds["all_to_all"], False, 7 * rank)
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, results)
        if rank == 0:
            Path(sys.argv[1]).write_text(json.dumps(everyone))


if __name__ == "__main__":
    main()
    leave(0)
