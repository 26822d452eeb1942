from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from analyzers.backends import load_backend
from analyzers.documents import read_document
from analyzers.errors import InputError, ProofError
from codegen import generate, load_kernels, map_operators
from codegen.schema import KernelSet
from tests.codegen.kernel_samples import operator


def tree(folder) -> dict[str, bytes]:
    return {
        str(p.relative_to(folder)): p.read_bytes()
        for p in sorted(folder.rglob("*"))
        if p.is_file() and "__pycache__" not in p.parts
    }


@pytest.fixture(scope="module")
def analysis():
    return SimpleNamespace(model_type="qwen3_next", operators=[operator("gated_delta_rule")])


@pytest.fixture(scope="module")
def operators(analysis):
    return map_operators(analysis, load_backend("cpu"))


@pytest.fixture(scope="module")
def folder(analysis, operators, tmp_path_factory):
    folder = tmp_path_factory.mktemp("set") / "kernels"
    generate(analysis, operators, load_backend("cpu"), folder)
    return folder


def copy_of(folder, tmp_path):
    import shutil

    return shutil.copytree(folder, tmp_path / "kernels")


def test_the_set_is_complete_and_proved(folder):
    made = read_document(KernelSet, folder / "manifest.json")
    (kernel,) = made.kernels
    assert kernel.passed
    for name in ("__init__.py", kernel.module, kernel.reference, kernel.test):
        assert (folder / name).exists()
    ran_on = {gate.ran_on for gate in kernel.gates}
    assert {"interpreter", "cpu", "compiler:sm_90", "compiler:sm_100"} <= ran_on
    assert all(gate.tolerance for gate in kernel.gates if gate.measured is not None)


def test_generating_again_is_byte_identical_and_proves_nothing_twice(
    folder, analysis, operators, tmp_path
):
    folder = copy_of(folder, tmp_path)
    before = tree(folder)
    said: list[str] = []
    generate(analysis, operators, load_backend("cpu"), folder, progress=said.append)
    assert tree(folder) == before
    assert not [line for line in said if line.startswith("proving")]


def test_a_killed_run_keeps_the_proofs_that_it_had(folder, analysis, operators, tmp_path):
    folder = copy_of(folder, tmp_path)
    before = tree(folder)
    (folder / "manifest.json").unlink()
    next((folder / ".gates").glob("cpu-*.json")).unlink()
    said: list[str] = []
    generate(analysis, operators, load_backend("cpu"), folder, progress=said.append)
    proved = [line for line in said if line.startswith("proving")]
    assert proved == ["proving gated_delta_rule.py: cpu"]
    assert tree(folder).keys() == before.keys()


def test_kernels_that_are_no_longer_needed_go(folder, analysis, tmp_path):
    folder = copy_of(folder, tmp_path)
    none = SimpleNamespace(model_type="m", operators=[operator("linear")])
    backend = load_backend("cpu")
    made = generate(none, map_operators(none, backend), backend, folder)
    assert made.kernels == []
    assert not list(folder.glob("*gated_delta_rule*"))


def test_loaded_kernels_run(folder):
    (loaded,) = load_kernels(folder)
    x = torch.randn(1, 5, 2, 16)
    o, state = loaded.function(
        x, x, torch.randn(1, 5, 2, 24), g=-torch.rand(1, 5, 2), beta=torch.rand(1, 5, 2)
    )
    assert o.shape == (1, 5, 2, 24)
    assert state is None


def test_the_same_kernel_in_two_folders_is_registered_once(folder, tmp_path):
    (one,), (two,) = load_kernels(folder), load_kernels(copy_of(folder, tmp_path))
    assert one.function is two.function


def test_a_changed_kernel_is_refused(folder, tmp_path):
    folder = copy_of(folder, tmp_path)
    path = folder / "gated_delta_rule.py"
    path.write_text(path.read_text() + "\n")
    with pytest.raises(ProofError, match=r"gated_delta_rule.py: has changed.*adapt kernels MODEL"):
        load_kernels(folder)


def test_a_missing_kernel_is_refused(folder, tmp_path):
    folder = copy_of(folder, tmp_path)
    (folder / "gated_delta_rule.py").unlink()
    with pytest.raises(ProofError, match=r"gated_delta_rule.py: is missing.*adapt kernels MODEL"):
        load_kernels(folder)


def test_a_kernel_that_failed_its_proof_is_refused(folder, tmp_path):
    folder = copy_of(folder, tmp_path)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["kernels"][0]["passed"] = False
    manifest["kernels"][0]["gates"][0]["passed"] = False
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ProofError, match="was not proved"):
        load_kernels(folder)


def test_a_folder_without_a_manifest_is_bad_input(tmp_path):
    with pytest.raises(InputError, match=r"manifest.json"):
        load_kernels(tmp_path)


def test_the_generated_test_runs_on_its_own(folder):
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(folder)],
        capture_output=True,
        text=True,
        cwd=folder.parent,
    )
    assert ran.returncode == 0, ran.stdout[-2000:]
    assert " passed" in ran.stdout
