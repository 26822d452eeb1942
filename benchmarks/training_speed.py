"""Tokens a second and memory of LoRA training: our runtime, and transformers with PEFT.

    python benchmarks/training_speed.py [--layers 8] [--batch 2] [--tokens 4096] [--ranks 1 --ep 1]
        [--rank 16] [--peers ours,stock] [--profile] [--output FILE.json]
    python benchmarks/training_speed.py --tiny          a rehearsal on the CPU

The model is Kimi-Linear at its real widths with fewer layers, random weights drawn by the names of
the parameters, so that both have the same; the tokens are random. Attention and all routed experts
are adapted, every layer is recomputed in backward, each step ends with a clipped update of AdamW.
Each peer runs in processes of its own. The losses of the first step, where no adapter changes
anything yet, must agree before a time is reported. `stock` is transformers with PEFT and, where it
is installed, flash-linear-attention, as its documentation sets them up; it runs on one device.
With --alone one process plays rank 0 of --ranks: its memory, and its step without communication, on
one device (`loopback.py`).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
AGREE = 5e-3
"""Relative difference of the first losses, both in bfloat16."""
TARGETS = ["attention", "routed_experts"]
TINY = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "num_experts": 8,
    "num_experts_per_token": 2,
    "linear_head_dim": 16,
    "linear_num_heads": 4,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}


def config_of(args: argparse.Namespace) -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model(
        "kimi_linear",
        num_hidden_layers=args.layers,
        architectures=["KimiLinearForCausalLM"],
        dtype="float32" if args.tiny else "bfloat16",
        use_cache=False,
        **(TINY if args.tiny else {}),
    )


def drawn(name: str, shape: torch.Size, device: torch.device) -> torch.Tensor:
    """The value of a base parameter, the same in every process, as a fresh model would have it."""
    generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
    last = name.rpartition(".")[2]
    x = torch.empty(shape, device=device, dtype=torch.float32)
    if last == "A_log":
        return x.uniform_(1, 16, generator=generator).log_()
    if last == "dt_bias":
        step = x.uniform_(1e-3, 1e-1, generator=generator)
        return step + torch.log(-torch.expm1(-step))
    if last.endswith("bias"):
        return x.zero_()
    if len(shape) < 2:
        return x.fill_(1.0)
    return x.normal_(0.0, 0.02, generator=generator)


@torch.no_grad()
def fill(parameters: Iterator[tuple[str, torch.Tensor]], device: torch.device) -> None:
    """Draws every base parameter and buffer, an expert at a time, into the shards that are here."""
    from runtime.shards import local_rows

    for name, tensor in parameters:
        if "lora_" in name:
            continue
        name = name.removeprefix("base_model.model.").replace("base_layer.", "")
        shard, low, high = local_rows(tensor)
        if tensor.ndim == 3:
            for row, expert in enumerate(range(low, high)):
                shard[row].copy_(drawn(f"{name}.{expert}", tensor.shape[1:], device))
        else:
            shard.copy_(drawn(name, tensor.shape, device)[low:high] if tensor.ndim else 0.0)


def token_batches(args: argparse.Namespace, vocabulary: int, rank: int) -> Callable[[int], Any]:
    def draw(step: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * step + rank)
        return torch.randint(0, vocabulary, (args.batch, args.tokens), generator=generator)

    return draw


def ours(args: argparse.Namespace) -> dict[str, Any]:
    """One rank of our runtime, from the documents that `adapt` would write."""
    import loopback
    import torch.distributed as dist
    from attention.layer import unproved_kernels

    from analyzers import analyze
    from analyzers.backends import load_backend
    from codegen import bind
    from runtime.adapters import adapter_parameters, initialise_adapters
    from runtime.build import Documents, build_adapted, dtype_of, process_group
    from runtime.garbage import collect_between_steps
    from runtime.loss import fuse_head
    from runtime.norms import use_fused_norms
    from runtime.optim import build_optimizer, clip_gradients
    from runtime.packing import Row, collate
    from runtime.sharding import parallelize
    from runtime.step import forward_backward
    from runtime.tokens import Example
    from strategies import load_cluster, search
    from strategies.cluster import flat_cluster
    from strategies.pricing import predict
    from strategies.problem import make_problem
    from strategies.schema import Job, Lora

    backend = load_backend("cpu" if args.tiny else args.backend)
    with tempfile.TemporaryDirectory() as folder:
        config_of(args).save_pretrained(folder)
        analysis = analyze(folder)
        job = Job(
            model=folder,
            cluster=args.cluster or "",
            backend=backend.name,
            lora=Lora(rank=args.rank, alpha=2.0 * args.rank, targets=list(TARGETS)),
            sequence_length=args.tokens,
        )
        cluster = (
            load_cluster(args.cluster)
            if args.cluster
            else flat_cluster("here", backend, args.ranks, bw_gbps=450.0, latency_us=10.0)
        )
        fixed = {
            "dp_replicate": args.replicate,
            "ep": args.ep,
            "micro_batch_size": args.batch,
        }
        plan = search(analysis, cluster, job, fixed=fixed)
        plan = replace(plan, activation_checkpointing="full", gradient_accumulation=1)
        predicted = predict(make_problem(analysis, cluster, job).work, cluster, plan)
        documents = Documents(Path(folder), job, plan, analysis)
        group = loopback.process_group(args.ranks) if args.alone else process_group()
        with group as device:
            model = build_adapted(documents, dtype=dtype_of(plan))
            use_fused_norms(model)
            parallelize(model, plan)
            model.to_empty(device=device)
            named = [*model.named_parameters(), *model.named_buffers()]
            fill(iter(named), device)
            initialise_adapters(model, 0)
            bind(model, unproved_kernels(analysis, backend, Path(folder)))
            model.train()
            refused = fuse_head(model, device)
            adapters = adapter_parameters(model)
            optimizer = build_optimizer(adapters.values(), job.optimizer)
            collect_between_steps()
            draw = token_batches(args, model.config.vocab_size, dist.get_rank())

            def step(number: int) -> torch.Tensor:
                examples = [Example(ids, ids) for ids in draw(number).tolist()]
                rows = [Row(examples, (n,), args.tokens) for n in range(args.batch)]
                result = forward_backward(model, [collate(rows, args.tokens, 0)], device)
                clip_gradients(adapters.values(), job.optimizer.max_grad_norm)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                return result.mean

            found = timed(step, args, device)
            found["parameters"] = sum(p.numel() for p in model.parameters())
            found["trained"] = sum(p.numel() for p in adapters.values())
            found["all_logits"] = refused
            found["predicted"] = {
                "step_seconds": predicted.step_seconds,
                "step": asdict(predicted.step),
                "memory_gib": asdict(predicted.memory_gib),
                "allocated_gib": predicted.memory_gib.allocated,
            }
            return found | {"report": dist.get_rank() == 0}


def stock(args: argparse.Namespace) -> dict[str, Any]:
    """transformers and PEFT on one device."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    from runtime.sharding import device_type, keep_float32

    device = torch.device(device_type())
    config = config_of(args)
    with device:
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32 if args.tiny else torch.bfloat16
        )
    keep_float32(model)
    fill(iter([*model.named_parameters(), *model.named_buffers()]), device)
    linear = [
        n for n, m in model.named_modules() if "self_attn" in n and type(m) is torch.nn.Linear
    ]
    banks = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    lora = LoraConfig(
        r=args.rank, lora_alpha=2 * args.rank, target_modules=linear, target_parameters=banks
    )
    model = get_peft_model(model, lora)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    model.train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=2e-3, fused=device.type != "cpu")
    draw = token_batches(args, config.vocab_size, 0)

    def step(number: int) -> torch.Tensor:
        ids = draw(number).to(device)
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    found = timed(step, args, device)
    found["parameters"] = sum(p.numel() for p in model.parameters())
    found["trained"] = sum(p.numel() for p in trained)
    return found | {"report": True}


def timed(step: Callable[[int], torch.Tensor], args: Any, device: torch.device) -> dict[str, Any]:
    """Median seconds of a step after those that compile, how many of them the host took to issue
    it, and the most memory of all of them."""
    module = torch.get_device_module(device) if device.type != "cpu" else None

    def wait() -> None:
        if module is not None:
            module.synchronize()

    began = time.perf_counter()
    losses = [float(step(0))]
    ready = time.perf_counter() - began
    losses += [float(step(n)) for n in range(1, args.warm_up)]
    seconds, issued = [], []
    for n in range(args.warm_up, args.warm_up + args.steps):
        wait()
        start = time.perf_counter()
        loss = step(n)
        issued.append(time.perf_counter() - start)
        wait()
        seconds.append(time.perf_counter() - start)
        losses.append(float(loss))
    middle = statistics.median(seconds)
    found: dict[str, Any] = {
        "losses": losses,
        "first_step_seconds": ready,
        "step_seconds": middle,
        "step_seconds_all": seconds,
        "issue_seconds": statistics.median(issued),
        "tokens_per_second_per_device": args.batch * args.tokens / middle,
        "peak_gb": None if module is None else module.max_memory_allocated() / 1e9,
        "reserved_gb": None if module is None else module.max_memory_reserved() / 1e9,
    }
    if args.profile and module is not None:
        found["profile"] = profiled(lambda: step(args.warm_up + args.steps), wait, args.trace)
    return found


def profiled(
    call: Callable[[], Any], wait: Callable[[], None], trace: Path | None
) -> dict[str, Any]:
    """Device time of one step by kernel and by operator and shapes, longest first, and how many
    launches it took; the timeline too, where `trace` names a file for it."""
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=activities, record_shapes=True) as traced:
        call()
        wait()
    if trace is not None and os.environ.get("RANK") == "0":
        traced.export_chrome_trace(str(trace))
    on_cpu = torch.autograd.DeviceType.CPU
    kernels = [
        (e.key[:120], e.self_device_time_total / 1e3, e.count)
        for e in traced.key_averages()
        if e.self_device_time_total and e.device_type != on_cpu and not is_range(e.key)
    ]
    operators = [
        (e.key, e.self_device_time_total / 1e3, e.count, e.input_shapes)
        for e in traced.key_averages(group_by_input_shape=True)
        if e.self_device_time_total and e.device_type == on_cpu
    ]
    for rows in (kernels, operators):
        rows.sort(key=lambda row: -row[1])
    return {
        "device_ms": sum(ms for _, ms, _ in kernels),
        "launches": sum(count for *_, count in kernels),
        "kernels": [{"name": n, "ms": round(ms, 3), "count": c} for n, ms, c in kernels[:60]],
        "operators": [
            {"name": n, "ms": round(ms, 3), "count": c, "shapes": str(s)}
            for n, ms, c, s in operators[:120]
        ],
    }


def is_range(name: str) -> bool:
    """Whether a row of the device is a range around kernels, which are rows of their own."""
    return name.startswith(("aten::", "ProfilerStep", "FSDP::", "Optimizer."))


PEERS = {"ours": ours, "stock": stock}


def run_peer(args: argparse.Namespace, peer: str, folder: Path) -> dict[str, Any]:
    """Starts the peer's ranks; what rank 0 found, or the end of what it said."""
    result = folder / f"{peer}.json"
    ranks = args.ranks if peer == "ours" and not args.alone else 1
    forwarded = []
    for name, value in vars(args).items():
        option = f"--{name.replace('_', '-')}"
        if name in ("peers", "peer", "result", "output") or value in (None, False):
            continue
        forwarded += [option] if value is True else [f"{option}={value}"]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={ranks}", __file__, *forwarded]
    command += [f"--peer={peer}", f"--result={result}"]
    from runtime.launch import ALLOCATOR

    environment = ALLOCATOR | os.environ | {"OMP_NUM_THREADS": "1"}
    log = folder / f"{peer}.log"
    with log.open("w") as said:
        try:
            subprocess.run(
                command, env=environment, stdout=said, stderr=said, timeout=args.peer_timeout
            )
        except subprocess.TimeoutExpired:
            return {"error": f"not done after {args.peer_timeout:g} s"}
    if not result.is_file():
        return {"error": log.read_text("utf-8", errors="replace")[-3000:]}
    return json.loads(result.read_text())


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__)
    p.formatter_class = argparse.RawDescriptionHelpFormatter
    p.add_argument("--layers", type=int, default=8)
    p.add_argument("--batch", type=int, default=2, help="sequences a device")
    p.add_argument("--tokens", type=int, default=4096)
    p.add_argument("--rank", type=int, default=16, help="of the adapters")
    p.add_argument("--ranks", type=int, default=1, help="devices of ours")
    p.add_argument("--alone", action="store_true", help="one process plays rank 0 of the others")
    p.add_argument("--ep", type=int, default=1)
    p.add_argument("--replicate", type=int, default=1, help="copies of the model")
    p.add_argument("--steps", type=int, default=10)
    p.add_argument("--warm-up", type=int, default=3)
    p.add_argument("--backend", default="h200")
    p.add_argument("--cluster", help="topology file that the plan is priced on")
    p.add_argument("--peers", default="ours,stock")
    p.add_argument("--peer-timeout", type=float, default=600.0)
    p.add_argument("--profile", action="store_true", help="one more step, by kernel")
    p.add_argument("--trace", type=Path, help="file for the timeline of that step")
    p.add_argument("--tiny", action="store_true")
    p.add_argument("--output", type=Path)
    p.add_argument("--peer", choices=PEERS, help=argparse.SUPPRESS)
    p.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.tiny:
        args.layers, args.tokens, args.steps, args.warm_up = 4, 128, 2, 1
    if args.peer:
        found = PEERS[args.peer](args)
        if found.pop("report"):
            args.result.write_text(json.dumps(found))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        results = {peer: run_peer(args, peer, Path(folder)) for peer in args.peers.split(",")}
    first = {n: r["losses"][0] for n, r in results.items() if "losses" in r}
    alike = all(math.isclose(a, b, rel_tol=AGREE) for a in first.values() for b in first.values())
    if args.ranks == 1 and not alike:
        print(f"the first losses do not agree: {first}", file=sys.stderr)
        return 1
    for peer, r in results.items():
        if "error" in r:
            print(f"{peer}: {r['error']}")
            continue
        print(
            f"{peer}: {r['tokens_per_second_per_device']:,.0f} tokens/s/device, "
            f"{1e3 * r['step_seconds']:.1f} ms a step "
            f"({1e3 * r['issue_seconds']:.1f} to issue), {r['peak_gb'] or 0:.1f} GB, "
            f"loss {r['losses'][0]:.4f}, first step {r['first_step_seconds']:.1f} s"
        )
        if said := r.get("predicted"):
            print(
                f"   predicted {1e3 * said['step_seconds']:.1f} ms a step, "
                f"{said['allocated_gib'] * 2**30 / 1e9:.1f} GB"
            )
        for row in r.get("profile", {}).get("kernels", [])[:25]:
            print(f"   {row['ms']:8.3f} ms {row['count']:5} x {row['name']}")
        for row in r.get("profile", {}).get("operators", [])[:40]:
            print(f"   {row['ms']:8.3f} ms {row['count']:5} x {row['name']} {row['shapes']}")
    if args.output:
        from attention.report import machine

        document = {
            "arguments": {k: str(v) for k, v in vars(args).items() if v is not None},
            "machine": machine("cpu" if args.tiny else "cuda"),
            "results": results,
        }
        args.output.write_text(json.dumps(document, indent=1) + "\n")
    return 1 if any("error" in r for r in results.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
