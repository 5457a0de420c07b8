"""Who the ranks are: started by us with torchrun, or this process is one, started by torchrun or srun."""

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from distbench.spec import UserError
from distbench.spec.devices import NUMA_BINDING
from distbench.spec.job import PARENT_PID

SRUN_PORT = 29517
MAX_NODES = 1 << 16


@dataclass(frozen=True)
class Joined:
    """This process is one rank of a launch that somebody else made.

    Args:
        variables: rank variables to set for the worker.
        address: where the ranks meet.
    """

    rank: int
    world_size: int
    variables: dict[str, str]
    address: str = ""


def joined_ranks(environ: Mapping[str, str]) -> Joined | None:
    """The launch that this process is a rank of, or None when we must launch ranks ourselves.

    Raises:
        UserError: rank variables that no launcher sets: some are missing, are no numbers, or make no sense.
    """
    if "RANK" in environ or "WORLD_SIZE" in environ:
        if missing := [name for name in ("RANK", "WORLD_SIZE") if not environ.get(name)]:
            raise UserError(f"of RANK and WORLD_SIZE, which launchers set, {missing[0]} is missing; set or unset both")
        variables = {}
    elif "SLURM_PROCID" in environ and "SLURM_STEP_ID" in environ and num_tasks(environ) != "1":
        variables = _srun(environ)
    else:
        # A step of one task is somebody's shell (`srun --pty`), or a node to start ranks on.
        return None
    told = {"MASTER_ADDR": "", "MASTER_PORT": "1", **environ, **variables}
    try:
        rank, world_size, port = (int(told[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    except ValueError as error:
        raise UserError(f"rank variables are set but are not numbers ({error}); unset RANK and WORLD_SIZE") from error
    if not 0 <= rank < world_size:
        what = f"RANK={rank} is no rank of WORLD_SIZE={world_size}, which has 0 to {world_size - 1}"
        raise UserError(f"{what}; set both as a launcher does, or unset them")
    if not 0 < port < 1 << 16:
        raise UserError(f"MASTER_PORT={port} is no port; set one from 1 to 65535")
    return Joined(rank, world_size, variables, f"{told['MASTER_ADDR']}:{port}")


def num_tasks(environ: Mapping[str, str]) -> str:
    """Of this step of a Slurm job; a step may have fewer than its job."""
    return environ.get("SLURM_STEP_NUM_TASKS") or environ.get("SLURM_NTASKS") or "1"


def _srun(environ: Mapping[str, str]) -> dict[str, str]:
    return {
        "RANK": environ["SLURM_PROCID"],
        "WORLD_SIZE": num_tasks(environ),
        "LOCAL_RANK": environ.get("SLURM_LOCALID", "0"),
        "LOCAL_WORLD_SIZE": str(tasks_on_node(environ)),
        "MASTER_ADDR": environ.get("MASTER_ADDR") or first_host(environ.get("SLURM_STEP_NODELIST", "127.0.0.1")),
        "MASTER_PORT": environ.get("MASTER_PORT", str(SRUN_PORT)),
    }


def tasks_on_node(environ: Mapping[str, str]) -> int:
    """This step's tasks on this node: SLURM_STEP_TASKS_PER_NODE has them by node, `"4(x2),3"` for 4, 4 and 3."""
    told = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE") or ""
    counts = [
        int(count)
        for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", told)
        for _ in range(min(int(times or 1), MAX_NODES))
    ]
    node = environ.get("SLURM_NODEID", "0")
    if node.isdecimal() and int(node) < len(counts):
        return counts[int(node)]
    asked = environ.get("SLURM_NTASKS_PER_NODE", "1")
    return int(asked) if asked.isdecimal() else 1


def first_host(nodelist: str) -> str:
    """First host of a Slurm node list: `"gpu[03-07,9],x1"` to `"gpu03"`."""
    match = re.match(r"([^,\[]+)(?:\[([^,\]-]+))?", nodelist)
    return "".join(part for part in match.groups() if part) if match else nodelist


def torchrun_command(num_ranks: int, arguments: list[str], log_dir: str) -> list[str]:
    """torchrun on this host alone, with a free port of its own choice."""
    command = [sys.executable, "-m", "distbench.worker.torchrun", "--standalone", "--local-addr=127.0.0.1"]
    binding = [f"--numa-binding={mode}"] if (mode := os.environ.get(NUMA_BINDING)) else []
    return [*command, f"--nproc-per-node={num_ranks}", f"--log-dir={log_dir}", *binding, *arguments]


def rank_environment(num_ranks_here: int, num_cpus: int, extra: Mapping[str, str]) -> dict[str, str]:
    """Environment of the ranks: ours, rank variables, and threads so that the ranks of a host share its CPUs."""
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, num_cpus // max(num_ranks_here, 1)))
    return {**os.environ, "OMP_NUM_THREADS": threads, PARENT_PID: str(os.getpid()), **extra}
