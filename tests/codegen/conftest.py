from __future__ import annotations

import pytest


@pytest.fixture(scope="session", params=["kda", "gated_delta_rule"])
def member(request) -> str:
    return request.param
