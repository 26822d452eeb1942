"""Why this plan, in sentences with numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict

from analyzers.numbers import number
from strategies.alternatives import settings
from strategies.answers import MOST_TOKENS, windows_in_words
from strategies.candidates import RECOMPUTATION
from strategies.problem import Problem
from strategies.schema import Alternative, EpCurve, Plan, Searched
from strategies.solver import Points, step_tokens
from strategies.space import FEATURES, divisors

FULL = RECOMPUTATION.index("full")


def explain(
    plan: Plan,
    problem: Problem,
    best: Points,
    fitting: Points,
    gains: Mapping[str, Alternative],
    *,
    allow_idle: bool,
) -> list[str]:
    """Why this plan; `gains` by the feature that is used only where allowed. With `allow_idle`
    fewer devices were tried."""
    assert plan.searched
    predicted, p = plan.predicted, plan.parallelism
    step, held, seconds = predicted.step, predicted.memory_gib, predicted.step_seconds
    low, high = predicted.step_seconds_interval or (seconds, seconds)
    least, most = predicted.memory_gib_interval or (held.peak, held.peak)
    tokens = int(step_tokens(best.plans)[0])
    said = [
        _how_it_was_found(plan.searched, len(fitting)),
        f"{settings(problem, best.plans)}: {number(seconds, 3)} s a step of {tokens:,} tokens "
        f"({number(low, 3)} to {number(high, 3)} s about four times in five), "
        f"{predicted.tokens_per_second_per_device:,.0f} tokens/s a device.",
        "Of the step, " + _shares(asdict(step), seconds) + ".",
        f"By bounds alone, before any plan is priced, none that may fit takes less than "
        f"{number(predicted.lower_bound_seconds, 3)} s for these tokens: a gap of "
        f"{predicted.optimality_gap:.0%}, which pricing then closes.",
        f"Peak memory is {held.peak:.1f} of {held.capacity:.1f} GiB ({least:.1f} to {most:.1f} "
        f"about four times in five), {_resident(plan)} over {p.fsdp * p.tp * p.pp} devices; the "
        f"chance of running out is {predicted.oom_probability:.1%}.",
    ]
    if problem.model.experts and len(fitting):
        speeds: dict[int, float] = {}
        for ep, per_token in zip(
            fitting.plans.ep.tolist(), fitting.per_token.tolist(), strict=True
        ):
            speed = 1 / per_token / problem.cluster.world_size
            speeds[ep] = max(speed, speeds.get(ep, 0.0))
        curve = ", ".join(f"EP {ep} {speeds[ep]:,.0f}" for ep in sorted(speeds))
        said.append(
            f"A token is exchanged at the experts' own width, {problem.work.expert_width}; best "
            f"tokens/s a device by EP (a divisor of {problem.model.experts} experts): {curve}."
        )
    if plan.ep_curve:
        said.append(_ep_by_tokens(plan.ep_curve, best))
    if gains:
        listed = "; ".join(a.why for a in gains.values())
        said.append(f"Priced, and used only with --allow: {listed}.")
    tried = [f for f in problem.features if f not in problem.allow]
    vain = [FEATURES[f] for f in tried if f not in gains]
    beyond = plan.searched_beyond
    if beyond:
        said.append(
            f"With all of these there are {beyond.plans:,} plans; {beyond.priced:,} "
            f"were priced, {beyond.too_large:,} cannot fit and {beyond.too_slow:,} cannot be "
            "faster, by proven bounds."
        )
    if vain:
        said.append(f"Alone, none of these would save time: {', '.join(vain)}.")
    said += [f"Of the cluster, {note}." for note in problem.cluster.notes]
    hint = None if allow_idle else _fewer_devices(problem, p.ep)
    said += [hint] if hint else []
    return [*said, _assumptions(problem, plan.dispatcher)]


def _fewer_devices(problem: Problem, ep: int) -> str | None:
    """Where the number of devices keeps a larger EP out that fewer devices would allow."""
    devices, experts = problem.cluster.world_size, problem.model.experts
    possible = [n for n in divisors(experts) if n <= devices] if experts else []
    largest = math.gcd(devices, experts)
    if ep < largest or not possible or largest == possible[-1]:
        return None
    return (
        f"EP {largest} is the largest that divides {experts} experts and {devices} devices; on "
        f"{devices - devices % possible[-1]} EP {possible[-1]} would: --allow-idle tries fewer "
        "devices."
    )


def _ep_by_tokens(curve: EpCurve, best: Points) -> str:
    planned, _, bare = (windows_in_words(w.windows) for w in curve.windows)
    said = f"With the rest of this plan kept, the fastest is {planned}"
    if curve.fits_up_to:
        fit = f"up to {curve.fits_up_to:,}" if curve.fits_up_to < MOST_TOKENS else "all of them"
        said += f" ({fit} fit)"
    if bare == planned:
        return f"{said}."
    again = "recomputation repeats the exchange and " if best.plans.recomputation[0] == FULL else ""
    return (
        f"{said}. Communication alone, with nothing hidden behind compute and no recomputation, "
        f"would say {bare}: {again}compute hides gathers of experts, which favours smaller EP."
    )


def _how_it_was_found(searched: Searched, fitting: int) -> str:
    if searched.priced == searched.plans:
        return (
            f"Of {searched.plans:,} plans {fitting:,} fit; all were priced, so by this cost model "
            "none takes less time a token."
        )
    return (
        f"Of {searched.plans:,} plans {searched.priced:,} were priced; {searched.too_large:,} "
        f"cannot fit and {searched.too_slow:,} cannot be faster, by bounds that are proven, so by "
        "this cost model none takes less time a token."
    )


def _shares(step: dict[str, float], seconds: float) -> str:
    words = {
        "all_to_all": "token exchange",
        "all_gather": "weight gathers not hidden",
        "reduce_scatter": "gradient reduction not hidden",
        "overhead": "launches and fixed costs",
        "pipeline": "pipeline bubble and sends",
    }
    parts = sorted(step.items(), key=lambda item: -item[1])
    return ", ".join(
        f"{words.get(name, name.replace('_', ' '))} {value / seconds:.0%}"
        for name, value in parts
        if value >= 0.005 * seconds
    )


def _resident(plan: Plan) -> str:
    held = plan.predicted.memory_gib
    if plan.training == "lora":
        return f"{held.frozen_weights:.1f} of it frozen weights"
    states = held.trained_weights + held.gradients + held.optimizer
    return f"{states:.1f} of it weights, gradients and optimizer states"


TRAVEL = {
    "all_to_all": "a token travels once to each rank that holds some of its experts; ",
    "hierarchical": "a token travels once to each node that holds some of its experts; ",
    "all_gather": "every token travels to all ranks of its expert-parallel group; ",
}


def _assumptions(problem: Problem, dispatcher: str) -> str:
    routing = problem.job.routing
    if routing.loads:
        spread = "routing as the given histogram"
        if len(routing.loads) != problem.model.experts:
            spread += f" of {len(routing.loads)} experts, read by quantile"
    elif routing.exponent:
        spread = f"routing by a power law of exponent {routing.exponent:g}"
    else:
        spread = "even routing"
    if not problem.model.experts:
        return "Assumed: tensor parallelism lies innermost on the devices."
    return (
        f"Assumed: {spread}; {TRAVEL.get(dispatcher, '')}tensor parallelism lies innermost on the "
        "devices."
    )
