"""Every released config, without weights, against what its publisher says of it."""

import functools
import json
import re
from collections import Counter
from pathlib import Path

import pytest
import yaml

from analyzers.schema import ModelAnalysis

DATA = Path(__file__).parents[1] / "data"
PUBLISHED = yaml.safe_load((DATA / "published.yaml").read_text())
UNITS = {"M": 1e6, "B": 1e9, "T": 1e12}


@pytest.fixture(scope="module")
def analysed(structure_of):
    """Analyses of the configs by name, each made once."""

    @functools.cache
    def of(name: str) -> ModelAnalysis:
        return structure_of(json.loads((DATA / "configs" / f"{name}.json").read_text()))

    return of


def head(a: ModelAnalysis) -> int:
    return sum(part.parameters for part in a.outer if part.name == "head")


def towers(a: ModelAnalysis) -> int:
    return sum(tower.parameters or 0 for tower in a.towers if tower.built)


def total(a: ModelAnalysis, counts: str) -> int:
    p = a.parameters
    return {
        "all": p.total,
        "text": p.total - towers(a),
        "non_embedding": p.total - towers(a) - p.embedding - head(a),
        "with_mtp": p.total + (a.multi_token.parameters if a.multi_token else 0),
    }[counts]


def active(a: ModelAnalysis, counts: str) -> int:
    p = a.parameters
    return {
        "all": p.active + p.embedding,
        "no_embedding": p.active,
        "non_embedding": p.active - head(a),
    }[counts]


def assert_met(figure: str, value: float, *, cut: bool = False) -> None:
    """Within 1% of a printed figure, or as near as its last digit says."""
    digits, letter = re.fullmatch(r"([\d.]+)([MBT])", figure).groups()
    unit = UNITS[letter] * 10.0 ** -len(digits.partition(".")[2])
    printed = float(digits) * UNITS[letter]
    if cut:
        assert printed <= value < printed + unit, f"{value:.5g} is not cut to {figure}"
    else:
        assert abs(value - printed) <= max(0.01 * printed, unit / 2), f"{value:.5g}, not {figure}"


def test_every_config_has_a_row():
    configs = {path.stem for path in (DATA / "configs").glob("*.json")} - {"SOURCES"}
    assert set(PUBLISHED) == configs


@pytest.mark.parametrize("name", PUBLISHED)
def test_total_and_active_parameters(analysed, name):
    a, row = analysed(name), PUBLISHED[name]
    for said in row["total"]:
        assert_met(said["figure"], total(a, said["counts"]))
    for said in row["active"]:
        assert_met(said["figure"], active(a, said["counts"]), cut=said.get("cut", False))


@pytest.mark.parametrize("name", PUBLISHED)
def test_parts_add_up_to_the_total(analysed, name):
    a = analysed(name)
    blocks = sum(len(b.layers) * part.parameters for b in a.blocks for part in b.parts)
    assert blocks + sum(part.parameters for part in a.outer) == a.parameters.total
    routed = sum(
        len(b.layers) * part.parameters
        for b in a.blocks
        for part in b.parts
        if part.name == "routed_experts"
    )
    assert routed == a.parameters.routed_experts


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_token_takes_about_two_operations_for_each_parameter_that_it_uses(analysed, name):
    a = analysed(name)
    per_token = sum(operator.flops.per_token for operator in a.operators)
    assert 0.9 < per_token / (2 * a.parameters.active) < 1.25


@pytest.mark.parametrize("name", PUBLISHED)
def test_experts(analysed, name):
    experts = analysed(name).experts
    assert {key: getattr(experts, key) for key in PUBLISHED[name]["experts"]} == PUBLISHED[name][
        "experts"
    ]


@pytest.mark.parametrize("name", PUBLISHED)
def test_mixers_per_layer(analysed, name):
    mixers = Counter(layer.mixer for layer in analysed(name).layers)
    assert mixers == PUBLISHED[name]["mixers"]


@pytest.mark.parametrize("name", [n for n, row in PUBLISHED.items() if "multi_token" in row])
def test_layers_for_further_tokens(analysed, name):
    said = PUBLISHED[name]["multi_token"]
    further = analysed(name).multi_token
    assert further.layers == said["layers"]
    assert not further.built
    assert_met(said["figure"], further.parameters)


@pytest.mark.parametrize("name", [n for n, row in PUBLISHED.items() if "towers" in row])
def test_towers(analysed, name):
    built = {tower.kind: tower.parameters for tower in analysed(name).towers}
    for kind, said in PUBLISHED[name]["towers"].items():
        assert_met(said["figure"], built[kind])


def test_indexers_are_all_that_kimi_k3_1_adds(analysed):
    # 7.44 M in each of the 24 layers of full attention, by the sizes in vLLM's documentation.
    one, other = analysed("kimi-k3.1-pro").parameters, analysed("kimi-k3").parameters
    assert one.total - other.total == pytest.approx(178.5e6, rel=0.01)
    assert one.active - other.active == one.total - other.total
