"""Experts that a model's own code keeps as a list of modules, run as stacked banks.

A model that no library knows loops over its experts: it picks the rows of each and calls
`self.experts[e](rows)`. Its routing stays its own: the block's forward runs twice, first to record
which rows go to which expert, then, after all rows were computed where their experts live, to take
the outputs. The list itself is replaced by stacked weights `[E, out, in]`, which are sharded,
adapted and multiplied like those of any other model.

Legend of shapes: R recorded rows of this rank, P rows computed here, D expert width, E experts, F
features in, O features out.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from analyzers.errors import InputError
from runtime.experts.fan import Pairs
from runtime.experts.stacked import adapted_linear, dispatched


class BankLinear(nn.Module):
    """Stands for a linear layer in the expert that is the form of all: the weights are the bank's,
    one matrix an expert."""

    def __init__(self, owner: ExpertList, bank: str) -> None:
        super().__init__()
        self._owner = (owner,)  # in a tuple, so that it does not become a submodule
        self.bank = bank

    def forward(self, x_PF: Tensor) -> Tensor:
        owner = self._owner[0]
        assert owner.computed is not None, "an expert is called outside of its list"
        return adapted_linear(owner, self.bank, x_PF, owner.computed)


class ExpertList(nn.Module):
    """A list of alike experts as one module; `experts[e](rows)` still works, in two passes.

    A bank is named by the path of its linear layer in an expert, dots as underscores. Raises
    InputError for experts that are not alike or have weights outside of linear layers.
    """

    is_transposed = False

    def __init__(self, name: str, experts: nn.ModuleList) -> None:
        super().__init__()
        self.num_experts = len(experts)
        self.sources: dict[str, str] = {}
        """Path of the linear layer in an expert, by bank."""
        form = experts[0]
        shapes = [{n: p.shape for n, p in expert.named_parameters()} for expert in experts]
        linears = {n: m for n, m in form.named_modules() if type(m) is nn.Linear}
        inside = {f"{n}.{key}" for n, m in linears.items() for key, _ in m.named_parameters()}
        if any(s != shapes[0] for s in shapes) or inside != shapes[0].keys():
            fault = "its experts differ, or have weights besides their linear layers"
            raise InputError(name, fault=fault, fix="a class whose experts are one stacked tensor")
        for path, linear in linears.items():
            bank = path.replace(".", "_")
            self.sources[bank] = path
            for key, own in linear.named_parameters():
                rows = [e.get_parameter(f"{path}.{key}").detach() for e in experts]
                stacked = nn.Parameter(torch.stack(rows), requires_grad=own.requires_grad)
                self.register_parameter(bank if key == "weight" else f"{bank}_bias", stacked)
            form.set_submodule(path, BankLinear(self, bank))
        self.form = form
        self.bank_names = list(self.sources)
        self.computed: Pairs | None = None
        self._recorded: list[tuple[int, Tensor]] | None = None
        self._outputs: Iterator[tuple[int, Tensor]] | None = None

    def __len__(self) -> int:
        return self.num_experts

    def __iter__(self) -> Iterator[Callable]:
        return (self[e] for e in range(self.num_experts))

    def __getitem__(self, expert: Any) -> Callable:
        return functools.partial(self._visit, int(expert))

    def _visit(self, expert: int, x: Tensor) -> Tensor:
        if self._recorded is not None:
            self._recorded.append((expert, x))
            return torch.zeros_like(x)
        if self._outputs is None:
            raise RuntimeError("an expert is called outside of its block's forward")
        known, y = next(self._outputs, (None, x))
        if known != expert or y.shape[:-1] != x.shape[:-1]:
            raise RuntimeError("the block calls its experts in another way the second time")
        return y

    def run_block(self, forward: Callable, *args: Any, **kwargs: Any) -> Any:
        """What `forward` of the block that owns this list gives."""
        self._recorded = recorded = []
        try:
            forward(*args, **kwargs)
        finally:
            self._recorded = None
        if not recorded:  # this rank still takes part in the exchange, also in backward
            inputs = pytree.tree_leaves((args, kwargs))
            like = next(x for x in inputs if isinstance(x, Tensor) and x.is_floating_point())
            recorded = [(0, like.reshape(-1, like.shape[-1])[:0])]
            (_, nothing), *_ = self._visited(recorded)
            outputs = forward(*args, **kwargs)
            return pytree.tree_map_only(Tensor, lambda y: y + nothing.sum(), outputs)
        self._outputs = iter(self._visited(recorded))
        try:
            return forward(*args, **kwargs)
        finally:
            self._outputs = None

    def _visited(self, recorded: list[tuple[int, Tensor]]) -> list[tuple[int, Tensor]]:
        """Expert and output of each recorded call."""
        rows = [x.reshape(-1, x.shape[-1]) for _, x in recorded]
        x_RD = torch.cat(rows)
        sizes = [x.shape[0] for x in rows]
        ids = [expert for expert, _ in recorded]
        index_R1 = torch.tensor(ids, device=x_RD.device).repeat_interleave(
            torch.tensor(sizes, device=x_RD.device), output_size=sum(sizes)
        )
        weights_R1 = x_RD.new_ones(x_RD.shape[0], 1, dtype=torch.float32)
        y_RD = self(x_RD, index_R1.unsqueeze(1), weights_R1)
        return [
            (expert, y.reshape(*x.shape[:-1], y.shape[-1]))
            for (expert, x), y in zip(recorded, y_RD.split(sizes), strict=True)
        ]

    def forward(self, x_RD: Tensor, index_R1: Tensor, weights_R1: Tensor) -> Tensor:
        """Each row through its expert, wherever that lives -> [R, D]."""

        def compute(x_PD: Tensor, pairs: Pairs) -> Tensor:
            self.computed = pairs
            try:
                return self.form(x_PD)
            finally:
                self.computed = None

        return dispatched(self, x_RD, index_R1, weights_R1, compute)


def stack_expert_lists(model: nn.Module, count: int) -> list[str]:
    """Replaces, in place, every list of `count` experts by an `ExpertList`; returns their names.

    A list of experts holds `count` modules of one class with linear layers inside.
    """
    found = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
        and len(module) == count
        and len({type(m) for m in module}) == 1
        and "expert" in name.rpartition(".")[2]
    ]
    for name in found:
        parent, _, child = name.rpartition(".")
        block: Any = model.get_submodule(parent)
        experts = ExpertList(name, getattr(block, child))
        setattr(block, child, experts)
        block.forward = functools.partial(experts.run_block, block.forward)
    return found


def converters(model: nn.Module) -> list[Any]:
    """How a checkpoint with one tensor an expert becomes the banks, for `plan_conversion`."""
    from transformers.core_model_loading import MergeModulelist, WeightConverter

    return [
        WeightConverter(
            source_patterns=[f"{name}.*.{path}.{key}"],
            target_patterns=[f"{name}.{bank}{suffix}"],
            operations=[MergeModulelist(dim=0)],
        )
        for name, module in model.named_modules()
        if isinstance(module, ExpertList)
        for bank, path in module.sources.items()
        for key, suffix in (("weight", ""), ("bias", "_bias"))
        if f"{bank}{suffix}" in module._parameters
    ]


def under_own_names(model: nn.Module, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """A bank, or a factor of its adapter, under the names that the model's own code gives it."""
    owner, _, last = name.rpartition(".")
    module = model.get_submodule(owner)
    if not isinstance(module, ExpertList):
        yield name, tensor
        return
    key = "weight"
    if last.startswith("lora_"):
        last, _, side = last.removeprefix("lora_").rpartition("_")
        key = f"lora_{side}"
    elif last.endswith("_bias") and last not in module.sources:
        last, key = last.removesuffix("_bias"), "bias"
    for expert, row in enumerate(tensor.unbind(0)):
        yield f"{owner}.{expert}.{module.sources[last]}.{key}", row
