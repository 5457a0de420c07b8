"""A launcher: Open MPI's mpirun, whose ranks get torch's variables from a shell."""

import shlex
import subprocess
from collections.abc import Callable

from distbench.launch.nodes import NodeLaunch

VARIABLES = (
    "export RANK=$OMPI_COMM_WORLD_RANK WORLD_SIZE=$OMPI_COMM_WORLD_SIZE LOCAL_RANK=$OMPI_COMM_WORLD_LOCAL_RANK "
    'LOCAL_WORLD_SIZE=$OMPI_COMM_WORLD_LOCAL_SIZE; exec "$@"'
)


def words(launch: NodeLaunch) -> list[str]:
    """Return the words of the command."""
    per_node = ["--npernode", str(launch.ranks_per_node), "-np", str(launch.num_nodes * launch.ranks_per_node)]
    return ["mpirun", *per_node, *launch.extra, "sh", "-c", VARIABLES, "sh", *launch.command]


def text(launch: NodeLaunch) -> str:
    """Return the command for a shell, as --dry-run prints it."""
    return shlex.join(words(launch))


def run(launch: NodeLaunch, report: Callable[[str], None]) -> int:
    """Run the command to its end and return its exit code; `report` prints a line on stderr."""
    report(f"mpirun starts {launch.num_nodes * launch.ranks_per_node} ranks")
    return subprocess.run(words(launch), check=False).returncode
