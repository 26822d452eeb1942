"""ModelAnalysis + Backend -> OperatorMap: what serves each operator, and why."""

from __future__ import annotations

import importlib.util
from importlib import metadata

from packaging.version import Version

from analyzers.backends import Backend
from analyzers.schema import ModelAnalysis, Operator
from analyzers.support import ask
from codegen.family import find_spec
from codegen.schema import Decision, OperatorChoice, OperatorMap

HOPPER = 90

# Operators that flash-linear-attention serves: our name -> its function, and whether its backward
# needs the guarded kernel (fla-org/flash-linear-attention#640: wrong dk on Hopper).
FLA = {
    "kda": ("fla.ops.kda.chunk_kda", False),
    "gated_delta_rule": ("fla.ops.gated_delta_rule.chunk_gated_delta_rule", True),
}


def map_operators(analysis: ModelAnalysis, backend: Backend) -> OperatorMap:
    """Decides for every operator of the model, in its order: native, existing, generated or
    unsupported. A proven installed kernel is preferred to a new one."""
    choices = [_choose(operator, backend) for operator in analysis.operators]
    return OperatorMap(backend=backend.name, operators=choices)


def _choose(operator: Operator, backend: Backend) -> OperatorChoice:
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
    if answer.native:
        served = backend.native.get(operator.name, "torch")
        provider = "transformers" if "transformers" in served else "torch"
        return choice("native", provider, f"{backend.title} serves it with {served}", answer.how)
    refused = ""
    if operator.name in FLA:
        fault, evidence = _fla_fault(operator.name, backend)
        if not fault:
            return choice("existing", "fla", f"{FLA[operator.name][0]} covers it", evidence)
        refused = f"; fla is not used: {fault}"
    spec = find_spec(operator.name)
    if spec is not None:
        fault = spec.refusal(operator.attributes, backend)
        file = f"codegen/families/{spec.operator}.yaml"
        if fault is None:
            reason = f"no native {operator.name} on {backend.title}{refused}"
            return choice("generated", f"codegen:{spec.family}", reason, file)
        if operator.site is None:
            reason = f"the {spec.family} family does not cover it: {fault}{refused}"
            return choice("unsupported", "none", reason, file)
        refused += f"; the {spec.family} family does not cover it: {fault}"
    if operator.site is not None:
        where = f"{operator.site.module_class} calls {operator.site.function}"
        reason = f"transformers' own torch code runs on any device{refused}"
        return choice("native", "transformers", reason, where)
    reason = f"nothing serves it on {backend.title}{refused}"
    return choice("unsupported", "none", reason, answer.how)


def _fla_fault(name: str, backend: Backend) -> tuple[str, str]:
    """Why flash-linear-attention cannot serve the operator here ('' when it can), and the query."""
    function, guarded = FLA[name]
    query = f"importlib.util.find_spec('fla') for {function}"
    if importlib.util.find_spec("fla") is None:
        return "it is not installed", query
    version = _version("fla-core") or _version("flash-linear-attention") or "of unknown version"
    query = f"fla {version} is installed"
    if backend.device_type == "cpu" or backend.triton is None:
        return f"{version} has no kernel for {backend.device_type}", query
    hopper = backend.triton.backend == "cuda" and backend.triton.arch == HOPPER
    triton = _version("triton") or "0"
    if guarded and hopper and _is_guarded(triton):
        return f"{version} refuses its backward on Hopper with triton {triton} (#640)", query
    return "", query


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _is_guarded(triton: str) -> bool:
    return Version("3.4") <= Version(triton) < Version("3.7.1")
