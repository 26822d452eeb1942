import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from attention.chunked import Chunked
from attention.errors import errors
from attention.implementations import Unsupported, build, reference, render_ours
from attention.measure import both
from attention.plot import plot
from attention.processes import Worker, Workers
from attention.workload import (
    Shape,
    floor_bytes,
    floor_operations,
    gates_of,
    inputs,
    members,
    output_gradient,
)

from codegen.members import load_specs

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "linear_attention.py"
TINY = "1x70x2:16x16"
MEMBERS = [spec.operator for spec in members()]


def command(folder, *more):
    fixed = ["--device", "cpu", "--quick", "--members", "kda", "--gates", "bounded"]
    return [sys.executable, SCRIPT, *fixed, "--output", folder, "--shapes", TINY, *more]


def run(folder, *more):
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command(folder, *more), env=environment, capture_output=True, text=True)
    return done, json.loads((folder / "linear_attention.json").read_text())


def test_a_rehearsal_on_the_cpu_measures_and_compares(tmp_path):
    long, unseen = ("--long", "1x160x2:16x16"), ("--unseen", "2x40x3:16x16")
    parts = ("--parts", "measure,carried,first-call")
    done, data = run(tmp_path, "--peers", "ours,eager,nemo", *parts, *long, *unseen)
    assert done.returncode == 0, done.stderr
    status = {row["implementation"]: row["status"] for row in data["rows"]}
    assert status == {"ours": "right", "eager": "right", "nemo": "unsupported"}
    for row in data["rows"][:2]:
        assert 0 < row["forward_ms"] < row["both_ms"]
        wanted = {"o", "o, forward alone", "dq", "dk", "dv", "dg", "dbeta"}
        assert set(row["errors"]) == wanted
        assert row["memory_floor_ms"][0] < row["memory_floor_ms"][1]
    assert data["carried"][0]["status"] == "right"
    assert data["carried"][0]["pieces"] == 16
    assert data["first_call"][0]["first_call_s"] > 0
    assert data["machine"]["torch"] == torch.__version__
    times, accuracy = (line for line in done.stdout.splitlines() if line.startswith("| kda "))
    assert f"| kda | bounded | {TINY} |" in times
    assert accuracy.count("o ") == 3  # of the recurrence, ours and eager


def test_the_picture_of_a_report_shows_every_implementation(tmp_path):
    pytest.importorskip("plotly")
    floors = {"memory_floor_ms": [0.1, 0.3], "matrix_floor_ms": [0.01, 0.03]}
    load = {"member": "kda", "gate": "bounded", "shape": "1x8192x32", "status": "right"}
    rows = [
        {"implementation": "ours", "forward_ms": 0.5, "both_ms": 2.0, **load, **floors},
        {"implementation": "nemo", "forward_ms": 1.25, **load, **floors},
    ]
    machine = {"gpu": "NVIDIA H200", "torch": "2.11.0", "triton": "3.6.0"}
    file = tmp_path / "linear_attention.json"
    file.write_text(json.dumps({"rows": rows, "machine": machine, "commit": "abc"}))
    made = plot(file)
    assert made.stat().st_size > 1000
    if made.suffix == ".html":
        text = made.read_text()
        assert "kda, forward + backward" in text
        assert '"name":"nemo"' in text


def test_the_layer_runs_with_our_kernels_and_with_those_of_transformers(tmp_path):
    done, data = run(tmp_path, "--parts", "layer", "--layer", TINY)
    assert done.returncode == 0, done.stderr
    assert [row["status"] for row in data["layer"]] == ["right"] * 3
    ours = data["layer"][2]
    assert ours["implementation"] == "ours"
    assert "kda" in ours["kernels"]
    assert ours["frozen_ms"] > 0
    assert "dconv1d.weight" in ours["errors"]


def test_what_the_budget_leaves_out_is_named(tmp_path):
    done, data = run(tmp_path, "--parts", "measure", "--peers", "ours", "--budget", "0.5")
    assert done.returncode == 0, done.stderr
    assert [row["status"] for row in data["rows"]] == ["skipped"]
    assert data["rows"][0]["note"] == "the budget ran out"


def test_a_killed_run_keeps_its_rows(tmp_path):
    file = tmp_path / "linear_attention.json"
    process = subprocess.Popen(command(tmp_path, "--parts", "measure"), stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        if file.exists() and json.loads(file.read_text())["rows"]:
            break
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert json.loads(file.read_text())["rows"][0]["implementation"] == "ours"


@pytest.mark.parametrize("wrong", ["1x8192", "1x64x3v4", "2x64x2p"])
def test_a_shape_that_makes_no_sense_is_refused(wrong, tmp_path):
    done = subprocess.run(command(tmp_path, "--shapes", wrong), capture_output=True, text=True)
    assert done.returncode == 2
    assert wrong in done.stderr


WORKER = """
import json, os, sys, time
for line in sys.stdin:
    task = json.loads(line)
    if task["do"] == "sleep":
        time.sleep(60)
    if task["do"] == "die":
        sys.exit("out of luck")
    print("words between rows")
    print("ROW " + json.dumps({"status": "right", "process": os.getpid()}), flush=True)
"""


@pytest.fixture
def workers(tmp_path):
    (tmp_path / "worker.py").write_text(WORKER)

    def start(**environment):
        return Worker(tmp_path / "worker.py", tmp_path / "log", environment)

    with Workers(start, lambda: 100.0) as made:
        yield made


def test_a_worker_answers_one_task_after_the_other(workers, tmp_path):
    first, second = (workers.ask("a", {"do": "row"}, 20.0) for _ in range(2))
    assert first == second
    assert (tmp_path / "log").read_text() == "words between rows\n" * 2


def test_a_worker_that_is_late_is_ended_and_replaced(workers):
    before = workers.ask("a", {"do": "row"}, 20.0)
    began = time.monotonic()
    late = workers.ask("a", {"do": "sleep"}, 1.0)
    assert late == {"status": "not ready", "note": "not ready after 1 s"}
    assert time.monotonic() - began < 10
    with pytest.raises(ProcessLookupError):
        os.kill(before["process"], 0)
    assert workers.ask("a", {"do": "row"}, 20.0)["status"] == "right"


def test_a_worker_that_dies_is_reported_with_its_last_words(workers):
    row = workers.ask("a", {"do": "die"}, 20.0)
    assert row["status"] == "failed"
    assert "status 1: out of luck" in row["note"]
    assert workers.ask("a", {"do": "row"}, 20.0)["status"] == "right"


def exact_and(spec, shape, gate, folder, function):
    """Results of the float64 recurrence and of `function`, on the same inputs."""
    x = inputs(spec, shape, gate, "cpu", torch.float32)
    do = output_gradient(x)
    double = {
        n: t.detach().double().requires_grad_(t.requires_grad) if t.is_floating_point() else t
        for n, t in x.items()
    }
    exact = both(reference(spec, shape, gate, folder), double, do.double())
    return exact, both(function, x, do)


@pytest.mark.parametrize("member", MEMBERS)
@pytest.mark.parametrize("shape", [TINY, "2x33x1v2:16x32"])
def test_the_torch_form_computes_every_member(member, shape, tmp_path):
    (spec,) = members([member])
    shape = Shape.parse(shape)
    render_ours(spec, shape, "cpu", tmp_path)
    for gate in gates_of(spec, ["bounded", "unbounded"]):
        function = build("eager", spec, shape, gate, tmp_path)
        exact, got = exact_and(spec, shape, gate, tmp_path, function)
        for name, found in errors(got, exact).items():
            assert max(found) < 2e-3, (gate, name)


def test_an_error_in_one_token_is_seen():
    exact = torch.randn(1, 1000, 2, 16)
    got = exact.clone()
    got[0, 500, 1] = 0
    whole, worst = errors({"o": got}, {"o": exact})["o"]
    assert whole < 0.05
    assert worst == pytest.approx(1.0)


def test_packed_documents_include_an_empty_one_and_a_single_token():
    lengths = torch.tensor(Shape.parse("1x8192x32p").limits()).diff()
    assert lengths.sum() == 8192
    assert 0 in lengths
    assert 1 in lengths


def test_floors_of_kda():
    spec, shape = load_specs()["kda"], Shape.parse("1x8192x32")
    elements = 8192 * 32 * 128
    forward, whole = floor_bytes(spec, shape, "bounded", 2)
    # q, k, v, o in two bytes, g in four, beta in four a head
    assert forward == elements * (4 * 2 + 4) + 8192 * 32 * 4
    # again q, k, v, g, beta and the gradient of o; written: a gradient of each input
    assert whole - forward == 2 * (forward - 2 * elements) + 2 * elements
    operations, _ = floor_operations(spec, shape)
    # pairs of a chunk of 64, half of them: q k, a v, k k, and the system with K + V right sides;
    # whole: q S, k^T v, w S
    each = 64 * (128 + 128 + 128 + 256) + 3 * 2 * 128 * 128
    assert operations == 8192 * 32 * each


@pytest.mark.parametrize(
    ("member", "shape", "gate"),
    [("gla", "1x64x2", "bounded"), ("kda", "1x64x2", "unbounded"), ("kda", "1x64x1v2", "bounded")],
)
def test_nemo_is_asked_only_for_what_it_serves(member, shape, gate, tmp_path):
    (spec,) = members([member])
    with pytest.raises(Unsupported):
        build("nemo", spec, Shape.parse(shape), gate, tmp_path)


def test_compiled_pieces_are_those_of_the_eager_form():
    eager = Chunked(delta=True, chunk=16, compiled=False)
    compiled = Chunked(delta=True, chunk=16, compiled=True)
    assert compiled.prepare._torchdynamo_orig_callable is eager.prepare
