"""The rows of experts: their gates on a CPU, faults that are told, and what is refused."""

from __future__ import annotations

import pytest
import torch

from analyzers.backends import load_backend
from codegen.build import subject_of
from codegen.load import import_file
from codegen.members import load_members
from codegen.render import render
from codegen.verify.harness import compile_for, run_on
from tests.codegen.kernel_samples import check_style
from tests.codegen.proofs import DIED, Forks, failed

OPERATORS = ["moe_spread", "moe_combine"]


def write(folder, operator, backend="cpu", change=("", "")):
    spec = load_members()[operator]
    made = render(spec, load_backend(backend), {})
    folder.mkdir(exist_ok=True)
    for name, text in made.files.items():
        (folder / name).write_text(text.replace(*change) if change[0] else text, encoding="utf-8")
    return subject_of(made, spec, folder)


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    folder = tmp_path_factory.mktemp("route")
    subjects = {name: write(folder, name) for name in OPERATORS}
    return {n: getattr(import_file(s.module, f"{n}_tested"), n) for n, s in subjects.items()}


@pytest.mark.parametrize("operator", OPERATORS)
def test_all_gates_pass_on_a_cpu(operator, tmp_path):
    gates = run_on(write(tmp_path, operator), "cpu")
    assert not [g for g in gates if not g.passed]
    assert len(gates) > 50


@pytest.fixture(scope="module")
def forks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("forks")
    with Forks(folder, interpret=True) as forks:
        assert not failed(forks.gates(write(folder, "moe_spread"), ("one item",)))
        yield forks


@pytest.mark.parametrize("operator", OPERATORS)
def test_the_kernels_pass_in_the_interpreter(operator, forks, tmp_path):
    cases = "usual", "items of no row", "a width of 100", "rows of a wider array", "no rows"
    gates = forks.gates(write(tmp_path, operator), cases)
    assert not failed(gates)
    assert len(gates) > len(cases)


NONE = "items of no row"
ADDED = "total += weight_1.to(tl.float32)[:, None] * y_1.to(tl.float32)"
NEXT = "offsets_ptr + row + 1, mask=row < N"
WITHIN = "(row < N)[:, None] & in_row"
OUT = "x.to(out_ptr.dtype.element_ty), mask=there[:, None] & in_row"
MUTATIONS = {
    "reads behind the rows": ("moe_spread", "& (row < N)", "", NONE),
    "writes behind the items": ("moe_spread", OUT, OUT.replace("there[:, None] & ", ""), NONE),
    "twice the row": ("moe_spread", OUT, f"2 * {OUT}", "usual"),
    "an item twice": ("moe_spread", "total += y_1", "total += y_0", "usual"),
    "stops early": ("moe_spread", "tl.max(end - begin, 0)", "tl.min(end - begin, 0)", "usual"),
    "another weight": ("moe_combine", ADDED, ADDED.replace("weight_1", "weight_0"), "usual"),
    "an item left out": ("moe_combine", ADDED, "pass", "usual"),
    "the next row's item": ("moe_combine", "first + 1 < end", "first + 1 <= end", "usual"),
    "no row has items": ("moe_combine", NEXT, NEXT.replace(" + 1", ""), "usual"),
    "no weight": ("moe_combine", "x.to(tl.float32) * weight", "x.to(tl.float32)", "usual"),
    "the last block alone": ("moe_combine", "product += x", "product = x", "a width of 100"),
    "a stride of its own": ("moe_combine", "item * y_stride", "item * D", "rows of a wider array"),
    "writes into the next row": ("moe_combine", WITHIN, WITHIN.replace(" & in_row", ""), "usual"),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_wrong_kernel_is_refused(name, forks, tmp_path):
    operator, right, wrong, case = MUTATIONS[name]
    subject = write(tmp_path, operator, change=(right, wrong))
    assert subject.module.read_text() != write(tmp_path / "right", operator).module.read_text()
    gates = forks.gates(subject, (case,))
    assert failed(gates)
    # Refused for what it computes or overwrites, not because it does not run.
    for gate in gates:
        assert not gate.name.startswith("accuracy") or gate.measured or gate.detail == DIED


def test_sums_are_in_the_order_of_the_items(kernels):
    # 2^24 + 1 - 2^24 is 0 in float32, 2^24 - 2^24 + 1 is 1.
    y = torch.tensor([[2.0**24], [1.0], [-(2.0**24)]])
    source, offsets = torch.zeros(3, dtype=torch.int64), torch.tensor([0, 3])
    for order, total in (([0, 1, 2], 0.0), ([0, 2, 1], 1.0)):
        ids = source, torch.tensor(order), offsets
        assert kernels["moe_combine"](y, None, *ids).item() == total


def test_a_copy_keeps_every_bit(kernels):
    x = torch.tensor([[float("inf"), -0.0, 1e-40, 3.0]]).bfloat16()
    ids = torch.zeros(2, dtype=torch.int32), torch.arange(2), torch.tensor([0, 2])
    y = kernels["moe_spread"](x, *ids)
    assert torch.equal(y.view(torch.int16), x.expand(2, -1).contiguous().view(torch.int16))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"y": torch.zeros(2, 3, 4)}, "rows must be"),
        ({"y": torch.zeros(4, 8, dtype=torch.float64)}, "float64"),
        ({"weights": torch.zeros(5)}, "weights must be"),
        ({"weights": torch.zeros(4, dtype=torch.int32)}, "weights must be"),
        ({"source": torch.zeros(3, dtype=torch.int64)}, "source and by_source must be"),
        ({"by_source": torch.zeros(4)}, "by_source must be int32 or int64"),
        ({"offsets": torch.zeros(0, dtype=torch.int64)}, "offsets must be"),
    ],
)
def test_refuses_what_does_not_fit(kernels, change, message):
    call = {
        "y": torch.zeros(4, 8),
        "weights": torch.ones(4),
        "source": torch.arange(4),
        "by_source": torch.arange(4),
        "offsets": torch.arange(5),
    }
    with pytest.raises(ValueError, match=message):
        kernels["moe_combine"](**(call | change))


def test_refuses_offsets_of_other_rows(kernels):
    with pytest.raises(ValueError, match=r"offsets must be \[5\]"):
        kernels["moe_spread"](torch.zeros(4, 8), *[torch.arange(4)] * 3)


@pytest.mark.parametrize("backend", ["cpu", "h200"])
@pytest.mark.parametrize("operator", OPERATORS)
def test_rendered_files_are_stable_and_formatted(operator, backend, tmp_path):
    spec, target = load_members()[operator], load_backend(backend)
    assert render(spec, target, {}) == render(spec, target, {})
    write(tmp_path, operator, backend)
    check_style(tmp_path)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("operator", OPERATORS)
def test_all_gates_pass_on_the_device(operator, tmp_path):
    subject = write(tmp_path, operator, "h200")
    gates = [*run_on(subject, "device", "cuda"), *compile_for(subject, load_backend("h200"))]
    assert not [g for g in gates if not g.passed]
