"""Two hosts of four ranks each, whose cables and CPUs have faults as asked: what `bench preflight` launches.

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
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from benchmarks.cpu_limit import CpuLimit
from benchmarks.two_host_lab import NoNamespaces, ip

NUM_RANKS, HOSTS = 8, ("a", "b")
RANKS_PER_HOST = NUM_RANKS // len(HOSTS)
BRIDGE, PREFIX = "dbpreflight", "dbp"
# Megabits a second: little enough that two cores are not what limits the links.
RATE = 400
# Shorter than a burst of computing by a factor of ten, since a slow device is slow all the time.
PERIOD_US = 10_000
SLICE_NS = 100_000
ROOT = Path(__file__).resolve().parent.parent
FORK_SERVER = ROOT / "tests" / "processes"
# What a rank and its command import.
IMPORTED = ("distbench.cli.main", "distbench.launch", "distbench.worker.rank_session", "distbench.records.run_file")
CLONE_NEWUTS = 0x04000000  # sched.h
SCHED_SETATTR = 314  # of x86-64
LAUNCH_S, START_S = 300, 120


@dataclass(frozen=True)
class Faults:
    """Faults of one launch; each field has ranks.

    Args:
        computes: half of a CPU.
        cable: half of the rate each way.
        one_way: half of the rate from the rank.
        link: two ranks; half of the rate each way between them, the whole rate to all others.
        lossy: one arriving packet in LOST_ONE_IN is lost.
        flaps: a quarter of the rate in every second period of FLAP_S.
        has_neighbour: whether another process uses each host's CPU at random times, half of the time.
    """

    computes: tuple[int, ...] = ()
    cable: tuple[int, ...] = ()
    one_way: tuple[int, ...] = ()
    link: tuple[int, ...] = ()
    lossy: tuple[int, ...] = ()
    flaps: tuple[int, ...] = ()
    has_neighbour: bool = False


FLAP_S, LOST_ONE_IN = 1.0, 50
# On and off for 0.1 to 1 s each.
NEIGHBOUR = """
import random, time
while True:
    until = time.monotonic() + random.uniform(0.1, 1)
    while time.monotonic() < until:
        pass
    time.sleep(random.uniform(0.1, 1))
"""


class Lab:
    """The open lab; made by `links_lab`.

    Args:
        pythons: of each rank, the command that starts a Python in its surroundings.
        limits: each rank's cgroup.
    """

    def __init__(self, pythons: Sequence[str], limits: Sequence[CpuLimit]) -> None:
        self._pythons, self._limits = pythons, limits

    @contextmanager
    def faults(self, faults: Faults) -> Iterator[None]:
        """Have these faults, until the end of the block, and no others."""
        for rank, limit in enumerate(self._limits):
            limit.set(0.5 if rank in faults.computes else None, PERIOD_US)
            shape(rank, False, RATE // 2 if rank in (*faults.cable, *faults.one_way) else RATE)
            shape(rank, True, RATE // 2 if rank in faults.cable else RATE)
        if faults.link:
            slow_link(*faults.link)
        with ExitStack() as stack:
            if faults.has_neighbour:
                for host in range(len(HOSTS)):
                    stack.enter_context(neighbour(host))
            for rank in faults.flaps:
                stack.enter_context(flapping(rank))
            for rank in faults.lossy:
                stack.callback(lose_packets, rank, 0)
                lose_packets(rank, LOST_ONE_IN)
            yield

    def python(self, rank: int, *words: str) -> list[str]:
        """Return the command that starts a Python where a rank is."""
        return [self._pythons[rank], *words]

    def preflight(self, folder: Path, *words: str) -> dict[str, Any]:
        """Return what `distbench preflight --json` with further words prints; its run file is in a folder then.

        Raises:
            RuntimeError: it failed; with what the first rank printed.
        """
        log = folder / "said"
        with ExitStack() as stack:
            processes = [stack.enter_context(self._rank(rank, folder, log, words)) for rank in range(NUM_RANKS)]
            try:
                codes = [process.wait(LAUNCH_S) for process in processes]
            finally:
                for process in processes:
                    process.kill()
        printed = log.read_text()
        if any(codes[1:]) or not printed.startswith("{"):
            raise RuntimeError(f"the ranks ended with exit codes {codes}: {printed}")
        record: dict[str, Any] = json.loads(printed)
        if record["exit_code"] != codes[0]:
            raise RuntimeError(f"the first rank ended with exit code {codes[0]} and printed {printed}")
        return record

    def _rank(self, rank: int, folder: Path, log: Path, words: Sequence[str]) -> "subprocess.Popen[bytes]":
        message = {
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
        command = [*self.python(rank, "-m", "distbench", "preflight", "--mesh", f"tp={NUM_RANKS}")]
        first = log, log.with_name("errors")
        outputs = [path.open("ab") for path in (first if rank == 0 else (Path(os.devnull),) * 2)]
        with outputs[0] as output, outputs[1] as errors:
            return subprocess.Popen(
                [*command, "--results", str(folder), "--json", *words],
                env={**os.environ, **{name: str(value) for name, value in message.items()}},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
            )


def device(rank: int, is_to_rank: bool) -> tuple[str, ...]:
    """The words of tc for one end of a rank's cable; the end in the rank's namespace sends from the rank."""
    return ("dev", f"{PREFIX}{rank}h") if is_to_rank else ("dev", "eth")


def tc(rank: int, is_to_rank: bool, *words: str) -> None:
    """`tc` at one end of a rank's cable."""
    ip(*(() if is_to_rank else ("-n", f"{PREFIX}{rank}")), *words, program="tc")


def shape(rank: int, is_to_rank: bool, rate: int, verb: str = "add") -> None:
    """One end of a rank's cable at that rate (Mbit/s) by a token bucket; "change" keeps its packets."""
    end = device(rank, is_to_rank)
    if verb == "add":
        with suppress(NoNamespaces):  # an end without a qdisc
            tc(rank, is_to_rank, "qdisc", "del", *end, "root")
    bucket = ("tbf", "rate", f"{rate}mbit", "burst", "128kb", "latency", "200ms")
    tc(rank, is_to_rank, "qdisc", verb, *end, "root", "handle", "1:", *bucket)


def slow_link(first: int, second: int) -> None:
    """Half of the rate between two ranks, each way, by a class of its own for the other's address."""
    for rank, other in ((first, second), (second, first)):
        end = device(rank, False)
        tc(rank, False, "qdisc", "replace", *end, "root", "handle", "2:", "htb", "default", "1")
        for number, rate in ((1, RATE), (2, RATE // 2)):
            words = ("class", "add", *end, "parent", "2:", "classid", f"2:{number}", "htb", "rate", f"{rate}mbit")
            tc(rank, False, *words, "burst", "128kb")
        words = ("filter", "add", *end, "protocol", "ip", "parent", "2:", "u32", "match", "ip", "dst")
        tc(rank, False, *words, f"{address(other)}/32", "flowid", "2:2")


def lose_packets(rank: int, one_in: int) -> None:
    """Lose one in so many packets that arrive at a rank; 0: none."""
    script = Path(__file__).parent / "packet_loss.py"
    ip("netns", "exec", f"{PREFIX}{rank}", sys.executable, str(script), str(one_in))


@contextmanager
def flapping(rank: int) -> Iterator[None]:
    """A rank's cable with a quarter of the rate in every second period, until the end of the block."""
    ended = threading.Event()

    def flap() -> None:
        rates = (RATE // 4, RATE)
        while True:
            for rate in rates:
                shape(rank, False, rate, verb="change")
                shape(rank, True, rate, verb="change")
                if ended.wait(FLAP_S):
                    return

    thread = threading.Thread(target=flap)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextmanager
def neighbour(host: int) -> Iterator[None]:
    """A process that gets as much of a host's CPU as a rank, half of the time."""
    limit = CpuLimit(f"{PREFIX}neighbour{host}")
    process = subprocess.Popen([sys.executable, "-c", NEIGHBOUR])
    try:
        os.sched_setaffinity(process.pid, {cpu_of(host)})
        shorten_slice(process.pid)
        (limit.folder / "cgroup.procs").write_text(str(process.pid))
        yield
    finally:
        process.kill()
        process.wait()
        remove(limit)


def cpu_of(host: int) -> int:
    """The CPU of a host."""
    cpus = sorted(os.sched_getaffinity(0))
    return cpus[host % len(cpus)]


def remove(limit: CpuLimit) -> None:
    """Remove a cgroup; one with processes that have just ended needs a moment."""
    for _ in range(20):
        with suppress(OSError):
            return limit.folder.rmdir()
        time.sleep(0.05)


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
            remove(limit)


@contextmanager
def agents(folder: Path, limits: Sequence[CpuLimit]) -> Iterator[list[str]]:
    """For each rank a process that forks Pythons in its surroundings; what starts one there."""
    surroundings = []
    for rank, limit in enumerate(limits):
        host = rank // RANKS_PER_HOST
        surroundings.append((str(folder / f"agent{rank}"), f"{PREFIX}{rank}", HOSTS[host], cpu_of(host),
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
    shorten_slice(os.getpid())


def shorten_slice(pid: int) -> None:
    """Let a process that wakes run at once, as on a host without other processes (Linux 6.12 or newer)."""
    if os.uname().machine == "x86_64":
        attributes = struct.pack("IIQiIQQQ", 48, os.SCHED_OTHER, 0, 0, 0, SLICE_NS, 0, 0)
        ctypes.CDLL(None).syscall(SCHED_SETATTR, pid, attributes, 0)


if __name__ == "__main__":
    serve_all(json.loads(sys.argv[1]))
