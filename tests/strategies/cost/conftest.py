"""A device with round figures, so that costs can be worked out by hand."""

from dataclasses import replace

import pytest

from analyzers.backends import Fact, load_backend
from strategies.cost.constants import Constants
from tests.analyses import sparse_model


@pytest.fixture(scope="session")
def plain():
    """Every rate is reached, nothing hides and nothing is fixed cost."""
    return Constants(
        matmul_share=1.0,
        grouped_matmul_share=1.0,
        attention_share=1.0,
        memory_share=1.0,
        host_calls=0.0,
        shard_overlap=0.0,
        tensor_overlap=0.0,
        exchange_overlap=0.0,
        exchange_share=1.0,
        dispatch_seconds=0.0,
        saved_share=1.0,
        communicator_gib=0.0,
    )


@pytest.fixture(scope="session")
def device():
    """100 TFLOPS, 1000 GB/s, 80 GiB of which none is reserved; no tail of a product counts."""

    def fact(value):
        return Fact(value=value, origin="measured", source="round figure")

    return replace(
        load_backend("h200"),
        memory_gib=fact(80.0),
        reserved_gib=fact(0.0),
        memory_gbps=fact(1000.0),
        matmul_tflops={"bfloat16": fact(100.0), "float8": fact(200.0)},
        attention_ratio=fact(1.0),
        launch_overhead_us=fact(10.0),
        processors=None,
    )


@pytest.fixture(scope="session")
def sparse():
    return sparse_model()
