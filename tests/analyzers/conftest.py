"""What the tests of structure share."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from analyzers import analysis
from analyzers.schema import ModelAnalysis


@pytest.fixture(scope="module")
def structure_of(tmp_path_factory) -> Callable[[dict[str, Any]], ModelAnalysis]:
    """The analysis of a config; graphs, which change nothing of the structure, are left out."""

    def of(config: dict[str, Any]) -> ModelAnalysis:
        folder = tmp_path_factory.mktemp(config["model_type"])
        (folder / "config.json").write_text(json.dumps(config))
        return analysis.analyze(folder)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            analysis, "_traced", lambda model, kinds, calls: ([None] * len(kinds), "structural", "")
        )
        yield of
