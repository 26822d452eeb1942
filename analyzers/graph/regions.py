"""The calls of a canonical block graph, and the sets of them that one kernel could do together.

Views move no data, so they are no calls here: who reads a view reads the call behind it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import sympy
import torch
from torch import fx

from analyzers.graph.passes import is_layout, is_mutating, is_pointwise, operator, tensors, word
from analyzers.schema import Graph, GraphNode, PartName, Region, RegionKind, Work

Length = int | sympy.Symbol

ATTENTION = {
    "scaled_dot_product_attention",
    "sparse_attention",
    "kda",
    "gated_delta_rule",
    "compressed_attention",
    "lightning",
    "gla",
    "mamba2",
    "selective_scan",
    "mlstm",
    "rg_lru",
    "wkv",
}
NORMS = {"rms_norm", "gated_rms_norm", "layer_norm"}
MIXING = {"attention_residual", "hyper_connection"}
ACTIVATIONS = {"silu", "gelu", "sigmoid", "tanh", "relu", "softplus", "mish", "hardtanh"}


@dataclass(eq=False)
class Call:
    """A call that computes or copies. `reads` holds the calls it reads with the tensor it sees of
    each; `escapes` tells whether the block returns the result or a view of it."""

    name: str
    operator: str
    path: str
    part: PartName
    pointwise: bool
    word: str
    """`mul` for every overload of it."""
    value: object
    position: int
    reads: list[tuple[Call, torch.Tensor]] = field(default_factory=list)
    readers: list[Call] = field(default_factory=list)
    outside: int = 0
    """Activations from outside the block that it reads."""
    escapes: bool = False


def calls_of(graph_module: fx.GraphModule) -> list[Call]:
    """The calls of a canonical graph in its order."""
    calls: list[Call] = []
    names: Counter[str] = Counter()
    behind: dict[fx.Node, list[Call]] = {}  # the calls whose results a node holds or views
    given: set[fx.Node] = set()  # activations from outside, and views of them
    writers: dict[Call, list[Call]] = {}  # of the result of a call, in place
    for node in graph_module.graph.nodes:
        made = [(c, n) for n in node.all_input_nodes for c in behind.get(n, [])]
        sources = [(c, n) for call, n in made for c in (call, *writers.get(call, []))]
        outside = sum(n in given for n in node.all_input_nodes)
        if node.op == "placeholder" and node.meta.get("role", "input") == "input":
            given.add(node)
        if node.op == "output":
            for call, _ in sources:
                call.escapes = True
            continue
        if node.op not in ("call_function", "call_module"):
            continue
        value = node.meta.get("val")
        if not list(tensors(value)):  # a size
            continue
        if is_layout(node):
            behind[node] = list(dict.fromkeys(call for call, _ in sources))
            given |= {node} if outside else set()
            continue
        call = Call(
            name=_unique(node, names),
            operator=operator(node),
            path=node.meta.get("path", ""),
            part=node.meta.get("part", "other"),
            pointwise=is_pointwise(node),
            word=word(node),
            value=value,
            position=len(calls),
            outside=outside,
        )
        for source, seen in sources:
            call.reads += [(source, tensor) for tensor in tensors(seen.meta.get("val"))]
            if call not in source.readers:
                source.readers.append(call)
        calls.append(call)
        behind[node] = [call]
        if is_mutating(node):
            for written in behind.get(node.args[0], []):
                writers.setdefault(written, []).append(call)
                behind[node] = [written]
    return calls


def _unique(node: fx.Node, names: Counter[str]) -> str:
    """`self_attn.q_proj.linear`; a second one gets `_1`."""
    name = ".".join(filter(None, (node.meta.get("path", ""), word(node))))
    names[name] += 1
    return name if names[name] == 1 else f"{name}_{names[name] - 1}"


# ------------------------------------------------------------------------------------- regions


def find_regions(calls: list[Call], *, batch: Length, sequence: Length) -> list[Region]:
    """Disjoint sets of calls that one kernel could do, in the graph's order.

    A named pattern wins over a plain chain of elementwise calls and takes in the elementwise calls
    that feed it alone. `batch` and `sequence` are the sizes in the fake tensors of the graph: the
    symbol where the size is one, else a number, and for the sequence a prime that divides no width.
    """
    finder = _Finder(calls)
    finder.attention()
    finder.residuals()
    finder.norm_gates()
    finder.norm_projections()
    finder.chains()
    found = sorted(finder.found, key=lambda item: min(c.position for c in item[1]))
    numbers: Counter[str] = Counter()
    regions = []
    for kind, members in found:
        avoided = _bytes_avoided(members, batch, sequence)
        if avoided == Work():  # what is computed of weights alone
            continue
        nodes = [c.name for c in sorted(members, key=lambda c: c.position)]
        name = f"{kind}_{numbers[kind]}"
        regions.append(Region(name=name, kind=kind, nodes=nodes, bytes_avoided=avoided))
        numbers[kind] += 1
    return regions


class _Finder:
    def __init__(self, calls: list[Call]) -> None:
        self.calls = calls
        self.taken: set[Call] = set()
        self.found: list[tuple[RegionKind, set[Call]]] = []
        # Bit sets of positions: what lies before and after each call.
        self.before = [0] * len(calls)
        self.after = [0] * len(calls)
        for call in calls:
            for source, _ in call.reads:
                self.before[call.position] |= self.before[source.position] | 1 << source.position
        for call in reversed(calls):
            for reader in call.readers:
                self.after[call.position] |= self.after[reader.position] | 1 << reader.position

    def attention(self) -> None:
        """Attention, then norm or gate, then the projection of the output."""
        for start in self.calls:
            if start.operator not in ATTENTION or start in self.taken:
                continue
            members, last, gated = {start}, start, False
            while len(last.readers) == 1 and not last.escapes:
                last = last.readers[0]
                members.add(last)
                if last.operator == "linear":
                    break
                if not last.pointwise and last.operator not in NORMS:
                    break
                gated |= last.operator in NORMS or _is_gate(last)
            if gated and last.operator == "linear":
                self.take("attention_norm_gate_projection", members)

    def residuals(self) -> None:
        """Mixing of residual streams, or the addition to one, with the norm that reads it or, where
        norms follow the sublayers, that it reads."""
        for call in self.calls:
            adds = call.word == "add" and _is_gate(call)
            if call.operator not in MIXING and not adds:
                continue
            after = [r for r in call.readers if r.operator in NORMS]
            before = [s for s, _ in call.reads if s.operator in NORMS and s.readers == [call]]
            if after or before:
                self.take("residual_mixing", {call, (after or before)[0]})

    def norm_gates(self) -> None:
        """A norm whose result is multiplied by a gate and read by nothing else."""
        for call in self.calls:
            if call.operator not in NORMS or len(call.readers) != 1 or call.escapes:
                continue
            reader = call.readers[0]
            if reader.word == "mul" and _is_gate(reader):
                self.take("norm_gate", {call, reader})

    def norm_projections(self) -> None:
        """A norm with all free projections that read it."""
        for call in self.calls:
            if call.operator in NORMS:
                linears = {r for r in call.readers if r.operator == "linear"} - self.taken
                if linears:
                    self.take("norm_projection", {call, *linears})

    def chains(self) -> None:
        """What is left of elementwise calls, in the largest sets that exchange nothing with the
        outside halfway."""
        own = {c: {c} for c in self.calls if c.pointwise and c not in self.taken}
        for call in own:
            if call.escapes or not call.readers or not all(r in own for r in call.readers):
                continue
            merged = own[call].union(*(own[r] for r in call.readers))
            if self.legal(merged) and all(_is_closed(c, merged) for c in merged):
                for member in merged:
                    own[member] = merged
        for chain in {id(s): s for s in own.values() if len(s) > 1}.values():
            self.take(
                "gated_activation" if _is_gated_activation(chain) else "pointwise_chain", chain
            )

    def take(self, kind: RegionKind, members: set[Call]) -> None:
        """Claims a region, with the elementwise calls that feed nothing else, if it is legal."""
        if members & self.taken or not self.legal(members):
            return
        pending = list(members)
        while pending:
            for source, _ in pending.pop().reads:
                if source in members or source in self.taken or not source.pointwise:
                    continue
                if source.escapes or not all(r in members for r in source.readers):
                    continue
                if self.legal(members | {source}):
                    members.add(source)
                    pending.append(source)
        self.taken |= members
        self.found.append((kind, members))

    def legal(self, members: Iterable[Call]) -> bool:
        """Whether no path leaves the set and comes back: one kernel must be able to run it."""
        inside = before = after = 0
        for call in members:
            inside |= 1 << call.position
            before |= self.before[call.position]
            after |= self.after[call.position]
        return not before & after & ~inside


def _is_gate(call: Call) -> bool:
    """Whether two activations meet in an elementwise call."""
    return call.pointwise and len({source for source, _ in call.reads}) + call.outside > 1


def _is_closed(call: Call, members: set[Call]) -> bool:
    """Whether a call with a reader inside has none outside."""
    inside = [r in members for r in call.readers]
    return not any(inside) or (all(inside) and not call.escapes)


def _is_gated_activation(chain: set[Call]) -> bool:
    """Whether a chain is `act(gate) * up` between projections."""
    last = max(chain, key=lambda c: c.position)
    sources = {source for call in chain for source, _ in call.reads} - chain
    return (
        any(c.word in ACTIVATIONS for c in chain)
        and any(c.word == "mul" and _is_gate(c) for c in chain)
        and bool(last.readers)
        and all(r.operator == "linear" for r in last.readers)
        and all(s.operator == "linear" for s in sources)
    )


# ---------------------------------------------------------------------------------------- bytes


def _bytes_avoided(members: set[Call], batch: Length, sequence: Length) -> Work:
    """Reads of the members' results inside the region, and the writing of those that nobody reads
    outside."""
    total = Work()
    for call in members:
        inside = [r for r in call.readers if r in members]
        if not inside:
            continue
        for reader in inside:
            seen = [t for source, t in reader.reads if source is call]
            total += min(
                (_bytes(seen, batch, sequence), _bytes(call.value, batch, sequence)),
                key=lambda work: work.at(4096),
            )
        if _is_closed(call, members):
            total += _bytes(call.value, batch, sequence)
    return total


def _bytes(value: object, batch: Length, sequence: Length) -> Work:
    total = Work()
    for tensor in tensors(value):
        elements, power = _growth(tensor.numel(), batch, sequence)
        if power == 1:
            total += Work(per_token=elements * tensor.element_size())
        elif power >= 2:
            total += Work(per_pair=elements * tensor.element_size())
    return total


def _growth(numel: int | torch.SymInt, batch: Length, sequence: Length) -> tuple[float, int]:
    """Elements a token (or pair, ...) and the power of the sequence length that they grow with."""
    size = numel.node.expr if isinstance(numel, torch.SymInt) else sympy.Integer(numel)
    size = size.subs(batch, 1) if isinstance(batch, sympy.Symbol) else size / batch
    if size.free_symbols - {sequence}:  # a size that the data decide
        return 0.0, 0
    if isinstance(sequence, sympy.Symbol):
        far = 2**40  # beyond any rounding to blocks inside the expression
        once, twice = (float(size.subs(sequence, n)) for n in (far, 2 * far))
        power = round(math.log2(twice / once)) if once else 0
        return once / float(far) ** power, power
    elements, power = float(size), 0
    while elements and elements % sequence == 0:
        elements, power = elements / sequence, power + 1
    return elements, power


# ------------------------------------------------------------------------------------- document


def to_document(calls: list[Call], regions: list[Region]) -> Graph:
    """The calls and regions as `schema.Graph` (its other fields are the capture's)."""
    region = {name: r.name for r in regions for name in r.nodes}
    nodes = [
        GraphNode(
            name=call.name,
            operator=call.operator,
            path=call.path,
            part=call.part,
            inputs=list(dict.fromkeys(source.name for source, _ in call.reads)),
            region=region.get(call.name),
        )
        for call in calls
    ]
    return Graph(nodes=nodes, regions=regions)
