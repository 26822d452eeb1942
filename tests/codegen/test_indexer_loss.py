"""The training loss of the indexer: its gates on a CPU and in the interpreter, wrong kernels, and
what is refused."""

from __future__ import annotations

import pytest
import torch

from analyzers.backends import load_backend
from codegen.load import import_file
from codegen.members import load_members
from codegen.render import render
from codegen.verify.harness import compile_for, run_on
from tests.codegen.kernel_samples import check_style
from tests.codegen.proofs import Forks, assert_refused, failed, written

OPERATOR = "indexer_loss"
SPEC = load_members()[OPERATOR]
INTERPRETED = "usual", "packed documents", "more heads than a program holds", "no places"


@pytest.fixture(scope="module")
def module(tmp_path_factory):
    subject = written(tmp_path_factory.mktemp("loss"), OPERATOR)
    return import_file(subject.module, "indexer_loss_tested")


@pytest.fixture(scope="module")
def forks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("forks")
    with Forks(folder, interpret=True) as forks:
        assert not failed(forks.gates(written(folder, OPERATOR), ("one token",)))
        yield forks


def test_all_gates_pass_on_a_cpu(tmp_path):
    gates = run_on(written(tmp_path, OPERATOR), "cpu", dtypes=["float32", "bfloat16"])
    assert not failed(gates)
    assert len(gates) > 35


def test_the_kernels_pass_in_the_interpreter(forks, tmp_path):
    gates = forks.gates(written(tmp_path, OPERATOR), INTERPRETED)
    assert not failed(gates)
    assert len(gates) > len(INTERPRETED)


MUTATIONS = {
    "attention not scaled": ("s * (scale * LOG2E)", "s * LOG2E", "usual"),
    "the rest of a key left out": ("s += tl.dot(q_rest", "s += 0.0 * tl.dot(q_rest", "usual"),
    "the last heads alone": ("target += tl.sum(", "target = tl.sum(", "21 heads"),
    "padding has a score": ('tl.where(real, score, float("-inf"))', "score", "usual"),
    "no relu": ("tl.maximum(s, 0.0) * w[None, :]", "s * w[None, :]", "usual"),
    "no slope of relu": ("tl.where(s > 0.0, w[:, None]", "tl.where(s < 9e9, w[:, None]", "usual"),
    "no slope of relu for keys": ("tl.where(s > 0.0, g[:", "tl.where(s < 9e9, g[:", "usual"),
    "the first row's keys": ("query // T * S * DI", "query // T * 0", "a batch"),
    "no target": ("own.sub_(target)", "own", "usual"),
    "one query a key": ("total += _load(pairs_ptr", "total = _load(pairs_ptr", "every key"),
    "earlier launches lost": ("before + tl.sum(total, 0)", "tl.sum(total, 0)", "usual"),
    "places behind the last": (
        "_store(pairs_ptr, out, query * K + place, place < K,",
        "_store(pairs_ptr, out, query * K + place, place < K + 16,",
        "usual",
    ),
}
CASES = {"21 heads": "more heads than a program holds"}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_wrong_kernel_is_refused(name, forks, tmp_path):
    right, wrong, case = MUTATIONS[name]
    gates = forks.gates(written(tmp_path, OPERATOR, (right, wrong)), (CASES.get(case, case),))
    assert_refused(gates)


def given(**change):
    tensors = {
        "index_q": torch.zeros(1, 5, 2, 8),
        "index_k": torch.zeros(1, 7, 8),
        "index_w": torch.zeros(1, 5, 2),
        "indices": torch.zeros(1, 5, 3, dtype=torch.int32),
        "q": torch.zeros(1, 5, 4, 6),
        "kv": torch.zeros(1, 7, 6),
        "lse": torch.zeros(1, 5, 4),
    }
    return tensors | change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"index_k": torch.zeros(1, 7, 9)}, "the indexer's"),
        ({"index_w": torch.zeros(1, 5, 3)}, "the indexer's"),
        ({"kv": torch.zeros(1, 6, 6)}, "attention's"),
        ({"lse": torch.zeros(1, 5, 3)}, "lse must be"),
        ({"indices": torch.zeros(1, 5, 3)}, "indices must be int32"),
        ({"q": torch.zeros(1, 5, 4, 6).half()}, "one dtype"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refuses_what_does_not_fit(module, change, message):
    module.indexer_loss(**given())
    with pytest.raises(ValueError, match=message):
        module.indexer_loss(**given(**change))


def test_scores_that_agree_with_attention_have_no_loss(module):
    torch.manual_seed(0)
    x, k = torch.randn(1, 6, 1, 8).abs(), torch.randn(1, 6, 8).abs()  # no score is below zero
    keys = torch.arange(6, dtype=torch.int32).expand(1, 6, 6).contiguous()
    lse = (x[:, :, 0] @ k.mT).logsumexp(-1, keepdim=True)
    ones = torch.ones(1, 6, 1)
    loss = module.indexer_loss(x.requires_grad_(), k, ones, keys, x.detach(), k, lse, scale=1.0)
    assert loss.abs().max() < 1e-5
    loss.sum().backward()
    assert x.grad is not None
    assert x.grad.abs().max() < 1e-5


@pytest.mark.parametrize("backend", ["cpu", "h200"])
def test_rendered_files_are_stable_and_formatted(backend, tmp_path):
    assert render(SPEC, load_backend(backend), {}) == render(SPEC, load_backend(backend), {})
    written(tmp_path, OPERATOR, backend=backend)
    check_style(tmp_path)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_all_gates_pass_on_the_device(tmp_path):
    subject = written(tmp_path, OPERATOR, backend="h200")
    gates = [*run_on(subject, "device", "cuda"), *compile_for(subject, load_backend("h200"))]
    assert not failed(gates)
