"""What the machine is, as far as the standard library can tell; the worker adds what torch knows."""

import contextlib
import hashlib
import os
import platform
import re
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distbench.spec.devices import ACCELERATORS, DEVICES

ALLOWED_VARIABLES = (
    *("OMP_NUM_THREADS", "MKL_NUM_THREADS"),
    *(variable for known in DEVICES.values() for variable in known.variables),
    *("SLURM_JOB_ID", "SLURM_NNODES"),
)
COMMAND_TIMEOUT_S = 10


def host_facts() -> dict[str, Any]:
    """Machine id, CPU, memory, git state, allowed environment variables and load of this host."""
    return {
        "machine": machine_name(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "cpu_model": cpu_model(),
        "num_cpus": available_cpus(),
        "memory_bytes": memory_bytes(),
        "variables": {name: os.environ[name] for name in ALLOWED_VARIABLES if name in os.environ},
        "load_at_start": load_average(),
        **git_state(),
    }


def machine_name() -> str:
    """A short name for this machine, fit for a folder: DISTBENCH_MACHINE, else the host's name and a CPU digest."""
    if given := os.environ.get("DISTBENCH_MACHINE"):
        return slug(given)
    digest = hashlib.sha256(f"{cpu_model()}/{os.cpu_count()}/{memory_bytes()}".encode()).hexdigest()[:6]
    return f"{slug(platform.node() or 'host')}-{digest}"


def slug(text: str) -> str:
    """Letters, digits, dot, underscore and dash of `text`; every other run of characters becomes one dash."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-") or "unnamed"


def cpu_model() -> str:
    """The CPU's own name where the system gives one, else its architecture."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.processor() or platform.machine()
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return match.group(1).strip() if match else platform.machine()


def available_cpus() -> int:
    """CPUs this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def memory_bytes() -> int | None:
    """Physical memory in bytes, or None where the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None


def load_average() -> list[float] | None:
    """1, 5 and 15 minute load averages, or None where the system has none."""
    try:
        return [round(value, 2) for value in os.getloadavg()]
    except OSError:
        return None


@dataclass(frozen=True)
class CpuUse:
    """CPU seconds up to now: of all on this host, and of this process with its descendants."""

    at_s: float
    busy_s: float
    own_s: float

    @classmethod
    def now(cls) -> "CpuUse | None":
        """None where the system does not say (no /proc/stat)."""
        try:
            fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
            user, nice, system, _, _, irq, softirq, steal = (int(field) for field in fields)
            ticks = user + nice + system + irq + softirq + steal
            own = os.times()
            own_s = own.user + own.system + own.children_user + own.children_system
            tick_s = 1 / os.sysconf("SC_CLK_TCK")
            return cls(time.monotonic(), ticks * tick_s, own_s + _ticks_of_descendants() * tick_s)
        except (OSError, ValueError):
            return None

    def foreign_since(self, before: "CpuUse") -> float | None:
        """How busy others kept the CPUs in between, as a share of them; None for no time at all."""
        seconds = self.at_s - before.at_s
        if seconds <= 0:
            return None
        busy_s = (self.busy_s - before.busy_s) - (self.own_s - before.own_s)
        return round(min(max(busy_s / (seconds * (os.cpu_count() or 1)), 0.0), 1.0), 4)


def _ticks_of_descendants() -> int:
    """CPU time of this process's descendants that still run, and of those that ended before them."""
    parents, ticks = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # ended meanwhile
            # proc(5): "pid (name) state ppid ...", utime, stime, cutime and cstime from the 14th on.
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            parents[int(folder.name)] = int(fields[1])
            ticks[int(folder.name)] = sum(map(int, fields[11:15]))
    own = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in own} - own:
        own |= more
    return sum(ticks[pid] for pid in own - {os.getpid()})


def git_state() -> dict[str, Any]:
    """Commit and dirtiness of the repository that the command was started in; None outside of one."""
    commit = _output(["git", "rev-parse", "HEAD"])
    if not commit:
        return {"git_commit": None, "git_dirty": None}
    return {"git_commit": commit.strip(), "git_dirty": bool(_output(["git", "status", "--porcelain"]))}


def accelerator_here() -> tuple[str, int]:
    """The first type of accelerator that this process may use, and how many; ("cpu", 0) without one."""
    counts = {name: device_count(name) for name in ACCELERATORS}
    return next(((name, count) for name, count in counts.items() if count), ("cpu", 0))


def device_count(device: str) -> int:
    """Accelerators of a type that this process may use, counted without importing torch."""
    known = DEVICES[device]
    visible = os.environ.get(known.visible)
    if visible is not None:
        return len([number for number in visible.split(",") if number.strip() not in ("", "-1")])
    if shutil.which(known.lister[0]):
        listed = _output(known.lister)
        if listed is not None:
            return len([line for line in listed.splitlines() if line.startswith(known.line)])
    return len([path for path in Path("/dev").glob(f"{known.node}*") if path.name[len(known.node) :].isdecimal()])


def _output(command: Sequence[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
