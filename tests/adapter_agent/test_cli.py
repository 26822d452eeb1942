"""The command line's promises: help that teaches, one clear line for a mistake, a clean stdout."""

import json
import os
import shlex
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from adapter_agent import cli

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "examples/models/tiny-kimi-linear"
UNSEEN = ROOT / "examples/models/tiny-unseen-moe"
CLUSTER = ROOT / "examples/clusters/two-ranks.yaml"
DATA = ROOT / "examples/data/classes-train.jsonl"
COMMANDS = [
    ["run"],
    ["analyze"],
    ["kernels"],
    ["plan"],
    ["export"],
    ["validate"],
    ["train"],
    ["review"],
    ["report"],
    ["doctor"],
    ["cluster"],
    ["cluster", "show"],
]


@pytest.fixture
def adapt(monkeypatch, capfd):
    """Runs `adapt` in this process; returns exit status, stdout and stderr."""

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["adapt", *map(str, words)])
        with pytest.raises(SystemExit) as left:
            cli.main()
        out, err = capfd.readouterr()
        return left.value.code or 0, out, err

    return call


@pytest.fixture
def refused(adapt, tmp_path):
    """Runs the main job on bad input; returns the one line that it prints."""

    def call(*more, model=MODEL, cluster=CLUSTER, data=DATA, run_dir=None):
        where = run_dir or tmp_path / "run"
        words = [model, "--cluster", cluster, "--data", data, "--run-dir", where, *more]
        status, out, err = adapt(*words)
        assert status == 2, err
        assert out == ""
        lines = err.splitlines()
        assert len(lines) == 1, err
        assert lines[0].startswith("error: ")
        return lines[0]

    return call


# ---- help


@pytest.mark.parametrize("command", [[], *COMMANDS], ids=" ".join)
def test_every_help_teaches_by_examples(adapt, command):
    status, out, _ = adapt(*command, "--help")
    assert status == 0
    examples = [line.strip() for line in out.partition("Examples:")[2].splitlines()]
    examples = [line for line in examples if line.startswith("adapt ")]
    assert examples
    if command and command != ["run"]:
        assert all(shlex.split(line)[1 : 1 + len(command)] == command for line in examples)


@pytest.mark.parametrize("command", [[], *COMMANDS], ids=" ".join)
def test_examples_of_the_help_name_files_and_options_that_exist(adapt, command):
    _, out, _ = adapt(*command, "--help")
    for line in out.partition("Examples:")[2].splitlines():
        words = shlex.split(line.partition(">")[0])
        if words[:1] != ["adapt"]:
            continue
        for word in words:
            if word.startswith("examples/"):
                assert (ROOT / word).exists(), word
        name = words[1:2] if words[1] in {c[0] for c in COMMANDS} else ["run"]
        name += words[2:3] if name == ["cluster"] else []
        _, full, _ = adapt(*name, "--help")
        for option in (w for w in words if w.startswith("--")):
            assert option in full.partition("Examples:")[0], (line, option)


def test_help_imports_nothing_heavy():
    script = (
        "import sys\nfrom adapter_agent.cli import main\nsys.argv = ['adapt', '--help']\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'transformers', 'langgraph', 'pydantic', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, stdout=subprocess.DEVNULL)


def test_python_runs_the_package_as_the_command():
    command = [sys.executable, "-m", "adapter_agent", "plan", "nowhere", "--cluster", str(CLUSTER)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: nowhere: no such folder (give the folder of a model)\n"


def test_a_mistyped_command_is_met_with_the_right_one(adapt):
    status, _, err = adapt("analyse", MODEL)
    assert status == 2
    assert "Did you mean 'analyze'?" in err
    status, _, err = adapt("plna", MODEL, "--cluster", CLUSTER)
    assert status == 2
    assert "Did you mean 'plan'?" in err


def test_a_model_folder_that_is_named_like_a_command_is_taken_as_a_folder(
    adapt, tmp_path, monkeypatch
):
    (tmp_path / "plans").mkdir()
    monkeypatch.chdir(tmp_path)
    status, _, err = adapt("plans", "--cluster", CLUSTER)
    assert status == 2
    assert "Did you mean" not in err
    assert "config.json" in err


def test_version(adapt):
    from adapter_agent import __version__

    assert adapt("--version")[:2] == (0, f"adapt {__version__}\n")


# ---- bad input: one line, status 2


def copy_of_model(tmp_path):
    return Path(shutil.copytree(MODEL, tmp_path / "model"))


def shard(folder):
    return next(iter(sorted(folder.glob("*.safetensors"))))


def test_no_such_model_folder(refused, tmp_path):
    assert "no-model" in refused(model=tmp_path / "no-model")


def test_a_folder_without_config(refused, tmp_path):
    model = copy_of_model(tmp_path)
    (model / "config.json").unlink()
    assert "config.json" in refused(model=model)


def test_broken_json_in_the_config(refused, tmp_path):
    model = copy_of_model(tmp_path)
    (model / "config.json").write_text('{"model_type": ')
    line = refused(model=model)
    assert "config.json" in line
    assert "JSON" in line


def test_an_index_that_names_a_missing_shard(refused, tmp_path):
    model = copy_of_model(tmp_path)
    missing = shard(model)
    missing.unlink()
    assert missing.name in refused(model=model)


def test_a_shard_whose_header_is_cut(refused, tmp_path):
    model = copy_of_model(tmp_path)
    path = shard(model)
    path.write_bytes(path.read_bytes()[:100])
    assert path.name in refused(model=model)


def test_a_shard_that_claims_an_absurd_header(refused, tmp_path):
    model = copy_of_model(tmp_path)
    path = shard(model)
    path.write_bytes(struct.pack("<Q", 1 << 60) + path.read_bytes()[8:])
    assert path.name in refused(model=model)


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd"])
def test_a_shard_path_that_leaves_the_folder(refused, tmp_path, name):
    model = copy_of_model(tmp_path)
    path = model / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    first = next(iter(index["weight_map"]))
    index["weight_map"][first] = name
    path.write_text(json.dumps(index))
    assert name in refused(model=model)


def test_pickled_weights_alone(refused, tmp_path):
    model = copy_of_model(tmp_path)
    for path in [*model.glob("*.safetensors"), model / "model.safetensors.index.json"]:
        path.unlink()
    (model / "pytorch_model.bin").write_bytes(b"\x80\x02")
    line = refused(model=model)
    assert "pytorch_model.bin" in line
    assert "safetensors" in line


def test_without_a_class_a_model_is_planned_and_not_trained(adapt, tmp_path):
    run = tmp_path / "run"
    first = adapt(UNSEEN, "--cluster", CLUSTER, "--data", DATA, "--run-dir", run, "--quiet")
    assert json.loads((run / "analysis.json").read_text())["fidelity"] == "headers"
    assert (run / "plan.json").is_file()
    calls = [first, adapt("validate", run), adapt("train", run), adapt("train", run, "--twin")]
    for status, out, err in calls:
        assert (status, out) == (2, "")
        (line,) = err.splitlines()
        assert "no class for 'unseen_moe'" in line
        assert "--trust-remote-code" in line


def test_without_a_class_kernels_are_mapped(adapt, tmp_path):
    status, out, _ = adapt(
        "kernels", UNSEEN, "--backend", "cpu", "--output", tmp_path / "kernels", "--json"
    )
    assert status == 0
    kernels = json.loads(out)["kernels"]
    assert [(k["operator"], k["passed"]) for k in kernels] == [("gla", True)]


@pytest.mark.parametrize("broken", ["{", "", '{"messages": []}'], ids=["json", "empty", "form"])
def test_a_bad_line_of_data_is_named_by_number(refused, tmp_path, broken):
    lines = DATA.read_text().splitlines()
    data = tmp_path / "data.jsonl"
    data.write_text("\n".join([*lines[:2], broken, *lines[2:]]) + "\n")
    assert "line 3" in refused(data=data)


def test_what_is_set_apart_comes_from_one_place(refused):
    assert "--eval-fraction: is given with --eval-data" in refused(
        "--eval-data", DATA, "--eval-fraction", "0.1"
    )


def test_no_such_data_file(refused, tmp_path):
    assert "no-data.jsonl" in refused(data=tmp_path / "no-data.jsonl")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda t: t.update(colour="red"), "colour"),
        (lambda t: t["tiers"][0]["fabric"].update(bw_gbps=-1), "bw_gbps"),
        (lambda t: t["tiers"][0].update(size=0), "size"),
        (lambda t: t.update(device="h2000"), "h2000"),
    ],
    ids=["unknown-key", "negative-bandwidth", "zero-devices", "unknown-device"],
)
def test_a_wrong_topology(refused, tmp_path, change, named):
    topology = yaml.safe_load(CLUSTER.read_text())
    change(topology)
    path = tmp_path / "topo.yaml"
    path.write_text(yaml.safe_dump(topology))
    line = refused(cluster=path)
    assert "topo.yaml" in line
    assert named in line


def test_a_misspelt_key_of_the_topology_is_named_not_the_one_that_it_hides(refused, tmp_path):
    path = tmp_path / "topo.yaml"
    path.write_text(CLUSTER.read_text().replace("device:", "devise:"))
    assert "devise: unknown key (did you mean 'device'?)" in refused(cluster=path)


def test_no_such_topology(refused, tmp_path):
    assert "topo.yaml" in refused(cluster=tmp_path / "topo.yaml")


@pytest.mark.parametrize("place", ["file", "/proc/nowhere"])
def test_a_run_directory_that_cannot_be_written(refused, tmp_path, place):
    (tmp_path / "file").write_text("")
    assert "--run-dir" in refused(run_dir=tmp_path / place)


@pytest.mark.parametrize("setting", ["ep", "ep=two", "=2", "ep=-1", "eq=2", "ep=3"])
def test_a_forced_setting_that_cannot_be(adapt, setting):
    status, out, err = adapt("plan", MODEL, "--cluster", CLUSTER, "--fix", setting, "--quiet")
    assert (status, out) == (2, ""), err
    assert len(err.splitlines()) == 1


def test_a_setting_that_is_forced_to_two_values(adapt):
    words = ["plan", MODEL, "--cluster", CLUSTER, "--fix", "ep=2", "--fix", "ep=1", "--quiet"]
    status, out, err = adapt(*words)
    assert (status, out) == (2, ""), err
    assert "--fix: ep: is 2 and 1" in err


def test_an_interrupted_run_says_how_it_goes_on(adapt, tmp_path, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("analyzers.analyze", interrupted)
    status, out, err = adapt(MODEL, "--cluster", CLUSTER, "--run-dir", tmp_path / "run", "--quiet")
    assert (status, out) == (130, "")
    assert err.splitlines() == [
        f"error: {tmp_path / 'run'}: interrupted (go on with the same command and --resume)"
    ]


@pytest.mark.parametrize("words", [["analyze", MODEL], ["plan", MODEL, "--cluster", CLUSTER]])
def test_an_interrupted_command_says_so(adapt, monkeypatch, words):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("analyzers.analyze", interrupted)
    status, out, err = adapt(*words, "--quiet")
    assert (status, out, err) == (130, "", "error: interrupted\n")


def test_a_forced_setting_is_kept_by_the_plan(adapt):
    words = ["plan", MODEL, "--cluster", CLUSTER, "--fix", "ep=2", "--json"]
    assert json.loads(adapt(*words)[1])["parallelism"]["ep"] == 2


def test_an_unknown_backend(adapt, tmp_path):
    words = [MODEL, "--cluster", CLUSTER, "--backend", "abacus", "--run-dir", tmp_path / "r"]
    status, _, err = adapt(*words)
    assert status == 2
    assert "abacus" in err


def test_a_run_directory_of_another_model(adapt, refused, tmp_path):
    where = tmp_path / "run"
    status, _, err = adapt(
        MODEL, "--cluster", CLUSTER, "--data", DATA, "--run-dir", where, "--until", "analyze"
    )
    assert status == 0, err
    other = copy_of_model(tmp_path)
    line = refused(model=other, run_dir=where)
    assert str(MODEL) in line
    assert str(other) in line


@pytest.mark.parametrize("command", ["validate", "train", "review", "report"])
def test_a_stage_of_a_folder_that_holds_no_run(adapt, tmp_path, command):
    status, out, err = adapt(command, tmp_path)
    assert (status, out) == (2, "")
    assert "run.json" in err


@pytest.mark.parametrize("command", [["train"], ["train", "--twin"], ["validate"]], ids=" ".join)
@pytest.mark.parametrize("what", ["moved", "changed", "data", "held_out"])
def test_a_stage_whose_model_or_data_is_not_what_it_was(adapt, tmp_path, command, what):
    model, where = copy_of_model(tmp_path), tmp_path / "run"
    files = {name: tmp_path / f"{name}.jsonl" for name in ("data", "held_out")}
    for file in files.values():
        shutil.copyfile(DATA, file)
    words = ("--data", files["data"], "--eval-data", files["held_out"])
    status, _, err = adapt(
        *(model, "--cluster", CLUSTER, *words, "--run-dir", where, "--until", "analyze")
    )
    assert status == 0, err
    (where / "kernels").mkdir()
    for name in ("plan.json", "kernels/manifest.json"):
        (where / name).write_text("{}")
    if what == "moved":
        model.rename(tmp_path / "elsewhere")
    elif what == "changed":
        (model / "tokenizer_config.json").write_text("{}")
    else:
        files[what].write_text(files[what].read_text() * 2)
    status, out, err = adapt(command[0], where, *command[1:], "--quiet")
    assert (status, out) == (2, ""), err
    assert str(files.get(what, model)) in err
    assert len(err.splitlines()) == 1


def test_one_answer_to_a_review(adapt, tmp_path):
    status, _, err = adapt("review", tmp_path, "--approve", "--reject")
    assert status == 2
    assert "--approve" in err


# ---- other statuses


def test_no_feasible_plan_is_status_3_and_names_the_limit(adapt, tmp_path):
    topology = yaml.safe_load(CLUSTER.read_text())
    topology["device_overrides"] = {"memory_gib": 0.91, "reserved_gib": 0.9}
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(topology))
    status, out, err = adapt("plan", MODEL, "--cluster", path, "--quiet")
    assert (status, out) == (3, "")
    assert len(err.splitlines()) == 1
    assert "GiB" in err


def test_a_bug_is_status_1_with_a_short_line(adapt, monkeypatch):
    def broken():
        raise ZeroDivisionError("nobody expected this")

    monkeypatch.setattr("adapter_agent.doctor.examine", broken)
    status, _, err = adapt("doctor")
    assert status == 1
    last = err.splitlines()[-1]
    assert last == "error: a bug in adapt: ZeroDivisionError: nobody expected this"


# ---- stdout carries the result


def test_json_is_alone_on_stdout(adapt):
    status, out, err = adapt("analyze", MODEL, "--json")
    assert status == 0
    assert json.loads(out)["model_type"] == "kimi_linear"
    assert err


def test_an_unknown_backend_is_met_with_the_known_ones(adapt):
    status, _, err = adapt("analyze", MODEL, "--backend", "h2000")
    assert status == 2
    assert "h200" in err


def test_quiet_is_silent_on_stderr(adapt):
    status, out, err = adapt("analyze", MODEL, "--json", "--quiet")
    assert (status, err) == (0, "")
    assert json.loads(out)


def test_what_libraries_print_does_not_reach_stdout(capfd):
    from adapter_agent.terminal import stdout_kept_clean

    with stdout_kept_clean():
        print("from python")
        subprocess.run(["echo", "from a child"], check=True)
    print("result")
    out, err = capfd.readouterr()
    assert out == "result\n"
    assert "from python" in err
    assert "from a child" in err


def test_plan_needs_no_run_directory(adapt, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, out, _ = adapt("plan", MODEL, "--cluster", CLUSTER, "--json")
    assert status == 0
    axes = json.loads(out)["parallelism"]
    assert axes["pp"] * axes["dp_replicate"] * axes["fsdp"] * axes["tp"] == 2
    assert not list(tmp_path.iterdir())


def test_the_pictures_are_drawn(adapt, tmp_path):
    page = tmp_path / "tiny.html"
    picture = adapt("analyze", MODEL, "--backend", "cpu", "--html", page)[1]
    assert "Graph of <code>kda+moe</code>" in page.read_text()
    assert "KKKM x2" in picture
    assert "missing  kda: no entry analyzers/backends/cpu.yaml: native.kda" in picture
    plan = adapt("plan", MODEL, "--cluster", CLUSTER)[1]
    for words in ("Memory", "Step", "frozen_weights", "all_gather"):
        assert words in plan
    shown = adapt("cluster", "show", CLUSTER)[1]
    assert "two-ranks: 2 x" in shown


def test_doctor_reports_and_ends_well(adapt):
    status, out, _ = adapt("doctor", "--json")
    assert status == 0
    found = json.loads(out)
    assert {"python", "torch", "triton", "transformers"} <= set(found["versions"])
    assert all(m["what"] and m["meaning"] for m in found["missing"])
    status, out, _ = adapt("doctor")
    assert status == 0
    assert found["versions"]["torch"] in out


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_a_terminal_that_knows_no_unicode_is_no_bug(form):
    root = Path(__file__).parents[2]
    model = root / "examples" / "models" / "tiny-unseen-moe"
    script = "import sys; from adapter_agent.cli import main; sys.argv[0] = 'adapt'; main()"
    done = subprocess.run(
        [sys.executable, "-c", script, "analyze", str(model), *form],
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr
    text = done.stdout.decode("ascii")
    assert json.loads(text)["fidelity"] == "headers" if form else "Layers" in text
