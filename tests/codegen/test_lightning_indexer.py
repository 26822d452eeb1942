"""The indexer of sparse attention: its gates on a CPU and in the interpreter, wrong kernels, and
what is refused."""

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

OPERATOR = "lightning_indexer"
SPEC = load_members()[OPERATOR]
INTERPRETED = "usual", "packed documents", "more heads than a program holds", "no tokens"


@pytest.fixture(scope="module")
def module(tmp_path_factory):
    subject = written(tmp_path_factory.mktemp("indexer"), OPERATOR)
    return import_file(subject.module, "lightning_indexer_tested")


@pytest.fixture(scope="module")
def forks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("forks")
    with Forks(folder, interpret=True) as forks:
        assert not failed(forks.gates(written(folder, OPERATOR), ("one token",)))
        yield forks


def test_all_gates_pass_on_a_cpu(tmp_path):
    gates = run_on(written(tmp_path, OPERATOR), "cpu", dtypes=["float32", "bfloat16"])
    assert not failed(gates)
    assert len(gates) > 45


def test_the_kernels_pass_in_the_interpreter(forks, tmp_path):
    gates = forks.gates(written(tmp_path, OPERATOR), INTERPRETED)
    assert not failed(gates)
    assert len(gates) > len(INTERPRETED)


MUTATIONS = {
    "no relu": ("tl.maximum(s, 0.0)", "s", "usual"),
    "no weights": ("* w[None, :]", "* 1.0", "usual"),
    "the last heads alone": ("score += tl.sum(", "score = tl.sum(", "21 heads"),
    "the next key seen": ("query + ahead + 1, S)", "query + ahead + 2, S)", "usual"),
    "the own key not seen": ("query + ahead + 1, S)", "query + ahead, S)", "usual"),
    "the document before seen": (
        "begin = tl.load(begins_ptr + query).to(tl.int64)",
        "begin = tl.load(begins_ptr + query).to(tl.int64) * 0",
        "packed documents",
    ),
    "negative scores upside down": ("(bits >> 31) & 0x7FFFFFFF", "(bits >> 31) & 0", "usual"),
    "later ones of equal scores": ("rank <= need", "rank > agreed", "equal scores"),
    "greater ones counted twice": ("need -= taken", "need -= 0", "usual"),
    "the last digit left out": ("(shift > 0) & (equal > need)", "(shift > 28)", "usual"),
    "places of the first block again": ("found += tl.sum(chosen", "found = tl.sum(chosen", "usual"),
    "no padding": ("tl.store(out_ptr + place, -1,", "tl.store(out_ptr + place, 0,", "usual"),
}
CASES = {"21 heads": "more heads than a program holds"}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_wrong_kernel_is_refused(name, forks, tmp_path):
    right, wrong, case = MUTATIONS[name]
    gates = forks.gates(written(tmp_path, OPERATOR, (right, wrong)), (CASES.get(case, case),))
    assert_refused(gates)


def given(**change):
    tensors = {
        "q": torch.zeros(1, 5, 2, 8),
        "k": torch.zeros(1, 7, 8),
        "w": torch.zeros(1, 5, 2),
        "top_k": 3,
    }
    return tensors | change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(5, 2, 8)}, "q must be"),
        ({"k": torch.zeros(1, 7, 9)}, "k "),
        ({"k": torch.zeros(1, 4, 8)}, "keys for all"),
        ({"k": torch.zeros(1, 7, 8).half()}, "one dtype"),
        ({"w": torch.zeros(1, 5, 3)}, "w must be"),
        ({"top_k": 0}, "top_k"),
        ({"cu_seqlens": torch.tensor([0, 5])}, "a key for each query"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refuses_what_does_not_fit(module, change, message):
    module.lightning_indexer(**given())
    with pytest.raises(ValueError, match=message):
        module.lightning_indexer(**given(**change))


def test_equal_scores_go_to_the_earlier_keys(module):
    found = module.lightning_indexer(**given())
    assert found.tolist() == [[[0, 1, 2]] * 5]


def test_keys_are_those_that_transformers_selects(module):
    from transformers.models.deepseek_v32.configuration_deepseek_v32 import DeepseekV32Config
    from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32Indexer

    config = DeepseekV32Config(
        hidden_size=32,
        q_lora_rank=16,
        qk_rope_head_dim=8,
        index_n_heads=4,
        index_head_dim=16,
        index_topk=6,
    )
    torch.manual_seed(0)
    own, tokens = DeepseekV32Indexer(config, 0), 20
    x, latent = torch.randn(1, tokens, 32), torch.randn(1, tokens, 16)
    angle = torch.randn(1, tokens, 4).repeat(1, 1, 2)
    mask = torch.ones(1, tokens, tokens, dtype=torch.bool).tril()
    seen = {}
    own.wq_b.register_forward_hook(lambda *call: seen.update(q=call[2]))
    own.k_norm.register_forward_hook(lambda *call: seen.update(k=call[2]))
    none = torch.ones_like(angle), torch.zeros_like(angle)  # no rotation
    chosen = own(x, latent, none, mask, None)
    w = own.weights_proj(x) * (4 * 16) ** -0.5
    found = module.lightning_indexer(seen["q"].unflatten(-1, (4, 16)), seen["k"], w, top_k=6)
    for t in range(tokens):
        assert set(found[0, t].tolist()) - {-1} == {s for s in chosen[0, t].tolist() if s <= t}


def test_it_is_the_kernel_of_the_indexer():
    assert find_spec("indexer") is SPEC


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
