"""Attention over selected keys: its gates on a CPU and in the interpreter, wrong kernels, and what
is refused."""

from __future__ import annotations

import pytest
import torch

from analyzers.backends import load_backend
from codegen.load import import_file
from codegen.members import find_spec, load_members
from codegen.render import render
from codegen.verify.harness import compile_for, run_on
from tests.codegen.kernel_samples import check_style
from tests.codegen.proofs import Forks, assert_refused, failed, written

OPERATOR = "sparse_topk"
SPEC = load_members()[OPERATOR]
INTERPRETED = (
    "usual",
    "packed documents",
    "keys named several times",
    "queries without keys or sinks",
    "no places",
    "no tokens",
)


@pytest.fixture(scope="module")
def module(tmp_path_factory):
    subject = written(tmp_path_factory.mktemp("sparse"), OPERATOR)
    return import_file(subject.module, "sparse_topk_tested")


@pytest.fixture(scope="module")
def forks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("forks")
    with Forks(folder, interpret=True) as forks:
        assert not failed(forks.gates(written(folder, OPERATOR), ("one token",)))
        yield forks


def test_all_gates_pass_on_a_cpu(tmp_path):
    gates = run_on(written(tmp_path, OPERATOR), "cpu", dtypes=["float32", "bfloat16"])
    assert not failed(gates)
    assert len(gates) > 50


def test_the_kernels_pass_in_the_interpreter(forks, tmp_path):
    gates = forks.gates(written(tmp_path, OPERATOR), INTERPRETED)
    assert not failed(gates)
    assert len(gates) > len(INTERPRETED)


NONE = "another number of keys, and numbers of none"
MUTATIONS = {
    "gradient not scaled": ("(dp - delta[:, None]) * scale)", "(dp - delta[:, None]))", "usual"),
    "gradient of the normalisation left out": ("(dp - delta[:, None])", "dp", "usual"),
    "the rest of a key left out": ("s += tl.dot(q_rest", "s += 0.0 * tl.dot(q_rest", "usual"),
    "padding counted": (
        'tl.where(real[None, :], s * (scale * LOG2E), float("-inf"))',
        "s * (scale * LOG2E)",
        "usual",
    ),
    "numbers behind the keys read": ("(key >= 0) & (key < S)", "key >= 0", NONE),
    "the sink forgotten": ("total * fade + tl.exp2(sink - now)", "total * fade", "usual"),
    "earlier keys not rescaled": ("o * fade[:, None]", "o", NONE),
    # cudnn-frontend#385
    "one query a key": ("total += _load(pairs_ptr", "total = _load(pairs_ptr", "every key"),
    "earlier launches lost": ("before + tl.sum(total, 0)", "tl.sum(total, 0)", "usual"),
    "the first row's keys for all": ("query // T * S * DK", "query // T * 0", "a batch"),
    "the rest of a gradient unwritten": (
        "_store(dq_ptr, dq_rest,",
        "_keys_of = (dq_rest,",
        "usual",
    ),
    "the last place left out": (
        "mask=place < K, other=-1",
        "mask=place < K - 1, other=-1",
        "usual",
    ),
    "to the base 2": ("* LN2, float", ", float", "usual"),
    "places behind the last written": ("(place < K)[None, :]", "(place < K + 1)[None, :]", "usual"),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_wrong_kernel_is_refused(name, forks, tmp_path):
    right, wrong, case = MUTATIONS[name]
    gates = forks.gates(written(tmp_path, OPERATOR, (right, wrong)), (case,))
    assert_refused(gates)


def given(**change):
    tensors = {
        "q": torch.zeros(1, 5, 2, 8),
        "kv": torch.zeros(1, 7, 8),
        "indices": torch.zeros(1, 5, 3, dtype=torch.int32),
        "value_dim": 6,
    }
    return tensors | change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(5, 2, 8)}, "q must be"),
        ({"kv": torch.zeros(1, 7, 9)}, "kv"),
        ({"kv": torch.zeros(2, 7, 8)}, "kv"),
        ({"value_dim": 9}, "value_dim"),
        ({"kv": torch.zeros(1, 7, 8).half()}, "one dtype"),
        ({"indices": torch.zeros(1, 5, 3)}, "indices must be int32"),
        ({"indices": torch.zeros(1, 4, 3, dtype=torch.int32)}, "indices must be int32"),
        ({"sinks": torch.zeros(3)}, "sinks must be"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refuses_what_does_not_fit(module, change, message):
    module.sparse_topk(**given())
    with pytest.raises(ValueError, match=message):
        module.sparse_topk(**given(**change))


def test_a_key_that_is_named_twice_counts_twice(module):
    q, kv = torch.randn(1, 1, 2, 8), torch.randn(1, 3, 8)
    indices = torch.tensor([[[0, 2, 2]]], dtype=torch.int32)
    o, lse = module.sparse_topk(q, kv, indices, value_dim=8)
    weights = torch.exp(q[0, 0] @ kv[0].T * 8**-0.5) * torch.tensor([1.0, 0.0, 2.0])
    torch.testing.assert_close(o[0, 0], weights @ kv[0] / weights.sum(-1, keepdim=True))
    torch.testing.assert_close(lse[0, 0], weights.sum(-1).log())


def test_all_keys_are_dense_attention(module):
    q, kv = torch.randn(2, 9, 3, 16), torch.randn(2, 9, 16)
    keys = torch.arange(9, dtype=torch.int32)
    indices = torch.where(keys <= keys[:, None], keys, -1).expand(2, 9, 9)
    o, _ = module.sparse_topk(q, kv, indices, value_dim=12)
    k = kv.unsqueeze(1).expand(2, 3, 9, 16)
    dense = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(1, 2), k, k[..., :12], is_causal=True
    )
    torch.testing.assert_close(o, dense.transpose(1, 2))


def test_it_is_the_kernel_of_sparse_attention():
    assert find_spec("sparse_attention") is SPEC


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
