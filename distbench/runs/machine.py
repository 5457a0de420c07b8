"""What the machine is, as far as the standard library can tell; the worker adds what torch knows."""

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distbench.runs.accelerator_facts import SMI, accelerator_facts, devices_told
from distbench.spec.devices import ACCELERATORS, DEVICES, NUMA_BINDING, DeviceType

ALLOWED_VARIABLES = (
    *("OMP_NUM_THREADS", "MKL_NUM_THREADS"),
    *(variable for known in DEVICES.values() for variable in known.variables),
    *("SLURM_JOB_ID", "SLURM_NNODES", NUMA_BINDING),
)
FAMILIES = tuple({family for known in DEVICES.values() for family in known.families})
COMMAND_TIMEOUT_S, TORCH_TIMEOUT_S = 10, 120
ROOT = Path("/")
IDS = ("GPU-", "MIG-")  # what a device's own name begins with, NVIDIA's and AMD's


def host_facts() -> dict[str, Any]:
    """Machine id, CPU, memory, git state, allowed environment variables and load of this host."""
    return {
        "machine": machine_name(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "cpu_model": cpu_model(),
        "num_cpus": available_cpus(),
        "memory_bytes": memory_bytes(),
        "variables": {name: os.environ[name] for name in sorted(os.environ) if is_told(name)},
        "load_at_start": load_average(),
        **accelerator_facts(output_of),
        **git_state(),
    }


def is_told(variable: str) -> bool:
    """Whether the header has an environment variable: those that change what is measured, and no other."""
    return variable in ALLOWED_VARIABLES or variable.startswith(FAMILIES)


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
    commit = output_of(["git", "rev-parse", "HEAD"])
    if not commit:
        return {"git_commit": None, "git_dirty": None}
    return {"git_commit": commit.strip(), "git_dirty": bool(output_of(["git", "status", "--porcelain"]))}


def devices_here() -> list[dict[str, Any]]:
    """Clocks, heat and power of this host's devices now, and what holds them down; [] where nobody tells."""
    return devices_told(output_of) if shutil.which(SMI) else []


def accelerator_here() -> tuple[str, int]:
    """The first type of accelerator that this process may use, and how many; ("cpu", 0) without one."""
    counts = ((name, device_count(name)) for name in ACCELERATORS if _is_brought(DEVICES[name]))
    return next(((name, count) for name, count in counts if count), ("cpu", 0))


def device_count(device: str) -> int:
    """Accelerators of a type that this process may use, counted without importing torch where that can be."""
    known = DEVICES[device]
    here = _devices_of_host(known)
    shown = [os.environ[name] for name in known.visible if name in os.environ]
    if shown:
        return min(num_visible(text, here) for text in shown)
    if here is not None:
        return here
    code = f"import torch; print(torch.get_device_module({device!r}).device_count())"
    told = output_of([sys.executable, "-c", code], TORCH_TIMEOUT_S)
    return int(told) if told is not None and told.strip().isdecimal() else 0


def num_visible(text: str, num_here: int | None) -> int:
    """How many devices a variable of `DeviceType.visible` shows of `num_here` (0 or None: it is not known).

    As CUDA and torch read it: what follows a number that is no device's is not seen, a number twice shows nothing; ids
    (`GPU-...`) are taken as they are, but of parts of devices (`MIG-...`) a process sees the first alone.
    """
    seen: list[str] = []
    for part in (one.strip() for one in text.split(",")):
        number = re.match(r"[+-]?\d+", part)
        # Slurm shows a job without devices "NoDevFiles".
        if not number and not part.startswith(IDS):
            break
        if number and (int(number[0]) < 0 or (num_here and int(number[0]) >= num_here)):
            break
        name = str(int(number[0])) if number else part
        if name in seen:
            return 0
        seen.append(name)
    return min(len(seen), 1) if seen and seen[0].startswith(IDS[1]) else len(seen)


def _devices_of_host(known: DeviceType) -> int | None:
    """Those that a command or the driver's files tell of; None where neither is known."""
    for lister in known.listers:
        if shutil.which(lister.command[0]) and (listed := output_of(lister.command)) is not None:
            lines = listed.splitlines()
            count = sum(line.startswith(lister.line) for line in lines)
            # Where a device is split, a process sees one part, however many there are.
            return (
                min(count, 1) if any(line.strip().startswith(lister.part) for line in lines if lister.part) else count
            )
    found = [[path for path in ROOT.glob(pattern) if _is_device(path)] for pattern in known.files]
    return next((len(paths) for paths in found if paths), 0) if known.files else None


def _is_device(path: Path) -> bool:
    """A device's file, or one that holds the number of one: AMD's driver gives a CPU none, that is 0."""
    try:
        return not path.is_file() or path.read_text().strip() not in ("", "0")
    except OSError:
        return False


def _is_brought(known: DeviceType) -> bool:
    """Whether a torch for such a device can be here at all: asking torch itself takes seconds."""
    if not known.brought_by:
        return True
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        version = ""
    return any(
        version.endswith(one) if one.startswith("+") else importlib.util.find_spec(one) for one in known.brought_by
    )


def output_of(command: Sequence[str], timeout_s: float = COMMAND_TIMEOUT_S) -> str | None:
    """What a command prints; None where it fails, or takes longer.

    One that hangs in its driver, as a broken GPU's tool does, cannot be killed, and is not waited for either.
    """
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, errors="replace"
        )
    except OSError:
        return None
    try:
        text, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        threading.Thread(target=process.wait, daemon=True).start()
        return None
    return text if process.returncode == 0 else None
