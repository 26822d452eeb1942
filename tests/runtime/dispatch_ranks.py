"""What the ranks of `test_dispatch.py` run: each dispatcher beside `Local`, on made-up experts.

`torchrun ... dispatch_ranks.py RESULTS.json`; rank 0 writes what every rank found.
"""

import json
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from runtime.__main__ import leave
from runtime.build import process_group
from runtime.checks import distance
from runtime.experts import dispatch
from runtime.experts.fan import TORCH
from tests.runtime.runs import row_kernels

EXPERTS, CHOICES, WIDTH = 8, 4, 6


def routed(rank, skewed, tokens):
    """Tokens, choices and weights of one rank; skewed: every token to experts 0 .. K-1."""
    torch.manual_seed(rank)
    scores = torch.rand(tokens, EXPERTS)
    index = scores.topk(CHOICES).indices
    if skewed:
        index = torch.arange(CHOICES).expand(tokens, -1).contiguous()
    return torch.randn(tokens, WIDTH), index, torch.rand(tokens, CHOICES)


def through(dispatcher, x, index, weights, bank, kernels=TORCH):
    """Expert e multiplies by row e of the bank; output and gradients, the bank's of this rank."""
    x, weights, bank = (t.clone().requires_grad_() for t in (x, weights, bank))
    route = dispatcher.route(index, EXPERTS, kernels)
    x_PD, weights_P = route.dispatch(x, weights, kernels)
    y = route.combine(torch.tanh(x_PD) * bank[route.pairs.expert_P], weights_P, kernels)
    (y * torch.arange(1.0, WIDTH + 1)).square().sum().backward()
    return {"y": y.detach(), "x": x.grad, "weights": weights.grad, "bank": bank.grad}


@contextmanager
def counting(sent):
    """Notes the rows of tokens that leave this rank: by group, rank of the group and call."""
    plain = dispatch.exchange

    def exchange(x, receive, send, group):
        if x.shape[1] == WIDTH:
            sent.append((dist.get_process_group_ranks(group), send))
        return plain(x, receive, send, group)

    dispatch.exchange = exchange
    try:
        yield
    finally:
        dispatch.exchange = plain


def case(dispatcher, skewed, tokens, kernels):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    share = EXPERTS // ranks
    bank = torch.linspace(0.5, 2.0, EXPERTS * WIDTH).view(EXPERTS, WIDTH)
    x, index, weights = routed(rank, skewed, tokens)
    own = bank[rank * share : (rank + 1) * share]
    sent = []
    with counting(sent):
        found = through(dispatcher, x, index, weights, own)
    again = through(dispatcher, x, index, weights, own)
    by_kernels = through(dispatcher, x, index, weights, own, kernels)
    expected = through(dispatch.Local(), x, index, weights, bank)
    dist.all_reduce(expected["bank"])
    expected["bank"] = expected["bank"][rank * share : (rank + 1) * share]
    owners = [{e // share for e in row} for row in index.tolist()]
    return {
        "apart": {name: distance(found[name], expected[name]) for name in found},
        "kernels_apart": {name: distance(by_kernels[name], expected[name]) for name in found},
        "size": {name: float(expected[name].abs().sum()) for name in found},
        "again": all(torch.equal(found[name], again[name]) for name in found),
        "sent": sent,
        "owners": [sorted(o) for o in owners],
        "tokens": tokens,
    }


UNEVEN = {
    "none": lambda rank: 7 * rank,  # rank 0 has no token
    "one": lambda rank: 1,
    "single": lambda rank: int(rank == 2),  # one token in all
    "nobody": lambda rank: 0,
}


def main():
    results = {}
    with process_group():
        rank, world = dist.get_rank(), dist.group.WORLD
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rail", "node"))
        rail, node = mesh.get_group("rail"), mesh.get_group("node")
        # Buffers for 33 tokens, and room for all of them at each expert: nothing is dropped.
        with tempfile.TemporaryDirectory() as folder:
            kernels = row_kernels(Path(folder))
        for limit in (None, dispatch.Limit(33, 33)):
            kinds = {
                "all_to_all": dispatch.AllToAll(world, limit),
                "hierarchical": dispatch.Hierarchical(rail, node, limit),
                "all_gather": dispatch.AllGather(world, limit),
            }
            for name, dispatcher in kinds.items():
                name += "-limit" * (limit is not None)
                results[name] = case(dispatcher, False, 33, kernels)
                results[f"{name}-skewed"] = case(dispatcher, True, 33, kernels)
                for how, tokens in UNEVEN.items():
                    results[f"{name}-{how}"] = case(dispatcher, False, tokens(rank), kernels)
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, results)
        if rank == 0:
            Path(sys.argv[1]).write_text(json.dumps(everyone))


if __name__ == "__main__":
    main()
    leave(0)
