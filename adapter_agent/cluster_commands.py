"""`adapt cluster import|show|probe`."""

from __future__ import annotations

import contextlib
import itertools
import platform
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from adapter_agent.options import JsonOpt, QuietOpt
from adapter_agent.output import examples, print_json_of
from analyzers.errors import InputError

FormatName = Literal["slurm", "topograph", "nccl_xml", "nvidia_smi"]

OutputOpt = Annotated[
    Path | None,
    typer.Option("-o", "--output", metavar="TOPO.yaml", help="Write here, not to the terminal."),
]
ForceOpt = Annotated[bool, typer.Option("--force", help="Replace a file that is there.")]
NameOpt = Annotated[str | None, typer.Option(help="Name of the cluster; of the file by default.")]

cluster_app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Look at a cluster file, or make one.",
    epilog=examples(
        "adapt cluster show examples/clusters/supernode-128.yaml",
        "adapt cluster import /etc/slurm/topology.conf nccl-topo.xml --device h200 -o topo.yaml",
        "adapt cluster probe -o topo.yaml",
    ),
)


@cluster_app.command(
    epilog=examples(
        "adapt cluster show examples/clusters/supernode-128.yaml",
        "adapt cluster show examples/clusters/supernode-128.yaml --figure cluster.html",
    )
)
def show(
    topology: Annotated[Path, typer.Argument(metavar="TOPO.yaml", help="Cluster file.")],
    figure: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw it too: .html or .svg."),
    ] = None,
    as_json: JsonOpt = False,
) -> None:
    """The cluster as the planner sees it.

    Its tree, and every number with its origin: spec, measured, note or default.
    """
    from adapter_agent import terminal as t
    from adapter_agent.cluster_figure import write_figure
    from adapter_agent.cluster_picture import picture_of_cluster
    from strategies import load_cluster

    found = load_cluster(topology)
    if figure is not None:
        write_figure(found, figure)
    print_json_of(found) if as_json else t.show(picture_of_cluster(found))


@cluster_app.command(
    "import",
    epilog=examples(
        "adapt cluster import /etc/slurm/topology.conf --device h200 -o topo.yaml",
        "adapt cluster import topology.yaml nccl-topo.xml --device h100 --under rack1",
        "adapt cluster import topo-m.txt --device h200 --nodes 'gpu[01-16]' -o topo.yaml",
    ),
)
def import_(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE...",
            help="A tree of switches (Slurm topology.conf or .yaml, topograph model or node "
            "labels), a node's inside (NCCL topology XML, nvidia-smi topo -m), or one of each.",
        ),
    ],
    device: Annotated[str, typer.Option(help="What the nodes hold, e.g. h200.")],
    output: OutputOpt = None,
    format: Annotated[
        FormatName | None, typer.Option(help="Of a single file; its content tells otherwise.")
    ] = None,
    name: NameOpt = None,
    topology: Annotated[
        str | None, typer.Option(help="Which of the topologies in Slurm's topology.yaml.")
    ] = None,
    under: Annotated[
        str | None, typer.Option(metavar="SWITCH", help="Only what hangs on this switch.")
    ] = None,
    scale_up: Annotated[
        list[str] | None,
        typer.Option(
            metavar="LEVEL",
            help="A level that the devices' own fabric joins, e.g. leaf. Repeatable; NVLink "
            "domains and blocks of that size are taken so.",
        ),
    ] = None,
    nodes: Annotated[
        str | None,
        typer.Option(metavar="HOSTLIST", help="Nodes under one switch, where no file has a tree."),
    ] = None,
    devices_per_node: Annotated[
        int | None,
        typer.Option(min=1, max=1_000_000, help="Where no file says it; usual for the device."),
    ] = None,
    node_gbps: Annotated[
        float | None, typer.Option(help="GB/s of a device to the others of its node, one way.")
    ] = None,
    network_gbps: Annotated[
        float | None, typer.Option(help="GB/s of a device to other nodes, one way.")
    ] = None,
    force: ForceOpt = False,
) -> None:
    """Make a cluster file from what other tools wrote.

    What the files do not say is the usual machine of the device, marked with its origin.
    """
    from strategies.cluster import expand_hostlist
    from strategies.cluster.hostlist import split_hostlist
    from strategies.cluster.importers import assemble, read_foreign

    if format is not None and len(files) > 1:
        raise typer.BadParameter("is for a single file", param_hint="--format")
    _check_device(device)
    founds = [read_foreign(f, format, topology=topology) for f in files]
    try:
        named = [n for part in split_hostlist(nodes or "") for n in expand_hostlist(part)]
    except ValueError as e:
        raise InputError("--nodes", fault=str(e), fix="write e.g. gpu[01-16]") from e
    made = assemble(
        founds,
        device=device,
        devices_per_node=devices_per_node,
        node_gbps=node_gbps,
        network_gbps=network_gbps,
        nodes=named,
        under=under,
        scale_up=scale_up or (),
    )
    data: dict[str, Any] = {
        "version": 1,
        "name": _named(name) or _clean(files[0].stem) or "cluster",
        "device": device,
        "tiers": made.tiers,
    }
    if made.hostlist:
        data["nodes"] = {"names": list(made.hostlist)}
    origin = ", ".join(f"{f.path.name} ({f.format})" for f in founds)
    _finish(data, [f"adapt cluster import, from {origin}", *made.notes], output, force)


@cluster_app.command(
    epilog=examples("adapt cluster probe", "adapt cluster probe --ranks 2 -o topo.yaml")
)
def probe(
    output: OutputOpt = None,
    ranks: Annotated[
        int | None, typer.Option(min=1, help="Devices to use; all, or two ranks on a processor.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="Backend of the devices; recognised by their name.")
    ] = None,
    name: NameOpt = None,
    sizes: Annotated[
        str | None,
        typer.Option(metavar="MIB,MIB,...", help="Message sizes of the collectives."),
    ] = None,
    force: ForceOpt = False,
    quiet: QuietOpt = False,
) -> None:
    """Measure this machine.

    Copies, matrix products and collectives on all local devices, in under a minute. The cluster
    file holds what was measured in place of assumptions.
    """
    from adapter_agent.terminal import stdout_kept_clean
    from runtime.probe import describe, measure

    _check_free(output, force)
    if device is not None:
        _check_device(device)
    chosen, host = _named(name), platform.node()
    with stdout_kept_clean(), _bar(quiet) as progress:
        found = measure(ranks=ranks, sizes_mib=_sizes(sizes), progress=progress)
    data = describe(found, name=chosen or _clean(host) or "here", device=device, host=host)
    comments = [f"adapt cluster probe on {found['names'][0]}, {found['ranks']} ranks"]
    if found["host_gbps"] is None:
        comments.append("no host copies were measured: device and host memory are one")
    _finish(data, comments, output, force)


def _finish(data: dict[str, Any], comments: list[str], output: Path | None, force: bool) -> None:
    """Prints the file, or writes it and shows the cluster that it reads back as."""
    from adapter_agent.cluster_picture import picture_of_cluster
    from adapter_agent.terminal import show
    from strategies import load_cluster
    from strategies.cluster.writing import to_yaml, write_topology

    if output is None:
        typer.echo(to_yaml(data, comments), nl=False)
        return
    _check_free(output, force)
    write_topology(data, output, comments)
    show(picture_of_cluster(load_cluster(output)), *comments[1:], f"in {output}")


def _check_free(output: Path | None, force: bool) -> None:
    if output is not None and output.exists() and not force:
        raise InputError(output, fault="is there already", fix="give --force to replace it")


def _check_device(device: str) -> None:
    from analyzers.backends import backend_names, nearest_backend

    if device not in backend_names():
        fault = f"'{device}' is not a known backend"
        raise InputError("--device", fault=fault, fix=nearest_backend(device))


def _named(name: str | None) -> str | None:
    if name is not None and _clean(name) != name:
        fix = "use letters, digits, '-', '_' and '.'"
        raise InputError("--name", fault=f"{name!r} is not a name", fix=fix)
    return name


def _clean(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]", "-", text).strip("-.")[:100]


def _sizes(text: str | None) -> list[float] | None:
    if text is None:
        return None
    try:
        sizes = [float(word) for word in text.split(",")]
    except ValueError:
        sizes = []
    rising = all(a < b for a, b in itertools.pairwise(sizes))
    if not sizes or not rising or not 0 < sizes[0] <= sizes[-1] <= 65536:
        fix = "rising numbers of MiB, e.g. 0.0625,1,16"
        raise InputError("--sizes", fault=f"'{text}' is no list of sizes", fix=fix)
    return sizes


@contextlib.contextmanager
def _bar(quiet: bool) -> Iterator[Callable[[str], None]]:
    """Gives a function for lines `done/total what`: a bar on a terminal, nothing elsewhere."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    console = Console(stderr=True, highlight=False)
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    off = quiet or not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=off) as shown:
        task = shown.add_task("starting the ranks", total=None)

        def advance(line: str) -> None:
            counted, _, what = line.partition(" ")
            done, _, total = counted.partition("/")
            if done.isdecimal() and total.isdecimal():
                shown.update(task, completed=int(done), total=int(total), description=what)

        yield advance
