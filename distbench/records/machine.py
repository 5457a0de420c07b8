"""The machine: host, CPUs, memory, accelerators and their drivers, without importing torch."""

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
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from distbench.spec.devices import ACCELERATORS, DEVICES, NUMA_BINDING, DeviceType
from distbench.spec.printable_text import count_text, listed

# Driver, clocks and links of GPUs by nvidia-smi. Tools of AMD and other vendors are not used.

SMI = "nvidia-smi"
# Fields of `nvidia-smi --help-query-gpu`. Drivers before 535 have the older name of REASONS.
FIELDS = (
    *("index", "name", "driver_version", "clocks.current.sm", "clocks.max.sm", "clocks.current.memory"),
    *("temperature.gpu", "power.draw", "power.limit", "persistence_mode", "mig.mode.current"),
)
NUMBERS = ("index", "clocks.", "temperature.", "power.")  # prefixes of numeric fields, in which text ("ERR!") is None
REASONS = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")
# nvml.h, nvmlClocksEventReasons: reasons of low clocks, except idle (0x1) and a clock set for a display (0x100).
SLOWED_BY = {
    0x2: "clocks set by hand",
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "heat (software)",
    0x40: "heat (hardware)",
    0x80: "power brake",
}
STYLE = re.compile(r"\x1b\[[0-9;]*m")
Run = Callable[[Sequence[str]], str | None]
Matrix = dict[tuple[str, str], str]


def accelerator_facts(run: Run) -> dict[str, Any]:
    """Return this host's `driver`, `accelerators` (per device, in MHz, degrees Celsius and watts) and `topology` (link
    type to number of pairs), or {} without nvidia-smi.

    Args:
        run: function from a command to the command's output, or None after a failure.
    """
    if not shutil.which(SMI):
        return {}
    devices, links = _device_rows(run), matrix_of(run((SMI, "topo", "-m")) or "")
    return {"driver": _driver_of(devices), "accelerators": devices, "topology": dict(Counter(links.values()))}


def _device_rows(run: Run) -> list[dict[str, Any]]:
    """The present state of the devices from nvidia-smi. `slowed_by` has the reasons of low clocks as text."""
    for reasons in REASONS:
        text = run((SMI, f"--query-gpu={','.join((*FIELDS, reasons))}", "--format=csv,noheader,nounits"))
        if text is not None and (devices := devices_in(text)):
            return devices
    return []


def _driver_of(devices: Sequence[Mapping[str, Any]]) -> str | None:
    return next((device["driver_version"] for device in devices if device["driver_version"]), None)


def devices_in(text: str) -> list[dict[str, Any]]:
    """The devices in the output of a query. An unavailable field ("[N/A]") is None."""
    devices = []
    for line in text.splitlines():
        values = [value.strip() for value in line.split(",")]
        if len(values) == len(FIELDS) + 1:
            device: dict[str, Any] = dict(zip(FIELDS, values[:-1], strict=True))
            for field, value in device.items():
                if field.startswith(NUMBERS):
                    device[field] = float(value) if re.fullmatch(r"\d+(\.\d+)?", value) else None
                elif value.startswith("[") or value == "N/A":
                    device[field] = None
            devices.append(device | {"slowed_by": reasons_in(values[-1])})
    return devices


def reasons_in(mask: str) -> list[str]:
    """The reasons in a mask such as 0x0000000000000024."""
    try:
        bits = int(mask, 16)
    except ValueError:
        return []
    return [words for bit, words in SLOWED_BY.items() if bits & bit]


def matrix_of(text: str) -> Matrix:
    """Pairs of GPUs to cells of a matrix of `nvidia-smi topo`, such as NV18, PIX, SYS, OK or CNS."""
    lines = [STYLE.sub("", line) for line in text.splitlines()]
    header = next((line for line in lines if re.match(r"\s+GPU0\b", line)), None)
    if header is None:
        return {}
    columns = re.findall(r"(?:GPU|NIC)\d+|mlx\S+", header)
    matrix: Matrix = {}
    for line in lines:
        name, *cells = line.split()[: len(columns) + 1] or [""]
        if re.fullmatch(r"GPU\d+", name) and len(cells) == len(columns):
            matrix |= {(name, column): cell for column, cell in zip(columns, cells, strict=True)}
    gpus = [name for name in columns if name.startswith("GPU")]
    return {pair: matrix[pair] for pair in combinations(gpus, 2) if pair in matrix}


def checks_of(run: Run, variables: Mapping[str, str], switched_off: Mapping[str, str]) -> list[dict[str, Any]]:
    """Rows for `distbench doctor` on clocks, links, peer access and disabled features; without nvidia-smi only disabled
    features.

    Args:
        run: as in `accelerator_facts`.
        variables: the environment variables.
        switched_off: environment variable to the value that disables a feature.
    """
    off = [f"{name}={value}" for name, value in switched_off.items() if variables.get(name) == value]
    advice = "unset these variables, unless you measure their effect"
    checks = [_row("switched off", not off, ", ".join(off) or "nothing", advice)]
    if not shutil.which(SMI):
        return checks if off else []
    if devices := _device_rows(run):
        checks += [_clocks(devices), _modes(devices)]
    if links := matrix_of(run((SMI, "topo", "-m")) or ""):
        slow = [pair for pair, link in links.items() if not link.startswith("NV")]
        others = "use a slower connection. Put neighbours of a mesh dim on pairs with NVLink"
        counts = [
            f"{link} between {count_text(count, 'pair')}" for link, count in Counter(links.values()).most_common()
        ]
        is_uniform = len(slow) in (0, len(links))
        advice = f"only some pairs have NVLink; {_pairs(slow)} {others}"
        checks.append(_row("GPU links", is_uniform, ", ".join(counts), advice))
    if peers := matrix_of(run((SMI, "topo", "-p2p", "r")) or ""):
        closed = {pair: state for pair, state in peers.items() if state != "OK"}
        states = ", ".join(sorted(set(closed.values())))
        advice = f"{_pairs(list(closed))} have no peer access ({states}), so NCCL copies through the host"
        count = f"{len(peers) - len(closed)} of {count_text(len(peers), 'pair')}"
        checks.append(_row("GPU peer access", not closed, count, advice))
    return checks


def _clocks(devices: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    slowed = {
        f"GPU{place if device['index'] is None else device['index']:g}": device["slowed_by"]
        for place, device in enumerate(devices)
        if device["slowed_by"]
    }
    now, most = (
        [device[name] for device in devices if device[name] is not None]
        for name in ("clocks.current.sm", "clocks.max.sm")
    )
    state = f"{min(now):g} to {max(now):g} MHz now, maximum {min(most):g} MHz" if now and most else "unknown"
    advice = "; ".join(f"{name} is limited by {', '.join(reasons)}" for name, reasons in slowed.items())
    return _row("GPU clocks", not slowed, state, f"{advice}, so measurements are slower and vary more")


def _modes(devices: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    persistent = all(device["persistence_mode"] in ("Enabled", None) for device in devices)
    split = any(device["mig.mode.current"] == "Enabled" for device in devices)
    modes = f"persistence {'on' if persistent else 'off'}, MIG {'on' if split else 'off'}"
    state = f"driver {_driver_of(devices) or 'unknown'}, {modes}"
    advice = "MIG devices have no peer access" if split else "turn persistence mode on: nvidia-smi -pm 1"
    return _row("GPU driver", persistent and not split, state, advice)


def _pairs(pairs: Sequence[tuple[str, str]]) -> str:
    return listed([f"{first}-{second}" for first, second in pairs], 3)


def _row(name: str, ok: bool, state: str, advice: str) -> dict[str, Any]:
    return {"name": name, "ok": ok, "found": state, "advice": "" if ok else advice, "mark": "LOOK"}


ALLOWED_VARIABLES = (
    *("OMP_NUM_THREADS", "MKL_NUM_THREADS"),
    *(variable for device_type in DEVICES.values() for variable in device_type.variables),
    *("SLURM_JOB_ID", "SLURM_NNODES", NUMA_BINDING),
)
FAMILIES = tuple({family for device_type in DEVICES.values() for family in device_type.families})
COMMAND_TIMEOUT_S, TORCH_TIMEOUT_S = 10, 120
ROOT = Path("/")
IDS = ("GPU-", "MIG-")  # prefixes of devices' ids, by NVIDIA and AMD


def host_facts() -> dict[str, Any]:
    """Machine id, CPU, memory, git state, recorded environment variables and load of this host."""
    return {
        "machine": machine_name(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "cpu_model": cpu_model(),
        "num_cpus": available_cpus(),
        "memory_bytes": memory_bytes(),
        "variables": {name: os.environ[name] for name in sorted(os.environ) if is_recorded_variable(name)},
        "load_at_start": load_average(),
        **accelerator_facts(output_of),
        **git_state(),
    }


def is_recorded_variable(variable: str) -> bool:
    """Whether the header records an environment variable, because the variable may affect measurements."""
    return variable in ALLOWED_VARIABLES or variable.startswith(FAMILIES)


def machine_name() -> str:
    """This machine's name as a valid folder name, from DISTBENCH_MACHINE, or from the host's name and a digest of CPU
    and memory."""
    if name := os.environ.get("DISTBENCH_MACHINE"):
        return slug(name)
    digest = hashlib.sha256(f"{cpu_model()}/{os.cpu_count()}/{memory_bytes()}".encode()).hexdigest()[:6]
    return f"{slug(platform.node() or 'host')}-{digest}"


def slug(text: str) -> str:
    """`text` with one dash for each sequence of characters other than letters, digits, dot, underscore and dash."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-") or "unnamed"


def cpu_model() -> str:
    """The CPU's model name, or the architecture if the name is unknown."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.processor() or platform.machine()
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return match.group(1).strip() if match else platform.machine()


def available_cpus() -> int:
    """The number of CPUs that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def memory_bytes() -> int | None:
    """Physical memory in bytes, or None if unknown."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None


def load_average() -> list[float] | None:
    """Load averages over 1, 5 and 15 minutes, or None if unavailable."""
    try:
        return [round(value, 2) for value in os.getloadavg()]
    except OSError:
        return None


@dataclass(frozen=True)
class CpuUse:
    """CPU seconds so far, of all processes on this host, and of this process with its descendants."""

    at_s: float
    busy_s: float
    own_s: float

    @classmethod
    def now(cls) -> "CpuUse | None":
        """Read the present values. Return None without /proc/stat."""
        try:
            fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
            user, nice, system, _, _, irq, softirq, steal = (int(field) for field in fields)
            ticks = user + nice + system + irq + softirq + steal
            own_s = sum(os.times()[:4])  # user and system, of this process and of ended children
            tick_s = 1 / os.sysconf("SC_CLK_TCK")
            return cls(time.monotonic(), ticks * tick_s, own_s + _ticks_of_descendants() * tick_s)
        except (OSError, ValueError):
            return None

    def foreign_since(self, before: "CpuUse") -> float | None:
        """CPU use by other processes since `before` as a share of the CPUs, or None for an empty time span."""
        seconds = self.at_s - before.at_s
        if seconds <= 0:
            return None
        busy_s = (self.busy_s - before.busy_s) - (self.own_s - before.own_s)
        return round(min(max(busy_s / (seconds * (os.cpu_count() or 1)), 0.0), 1.0), 4)


def _ticks_of_descendants() -> int:
    """CPU time of this process's running descendants, and of their ended children."""
    parents, ticks = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # the process has ended meanwhile
            # proc(5): "pid (name) state ppid ..."; utime, stime, cutime and cstime are fields 14 to 17.
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            parents[int(folder.name)] = int(fields[1])
            ticks[int(folder.name)] = sum(map(int, fields[11:15]))
    pids = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in pids} - pids:
        pids |= more
    return sum(ticks[pid] for pid in pids - {os.getpid()})


def git_state() -> dict[str, Any]:
    """Commit of the current folder's repository, and whether files differ from the commit. None outside of a
    repository."""
    commit = output_of(["git", "rev-parse", "HEAD"])
    if not commit:
        return {"git_commit": None, "git_dirty": None}
    return {"git_commit": commit.strip(), "git_dirty": bool(output_of(["git", "status", "--porcelain"]))}


def devices_here() -> list[dict[str, Any]]:
    """Return current clocks, temperatures and power of devices, and reasons of low clocks; [] without nvidia-smi."""
    return _device_rows(output_of) if shutil.which(SMI) else []


def accelerator_here() -> tuple[str, int]:
    """The first type of accelerator that this process may use, and the number of devices, or ("cpu", 0)."""
    counts = ((name, device_count(name)) for name in ACCELERATORS if _is_brought(DEVICES[name]))
    return next(((name, count) for name, count in counts if count), ("cpu", 0))


def device_count(device: str) -> int:
    """The number of accelerators of a type that this process may use, without an import of torch if possible."""
    device_type = DEVICES[device]
    num_here = _devices_of_host(device_type)
    texts = [os.environ[name] for name in device_type.visible if name in os.environ]
    if texts:
        return min(num_visible(text, num_here) for text in texts)
    if num_here is not None:
        return num_here
    code = f"import torch; print(torch.get_device_module({device!r}).device_count())"
    output = output_of([sys.executable, "-c", code], TORCH_TIMEOUT_S)
    return int(output) if output is not None and output.strip().isdecimal() else 0


def num_visible(text: str, num_here: int | None) -> int:
    """The number of devices that are visible by a variable of `DeviceType.visible`, out of `num_here` (0 or None if
    unknown).

    As in CUDA and torch, entries after an invalid number are ignored, and a repeated number hides all devices. All ids
    of devices (`GPU-...`) count, but only the first part of a device (`MIG-...`) is visible to a process.
    """
    names: list[str] = []
    for part in (piece.strip() for piece in text.split(",")):
        number = re.match(r"[+-]?\d+", part)
        # Slurm sets "NoDevFiles" for a job without devices.
        if not number and not part.startswith(IDS):
            break
        if number and (int(number[0]) < 0 or (num_here and int(number[0]) >= num_here)):
            break
        name = str(int(number[0])) if number else part
        if name in names:
            return 0
        names.append(name)
    return min(len(names), 1) if names and names[0].startswith(IDS[1]) else len(names)


def _devices_of_host(device_type: DeviceType) -> int | None:
    """The number of devices by the vendor's command or the driver's files, or None without command and files."""
    for lister in device_type.listers:
        if shutil.which(lister.command[0]) and (listed := output_of(lister.command)) is not None:
            lines = listed.splitlines()
            count = sum(line.startswith(lister.line) for line in lines)
            # Only one part of a split device is visible to a process.
            is_split = bool(lister.part) and any(line.strip().startswith(lister.part) for line in lines)
            return min(count, 1) if is_split else count
    path_lists = [[path for path in ROOT.glob(pattern) if _is_device(path)] for pattern in device_type.files]
    return next((len(paths) for paths in path_lists if paths), 0) if device_type.files else None


def _is_device(path: Path) -> bool:
    """Whether a file represents a device, by its type or its number. With AMD's driver, CPUs have the number 0."""
    try:
        return not path.is_file() or path.read_text().strip() not in ("", "0")
    except OSError:
        return False


def _is_brought(device_type: DeviceType) -> bool:
    """Whether the installed torch may support a type of device, without an import of torch, which takes seconds."""
    if not device_type.brought_by:
        return True
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        version = ""
    return any(
        version.endswith(marker) if marker.startswith("+") else importlib.util.find_spec(marker)
        for marker in device_type.brought_by
    )


def output_of(command: Sequence[str], timeout_s: float = COMMAND_TIMEOUT_S) -> str | None:
    """A command's output, or None after a failure or the time limit.

    A command that hangs in a driver, such as the tool of a broken GPU, cannot be killed and continues to run.
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
