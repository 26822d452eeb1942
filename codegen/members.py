"""Every operator that kernels can be generated for, from `families/*.yaml`, one file a member."""

from __future__ import annotations

import functools
from importlib import resources

from analyzers.documents import from_data
from codegen.family import Member, Spec
from codegen.layer import FAMILIES


@functools.cache
def load_members() -> dict[str, Member]:
    """Every member of every family, by operator name.

    What the members of a family share is said once, in `families/common/FAMILY.yaml`.
    """
    import yaml

    folder = resources.files("codegen") / "families"
    members = {}
    for file in sorted(folder.iterdir(), key=lambda f: f.name):
        if file.name.endswith(".yaml"):
            data = yaml.safe_load(file.read_text(encoding="utf-8"))
            common = folder / "common" / f"{data['family']}.yaml"
            if common.is_file():
                data = yaml.safe_load(common.read_text(encoding="utf-8")) | data
            kind = FAMILIES.get(data["family"], Spec)
            member = from_data(kind, data, f"codegen/families/{file.name}")
            members[member.operator] = member
    return members


def load_specs() -> dict[str, Spec]:
    """The members of the linear-attention family, by operator name."""
    return {n: m for n, m in load_members().items() if isinstance(m, Spec)}


def find_spec(operator: str) -> Member | None:
    """The member that generates an operator, by its name or one of its aliases."""
    named = (m for m in load_members().values() if operator in (m.operator, *m.aliases))
    return next(named, None)
