"""What the chaos test does to a launch: faults, each a function of the launch, and how its processes are known."""

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

STOPPED_S = 3  # how long the command itself is stopped
TOKEN = "DISTBENCH_CHAOS"  # in the environment of whatever a launch starts, so that it is known by it


class TooLate(Exception):
    """What was to be broken had ended."""


@dataclass(frozen=True)
class Fault:
    """What is done to a launch.

    Args:
        does: is given the launch, and does it.
        names: what the command's sentence must hold; empty where there can be none.
        may_succeed: whether the launch may well end as if nothing had been.
    """

    name: str
    does: Callable[["Launch"], None]
    names: str
    may_succeed: bool = False
    needs: str = ""  # "mount" or "net"


@dataclass
class Launch:
    """One command that runs: its process, its results folder, and how what it starts is known."""

    process: "subprocess.Popen[str]"
    out: Path
    token: str

    @property
    def pids(self) -> list[int]:
        """Every process that has the token but has not ended, the command among them."""
        return pids_with(self.token)

    @property
    def launcher(self) -> list[int]:
        """The launcher's pid; empty before it has started."""
        pids = self._launchers_and_ranks
        return [pid for pid in pids if _parent(pid) not in pids]

    @property
    def ranks(self) -> list[int]:
        """The pids of ranks, which the launcher forked."""
        pids = self._launchers_and_ranks
        return [pid for pid in pids if _parent(pid) in pids]

    @property
    def _launchers_and_ranks(self) -> set[int]:
        return {
            pid for pid in self.pids if _runs(pid, b"distbench.worker.rank_launcher") and pid not in self.supervisors
        }

    @property
    def supervisors(self) -> list[int]:
        """The pids of the two supervisors of the launcher, whose command names that too."""
        return [
            pid for pid in self.pids if _runs(pid, b"supervisor.py") and _runs(pid, b"distbench.worker.rank_launcher")
        ]

    @property
    def run_files(self) -> list[Path]:
        """The run files, as `report` would find them."""
        result = self.out.rglob("*.jsonl")
        return sorted(path for path in result if "logs" not in path.relative_to(self.out).parts)

    def rows(self) -> list[str]:
        """The whole lines of cases and passes in the run files."""
        lines = [line for path in self.run_files for line in path.read_text().splitlines(keepends=True)]
        return [line for line in lines if line.endswith("\n") and line.startswith(('{"type":"case"', '{"type":"pass"'))]

    def is_over(self) -> bool:
        """Whether the command has ended."""
        return self.process.poll() is not None


def pids_with(token: str) -> list[int]:
    """Every process that was started with TOKEN=token in its environment and has not ended."""
    known = f"{TOKEN}={token}".encode()
    return [pid for pid in _pids() if known in _environment(pid).split(b"\0") and not _is_zombie(pid)]


def _pids() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


def _environment(pid: int) -> bytes:
    return _read(pid, "environ")


def _runs(pid: int, program: bytes) -> bool:
    return program in _read(pid, "cmdline")


def _parent(pid: int) -> int:
    return int([*_read(pid, "stat").rpartition(b")")[2].split(), b"0", b"0"][1])


def _is_zombie(pid: int) -> bool:
    return _read(pid, "stat").rpartition(b")")[2].split()[:1] == [b"Z"]


def _send(signum: signal.Signals, whom: str) -> Callable[[Launch], None]:
    def do(launch: Launch) -> None:
        pids = getattr(launch, whom)
        try:
            os.kill(random.choice(pids), signum)
        except (IndexError, ProcessLookupError) as error:
            raise TooLate from error

    return do


def _send_command(*signums: signal.Signals) -> Callable[[Launch], None]:
    def do(launch: Launch) -> None:
        for signum in signums:
            launch.process.send_signal(signum)
            time.sleep(random.uniform(0, 0.5) if len(signums) > 1 else 0)

    return do


def _stop_command(launch: Launch) -> None:
    launch.process.send_signal(signal.SIGSTOP)
    time.sleep(STOPPED_S)
    launch.process.send_signal(signal.SIGCONT)


def _fill_disk(launch: Launch) -> None:
    with suppress(OSError), (launch.out / "filler").open("wb", buffering=0) as file:
        while file.write(bytes(1 << 12)):
            pass


def _cut_network(launch: Launch) -> None:
    command = ["nsenter", "-t", str(launch.process.pid), "-n", "ip", "link", "set", "lo", "down"]
    subprocess.run(command, check=True, capture_output=True)


KILL, TERM, STOP, INT, HUP = signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP, signal.SIGINT, signal.SIGHUP
NO_PROGRESS = "made no progress|did not end"
FAULTS = (
    Fault("SIGKILL of a rank", _send(KILL, "ranks"), "SIGKILL"),
    Fault("SIGTERM of a rank", _send(TERM, "ranks"), "SIGTERM"),
    Fault("SIGSTOP of a rank", _send(STOP, "ranks"), NO_PROGRESS),
    Fault("SIGKILL of the launcher", _send(KILL, "launcher"), "the launcher was killed by SIGKILL"),
    Fault("SIGTERM of the launcher", _send(TERM, "launcher"), "the launcher was killed by SIGTERM"),
    Fault("SIGKILL of a supervisor", _send(KILL, "supervisors"), "the launcher was killed by SIGKILL"),
    Fault("SIGSTOP of the launcher", _send(STOP, "launcher"), NO_PROGRESS),
    Fault("SIGKILL of the command", _send_command(KILL), ""),
    Fault("SIGTERM of the command", _send_command(TERM), "interrupted"),
    Fault("several signals to the command", _send_command(INT, INT, HUP, TERM), "interrupted"),
    Fault("SIGSTOP of the command, then SIGCONT", _stop_command, "", may_succeed=True),
    Fault("disk full", _fill_disk, "No space left", needs="mount"),
    Fault("network cut", _cut_network, f"{NO_PROGRESS}|raised|killed|ended", needs="net"),
)
