from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from analyzers.errors import InfeasibleError, InputError
from strategies import answers, load_cluster, search
from strategies.parts import parts
from strategies.problem import make_problem
from strategies.schema import Job
from strategies.solver import solve

CLUSTERS = Path(__file__).parents[2] / "examples" / "clusters"


def job(sequence_length=4096, **given):
    return Job(model="m", cluster="c", backend="b", sequence_length=sequence_length, **given)


@pytest.fixture(scope="module")
def supernode():
    return load_cluster(CLUSTERS / "supernode-128.yaml")


@pytest.fixture(scope="module")
def problem(k3, supernode):
    return make_problem(k3, supernode, job())


@pytest.fixture(scope="module")
def curve(problem):
    return answers.ep_curve(problem)


def fits(problem, **changes):
    """Whether any plan fits, asked of the search itself."""
    changed = replace(problem, **changes)
    return solve(changed.space(), changed.pricing).best is not None


def test_parts_are_whole_nodes_and_devices_of_one_node(supernode):
    sizes = [p.world_size for p in parts(supernode)]
    assert sizes == [*range(128, 8, -8), *range(8, 0, -1)]
    five = next(p for p in parts(supernode) if p.world_size == 40)
    assert five.nodes == 5
    assert list(five.node_names) == ["sn01", "sn02", "sn03", "sn04", "sn05"]
    assert list(five.hostlist) == ["sn[01-05]"]


def test_fewest_devices_is_the_smallest_part_on_which_a_plan_fits(problem, supernode):
    answer = answers.fewest_devices(problem)
    fitting = [p.world_size for p in parts(supernode) if fits(problem, cluster=p)]
    assert answer.value == min(fitting)
    # 5.56 TB in bf16 and 122 GiB a device: not below 43 devices, whatever the rest.
    assert answer.value > 2.7795e12 * 2 / (122 * 2**30)
    assert answer.memory_gib < answer.capacity_gib


def test_packed_experts_need_fewer_devices(k3, supernode, problem):
    packed = make_problem(k3, supernode, job(), allow=["packed_experts"])
    answer = answers.fewest_devices(packed)
    assert answer.value < answers.fewest_devices(problem).value
    assert answer.missing == ["experts held packed"]


def test_the_longest_sequence_fits_and_one_step_more_does_not(problem):
    answer = answers.longest_sequence(problem)
    one = {"micro_batch_size": 1}
    assert fits(problem, job=job(answer.value), fixed=one)
    longer = answer.value + answers.SEQUENCE_STEP
    assert not fits(problem, job=job(longer), fixed=one)
    assert answer.limit == f"one of {longer:,} tokens does not fit"


def test_a_small_model_takes_the_longest_sequence_that_it_knows(tiny, supernode):
    answer = answers.longest_sequence(make_problem(tiny, supernode, job()))
    assert answer.value == tiny.max_sequence_length
    assert answer.limit == "the model takes none that is longer"
    odd = replace(tiny, max_sequence_length=1000)
    answer = answers.longest_sequence(make_problem(odd, supernode, job(512)))
    assert (answer.value, answer.limit) == (1000, "the model takes none that is longer")


def test_the_largest_micro_batch_fits_and_one_more_does_not(problem):
    answer = answers.largest_micro_batch(problem)
    assert fits(problem, fixed={"micro_batch_size": answer.value})
    assert not fits(problem, fixed={"micro_batch_size": answer.value + 1})


def test_nothing_fits_is_infeasible(k3):
    small = make_problem(k3, load_cluster(CLUSTERS / "h200-x2.yaml"), job())
    for ask in (answers.fewest_devices, answers.longest_sequence, answers.largest_micro_batch):
        with pytest.raises(InfeasibleError):
            ask(small)


def test_fewer_tokens_favour_more_expert_parallelism(curve):
    """The gather of experts costs the same for any number of tokens, the exchange grows with it."""
    fastest = [row.fastest for row in curve.rows]
    assert fastest == sorted(fastest, reverse=True)
    assert fastest[0] > fastest[-1]
    for w in curve.windows:
        ordered = sorted(w.windows.items(), key=lambda item: item[1])
        assert [ep for ep, _ in ordered] == sorted(w.windows, reverse=True)
        ends = [last for _, (_, last) in ordered]
        starts = [first for _, (first, _) in ordered]
        assert all(last < first for last, first in zip(ends, starts[1:], strict=False))


def test_the_ep_curve_agrees_with_the_estimate_where_it_assumes_the_same(curve):
    """A worked estimate for K3 on this fabric (the measured all-to-all curve, weights gathered at
    164 GB/s, nothing hidden, two exchanges a layer) has EP 64 best from 3,300 to 10,700 tokens."""
    bare = next(w for w in curve.windows if w.assumed == "nothing hidden, no recomputation")
    first, last = bare.windows[64]
    assert first == pytest.approx(3300, rel=0.15)
    assert last == pytest.approx(10700, rel=0.15)


def test_hiding_gathers_moves_the_windows_to_fewer_tokens(curve):
    planned, bare, _ = curve.windows
    assert planned.assumed == "as planned"
    assert planned.windows[64][1] < bare.windows[64][1]


def test_the_ep_curve_marks_what_does_not_fit(curve, problem):
    cells = {(r.tokens_per_rank, ep): c for r in curve.rows for ep, c in r.by_ep.items()}
    assert all(c.memory_gib <= 128 for c in cells.values() if c.fits)
    assert not any(c.fits for (tokens, _), c in cells.items() if tokens > curve.fits_up_to)
    assert {ep for _, ep in cells} == {1, 2, 4, 8, 16, 32, 64, 128}


def test_the_most_tokens_of_the_ep_curve_are_exact(curve, problem):
    """As one sequence of so many tokens, and not with a token more in each of the sequences of the
    job's length, or less, that hold them."""
    like = {"fsdp": 128, "micro_batch_size": 1}
    most = curve.fits_up_to
    assert fits(problem, job=job(most), fixed=like)
    assert not fits(problem, job=job(most + -(-most // 4096)), fixed=like)


def test_trained_experts_are_not_held_packed(k3, supernode):
    lora, full = (make_problem(k3, supernode, job(training=how)) for how in ("lora", "full"))
    assert "packed_experts" in lora.features
    assert "packed_experts" not in full.features


def test_fewer_devices_that_nothing_was_laid_out_on_are_not_said_to_lack_memory(k3, supernode):
    whole = make_problem(k3, supernode, job(), fixed={"ep": 128})
    answer = answers.fewest_devices(whole)
    assert (answer.value, answer.limit) == (
        128,
        "fewer cannot be laid out as the job and --fix ask",
    )
    split = make_problem(k3, supernode, job(global_batch_size=101))
    with pytest.raises(InfeasibleError, match="101 sequences does not split"):
        answers.fewest_devices(split)


@pytest.mark.parametrize("ask", [answers.longest_sequence, answers.largest_micro_batch])
def test_a_question_without_an_answer_names_what_binds(k3, supernode, ask):
    with pytest.raises(InfeasibleError, match=r"no layout .* has ep=64, efsdp=4"):
        ask(make_problem(k3, supernode, job(), fixed={"ep": 64, "efsdp": 4}))
    node = next(c for c in parts(supernode) if c.world_size == 8)
    with pytest.raises(InfeasibleError, match="GiB too much; GiB by part: frozen weights"):
        ask(make_problem(k3, node, job()))


def test_a_dense_model_has_no_ep_curve(dense, supernode):
    with pytest.raises(InputError, match="the model has no experts"):
        answers.ep_curve(make_problem(dense, supernode, job()))


def test_slow_links_cost_at_most_their_slowness_and_replanning_never_hurts(problem):
    found = answers.degraded_links(problem, 0.25)
    assert [d.tier for d in found] == ["node", "supernode"]
    for d in found:
        assert 1 <= d.best_plan <= d.same_plan * (1 + 1e-9)
        assert d.same_plan <= 1 / 0.25
        assert d.changed or d.best_plan == pytest.approx(d.same_plan)
    sound = answers.degraded_links(problem, 1.0)
    assert all(d.same_plan == d.best_plan == 1 and not d.changed for d in sound)


def test_links_so_slow_that_another_plan_is_better(problem):
    found = answers.degraded_links(problem, 0.02)
    assert any(d.changed and d.best_plan < d.same_plan for d in found)


def test_idle_devices_are_left_only_where_that_is_faster(k3, supernode):
    plan = search(k3, supernode, job(), allow_idle=True)
    all_of_them = search(k3, supernode, job())
    speeds = [p.predicted.tokens_per_second_per_device * p.world_size for p in (plan, all_of_them)]
    assert speeds[0] >= speeds[1] * (1 - 1e-9)
    assert plan.world_size + plan.idle_devices == 128
    assert np.isfinite(speeds).all()


def test_windows_are_read_from_few_tokens_to_many():
    said = answers.windows_in_words({64: (2400, 9000), 128: (512, 2300), 32: (9100, 65536)})
    assert said == "EP 128 to 2,300, EP 64 to 9,000 tokens a rank, EP 32 above"
    assert answers.windows_in_words({2: (512, 65536)}) == "EP 2 throughout"


def test_a_global_batch_that_does_not_split_is_no_lack_of_memory(problem):
    with pytest.raises(InfeasibleError, match="global batch of 100 sequences does not split"):
        answers.degraded_links(replace(problem, job=job(global_batch_size=100)), 0.5)
