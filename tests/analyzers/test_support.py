"""What a backend serves, by torch's dispatcher where it is here and by its file where it is not."""

from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from analyzers import support as module
from analyzers.backends import backend_names, load_backend
from analyzers.schema import Graph, GraphNode, Operator, Work
from analyzers.support import FORMS, LEAVES, ask, support

CPU = load_backend("cpu")
ABSENT = load_backend("ascend-910c")


def test_the_processor_is_asked_through_the_dispatcher():
    answer = ask("linear", CPU)
    assert answer.native is True
    assert answer.how == "dispatcher: CPU kernels for aten::mm, aten::addmm"


def test_an_absent_device_is_answered_by_its_file():
    assert not module.is_present(ABSENT)
    answer = ask("rms_norm", ABSENT)
    assert (answer.native, answer.how) == (
        True,
        "analyzers/backends/ascend-910c.yaml: native.rms_norm",
    )
    assert ask("kda", ABSENT).native is False
    # The file lists operators of models; nothing here knows what an NPU's plug-in registers.
    assert ask("aten.mul.Tensor", ABSENT).native is None


@pytest.mark.parametrize("name", ["kda", "gated_delta_rule", "warp_drive"])
def test_what_torch_has_no_operator_for_is_missing(name):
    assert ask(name, CPU).native is False


@pytest.mark.parametrize("name", ["aten.mul.Tensor", "aten.softmax.int", "aten.silu", "aten.topk"])
def test_single_operators_of_a_graph_are_asked_too(name):
    assert ask(name, CPU).native is True


def test_an_operator_that_torch_does_not_have_is_missing():
    answer = ask("aten.frobnicate.default", CPU)
    assert (answer.native, answer.how) == (
        False,
        "dispatcher: no CPU kernel for aten::frobnicate",
    )


def test_a_kernel_that_only_another_device_has_is_missing():
    # Registered for CUDA alone; a processor cannot serve it even where the library knows the name.
    assert ask("aten._scaled_dot_product_efficient_attention", CPU).native is False


def test_dispatcher_and_file_agree_about_the_processor():
    for name in CPU.native:
        assert ask(name, CPU).native is True, name
    assert set(FORMS) == set(CPU.native)


class Recorder(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func._schema.name.removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


def _runs():
    x = torch.rand(2, 3, 4, 4)
    f = torch.nn.functional
    return {
        "linear": lambda: (f.linear(x[0, 0], x[0, 0]), f.linear(x[0, 0], x[0, 0], x[0, 0, 0])),
        "matmul": lambda: (x @ x, x[0, 0] @ x[0, 0]),
        "einsum": lambda: torch.einsum("bij,bjk->bik", x[0], x[0]),
        "softmax.int": lambda: x.softmax(-1),
        "log_softmax.int": lambda: x.log_softmax(-1),
        "layer_norm": lambda: f.layer_norm(x, (4,)),
        "rms_norm": lambda: f.rms_norm(x, (4,)),
        "conv1d": lambda: f.conv1d(x[0], torch.rand(5, 4, 2)),
        "to.dtype": lambda: x.to(torch.float64),
        "type_as": lambda: x.type_as(x.double()),
        "contiguous": lambda: x.transpose(2, 3).contiguous(),
        "reshape": lambda: (x.reshape(-1), x.transpose(1, 2).reshape(6, -1)),
        "square": lambda: x.square(),
        "where.ScalarOther": lambda: torch.where(x > 0.5, x, 0.0),
        "one_hot": lambda: f.one_hot(torch.arange(3), 4),
        "pad": lambda: f.pad(x, (1, 1)),
        "chunk": lambda: x.chunk(2, -1),
        "repeat_interleave.self_int": lambda: x.repeat_interleave(2, 1),
    }


# Which kernel serves attention is chosen inside the call, where no mode sees the question.
@pytest.mark.parametrize("name", sorted(LEAVES.keys() - {"scaled_dot_product_attention"}))
def test_composed_operators_come_down_to_what_is_asked(name):
    with Recorder() as recorder:
        _runs()[name]()
    leaves = {leaf.partition(".")[0] for leaf in LEAVES[name]}
    assert leaves <= recorder.names | {"view"}, recorder.names


def test_every_operator_of_model_and_graph_gets_one_answer():
    nodes = [
        GraphNode(name=n, operator=o, path="", part="mixer", inputs=[])
        for n, o in (("a", "aten.mul.Tensor"), ("b", "linear"), ("c", "aten.mul.Tensor"))
    ]
    blocks = [SimpleNamespace(graph=Graph(nodes=nodes)), SimpleNamespace(graph=None)]
    operators = [
        Operator(name=n, count=1, flops=Work(), bytes=Work()) for n in ("linear", "kda", "linear")
    ]
    answers = support(SimpleNamespace(blocks=blocks, operators=operators), CPU)
    assert [(a.operator, a.native) for a in answers] == [
        ("linear", True),
        ("kda", False),
        ("aten.mul.Tensor", True),
    ]


def test_the_devices_of_the_contract_have_files_with_status():
    names = {"cpu", "h100", "h200", "b200", "mi300x", "ascend-910c"}
    assert names <= set(backend_names())
    assert {load_backend(name).status for name in names} == {
        "verified",
        "cross-compiled",
        "declared",
    }
