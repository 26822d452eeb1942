"""`adapt plan`: one document or one answer on stdout, one clear line for a mistake."""

import json
import shutil
import sys
from pathlib import Path

import pytest

import analyzers
from adapter_agent import cli
from adapter_agent.plan_command import routing_of
from analyzers.documents import to_json, write_document
from analyzers.errors import InputError
from strategies.schema import Job, Routing

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "examples/models/tiny-kimi-linear"
CLUSTER = ROOT / "examples/clusters/two-ranks.yaml"
SUPERNODE = ROOT / "examples/clusters/supernode-128.yaml"


@pytest.fixture(scope="module")
def analyzed():
    """The analysis of the model, made once for all tests."""
    return analyzers.analyze(MODEL)


@pytest.fixture
def plan(monkeypatch, capfd, analyzed):
    """Runs `adapt plan` in this process; returns exit status, stdout and stderr."""
    monkeypatch.setattr(analyzers, "analyze", lambda *_, **__: analyzed)

    def call(*words, model=MODEL, cluster=CLUSTER):
        line = ["adapt", "plan", *([str(model)] if model else []), "--quiet", *words]
        line += ["--cluster", str(cluster)] if cluster else []
        monkeypatch.setattr(sys, "argv", line)
        with pytest.raises(SystemExit) as left:
            cli.main()
        out, err = capfd.readouterr()
        return left.value.code or 0, out, err

    return call


def test_the_plan_is_one_json_document(plan):
    status, out, _ = plan("--json")
    assert status == 0
    made = json.loads(out)
    assert made["world_size"] == 2
    assert made["runnable"]
    assert made["survey"]
    assert {"peak", "frozen_weights"} <= made["predicted"]["memory_gib"].keys()


def test_the_plan_is_shown_with_its_alternatives_and_reasons(plan):
    status, out, _ = plan(cluster=SUPERNODE)
    assert status == 0
    for heading in ("Memory:", "Step:", "Alternatives", "Not chosen"):
        assert heading in out
    assert "the limit that binds" in out
    assert "Assumed: even routing" in out


@pytest.mark.parametrize(
    ("question", "keys"),
    [
        ("fewest-devices", {"value", "unit", "settings", "limit"}),
        ("longest-sequence", {"value", "unit", "settings", "limit"}),
        ("largest-micro-batch", {"value", "unit", "settings", "limit"}),
        ("ep-curve", {"rows", "windows", "fits_up_to", "kept"}),
    ],
)
def test_a_question_is_answered_in_json_and_in_words(plan, question, keys):
    status, out, _ = plan("--ask", question, "--json")
    assert status == 0
    assert keys <= json.loads(out).keys()
    status, out, _ = plan("--ask", question)
    assert status == 0
    assert out.strip()


def test_slow_links_are_answered_tier_by_tier(plan):
    status, out, _ = plan(
        "--ask", "degraded-links", "--link-scale", "0.5", "--json", cluster=SUPERNODE
    )
    assert status == 0
    assert [d["tier"] for d in json.loads(out)] == ["node", "supernode"]


def test_what_the_runtime_lacks_needs_to_be_allowed(plan):
    status, _, err = plan("--fix", "tp=2")
    assert status == 2
    assert "--allow tp" in err
    status, out, _ = plan("--fix", "tp=2", "--allow", "tp", "--json")
    assert status == 0
    made = json.loads(out)
    assert made["parallelism"]["tp"] == 2
    assert made["missing"] == ["tensor parallelism"]
    status, _, err = plan("--allow", "everything")
    assert status == 2
    assert "--allow: everything" in err


def test_full_fine_tuning_is_planned_and_marked(plan):
    status, out, _ = plan("--training", "full", "--json")
    assert status == 0
    assert json.loads(out)["missing"] == ["full fine-tuning"]


def test_routing_is_even_a_power_law_or_a_histogram(tmp_path):
    assert routing_of("even") == Routing()
    assert routing_of("power:0.3") == Routing(exponent=0.3)
    measured = tmp_path / "loads.json"
    measured.write_text("[5, 1, 0, 2]")
    assert routing_of(str(measured)) == Routing(loads=[5.0, 1.0, 0.0, 2.0])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("power:", "no exponent between 0 and 4"),
        ("power:nan", "no exponent between 0 and 4"),
        ("power:9", "no exponent between 0 and 4"),
        ("absent.json", "cannot be read"),
    ],
)
def test_routing_that_cannot_be_is_bad_input(text, said):
    with pytest.raises(InputError, match=f"--routing: .*{said}"):
        routing_of(text)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{}", "is no list of tokens"),
        ("[]", "is no list of tokens"),
        ("[1, -2]", r"\[1\]: -2 is no number of tokens"),
        ('[1, "2"]', r"\[1\]: '2' is no number of tokens"),
        ("[1e308, 1e308]", r"\[0\]: 1e\+308 is no number of tokens"),
        (f"[1, {10**400}]", r"\[1\]: 10000"),
        ("[" * 100_000, "cannot be read"),
        ("[1, NaN]", r"\[1\]: nan is no number of tokens"),
        ("[true, 1]", r"\[0\]: True is no number of tokens"),
        ("[0, 0]", "gives no expert any token"),
    ],
)
def test_a_histogram_that_cannot_be_is_bad_input(tmp_path, content, said):
    path = tmp_path / "loads.json"
    path.write_text(content)
    with pytest.raises(InputError, match=said):
        routing_of(str(path))


def test_a_finished_run_refits_the_plan(plan, analyzed, tmp_path):
    _, out, _ = plan("--json")
    made = json.loads(out)
    (tmp_path / "plan.json").write_text(out)
    (tmp_path / "analysis.json").write_text(to_json(analyzed))
    report = {"passed": True, "device": "cpu", "world_size": 2, "checks": []}
    (tmp_path / "validation.json").write_text(json.dumps(report))
    (tmp_path / "train").mkdir()
    step = {
        "loss": 1.0,
        "grad_norm": 1.0,
        "learning_rate": 1e-3,
        "tokens": 1,
        "step_seconds": 1.1 * made["predicted"]["step_seconds"],
        "tokens_per_second_per_device": 1.0,
        "peak_memory_gib": 1.0,
        "tokens_per_expert": [],
    }
    lines = [json.dumps({"step": i, **step}) for i in range(6)]
    (tmp_path / "train/metrics.jsonl").write_text("\n".join(lines))

    status, out, err = plan("--json", "--measured", str(tmp_path))
    assert status == 0, err
    again = json.loads(out)
    assert again["measured"]["steps"] == 4
    assert again["measured"]["constants"]
    assert again["explanation"][0].startswith("4 steps took")

    job = Job(model=str(MODEL), cluster="", backend="cpu", sequence_length=128)
    write_document(job, tmp_path / "job.json")
    shutil.copyfile(CLUSTER, tmp_path / "cluster.yaml")
    status, out, err = plan("--json", "--measured", str(tmp_path), model=None, cluster=None)
    assert status == 0, err
    same = json.loads(out)
    assert (same["sequence_length"], same["world_size"]) == (128, 2)
    assert same["measured"]["steps"] == 4

    (tmp_path / "validation.json").write_text(json.dumps({**report, "passed": False}))
    status, _, err = plan("--measured", str(tmp_path))
    assert status == 2
    assert "the run failed its validation" in err
    status, _, err = plan("--measured", str(tmp_path / "nowhere"))
    assert status == 2
    assert "is no folder" in err


def test_a_folder_that_is_no_finished_run_is_refused_in_one_line(plan, tmp_path):
    for given in ({}, {"model": None, "cluster": None}):
        status, out, err = plan("--measured", str(tmp_path), **given)
        assert (status, out) == (2, "")
        assert f"--measured: {tmp_path} is no run directory" in err
        assert len(err.splitlines()) == 1
    (tmp_path / "plan.json").touch()
    (tmp_path / "analysis.json").touch()
    _, _, err = plan("--measured", str(tmp_path))
    assert "is not finished: it has no validation.json, train/metrics.jsonl (" in err


def test_a_model_and_a_cluster_are_asked_for(plan):
    status, _, err = plan(model=None)
    assert status == 2
    assert "MODEL: give the folder of a model" in err
    status, _, err = plan(cluster=None)
    assert status == 2
    assert "--cluster: give a topology file" in err


def test_a_curve_of_a_plan_without_shards_says_how_to_get_one(plan):
    status, out, _ = plan("--ask", "ep-curve", "--fix", "fsdp=1")
    assert status == 0
    assert "--fix ep=N" in out
    assert "throughout" not in out


def test_idle_devices_are_no_part_of_a_question(plan):
    status, _, err = plan("--ask", "ep-curve", "--allow-idle")
    assert status == 2
    assert "--allow-idle" in err


def test_a_scale_of_links_is_no_part_of_a_plan(plan):
    """It was taken and changed nothing."""
    status, _, err = plan("--link-scale", "0.3")
    assert (status, "--link-scale is for --ask degraded-links" in err) == (2, True)


def test_one_device_is_one(plan, tmp_path):
    lone = CLUSTER.read_text().replace("size: 2", "size: 1")
    (tmp_path / "one.yaml").write_text(lone)
    out = plan(cluster=tmp_path / "one.yaml")[1]
    assert out.startswith("one device of two-ranks\n")
    assert plan("--ask", "fewest-devices")[1].startswith("1 device\n")
