import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from adapter_agent.measured import with_refit
from adapter_agent.report import COMMENT_LIMIT, write_analysis_page, write_report
from adapter_agent.review import write_decision
from adapter_agent.run_directory import open_run
from analyzers.documents import write_document
from strategies.schema import Alternative, Job, Refit
from tests.adapter_agent import samples

SECTIONS = ["model", "operators", "kernels", "plan", "review", "validation", "training", "run"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    with samples.finished_run(tmp_path_factory.mktemp("run")) as run:
        write_decision(run, approve=True, by="ada", why="read it")
        write_report(run)
        yield run


def test_the_page_has_every_section_and_figure(finished):
    page = (finished / "report.html").read_text()
    ids = re.findall(r'<section id="(\w+)">', page)
    assert ids == SECTIONS
    for label in (
        *("Layers", "Parameters", "Graph of kda+moe", "Memory", "Step time"),
        *("Training loss", "Tokens per"),
    ):
        assert f'aria-label="{label}' in page
    for text in ("ep_invariance", "kda.py", "approved", "slower all-gather", "3: memory"):
        assert text in page


def test_the_page_tells_structure_costs_and_regions(finished):
    page = (finished / "report.html").read_text()
    for text in ("8 layers: 4 heads, key dim 32, no rope", "What one kernel could do"):
        assert text in page
    assert "Graph of <code>kda+moe</code>, 8 layers: 5 calls, 2 regions" in page


def test_what_was_set_apart_is_told_before_and_after(finished):
    before, after = "loss 5.5 → 2.25", "perplexity 245 → 9.49"
    assert f"{before}, {after} (after step 0 and 3)" in (finished / "report.html").read_text()
    assert f"On examples set apart: {before}, {after}." in (finished / "report.md").read_text()


def test_the_page_asks_nothing_of_a_network(finished, tmp_path):
    alone = write_analysis_page(samples.analysis(), "tiny", tmp_path / "tiny.html")
    for page in ((finished / "report.html").read_text(), alone.read_text()):
        assert_self_contained(page)


def assert_self_contained(page):
    class Tags(HTMLParser):
        found: list[tuple[str, str]] = []  # noqa: RUF012

        def handle_starttag(self, tag, attrs):
            assert tag not in ("script", "link", "img", "iframe", "object")
            self.found += [(k, v or "") for k, v in attrs if k in ("src", "href", "xlink:href")]

    parser = Tags()
    parser.feed(page)
    assert all(k == "href" and v.startswith("#") for k, v in parser.found)
    assert "://" not in page
    assert not re.search(r"url\((?!#)", page)  # a pattern of the page itself is fine
    assert "@import" not in page


def test_an_analysis_is_a_page_of_its_own(tmp_path):
    page = write_analysis_page(samples.analysis(), "<tiny>", tmp_path / "tiny.html").read_text()
    assert "<title>&lt;tiny&gt;</title>" in page
    for text in ('aria-label="Graph of kda+moe', "Costs by part", "&lt;angle&gt;", "--c0:#"):
        assert text in page


def test_the_page_serves_light_and_dark(finished):
    assert "prefers-color-scheme: dark" in (finished / "report.html").read_text()


def test_what_documents_say_is_escaped(finished):
    page = (finished / "report.html").read_text()
    assert "a note with &lt;angle&gt; brackets &amp; an ampersand" in page


def test_the_comment_has_every_section_and_fits(finished):
    text = (finished / "report.md").read_text()
    assert re.findall(r"^## (\w+)", text, re.M) == [s.capitalize() for s in SECTIONS]
    assert len(text) < COMMENT_LIMIT
    assert r"no \| native operator" in text


def test_the_plan_is_a_table_that_a_comment_renders(tmp_path):
    with samples.finished_run(tmp_path) as run:
        plan = samples.plan()
        predicted = replace(
            plan.predicted, step_seconds_interval=(0.28, 0.49), memory_gib_interval=(1.2, 1.9)
        )
        write_document(replace(plan, predicted=predicted), run / "plan.json")
        write_report(run)
        text = (run / "report.md").read_text()
    section = text.partition("## Plan")[2].partition("## Review")[0]
    tables = [t.splitlines() for t in re.findall(r"(?:^\|.*\n)+", section, re.M)]
    assert len(tables) == 3
    for header, rule, *rows in tables:
        assert set(rule) == {"|", "-"}
        assert rows
        assert {row.count("|") for row in (header, rule, *rows)} == {header.count("|")}
    # 731 tokens/s at 0.35 s: 522 at 0.49 s, 914 at 0.28 s.
    assert "| 731 | 522 to 914 |" in section
    assert "| 0.35 s | 0.28 to 0.49 s | compute 57%" in section
    assert "| 1.5 of 4 GiB | 1.2 to 1.9 GiB | |" in section
    memory = [row.split("|") for row in tables[1][2:]]
    assert [name.strip() for _, name, *_ in memory][-1] == "**peak**"
    *parts, peak = (float(row[2]) for row in memory)
    assert sum(parts) == pytest.approx(peak, rel=0.01)
    assert "Rates: bandwidth default." in section


def test_what_a_finished_run_changed_is_told(tmp_path):
    refit = Refit(
        steps=3,
        step_seconds=0.4,
        step_seconds_before=0.35,
        step_seconds_after=0.4,
        peak_gib=None,
        peak_gib_before=1.5,
        peak_gib_after=1.5,
        overload=None,
        overload_planned=None,
        said=["compute takes longer than was planned"],
    )
    with samples.finished_run(tmp_path) as run:
        write_document(with_refit(samples.plan(), refit), run / "plan.json")
        page = write_report(run)
        for file in (page, run / "report.md"):
            assert file.read_text().count("compute takes longer than was planned") == 1


def test_packed_experts_stand_beside_the_plan_by_part(tmp_path):
    plan = samples.plan()
    held = replace(plan.predicted.memory_gib, frozen_weights=0.1, peak=1.2)
    packed = Alternative(
        why="with experts held packed: 1.0% less time a token",
        parallelism=plan.parallelism,
        micro_batch_size=7,
        activation_checkpointing="full",
        step_seconds=0.3,
        memory_gib=1.2,
        settings={"expert_weight_format": "mxfp4"},
        predicted=replace(plan.predicted, memory_gib=held, tokens_per_second_per_device=999.0),
        runnable=False,
        missing=["experts held packed"],
    )
    with samples.finished_run(tmp_path) as run:
        write_document(replace(plan, alternatives=[packed]), run / "plan.json")
        write_report(run)
        text = (run / "report.md").read_text()
    ours = plan.predicted.memory_gib.frozen_weights
    assert f"| frozen weights | {ours:g} | 0.1 |" in text
    assert "| **peak** | 1.5 | 1.2 |" in text
    assert "micro-batch 7, recompute full.\n\n| alternative" in text
    # Seconds of a step with other tokens compare nothing.
    assert "| 999 |" in text


def test_headings_of_what_was_not_done_stand_apart(tmp_path):
    with samples.finished_run(tmp_path) as run:
        for name in ("analysis.json", "operators.json", "plan.json", "validation.json"):
            (run / name).unlink()
        write_report(run)
        lines = (run / "report.md").read_text().splitlines()
    assert all(lines[i - 1] == "" for i, line in enumerate(lines) if line.startswith("## "))


def test_an_endless_comment_is_cut_and_says_so(tmp_path):
    with samples.finished_run(tmp_path) as run:
        plan = replace(samples.plan(), explanation=["word " * 2000] * 20)
        write_document(plan, run / "plan.json")
        write_report(run)
        text = (run / "report.md").read_text()
    assert len(text) <= COMMENT_LIMIT
    assert text.endswith("(cut here: the rest is in report.html)\n")


def test_a_run_that_stopped_early_is_reported_with_what_there_is(tmp_path):
    with open_run(tmp_path, samples.INPUTS) as run:
        write_document(
            Job(model="/models/tiny", cluster="/c/two-ranks.yaml", backend="cpu"), run / "job.json"
        )
        run.set_stage("train", "skipped", note="no --data FILE.jsonl was given")
        page = write_report(run).read_text()
    assert re.findall(r'<section id="(\w+)">', page) == SECTIONS
    assert "skipped: no --data FILE.jsonl was given" in page
    assert "pending" in page


def test_a_failed_check_is_plain_to_see(tmp_path):
    with samples.finished_run(tmp_path) as run:
        write_document(samples.validation(passed=False), run / "validation.json")
        page = write_report(run).read_text()
    assert "✗ failed" in page
    assert "**failed**" in (tmp_path / "report.md").read_text()
