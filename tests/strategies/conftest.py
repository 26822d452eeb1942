import pytest

from analyzers.schema import ModelAnalysis
from tests.analyses import dense_model, kimi_k3, tiny_kimi_linear


@pytest.fixture(scope="session")
def k3() -> ModelAnalysis:
    return kimi_k3()


@pytest.fixture(scope="session")
def tiny() -> ModelAnalysis:
    return tiny_kimi_linear()


@pytest.fixture(scope="session")
def dense() -> ModelAnalysis:
    return dense_model()


@pytest.fixture(scope="session")
def small_models() -> dict[int, ModelAnalysis]:
    """Three-layer models by their number of experts."""
    return {n: tiny_kimi_linear(count=n, top_k=min(4, n), layers=3) for n in (4, 6, 8)}
