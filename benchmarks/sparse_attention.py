"""Attention over selected keys, and the indexer that selects them, beside dense attention.

    python benchmarks/sparse_attention.py check [--operators sparse_topk] [--dtypes bfloat16]
    python benchmarks/sparse_attention.py attention | indexer | loss [--tokens 8192 16384]

`check` proves the kernels of this device against float64; the others time them on one device, in
bfloat16: 96 heads over a latent of 576 (values 512), 2,048 random keys of each query's past, beside
causal attention of torch with 192 (values 128), the model's other form; the indexer of 64 and of 32
heads of 128. Numbers are milliseconds, medians of some calls.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from analyzers.backends import load_backend
from codegen.build import subject_of
from codegen.load import import_file
from codegen.members import load_members
from codegen.render import render
from codegen.verify.harness import run_on

HEADS, WIDTHS, DENSE, TOP_K = 96, (576, 512), (192, 128), 2048
OPERATORS = ("sparse_topk", "lightning_indexer", "indexer_loss")


def written(operator: str, backend: str, folder: str):
    spec = load_members()[operator]
    made = render(spec, load_backend(backend), {})
    for name, text in made.files.items():
        Path(folder, name).write_text(text, encoding="utf-8")
    return subject_of(made, spec, Path(folder))


def kernel_of(operator: str, backend: str):
    with tempfile.TemporaryDirectory() as folder:
        subject = written(operator, backend, folder)
        return getattr(import_file(subject.module, operator), operator)


def check(backend: str, operators: list[str], dtypes: list[str]) -> int:
    """Every gate of the device; says which ones fail."""
    failed = 0
    for operator in operators:
        with tempfile.TemporaryDirectory() as folder:
            subject = written(operator, backend, folder)
            gates = run_on(subject, "device", "cuda", dtypes=dtypes)
        bad = [gate for gate in gates if not gate.passed]
        failed += len(bad)
        print(f"{operator}: {len(gates) - len(bad)} of {len(gates)} gates passed", flush=True)
        for gate in bad[:12]:
            print(f"  {gate.name}: {gate.detail} {gate.measured} > {gate.tolerance}", flush=True)
    return 4 if failed else 0


def milliseconds(call, least: int = 3, most: int = 20, budget: float = 3000.0) -> float:
    call()
    times = []
    while len(times) < least or (len(times) < most and sum(times) < budget):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def random_keys(tokens: int, top_k: int) -> torch.Tensor:
    """int32 [1, T, K]: different keys of each query's past in ascending order, then -1."""
    rows = []
    for first in range(0, tokens, 1024):
        query = torch.arange(first, min(first + 1024, tokens), device="cuda")[:, None]
        order = torch.rand(len(query), tokens, device="cuda")
        order = order.masked_fill(torch.arange(tokens, device="cuda") > query, 2.0)
        value, key = order.topk(min(top_k, tokens), dim=1, largest=False)
        key = key.masked_fill(value > 1, tokens).sort(1).values
        rows.append(key.masked_fill(key == tokens, -1).to(torch.int32))
    return torch.cat(rows)[None]


def dense(tokens: int) -> dict[str, tuple[float, float]]:
    """Forward, and both passes, of each backend of torch that runs."""
    width, values = DENSE
    q, k = (torch.randn(1, HEADS, tokens, width, device="cuda").bfloat16() for _ in range(2))
    v, do = (torch.randn(1, HEADS, tokens, values, device="cuda").bfloat16() for _ in range(2))
    inputs = q, k, v = [x.requires_grad_() for x in (q, k, v)]
    found = {}
    for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):

        def forward(backend=backend):
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(q, k, v, is_causal=True)

        try:
            with torch.no_grad():
                one = milliseconds(forward)
            both = milliseconds(lambda f=forward: torch.autograd.grad(f(), inputs, do))
            found[backend.name.split("_")[0].lower()] = (one, both)
        except RuntimeError as error:
            print(f"  {backend.name}: {str(error).splitlines()[0][:100]}", flush=True)
    return found


def attention(backend: str, lengths: list[int]) -> None:
    kernel = kernel_of("sparse_topk", backend)
    width, values = WIDTHS
    print("   tokens  forward     both |  dense forward     both | both, times", flush=True)
    for tokens in lengths:
        torch.cuda.empty_cache()
        indices = random_keys(tokens, TOP_K)
        q = torch.randn(1, tokens, HEADS, width, device="cuda").bfloat16().requires_grad_()
        kv = torch.randn(1, tokens, width, device="cuda").bfloat16().requires_grad_()
        do = torch.randn(1, tokens, HEADS, values, device="cuda").bfloat16()

        def forward(q=q, kv=kv, indices=indices):
            return kernel(q, kv, indices, value_dim=values, scale=DENSE[0] ** -0.5)[0]

        with torch.no_grad():
            one = milliseconds(forward)
        both = milliseconds(
            lambda f=forward, q=q, kv=kv, do=do: torch.autograd.grad(f(), (q, kv), do)
        )
        gib = torch.cuda.max_memory_allocated() / 2**30
        del q, kv, do, indices
        print(f"  {tokens:7d} {one:8.1f} {both:8.1f} | peak {gib:.1f} GiB", flush=True)
        for name, (forward_ms, both_ms) in dense(tokens).items():
            line = f"{name:>6s} {forward_ms:8.1f} {both_ms:8.1f} | {both_ms / both:.2f}"
            print(f"  {tokens:7d} {one:8.1f} {both:8.1f} | {line}", flush=True)


def indexer(backend: str, lengths: list[int]) -> None:
    kernel = kernel_of("lightning_indexer", backend)
    for tokens in lengths:
        for heads in (64, 32):
            q = torch.randn(1, tokens, heads, 128, device="cuda").bfloat16()
            k = torch.randn(1, tokens, 128, device="cuda").bfloat16()
            w = torch.randn(1, tokens, heads, device="cuda")
            ours = milliseconds(lambda q=q, k=k, w=w: kernel(q, k, w, top_k=TOP_K))
            line = f"indexer T {tokens}, {heads} heads of 128, top {TOP_K}: {ours:.2f} ms"
            try:
                from attn_gym.sparse import lightning_indexer  # pyright: ignore

                other = milliseconds(
                    lambda q=q, k=k, w=w: lightning_indexer(q, k, w, TOP_K, causal=True)
                )
                line += f"; attn-gym {other:.2f} ms"
            except (ImportError, RuntimeError, TypeError, ValueError) as error:
                line += f"; attn-gym: {type(error).__name__} {str(error)[:60]}"
            print(line, flush=True)


def loss(backend: str, lengths: list[int]) -> None:
    attend, measure = (kernel_of(name, backend) for name in ("sparse_topk", "indexer_loss"))
    for tokens in lengths:
        indices = random_keys(tokens, TOP_K)
        with torch.no_grad():
            q = torch.randn(1, tokens, HEADS, WIDTHS[0], device="cuda").bfloat16()
            kv = torch.randn(1, tokens, WIDTHS[0], device="cuda").bfloat16()
            _, lse = attend(q, kv, indices, value_dim=WIDTHS[1])
        own = [
            torch.randn(1, tokens, 64, 128, device="cuda").bfloat16(),
            torch.randn(1, tokens, 128, device="cuda").bfloat16(),
            torch.randn(1, tokens, 64, device="cuda") * 1e-2,
        ]
        own = [x.requires_grad_() for x in own]

        def forward(own=own, indices=indices, q=q, kv=kv, lse=lse):
            return measure(*own, indices, q, kv, lse)

        with torch.no_grad():
            one = milliseconds(forward)
        both = milliseconds(lambda f=forward, own=own: torch.autograd.grad(f().sum(), own))
        print(f"loss of the indexer T {tokens}: {one:.2f} forward, {both:.2f} both", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("part", choices=("check", "attention", "indexer", "loss"))
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192])
    parser.add_argument("--backend", default="h200")
    parser.add_argument("--operators", nargs="+", choices=OPERATORS, default=list(OPERATORS))
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16"])
    given = parser.parse_args()
    torch.manual_seed(0)
    if given.part == "check":
        return check(given.backend, given.operators, given.dtypes)
    run = {"attention": attention, "indexer": indexer, "loss": loss}[given.part]
    run(given.backend, given.tokens)
    return 0


if __name__ == "__main__":
    sys.exit(main())
