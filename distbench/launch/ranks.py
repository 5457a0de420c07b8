"""Who the ranks are: started by us, or this process is one, started by torchrun or srun."""

import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from distbench.runs.machine import slug
from distbench.spec import UserError

# Below the ports that Linux hands out by itself (ip_local_port_range).
FIRST_PORT, NUM_PORTS, PORTS_A_STEP = 20_000, 10_000, 101
MAX_NODES = 1 << 16


@dataclass(frozen=True)
class Joined:
    """This process is one rank of a launch that somebody else made.

    Args:
        variables: rank variables to set for the worker.
        address: where the ranks meet.
        launch: a name of the launch that all its ranks on this host know, fit for a folder; "" where it has none.
    """

    rank: int
    world_size: int
    variables: dict[str, str]
    address: str = ""
    launch: str = ""


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
    return Joined(rank, world_size, variables, f"{told['MASTER_ADDR']}:{port}", _launch_of(environ))


def _launch_of(environ: Mapping[str, str]) -> str:
    """Slurm's job and step; else the torchrun that started this process, which is one a host."""
    if "SLURM_JOB_ID" in environ and "SLURM_STEP_ID" in environ:
        return slug(f"slurm-{environ['SLURM_JOB_ID']}.{environ['SLURM_STEP_ID']}")
    if "TORCHELASTIC_RUN_ID" in environ:
        # The run's own id is "none" unless it was given, and may be given again.
        return slug(f"torchrun-{environ['TORCHELASTIC_RUN_ID']}-{os.getppid()}-{_started(os.getppid())}")
    return ""


def _started(pid: int) -> str:
    """When a process began, in the system's ticks: with its pid no other's."""
    try:
        # proc(5): the 22nd field, of which the second may hold blanks.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return "0"


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
        "MASTER_PORT": environ.get("MASTER_PORT", str(slurm_port(environ))),
    }


def slurm_port(environ: Mapping[str, str]) -> int:
    """Where ranks of a step meet: jobs that share a node, and steps of one job at the same time, have others."""
    job, step = environ.get("SLURM_JOB_ID", "0"), environ.get("SLURM_STEP_ID", "0")
    numbers = [int(number) if number.isdecimal() else 0 for number in (job, step)]
    return FIRST_PORT + (numbers[0] + PORTS_A_STEP * numbers[1]) % NUM_PORTS


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
    """First host of a Slurm node list: `"gpu[03-07,9],x1"` to `"gpu03"`, `"rack[1-2]n[04,7]"` to `"rack1n04"`."""
    match = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodelist)
    return re.sub(r"\[([^,\]-]*)[^\]]*\]", r"\1", match[0]) if match else nodelist


def launcher_command(num_ranks: int, program: Sequence[str], job_files: Sequence[Path]) -> list[str]:
    """What starts the ranks of some jobs on this host, each running a program: see `worker/launcher.py`."""
    return [sys.executable, "-m", "distbench.worker.launcher", str(num_ranks), *program, *map(str, job_files)]


def rank_environment(num_ranks_here: int, num_cpus: int, extra: Mapping[str, str]) -> dict[str, str]:
    """Environment of the ranks: ours, rank variables, and threads so that the ranks of a host share its CPUs."""
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, num_cpus // max(num_ranks_here, 1)))
    return {**os.environ, "OMP_NUM_THREADS": threads, **extra}
