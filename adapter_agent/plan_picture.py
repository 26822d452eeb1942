"""A plan, and the answers about plans, as they are shown in a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.text import Text

from adapter_agent.terminal import bar, new_table
from adapter_agent.words import around_experts, details, memory_by_part, packed_of, shape
from analyzers.numbers import number
from strategies.answers import Answer, Degraded, windows_in_words
from strategies.schema import EpCurve

if TYPE_CHECKING:
    from strategies.schema import Alternative, Plan


def picture(said: Any) -> RenderableType:
    """Of whatever `adapt plan` found."""
    if isinstance(said, Answer):
        return picture_of_answer(said)
    if isinstance(said, EpCurve):
        return picture_of_ep_curve(said)
    if isinstance(said, list):
        return picture_of_degraded(said)
    return picture_of_plan(said)


def picture_of_plan(plan: Plan) -> RenderableType:
    p = plan.predicted
    idle = f", {plan.idle_devices} idle" if plan.idle_devices else ""
    where = shape(plan) + (f" on {plan.world_size} devices" if plan.world_size > 1 else "")
    low, high = p.step_seconds_interval or (p.step_seconds, p.step_seconds)
    head = Text.assemble(
        (f"{where} of {plan.cluster}{idle}\n", "bold"),
        f"micro-batch {plan.micro_batch_size} x {plan.sequence_length} tokens, "
        f"{plan.gradient_accumulation} a step, {details(plan)}\n",
        f"predicted {number(p.step_seconds, 3)} s a step ({number(low, 3)} to {number(high, 3)}), "
        f"{number(p.tokens_per_second_per_device)} tokens/s a device, lower bound "
        f"{number(p.lower_bound_seconds, 3)} s (gap {p.optimality_gap:.0%}), "
        f"out of memory {p.oom_probability:.0%}\n",
    )
    if plan.missing:
        head.append(f"The runtime cannot run it: it lacks {', '.join(plan.missing)}.\n", "bold")
    step = new_table(f"Step: {number(p.step_seconds)} s", "part", ">ms", "")
    for name, value in vars(p.step).items():
        if value:
            step.add_row(name, number(1e3 * value), bar(value, p.step_seconds))
    pictures: list[RenderableType] = [head, _memory(plan), step]
    if plan.alternatives:
        pictures.append(_alternatives(plan.alternatives))
    if plan.families:
        lost = new_table("Not chosen", "family", "the limit that binds")
        for family, limit in plan.families.items():
            lost.add_row(family, limit)
        pictures.append(lost)
    lines = [*plan.explanation, *(f"rejected {n}: {why}" for why, n in plan.rejected.items())]
    return Group(*pictures, *(Text(line) for line in lines))


def _memory(plan: Plan) -> RenderableType:
    """By part; beside it the plan with packed experts, where the checkpoint packs them."""
    held, packed = plan.predicted.memory_gib, packed_of(plan)
    columns = ["part", f">{plan.expert_weight_format or ''} GiB", ""]
    if packed:
        columns.append(f">{packed.settings.get('expert_weight_format', 'packed')} GiB")
    made = new_table(f"Memory: {number(held.peak)} of {number(held.capacity)} GiB", *columns)
    for name, value, theirs in memory_by_part(plan):
        cells = [name, number(value), bar(value, held.capacity)]
        made.add_row(*cells, *([number(theirs)] if packed else []))
    if packed and packed.predicted:
        speeds = (p.tokens_per_second_per_device for p in (plan.predicted, packed.predicted))
        ours, theirs = map(number, speeds)
        made.add_row("peak", number(held.peak), "", number(packed.memory_gib))
        made.add_row("tokens/s a device", ours, "", theirs)
        if around_experts(packed) != around_experts(plan):
            return Group(made, Text(f"Packed, the fastest is {around_experts(packed)}.\n"))
    return made


def _alternatives(alternatives: list[Alternative]) -> RenderableType:
    made = new_table(
        "Alternatives", "plan", ">batch", "recompute", ">tokens/s a device", ">GiB", "runs", "why"
    )
    for a in alternatives:
        made.add_row(
            shape(a),
            str(a.micro_batch_size),
            a.activation_checkpointing,
            number(a.predicted.tokens_per_second_per_device) if a.predicted else "-",
            number(a.memory_gib),
            "yes" if a.runnable else "not yet",
            a.why,
        )
    return made


def picture_of_answer(answer: Answer) -> RenderableType:
    lines = [
        f"{answer.settings}: {number(answer.step_seconds, 3)} s a step, "
        f"{number(answer.tokens_per_second_per_device)} tokens/s a device, "
        f"{number(answer.memory_gib)} of {number(answer.capacity_gib)} GiB",
        f"limit: {answer.limit}",
    ]
    if answer.missing:
        lines.append(f"the runtime cannot run it yet: it lacks {', '.join(answer.missing)}")
    unit = answer.unit.removesuffix("s") if answer.value == 1 else answer.unit
    return Group(Text(f"{answer.value:,} {unit}", "bold"), *map(Text, lines))


def picture_of_ep_curve(curve: EpCurve) -> RenderableType:
    eps = sorted({ep for row in curve.rows for ep in row.by_ep})
    made = new_table("Seconds of a micro-batch", ">tokens a rank", *(f">EP {ep}" for ep in eps))
    for row in curve.rows:
        cells = []
        for ep in eps:
            cell = row.by_ep[ep]
            text = number(cell.seconds, 3) + ("" if cell.fits else " *")
            cells.append(Text(text, "bold" if ep == row.fastest else ""))
        made.add_row(f"{row.tokens_per_rank:,}", *cells)
    if len(eps) == 1:
        said = "No other EP divides both this plan's shards and the experts"
        fix = "--fix fsdp=N or --fix ep=N keeps another plan"
        return Group(Text(curve.kept), made, Text(f"{said}: {fix}."))
    lines = [f"{w.assumed}: best is {windows_in_words(w.windows)}" for w in curve.windows]
    fit = f"up to {curve.fits_up_to:,} tokens a rank fit" if curve.fits_up_to else "none fits"
    last = f"windows are in steps of 4 %; {fit}, * does not"
    return Group(Text(curve.kept), made, *map(Text, [*lines, last]))


def picture_of_degraded(found: list[Degraded]) -> RenderableType:
    made = new_table(
        f"Links at {found[0].scale:.0%} of their rate",
        "tier",
        ">same plan",
        ">planned anew",
        "then",
    )
    for d in found:
        then = d.settings if d.changed else "the same plan stays best"
        made.add_row(d.tier, f"x{d.same_plan:.3f}", f"x{d.best_plan:.3f}", then)
    return made
