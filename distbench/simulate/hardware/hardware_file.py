"""A hardware file: JSON, every figure with its value, its basis and its source; checked when it is read."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distbench.simulate.hardware.host_figures import HostFigures, host_figures, wrong_in_host
from distbench.spec.errors import UserError, nearest
from distbench.spec.fields import NAME, TEXT, Kind, Kinds, number_within, one_of, shown, wrong_field
from distbench.spec.reading import read_json

VERSION = 1
MAX_NAME = 100  # folders of results are called by it
FOLDER = Path(__file__).parent
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
