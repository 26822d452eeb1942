from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest

from analyzers.backends import load_backend
from codegen import map_operators, mapper
from tests.codegen.kernel_samples import operator


def choose(backend: str, *operators):
    analysis = SimpleNamespace(operators=list(operators))
    return map_operators(analysis, load_backend(backend)).operators


@pytest.fixture
def fla(monkeypatch):
    """Pretends that flash-linear-attention is installed beside the given triton."""
    versions = {"fla-core": "0.6.0", "triton": "3.6.0"}
    find = mapper.importlib.util.find_spec
    monkeypatch.setattr(
        mapper.importlib.util, "find_spec", lambda name: object() if name == "fla" else find(name)
    )
    monkeypatch.setattr(mapper, "_version", versions.get)
    return versions


@pytest.mark.parametrize("backend", ["cpu", "h200"])
def test_linear_attention_is_generated_where_nothing_serves_it(member, backend, monkeypatch):
    monkeypatch.setattr(mapper.importlib.util, "find_spec", lambda name: None)
    (choice,) = choose(backend, operator(member))
    assert choice.decision == "generated"
    assert choice.provider == "codegen:linear_attention"
    assert "not installed" in choice.reason
    assert choice.evidence == f"codegen/families/{member}.yaml"
    assert choice.attributes["key_dim"] == 16
    assert choice.site is not None


def test_what_the_backend_file_lists_is_native():
    # No NPU is here to be asked.
    (choice,) = choose("ascend-910c", operator("linear"))
    assert (choice.decision, choice.provider) == ("native", "torch")
    assert choice.evidence.endswith("ascend-910c.yaml: native.linear")


def test_where_the_device_is_here_the_dispatcher_is_the_evidence():
    (choice,) = choose("cpu", operator("linear"))
    assert (choice.decision, choice.provider) == ("native", "torch")
    assert choice.evidence == "dispatcher: CPU kernels for aten::mm, aten::addmm"


def test_a_proven_library_is_preferred_to_a_new_kernel(fla):
    (choice,) = choose("h200", operator("kda"))
    assert (choice.decision, choice.provider) == ("existing", "fla")


@pytest.mark.parametrize(
    ("triton", "decision"),
    [("3.3.1", "existing"), ("3.4.0", "generated"), ("3.6.0", "generated"), ("3.7.0", "generated"),
     ("3.7.1", "existing")],
)  # fmt: skip
def test_the_library_is_refused_where_its_backward_is_wrong(fla, triton, decision):
    # fla#640: chunk_gated_delta_rule's backward on Hopper with triton 3.4 up to 3.7.0.
    fla["triton"] = triton
    (choice,) = choose("h200", operator("gated_delta_rule"))
    assert choice.decision == decision
    if decision == "generated":
        assert triton in choice.reason


def test_the_library_has_nothing_for_a_cpu(fla):
    (choice,) = choose("cpu", operator("kda"))
    assert choice.decision == "generated"
    assert "no kernel for cpu" in choice.reason


def test_a_shape_outside_the_family_falls_back_to_transformers(monkeypatch):
    monkeypatch.setattr(mapper.importlib.util, "find_spec", lambda name: None)
    (choice,) = choose("h200", operator("kda", key_dim=1024))
    assert (choice.decision, choice.provider) == ("native", "transformers")
    assert "1024 is outside" in choice.reason


def test_a_target_that_the_template_is_not_written_for_is_not_promised(member, monkeypatch):
    monkeypatch.setattr(mapper.importlib.util, "find_spec", lambda name: None)
    (choice,) = choose("ascend-910c", operator(member))
    assert (choice.decision, choice.provider) == ("native", "transformers")
    assert "not npu" in choice.reason


def test_an_operator_that_nothing_serves_is_unsupported():
    (choice,) = choose("cpu", dataclasses.replace(operator("warp_drive"), site=None))
    assert (choice.decision, choice.provider) == ("unsupported", "none")


def test_operators_keep_their_order():
    names = ["linear", "kda", "embedding"]
    assert [c.operator for c in choose("cpu", *map(operator, names))] == names
