"""Adapted experts, without their dispatch: our kernels, torch's grouped products, PEFT.

    python benchmarks/expert_lora.py [--pairs 65536] [--experts 256] [--hidden 2304]
        [--intermediate 1024] [--rank 16] [--peers base,ours,torch,compiled,peft] [--backend h200]
        [--profile] [--output FILE.json]
    python benchmarks/expert_lora.py --tiny          a rehearsal on the CPU

SwiGLU experts over rows sorted by expert, uneven, some experts without any. `base` has no adapters:
what is left when they cost nothing. `torch` is what the runtime does without kernels (grouped
products of the factors), `compiled` the same by torch.compile, `peft` adds the product of the
factors to every weight. Each is first compared, outputs and gradients, with float32 on fewer rows;
a wrong one is not timed. Forward, and forward and backward to rows and factors, from a cold cache.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
SMALL = 4096
"""Rows of the comparison."""
WORSE = 2.0
"""So many times the error of `torch` is allowed."""
BANKS = ("gate_up_proj", "down_proj")
TINY = {"pairs": 300, "experts": 8, "hidden": 48, "intermediate": 32, "rank": 4}


@dataclass(frozen=True)
class Peer:
    forward: Callable[[Tensor], Tensor]
    """Rows [P, D] -> [P, D]."""
    factors: list[Tensor]
    """Its own trained parameters: A and B of each bank."""
    unpack: Callable[[int, Tensor], Tensor] = lambda n, gradient: gradient
    """The gradient of factor n as `[E, r, in]` or `[E, out, r]`."""

    def both(self, x: Tensor, dy: Tensor) -> list[Tensor]:
        y = self.forward(x)
        return [y.detach(), *torch.autograd.grad(y, [x, *self.factors], dy)]


def experts_of(args: argparse.Namespace, device: str, dtype: torch.dtype) -> Any:
    """The module of a Kimi-Linear model with random weights and adapters."""
    from transformers import KimiLinearConfig
    from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearExperts

    sizes = {"num_experts": args.experts, "moe_intermediate_size": args.intermediate}
    config = KimiLinearConfig(hidden_size=args.hidden, **sizes)
    with torch.device("meta"):
        module: Any = KimiLinearExperts(config)
    module.to_empty(device=device).to(dtype).requires_grad_(False)
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int, std: float, kind: torch.dtype) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=kind).mul_(std)

    for bank in BANKS:
        count, outs, ins = getattr(module, bank).shape
        getattr(module, bank).data = normal(count, outs, ins, std=ins**-0.5, kind=dtype)
        for side, shape, std in (("A", (args.rank, ins), ins**-0.5), ("B", (outs, args.rank), 0.1)):
            factor = normal(count, *shape, std=std, kind=torch.float32)
            setattr(module, f"lora_{bank}_{side}", torch.nn.Parameter(factor))
    module.lora_scale, module.lora_dropout = 2.0, 0.0
    return module


def pairs_of(args: argparse.Namespace, device: str, rows: int) -> Any:
    from runtime.experts.fan import Pairs

    generator = torch.Generator().manual_seed(1)
    popularity = torch.randn(args.experts, generator=generator).mul(0.5).exp()
    popularity[[1, args.experts // 2, args.experts - 1]] = 0
    ids = torch.multinomial(popularity, rows, replacement=True, generator=generator)
    return Pairs.of(ids.to(device).unsqueeze(1), args.experts, rows)


def factors_of(module: Any) -> list[Tensor]:
    return [getattr(module, f"lora_{bank}_{side}") for bank in BANKS for side in "AB"]


def mlp(module: Any, pairs: Any) -> Callable[[Tensor], Tensor]:
    """What the runtime computes on the rows that a dispatcher brought."""
    from runtime.experts.activations import activation_of
    from runtime.experts.stacked import adapted_linear

    def forward(x: Tensor) -> Tensor:
        h = adapted_linear(module, BANKS[0], x, pairs, activation_of(module))
        return adapted_linear(module, BANKS[1], h, pairs)

    return forward


def base(module: Any, pairs: Any, args: argparse.Namespace) -> Peer:
    from runtime.experts.stacked import base_linear

    def forward(x: Tensor) -> Tensor:
        h = module._apply_gate(base_linear(module, BANKS[0], x, pairs))
        return base_linear(module, BANKS[1], h, pairs)

    return Peer(forward, [])


def plain(module: Any, pairs: Any, args: argparse.Namespace) -> Peer:
    return Peer(mlp(module, pairs), factors_of(module))


def compiled(module: Any, pairs: Any, args: argparse.Namespace) -> Peer:
    return Peer(torch.compile(mlp(module, pairs), fullgraph=True), factors_of(module))


def ours(module: Any, pairs: Any, args: argparse.Namespace) -> Peer:
    from analyzers.schema import BANKS as SITE

    kernel, forward = kernel_of(args), mlp(module, pairs)

    def with_kernel(x: Tensor) -> Tensor:
        module.__dict__[SITE] = kernel
        try:
            return forward(x)
        finally:
            del module.__dict__[SITE]

    return Peer(with_kernel, factors_of(module))


def kernel_of(args: argparse.Namespace) -> Callable[..., Tensor]:
    """What `adapt kernels` renders for the backend."""
    from analyzers.backends import load_backend
    from codegen.load import import_file
    from codegen.members import load_members
    from codegen.render import render

    if not hasattr(args, "kernel"):
        spec = load_members()["grouped_lora"]
        made = render(spec, load_backend("cpu" if args.tiny else args.backend), {})
        path = Path(args.folder) / made.module
        path.write_text(made.files[made.module], "utf-8")
        args.kernel = getattr(import_file(path, "grouped_lora_measured"), spec.function)
    return args.kernel


def peft(module: Any, pairs: Any, args: argparse.Namespace) -> Peer:
    """PEFT's own wrapper of expert weights around the plain experts; its packing of the factors."""
    from peft import LoraConfig, get_peft_model

    from runtime.experts.stacked import base_linear
    from runtime.peft_format import pack_a, pack_b

    class Experts(torch.nn.Module):
        is_transposed = False

        def __init__(self) -> None:
            super().__init__()
            for bank in BANKS:
                weight = torch.nn.Parameter(getattr(module, bank).data, requires_grad=False)
                self.register_parameter(bank, weight)

        def forward(self, x: Tensor) -> Tensor:
            h = module._apply_gate(base_linear(self, BANKS[0], x, pairs))
            return base_linear(self, BANKS[1], h, pairs)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = Experts()

        def forward(self, x: Tensor) -> Tensor:
            return self.experts(x)

    targets = [f"experts.{bank}" for bank in BANKS]
    alpha = module.lora_scale * args.rank
    lora = LoraConfig(r=args.rank, lora_alpha=alpha, target_parameters=targets)
    wrapped = get_peft_model(Model(), lora)  # type: ignore[arg-type]
    found: list[Tensor] = []
    for n, factor in enumerate(factors_of(module)):
        side, pack = (("A", pack_a), ("B", pack_b))[n % 2]
        values = pack(factor.detach())
        (own,) = (
            p
            for name, p in wrapped.named_parameters()
            if f"lora_{side}." in name and p.shape == values.shape
        )
        own.data.copy_(values)
        found.append(own)

    def unpack(n: int, gradient: Tensor) -> Tensor:
        if n % 2 == 0:
            return gradient.view(args.experts, args.rank, -1)
        return gradient.view(-1, args.rank, args.experts).permute(2, 0, 1)

    return Peer(wrapped, found, unpack)


PEERS = {"base": base, "ours": ours, "torch": plain, "compiled": compiled, "peft": peft}


def rows_of(args: argparse.Namespace, rows: int, device: str, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator(device).manual_seed(2)
    shape = (rows, args.hidden)
    x, dy = (torch.randn(shape, generator=generator, device=device).to(dtype) for _ in range(2))
    return [x.requires_grad_(), dy]


def errors_of(
    args: argparse.Namespace, module: Any, device: str, dtype: torch.dtype
) -> dict[str, list[float]]:
    """Relative errors of output and gradients of each peer with adapters, against float32; none of
    one that fails."""
    from copy import deepcopy

    rows = min(SMALL, args.pairs)
    pairs = pairs_of(args, device, rows)
    x, dy = rows_of(args, rows, device, dtype)
    exact = deepcopy(module).float()
    wanted = plain(exact, pairs, args).both(x.detach().float().requires_grad_(), dy.float())
    del exact
    found = {}
    for name in dict.fromkeys(["torch", *args.peers]):
        if name == "base":
            continue
        try:
            peer = PEERS[name](module, pairs, args)
            got = peer.both(x, dy)
        except Exception as e:
            print(f"{name:9} fails: {type(e).__name__}: {str(e)[:500]}")
            found[name] = []
            continue
        got = [*got[:2], *(peer.unpack(n, g) for n, g in enumerate(got[2:]))]
        found[name] = [
            float((g.float() - w).norm() / w.norm()) for g, w in zip(got, wanted, strict=True)
        ]
    return found


def main() -> int:
    from attention.job import device as device_of
    from attention.report import machine

    p = argparse.ArgumentParser(description=__doc__)
    p.formatter_class = argparse.RawDescriptionHelpFormatter
    p.add_argument("--pairs", type=int, default=65536, help="rows, one an expert and token")
    p.add_argument("--experts", type=int, default=256)
    p.add_argument("--hidden", type=int, default=2304)
    p.add_argument("--intermediate", type=int, default=1024)
    p.add_argument("--rank", type=int, default=16)
    p.add_argument("--peers", default=",".join(PEERS), type=lambda text: text.split(","))
    p.add_argument("--backend", default="h200")
    p.add_argument("--seconds", type=float, default=1.0, help="of each measurement")
    p.add_argument("--profile", action="store_true", help="device time of ours by kernel")
    p.add_argument("--tiny", action="store_true")
    p.add_argument("--output", type=Path)
    args = p.parse_args()
    if args.tiny:
        vars(args).update(TINY, seconds=0.05)
    name, dtype = "cpu" if args.tiny else "cuda", torch.bfloat16
    clock = device_of(name)
    with tempfile.TemporaryDirectory() as folder:
        args.folder = folder
        module = experts_of(args, name, dtype)
        errors = errors_of(args, module, name, dtype)
        wrong = [
            peer
            for peer, found in errors.items()
            if not found or any(e > WORSE * t for e, t in zip(found, errors["torch"], strict=True))
        ]
        pairs = pairs_of(args, name, args.pairs)
        x, dy = rows_of(args, args.pairs, name, dtype)
        results: dict[str, dict] = {}
        for peer_name in args.peers:
            row: dict[str, Any] = {"errors": errors.get(peer_name)}
            results[peer_name] = row
            if peer_name in wrong:
                print(f"{peer_name:9} wrong: {errors[peer_name]}, torch {errors['torch']}")
                continue
            peer = PEERS[peer_name](module, pairs, args)

            def forward(peer: Peer = peer) -> list[Tensor]:
                with torch.no_grad():
                    return [peer.forward(x)]

            def both(peer: Peer = peer) -> list[Tensor]:
                return peer.both(x, dy)

            row["forward_ms"] = clock.median(forward, args.seconds)
            row["both_ms"] = clock.median(both, args.seconds)
            row["both_extra_bytes"] = clock.extra_bytes(both)
            if args.profile and peer_name in ("ours", "base") and clock.cuda:
                from training_speed import profiled

                row["profile"] = profiled(both, clock.synchronize, None)
            print(line(peer_name, row, results.get("base")), flush=True)
            for kernel in row.get("profile", {}).get("kernels", [])[:16]:
                print(f"   {kernel['ms']:8.3f} ms {kernel['count']:4} x {kernel['name'][:90]}")
    if args.output:
        given = {k: str(v) for k, v in vars(args).items() if k not in ("kernel", "folder")}
        document = {"arguments": given, "machine": machine(name), "results": results}
        args.output.write_text(json.dumps(document, indent=1) + "\n")
    return 1 if wrong else 0


def line(name: str, row: dict[str, Any], bare: dict[str, Any] | None) -> str:
    text = f"{name:9} forward {row['forward_ms']:8.3f} ms, both {row['both_ms']:8.3f} ms"
    if bare is not None:
        text += f" ({row['both_ms'] / bare['both_ms']:.2f} of base)"
    if row["both_extra_bytes"] is not None:
        text += f", {row['both_extra_bytes'] / 1e9:.2f} GB extra"
    return text + (f", worst error {max(row['errors']):.1e}" if row["errors"] else "")


if __name__ == "__main__":
    sys.exit(main())
