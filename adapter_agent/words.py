"""Numbers and shapes in the words that people read them in."""

from __future__ import annotations

from typing import TYPE_CHECKING

from analyzers.numbers import number

if TYPE_CHECKING:
    from analyzers.schema import ModelAnalysis
    from strategies.schema import Alternative, Plan

GIB = 2**30


def count(n: float) -> str:
    """A count for people: `2.78 T`, `104 B`, `7.1 M`."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if n >= size:
            return f"{number(n / size, 3)} {letter}"
    return f"{n:.0f}"


def size(n: float) -> str:
    """Bytes for people: `1.42 TiB`, `5.71 MiB`."""
    for power, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if n >= 2**power:
            return f"{number(n / 2**power, 3)} {unit}"
    return f"{n:.0f} B"


def parameters_by_part(analysis: ModelAnalysis) -> dict[str, int]:
    """Parameters of the whole model by part, largest first."""
    sizes: dict[str, int] = {}
    for block in analysis.blocks:
        for part in block.parts:
            sizes[part.name] = sizes.get(part.name, 0) + part.parameters * len(block.layers)
    for part in analysis.outer:
        sizes[part.name] = sizes.get(part.name, 0) + part.parameters
    return dict(sorted(sizes.items(), key=lambda item: -item[1]))


def shape(plan: Plan | Alternative) -> str:
    """The axes of a plan that are larger than one, e.g. `fsdp 2 x ep 2`; without expert parallelism
    the shards of experts are those of everything."""
    p = plan.parallelism
    axes = {k: n for k, n in vars(p).items() if n > 1 and (k != "efsdp" or p.ep > 1)}
    return " x ".join(f"{name} {size}" for name, size in axes.items()) or "one device"


def details(plan: Plan) -> str:
    """`recompute full, experts in bf16, dispatch all_to_all`; of experts only where it has some."""
    said = f"recompute {plan.activation_checkpointing}"
    if plan.has_experts:
        said += f", experts in {plan.expert_weight_format}, dispatch {plan.dispatcher}"
    return said


def packed_of(plan: Plan) -> Alternative | None:
    """The alternative that differs by packed experts alone, where there is one."""
    return next((a for a in plan.alternatives if a.missing == ["experts held packed"]), None)


def around_experts(plan: Plan | Alternative) -> str:
    """What decides memory beside the format of experts."""
    recomputation = plan.activation_checkpointing
    return f"{shape(plan)}, micro-batch {plan.micro_batch_size}, recompute {recomputation}"


def memory_by_part(plan: Plan) -> list[tuple[str, float, float]]:
    """GiB of each part of the plan, and of the plan with packed experts (0 without one)."""
    packed = packed_of(plan)
    ours = vars(plan.predicted.memory_gib)
    theirs = vars(packed.predicted.memory_gib) if packed and packed.predicted else {}
    rows = [(name, gib, theirs.get(name, 0.0)) for name, gib in ours.items()]
    return [r for r in rows if r[0] not in ("peak", "capacity") and (r[1] or r[2])]


def letters(analysis: ModelAnalysis) -> dict[str, str]:
    """Mixer -> the first letter of its name that no earlier mixer took; a dash for none."""
    found: dict[str, str] = {}
    for layer in analysis.layers:
        if layer.mixer not in found:
            free = (c for c in layer.mixer.upper() if c.isalpha() and c not in found.values())
            found[layer.mixer] = "-" if layer.mixer == "none" else next(free, "?")
    return found


def layer_legend(analysis: ModelAnalysis) -> str:
    names = ", ".join(f"{letter} {mixer}" for mixer, letter in letters(analysis).items())
    dense = [layer.index for layer in analysis.layers if layer.feed_forward == "dense"]
    if not dense or len(dense) == len(analysis.layers):
        return names
    which = f"layer {dense[0]}" if len(dense) == 1 else f"{len(dense)} layers"
    return f"{names}; dense feed-forward in {which}"


def layer_pattern(analysis: ModelAnalysis) -> str:
    """The mixers in order with repeats folded, e.g. `KKKM x6 KKM`."""
    names = letters(analysis)
    text = "".join(names[layer.mixer] for layer in analysis.layers)
    folded: list[str] = []
    plain = ""
    while text:
        best, repeats = 1, 1
        for unit in range(1, min(16, len(text) // 2) + 1):
            times = 1
            while text.startswith(text[:unit], unit * times):
                times += 1
            if times > 1 and unit * times > max(3, best * repeats):
                best, repeats = unit, times
        if repeats == 1:
            plain += text[0]
        else:
            folded += [plain] * bool(plain) + [f"{text[:best]} x{repeats}"]
            plain = ""
        text = text[best * repeats :]
    return " ".join(folded + [plain] * bool(plain))
