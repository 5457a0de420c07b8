"""A hardware file: JSON, every figure with its value, basis and source, `host` figures included; checked when it is
read.

On a CPU there are no streams: an operator, and a collective that FSDP2 or DTensor waits for, ends before the next thing
begins. Times are those of a rank while all ranks of the machine run, so what they share is in them.
"""

import bisect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from distbench.spec.errors import UserError, nearest
from distbench.spec.file_io import (
    NAME,
    SIZE,
    TEXT,
    Kind,
    Kinds,
    list_of,
    number_within,
    one_of,
    read_json,
    shown,
    wrong_field,
)

OPERATOR_CURVES = ("matmul_f32", "matmul_bf16", "memory", "attention", "attention_backward")
COLLECTIVE_KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast")
# s; a figure below zero or above a second an operator is a mistake, as is a step a hundred times its parts.
_HOST_S = number_within(0, 1)
_FACTOR = number_within(0.1, 10)
HOST_FIGURES: Kinds = {
    "operator_s": _HOST_S,
    "listed_s": _HOST_S,
    "fsdp_s": _HOST_S,
    "redistribution_s": _HOST_S,
    "operator_factor": _FACTOR,
    "step_factor": _FACTOR,
}
# What may be left out, and what is taken then: older files have one factor over the whole step instead.
LEFT_OUT = {"operator_factor": 1.0, "step_factor": 1.0}
_BASES = ("published", "measured", "fitted", "guess")
_FASTEST_S, _SLOWEST_S = 1e-9, 1e4


@dataclass(frozen=True)
class Curve:
    """Seconds by an amount (floating point operations or bytes), between and beyond measured points.

    Args:
        points: (amount, seconds), ascending; times in between are interpolated on logarithmic scales, those above the
            last one are at its rate.
        has_floor: nothing takes less than the first one; else what is below it is at its rate.
    """

    points: tuple[tuple[float, float], ...]
    has_floor: bool = False

    def seconds(self, amount: float) -> float:
        """Of one operator or collective of this amount."""
        place = bisect.bisect_right(self._amounts, amount)
        if place == 0 and self.has_floor:
            return self.points[0][1]
        if place in (0, len(self.points)):
            nearest_amount, seconds = self.points[max(place - 1, 0)]
            return seconds * amount / nearest_amount
        (low, low_s), (high, high_s) = self.points[place - 1 : place + 1]
        return low_s * (high_s / low_s) ** (math.log(amount / low) / math.log(high / low))

    @cached_property
    def _amounts(self) -> list[float]:
        return [amount for amount, _ in self.points]

    @property
    def most(self) -> float:
        """The largest amount that was measured."""
        return self.points[-1][0]


@dataclass(frozen=True)
class HostFigures:
    """The `host` part of a hardware file; docs/simulation.md says what each figure is.

    Args:
        num_ranks: that shared the machine while it was measured.
        figures: one for each of HOST_FIGURES.
        operators: one for each of OPERATOR_CURVES.
        collectives: (kind, group size) to seconds by payload, in groups of neighbours.
        hosts: each rank's host, in rank order; empty where the file does not say, as that of one host may.
        by_shape: (kind, how a group lies on those hosts, as `spec.levels` writes it) to seconds by payload.
    """

    num_ranks: int
    figures: Mapping[str, float]
    operators: Mapping[str, Curve]
    collectives: Mapping[tuple[str, int], Curve]
    hosts: tuple[str, ...] = ()
    by_shape: Mapping[tuple[str, str], Curve] = field(default_factory=dict)

    def __getitem__(self, name: str) -> float:
        """A figure's value."""
        return self.figures[name]


def host_figures(record: Any) -> HostFigures:
    """From a record that `wrong_in_host` found nothing wrong with."""
    lines = [(one, _curve(one["points"], has_floor=True)) for one in record["collectives"]]
    return HostFigures(
        record["num_ranks"],
        LEFT_OUT | {name: figure["value"] for name, figure in record["figures"].items()},
        {name: _curve(record["operators"][name]) for name in OPERATOR_CURVES},
        # The first line of a size is that of neighbours.
        {(one["kind"], one["group_size"]): curve for one, curve in reversed(lines)},
        tuple(record.get("hosts") or ()),
        {(one["kind"], one["hosts"]): curve for one, curve in lines if one.get("hosts")},
    )


def wrong_in_host(record: Any) -> str | None:
    """What is wrong with the `host` part of a hardware file, if anything."""
    if not isinstance(record, dict):
        return f"host is {shown(record)}, not an object"
    if wrong := wrong_field(record, {"num_ranks": SIZE, "hosts": list_of(TEXT)}, ("num_ranks",), "host."):
        return wrong
    for part, kind in (("figures", dict), ("operators", dict), ("collectives", list)):
        if not isinstance(record.get(part), kind):
            return f"host.{part} is {shown(record.get(part))}, not {'a list' if kind is list else 'an object'}"
    return (
        _wrong_in_host_figures(record["figures"])
        or _wrong_in_operators(record["operators"])
        or next(filter(None, (_wrong_in_line(one, at) for at, one in enumerate(record["collectives"]))), None)
        or _lacking(record["collectives"])
    )


def _wrong_in_host_figures(figures: Mapping[str, Any]) -> str | None:
    for name in figures:
        if name not in HOST_FIGURES:
            return f"host.figures.{name} is unknown ({nearest(name, HOST_FIGURES)})"
    for name, kind in HOST_FIGURES.items():
        if name not in figures and name in LEFT_OUT:
            continue
        if not isinstance(figures.get(name), dict):
            return f"host.figures.{name} is {shown(figures.get(name))}, not an object of value, basis and source"
        kinds = {"value": kind, "basis": one_of(_BASES), "source": NAME}
        if wrong := wrong_field(figures[name], kinds, ("value", "basis", "source"), f"host.figures.{name}."):
            return wrong
    return None


def _wrong_in_operators(operators: Mapping[str, Any]) -> str | None:
    for name in operators:
        if name not in OPERATOR_CURVES:
            return f"host.operators.{name} is unknown ({nearest(name, OPERATOR_CURVES)})"
    kinds = dict.fromkeys(OPERATOR_CURVES, POINTS)
    return wrong_field(dict(operators), kinds, OPERATOR_CURVES, "host.operators.")


def _wrong_in_line(line: Any, place: int) -> str | None:
    where = f"host.collectives[{place}]"
    if not isinstance(line, dict):
        return f"{where} is {shown(line)}, not an object"
    kinds = {"kind": one_of(COLLECTIVE_KINDS), "group_size": SIZE, "points": POINTS, "hosts": TEXT}
    return wrong_field(line, kinds, ("kind", "group_size", "points"), f"{where}.")


def _lacking(lines: Sequence[Mapping[str, Any]]) -> str | None:
    """By all-gathers go the kinds that were not measured."""
    is_there = any(line["kind"] == "all_gather" and line["group_size"] > 1 for line in lines)
    return None if is_there else "host.collectives lacks all_gather in groups of 2 or more"


def _are_points(value: Any) -> bool:
    if not isinstance(value, list) or not value:
        return False
    if not all(isinstance(one, list) and len(one) == 2 and all(map(_is_number, one)) for one in value):
        return False
    amounts = [amount for amount, _ in value]
    ascending = all(low < high for low, high in pairwise(amounts))
    return ascending and amounts[0] > 0 and all(_FASTEST_S <= seconds <= _SLOWEST_S for _, seconds in value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


POINTS = Kind(_are_points, "points [amount, seconds], amounts ascending and seconds from 1e-9 to 1e4")


def _curve(points: Sequence[Sequence[float]], has_floor: bool = False) -> Curve:
    return Curve(tuple((float(amount), float(seconds)) for amount, seconds in points), has_floor)


# A hardware file: JSON, every figure with its value, its basis and its source; checked when it is read.

VERSION = 1
MAX_NAME = 100  # folders of results are called by it
FOLDER = Path(__file__).parent / "hardware"
# published: by the maker or in a paper; measured: on the machine; fitted: to one published run; guess: by nobody.
BASES = ("published", "measured", "fitted", "guess")
_RATE = number_within(1e9, 1e17)  # FLOP/s: from a slow CPU to what no device reaches
_BANDWIDTH = number_within(1e6, 1e14)  # bytes a second
_LATENCY = number_within(0, 1)  # s
_SHARE = number_within(0.01, 1)
FIGURES: Kinds = {
    "memory_bytes": number_within(1 << 28, 1 << 44),
    "peak_bf16_flops": _RATE,
    "matmul_bf16_flops": _RATE,
    "matmul_f32_flops": _RATE,
    "attention_flops": _RATE,
    "attention_backward_flops": _RATE,
    "memory_bytes_per_s": _BANDWIDTH,
    "memory_share": _SHARE,
    "operator_s": _LATENCY,
    "launch_s": _LATENCY,
    "host_s": _LATENCY,
    "devices_per_node": Kind(lambda value: type(value) is int and 1 <= value <= 1024, "a whole number from 1 to 1024"),
    "node_bytes_per_s": _BANDWIDTH,
    "node_base_s": _LATENCY,
    "network_bytes_per_s": _BANDWIDTH,
    "network_base_s": _LATENCY,
    "network_hop_s": _LATENCY,
    "peak_fp8_flops": _RATE,
    "matmul_fp8_flops": _RATE,
    "attention_full_flops": _RATE,
    "attention_backward_full_flops": _RATE,
    "attention_half_length": number_within(0, 1e6),
    "peer_bytes_per_s": _BANDWIDTH,
    "ring_bytes_per_s": _BANDWIDTH,
    "device_spread": number_within(0, 0.5),
    "reserve_bytes": number_within(0, 1 << 44),
}
# Of memory, outside of torch's allocator: on 8 H100 1.06 GB before a process's first all-to-all and 4.34 GB after it
# (NCCL issue 1685). NCCL takes less on devices with fewer links, which have less memory.
RESERVE_BYTES, RESERVE_SHARE = 4.34e9, 0.1
# What may be left out: what is taken instead, in words and as a number.
EXTRAPOLATED: Mapping[str, tuple[str, Callable[["Hardware"], float]]] = {
    "peak_fp8_flops": ("twice peak_bf16_flops", lambda known: 2 * known["peak_bf16_flops"]),
    "matmul_fp8_flops": (
        "the share of peak_fp8_flops that matmuls reach of peak_bf16_flops",
        lambda known: known["peak_fp8_flops"] * known["matmul_bf16_flops"] / known["peak_bf16_flops"],
    ),
    "attention_full_flops": ("attention_flops", lambda known: known["attention_flops"]),
    "attention_backward_full_flops": (
        "attention_backward_flops",
        lambda known: known["attention_backward_flops"],
    ),
    "attention_half_length": ("0: as fast at all lengths", lambda _: 0.0),
    "peer_bytes_per_s": ("node_bytes_per_s", lambda known: known["node_bytes_per_s"]),
    "ring_bytes_per_s": ("peer_bytes_per_s", lambda known: known["peer_bytes_per_s"]),
    "device_spread": ("0: all devices equally fast", lambda _: 0.0),
    "reserve_bytes": (
        "4.34 GB for the context, NCCL's buffers and workspaces (NCCL issue 1685, on 8 H100), a tenth of the memory at "
        "most",
        lambda known: min(RESERVE_BYTES, RESERVE_SHARE * known["memory_bytes"]),
    ),
}
# Rates and the peak that none of them is above; on a CPU, whose peak is measured, only the first two.
PEAKS = (
    ("matmul_bf16_flops", "peak_bf16_flops"),
    ("matmul_fp8_flops", "peak_fp8_flops"),
    ("matmul_f32_flops", "peak_bf16_flops"),
    ("attention_flops", "peak_bf16_flops"),
    ("attention_full_flops", "peak_bf16_flops"),
    ("attention_backward_flops", "peak_bf16_flops"),
    ("attention_backward_full_flops", "peak_bf16_flops"),
)
_FIGURE: Kinds = {"basis": one_of(BASES), "source": NAME}


@dataclass(frozen=True)
class Figure:
    """One figure of a hardware file.

    Args:
        basis: out of BASES.
        source: where it can be looked up, or what it was guessed from.
    """

    value: float
    basis: str
    source: str


@dataclass(frozen=True)
class Hardware:
    """A machine to simulate.

    Args:
        figures: out of FIGURES, those of EXTRAPOLATED where they are known; their meanings are in docs/simulation.md.
        host: where the host runs the operators itself, what they take there; None for an accelerator.
    """

    name: str
    summary: str
    figures: Mapping[str, Figure]
    host: HostFigures | None = None

    def __getitem__(self, name: str) -> float:
        """A figure's value; what is taken instead where the file has none."""
        return self.figures[name].value if name in self.figures else EXTRAPOLATED[name][1](self)

    @property
    def usable_bytes(self) -> float:
        """What torch's allocator may take of the memory; a host has no such reserve."""
        return self["memory_bytes"] - (self["reserve_bytes"] if self.host is None else 0.0)

    @property
    def extrapolated(self) -> dict[str, str]:
        """The figures that the file has not, and what is taken instead; a host's are no device's."""
        if self.host is not None:
            return {}
        return {name: instead for name, (instead, _) in EXTRAPOLATED.items() if name not in self.figures}

    @property
    def devices_per_node(self) -> int:
        """Devices that share the fast links."""
        return int(self["devices_per_node"])

    def of_basis(self, *bases: str) -> dict[str, Figure]:
        """The figures of these bases."""
        return {name: figure for name, figure in self.figures.items() if figure.basis in bases}


def shipped_hardware() -> list[str]:
    """Names of the hardware files that come with distbench."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def load_hardware(name: str) -> Hardware:
    """A shipped hardware file by its name, or one by its path.

    Raises:
        UserError: there is no such file, or a figure of it is missing, absurd or without a source.
    """
    path = Path(name)
    if name in shipped_hardware():
        path = FOLDER / f"{name}.json"
    elif path.suffix != ".json":
        known = nearest(name, shipped_hardware())
        raise UserError(f"--hardware {name!r} is unknown ({known}); give one of those, or a path to a .json file")
    return hardware_of(read_json(path, "hardware file"), f"hardware file {path}")


def hardware_of(record: Any, where: str, advice: str = "docs/simulation.md says what each figure is") -> Hardware:
    """The machine that a file's record describes; UserError, which names `where`, for what is wrong with it."""
    if not isinstance(record, dict):
        raise UserError(f"{where} cannot be used: it is {shown(record)}, not an object; {advice}")
    version = record.get("hardware_version")
    if type(version) is int and version > VERSION:
        raise UserError(f"{where} is newer than this distbench; update distbench")
    wrong = wrong_field(record, {"name": NAME, "summary": TEXT}, ("hardware_version", "name", "summary", "figures"))
    if version is not None and version != VERSION:
        wrong = f"hardware_version is {shown(version)}, not {VERSION}"
    if not wrong and len(record["name"]) > MAX_NAME:
        wrong = f"name has more than {MAX_NAME} characters"
    figures: Any = record.get("figures")
    if not wrong and not isinstance(figures, dict):
        wrong = f"figures is {shown(figures)}, not an object"
    host = record.get("host")
    wrong = wrong or _wrong_in_figures(figures, PEAKS if host is None else PEAKS[:2])
    wrong = wrong or (wrong_in_host(host) if host is not None else None)
    if wrong:
        raise UserError(f"{where} cannot be used: {wrong}; {advice}")
    found = {name: Figure(figure["value"], figure["basis"], figure["source"]) for name, figure in figures.items()}
    return Hardware(record["name"], record["summary"], found, host_figures(host) if host is not None else None)


def _wrong_in_figures(figures: Any, peaks: Sequence[tuple[str, str]]) -> str | None:
    # What is misspelt lacks the right name too.
    for name in figures:
        if name not in FIGURES:
            return f"figures.{name} is unknown ({nearest(name, FIGURES)})"
    for name in FIGURES:
        if name not in figures and name not in EXTRAPOLATED:
            return f"figures.{name} is missing"
    for name, figure in figures.items():
        if not isinstance(figure, dict):
            return f"figures.{name} is {shown(figure)}, not an object of value, basis and source"
        kinds = {**_FIGURE, "value": FIGURES[name]}
        if wrong := wrong_field(figure, kinds, ("value", "basis", "source"), f"figures.{name}."):
            return wrong
    for reached, peak in peaks:
        if reached in figures and peak in figures and figures[reached]["value"] > figures[peak]["value"]:
            return f"figures.{reached} is above figures.{peak}, which nothing reaches"
    return None
