"""What stock PEFT makes of the names in an adapter that it reads.

PEFT sends the names of factors through transformers' renaming of released weights, and the names of
targets through one of its own for experts that are stacked today. Both are made for adapters of
older models, and neither is always at rest with what is a name of the model already.
"""

from __future__ import annotations

from torch import nn

from runtime.shards import own_classes


class FactorNames:
    """The name of a factor on disk, by that which it must have in the model."""

    def __init__(self, model: nn.Module) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightRenaming

        with own_classes(model):
            conversions = get_model_conversion_mapping(model)  # type: ignore[arg-type]
        self._renamings = [c for c in conversions if isinstance(c, WeightRenaming)]

    def stored(self, key: str) -> str | None:
        """The name that PEFT turns into `key`: that itself or one with the steps undone that would
        move it. None where a step moves every such name."""
        from transformers.core_model_loading import apply_renamings

        name = key
        for renaming in reversed(self._renamings):
            if renaming.rename_source_key(name)[0] != name:
                name, _ = renaming.reverse_transform().rename_source_key(name)
        return name if apply_renamings(name, self._renamings) == key else None


def taken_for_experts(model: nn.Module) -> set[str]:
    """Last words of names by which PEFT takes a linear layer of this model for one of the experts,
    which it then looks for in the stack, whatever the rest of the name says. The same adapter under
    the same names, but of the layer's `weight` as a parameter, is left as it is."""
    from peft.utils.transformers_weight_conversion import (
        _MODEL_TO_CONVERSION_PATTERN,
        _MOE_TARGET_MODULE_MAPPING,
    )

    kind = getattr(getattr(model, "config", None), "model_type", "")
    return set(_MOE_TARGET_MODULE_MAPPING.get(_MODEL_TO_CONVERSION_PATTERN.get(kind, ""), {}))
