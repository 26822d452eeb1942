"""The whole layer: transformers' KimiLinearDeltaAttention with the kernels that it finds, and the
same module with ours bound in. Projections, convolution, gates, KDA, gated norm, output projection.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from analyzers.backends import Backend
    from analyzers.schema import ModelAnalysis
    from attention.measure import Job
    from attention.workload import Shape
    from codegen import LoadedKernel
    from codegen.schema import OperatorChoice

HIDDEN = 2304


def layer(job: Job) -> dict:
    """Errors on few tokens against the module's own torch code in float32, then times.

    `reference` makes what the others are compared with and must come first.
    """
    reference = job.implementation == "reference"
    if reference:
        sys.modules["fla"] = None  # type: ignore[assignment]  # transformers' torch code runs
    module = _module(job.shape).to(job.device.name)
    _to_working_dtype(module, job.device.dtype)
    file = job.folder / f"reference-layer-{job.small}.pt".replace(":", "_")
    if reference:
        exact = _both(module.float(), *_inputs(job, job.small, torch.float32))
        torch.save((module.state_dict(), exact), file)
        return {"status": "right"}
    return _compare(job, module, file)


def warm_up(job: Job) -> None:
    """Runs the kernels that transformers finds, on few tokens."""
    module = _module(job.shape).to(job.device.name)
    _to_working_dtype(module, job.device.dtype)
    _both(module, *_inputs(job, job.small, job.device.dtype))


def _compare(job: Job, module, file: Path) -> dict:
    from attention.measure import errors, is_wrong
    from codegen import bind

    weights, want = torch.load(file, map_location=job.device.name)
    module.load_state_dict(weights)
    kernels = _kernels(job) if job.implementation == "ours" else []
    row: dict = {"kernels": [loaded.kernel.operator for loaded in kernels]}
    with bind(module, kernels):
        got = _both(module, *_inputs(job, job.small, job.device.dtype))
        row["errors"] = errors(got, want)
        wrong = is_wrong(row["errors"], job.device.dtype)
        x, do = _inputs(job, job.shape, job.device.dtype)

        def forward():
            with torch.no_grad():
                return [module(x)]

        def forward_backward():
            return list(_both(module, x, do).values())

        row["forward_ms"] = job.device.median(forward, job.seconds)
        row["both_ms"] = job.device.median(forward_backward, job.seconds)
        row["both_extra_bytes"] = job.device.extra_bytes(forward_backward)
        for parameter in module.parameters():
            parameter.requires_grad_(False)
        # As in LoRA training: gradients flow through the layer, its own weights are frozen.
        row["frozen_ms"] = job.device.median(forward_backward, job.seconds)
    if wrong:
        return row | {"status": "wrong", "note": f"wrong: {', '.join(wrong)}"}
    return row | {"status": "right"}


def _config(shape: Shape):
    from transformers import KimiLinearConfig

    if shape.heads != shape.value_heads or shape.key_dim != shape.value_dim:
        raise ValueError("the layer has as many value heads as heads, and one width")
    return KimiLinearConfig(
        hidden_size=HIDDEN,
        linear_num_heads=shape.heads,
        linear_head_dim=shape.key_dim,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
        mlp_layer_types=["dense"],
        vocab_size=256,
        intermediate_size=256,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
    )


def _module(shape: Shape):
    """The layer with seeded weights; decay rates and time steps as a Kimi Linear model starts."""
    from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearDeltaAttention

    torch.manual_seed(0)
    module = KimiLinearDeltaAttention(_config(shape), 0)
    with torch.no_grad():
        gate = module.forget_gate
        gate.A_log.copy_(torch.empty_like(gate.A_log).uniform_(1, 16).log())
        step = torch.empty_like(gate.dt_bias).uniform_(1e-3, 1e-1)
        gate.dt_bias.copy_(step + torch.log(-torch.expm1(-step)))
    return module


def _to_working_dtype(module, dtype: torch.dtype) -> None:
    """Weights in `dtype`; the decay's parameters stay in float32, as checkpoints keep them."""
    for name, parameter in module.named_parameters():
        if not name.endswith(("A_log", "dt_bias")):
            parameter.data = parameter.data.to(dtype)


def _inputs(job: Job, shape: Shape, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    hidden = _config(shape).hidden_size
    size = (shape.batch, shape.tokens, hidden)
    x, do = torch.randn(2, *size, device=job.device.name, dtype=job.device.dtype)
    return x.to(dtype).requires_grad_(), do.to(dtype)


def _both(module, x: torch.Tensor, do: torch.Tensor) -> dict[str, torch.Tensor]:
    """The output, the gradient of the input, and of every weight that takes one."""
    weights = {n: p for n, p in module.named_parameters() if p.requires_grad}
    o = module(x)
    grads = torch.autograd.grad(o, [x, *weights.values()], do)
    named = zip(["x", *weights], grads, strict=True)
    return {"o": o.detach(), **{f"d{n}": g for n, g in named}}


def _kernels(job: Job) -> list[LoadedKernel]:
    """A kernel of ours for every place of the layer that one can be bound at."""
    from analyzers import analyze
    from analyzers.backends import load_backend

    with tempfile.TemporaryDirectory() as folder:
        config = _config(job.shape)
        config.architectures = ["KimiLinearForCausalLM"]
        config.save_pretrained(folder)
        analysis = analyze(folder)
    return unproved_kernels(analysis, load_backend(job.backend), job.folder, "layer_")


def unproved_kernels(
    analysis: ModelAnalysis, backend: Backend, folder: Path, prefix: str = ""
) -> list[LoadedKernel]:
    """What `adapt kernels` renders for every place of a model that one can be bound at, written to
    `folder`; that it is right is measured by who asks."""
    from codegen import LoadedKernel, map_operators
    from codegen.build import kernel_of, render_choice
    from codegen.load import import_file
    from codegen.members import find_spec
    from codegen.tuning.records import known_records

    def has_a_place(choice: OperatorChoice) -> bool:
        member = find_spec(choice.operator)
        return choice.site is not None or (member is not None and member.around is not None)

    records = known_records()
    choices = map_operators(analysis, backend, prefer="generated").operators
    chosen = [c for c in choices if c.decision == "generated" and has_a_place(c)]
    kernels = []
    for choice in chosen:
        rendered = render_choice(choice, chosen, backend, records)
        path = folder / f"{prefix}{rendered.module}"
        path.write_text(rendered.files[rendered.module], "utf-8")
        kernel = kernel_of(choice, rendered, gates=[])
        function = getattr(import_file(path, path.stem), kernel.function)
        kernels.append(LoadedKernel(kernel=kernel, function=function))
    return kernels
