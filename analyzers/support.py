"""What a backend serves of an analysis, and how that was found.

Where a device of the backend is here, torch's dispatcher is asked whether it has a kernel for each
ATen operator that an operator comes down to. Where it is not, the backend file's `native` list
answers; it names operators of models, so single ATen operators stay open there. These are facts:
what is done about an operator that is missing, `codegen` decides.
"""

from __future__ import annotations

from dataclasses import dataclass

from analyzers.backends import Backend
from analyzers.schema import ModelAnalysis

# What an operator of a model comes down to in ATen. Linear attention is not here: torch has only
# transformers' loop over chunks for it, hundreds of calls in the place of one.
FORMS = {
    "linear": ("mm", "addmm"),
    "stacked_linear": ("bmm",),
    "embedding": ("embedding",),
    "scaled_dot_product_attention": ("_fused_sdp_choice",),
    "experts": ("_grouped_mm", "sort", "index.Tensor"),
    "router": ("mm", "sigmoid", "_softmax", "topk", "gather"),
    "rms_norm": ("pow.Tensor_Scalar", "mean.dim", "rsqrt", "mul.Tensor"),
    "gated_rms_norm": ("pow.Tensor_Scalar", "mean.dim", "rsqrt", "mul.Tensor", "sigmoid", "silu"),
    "layer_norm": ("native_layer_norm",),
    "short_convolution": ("convolution", "silu"),
    "gated_activation": ("silu", "mul.Tensor"),
    "activation": ("relu", "silu", "gelu"),
    "rotary": ("mul.Tensor", "neg", "cat", "add.Tensor"),
    "l2_norm": ("mul.Tensor", "sum.dim_IntList", "rsqrt"),
    "hyper_connection": ("mm", "sigmoid", "sum.dim_IntList", "div.Tensor"),
    "sparse_attention": ("_fused_sdp_choice", "scatter.value"),
    "indexer": ("bmm", "relu", "topk"),
    "attention_residual": ("mean.dim", "rsqrt", "_softmax", "sum.dim_IntList"),
}

# ATen operators that torch composes of others before a device sees them -> what it is then asked.
LEAVES = {
    "linear": ("mm", "addmm"),
    "matmul": ("bmm", "mm"),
    "einsum": ("bmm",),
    "softmax.int": ("_softmax",),
    "log_softmax.int": ("_log_softmax",),
    "layer_norm": ("native_layer_norm",),
    "rms_norm": ("pow.Tensor_Scalar", "mean.dim", "rsqrt", "mul.Tensor"),
    "scaled_dot_product_attention": ("_fused_sdp_choice",),
    "conv1d": ("convolution",),
    "to.dtype": ("_to_copy",),
    "type_as": ("_to_copy",),
    "contiguous": ("clone",),
    "reshape": ("view", "clone"),
    "square": ("pow.Tensor_Scalar",),
    "repeat_interleave.self_int": ("clone",),
    "where.ScalarOther": ("where.self",),
    "one_hot": ("scatter_.value",),
    "pad": ("constant_pad_nd",),
    "chunk": ("split.Tensor",),
}


@dataclass(frozen=True)
class Answer:
    operator: str
    native: bool | None
    """None when nothing here can tell."""
    how: str
    """Who says so: the dispatcher with what was asked, or the entry of the backend file."""


def support(analysis: ModelAnalysis, backend: Backend) -> list[Answer]:
    """One answer for each operator of the model and each ATen operator of its graphs."""
    names = [operator.name for operator in analysis.operators]
    for block in analysis.blocks:
        names += [node.operator for node in block.graph.nodes] if block.graph else []
    return [ask(name, backend) for name in dict.fromkeys(names)]


def ask(operator: str, backend: Backend) -> Answer:
    """Whether the backend serves an operator: a normalised name, or `aten.mul.Tensor`."""
    forms = _forms(operator)
    if forms and is_present(backend):
        return _ask_dispatcher(operator, forms, backend.device_type)
    if operator.startswith("aten."):
        return Answer(operator, None, f"no {backend.title} is here to ask")
    entry = f"analyzers/backends/{backend.name}.yaml: native.{operator}"
    if operator in backend.native:
        return Answer(operator, True, entry)
    return Answer(operator, False, f"no entry {entry}")


def is_present(backend: Backend) -> bool:
    """Whether a device of the backend's type is here: the processor always is."""
    if backend.device_type == "cpu":
        return True
    import torch

    here = torch.accelerator.current_accelerator(check_available=True)
    hip = backend.triton is not None and backend.triton.backend == "hip"
    return here is not None and here.type == backend.device_type and hip == bool(torch.version.hip)


def _forms(operator: str) -> tuple[str, ...]:
    """The ATen operators that an operator comes down to; none when torch has no form of it."""
    name = operator.removeprefix("aten.").removesuffix(".default")
    parts = (name,) if operator.startswith("aten.") else FORMS.get(operator, ())
    return tuple(leaf for part in parts for leaf in LEAVES.get(part, (part,)))


def _ask_dispatcher(operator: str, forms: tuple[str, ...], device_type: str) -> Answer:
    missing = [form for form in forms if not _has_kernel(form, device_type)]
    native = not missing
    names = ", ".join(f"aten::{form}" for form in missing or forms)
    kernels = f"{_dispatch_key(device_type)} kernel{'s' if native else ''} for {names}"
    return Answer(operator, native, f"dispatcher: {'' if native else 'no '}{kernels}")


def _has_kernel(name: str, device_type: str) -> bool:
    """A kernel of the device, or one that is made of others and runs on any."""
    import torch

    if not torch._C._dispatch_has_kernel(f"aten::{name}"):  # no such operator at all
        return False
    keys = (_dispatch_key(device_type), "CompositeExplicitAutograd", "CompositeImplicitAutograd")
    return any(torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", key) for key in keys)


def _dispatch_key(device_type: str) -> str:
    import torch

    if device_type in ("npu", torch._C._get_privateuse1_backend_name()):
        return "PrivateUse1"
    return torch._C._dispatch_key_for_device(device_type)
