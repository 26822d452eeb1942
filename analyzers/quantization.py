"""In which format the experts of a checkpoint are stored, as headers or the config tell."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from analyzers.formats import Logical

PLAIN = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
IGNORED = ("ignore", "modules_to_not_convert", "exclude_modules")


def stored_format(tensors: Mapping[str, Logical]) -> str | None:
    """The format of most bytes of the routed experts in a checkpoint; None when it has none."""
    bytes_of: Counter[str] = Counter()
    for name, tensor in tensors.items():
        words = name.split(".")
        if any("expert" in w and "shared" not in w for w in words) and len(tensor.shape) > 1:
            bytes_of[tensor.format] += tensor.nbytes
    return bytes_of.most_common(1)[0][0] if bytes_of else None


def configured_format(
    quantization: Mapping[str, Any] | None, experts: str, dtype: str, expert_dtype: str | None
) -> str:
    """The format that a config names for the experts at the module path `experts`.

    `quantization` is of `formats.quantization_of`; `expert_dtype` is a key of DeepSeek-V4's config,
    which packs the experts alone into four bits.
    """
    plain = PLAIN.get(dtype, dtype)
    if quantization is None:
        return plain
    names = [f"{experts}.0.down_proj", f"{experts}.0.w2", f"{experts}.down_proj", experts]
    if any(is_kept_plain(quantization, name) for name in names):
        return plain
    if expert_dtype == "fp4":
        return "mxfp4"
    return _format(quantization) or plain


def is_kept_plain(quantization: Mapping[str, Any], module: str) -> bool:
    """Whether a `quantization_config` leaves the weight of the module at this path unpacked."""
    patterns = [p for key in IGNORED for p in quantization.get(key) or () if isinstance(p, str)]
    return any(_matches(pattern, module) for pattern in patterns)


def _matches(pattern: str, name: str) -> bool:
    """By compressed-tensors' regular expressions, globs, or a whole word of the name."""
    if pattern.startswith("re:"):
        return re.match(pattern[3:], name) is not None
    wild = re.escape(pattern).replace(r"\*", ".*")
    return re.search(rf"(?:^|\.){wild}(?:\.|$)", name) is not None


def _format(quantization: Mapping[str, Any]) -> str | None:
    groups = quantization.get("config_groups")
    first = next(iter(groups.values()), {}) if isinstance(groups, Mapping) else {}
    weights = first.get("weights") or {} if isinstance(first, Mapping) else {}
    told = [quantization.get(key) for key in ("quant_method", "format", "quant_algo", "fmt")]
    text = " ".join(str(word).lower() for word in told if word)
    for name in ("mxfp4", "nvfp4"):
        if name in text:
            return name
    bits = weights.get("num_bits") or quantization.get("bits")
    if bits in (4, 8):
        return f"fp{bits}" if weights.get("type") == "float" else f"int{bits}"
    if "fp8" in text or "float8" in text or "e4m3" in text:
        return "fp8"
    if quantization.get("load_in_4bit") or "awq" in text or "gptq" in text:
        return "int4"
    return None
