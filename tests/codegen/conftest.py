from __future__ import annotations

import pytest

from tests.codegen.kernel_samples import load, write_kernel


@pytest.fixture(scope="session", params=["kda", "gated_delta_rule"])
def member(request) -> str:
    return request.param


@pytest.fixture(scope="session")
def modules(member, tmp_path_factory):
    """(kernel, reference) of a member with head widths that are no powers of two."""
    folder = tmp_path_factory.mktemp(f"plain_{member}")
    rendered = write_kernel(folder, member, 20, 24)
    return load(folder / rendered.module), load(folder / rendered.reference)
