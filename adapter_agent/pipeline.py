"""The main job as a LangGraph graph whose checkpoints lie in the run directory.

State is plain JSON: file names and hashes. The documents themselves are on disk, so that a killed
run goes on from the last finished stage, and a stage that ended just before the kill is recognised.
"""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import time
import traceback
from contextlib import closing
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from adapter_agent.run_directory import STAGES, sha256_text
from adapter_agent.stages import WORK, Context, Outcome
from analyzers.errors import AdaptError, InputError, ProofError

if TYPE_CHECKING:
    from langchain_core.runnables import RunnableConfig

Ending = Literal["done", "stopped", "waiting"]


class StageError(AdaptError):
    """A stage broke in a way that no user caused."""


class State(TypedDict, total=False):
    run_dir: str
    documents: dict[str, str]
    """Path inside the run directory -> sha256, of the stage that ran last."""
    failed: str
    """What a failed validation said; empty while all is well."""


def run_pipeline(context: Context, *, until: str | None = None) -> Ending:
    """Runs the stages that are not finished, in order, up to and including `until`.

    Returns `waiting` when a person must decide first, `stopped` when it ended at `until`. Raises
    what a stage raises, and ProofError when the validation failed (after the report is written).
    """
    left = [s for s in STAGES if not context.run.is_finished(s, _inputs_sha256(context, s))]
    end = STAGES.index(until) if until else len(STAGES) - 1
    for stage in STAGES[: STAGES.index(left[0])] if left else STAGES:
        context.terminal.settle(f"{stage}: finished before, kept")
    if not left or STAGES.index(left[0]) > end:
        return "done" if not left else "stopped"
    state = _invoke(context, first=left[0], until=until)
    if "__interrupt__" in state:
        return "waiting"
    if state.get("failed"):
        raise ProofError(f"validation failed: {state['failed']}")
    return "done" if end == len(STAGES) - 1 else "stopped"


def _invoke(context: Context, *, first: str, until: str | None) -> dict[str, Any]:
    # Read by langgraph at import: checkpoints hold plain data only.
    os.environ["LANGGRAPH_STRICT_MSGPACK"] = "true"
    from langgraph.checkpoint.sqlite import SqliteSaver
    from langgraph.graph import END, START, StateGraph

    graph = StateGraph(State)
    for stage in STAGES:
        graph.add_node(stage, _node(context, stage))
    graph.add_edge(START, STAGES[0])
    for stage, following in pairwise(STAGES):
        if stage == "validate":
            # A plan that was not proved is reported, not trained.
            graph.add_conditional_edges(
                stage,
                lambda state: "report" if state.get("failed") else "train",
                ["train", "report"],
            )
        else:
            graph.add_edge(stage, following)
    graph.add_edge(STAGES[-1], END)

    path = context.run / "checkpoints.sqlite"
    with closing(sqlite3.connect(path, check_same_thread=False)) as database:
        pipeline = graph.compile(checkpointer=SqliteSaver(database))
        thread = sha256_text(json.dumps(context.run.record.inputs, sort_keys=True))[:16]
        config: RunnableConfig = {"configurable": {"thread_id": thread}}
        # The checkpoint goes on where it stopped, unless documents before that point have changed.
        try:
            goes_on = pipeline.get_state(config).next == (first,)
        except sqlite3.DatabaseError as e:
            fix = "delete it: finished stages are recognised without it"
            raise InputError(path, fault=f"cannot be read: {e}", fix=fix) from e
        return pipeline.invoke(
            None if goes_on else State(run_dir=str(context.run.path), failed=""),
            config,
            durability="sync",
            interrupt_after=[until] if until and until != STAGES[-1] else None,
        )


def _node(context: Context, name: str) -> Any:
    def node(state: State) -> State:
        failed = state.get("failed", "")
        inputs = _inputs_sha256(context, name)
        if not context.run.is_finished(name, inputs):
            outcome = run_stage(context, name, inputs)
            if outcome.state == "failed":
                failed = outcome.note
        return State(documents=context.run.hashes(list(WORK[name].writes)), failed=failed)

    return node


def run_stage(context: Context, name: str, inputs_sha256: str | None = None) -> Outcome:
    """Runs one stage now and records how it went.

    What a stage raises and a user did not cause is a bug: its traceback goes to `error.log`.
    """
    from langgraph.errors import GraphInterrupt

    run, start = context.run, time.monotonic()
    inputs = inputs_sha256 or _inputs_sha256(context, name)
    if run.record.stages[name].inputs_sha256 not in ("", inputs):
        for folder in WORK[name].resumes:
            shutil.rmtree(run / folder, ignore_errors=True)
    run.set_stage(name, "running", note="", inputs_sha256=inputs, outputs={})

    def progress(line: str) -> None:
        run.event(name, "progress", line=line)
        context.progress(f"{name}: {line}")

    try:
        outcome = WORK[name].work(replace(context, progress=progress))
    except GraphInterrupt:
        run.set_stage(name, "waiting", note="waiting for review")
        raise
    except AdaptError as e:
        run.set_stage(name, "failed", note=str(e))
        raise
    except Exception as e:
        lines = [line.strip() for line in str(e).splitlines() if line.strip()]
        # What a failed rank said ends with its own error: the first line alone says only "failed".
        said = " ".join(dict.fromkeys([*lines[:1], *lines[-1:]]))
        run.set_stage(name, "failed", note=said or type(e).__name__)
        log = run / "error.log"
        with log.open("a", encoding="utf-8") as f:
            f.write(traceback.format_exc() + "\n")
        raise StageError(f"{name}: {type(e).__name__}: {said} (traceback in {log})") from e
    run.set_stage(
        name,
        outcome.state,
        note=outcome.note,
        seconds=round(time.monotonic() - start, 3),
        outputs=run.hashes(list(WORK[name].writes)),
    )
    context.terminal.settle(f"{name}: {outcome.state}: {outcome.note}")
    return outcome


def _inputs_sha256(context: Context, name: str) -> str:
    stage = WORK[name]
    made_from = context.run.record.inputs
    options = {key: made_from[key] for key in stage.inputs}
    return sha256_text(json.dumps([options, context.run.hashes(list(stage.reads))], sort_keys=True))
