"""ModelAnalysis + Backend -> OperatorMap: what serves each operator, and why."""

from __future__ import annotations

import functools
import importlib.util
from dataclasses import dataclass
from importlib import metadata, resources
from typing import Literal

from packaging.version import Version

from analyzers.backends import Backend
from analyzers.schema import ModelAnalysis, Operator
from analyzers.support import ask
from codegen.family import Member
from codegen.members import find_spec, load_members
from codegen.schema import Decision, OperatorChoice, OperatorMap

HOPPER = 90

Preference = Literal["generated", "existing"]


@dataclass(frozen=True, kw_only=True)
class Library:
    """A function of an installed package that serves an operator."""

    package: str
    distributions: tuple[str, ...]
    function: str
    callers: tuple[str, ...] = ()
    """Functions of transformers that call it where it is installed. A model's own code may call it
    by its own name."""
    least: str = "0"
    """First version that is right."""
    same_widths: bool = False
    """Values must be as wide as keys."""
    guarded: bool = False
    """Its backward is wrong on Hopper with Triton from 3.4 to below 3.7.1, and refuses there
    (fla-org/flash-linear-attention#640: wrong dk)."""


def _fla(function: str, *callers: str, least: str = "0", guarded: bool = False) -> Library:
    return Library(
        package="fla",
        distributions=("fla-core", "flash-linear-attention"),
        function=f"fla.ops.{function}",
        callers=callers,
        least=least,
        guarded=guarded,
    )


LIBRARIES = {
    "kda": _fla("kda.chunk_kda", "chunk_kimi_delta_attention"),
    "gated_delta_rule": _fla(
        "gated_delta_rule.chunk_gated_delta_rule", "torch_chunk_gated_delta_rule", guarded=True
    ),
    # Before 0.6.0 its backward has launches that are wrong on Hopper (#984, #988).
    "delta_rule": _fla("delta_rule.chunk_delta_rule", least="0.6.0"),
    "gla": _fla("gla.chunk_gla"),
    "simple_gla": _fla("simple_gla.chunk_simple_gla", guarded=True),
    "lightning": _fla("lightning_attn.chunk_lightning_attn"),
    "linear_attention": _fla("linear_attn.chunk_linear_attn"),
    "mamba2": Library(
        package="mamba_ssm",
        distributions=("mamba-ssm",),
        function="mamba_ssm.ops.triton.ssd_combined.mamba_chunk_scan_combined",
        callers=("mamba2_chunk_scan",),
    ),
    "sparse_attention": Library(
        package="attn_gym",
        distributions=("attn-gym",),
        function="attn_gym.sparse.gather_attn",
        same_widths=True,
    ),
    "indexer": Library(
        package="attn_gym",
        distributions=("attn-gym",),
        function="attn_gym.sparse.lightning_indexer",
    ),
}


def map_operators(
    analysis: ModelAnalysis, backend: Backend, *, prefer: Preference | None = None
) -> OperatorMap:
    """Decides for every operator of the model, in its order: native, existing, generated or
    unsupported; then for those that the runtime calls around them.

    Where both would serve, a generated kernel goes before torch's own code and installed packages
    when it was measured to be faster there (`measured.yaml`); always or never with `prefer`.
    """
    choices = [_choose(operator, backend, prefer) for operator in analysis.operators]
    names = {operator.name for operator in analysis.operators}
    around = [member for member in load_members().values() if member.around in names]
    choices += [_choose_around(member, backend, prefer) for member in around]
    return OperatorMap(backend=backend.name, operators=choices)


def _choose_around(member: Member, backend: Backend, prefer: Preference | None) -> OperatorChoice:
    """For an operator that the runtime has in torch's own code, which runs on any device."""
    refused = member.refusal({}, backend)
    faster = measurements().get(backend.name, {}).get(member.operator)
    generated = refused is None and prefer != "existing" and bool(faster or prefer)
    if generated:
        reason = "generated kernels are preferred" if prefer else str(faster)
    else:
        reason = f"the runtime's own torch code runs on any device, around {member.around}"
        reason += f"; the {member.family} family does not cover it: {refused}" if refused else ""
    return OperatorChoice(
        operator=member.operator,
        backend=backend.name,
        decision="generated" if generated else "native",
        provider=f"codegen:{member.family}" if generated else "torch",
        reason=reason,
        evidence=f"codegen/families/{member.operator}.yaml",
    )


def _choose(operator: Operator, backend: Backend, prefer: Preference | None) -> OperatorChoice:
    def choice(decision: Decision, provider: str, reason: str, evidence: str) -> OperatorChoice:
        return OperatorChoice(
            operator=operator.name,
            backend=backend.name,
            decision=decision,
            provider=provider,
            reason=reason,
            evidence=evidence,
            attributes=operator.attributes,
            site=operator.site,
        )

    answer = ask(operator.name, backend)
    spec = find_spec(operator.name)
    refused = spec.refusal(operator.attributes, backend) if spec else ""
    file = f"codegen/families/{spec.operator}.yaml" if spec else ""
    faster = measurements().get(backend.name, {}).get(operator.name)
    enters = operator.site is not None or not answer.native
    if spec and refused is None and enters:
        if prefer == "generated":
            reason = "generated kernels are preferred"
            return choice("generated", f"codegen:{spec.family}", reason, file)
        if faster and prefer is None:
            return choice("generated", f"codegen:{spec.family}", faster, "codegen/measured.yaml")
    if answer.native:
        served = backend.native.get(operator.name, "torch")
        provider = "transformers" if "transformers" in served else "torch"
        return choice("native", provider, f"{backend.title} serves it with {served}", answer.how)
    others = ""
    if (library := LIBRARIES.get(operator.name)) is not None:
        fault, evidence = _fault(library, operator, backend)
        if not fault:
            return choice("existing", library.package, f"{library.function} covers it", evidence)
        others = f"; {library.package} is not used: {fault}"
    if spec and refused is None:
        reason = f"no native {operator.name} on {backend.title}{others}"
        return choice("generated", f"codegen:{spec.family}", reason, file)
    if spec:
        others += f"; the {spec.family} family does not cover it: {refused}"
    if operator.site is not None:
        where = f"{operator.site.module_class} calls {operator.site.function}"
        reason = f"transformers' own torch code runs on any device{others}"
        return choice("native", "transformers", reason, where)
    reason = f"nothing serves it on {backend.title}{others}"
    return choice("unsupported", "none", reason, file or answer.how)


@functools.cache
def measurements() -> dict[str, dict[str, str]]:
    """By backend and operator: the measurement that the generated kernel is faster there."""
    import yaml

    return yaml.safe_load((resources.files("codegen") / "measured.yaml").read_text("utf-8"))


def _fault(library: Library, operator: Operator, backend: Backend) -> tuple[str, str]:
    """Why the library cannot serve the operator here ('' when it can), and the query."""
    query = f"importlib.util.find_spec('{library.package}') for {library.function}"
    if importlib.util.find_spec(library.package) is None:
        return "it is not installed", query
    known = next(filter(None, map(_version, library.distributions)), None)
    version = known or "of unknown version"
    query = f"{library.package} {version} is installed"
    if backend.device_type == "cpu" or backend.triton is None:
        return f"{version} has no kernel for {backend.device_type}", query
    if known and Version(known) < Version(library.least):
        return f"{version} is wrong on this hardware before {library.least}", query
    site = operator.site
    name = library.function.rpartition(".")[2]
    if site is not None and site.function not in (*library.callers, name):
        return f"{site.module_class} does not call {name}", query
    widths = [operator.attributes.get(n) for n in ("key_dim", "value_dim")]
    if library.same_widths and widths[0] != widths[1]:
        return f"{version} has values as wide as keys, not {widths[0]} and {widths[1]}", query
    hopper = backend.triton.backend == "cuda" and backend.triton.arch == HOPPER
    triton = _version("triton") or "0"
    if library.guarded and hopper and _is_guarded(triton):
        return f"{version} refuses its backward on Hopper with triton {triton} (#640)", query
    return "", query


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _is_guarded(triton: str) -> bool:
    return Version("3.4") <= Version(triton) < Version("3.7.1")
