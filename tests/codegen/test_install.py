from __future__ import annotations

import pytest
import torch

from analyzers.errors import InputError
from analyzers.schema import Site
from codegen import LoadedKernel, bind
from codegen.schema import Kernel
from tests.codegen.kernel_samples import SITES


def loaded(function, site: Site | None) -> LoadedKernel:
    kernel = Kernel(
        operator="kda",
        family="linear_attention",
        module="kda.py",
        function="chunk_kda",
        reference="",
        test="",
        sha256="",
        spec_sha256="",
        template_sha256="",
        backend_sha256="",
        tuning_sha256=None,
        triton="",
        command="",
        attributes={},
        site=site,
        gates=[],
        passed=True,
    )
    return LoadedKernel(kernel=kernel, function=function)


@pytest.fixture(scope="module")
def make_model():
    from transformers import AutoModelForCausalLM
    from transformers.models.kimi_linear.configuration_kimi_linear import KimiLinearConfig

    from analyzers.models import load_config

    config = load_config("examples/models/tiny-kimi-linear")
    assert isinstance(config, KimiLinearConfig)

    def make():
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)

    return make


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    from tests.codegen.kernel_samples import load, write_kernel

    folder = tmp_path_factory.mktemp("bound")
    rendered = write_kernel(folder, "kda", 32, 32)
    return loaded(load(folder / rendered.module).chunk_kda, SITES["kda"])


def loss_and_gradients(model):
    ids = torch.arange(2 * 21).view(2, 21) % model.config.vocab_size
    loss = model(ids, labels=ids).loss
    parameters = [p for p in model.parameters() if p.requires_grad]
    return loss, torch.autograd.grad(loss, parameters, allow_unused=True)


def test_a_bound_model_has_the_same_loss_and_gradients(make_model, kernel):
    model = make_model()
    loss, grads = loss_and_gradients(model)
    calls = []

    def counted(*args, **kwargs):
        calls.append(1)
        return kernel.function(*args, **kwargs)

    with bind(model, [loaded(counted, kernel.kernel.site)]) as bound:
        with_kernel, kernel_grads = loss_and_gradients(model)
    assert len(bound.modules) == 0
    assert len(calls) == 6  # KDA layers of the model
    torch.testing.assert_close(with_kernel, loss)
    for one, two in zip(kernel_grads, grads, strict=True):
        if two is not None:
            torch.testing.assert_close(one, two, atol=1e-6, rtol=1e-3)


def test_undo_restores_and_other_models_are_untouched(make_model, kernel):
    model, other = make_model(), make_model()

    def fails(*args, **kwargs):
        raise AssertionError("called")

    binding = bind(model, [loaded(fails, kernel.kernel.site)])
    loss_and_gradients(other)
    with pytest.raises(AssertionError, match="called"):
        loss_and_gradients(model)
    binding.undo()
    binding.undo()
    loss_and_gradients(model)


def test_a_site_whose_function_is_gone_is_refused(make_model, kernel):
    site = Site(module_class="KimiLinearDeltaAttention", function="renamed_function")
    model = make_model()
    with pytest.raises(InputError, match="no longer calls renamed_function"):
        bind(model, [loaded(kernel.function, site)])
    assert not any("forward" in m.__dict__ for m in model.modules())


def test_a_site_whose_class_is_gone_is_refused(make_model, kernel):
    site = Site(module_class="NoSuchAttention", function="chunk_kimi_delta_attention")
    with pytest.raises(InputError, match="no module of class NoSuchAttention"):
        bind(make_model(), [loaded(kernel.function, site)])


def test_modules_that_were_subclassed_on_the_fly_are_found(make_model, kernel):
    # fully_shard gives a module a new class named FSDP...
    model = make_model()
    for module in model.modules():
        if type(module).__name__ == "KimiLinearDeltaAttention":
            module.__class__ = type("FSDPModule", (type(module),), {})
    bound = bind(model, [kernel]).modules
    assert sum(type(module).__name__ == "FSDPModule" for module in bound) == 6
