"""A document's loss and gradients do not depend on the documents beside it."""

import pytest
import torch
from torch.nn.utils import parameters_to_vector

from analyzers import analyze
from codegen import bind, load_kernels
from runtime.adapters import adapter_parameters, initialise_adapters, insert_adapters
from runtime.boundaries import keeps_apart, packed_form
from runtime.experts import use_own_experts
from runtime.loss import fuse_head
from runtime.packing import Dataset, collate
from runtime.step import loss_sum
from runtime.tokens import IGNORED, Example
from strategies.schema import Lora
from tests.runtime.runs import save_qwen, save_small, write_kernels

CPU = torch.device("cpu")
LENGTHS = (9, 1, 22, 7, 25)


MODELS = {
    "dense": save_qwen,
    "moe": lambda folder: save_qwen(folder, experts=8),
    "kda": lambda folder: save_small("kimi_linear", folder),
    "gated_delta": lambda folder: save_small("qwen3_next", folder),
}
FORMS = {"dense": "rows", "moe": "rows", "kda": "flat", "gated_delta": "flat"}
RECURRENT = [name for name, form in FORMS.items() if form == "flat"]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    made = {}

    def build(name):
        if name not in made:
            from transformers import AutoModelForCausalLM

            folder = MODELS[name](tmp_path_factory.mktemp(name) / "model")
            analysis = analyze(folder)
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
            targets = ["attention"] + (["routed_experts"] if analysis.experts else [])
            insert_adapters(model, Lora(rank=4, targets=targets), analysis)
            initialise_adapters(model, 0)
            for key, parameter in adapter_parameters(model).items():
                if key.endswith("_B"):
                    torch.nn.init.normal_(parameter, std=0.05)
            use_own_experts(model)
            kernels = None
            if name in RECURRENT:
                write_kernels(folder.parent, analysis)
                kernels = load_kernels(folder.parent / "kernels")
            made[name] = model.train(), kernels
        return made[name]

    return build


def examples(seed):
    draw = torch.Generator().manual_seed(seed)
    found = []
    for length in LENGTHS:
        ids = torch.randint(3, 200, (length,), generator=draw).tolist()
        found.append(Example(ids, [IGNORED, *ids[1:]]))
    return found


def outcome(model, batch):
    """Loss and all gradients of the adapters."""
    parameters = list(adapter_parameters(model).values())
    loss = loss_sum(model, batch, CPU)
    gradients = torch.autograd.grad(loss, parameters, materialize_grads=True)
    return loss.detach(), parameters_to_vector(gradients)


def alone(model, documents):
    """Sums over documents that each have a row, and a batch, of their own."""
    made = [
        outcome(model, collate(Dataset([d], truncated=0).rows([0]), len(d.input_ids), 0))
        for d in documents
    ]
    return tuple(sum(parts) for parts in zip(*made, strict=True))


def packed(documents, flat):
    rows = Dataset(documents, truncated=0, row_length=64).rows(range(len(documents)))
    assert len(rows) == 1
    return collate(rows, 72, 0, flat=flat)


def apart(one, two):
    return max(float((a - b).norm() / b.norm()) for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize("name", list(MODELS))
def test_packed_documents_learn_as_if_alone(name, built):
    model, kernels = built(name)
    documents = examples(seed=1)
    if kernels is None:
        assert packed_form(model, CPU) == FORMS[name]
        made = outcome(model, packed(documents, flat=False))
    else:
        with bind(model, kernels):
            assert packed_form(model, CPU) == FORMS[name]
            made = outcome(model, packed(documents, flat=True))
    assert apart(made, alone(model, documents)) < 1e-5


@pytest.mark.parametrize("name", list(MODELS))
def test_what_is_told_of_no_boundary_leaks(name, built):
    # The same comparison without positions and limits: it can fail.
    from dataclasses import replace

    model, _ = built(name)
    documents = examples(seed=1)
    batch = replace(packed(documents, flat=False), positions_BT=None)
    assert apart(outcome(model, batch), alone(model, documents)) > 1e-3


@pytest.mark.parametrize("name", RECURRENT)
def test_stock_recurrence_is_not_packed(name, built):
    # slime#1686: the convolution got the boundaries, the delta rule did not.
    model, _ = built(name)
    assert packed_form(model, CPU) is None
    assert all(p.grad is None for p in model.parameters())


def test_a_kernel_that_ignores_its_limits_is_found(built):
    from dataclasses import replace

    model, kernels = built("kda")

    def deaf(loaded):
        def function(*args, cu_seqlens=None, **kwargs):
            return loaded.function(*args, **kwargs)

        return replace(loaded, function=function)

    for i, loaded in enumerate(kernels):
        if loaded.kernel.operator not in ("kda", "short_convolution"):
            continue
        with bind(model, [deaf(k) if i == j else k for j, k in enumerate(kernels)]):
            assert not keeps_apart(model, CPU, "flat"), loaded.kernel.operator


@pytest.mark.parametrize("name", ["moe", "kda"])
def test_the_chunked_head_gives_the_same_gradients(name, built):
    model, _ = built(name)
    batch = collate(Dataset(examples(2), truncated=0).rows(range(len(LENGTHS))), 32, 0)
    before = outcome(model, batch)
    assert fuse_head(model, CPU) is None
    try:
        assert apart(outcome(model, batch), before) < 1e-6
    finally:
        del model.cross_entropy_sum
