"""Which tensors of a released Kimi-K3 checkpoint make which parameter, in transformers' own terms."""

from __future__ import annotations

from typing import Any

import torch
from transformers.core_model_loading import (
    Concatenate,
    ConversionOps,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
)

from analyzers.models.kimi_k3.mxfp4 import unpack_mxfp4

HEAD_MULTIPLE = 128  # released A_log tensors are padded with zeros to a multiple of this


class TrimHeads(ConversionOps):
    """Drops the padding of a per-head tensor: [128] -> [heads]."""

    @torch.no_grad()
    def convert(self, input_dict: dict[str, Any], source_patterns, target_patterns, **kwargs):
        (tensors,) = input_dict.values()
        tensor = tensors[0] if isinstance(tensors, list) else tensors
        heads = kwargs["config"].get_text_config().linear_num_heads
        if tensor.numel() not in (heads, heads + -heads % HEAD_MULTIPLE):
            raise ValueError(f"{tensor.numel()} values for {heads} heads")
        return {target_patterns[0]: tensor.reshape(-1)[:heads].contiguous()}

    @property
    def reverse_op(self) -> ConversionOps:
        return PadHeads()


class PadHeads(ConversionOps):
    """Pads a per-head tensor with zeros, as released: [heads] -> [128]."""

    @torch.no_grad()
    def convert(self, input_dict: dict[str, Any], source_patterns, target_patterns, **kwargs):
        (tensors,) = input_dict.values()
        tensor = tensors[0] if isinstance(tensors, list) else tensors
        padding = -len(tensor) % HEAD_MULTIPLE
        return {target_patterns[0]: torch.nn.functional.pad(tensor, (0, padding))}

    @property
    def reverse_op(self) -> ConversionOps:
        return TrimHeads()


class UnpackAndMergeModulelist(MergeModulelist):
    """Unpacks every expert's `weight_packed` with its `weight_scale` and stacks the experts.

    The loader has cast the bytes to the parameter's dtype by then, which holds 0..255 exactly.
    """

    @torch.no_grad()
    def convert(self, input_dict: dict[str, Any], source_patterns, target_patterns, **kwargs):
        patterns = [p for p in source_patterns if p.endswith("weight_packed")]
        merged = {}
        for pattern in patterns:
            packed = input_dict.pop(pattern)
            scales = input_dict.pop(pattern.replace("weight_packed", "weight_scale"))
            dtype = packed[0].dtype
            if not dtype.is_floating_point:
                dtype = kwargs["model"].dtype
            rows, columns = packed[0].shape
            # Filled one by one: a layer's experts at once and stacked would take twice the memory.
            weight = packed[0].new_empty(len(packed), rows, 2 * columns, dtype=dtype)
            for expert, (codes, scale) in enumerate(zip(packed, scales, strict=True)):
                weight[expert] = unpack_mxfp4(codes.to(torch.uint8), scale.to(torch.uint8), dtype)
            merged[self.get_target_pattern(len(patterns), pattern, target_patterns)] = weight
        return merged


class PackedWeightConverter(WeightConverter):
    """A converter from packed experts. Saving writes them unpacked: rounding anew could lose training."""

    __slots__ = ()

    def reverse_transform(self) -> WeightTransform:
        sources = [
            p.replace("weight_packed", "weight")
            for p in self._original_source_patterns
            if p.endswith("weight_packed")
        ]
        operations = [MergeModulelist(dim=0), *self.operations[1:]]
        plain = WeightConverter(sources, list(self._original_target_patterns), operations)
        plain.scope_prefix, plain.base_model_prefix = self.scope_prefix, self.base_model_prefix
        return plain.reverse_transform()


def checkpoint_conversion() -> list[WeightConverter | WeightRenaming]:
    """The conversion mapping from released names, packed or not, to `KimiK3ForCausalLM`'s parameters."""
    gate, up, down = (rf"\.experts.*.{w}.weight" for w in ("w1", "w3", "w2"))
    moe = r"(gate\.|experts\.|shared_experts\.|routed_expert_)"
    residual = r"(self_attention_res|mlp_res|output_attn_res)"
    return [
        WeightRenaming(r"^language_model\.(model|lm_head)\.", r"^(model|lm_head)\."),
        # The dense layers are called `mlp` already, so only the experts' names may be renamed back.
        WeightRenaming(rf"\.block_sparse_moe\.{moe}", rf"\.mlp\.{moe}"),
        WeightRenaming(rf"{residual}_norm\.weight", rf"{residual}\.norm_weight"),
        WeightRenaming(rf"{residual}_proj\.weight", rf"{residual}\.proj_weight"),
        WeightRenaming(r"self_attn\.f_a_proj\.", r"self_attn\.forget_gate\.f_a_proj\."),
        WeightRenaming(r"self_attn\.f_b_proj\.", r"self_attn\.forget_gate\.f_b_proj\."),
        WeightRenaming(r"self_attn\.dt_bias", r"self_attn\.forget_gate\.dt_bias"),
        WeightConverter(r"self_attn\.A_log", r"self_attn\.forget_gate\.A_log", [TrimHeads()]),
        WeightConverter(
            [rf"self_attn\.{x}_conv1d\.weight" for x in "qkv"],
            r"self_attn\.conv1d\.weight",
            [Concatenate(dim=0)],
        ),
        PackedWeightConverter(
            [gate + "_packed", gate + "_scale", up + "_packed", up + "_scale"],
            r"\.experts.gate_up_proj",
            [UnpackAndMergeModulelist(dim=0), Concatenate(dim=1)],
        ),
        PackedWeightConverter(
            [down + "_packed", down + "_scale"],
            r"\.experts.down_proj",
            [UnpackAndMergeModulelist(dim=0)],
        ),
        WeightConverter(
            [gate, up],
            r"\.experts.gate_up_proj",
            [MergeModulelist(dim=0), Concatenate(dim=1)],
        ),
        WeightConverter(down, r"\.experts.down_proj", [MergeModulelist(dim=0)]),
    ]
