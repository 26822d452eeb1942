"""What runs inside one process: errors, times and memory of one implementation."""

from __future__ import annotations

import gc
import time
import traceback
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace

import torch

from attention import layer
from attention.errors import LIMITS, errors, is_wrong
from attention.implementations import Unsupported, ours_with_state, reference
from attention.job import Job

PIECES = 16  # of the long sequence that is checked against carried states


def both(function: Callable, x: dict, do: torch.Tensor) -> dict[str, torch.Tensor]:
    """o and the gradients of the inputs that take one, by name."""
    wanted = {name: t for name, t in x.items() if t.requires_grad}
    o = function(x)
    grads = torch.autograd.grad(o, list(wanted.values()), do)
    return {"o": o.detach(), **{f"d{n}": g for n, g in zip(wanted, grads, strict=True)}}


def work(task: dict) -> dict:
    """The row of a task, with its `status`."""
    try:
        return PARTS[task["part"]](Job(task))
    except Unsupported as reason:
        return {"status": "unsupported", "note": str(reason)}
    except ImportError as fault:
        return {"status": "not installed", "note": str(fault)}
    except torch.OutOfMemoryError as fault:
        return {"status": "out of memory", "note": str(fault).splitlines()[0][:200]}
    except Exception as fault:
        traceback.print_exc()
        return {"status": "failed", "note": f"{type(fault).__name__}: {fault}"[:400]}
    finally:
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()


def make_reference(job: Job) -> dict:
    """Saves inputs and exact results on few tokens; gives the errors of the same recurrence on
    inputs of the working dtype."""
    x, do = job.inputs(job.small)
    function = reference(job.spec, job.small, job.gate, job.folder)
    double = {
        n: t.detach().double().requires_grad_(t.requires_grad) if t.is_floating_point() else t
        for n, t in x.items()
    }
    want = both(function, double, do.double())
    torch.save((x, do, want), job.reference_file)
    return {"status": "right", "errors": errors(both(function, x, do), want)}


def measure(job: Job) -> dict:
    """Errors on few tokens first, then times and memory at full length."""
    began = time.monotonic()
    function = job.build(job.shape)
    x, do, want = torch.load(job.reference_file, map_location=job.device.name)
    row: dict = {}
    backward = True
    with torch.no_grad():
        alone = {"o, forward alone": function(x)}
    try:
        got = alone | both(function, x, do)
    except (RuntimeError, NotImplementedError) as fault:
        if isinstance(fault, torch.OutOfMemoryError):
            raise
        backward = False
        row["note"] = f"no backward: {type(fault).__name__}: {fault}"[:300]
        got = alone
    job.device.synchronize()
    row["ready_s"] = round(time.monotonic() - began, 2)
    row["errors"] = errors(got, want | {"o, forward alone": want["o"]})
    wrong = is_wrong(row["errors"], job.device.dtype)
    del alone, got, want, x
    x, do = job.inputs(job.shape)

    def forward():
        with torch.no_grad():
            return [function(x)]

    def forward_backward():
        return list(both(function, x, do).values())

    made = forward_backward() if backward else forward()
    if not all(bool(t.isfinite().all()) for t in made):
        wrong.append("not finite at full length")
    del made
    row["forward_ms"] = job.device.median(forward, job.seconds)
    row["forward_extra_bytes"] = job.device.extra_bytes(forward)
    if backward:
        row["both_ms"] = job.device.median(forward_backward, job.seconds)
        row["both_extra_bytes"] = job.device.extra_bytes(forward_backward)
    if wrong:  # timed all the same, and no target
        return row | {"status": "wrong", "note": f"wrong: {', '.join(wrong)}"}
    return row | {"status": "right"}


def first_call(job: Job) -> dict:
    """Seconds of the first forward and backward call in a process with empty caches, from the
    import of the kernel on, and of the first call with another length."""
    x, do = job.inputs(job.shape)
    torch.autograd.grad((x["q"] * 1.0).sum(), x["q"])  # the device and autograd are awake
    job.device.synchronize()
    began = time.monotonic()
    function = job.build(job.shape)
    both(function, x, do)
    job.device.synchronize()
    first = time.monotonic() - began
    x, do = job.inputs(replace(job.shape, tokens=job.shape.tokens + 77))
    job.device.synchronize()
    began = time.monotonic()
    both(function, x, do)
    job.device.synchronize()
    other = time.monotonic() - began
    return {"status": "right", "first_call_s": first, "other_length_s": other}


def carried(job: Job) -> dict:
    """Our kernel over a whole sequence against the same sequence in pieces that carry the state
    forward and its gradient backward; relative errors of o and of every gradient by token."""
    x, do = job.inputs(job.shape)
    function = ours_with_state(job.spec, job.shape, job.gate, job.folder)
    whole = both(lambda x: function(x, None)[0], x, do)
    finite = all(bool(t.isfinite().all()) for t in whole.values())
    by_token = {n for n, t in x.items() if t.ndim >= 3}
    T = job.shape.tokens
    length = -(-T // PIECES)
    bounds = [(begin, min(begin + length, T)) for begin in range(0, T, length)]

    def piece(begin: int, end: int) -> dict:
        return {
            n: t.detach()[:, begin:end].requires_grad_() if n in by_token else t
            for n, t in x.items()
        }

    B, HV = job.shape.batch, job.shape.value_heads
    states = [torch.zeros(B, HV, *job.shape.widths, device=job.device.name)]
    for begin, end in bounds[:-1]:  # as where gradients are asked for: the same kernels
        states.append(function(piece(begin, end), states[-1])[1].detach())
    difference: dict[str, float] = defaultdict(float)
    size: dict[str, float] = defaultdict(float)
    dstate = torch.zeros_like(states[0])
    for (begin, end), state in zip(reversed(bounds), reversed(states), strict=True):
        y = piece(begin, end)
        wanted = {n: t for n, t in y.items() if n in by_token}
        state.requires_grad_()
        o, last = function(y, state)
        outputs, gradients = (o, last), (do[:, begin:end], dstate)
        *grads, dstate = torch.autograd.grad(outputs, [*wanted.values(), state], gradients)
        for n, t in zip(["o", *(f"d{n}" for n in wanted)], [o.detach(), *grads], strict=True):
            difference[n] += (whole[n][:, begin:end].float() - t.float()).square().sum().item()
            size[n] += t.float().square().sum().item()
    found = {n: (difference[n] / max(size[n], 1e-30)) ** 0.5 for n in size}
    right = finite and all(error <= LIMITS[job.device.dtype][0] for error in found.values())
    status = "right" if right else "wrong"
    return {"status": status, "pieces": len(bounds), "finite": finite, "errors": found}


def warm_up(job: Job) -> dict:
    """Compiles, once each and without timing, this process's share of the candidates that the
    implementation's autotuner would try: several processes do a tuner's compiling together."""
    from triton.runtime.autotuner import Autotuner

    share, shares = job.share
    prune = Autotuner.prune_configs

    def some(self, kwargs):
        configs = prune(self, kwargs)
        return configs[share::shares] or configs[:1]

    def once(self):
        return lambda call, quantiles: (call(), [1.0] * len(quantiles))[1]

    Autotuner.prune_configs = some
    Autotuner.do_bench = property(once)  # type: ignore[assignment]
    if job.implementation == "transformers":
        layer.warm_up(job)
    else:
        x, do = job.inputs(job.small)
        both(job.build(job.shape), x, do)
    job.device.synchronize()
    return {"status": "right"}


def rates(job: Job) -> dict:
    """Copy bandwidth and matrix rate of the device, the ceilings of all floors."""
    size, width = (1 << 31, 8192) if job.device.cuda else (1 << 26, 512)
    source = torch.randint(0, 100, (size,), dtype=torch.int8, device=job.device.name)
    target = torch.empty_like(source)
    copy = job.device.median(lambda: target.copy_(source), job.seconds)
    a, b = torch.randn(2, width, width, device=job.device.name, dtype=job.device.dtype)
    product = job.device.median(lambda: a @ b, job.seconds)
    return {
        "status": "right",
        "copy_bytes_per_s": 2 * size / (copy / 1e3),
        "matrix_flops_per_s": 2 * width**3 / (product / 1e3),
        "dtype": str(job.device.dtype).removeprefix("torch."),
    }


PARTS = {
    "rates": rates,
    "reference": make_reference,
    "warm-up": warm_up,
    "measure": measure,
    "first-call": first_call,
    "carried": carried,
    "layer": layer.measure,
}
