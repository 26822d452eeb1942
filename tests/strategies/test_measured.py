"""A finished run refits the constants on its cluster."""

import dataclasses

import pytest

from analyzers.errors import InputError
from strategies.calibration.constants import ranges
from strategies.calibration.hardware import cluster_of
from strategies.calibration.measured import Step, refit
from strategies.pricing import predict, row_of
from strategies.problem import make_problem
from strategies.schema import Job
from strategies.search import search
from strategies.solver import price


@pytest.fixture(scope="module")
def planned(k3):
    cluster = cluster_of("GB200", 128)
    assert cluster is not None
    job = Job(model="k3", cluster="c", backend="gb200", sequence_length=4096)
    return cluster, job, search(k3, cluster, job)


def steps(seconds, peak=60.0, slow=9.0, count=8, loads=()):
    first = [Step(seconds=slow * seconds, peak_gib=peak)] * 2
    rest = [Step(seconds=seconds, peak_gib=peak, tokens_per_expert=loads)] * (count - 2)
    return first + rest


@pytest.mark.parametrize("factor", [1.15, 0.9])
def test_refitted_constants_explain_the_run_within_what_is_physical(k3, planned, factor):
    cluster, _, plan = planned
    seconds = factor * plan.predicted.step_seconds
    held = plan.predicted.memory_gib
    constants, found = refit(k3, cluster, plan, steps(seconds, peak=held.peak - held.reserved))
    assert found.step_seconds == pytest.approx(seconds), "the slow first steps do not count"
    assert found.step_seconds_before == pytest.approx(plan.predicted.step_seconds, rel=1e-6)
    assert found.step_seconds_after == pytest.approx(seconds, rel=0.03)
    assert found.constants
    for name, known in ranges().items():
        assert known.low - 1e-12 <= getattr(constants, name) <= known.high + 1e-12
    slower = factor > 1
    change = found.constants.get("matmul_share") or found.constants["grouped_matmul_share"]
    assert (change.after < change.before) == slower


def test_plans_are_made_with_the_constants_of_the_run(k3, planned):
    cluster, job, plan = planned
    seconds = 1.15 * plan.predicted.step_seconds
    constants, _ = refit(k3, cluster, plan, steps(seconds))
    again = search(k3, cluster, job, constants=constants)
    assert again.predicted.step_seconds > plan.predicted.step_seconds
    problem = make_problem(k3, cluster, job, constants=constants)
    assert problem.pricing.constants == constants
    assert predict(problem.work, cluster, plan).step_seconds == pytest.approx(
        plan.predicted.step_seconds, rel=1e-6
    )


def test_what_no_constant_explains_is_told(k3, planned):
    cluster, _, plan = planned
    _, found = refit(k3, cluster, plan, steps(20 * plan.predicted.step_seconds))
    assert found.step_seconds_after < 0.5 * found.step_seconds
    assert any("adapt cluster probe" in line for line in found.said)


@pytest.mark.parametrize("factor", [20.0, 1.15, 0.2])
def test_the_plan_that_was_run_is_predicted_to_take_what_it_took(k3, planned, factor):
    """Constants moved as far as they may and 20 times were left; the interval was far below."""
    cluster, job, plan = planned
    seconds = factor * plan.predicted.step_seconds
    constants, found = refit(k3, cluster, plan, steps(seconds))
    assert found.step_seconds_after * found.unexplained == pytest.approx(seconds)
    problem = make_problem(k3, cluster, job, constants=constants, pace=found.unexplained)
    assert price(problem.pricing, row_of(plan)).seconds[0] == pytest.approx(seconds)
    again = search(k3, cluster, job, constants=constants, pace=found.unexplained)
    predicted = again.predicted
    parts = sum(vars(predicted.step).values())
    assert parts == pytest.approx(predicted.step_seconds)
    assert predicted.lower_bound_seconds <= predicted.step_seconds
    assert again.ep_curve is not None
    tokens = again.micro_batch_size * again.sequence_length
    row = next(r for r in again.ep_curve.rows if r.tokens_per_rank == tokens)
    cell = row.by_ep[again.parallelism.ep]
    assert cell.seconds == pytest.approx(predicted.step_seconds, rel=0.03)


def test_measured_loads_of_experts_are_compared_with_the_plan(k3, planned):
    cluster, _, plan = planned
    if plan.parallelism.ep == 1:
        pytest.skip("no expert parallelism planned")
    loads = [[1000 if i % 8 else 3000 for i in range(896)]]
    _, found = refit(k3, cluster, plan, steps(plan.predicted.step_seconds, loads=loads))
    assert found.overload_planned == pytest.approx(1.0)
    assert found.overload is not None
    assert found.overload > 1.05


def test_a_run_that_says_nothing_is_refused(k3, planned):
    cluster, _, plan = planned
    with pytest.raises(InputError, match="has 4 steps"):
        refit(k3, cluster, plan, steps(1.0, count=4))
    with pytest.raises(InputError, match="its plan is for h100"):
        refit(k3, cluster, dataclasses.replace(plan, backend="h100"), steps(1.0))
    with pytest.raises(InputError, match="its plan is for 256 devices"):
        refit(k3, cluster, dataclasses.replace(plan, world_size=256), steps(1.0))


@pytest.mark.parametrize("seconds", [0.0, float("nan"), float("inf"), -1.0])
def test_steps_without_a_time_are_refused(k3, planned, seconds):
    cluster, _, plan = planned
    with pytest.raises(InputError, match="step 1 took"):
        refit(k3, cluster, plan, steps(seconds))
