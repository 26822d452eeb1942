import io
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from html import unescape
from pathlib import Path

import pytest
from rich.console import Console

from adapter_agent import figures, plan_figures, report
from adapter_agent.plan_picture import picture
from analyzers.documents import read_document
from strategies import load_cluster, search
from strategies.schema import (
    Alternative,
    Cell,
    EpCell,
    EpCurve,
    EpRow,
    EpWindows,
    Job,
    Parallelism,
    Plan,
)
from tests.adapter_agent import samples
from tests.analyses import dense_model, tiny_kimi_linear

CLUSTERS = Path(__file__).parents[2] / "examples" / "clusters"
CLUSTER = CLUSTERS / "two-ranks.yaml"


def cell(ep, micro, fits, gib, speed=700.0, chance=0.0):
    return Cell(
        ep=ep,
        micro_batch_size=micro,
        fits=fits,
        step_seconds=1.0,
        tokens_per_second_per_device=speed,
        memory_gib=gib,
        oom_probability=chance,
    )


@pytest.fixture(scope="module")
def plan():
    """With one alternative of half the batch: as slow a token, in a quarter less memory."""
    made = samples.plan()
    p = made.predicted
    p = replace(p, step_seconds_interval=(0.3, 0.5), memory_gib_interval=(1.2, 1.9))
    halved = replace(
        p,
        step_seconds=p.step_seconds / 2,
        step=replace(p.step, **{k: v / 2 for k, v in vars(p.step).items()}),
        step_seconds_interval=(0.15, 0.25),
    )
    other = Alternative(
        why="half: as slow a token",
        parallelism=Parallelism(fsdp=2, ep=1, efsdp=2),
        micro_batch_size=1,
        activation_checkpointing="none",
        step_seconds=halved.step_seconds,
        memory_gib=1.5,
        predicted=halved,
        runnable=False,
        missing=["a feature"],
    )
    survey = [
        cell(1, 1, True, 1.5, speed=600),
        cell(2, 1, True, 1.0, speed=650),
        cell(1, 2, False, 6.0),
        cell(2, 2, True, 1.5, speed=731),
        cell(2, 4, False, 3.9, chance=0.4),
    ]
    return replace(made, predicted=p, alternatives=[other], survey=survey)


@pytest.fixture(scope="module")
def curve():
    def row(tokens, **seconds):
        cells = {
            int(ep[2:]): EpCell(seconds=s, memory_gib=tokens / 1000, fits=tokens < 2000)
            for ep, s in seconds.items()
        }
        best = min(cells, key=lambda ep: cells[ep].seconds)
        return EpRow(tokens_per_rank=tokens, by_ep=cells, fastest=best)

    rows = [row(1000, ep1=4.0, ep2=1.0), row(2000, ep1=2.0, ep2=1.9), row(4000, ep1=3.0, ep2=3.8)]
    windows = EpWindows(assumed="as planned", windows={2: (1000, 2300), 1: (2400, 4000)})
    return EpCurve(kept="the plan", rows=rows, windows=[windows], fits_up_to=1000)


@pytest.fixture(scope="module")
def drawn(plan, curve):
    return {
        k: ET.fromstring(v)
        for k, v in plan_figures.plan_figures(replace(plan, ep_curve=curve)).items()
    }


def titles(root, *tags):
    return [mark.findtext("title") for tag in tags for mark in root.iter(tag)]


def test_every_figure_is_labelled_and_every_mark_says_what_it_is(drawn):
    assert list(drawn) == ["step", "memory", "survey", "curve"]
    for root in drawn.values():
        assert root.get("role") == "img"
        assert root.get("aria-label")
        clip = {id(r) for path in root.iter("clipPath") for r in path.iter("rect")}
        for mark in [*root.iter("rect"), *root.iter("circle")]:
            assert id(mark) in clip or mark.findtext("title")


def test_without_data_a_figure_is_left_out(plan):
    assert list(plan_figures.plan_figures(replace(plan, survey=[]))) == ["step", "memory"]


def ends(root, name):
    """Right ends of the bars of a row."""
    bars = [r for r in root.iter("rect") if (r.findtext("title") or "").startswith(f"{name} (")]
    assert bars
    return max(float(r.get("x", "nan")) + float(r.get("width", "nan")) for r in bars)


def test_batches_of_different_size_are_drawn_for_as_many_tokens(drawn):
    both = [ends(drawn["step"], name) for name in ("the plan", "half")]
    assert both[0] == pytest.approx(both[1], abs=0.1)
    whiskers = [p.get("d") for p in drawn["step"].iter("path")]
    assert whiskers[0].split("v")[0].split(" ")[0] == whiskers[1].split("v")[0].split(" ")[0]


def test_memory_is_drawn_to_the_scale_of_what_the_device_has(drawn):
    (limit,) = [line for line in drawn["memory"].iter("line") if line.get("class") == "limit"]
    at = float(limit.get("x1", "nan")) - plan_figures.LEFT
    held = ends(drawn["memory"], "the plan") - plan_figures.LEFT
    assert held / at == pytest.approx(1.5 / 4.0, abs=1e-3)
    assert limit.findtext("title") == "the device has 4 GiB"
    assert "1.2 to 1.9 GiB about four times in five" in titles(drawn["memory"], "path")


def test_what_cannot_be_run_yet_is_pale(drawn):
    pale = [r for r in drawn["step"].iter("rect") if r.get("fill-opacity")]
    assert {r.findtext("title").partition(":")[0] for r in pale} == {
        "half (EP 1 x 2, batch 1, fp32)"
    }


def test_small_parts_are_drawn_together_where_colours_run_out():
    many = {f"part {i}": float(i + 1) for i in range(12)}
    rows = [plan_figures.Row(name="a", parts=many)]
    root = ET.fromstring(plan_figures.stacked_rows(rows, unit="s", label="l"))
    classes = [r.get("class") for r in root.iter("rect") if r.findtext("title").startswith("a ")]
    assert len(set(classes)) == len(classes) == figures.COLOURS
    assert f"a (): other {1 + 2 + 3 + 4} s" in " ".join(titles(root, "rect"))


def test_the_survey_hatches_what_does_not_fit_and_says_why(drawn):
    hatched = [
        r.findtext("title") for r in drawn["survey"].iter("rect") if r.get("class") == "hatched"
    ]
    assert hatched == [
        "EP 1, micro-batch 2: does not fit, needs 6 of 4 GiB",
        "EP 2, micro-batch 4: does not fit, runs out with probability 40% at 3.9 of 4 GiB",
    ]
    assert "EP 2, micro-batch 2: 731 tokens/s a device, 1.5 of 4 GiB" in titles(
        drawn["survey"], "rect"
    )
    (chosen,) = [r for r in drawn["survey"].iter("rect") if r.get("class") == "chosen"]
    (same,) = [r for r in drawn["survey"].iter("rect") if "731" in (r.findtext("title") or "")]
    assert (chosen.get("x"), float(chosen.get("y"))) == (
        f"{float(same.get('x')):.1f}",
        float(same.get("y")),
    )


def test_a_pair_that_is_not_on_offer_stays_empty(drawn):
    assert not any("EP 1, micro-batch 4" in t for t in titles(drawn["survey"], "rect") if t)


def test_the_curve_says_speed_and_what_does_not_fit(drawn):
    said = titles(drawn["curve"], "circle")
    assert "EP 2, 1,000 tokens: 1000 tokens/s a device, 1 GiB" in said
    assert "EP 2, 2,000 tokens: 1053 tokens/s a device, 2 GiB, does not fit" in said
    # 250 tokens/s are less than half of the best, 1333.
    assert not any(s.startswith("EP 1, 1,000 tokens") for s in said)
    hollow = [c for c in drawn["curve"].iter("circle") if "hollow" in (c.get("class") or "")]
    assert len(hollow) == 4
    assert "EP 1 is the fastest from 2,400 to 4,000 tokens" in titles(drawn["curve"], "rect")


def test_windows_meet_in_the_strip(drawn):
    strip = [r for r in drawn["curve"].iter("rect") if "fastest" in (r.findtext("title") or "")]
    (a, b) = sorted((float(r.get("x")), float(r.get("width"))) for r in strip)
    assert a[0] + a[1] == pytest.approx(b[0] - 1, abs=0.1)


def test_a_file_of_a_figure_needs_no_page(plan, curve):
    style = report.render("style.css.j2", {})
    for figure in plan_figures.plan_figures(replace(plan, ep_curve=curve)).values():
        alone = figures.standalone(figure, style)
        assert "var(" not in alone
        assert ET.fromstring(alone).tag == "{http://www.w3.org/2000/svg}svg"
        rules = alone.partition("<style>")[2].partition("</style>")[0]
        for name in {
            c for r in ET.fromstring(figure).iter() for c in (r.get("class") or "").split()
        }:
            assert f".{name} " in rules or name == "ink"


def test_a_searched_plan_is_written_with_its_page_and_figures(tmp_path):
    cluster = load_cluster(CLUSTER)
    analysis, job = (
        tiny_kimi_linear(),
        Job(model="/models/tiny", cluster=str(CLUSTER), backend="cpu"),
    )
    job = replace(job, sequence_length=256)
    found = search(analysis, cluster, job)
    written = report.write_plan_figures(found, "tiny", tmp_path)
    names = ["plan.json", "plan.html", "step.svg", "memory.svg", "survey.svg", "curve.svg"]
    assert [p.name for p in written if p.suffix != ".png"] == names
    assert read_document(Plan, tmp_path / "plan.json") == found
    page = (tmp_path / "plan.html").read_text()
    assert page.count("<svg") == 4
    for sentence in [*found.explanation, *found.families.values()]:
        assert sentence in unescape(page)


def test_an_image_is_made_where_resvg_is_installed(plan):
    pytest.importorskip("resvg_py", reason="pip install 'adapter-agent[figures]'")
    style = report.render("style.css.j2", {})
    image = figures.png(figures.standalone(plan_figures.step_figure(plan), style))
    assert image
    assert image.startswith(b"\x89PNG")
    assert int.from_bytes(image[16:20], "big") == 2 * figures.WIDTH


def test_of_a_dense_model_nothing_is_said_of_experts(tmp_path):
    dense, cluster = dense_model(), load_cluster(CLUSTERS / "hgx-h200-128.yaml")
    job = Job(model="m", cluster="c", backend="h200", sequence_length=4096)
    plan = search(dense, cluster, job)
    assert plan.expert_weight_format is None
    report.write_plan_figures(plan, "dense", tmp_path)
    assert not (tmp_path / "survey.svg").exists()
    console = Console(file=io.StringIO(), width=200)
    console.print(picture(plan))
    page = (tmp_path / "plan.html").read_text()
    for said in (console.file.getvalue(), page):
        assert not re.findall(r"\bEP\b|efsdp|expert\w*|dispatch\w*", said)
    assert read_document(Plan, tmp_path / "plan.json") == plan
