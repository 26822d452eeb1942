"""What a plan asks for is done or refused, never passed over."""

import pytest

from analyzers.errors import InputError
from runtime.sharding import build_meshes
from strategies.schema import Mapping, Parallelism
from tests.runtime.runs import plan_for


@pytest.mark.parametrize("axis", ["pp", "tp", "cp"])
def test_an_axis_that_the_runtime_lacks_is_refused(axis):
    from dataclasses import replace

    plan = replace(plan_for(2), parallelism=Parallelism(fsdp=2, efsdp=2, **{axis: 2}))
    fault = rf"plan.json: parallelism.{axis}: {axis} = 2, but .* by fsdp and ep only"
    with pytest.raises(InputError, match=fault) as e:
        build_meshes(plan)
    assert e.value.exit_status == 2
    assert e.value.fix.startswith("1, and ")


def test_fp8_experts_are_refused():
    with pytest.raises(InputError, match=r"expert_weight_format"):
        build_meshes(plan_for(2, expert_weight_format="fp8"))


@pytest.mark.parametrize(
    ("ep", "size", "fault"),
    [
        (8, None, "node_size: missing"),
        (8, 8, "dispatcher: hierarchical, but ep = 8 is not several whole nodes of 8"),
        (12, 8, "dispatcher: hierarchical, but ep = 12 is not several whole nodes of 8"),
    ],
)
def test_hierarchical_dispatch_needs_several_whole_nodes(ep, size, fault):
    with pytest.raises(InputError, match=rf"plan.json: {fault}"):
        build_meshes(plan_for(ep, ep=ep, dispatcher="hierarchical", node_size=size))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("offload_optimizer", True),
        ("mapping", Mapping(shards_inside=True)),
    ],
)
def test_a_setting_that_the_runtime_lacks_is_refused(key, value):
    with pytest.raises(InputError, match=rf"plan.json: {key}"):
        build_meshes(plan_for(2, **{key: value}))
