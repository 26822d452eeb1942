"""Copies to items and sums of items, beside plain indexing in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.experts import fan as module
from runtime.experts.fan import TORCH, Pairs, RowKernels, tally
from tests.runtime.runs import row_kernels


@st.composite
def choices(draw):
    rows, per_row = draw(st.integers(0, 9)), draw(st.integers(1, 4))
    experts = draw(st.integers(1, 5))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 16)))
    # `experts` is a choice that is another rank's.
    ids = torch.randint(0, experts + 1, (rows, per_row), generator=generator)
    return ids, experts, draw(st.sampled_from([None, 0, 3]))


@pytest.fixture(scope="module")
def generated(tmp_path_factory):
    return row_kernels(tmp_path_factory.mktemp("rows"))


KINDS = ("torch", "generated", "ordered")


@settings(deadline=None)  # the first call of an operator takes longer
@given(case=choices(), columns=st.sampled_from([1, 3, 512]), kind=st.sampled_from(KINDS))
def test_pairs_are_in_order_of_experts_and_sums_are_those_of_their_rows(
    generated, case, columns, kind
):
    ids, experts, spare = case
    # In order by a kernel, ids are int32: torch's own code takes them too.
    ordered = RowKernels(order=generated.order)
    kernels = {"torch": TORCH, "generated": generated, "ordered": ordered}[kind]
    here = int((ids < experts).sum())
    size, padded = (here, False) if spare is None else (min(here + spare, ids.numel()), True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "COLUMNS", columns)
        pairs = Pairs.of(ids, experts, size, kernels, padded=padded)
        x = torch.randn(len(ids), 4, dtype=torch.float32, requires_grad=True)
        weights = torch.rand(ids.shape, requires_grad=True)
        bank = torch.randn(experts + 1, 4)
        y = pairs.fan.spread(x, kernels) * bank[pairs.expert_P]
        sums = pairs.fan.collect(y, pairs.weights(weights), kernels, dtype=torch.float32)
        sums.square().sum().backward()
    counts = torch.bincount(ids.reshape(-1), minlength=experts + 1)[:experts].tolist()
    assert pairs.counts[:-1] == counts[:-1]
    assert pairs.counts[-1] == counts[-1] + size - here
    assert pairs.size == size
    with torch.no_grad():
        bank[experts] = 0
        plain = torch.einsum("rd,rkd,rk->rd", x, bank[ids], weights)
    torch.testing.assert_close(sums.detach(), plain)
    twin = x.detach().clone().requires_grad_(), weights.detach().clone().requires_grad_()
    torch.einsum("rd,rkd,rk->rd", twin[0], bank[ids], twin[1]).square().sum().backward()
    torch.testing.assert_close(x.grad, twin[0].grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(weights.grad, twin[1].grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["torch", "generated"])
def test_bfloat16_rows_are_weighted_and_added_in_float32(generated, kind):
    torch.manual_seed(0)
    kernels = TORCH if kind == "torch" else generated
    ids = torch.rand(64, 8).topk(4).indices
    pairs = Pairs.of(ids, 8, ids.numel())
    y = torch.randn(256, 600).bfloat16().requires_grad_()
    weights = torch.rand(64, 4, requires_grad=True)
    sums = pairs.fan.collect(y, pairs.weights(weights), kernels, dtype=torch.float32)
    assert sums.dtype == torch.float32
    exact, exact_weights = y.detach().double().requires_grad_(), weights.detach().double()
    exact_weights.requires_grad_()
    scaled = exact * exact_weights.reshape(-1)[pairs.choice_P].unsqueeze(1)
    plain = torch.zeros(64, 600, dtype=torch.float64).index_add(0, pairs.fan.source, scaled)
    torch.testing.assert_close(sums.double(), plain, rtol=1e-5, atol=1e-5)
    grad = torch.randn(64, 600)
    sums.backward(grad)
    plain.backward(grad.double())
    assert y.grad.dtype == torch.bfloat16
    torch.testing.assert_close(y.grad.double(), exact.grad, rtol=2**-7, atol=1e-6)
    torch.testing.assert_close(weights.grad.double(), exact_weights.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["torch", "generated"])
def test_no_copy_of_all_rows_is_made_in_float32(generated, kind):
    # The weighted sum of many bfloat16 rows takes less than one float32 copy of them.
    rows, width = 4096, 2048
    ids = torch.arange(rows).view(-1, 8) % 16
    pairs = Pairs.of(ids, 16, rows)
    y = torch.randn(rows, width).bfloat16().requires_grad_()
    weights = torch.rand(ids.shape, requires_grad=True)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for tensor in torch.utils._pytree.tree_leaves(out):
                if isinstance(tensor, torch.Tensor) and tensor.dtype == torch.float32:
                    largest = max(largest, tensor.untyped_storage().nbytes())
            return out

    with Watch():
        kernels = TORCH if kind == "torch" else generated
        pairs.fan.collect(y, pairs.weights(weights), kernels).sum().backward()
    assert largest <= rows * module.COLUMNS * 4


def test_ids_beyond_the_kinds_are_not_counted():
    assert tally(torch.tensor([[0, 2], [2, 7]]), 3).tolist() == [1, 0, 2]
