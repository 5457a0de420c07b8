"""What drives this host's GPUs, how fast they are allowed to run, and how they are linked: what nvidia-smi tells.

AMD's and other vendors' tools are not read: their hosts have none of these fields.
"""

import re
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any

from distbench.spec.printable import count_text

SMI = "nvidia-smi"
# As `nvidia-smi --help-query-gpu` has them; drivers before 535 have the older name of the last one.
FIELDS = (
    *("index", "name", "driver_version", "clocks.current.sm", "clocks.max.sm", "clocks.current.memory"),
    *("temperature.gpu", "power.draw", "power.limit", "persistence_mode", "mig.mode.current"),
)
NUMBERS = ("index", "clocks.", "temperature.", "power.")  # beginnings of fields; None where it is no number ("ERR!")
REASONS = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")
# nvml.h, nvmlClocksEventReasons: what keeps clocks down. Idle (0x1) is no reason, nor is a clock that somebody set
# for a display (0x100).
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
    """`driver`, `accelerators` (clocks in MHz, degrees Celsius, watts, by device) and `topology` (link to the number of
    pairs) of this host; {} without nvidia-smi.

    Args:
        run: gives a command's output, None where it failed.
    """
    if not shutil.which(SMI):
        return {}
    devices = devices_told(run)
    links = matrix_of(run((SMI, "topo", "-m")) or "")
    return {
        "driver": driver_of(devices),
        "accelerators": devices,
        "topology": dict(Counter(links.values())),
    }


def devices_told(run: Run) -> list[dict[str, Any]]:
    """The devices as nvidia-smi has them now, with `slowed_by`: what keeps their clocks down, in words."""
    for reasons in REASONS:
        text = run((SMI, f"--query-gpu={','.join((*FIELDS, reasons))}", "--format=csv,noheader,nounits"))
        if text is not None and (found := devices_in(text)):
            return found
    return []


def driver_of(devices: Sequence[Mapping[str, Any]]) -> str | None:
    """The driver's version, of a device that tells; they share it."""
    return next((one["driver_version"] for one in devices if one["driver_version"]), None)


def devices_in(text: str) -> list[dict[str, Any]]:
    """The lines of a query; a field that a device does not have ("[N/A]") is None."""
    found = []
    for line in text.splitlines():
        values = [value.strip() for value in line.split(",")]
        if len(values) == len(FIELDS) + 1:
            told = {field: _value(field, value) for field, value in zip(FIELDS, values, strict=False)}
            found.append(told | {"slowed_by": reasons_in(values[-1])})
    return found


def _value(field: str, text: str) -> str | float | None:
    if field.startswith(NUMBERS):
        return float(text) if re.fullmatch(r"\d+(\.\d+)?", text) else None
    return None if text.startswith("[") or text == "N/A" else text


def reasons_in(mask: str) -> list[str]:
    """What a mask of reasons such as 0x0000000000000024 means."""
    try:
        bits = int(mask, 16)
    except ValueError:
        return []
    return [words for bit, words in SLOWED_BY.items() if bits & bit]


def matrix_of(text: str) -> Matrix:
    """Pairs of GPUs to what stands in their place of a matrix of `nvidia-smi topo`: NV18, PIX, SYS, ...; OK, CNS."""
    lines = [STYLE.sub("", line) for line in text.splitlines()]
    header = next((line for line in lines if re.match(r"\s+GPU0\b", line)), None)
    if header is None:
        return {}
    columns = re.findall(r"(?:GPU|NIC)\d+|mlx\S+", header)
    found: Matrix = {}
    for line in lines:
        name, *cells = line.split()[: len(columns) + 1] or [""]
        if re.fullmatch(r"GPU\d+", name) and len(cells) == len(columns):
            found |= {(name, other): cell for other, cell in zip(columns, cells, strict=True)}
    gpus = [name for name in columns if name.startswith("GPU")]
    return {pair: found[pair] for pair in combinations(gpus, 2) if pair in found}


def checks_of(run: Run, variables: Mapping[str, str], switched_off: Mapping[str, str]) -> list[dict[str, Any]]:
    """For `distbench doctor`: clocks, links, peer access, and what is switched off; [] without nvidia-smi.

    Args:
        run: as for `accelerator_facts`.
        variables: environment variables that are set.
        switched_off: variable to the value with which it switches something off.
    """
    off = [f"{name}={value}" for name, value in switched_off.items() if variables.get(name) == value]
    checks = [
        _row("switched off", not off, ", ".join(off) or "nothing", "unset them, unless they are what you measure")
    ]
    if not shutil.which(SMI):
        return checks if off else []
    if devices := devices_told(run):
        checks += [_clocks(devices), _modes(devices)]
    if links := matrix_of(run((SMI, "topo", "-m")) or ""):
        slow = {pair: link for pair, link in links.items() if not link.startswith("NV")}
        is_mixed = 0 < len(slow) < len(links)
        advice = (
            f"only some pairs have NVLink; {_pairs(slow)} go another way: put neighbours of a mesh dim on the others"
        )
        counts = ", ".join(
            f"{link} between {count_text(count, 'pair')}" for link, count in Counter(links.values()).most_common()
        )
        checks.append(_row("GPU links", not is_mixed, counts, advice))
    if peers := matrix_of(run((SMI, "topo", "-p2p", "r")) or ""):
        closed = {pair: state for pair, state in peers.items() if state != "OK"}
        found = f"{len(peers) - len(closed)} of {count_text(len(peers), 'pair')}"
        advice = (
            f"{_pairs(closed)} have no access ({', '.join(sorted(set(closed.values())))}): NCCL copies through the host"
        )
        checks.append(_row("GPU peer access", not closed, found, advice))
    return checks


def _clocks(devices: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    slowed = {
        f"GPU{place if one['index'] is None else one['index']:g}": one["slowed_by"]
        for place, one in enumerate(devices)
        if one["slowed_by"]
    }
    now, most = (
        [one[name] for one in devices if one[name] is not None] for name in ("clocks.current.sm", "clocks.max.sm")
    )
    found = f"{min(now):g} to {max(now):g} MHz now, {min(most):g} at most" if now and most else "not told"
    advice = "; ".join(f"{name} is held down by {', '.join(reasons)}" for name, reasons in slowed.items())
    return _row("GPU clocks", not slowed, found, f"{advice}: figures will be lower and less steady")


def _modes(devices: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    persistent = all(one["persistence_mode"] in ("Enabled", None) for one in devices)
    split = any(one["mig.mode.current"] == "Enabled" for one in devices)
    modes = f"persistence {'on' if persistent else 'off'}, MIG {'on' if split else 'off'}"
    found = f"driver {driver_of(devices) or 'not told'}, {modes}"
    advice = "MIG devices have no peer access" if split else "turn persistence on: nvidia-smi -pm 1"
    return _row("GPU driver", persistent and not split, found, advice)


def _pairs(pairs: Mapping[tuple[str, str], str], most: int = 3) -> str:
    named = [f"{one}-{other}" for one, other in pairs]
    return ", ".join(named[:most]) + (f" and {len(named) - most} more" if len(named) > most else "")


def _row(name: str, ok: bool, found: str, advice: str) -> dict[str, Any]:
    return {"name": name, "ok": ok, "found": found, "advice": "" if ok else advice, "mark": "LOOK"}
