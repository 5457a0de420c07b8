"""`distbench run --nodes`: its options, and the launchers by name."""

import os
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from distbench.cli.options import PluginChoice, option, say
from distbench.spec.errors import UserError
from distbench.spec.plugins import load_plugin

if TYPE_CHECKING:
    from distbench.launch import Request

ARGUMENTS = f"{__name__}.arguments"
MAX_NODES = 100_000
REQUESTS_GPUS = re.compile(r"-G|--(gpus|gres|tres-per)")  # of sbatch


class KeepsArguments(click.Command):
    """A command that stores its words in the context, for a launch on other nodes."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Store the words, then parse the words."""
        ctx.meta[ARGUMENTS] = tuple(args)
        return super().parse_args(ctx, args)


@dataclass(frozen=True)
class NodeOptions:
    """Nodes and launcher of a command."""

    nodes: int | None = option("--nodes", type=click.IntRange(1, MAX_NODES), metavar="N", help="Run on N nodes.")
    hosts: str | None = option(
        "--hosts", metavar="LIST|FILE", help="Run on these hosts: a,b, node[1-4], or a file with a host per line."
    )
    launcher: str | None = option(
        "--launcher",
        type=PluginChoice("launchers", ("torchrun", "slurm", "torchx")),
        help="Launcher of the nodes. [slurm if installed, else torchrun]",
    )
    ranks_per_node: int | None = option(
        "--ranks-per-node",
        type=click.IntRange(1),
        metavar="M",
        help="Ranks per node. [number of devices here, or from --mesh]",
    )
    launcher_args: str = option("--launcher-args", default="", metavar="WORDS", help="More arguments for the launcher.")


# Options of run for nodes. True if the option has a value.
WHERE = {word: True for node_option in fields(NodeOptions) for word in node_option.metadata["names"]}
WHERE["--dry-run"] = False


def run_on_nodes(request: "Request", where: NodeOptions, dry_run: bool, is_joined: bool) -> int:
    """Launch the command of this context on nodes, or only print the launch; return the exit code.

    Raises:
        UserError: the number of ranks is unknown or does not fit the mesh, or the launcher is not installed.
    """
    from distbench.launch import nodes, slurm
    from distbench.records.machine import accelerator_here, slug
    from distbench.spec import find, format_mesh
    from distbench.spec.job import parse_choices, variants_of
    from distbench.spec.mesh import mesh_size

    if is_joined:
        name = "--hosts" if where.hosts else "--nodes"
        raise UserError(f"{name} does not work in a process that a launcher started; leave out {name}")
    hosts = nodes.hosts_of(where.hosts) if where.hosts is not None else []
    if hosts and where.nodes not in (None, len(hosts)):
        raise UserError(f"--hosts has {len(hosts)} hosts, but --nodes is {where.nodes}; leave out --nodes")
    num_nodes, launcher = len(hosts) or where.nodes or 1, where.launcher or nodes.launcher_here()
    # An unknown scenario or axis is rejected before a job waits for nodes. An image of TorchX may have other files.
    entries = [entry for target in request.targets for entry in find(target)] if launcher != "torchx" else []
    if len(entries) == 1:  # with several scenarios, an axis may belong to some scenarios
        variants_of(entries[0], parse_choices(request.choices, entries[0].params), False)
    target = request.targets[0]
    name = Path(target.rpartition("::")[2]).stem if len(request.targets) == 1 else "run"
    try:
        extra = tuple(shlex.split(where.launcher_args))
    except ValueError as error:
        problem = f"--launcher-args {where.launcher_args!r} is not valid shell syntax ({error})"
        raise UserError(f"{problem}; quote the words as for a shell") from error
    extra = (*extra, *nodes.host_words(hosts, launcher, extra)) if hosts else extra
    device_here, num_devices = accelerator_here()
    device = request.device or device_here
    if launcher == "slurm" and request.device is None and not num_devices and not any(map(REQUESTS_GPUS.match, extra)):
        device, num_devices = slurm.devices_of_cluster(extra, lambda text: say(text, err=True))
    ranks_per_node = where.ranks_per_node or _ranks_per_node(request, num_nodes, device, num_devices)
    if request.mesh and mesh_size(request.mesh) != num_nodes * ranks_per_node:
        on_nodes = f"but {num_nodes} nodes of {ranks_per_node} ranks have {num_nodes * ranks_per_node}"
        problem = f"--mesh {format_mesh(request.mesh)} has {mesh_size(request.mesh)} ranks, {on_nodes}"
        raise UserError(f"{problem}; change --mesh or --ranks-per-node")
    launch = nodes.NodeLaunch(
        arguments=without_where(click.get_current_context().meta[ARGUMENTS]),
        num_nodes=num_nodes,
        ranks_per_node=ranks_per_node,
        device=device,
        out=request.out,
        name=f"distbench-{slug(name)}",
        extra=extra,
        timeout_s=request.timeout_s,
    )
    text_of, run = {
        "torchrun": (nodes.torchrun_lines, nodes.run_by_torchrun),
        "slurm": (slurm.slurm_text, slurm.run_by_slurm),
        "torchx": (nodes.torchx_line, nodes.run_by_torchx),
    }.get(launcher) or _plugin_launcher(launcher)
    if dry_run:
        say(text_of(launch).rstrip("\n"))
        return 0
    return run(launch, lambda text: say(text, err=True))


def _plugin_launcher(name: str) -> tuple[Callable[..., str], Callable[..., int]]:
    """Return the two functions of a plug-in's launcher: the text for --dry-run, and the start."""
    launcher = load_plugin("launchers", name)
    return launcher.text, launcher.run


def without_where(arguments: Sequence[str]) -> tuple[str, ...]:
    """Return the words of a command without the options of WHERE."""
    kept, skip = [], False
    for word in arguments:
        name, has_value, _ = word.partition("=")
        if skip:
            skip = False
        elif name in WHERE:
            skip = WHERE[name] and not has_value
        else:
            kept.append(word)
    return tuple(kept)


def on_allocation(where: NodeOptions) -> NodeOptions:
    """The options for all nodes of this shell's allocation by Slurm, if there is one and no options are given."""
    from distbench.launch.nodes import allocated_hosts

    hosts, here = allocated_hosts(os.environ), os.uname().nodename
    is_here = len(hosts) == 1 and here.partition(".")[0] == hosts[0].partition(".")[0]
    if where.nodes or where.hosts or where.launcher or is_here or not hosts:
        return where
    number = f"node {hosts[0]}" if len(hosts) == 1 else f"all {len(hosts)} nodes"
    names = "" if len(hosts) == 1 else f": {os.environ['SLURM_JOB_NODELIST']}"
    say(f"distbench: preflight on {number} of Slurm job {os.environ.get('SLURM_JOB_ID', '')}{names}", err=True)
    return replace(where, nodes=len(hosts), launcher="slurm")


def _ranks_per_node(request: "Request", num_nodes: int, device: str, num_devices: int) -> int:
    """The ranks per node, from the mesh or the number of devices per node."""
    from distbench.spec import find, format_mesh
    from distbench.spec.mesh import mesh_size

    mesh = request.mesh
    if not mesh and device != "cpu" and num_devices:
        return num_devices
    meshes = [mesh] if mesh else [entry.mesh for target in request.targets for entry in find(target)]
    sizes = {mesh_size(target_mesh) for target_mesh in meshes}
    total = max(sizes)
    if len(sizes) > 1 or total % num_nodes:
        problem = f"{format_mesh(meshes[0])} has {total} ranks, which is not divisible by {num_nodes} nodes"
        problem = problem if len(sizes) == 1 else "the scenarios have different numbers of ranks"
        raise UserError(f"{problem}; give --ranks-per-node")
    return total // num_nodes
