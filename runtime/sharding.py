"""A plan laid over a model: expert parallelism as a DTensor placement, FSDP2 for the rest.

"Axis" is a word of meshes, "dim" a word of tensors. The ranks of one model replica form the axis
`fsdp`; the same ranks, read as a grid, form (`efsdp`, `ep`). Experts are cut over `ep` first, then
over `efsdp`; everything else over `fsdp`. `dp_replicate` copies the whole arrangement.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard

from analyzers.errors import InputError
from analyzers.models import float32_names, is_named
from analyzers.structure import decoder_layers
from runtime.experts import experts_of, use_own_experts
from runtime.experts.capacity import Limiter, limit_experts
from runtime.experts.copies import Copies
from runtime.experts.dispatch import AllGather, AllToAll, Dispatcher, Hierarchical, Limit, Local
from runtime.experts.replay import replaying
from runtime.recomputation import selective
from runtime.shards import shared_parameters

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from strategies.schema import Plan

INSTEAD = {
    "pp": "1, and its ranks to fsdp, which shards every layer",
    "tp": "1, and its ranks to fsdp, or to ep for weights of experts",
    "cp": "1, and full recomputation: a rank then keeps one input a layer of its sequence",
}
"""Axes that the runtime does not have, and what it has for the same need; `docs/training.md` gives
the reasons."""


@dataclass(frozen=True)
class Meshes:
    fsdp: DeviceMesh
    """(`fsdp`) or (`dp_replicate`, `fsdp`)."""
    efsdp: DeviceMesh
    """(`efsdp`) or (`dp_replicate`, `efsdp`)."""
    ep: DeviceMesh
    nodes: DeviceMesh | None = None
    """`ep` as (`ep_rail`, `ep_node`), nodes times ranks of a node, where dispatch goes by both."""


def check_plan(plan: Plan) -> None:
    """Raises InputError for what this runtime does not have: it would be ignored silently."""
    p = plan.parallelism
    for axis, instead in INSTEAD.items():
        if getattr(p, axis) != 1:
            fault = f"{axis} = {getattr(p, axis)}, but this runtime shards by fsdp and ep only"
            raise InputError("plan.json", field=f"parallelism.{axis}", fault=fault, fix=instead)
    if plan.expert_weight_format == "fp8":
        fault = "fp8, but this runtime keeps experts packed as mxfp4 alone"
        raise InputError("plan.json", field="expert_weight_format", fault=fault, fix="bf16")
    if plan.mapping.shards_inside:
        fault = "set, but this runtime puts expert parallelism on neighbouring ranks"
        raise InputError("plan.json", field="mapping.shards_inside", fault=fault, fix="false")
    if plan.offload_optimizer:
        fault = "set, but this runtime keeps optimizer states on the device"
        raise InputError("plan.json", field="offload_optimizer", fault=fault, fix="false")
    if p.efsdp * p.ep != p.fsdp or p.dp_replicate * p.fsdp != plan.world_size:
        raise InputError(
            "plan.json",
            field="parallelism",
            fault=f"dp_replicate {p.dp_replicate} x fsdp {p.fsdp} (= efsdp {p.efsdp} x ep {p.ep}) "
            f"does not make {plan.world_size} ranks",
        )
    if plan.dispatcher == "hierarchical":
        _check_nodes(plan)
    if plan.expert_copies and plan.capacity.factor is not None:
        fault = "set, but this runtime has no limit on experts that are computed in several places"
        raise InputError("plan.json", field="expert_copies", fault=fault, fix="0")
    if plan.expert_copies and p.ep == 1:
        fault = "set, but without expert parallelism there is nothing to even out"
        raise InputError("plan.json", field="expert_copies", fault=fault, fix="0")


def _check_nodes(plan: Plan) -> None:
    ep, size = plan.parallelism.ep, plan.node_size
    if size is None:
        fault = "missing, but hierarchical dispatch goes by nodes"
        raise InputError("plan.json", field="node_size", fault=fault, fix="devices of a node")
    if ep <= size or ep % size:
        fault = f"hierarchical, but ep = {ep} is not several whole nodes of {size} devices"
        raise InputError("plan.json", field="dispatcher", fault=fault, fix="all_to_all")


def build_meshes(plan: Plan) -> Meshes:
    """Raises InputError when the running ranks are not those of the plan, or when the plan uses
    what this runtime does not have."""
    check_plan(plan)
    p = plan.parallelism
    if dist.get_world_size() != plan.world_size:
        fault = f"{plan.world_size}, but {dist.get_world_size()} ranks are running"
        raise InputError("plan.json", field="world_size", fault=fault)
    world = init_device_mesh(device_type(), (plan.world_size,), mesh_dim_names=("world",))
    dense = world._unflatten(0, (p.dp_replicate, p.fsdp), ("dp_replicate", "fsdp"))
    sparse = world._unflatten(0, (p.dp_replicate, p.efsdp, p.ep), ("dp_replicate", "efsdp", "ep"))
    replicated = ("dp_replicate",) if p.dp_replicate > 1 else ()
    return Meshes(
        dense[(*replicated, "fsdp")],
        sparse[(*replicated, "efsdp")],
        sparse["ep"],
        _nodes(world, plan) if plan.dispatcher == "hierarchical" else None,
    )


def _nodes(world: DeviceMesh, plan: Plan) -> DeviceMesh:
    p, size = plan.parallelism, plan.node_size
    assert size is not None, "checked by check_plan"
    shape = (plan.world_size // p.ep, p.ep // size, size)
    return world._unflatten(0, shape, ("ep_groups", "ep_rail", "ep_node"))["ep_rail", "ep_node"]


def device_type() -> str:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator.type if accelerator is not None else "cpu"


def parallelize(model: PreTrainedModel, plan: Plan) -> PreTrainedModel:
    """Shards `model`, in place, as `plan` says; adapters must already be in it.

    The model may lie on the meta device; for one rank it keeps plain tensors. Gradients are summed
    over ranks, never averaged: the loss is divided by the token count of the global batch instead,
    which is right for experts and the rest alike. Raises InputError when the plan does not fit the
    model or the running ranks.
    """
    meshes = build_meshes(plan)
    keep_float32(model)
    use_own_experts(model)
    limiters = limit_experts(model, plan) if plan.capacity.factor is not None else {}
    if plan.parallelism.ep > 1 and not experts_of(model):
        fault = f"{type(model).__name__} has no experts that run through transformers' registry"
        raise InputError("plan.json", field="parallelism.ep", fault=fault, fix="plan with ep = 1")
    own_groups: set[nn.Parameter] = set()
    if plan.activation_checkpointing != "none":
        every = plan.activation_checkpointing == "full"
        kwargs = {"use_reentrant": False, "context_fn": replaying if every else selective(model)}
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)
    for name, experts in experts_of(model).items():
        if plan.parallelism.ep > 1:
            _own_experts(name, experts, meshes.ep)
        experts.dispatcher = _dispatcher(plan, meshes, limiters.get(name))
        if plan.expert_copies:
            experts.copies = Copies(experts, meshes.ep.get_group(), meshes.fsdp.get_group("fsdp"))
        if plan.world_size == 1:
            continue  # FSDP would copy every weight of a layer each time it is used
        if meshes.efsdp.size() > 1:
            _shard(experts, meshes.efsdp, plan.reshard_after_forward)
        elif plan.parallelism.ep > 1:
            # Nothing left to gather: the experts stay out of FSDP, as DTensors on `ep` alone.
            own_groups |= set(experts.parameters(recurse=False))
    if plan.world_size > 1:
        _shard_layers(model, plan, meshes, own_groups)
    return model


def _shard_layers(model: nn.Module, plan: Plan, meshes: Meshes, own: set[nn.Parameter]) -> None:
    layers = decoder_layers(model)[1]
    # What two layers share belongs to neither's group: whole on every rank, it is never gathered.
    own |= shared_parameters(nn.ModuleList(layers))
    for layer in layers:
        _shard(layer, meshes.fsdp, plan.reshard_after_forward, own)
    _shard(model, meshes.fsdp, False, own)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # Plain sums also where the library would pick a reduction that gloo lacks.
            module.set_force_sum_reduction_for_comms(True)
            if hasattr(module, "set_reduce_scatter_unused_params"):  # not in torch 2.11
                module.set_reduce_scatter_unused_params(True)


def _own_experts(name: str, experts: Any, mesh: DeviceMesh) -> None:
    """Gives this rank its range of experts: every stacked parameter becomes `Shard(0)` on `ep`."""
    count, ranks = experts.num_experts, mesh.size()
    if count % ranks:
        fault = f"ep = {ranks} does not divide the {count} experts of {name}"
        raise InputError("plan.json", field="parallelism.ep", fault=fault)
    for key, parameter in experts.named_parameters(recurse=False):
        if parameter.shape[0] != count:
            fault = f"{name}.{key} has {parameter.shape[0]} rows for {count} experts"
            raise InputError("plan.json", field="parallelism.ep", fault=fault)
        owned = parameter.detach().chunk(ranks)[mesh.get_local_rank()].contiguous()
        sharded = DTensor.from_local(owned, mesh, [Shard(0)], run_check=False)
        made = nn.Parameter(sharded, requires_grad=parameter.requires_grad)
        experts.register_parameter(key, made)


def apply_capacity(model: Any, plan: Plan, *, alone: bool = False) -> None:
    """Gives the experts of a model that has no limit that of `plan`; `alone` where it is whole in
    one process."""
    for name, limiter in limit_experts(model, plan).items():
        experts = model.get_submodule(name)
        limit = _limit(plan, limiter)
        experts.dispatcher = Local(limit) if alone else replace(experts.dispatcher, limit=limit)


def _limit(plan: Plan, limiter: Limiter) -> Limit:
    return Limit(plan.micro_batch_size * plan.sequence_length, limiter.capacity)


def _dispatcher(plan: Plan, meshes: Meshes, limiter: Limiter | None) -> Dispatcher:
    limit = _limit(plan, limiter) if limiter is not None else None
    if plan.parallelism.ep == 1:
        return Local(limit)
    if meshes.nodes is not None:
        rail, node = (meshes.nodes.get_group(axis) for axis in ("ep_rail", "ep_node"))
        return Hierarchical(rail, node, limit)
    if plan.dispatcher == "all_gather":
        return AllGather(meshes.ep.get_group(), limit)
    if plan.dispatcher == "all_to_all":
        return AllToAll(meshes.ep.get_group(), limit)
    fault = f"'{plan.dispatcher}' cannot serve ep = {plan.parallelism.ep}"
    raise InputError("plan.json", field="dispatcher", fault=fault)


def _shard(
    module: nn.Module, mesh: DeviceMesh, reshard: bool, ignored: set[nn.Parameter] | None = None
) -> None:
    own = {p for p in module.parameters() if p in ignored} if ignored else None
    fully_shard(module, mesh=mesh, reshard_after_forward=reshard, ignored_params=own)


def keep_float32(model: nn.Module) -> None:
    """Turns the model's float32 islands (router, correction bias, decay rates) to float32, as
    transformers does while it loads. In place, before sharding."""
    kept = float32_names(model)
    for name, module in model.named_modules():
        for key, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is None or not tensor.is_floating_point() or tensor.dtype == torch.float32:
                continue
            if any(is_named(part, f"{name}.{key}") for part in kept):
                if isinstance(tensor, nn.Parameter):
                    made = nn.Parameter(tensor.detach().float(), requires_grad=tensor.requires_grad)
                    module._parameters[key] = made
                else:
                    module._buffers[key] = tensor.float()
