"""A hardware file: JSON with value, basis and source of every figure, checked when read.

On a CPU there are no streams: an operator, and a collective that FSDP2 or DTensor waits for, ends before the next
operator starts. Times are of a rank while all ranks of the machine run, so times include the effect of shared
resources.
"""

import bisect
import math
import re
from collections.abc import Callable, Collection, Container, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from distbench.spec.errors import UserError, nearest
from distbench.spec.file_io import read_json
from distbench.spec.json_decoder import Format, Name, Size, decode, document
from distbench.spec.plugins import load_plugin, plugin_names

VERSION = 1
FORMAT = Format("hardware file", "docs/hardware-files.md describes each figure", "hardware_version", VERSION)
MAX_NAME = 100  # folders of results have this name
FOLDER = Path(__file__).parent / "hardware"
AT = "@"  # between the name or path of a hardware file and a name of its `software`


def number_within(low: float, high: float) -> Any:
    """Return the type of a number within inclusive bounds."""
    return Annotated[float, Meta(ge=low, le=high, description=f"a number from {low:g} to {high:g}")]


OPERATOR_CURVES = ("matmul_f32", "matmul_bf16", "memory", "attention", "attention_backward")
_SECONDS = number_within(0, 1)  # A larger time for one operator is not plausible.
_FACTOR = number_within(0.1, 10)
HOST_FIGURES: Mapping[str, Any] = {
    **dict.fromkeys(("operator_s", "listed_s", "fsdp_s", "redistribution_s", "optimizer_redistribution_s"), _SECONDS),
    **dict.fromkeys(("operator_factor", "matmul_bf16_factor", "step_factor"), _FACTOR),
    "page_faults_s_per_byte": number_within(0, 1e-6),
}
# Optional figures with their defaults; older files have one factor over the whole step.
LEFT_OUT = {"operator_factor": 1.0, "step_factor": 1.0, "page_faults_s_per_byte": 0.0}
# Optional figures that by default are another figure of the file; older files do not separate them.
DEFAULTS_FROM = {"matmul_bf16_factor": "operator_factor", "optimizer_redistribution_s": "redistribution_s"}
_RATE = number_within(1e9, 1e17)  # FLOP/s: from a slow CPU to more than any device
_BANDWIDTH = number_within(1e6, 1e14)  # bytes per second
FIGURES: Mapping[str, Any] = {
    "memory_bytes": number_within(1 << 28, 1 << 44),
    "peak_bf16_flops": _RATE,
    "matmul_bf16_flops": _RATE,
    "matmul_f32_flops": _RATE,
    "attention_flops": _RATE,
    "attention_backward_flops": _RATE,
    "memory_bytes_per_s": _BANDWIDTH,
    "memory_share": number_within(0.01, 1),
    "operator_s": _SECONDS,
    "launch_s": _SECONDS,
    "host_s": _SECONDS,
    "devices_per_node": Annotated[int, Meta(ge=1, le=1024, description="a whole number from 1 to 1024")],
    "node_bytes_per_s": _BANDWIDTH,
    "node_base_s": _SECONDS,
    "network_bytes_per_s": _BANDWIDTH,
    "network_base_s": _SECONDS,
    "network_hop_s": _SECONDS,
    "peak_fp8_flops": _RATE,
    "matmul_fp8_flops": _RATE,
    "attention_full_flops": _RATE,
    "attention_backward_full_flops": _RATE,
    "attention_half_length": number_within(0, 1e6),
    "peer_bytes_per_s": _BANDWIDTH,
    "ring_bytes_per_s": _BANDWIDTH,
    "copy_bytes_per_s": _BANDWIDTH,
    "host_bytes_per_s": _BANDWIDTH,
    "device_spread": number_within(0, 0.5),
    "overlap_slowdown": number_within(0, 2),
    "num_units": Annotated[int, Meta(ge=0, le=4096, description="a whole number from 0 to 4096")],
    "matmul_fill_bytes": number_within(0, 1e5),
    "reserve_bytes": number_within(0, 1 << 44),
}
# Memory outside of torch's allocator: on 8 H100 1.06 GB before a process's first all-to-all and 4.34 GB after it (NCCL
# issue 1685). NCCL uses less on devices with fewer links, which have less memory.
RESERVE_BYTES, RESERVE_SHARE = 4.34e9, 0.1
# Optional figures: the default as text and as a number.
EXTRAPOLATED: Mapping[str, tuple[str, Callable[["Hardware"], float]]] = {
    "peak_fp8_flops": ("twice peak_bf16_flops", lambda known: 2 * known["peak_bf16_flops"]),
    "matmul_fp8_flops": (
        "the matmuls' share of peak_bf16_flops, times peak_fp8_flops",
        lambda known: known["peak_fp8_flops"] * known["matmul_bf16_flops"] / known["peak_bf16_flops"],
    ),
    "attention_full_flops": ("attention_flops", lambda known: known["attention_flops"]),
    "attention_backward_full_flops": ("attention_backward_flops", lambda known: known["attention_backward_flops"]),
    "attention_half_length": ("0: equally fast at all lengths", lambda _: 0.0),
    "peer_bytes_per_s": ("node_bytes_per_s", lambda known: known["node_bytes_per_s"]),
    "ring_bytes_per_s": ("peer_bytes_per_s", lambda known: known["peer_bytes_per_s"]),
    "copy_bytes_per_s": ("25 GB/s: nvbandwidth on A100 over PCIe 4, NVIDIA/nvbandwidth issue 42", lambda _: 25e9),
    "host_bytes_per_s": (
        "10 GB/s: AdamW and SGD of torch 2.13 on one thread per rank, as under torchrun, reach 6 to 26 GB/s on an AMD "
        "EPYC",
        lambda _: 10e9,
    ),
    "device_spread": ("0: all devices equally fast", lambda _: 0.0),
    "overlap_slowdown": ("0: concurrent work is not slowed down", lambda _: 0.0),
    "num_units": ("0: matmuls of all shapes are equally fast", lambda _: 0),
    "matmul_fill_bytes": ("0: tiles of a matmul start at once", lambda _: 0.0),
    "reserve_bytes": (
        "4.34 GB for the context, NCCL's buffers and workspaces (NCCL issue 1685, on 8 H100), at most a tenth of the "
        "memory",
        lambda known: min(RESERVE_BYTES, RESERVE_SHARE * known["memory_bytes"]),
    ),
}
# Rates, and the peak that bounds each rate. On a CPU the peak is measured, so only the first two apply.
PEAKS = (
    ("matmul_bf16_flops", "peak_bf16_flops"),
    ("matmul_fp8_flops", "peak_fp8_flops"),
    ("matmul_f32_flops", "peak_bf16_flops"),
    ("attention_flops", "peak_bf16_flops"),
    ("attention_full_flops", "peak_bf16_flops"),
    ("attention_backward_flops", "peak_bf16_flops"),
    ("attention_backward_full_flops", "peak_bf16_flops"),
)


@dataclass(frozen=True)
class Curve:
    """Seconds by an amount (floating point operations or bytes), with interpolation and extrapolation.

    Args:
        points: (amount, seconds), ascending; times between points are interpolated on logarithmic scales, and larger
            amounts use the last point's rate.
        has_floor: smaller amounts use the first point's time, otherwise its rate.
    """

    points: tuple[tuple[float, float], ...]
    has_floor: bool = False

    def seconds(self, amount: float) -> float:
        """Return the seconds of an operator or collective of this amount."""
        place = bisect.bisect_right(self.points, amount, key=lambda point: point[0])
        if place == 0 and self.has_floor:
            return self.points[0][1]
        if place in (0, len(self.points)):
            nearest_amount, seconds = self.points[max(place - 1, 0)]
            return seconds * amount / nearest_amount
        (low, low_s), (high, high_s) = self.points[place - 1 : place + 1]
        return low_s * (high_s / low_s) ** (math.log(amount / low) / math.log(high / low))


@dataclass(frozen=True)
class HostFigures:
    """The `host` part of a hardware file; docs/hardware-files.md describes each figure.

    Args:
        num_ranks: number of ranks on the machine during measurement.
        figures: a figure for each of HOST_FIGURES.
        operators: a curve for each of OPERATOR_CURVES.
        collectives: (kind, group size) to seconds by payload, in groups of neighbours.
        hosts: each rank's host, in rank order; empty if the file has no hosts, as for one host.
        by_shape: (kind, a group's placement on the hosts in the notation of `spec.levels`) to seconds by payload.
    """

    num_ranks: int
    figures: Mapping[str, float]
    operators: Mapping[str, Curve]
    collectives: Mapping[tuple[str, int], Curve]
    hosts: tuple[str, ...] = ()
    by_shape: Mapping[tuple[str, str], Curve] = field(default_factory=dict)

    def __getitem__(self, name: str) -> float:
        """Return a figure's value."""
        return self.figures[name]


Points = Annotated[
    tuple[
        tuple[
            Annotated[float, Meta(gt=0, description="an amount above 0")],
            Annotated[float, Meta(ge=1e-9, le=1e4, description="seconds from 1e-9 to 1e4")],
        ],
        ...,
    ],
    Meta(min_length=1, description="points [amount, seconds]"),
]


@dataclass(frozen=True)
class Figure:
    """One figure of a hardware file.

    Args:
        basis: "published" (by the maker or in a paper), "measured" (on the machine), "fitted" (to a published run) or
            "guess".
        source: reference, or the reason for the guess.
    """

    value: int | float
    basis: Literal["published", "measured", "fitted", "guess"]
    source: Name


class CollectiveCurve(Struct):
    """Seconds by payload of a kind of collective in groups of one size."""

    kind: Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast"]
    group_size: Size
    points: Points
    hosts: str | None = None


class HostPart(Struct):
    """The `host` part as in the file; see `HostFigures`."""

    num_ranks: Size
    figures: dict[str, Figure]
    operators: dict[str, Points]
    collectives: list[CollectiveCurve]
    hosts: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        """Check names, figures, the order of amounts, and the defaults for unmeasured kinds."""
        _require_figures(self.figures, HOST_FIGURES, LEFT_OUT.keys() | DEFAULTS_FROM.keys())
        _require_names(self.operators, OPERATOR_CURVES, (), "operators")
        curves = {f"operators.{name}": points for name, points in self.operators.items()}
        curves |= {f"collectives[{place}].points": line.points for place, line in enumerate(self.collectives)}
        for where, points in curves.items():
            if not all(low < high for (low, _), (high, _) in pairwise(points)):
                raise ValueError(f"{where} has {len(points)} points, but not with ascending amounts")
        if not any(line.kind == "all_gather" and line.group_size > 1 for line in self.collectives):
            raise ValueError("collectives lacks all_gather in groups of 2 or more")


def _require_names(names: Collection[str], allowed: Collection[str], can_lack: Container[str], where: str) -> None:
    """Raise a ValueError for an unknown or missing name."""
    for name in names:
        if name not in allowed:
            raise ValueError(f"{where}.{name} is unknown ({nearest(name, allowed)})")
    if lacking := next((name for name in allowed if name not in names and name not in can_lack), None):
        raise ValueError(f"{where}.{lacking} is missing")


def _require_figures(figures: Mapping[str, Figure], types: Mapping[str, Any], can_lack: Container[str]) -> None:
    """Raise a ValueError for a figure that is unknown, missing or not of its type."""
    _require_names(figures, types, can_lack, "figures")
    for name, figure in figures.items():
        decode(figure.value, types[name], f"figures.{name}.value")


def _host_figures(part: HostPart) -> HostFigures:
    lines = [(line, Curve(line.points, has_floor=True)) for line in part.collectives]
    figures = LEFT_OUT | {name: figure.value for name, figure in part.figures.items()}
    return HostFigures(
        part.num_ranks,
        {**{name: figures[other] for name, other in DEFAULTS_FROM.items()}, **figures},
        {name: Curve(part.operators[name]) for name in OPERATOR_CURVES},
        # The first entry of a size has groups of neighbours.
        {(line.kind, line.group_size): curve for line, curve in reversed(lines)},
        part.hosts or (),
        {(line.kind, line.hosts): curve for line, curve in lines if line.hosts},
    )


class HardwareFile(Struct):
    """A hardware file."""

    name: Annotated[str, Meta(min_length=1, max_length=MAX_NAME, description=f"a name of up to {MAX_NAME} characters")]
    summary: str
    figures: dict[str, Figure]
    host: HostPart | None = None
    software: dict[str, dict[str, Figure]] = {}

    def __post_init__(self) -> None:
        """Check names and figures, and that no rate exceeds its peak."""
        _require_figures(self.figures, FIGURES, EXTRAPOLATED)
        for name, figures in self.software.items():
            _require_names(figures, FIGURES, FIGURES, f"software.{name}")
            _require_figures(figures, FIGURES, FIGURES)
            if AT in name:
                raise ValueError(f"software.{name} has {AT!r} in its name")
        values = {name: figure.value for name, figure in self.figures.items()}
        for reached, peak in PEAKS if self.host is None else PEAKS[:2]:
            if values.get(reached, 0) > values.get(peak, math.inf):
                raise ValueError(f"figures.{reached} is above figures.{peak}, which is its limit")


@dataclass(frozen=True)
class Hardware:
    """A machine to simulate.

    Args:
        figures: figures of FIGURES, and of EXTRAPOLATED if known, as explained in docs/hardware-files.md.
        host: times on a host that runs the operators itself; None for an accelerator.
        software: figures that another version of the software changes, by the name after `@`.
    """

    name: str
    summary: str
    figures: Mapping[str, Figure]
    host: HostFigures | None = None
    software: Mapping[str, Mapping[str, Figure]] = field(default_factory=dict)

    def __getitem__(self, name: str) -> float:
        """Return a figure's value, or its default."""
        return self.figures[name].value if name in self.figures else EXTRAPOLATED[name][1](self)

    @property
    def usable_bytes(self) -> float:
        """Memory that torch's allocator may use; a host has no reserve."""
        return self["memory_bytes"] - (self["reserve_bytes"] if self.host is None else 0.0)

    @property
    def extrapolated(self) -> dict[str, str]:
        """Figures that the file lacks, with their defaults; empty for a host."""
        if self.host is not None:
            return {}
        return {name: instead for name, (instead, _) in EXTRAPOLATED.items() if name not in self.figures}

    @property
    def devices_per_node(self) -> int:
        """Devices that share the fast links."""
        return int(self["devices_per_node"])

    def of_basis(self, *bases: str) -> dict[str, Figure]:
        """Return the figures with one of these bases."""
        return {name: figure for name, figure in self.figures.items() if figure.basis in bases}


def shipped_hardware() -> list[str]:
    """Return the names of the hardware files that come with distbench."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def shipped_for(device_name: str, option: str) -> str:
    """Return the hardware file of distbench for a device, such as h100 for "NVIDIA H100 80GB HBM3".

    Raises:
        UserError: no file has the name of the device; the sentence ends with the `option` for another file.
    """
    words = {*re.split(r"\W+", device_name.lower())}
    names = [name for name in shipped_hardware() if {*name.split("_")} <= words]
    if not names:
        shipped = ", ".join(shipped_hardware())
        raise UserError(f"no shipped hardware file for {device_name!r} ({shipped}); give {option} NAME|FILE")
    return max(names, key=len)


def load_hardware(name: str) -> Hardware:
    """Load a hardware file of distbench or of a plug-in by name, or any hardware file by path.

    `name@software` replaces figures by the figures of an entry of the file's `software`.

    Raises:
        UserError: the file does not exist, the software is unknown, or a figure is missing, out of range or without a
            source.
    """
    file, at, software = name.rpartition(AT)
    if not at or name.endswith(".json"):
        return hardware_of(*hardware_record(name, "--hardware"))
    hardware = hardware_of(*hardware_record(file, "--hardware"))
    if software not in hardware.software:
        known = f"it has {', '.join(sorted(hardware.software))}" if hardware.software else "it has none"
        raise UserError(f"hardware file {hardware.name} has no software {software!r} ({known}); use --hardware {file}")
    figures = {**hardware.figures, **hardware.software[software]}
    return replace(hardware, name=f"{hardware.name}{AT}{software}", figures=figures)


def hardware_record(name: str, option: str) -> tuple[Any, str]:
    """Return the record of the hardware file that `load_hardware` loads, unchecked, and its name in messages.

    Raises:
        UserError: the name is unknown, or the file cannot be read. `option` begins the message.
    """
    path = Path(name)
    if name in shipped_hardware():
        path = FOLDER / f"{name}.json"
    elif name in plugin_names("hardware"):
        path = Path(load_plugin("hardware", name))
    elif path.suffix != ".json":
        suggestion = nearest(name, [*shipped_hardware(), *plugin_names("hardware")])
        raise UserError(f"{option} {name!r} is unknown ({suggestion}); use a known name, or a path to a .json file")
    return read_json(path, "hardware file"), f"hardware file {path}"


def hardware_of(record: Any, where: str, advice: str = FORMAT.advice) -> Hardware:
    """Read the machine that a file's record describes; UserError with `where` for an invalid record."""
    part = document(record, HardwareFile, where, FORMAT._replace(advice=advice))
    host = _host_figures(part.host) if part.host else None
    return Hardware(part.name, part.summary, part.figures, host, part.software)
