"""Two hosts of four ranks each, whose cables and CPUs are limited as asked: what `bench links` launches.

Each rank has a network namespace, a virtual cable to one bridge, and that cable's rate; a host is a name and a CPU of
its own, which its ranks share. A rank's CPU is limited by the kernel (`cpu_limit.py`). Processes are forked
from one that has torch imported, each in its rank's surroundings, so that a launch takes little longer than what it
measures. Needs root, iproute2 and two CPUs.
"""

import ctypes
import importlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from benchmarks.cpu_limit import CpuLimit
from benchmarks.two_host_lab import ip

NUM_RANKS, HOSTS = 8, ("a", "b")
RANKS_PER_HOST = NUM_RANKS // len(HOSTS)
BRIDGE, PREFIX = "dblinks", "dbl"
# Megabits a second: little enough that two cores are not what limits the links.
RATE = 400
ROOT = Path(__file__).resolve().parent.parent
FORK_SERVER = ROOT / "tests" / "processes"
# What a rank and its command import.
IMPORTED = ("distbench.cli.main", "distbench.launch", "distbench.worker.rank_session", "distbench.records.run_file")
CLONE_NEWUTS = 0x04000000  # sched.h
LAUNCH_S, START_S = 300, 120


class Lab:
    """The lab while it stands; made by `links_lab`.

    Args:
        pythons: of each rank, what starts a Python in its surroundings.
        limits: each rank's cgroup.
    """

    def __init__(self, pythons: Sequence[str], limits: Sequence[CpuLimit]) -> None:
        self._pythons, self._limits = pythons, limits
        self._rates: dict[int, int] = {}

    def slow_down(self, rank: int | None = None, link: int | None = None) -> None:
        """Give a rank half of a CPU, or its cable half of the rate; all others have the whole."""
        for one, limit in enumerate(self._limits):
            limit.set(0.5 if one == rank else None)
            rate = RATE // 2 if one == link else RATE
            if self._rates.get(one) != rate:
                self._shape(one, rate)

    def _shape(self, rank: int, rate: int) -> None:
        """Both ends of a rank's cable at that rate (Mbit/s): a token bucket each way."""
        bucket = ("root", "tbf", "rate", f"{rate}mbit", "burst", "128kb", "latency", "200ms")
        ip("qdisc", "replace", "dev", f"{PREFIX}{rank}h", *bucket, program="tc")
        ip("-n", f"{PREFIX}{rank}", "qdisc", "replace", "dev", "eth", *bucket, program="tc")
        self._rates[rank] = rate

    def python(self, rank: int, *words: str) -> list[str]:
        """Return the command that starts a Python where a rank is."""
        return [self._pythons[rank], *words]

    def run(self, folder: Path, *words: str) -> None:
        """`distbench run links` with further words on all ranks, whose run file is in a folder then.

        Raises:
            RuntimeError: it failed; with what the first rank said.
        """
        log = folder / "said"
        with ExitStack() as stack:
            processes = [stack.enter_context(self._rank(rank, folder, log, words)) for rank in range(NUM_RANKS)]
            try:
                codes = [process.wait(LAUNCH_S) for process in processes]
            finally:
                for process in processes:
                    process.kill()
        if any(codes):
            raise RuntimeError(f"the ranks ended with exit codes {codes}: {log.read_text()}")

    def _rank(self, rank: int, folder: Path, log: Path, words: Sequence[str]) -> "subprocess.Popen[bytes]":
        told = {
            "RANK": rank,
            "LOCAL_RANK": rank % RANKS_PER_HOST,
            "WORLD_SIZE": NUM_RANKS,
            "LOCAL_WORLD_SIZE": RANKS_PER_HOST,
            "MASTER_ADDR": address(0),
            "MASTER_PORT": 29571,
            "GLOO_SOCKET_IFNAME": "eth",
            "DISTBENCH_MACHINE": "lab",
            "PYTHONPATH": ROOT,
        }
        command = [*self.python(rank, "-m", "distbench", "run", "links", "--mesh", f"tp={NUM_RANKS}")]
        with (log if rank == 0 else Path(os.devnull)).open("ab") as output:
            return subprocess.Popen(
                [*command, "--results", str(folder), "--quiet", *words],
                env={**os.environ, **{name: str(value) for name, value in told.items()}},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )


def address(rank: int) -> str:
    """Of a rank's namespace."""
    return f"10.78.0.{rank + 1}"


@contextmanager
def links_lab(folder: Path) -> Iterator[Lab]:
    """The lab, until the end of the block; `folder` takes its sockets.

    Raises:
        NoNamespaces, NoCpuLimit: this machine cannot have it.
    """
    with cables(), cpu_limits() as limits, agents(folder, limits) as pythons:
        yield Lab(pythons, limits)


@contextmanager
def cables() -> Iterator[None]:
    """A namespace and an address for each rank, joined by a bridge."""
    names = [f"{PREFIX}{rank}" for rank in range(NUM_RANKS)]
    clear(names)  # what one that was killed left behind
    try:
        ip("link", "add", BRIDGE, "type", "bridge")
        ip("link", "set", BRIDGE, "up")
        for rank, name in enumerate(names):
            ip("netns", "add", name)
            ip("link", "add", f"{name}h", "type", "veth", "peer", "name", "eth", "netns", name)
            ip("link", "set", f"{name}h", "master", BRIDGE, "up")
            ip("-n", name, "addr", "add", f"{address(rank)}/24", "dev", "eth")
            for device in ("eth", "lo"):
                ip("-n", name, "link", "set", device, "up")
        yield
    finally:
        clear(names)


def clear(names: Sequence[str]) -> None:
    """Delete the namespaces, and with them the cables, and the bridge."""
    for words in (*(("netns", "delete", name) for name in names), ("link", "delete", BRIDGE)):
        with suppress(FileNotFoundError):
            subprocess.run(["ip", *words], capture_output=True, check=False)


@contextmanager
def cpu_limits() -> Iterator[list[CpuLimit]]:
    """A cgroup for each rank, without a limit."""
    limits: list[CpuLimit] = []
    try:
        for rank in range(NUM_RANKS):
            limits.append(CpuLimit(f"{PREFIX}{rank}"))
        yield limits
    finally:
        for limit in limits:
            with suppress(OSError):
                limit.folder.rmdir()


@contextmanager
def agents(folder: Path, limits: Sequence[CpuLimit]) -> Iterator[list[str]]:
    """For each rank a process that forks Pythons in its surroundings; what starts one there."""
    cpus = sorted(os.sched_getaffinity(0))
    surroundings = []
    for rank, limit in enumerate(limits):
        host = rank // RANKS_PER_HOST
        surroundings.append((str(folder / f"agent{rank}"), f"{PREFIX}{rank}", HOSTS[host], cpus[host % len(cpus)],
                             str(limit.folder)))  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.links_lab", json.dumps(surroundings)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + START_S
        while not all(Path(socket_path).exists() for socket_path, *_ in surroundings):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the lab's processes did not start within {START_S} s; see what they printed")
            time.sleep(0.02)
        yield [client(folder, socket_path) for socket_path, *_ in surroundings]
    finally:
        process.kill()
        process.wait()


def client(folder: Path, socket_path: str) -> str:
    """A stand-in for `sys.executable`: its Pythons are forked by the process that listens there."""
    path = folder / f"python-{Path(socket_path).name}"
    lines = f"#!{sys.executable} -IS", "import sys", f"sys.path.insert(0, {str(FORK_SERVER)!r})"
    path.write_text("\n".join([*lines, "import forked_python", f"forked_python.main({socket_path!r})", ""]))
    path.chmod(0o755)
    return str(path)


def serve_all(surroundings: Sequence[tuple[str, str, str, int, str]]) -> NoReturn:
    """Import what ranks need, and fork a server into each rank's surroundings."""
    sys.path.insert(0, str(FORK_SERVER))
    server: Any = importlib.import_module("fork_server")
    server.die_with_parent()
    for name in IMPORTED:
        importlib.import_module(name)
    server.IMPORTED = ()
    for socket_path, *where in surroundings:
        if not os.fork():
            server.die_with_parent()
            enter(*where)
            server.serve(socket_path)
    while True:
        os.wait()


def enter(namespace: str, host: str, cpu: int, cgroup: str) -> None:
    """Have this process and what it starts be on that host."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/run/netns", namespace).open() as opened:
        if libc.setns(opened.fileno(), 0) or libc.unshare(CLONE_NEWUTS):
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
    socket.sethostname(host)
    os.sched_setaffinity(0, {cpu})
    Path(cgroup, "cgroup.procs").write_text(str(os.getpid()))


if __name__ == "__main__":
    serve_all(json.loads(sys.argv[1]))
