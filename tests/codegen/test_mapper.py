from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest

from analyzers.backends import load_backend
from analyzers.schema import Site
from codegen import map_operators, mapper
from codegen.members import find_spec
from tests.codegen.kernel_samples import operator


def choose(backend: str, *operators, prefer=None):
    analysis = SimpleNamespace(operators=list(operators))
    return map_operators(analysis, load_backend(backend), prefer=prefer).operators


def decisions(backend: str, *operators, prefer=None):
    return [choice.decision for choice in choose(backend, *operators, prefer=prefer)]


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


@pytest.mark.parametrize("member", ["kda", "gated_delta_rule"])
@pytest.mark.parametrize("backend", ["cpu", "h200", "ascend-910c"])
def test_linear_attention_is_generated_where_nothing_serves_it(member, backend, monkeypatch):
    monkeypatch.setattr(mapper.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(mapper, "measurements", dict)
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


def test_a_proven_library_is_preferred_to_a_kernel_that_nobody_measured(fla):
    (choice,) = choose("h100", operator("kda"))
    assert (choice.decision, choice.provider) == ("existing", "fla")
    (choice,) = choose("h200", operator("kda"))
    assert choice.decision == "generated"
    assert choice.evidence == "codegen/measured.yaml"


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


@pytest.mark.parametrize("member", ["kda", "gated_delta_rule"])
def test_a_target_that_the_template_is_not_written_for_is_not_promised(member, monkeypatch):
    monkeypatch.setattr(mapper.importlib.util, "find_spec", lambda name: None)
    narrower = dataclasses.replace(find_spec(member), targets=["cuda", "hip"])
    monkeypatch.setattr(mapper, "find_spec", lambda name: narrower)
    (choice,) = choose("ascend-910c", operator(member))
    assert (choice.decision, choice.provider) == ("native", "transformers")
    assert "not npu" in choice.reason


def test_an_operator_that_nothing_serves_is_unsupported():
    (choice,) = choose("cpu", dataclasses.replace(operator("warp_drive"), site=None))
    assert (choice.decision, choice.provider) == ("unsupported", "none")


def test_operators_keep_their_order():
    names = ["linear", "kda", "embedding"]
    assert [c.operator for c in choose("cpu", *map(operator, names))] == names


# ------------------------------------------------------------------------------------- preferences


@pytest.mark.parametrize("name", ["short_convolution", "gated_rms_norm"])
def test_what_torch_serves_is_generated_where_it_is_preferred_and_can_be_bound(name):
    site = Site(module_class="Layer", function="forward")
    here = dataclasses.replace(operator(name, kernel_size=4), site=site)
    assert decisions("h200", here) == ["native"]
    assert decisions("h200", here, prefer="generated") == ["generated"]
    nowhere = dataclasses.replace(here, site=None)
    assert decisions("h200", nowhere, prefer="generated") == ["native"]


def test_a_library_is_kept_or_replaced_as_the_user_says(fla, monkeypatch):
    assert decisions("h200", operator("kda"), prefer="generated") == ["generated"]
    found = {"h200": {"kda": "1.6 times as fast as chunk_kda"}}
    monkeypatch.setattr(mapper, "measurements", lambda: found)
    assert decisions("h200", operator("kda")) == ["generated"]
    assert decisions("h200", operator("kda"), prefer="existing") == ["existing"]
    assert decisions("h100", operator("kda")) == ["existing"]  # measured elsewhere


def test_measurements_are_of_backends_and_operators_that_are_known():
    for backend, operators in mapper.measurements().items():
        load_backend(backend)
        for name, sentence in operators.items():
            assert find_spec(name) is not None
            assert sentence


@pytest.mark.parametrize(
    ("name", "triton", "decision"),
    [
        ("gla", "3.6.0", "existing"),
        ("simple_gla", "3.6.0", "generated"),  # fla#640, as gated_delta_rule
        ("simple_gla", "3.7.1", "existing"),
        ("delta_rule", "3.6.0", "existing"),
        ("linear_attention", "3.6.0", "existing"),
    ],
)
def test_each_library_function_has_its_own_guard(fla, name, triton, decision):
    fla["triton"] = triton
    function = mapper.LIBRARIES[name].function.rpartition(".")[2]
    site = Site(module_class="Own", function=function)
    assert decisions("h200", dataclasses.replace(operator(name), site=site)) == [decision]


def test_a_version_that_is_known_to_be_wrong_is_refused(fla):
    # fla#984, fla#988: chunk_delta_rule's backward on Hopper before 0.6.0.
    fla["fla-core"] = "0.5.1"
    site = Site(module_class="Own", function="chunk_delta_rule")
    (choice,) = choose("h200", dataclasses.replace(operator("delta_rule"), site=site))
    assert choice.decision == "generated"
    assert "before 0.6.0" in choice.reason


def test_a_library_that_the_module_does_not_call_serves_nothing(fla):
    # MiniMax spells its attention out: with flash-linear-attention installed it is as slow.
    site = Site(module_class="MiniMaxLightningAttention", function="forward")
    (choice,) = choose("h100", dataclasses.replace(operator("lightning"), site=site))
    assert choice.decision == "generated"
    assert "MiniMaxLightningAttention does not call chunk_lightning_attn" in choice.reason


# --------------------------------------------------------------- what the runtime calls around some


def around(backend, **kwargs):
    choices = choose(backend, operator("experts"), operator("linear"), **kwargs)
    own = ["moe_combine", "moe_order", "moe_reroute", "moe_spread"]
    assert [c.operator for c in choices] == ["experts", "linear", *own]
    return choices[2:]


def test_rows_of_experts_are_moved_by_torch_until_a_kernel_was_measured_faster(monkeypatch):
    monkeypatch.setattr(mapper, "measurements", dict)
    assert {(c.decision, c.provider) for c in around("h200")} == {("native", "torch")}
    assert {c.decision for c in around("h200", prefer="generated")} == {"generated"}
    found = {"h200": {"moe_combine": "5 times as fast as indexing"}}
    monkeypatch.setattr(mapper, "measurements", lambda: found)
    assert [c.decision for c in around("h200")] == ["generated"] + 3 * ["native"]
    assert {c.decision for c in around("h200", prefer="existing")} == {"native"}
    assert {c.decision for c in around("h100")} == {"native"}  # measured elsewhere


def test_a_target_without_row_kernels_keeps_torch():
    for choice in around("ascend-910c", prefer="generated"):
        assert choice.decision == "native"
        assert "not npu" in choice.reason
