"""Who the ranks are: started by us with torchrun, or this process is one, started by torchrun or srun."""

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from distbench.spec import UserError
from distbench.spec.job import PARENT_PID

SRUN_PORT = 29517


@dataclass(frozen=True)
class Joined:
    """This process is one rank of a launch that somebody else made; `variables` are rank variables to set for the
    worker."""

    rank: int
    world_size: int
    variables: dict[str, str]


def joined_ranks(environ: Mapping[str, str]) -> Joined | None:
    """The launch that this process is a rank of, or None when we must launch ranks ourselves."""
    try:
        if "RANK" in environ and "WORLD_SIZE" in environ:
            return Joined(int(environ["RANK"]), int(environ["WORLD_SIZE"]), {})
        if "SLURM_PROCID" in environ and "SLURM_STEP_ID" in environ:
            return _srun(environ)
    except ValueError as error:
        raise UserError(f"rank variables are set but are not numbers ({error}); unset RANK and WORLD_SIZE") from error
    return None


def _srun(environ: Mapping[str, str]) -> Joined:
    rank, world_size = int(environ["SLURM_PROCID"]), int(environ["SLURM_NTASKS"])
    variables = {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": environ.get("SLURM_LOCALID", "0"),
        "LOCAL_WORLD_SIZE": environ.get("SLURM_NTASKS_PER_NODE", "1"),
        "MASTER_ADDR": environ.get("MASTER_ADDR") or first_host(environ.get("SLURM_STEP_NODELIST", "127.0.0.1")),
        "MASTER_PORT": environ.get("MASTER_PORT", str(SRUN_PORT)),
    }
    return Joined(rank, world_size, variables)


def first_host(nodelist: str) -> str:
    """First host of a Slurm node list: `"gpu[03-07,9],x1"` to `"gpu03"`."""
    match = re.match(r"([^,\[]+)(?:\[([^,\]-]+))?", nodelist)
    return "".join(part for part in match.groups() if part) if match else nodelist


def torchrun_command(num_ranks: int, arguments: list[str], log_dir: str) -> list[str]:
    """torchrun on this host alone, with a free port of its own choice."""
    command = [sys.executable, "-m", "distbench.worker.torchrun", "--standalone", "--local-addr=127.0.0.1"]
    return [*command, f"--nproc-per-node={num_ranks}", f"--log-dir={log_dir}", *arguments]


def rank_environment(num_ranks_here: int, num_cpus: int, extra: Mapping[str, str]) -> dict[str, str]:
    """Environment of the ranks: ours, rank variables, and threads so that the ranks of a host share its CPUs."""
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, num_cpus // max(num_ranks_here, 1)))
    return {**os.environ, "OMP_NUM_THREADS": threads, PARENT_PID: str(os.getpid()), **extra}
