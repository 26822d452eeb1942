import pytest

from tests.runtime.runs import save_small


@pytest.fixture(scope="session")
def small_model(tmp_path_factory):
    return save_small("kimi_linear", tmp_path_factory.mktemp("small") / "kimi-linear")


@pytest.fixture(scope="session")
def small_analysis(small_model):
    from analyzers import analyze

    return analyze(small_model)
