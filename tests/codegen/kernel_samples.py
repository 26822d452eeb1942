"""Operators, rendered kernels and modules that the tests share."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn.functional import softplus

from analyzers.backends import load_backend
from analyzers.schema import Operator, Site, Work
from codegen.family import Spec, Strategy
from codegen.members import load_specs
from codegen.render import render
from codegen.schema import OperatorChoice

SITES = {
    "kda": Site(module_class="KimiLinearDeltaAttention", function="chunk_kimi_delta_attention"),
    "gated_delta_rule": Site(
        module_class="Qwen3NextGatedDeltaNet", function="torch_chunk_gated_delta_rule"
    ),
}


def check_style(folder: Path) -> None:
    """Rendered files are formatted and lint clean, as the project's own."""
    for command in (["format", "--check"], ["check", "--select", "E,F,I,B,UP,SIM"]):
        call = [sys.executable, "-m", "ruff", *command, "--line-length", "100", str(folder)]
        ran = subprocess.run(call, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stdout


def operator(name: str, **attributes) -> Operator:
    gate = {"kda": "per_channel", "gated_delta_rule": "per_head"}.get(name)
    shape = {"heads": 2, "value_heads": 2, "key_dim": 16, "value_dim": 24, "qk_l2norm": True}
    if gate:
        shape["gate"] = gate
    return Operator(
        name=name,
        count=1,
        flops=Work(),
        bytes=Work(),
        attributes=shape | attributes,
        site=SITES.get(name),
    )


def generated(name: str, attributes: dict) -> OperatorChoice:
    """The decision to generate a kernel of linear attention for an H200."""
    return OperatorChoice(
        operator=name,
        backend="h200",
        decision="generated",
        provider="codegen:linear_attention",
        reason="",
        evidence="",
        attributes=attributes,
    )


def load(path: Path):
    spec = importlib.util.spec_from_file_location(f"{path.stem}_of_{path.parent.name}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write_kernel(
    folder: Path,
    name: str,
    key_dim: int,
    value_dim: int,
    backend: str = "cpu",
    strategy: Strategy | None = None,
):
    """Renders one kernel into a folder, unproved; returns what was rendered."""
    shape = {"key_dim": key_dim, "value_dim": value_dim}
    spec, device = load_specs()[name], load_backend(backend)
    tile = strategy and spec.tile(device, key_dim, strategy=strategy)
    rendered = render(spec, device, shape, tile=tile)
    folder.mkdir(parents=True, exist_ok=True)
    for file, text in rendered.files.items():
        (folder / file).write_text(text, encoding="utf-8")
    return rendered


@dataclass(frozen=True, kw_only=True)
class Form:
    """A rendered member: its functions, and the widths of keys and values it was rendered for."""

    spec: Spec
    widths: tuple[int, int]
    kernel: Callable
    reference: Callable


def form_of(folder: Path, member: str, widths: tuple[int, int] = (20, 24)) -> Form:
    """Renders a member; its usual widths are no powers of two."""
    rendered = write_kernel(folder, member, *widths)
    spec = load_specs()[member]
    kernel, reference = (load(folder / f) for f in (rendered.module, rendered.reference))
    return Form(
        spec=spec,
        widths=widths,
        kernel=getattr(kernel, spec.function),
        reference=getattr(reference, spec.function),
    )


def arguments(
    spec: Spec,
    widths: tuple[int, int],
    lengths: tuple[int, ...],
    *,
    batch: int = 1,
    heads: int = 1,
    value_heads: int = 1,
    decay: str = "usual",
    repeated_keys: bool = False,
    state: bool = True,
) -> dict[str, torch.Tensor]:
    """The tensors of a call by argument name, float32; several lengths are packed sequences.

    `decay` is `usual`, `none`, `strong` (-8 a token) or `reset` (a fifth forgets everything). Keys
    are normalised here.
    """
    generator = torch.Generator().manual_seed(42)

    def normal(*size):
        return torch.randn(*size, generator=generator)

    (K, V), T = widths, sum(lengths)
    x = {"q": normal(batch, T, heads, K), "k": normal(batch, T, heads, K)}
    if repeated_keys:
        x["k"] = x["k"][:, :1].expand_as(x["k"])
    x = {name: torch.nn.functional.normalize(t, dim=-1) for name, t in x.items()}
    x["v"] = normal(batch, T, value_heads, V)
    every = (batch, T, value_heads)
    if spec.decay != "none":
        name = "g_gamma" if spec.decay == "constant" else "g"
        shape = {"constant": (value_heads,), "per_head": every, "per_channel": (*every, K)}
        g = -softplus(normal(*shape[spec.decay]))
        if decay == "reset":
            forgets = torch.rand(g.shape, generator=generator) < 0.2
            x[name] = torch.where(forgets, -0.1 * torch.finfo(torch.float32).max, g)
        else:
            strong, none = torch.full_like(g, -8.0), torch.zeros_like(g)
            x[name] = {"usual": g, "strong": strong, "none": none}[decay]
    if spec.delta:
        x["beta"] = normal(*every, *([K] if spec.beta == "per_channel" else [])).sigmoid()
        if repeated_keys:
            x["beta"] = torch.full_like(x["beta"], 0.99)
    if state:
        x["initial_state"] = normal(batch * len(lengths), value_heads, K, V)
    if len(lengths) > 1:
        x["cu_seqlens"] = torch.tensor([sum(lengths[:n]) for n in range(len(lengths) + 1)])
    return x


def launched(module, given: dict, gradients: bool) -> list[tuple[str, dict]]:
    """The kernels that a call of the module's operator launches, in order, each with what it is
    given; none is run."""
    names = {id(kernel): name for name, kernel in vars(module).items() if name.startswith("_")}
    made = []
    module._run = lambda kernel, programs, **given: made.append((names[id(kernel)], given))
    module._INTERPRETED = True  # CPU tensors take the path of the launches
    function = next(f for n, f in vars(module).items() if n.startswith("chunk_"))
    for name, x in given.items():
        if isinstance(x, torch.Tensor):
            x.requires_grad_(gradients and name != "g_gamma")
    o, _ = function(**given)
    if gradients:
        o.sum().backward()
    return made


def outputs_and_gradients(function, given: dict, **options) -> dict[str, torch.Tensor]:
    """o, the last state and the gradients of what has one, by name; `function` takes `given`."""
    constants = ("g_gamma", "cu_seqlens")
    call = {n: x.detach().requires_grad_() if n not in constants else x for n, x in given.items()}
    leaves = {n: x for n, x in call.items() if n not in constants}
    o, state = function(**call, **options)
    generator = torch.Generator().manual_seed(7)
    above = [torch.randn(x.shape, generator=generator).to(x) for x in (o, state)]
    grads = torch.autograd.grad((o, state), leaves.values(), above)
    named = {f"gradient of {n}": x for n, x in zip(leaves, grads, strict=True)}
    return {"o": o.detach(), "state": state.detach(), **named}
