"""`distbench run --nodes`: options that say on which nodes, and the launchers by name."""

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from distbench.cli.output import say
from distbench.spec.devices import ANY_ACCELERATOR
from distbench.spec.errors import UserError

# The launchers by name, as distbench/nodes has them: `--help` must not pay for importing it.
LAUNCHERS = ("torchrun", "slurm", "torchx")
# Options of run that say where; True: they take a value.
WHERE = {"--nodes": True, "--launcher": True, "--ranks-per-node": True, "--launcher-args": True, "--dry-run": False}
WHERE_PARAMETERS = ("nodes", "launcher", "ranks_per_node", "launcher_args")
ARGUMENTS = f"{__name__}.arguments"
MAX_NODES = 100_000
ASKS_FOR_GPUS = re.compile(r"-G|--(gpus|gres|tres-per)")  # of sbatch
NO_DEVICE_ASKED = (
    "distbench: warning: the job requests no GPUs, since this machine has none{}. Give --device "
    f"({ANY_ACCELERATOR}), or --device cpu"
)
CLUSTER_HAS = ", and nodes of this cluster have GPUs"


class KeepsArguments(click.Command):
    """A command that can be given again elsewhere: its words are kept in the context."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Keep the words, then read them."""
        ctx.meta[ARGUMENTS] = tuple(args)
        return super().parse_args(ctx, args)


def node_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that say where."""
    for add in reversed(
        (
            click.option("--nodes", type=click.IntRange(1, MAX_NODES), metavar="N", help="Run on N nodes."),
            click.option("--launcher", type=click.Choice(LAUNCHERS), help="[slurm where it is, else torchrun]"),
            click.option(
                "--ranks-per-node", type=click.IntRange(1), metavar="M", help="[devices here, or from --mesh]"
            ),
            click.option("--launcher-args", default="", metavar="WORDS", help="Further words for the launcher."),
        )
    ):
        command = add(command)
    return command


def run_on_nodes(
    scenarios: tuple[str, ...], mesh: Mapping[str, int] | None, is_joined: bool, asked: Mapping[str, Any]
) -> int:
    """Launch the command of this context on nodes, or only print how; the exit code.

    Raises:
        UserError: ranks that cannot be counted or do not fit the mesh, or a launcher that is not here.
    """
    from distbench.launch.nodes import NodeLaunch, launcher_here
    from distbench.launch.slurm import has_gpus, run_by_slurm, slurm_text
    from distbench.launch.torchrun import run_by_torchrun, torchrun_lines
    from distbench.launch.torchx import run_by_torchx, torchx_line

    if is_joined:
        raise UserError("--nodes launches ranks, and this process is one already; leave it out under a launcher")
    num_nodes, launcher = asked["nodes"] or 1, asked["launcher"] or launcher_here()
    if launcher != "torchx":  # whose image may have other files
        _require_scenarios(scenarios, asked["choices"])
    device, ranks_per_node = _ranks_per_node(scenarios, mesh, num_nodes, asked)
    launch = NodeLaunch(
        arguments=without_where(click.get_current_context().meta[ARGUMENTS]),
        num_nodes=num_nodes,
        ranks_per_node=ranks_per_node,
        device=device,
        out=Path(asked["out"]),
        name=_name(scenarios),
        extra=_words(asked["launcher_args"]),
        timeout_s=asked["timeout_s"],
    )
    asks = asked["device"] or device != "cpu" or any(ASKS_FOR_GPUS.match(word) for word in launch.extra)
    # A batch file may be written where there is no Slurm to ask: then nobody knows what its nodes have.
    if launcher == "slurm" and not asks and (have_gpus := has_gpus()) is not False:
        say(NO_DEVICE_ASKED.format(CLUSTER_HAS if have_gpus else ""), err=True)
    if asked["dry_run"]:
        texts = {"torchrun": torchrun_lines, "slurm": slurm_text, "torchx": torchx_line}
        say(texts[launcher](launch).rstrip("\n"))
        return 0
    run = {"torchrun": run_by_torchrun, "slurm": run_by_slurm, "torchx": run_by_torchx}[launcher]
    return run(launch, lambda text: say(text, err=True))


def _require_scenarios(scenarios: tuple[str, ...], choices: tuple[str, ...]) -> None:
    """Refuse before a job waits for its nodes what its ranks would refuse: a scenario or an axis that is none."""
    from distbench.spec import find
    from distbench.spec.job import parse_choices, variants_of

    entries = [entry for target in scenarios for entry in find(target)]
    if len(entries) == 1:  # with several, an axis may be of some of them
        variants_of(entries[0], parse_choices(choices, entries[0].params), False)


def without_where(arguments: Sequence[str]) -> tuple[str, ...]:
    """A command's words without those that say where it runs."""
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


def _words(text: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise UserError(f"--launcher-args {text!r} is not closed ({error}); quote it as for a shell") from error


def _name(scenarios: tuple[str, ...]) -> str:
    from distbench.records.machine import slug

    return "distbench-" + slug(Path(scenarios[0].rpartition("::")[2]).stem if len(scenarios) == 1 else "run")


def _ranks_per_node(
    scenarios: tuple[str, ...], mesh: Mapping[str, int] | None, num_nodes: int, asked: Mapping[str, Any]
) -> tuple[str, int]:
    """Type of device, and ranks on each node: as asked, from the mesh, or as many as there are devices here."""
    from distbench.records.machine import accelerator_here
    from distbench.spec import find, format_mesh
    from distbench.spec.mesh import mesh_size

    here, num_devices = accelerator_here()
    device = asked["device"] or here
    sizes = [mesh] if mesh else [entry.mesh for target in scenarios for entry in find(target)]
    given, wanted = asked["ranks_per_node"], {mesh_size(size) for size in sizes}
    if given is None and not mesh and device != "cpu" and num_devices:
        given = num_devices
    if given is None:
        total = max(wanted)
        if len(wanted) > 1 or total % num_nodes:
            what = f"{format_mesh(sizes[0])} has {total} ranks, which {num_nodes} nodes do not share evenly"
            raise UserError(f"{what if len(wanted) == 1 else 'scenarios of several sizes'}; say --ranks-per-node")
        given = total // num_nodes
    if mesh and mesh_size(mesh) != num_nodes * given:
        what = f"--mesh {format_mesh(mesh)} has {mesh_size(mesh)} ranks, {num_nodes} nodes of {given} have"
        raise UserError(f"{what} {num_nodes * given}; give sizes that multiply to that")
    return device, given
