"""What is unusual about a model, in sentences for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from analyzers.schema import MultiToken, Residual, Tower
from analyzers.structure import Kind


def about_layers(kinds: list[Kind], residual: Residual, tied: list[list[str]]) -> list[str]:
    notes = []
    if any(m.operator == "other_mixer" for kind in kinds for m in kind.mixers):
        notes.append("the token mixer is not known here: only its linear layers are counted")
    hashed = [i for k in kinds if k.moe and k.moe.routing.scoring == "hash" for i in k.layers]
    if hashed:
        notes.append(f"{len(hashed)} layers route by a hash of the token, not by a score")
    moe = next((kind.moe for kind in kinds if kind.moe), None)
    if moe and moe.router_input_size != moe.hidden_size:
        notes.append(
            f"the experts work in a latent width of {moe.hidden_size}; the router reads"
            f" {moe.router_input_size}"
        )
    if moe and moe.zero_experts:
        notes.append(
            f"{moe.zero_experts} of {moe.count + moe.zero_experts} choices of the router compute"
            f" nothing: a token visits {moe.visited * moe.count:.3g} experts on average if all are"
            " chosen equally, and active parameters count these"
        )
    if residual.kind == "attention_residual":
        notes.append(
            "attention residuals hand a bank of block starts from layer to layer, whose copies grow"
            " with depth (saved bytes are those at the mean depth), and pipeline stages begin at"
            f" multiples of {residual.cut_multiple} layers"
        )
    if residual.kind == "hyper_connection":
        notes.append(f"hyper-connections carry {residual.streams} residual streams")
    if any(len({_layer(name) for name in names}) > 1 for names in tied):
        notes.append("layers share weights, which the parts of each of them count")
    return notes


def about_config(
    quantization: Mapping[str, Any] | None, towers: list[Tower], further: MultiToken | None
) -> list[str]:
    """What the config says beyond the model that is built."""
    notes = []
    if quantization is not None:
        form = quantization.get("format") or quantization.get("quant_method") or "an unnamed format"
        notes.append(f"the checkpoint is quantised ({form}); sizes here are of the unpacked model")
    notes += [f"text only: the {t.kind} tower is not built" for t in towers if not t.built]
    if further and not further.built:
        notes.append(f"{further.layers} layers for multi-token prediction are not built")
    return notes


def _layer(name: str) -> str:
    """The number of the layer in the name of a parameter; empty for one outside of the layers."""
    return next((word for word in name.split(".") if word.isdecimal()), "")
