"""Bytes that cross between nodes: plain all-to-all against hierarchical dispatch, counted.

    torchrun --nproc-per-node 4 benchmarks/dispatch_bytes.py [--nodes 2] [--json FILE]

Gloo ranks on this machine stand for devices of several nodes; one layer's tokens are dispatched and
combined, forward and backward. Counted is what each exchange hands to ranks of another node:
tokens, their weights and ids, partial sums, gradients and counts. Both give the same result, or the
script fails. Beside it, the rows a token that `strategies.cost` expects under balanced routing.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from runtime.build import process_group
from runtime.experts import dispatch
from strategies.cost.routing import Choice, distinct_domains


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=1024, help="of a rank")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    given = parser.parse_args()
    with process_group():
        rows, outputs = [], []
        ranks = dist.get_world_size()
        shape = (given.nodes, ranks // given.nodes)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("rail", "node"))
        assert dist.group.WORLD is not None
        plain = dispatch.AllToAll(dist.group.WORLD)
        staged = dispatch.Hierarchical(mesh.get_group("rail"), mesh.get_group("node"))
        for name, dispatcher in (("all_to_all", plain), ("hierarchical", staged)):
            row, output = measure(dispatcher, given, shape[1])
            rows.append({"dispatcher": name} | row)
            outputs.append(output)
        if not torch.allclose(*outputs, rtol=1e-4, atol=1e-4):
            raise SystemExit("the dispatchers disagree")
        if dist.get_rank() == 0:
            report(rows, given, shape)


def measure(
    dispatcher: Any, given: argparse.Namespace, node_size: int
) -> tuple[dict, torch.Tensor]:
    rank = dist.get_rank()
    draw = torch.Generator().manual_seed(rank)
    x = torch.randn(given.tokens, given.width, generator=draw).requires_grad_()
    index = torch.rand(given.tokens, given.experts, generator=draw).topk(given.top_k).indices
    weights = torch.rand(given.tokens, given.top_k, generator=draw).requires_grad_()
    crossing = {"total": 0, "token_rows": 0}
    with counting(crossing, rank // node_size, node_size, given.width):
        route = dispatcher.route(index, given.experts)
        x_PD, weights_P = route.dispatch(x, weights)
        rows = crossing["token_rows"]
        y = route.combine(torch.tanh(x_PD), weights_P)
        y.sum().backward()
    counted = torch.tensor([crossing["total"], rows])
    dist.all_reduce(counted)
    tokens = given.tokens * dist.get_world_size()
    total, rows = counted.tolist()
    return {"crossing_bytes": total, "crossing_rows_per_token": rows / tokens}, y.detach()


@contextmanager
def counting(crossing: dict[str, int], node: int, node_size: int, width: int) -> Iterator[None]:
    """Adds up what this rank hands to ranks of other nodes; the gradient of an exchange sends back
    as many bytes as came."""
    plain_exchange, plain_collective = dispatch.exchange, dist.all_to_all_single

    def other_rows(splits: list[int], group: dist.ProcessGroup) -> int:
        members = dist.get_process_group_ranks(group)
        pairs = zip(members, splits, strict=True)
        return sum(rows for member, rows in pairs if member // node_size != node)

    def exchange(x: torch.Tensor, receive: list[int], send: list[int], group: Any) -> torch.Tensor:
        row = x.shape[1] * x.element_size()
        crossing["total"] += row * (other_rows(send, group) + other_rows(receive, group))
        if x.shape[1] == width:
            crossing["token_rows"] += other_rows(send, group)
        return plain_exchange(x, receive, send, group)

    def collective(
        out: torch.Tensor, x: torch.Tensor, receive: Any = None, send: Any = None, *, group: Any
    ) -> Any:
        splits = send or [x.shape[0] // group.size()] * group.size()
        crossing["total"] += x[0].nbytes * other_rows(splits, group) if len(x) else 0
        return plain_collective(out, x, receive, send, group=group)

    dispatch.exchange, dist.all_to_all_single = exchange, collective  # type: ignore
    try:
        yield
    finally:
        dispatch.exchange, dist.all_to_all_single = plain_exchange, plain_collective


def report(rows: list[dict[str, Any]], given: argparse.Namespace, shape: tuple[int, int]) -> None:
    choice, (nodes, size) = Choice(experts=given.experts, top_k=given.top_k), shape
    other = (nodes - 1) / nodes
    expected = {
        "all_to_all": other * distinct_domains(choice, nodes * size),
        "hierarchical": other * distinct_domains(choice, nodes),
    }
    for row in rows:
        row["expected_rows_per_token"] = expected[row["dispatcher"]]
        print(
            f"{row['dispatcher']:>12}: {row['crossing_bytes'] / 1e6:8.2f} MB between nodes, "
            f"{row['crossing_rows_per_token']:.3f} rows a token "
            f"({row['expected_rows_per_token']:.3f} expected)"
        )
    less = rows[0]["crossing_bytes"] / rows[1]["crossing_bytes"]
    print(f"{less:.2f}x less with {nodes} nodes of {size}")
    if given.json:
        settings = {k: v for k, v in vars(given).items() if k != "json"} | {"ranks": nodes * size}
        machine = f"{platform.system()} {platform.machine()}, torch {torch.__version__}"
        found = {"machine": machine, "settings": settings, "rows": rows, "less": less}
        given.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
