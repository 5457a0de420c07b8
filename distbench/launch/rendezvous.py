"""Rendezvous: detect whether torchrun or srun started this process as a rank, and check the ranks' address."""

import contextlib
import itertools
import math
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from distbench.records.machine import slug
from distbench.spec import UserError
from distbench.spec.printable_text import printable

# Below Linux's ephemeral ports (ip_local_port_range).
FIRST_PORT, NUM_PORTS, PORTS_A_STEP = 20_000, 10_000, 101
MAX_NODES, MAX_DIGITS, MAX_SHOWN = 1 << 16, 9, 60
HOST_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class Joined:
    """The rank of this process in a launch by another launcher.

    Args:
        variables: rank variables (RANK, WORLD_SIZE ...) to set for the worker.
        address: `HOST:PORT` of the rendezvous.
        launch: name of the launch, equal for all its ranks on this host and valid as a folder's name; "" if unknown.
    """

    rank: int
    world_size: int
    variables: dict[str, str]
    address: str = ""
    launch: str = ""


def joined_ranks(environ: Mapping[str, str]) -> Joined | None:
    """Return this process's rank in another launcher's launch, or None if distbench must launch ranks.

    Raises:
        UserError: rank variables are missing, not numbers, or contradictory.
    """
    if "RANK" in environ or "WORLD_SIZE" in environ:
        if missing := [name for name in ("RANK", "WORLD_SIZE") if not environ.get(name)]:
            raise UserError(f"{missing[0]} is missing, but launchers set RANK and WORLD_SIZE; set or unset both")
        variables = {}
    elif "SLURM_PROCID" in environ and "SLURM_STEP_ID" in environ and num_tasks(environ) != "1":
        variables = _srun(environ)
    else:
        # A step of one task is a user's shell (`srun --pty`), or a node on which distbench starts ranks.
        return None
    settings = {"MASTER_ADDR": "", "MASTER_PORT": "1", **environ, **variables}
    try:
        rank, world_size, port = (int(settings[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    except ValueError as error:
        raise UserError(f"rank variables are set but are not numbers ({error}); unset RANK and WORLD_SIZE") from error
    if not 0 <= rank < world_size:
        problem = f"RANK={rank} is not valid for WORLD_SIZE={world_size}, which has ranks 0 to {world_size - 1}"
        raise UserError(f"{problem}; set both as a launcher does, or unset both")
    if not 0 < port < 1 << 16:
        raise UserError(f"MASTER_PORT={port} is not a valid port; set a port from 1 to 65535")
    return Joined(rank, world_size, variables, f"{settings['MASTER_ADDR']}:{port}", _launch_of(environ))


def _launch_of(environ: Mapping[str, str]) -> str:
    """Return a name from Slurm's job and step, else from the torchrun process of this host, else ""."""
    if "SLURM_JOB_ID" in environ and "SLURM_STEP_ID" in environ:
        return slug(f"slurm-{environ['SLURM_JOB_ID']}.{environ['SLURM_STEP_ID']}")
    if "TORCHELASTIC_RUN_ID" in environ:
        # torchrun's run id is "none" by default, and is not unique; a pid with its start time is unique.
        launcher, began = os.getppid(), "0"
        with contextlib.suppress(OSError, IndexError):
            # The start time is field 22 of proc(5); field 2 may contain blanks.
            began = Path(f"/proc/{launcher}/stat").read_text().rpartition(")")[2].split()[19]
        return slug(f"torchrun-{environ['TORCHELASTIC_RUN_ID']}-{launcher}-{began}")
    return ""


def num_tasks(environ: Mapping[str, str]) -> str:
    """Return the number of tasks of this step of a Slurm job; a step may have fewer tasks than the job."""
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
    """Return the rendezvous port of a step. Concurrent jobs on a node, and concurrent steps of a job, get different
    ports."""
    ids = (environ.get(name, "0") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    job, step = (int(number) if number.isdecimal() else 0 for number in ids)
    return FIRST_PORT + (job + PORTS_A_STEP * step) % NUM_PORTS


def tasks_on_node(environ: Mapping[str, str]) -> int:
    """Return the number of this step's tasks on this node. SLURM_STEP_TASKS_PER_NODE is `"4(x2),3"` for 4, 4 and 3
    tasks."""
    tasks_text = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE") or ""
    counts = [
        int(count)
        for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", tasks_text)
        for _ in range(min(int(times or 1), MAX_NODES))
    ]
    node = environ.get("SLURM_NODEID", "0")
    if node.isdecimal() and int(node) < len(counts):
        return counts[int(node)]
    requested = environ.get("SLURM_NTASKS_PER_NODE", "1")
    return int(requested) if requested.isdecimal() else 1


def first_host(nodelist: str) -> str:
    """Return the first host of a Slurm node list: `"gpu03"` for `"gpu[03-07,9],x1"`."""
    try:
        return expand_hosts(nodelist)[0]
    except ValueError:
        return nodelist


def expand_hosts(nodelist: str) -> list[str]:
    """Return the hosts of a Slurm node list, each once: gpu03, gpu04, x1 for `"gpu[03-04],x1"`.

    Raises:
        ValueError: the list is empty or not valid, or has more than MAX_NODES hosts; the message is a clause.
    """
    parts = re.findall(r"(?:[^,\[\]\s]|\[[^\[\]\s]*\])+", nodelist)
    if "".join(parts) != re.sub(r",(?![^\[]*\])|\s", "", nodelist) or not parts:
        raise ValueError(f"{nodelist[:MAX_SHOWN]!r} is not a list of hosts such as node1,node2 or node[1-4]")
    hosts: dict[str, None] = {}
    for part in parts:
        pieces = re.split(r"\[(.*?)\]", part)
        choices = [list(_numbers(piece)) if at % 2 else [piece] for at, piece in enumerate(pieces)]
        if math.prod(map(len, choices)) + len(hosts) > MAX_NODES:
            raise ValueError(f"{part} and the other hosts are more than {MAX_NODES:,}")
        hosts.update(dict.fromkeys(map("".join, itertools.product(*choices))))
    if invalid := next((host for host in hosts if not HOST_NAME.fullmatch(host)), None):
        raise ValueError(f"{invalid!r} is not the name of a host")
    return list(hosts)


def _numbers(ranges: str) -> Iterator[str]:
    """The numbers of `03-05,9`, with leading zeros."""
    for text in ranges.split(","):
        low, is_range, high = text.partition("-")
        high = high if is_range else low
        if not (low.isascii() and low.isdecimal() and high.isascii() and high.isdecimal()) or len(high) > MAX_DIGITS:
            raise ValueError(f"[{ranges[:MAX_SHOWN]}] is not a range such as [1-4,7]")
        if not int(low) <= int(high) < int(low) + MAX_NODES:
            raise ValueError(f"[{ranges}] descends, or has more than {MAX_NODES:,} hosts")
        yield from (f"{number:0{len(low)}d}" for number in range(int(low), int(high) + 1))


def launcher_command(num_ranks: int, program: Sequence[str], job_files: Sequence[Path]) -> list[str]:
    """Return the command that starts the ranks of some jobs on this host (`worker.rank_launcher`)."""
    return [sys.executable, "-m", "distbench.worker.rank_launcher", str(num_ranks), *program, *map(str, job_files)]


def rank_environment(num_ranks_here: int, num_cpus: int, extra: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of the ranks: this process's environment, `extra`, and each rank's number of CPU
    threads."""
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, num_cpus // max(num_ranks_here, 1)))
    return {**os.environ, "OMP_NUM_THREADS": threads, **extra}


# Name servers may need some time right after a node starts.
RESOLVE_S = 5.0
# Time limits of Slurm's commands: while ranks wait, and in general.
ASK_S, COMMAND_TIMEOUT_S = 10.0, 60.0
# Seconds after which a rank prints that it waits. Other ranks may start later or import torch more slowly.
NOTICE_AFTER_S, CONNECT_S = 15.0, 3.0


def require_address(joined: Joined, wait_s: float = RESOLVE_S) -> Joined:
    """Return the launch with an address that resolves, because torch waits silently for an address that does not
    resolve.

    If a Slurm node's name does not resolve, the name is replaced by the address that Slurm uses for the node.

    Raises:
        UserError: the name did not resolve within `wait_s` seconds, or other ranks could not reach this rank 0 at the
            address.
    """
    host, _, port = joined.address.rpartition(":")
    is_slurms = "SLURM_JOB_ID" in os.environ and "MASTER_ADDR" not in os.environ
    if is_slurms and not _resolves(host) and (address := address_by_slurm(host)):
        return replace(joined, variables={**joined.variables, "MASTER_ADDR": address}, address=f"{address}:{port}")
    require_host(host, wait_s)
    settings = {**os.environ, **joined.variables}
    # Under torchrun, the torchrun process listens at this address.
    if joined.rank == 0 and host and "MASTER_PORT" in settings and "TORCHELASTIC_RUN_ID" not in settings:
        require_own(joined.address)
    return joined


def _resolves(host: str) -> bool:
    with contextlib.suppress(OSError, UnicodeError):
        return bool(socket.getaddrinfo(host, None))
    return False


def require_host(host: str, wait_s: float = RESOLVE_S) -> None:
    """Raise UserError if a name does not resolve within `wait_s` seconds."""
    until = time.monotonic() + wait_s
    while host:
        try:
            socket.getaddrinfo(host, None)
            return
        except (OSError, UnicodeError) as error:
            if time.monotonic() >= until:
                problem = f"MASTER_ADDR={host} does not resolve on this host ({error})"
                raise UserError(f"{problem}; set MASTER_ADDR to the first node's address for all ranks") from error
        time.sleep(RESOLVE_S / 10)


def require_own(address: str) -> None:
    """Raise UserError if data sent to `HOST:PORT` does not arrive here, or another process listens there.

    The address may belong to another device that forwards the data to this host.
    """
    host, _, port = address.rpartition(":")
    is_dualstack = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if is_dualstack else socket.AF_INET
    try:
        server = socket.create_server(("", int(port)), family=family, dualstack_ipv6=is_dualstack)
    except OSError as error:
        problem = f"port {port} of this host is not available ({os.strerror(error.errno or 0)})"
        advice = "give all ranks another MASTER_PORT (torchrun: --master-port)"
        raise UserError(f"ranks cannot meet at {address}: {problem}; {advice}") from error
    with server:
        if _is_local(host):
            return
        server.settimeout(CONNECT_S)
        try:
            with socket.create_connection((host, int(port)), CONNECT_S), server.accept()[0]:
                return
        except OSError as error:
            problem = f"ranks cannot meet at {address}: data sent to that address does not reach this host ({error})"
            advice = "MASTER_ADDR (torchrun: --master-addr) must be an address of this host, which has rank 0"
            raise UserError(f"{problem}; {advice}") from error


def _is_local(host: str) -> bool:
    """Whether an address of a host name belongs to this host; a process can bind only addresses of its host."""
    with contextlib.suppress(OSError, UnicodeError):
        for family, kind, _, _, (address, *_) in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM):
            with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
                probe.bind((address, 0))
                return True
    return False


def address_by_slurm(node: str) -> str:
    """Return the address by which Slurm reaches a node; "" if unknown."""
    _, output, _ = slurm_command("scontrol", "show", "node", "--oneliner", node, timeout_s=ASK_S)
    # A comment after the address may contain text that looks like an address.
    return next((part.partition("=")[2] for part in output.split() if part.startswith("NodeAddr=")), "")


def slurm_command(*command: str, timeout_s: float = COMMAND_TIMEOUT_S) -> tuple[int, str, str]:
    """Run one of Slurm's commands; return its exit code, output and standard error. Never raises."""
    try:
        # Fields of a job that users and sites write may not be valid UTF-8.
        done = subprocess.run(
            command, capture_output=True, timeout=timeout_s, check=False, encoding="utf-8", errors="replace"
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return 1, "", str(error)
    return done.returncode, done.stdout, done.stderr.strip()


class Meeting:
    """A notice, on the first rank of each host, that the rank waits. Launches by distbench itself print no notice."""

    def __init__(self, joined: Joined | None) -> None:
        local_rank = (joined.variables if joined else {}).get("LOCAL_RANK") or os.environ.get("LOCAL_RANK", "0")
        self._joined = joined if joined and joined.address and local_rank == "0" else None

    def waited(self, seconds: float) -> None:
        """Print the notice once, after NOTICE_AFTER_S seconds of waiting."""
        joined = self._joined
        if joined is None or seconds <= NOTICE_AFTER_S:
            return
        self._joined = None
        sentence = f"rank {joined.rank} has waited {seconds:.0f} s at {joined.address} for the other ranks"
        if error := why_no_answer(joined.address):
            advice = "set MASTER_ADDR to the host of rank 0, and open MASTER_PORT to the other ranks"
            sentence = f"{sentence}, and this address does not respond ({error}); {advice}"
        else:
            sentence = f"{sentence}, and continues to wait. The address responds"
        print(printable(f"distbench: {sentence}"), file=sys.stderr, flush=True)


def why_no_answer(address: str) -> str:
    """Return the reason why `HOST:PORT` does not respond; "" if it responds."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), CONNECT_S).close()
    except OSError as error:
        return str(error)
    return ""
