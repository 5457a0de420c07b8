"""The rates of an accelerator in a hardware file, from measured operators; all other figures are from a base."""

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from distbench.planning.measured_collectives import num_ranks_of, timings_in
from distbench.planning.profile_fit import hosts_of
from distbench.records.run_file import DTYPE_BYTES, Run
from distbench.show.blocks import Block, Table
from distbench.show.units import bandwidth_text, size_text, time_text
from distbench.simulate.hardware_file import Figure, Hardware, hardware_of
from distbench.simulate.measured_hardware import ABSURD, save_hardware, short
from distbench.simulate.measured_links import MEASURED, write_links
from distbench.simulate.operator_costs import operator_s
from distbench.simulate.recording import ATTENTION, ATTENTION_BACKWARD, MATMUL, Operator
from distbench.spec.errors import UserError
from distbench.spec.printable_text import count_text

MATMULS = ("matmul_bf16", "matmul_f32")
ATTENTIONS = ("attention", "attention_full", "attention_backward", "attention_backward_full")
OVERLAP = ("compute", "communication", "both")


class Point(NamedTuple):
    """One measured operator.

    Args:
        size: as in the case's parameters.
        amount: floating point operations, or bytes.
    """

    what: str
    size: str
    amount: int
    seconds: float

    @property
    def length(self) -> int:
        """Sequence length of attention, whose size is such as 8x16x1024x128."""
        return int(self.size.split("x")[2])

    @property
    def operator(self) -> Operator:
        """The matmul or attention as in a recording."""
        if self.what in MATMULS:
            dtype = self.what.removeprefix("matmul_")
            matrix = int(self.size) ** 2 * DTYPE_BYTES[dtype]
            reads, writes = [(0, matrix), (1, matrix)], [(2, matrix)]
            return Operator(0, "", MATMUL, self.amount, dtype, 3 * matrix, reads, writes, "", "")
        kind = ATTENTION_BACKWARD if "backward" in self.what else ATTENTION
        attention = self.length, self.length, int(not self.what.endswith("_full"))
        return Operator(0, "", kind, self.amount, "bf16", 0, [], [], "", "", attention)


def write_device(path: Path, record: dict[str, Any], base: Hardware, run: Run) -> list[Block]:
    """Write the base with measured rates and, for several ranks, measured links; return tables of figures and errors.

    Args:
        record: of `base`, as from `measured_links.base_hardware`; it is changed.
        run: of scenario `calibrate_operators` on the accelerator.

    Raises:
        UserError: an operator has no measurement, the base contradicts the run, or a figure is out of range.
    """
    world_size = int(run.header["environment"]["world_size"])
    points = _points(run)
    figures = _figures(points, base, world_size)
    if (most := max(Counter(hosts_of(run)).values(), default=1)) > base.devices_per_node:
        figures["devices_per_node"] = most
    source = f"distbench calibrate, run {run.header['run_id']}"
    record["figures"] |= {
        name: {"value": short(value), "basis": "measured", "source": source} for name, value in figures.items()
    }
    record["name"] = base.name.removesuffix(MEASURED)[: 100 - len(MEASURED)] + MEASURED
    record["summary"] = f"{base.summary}; rates measured on {count_text(world_size, 'device')}"
    hardware = hardware_of(record, ABSURD, f"give --base the hardware file of this device instead of {base.name}")
    blocks: list[Block] = [_figure_table(figures, base), _error_table(points, hardware, world_size)]
    if world_size == 1:
        save_hardware(path, record)
        return blocks
    timings, measured = timings_in([run], None, [])
    return [
        *blocks,
        *write_links(path, record, replace(hardware, name=base.name), timings, None, num_ranks_of(measured)),
    ]


def _points(run: Run) -> dict[str, list[Point]]:
    """Return the measured operators by kind, from the smallest."""
    points: dict[str, list[Point]] = {}
    for record in run.cases:
        params = record["case"]["params"]
        if record["status"] == "ok" and params["what"] != "collective":
            counters = record["counters"]
            seconds = statistics.median(record["samples_s"]) / counters["repeats"]
            point = Point(params["what"], params["size"], int(counters["amount"]), seconds)
            points.setdefault(point.what, []).append(point)
    if missing := [what for what in (*MATMULS, "memory", *ATTENTIONS, "host") if what not in points]:
        raise UserError(f"{run.path} has no {missing[0]}; measure with distbench calibrate --only hardware")
    return {what: sorted(of_kind, key=lambda point: point.amount) for what, of_kind in points.items()}


def _figures(points: Mapping[str, Sequence[Point]], base: Hardware, world_size: int) -> dict[str, float]:
    """Return the measured figures. A rate is the base's times the median of predicted by measured times."""
    half_length = statistics.median(_half_length(points[what]) for what in ATTENTIONS)
    known = replace(base, figures={**base.figures, "attention_half_length": Figure(half_length, "measured", "")})
    figures = {
        f"{what}_flops": known[f"{what}_flops"]
        * statistics.median(
            operator_s(point.operator, known, None, world_size) / point.seconds for point in points[what]
        )
        for what in (*MATMULS, *ATTENTIONS)
    }
    memory = max(point.amount / point.seconds for point in points["memory"])
    most = max(memory, base["memory_bytes_per_s"])
    figures |= {"attention_half_length": half_length, "memory_bytes_per_s": most, "memory_share": memory / most}
    figures["host_s"] = points["host"][0].seconds
    if overlap := {point.size: point.seconds for point in points.get("overlap", ())}:
        compute_s, communication_s, both_s = (overlap[part] for part in OVERLAP)
        # Both are slower by one factor until the shorter ends; the longer then does the rest of its work alone.
        added_s = both_s - max(compute_s, communication_s)
        figures["overlap_slowdown"] = max(added_s / min(compute_s, communication_s), 0.0)
    return figures


def _half_length(points: Sequence[Point]) -> float:
    """Return the length at which attention reaches half of its rate, 0 for rates that do not rise with the length.

    The reciprocal of the rate is a line over the reciprocal of the length, as in `operator_costs.operator_s`.
    """
    if len(points) == 1:
        return 0.0
    inverse_rates = [point.seconds / point.amount for point in points]
    slope, inverse = np.polyfit([1 / point.length for point in points], inverse_rates, 1)
    return float(slope / inverse) if slope > 0 and inverse > 0 else 0.0


def _figure_table(figures: Mapping[str, float], base: Hardware) -> Table:
    rows = [(name, _value_text(name, base[name]), _value_text(name, value)) for name, value in figures.items()]
    notes = [f"all other figures of the device are from {base.name}"]
    return Table("rates", ("<figure", base.name, "measured"), rows, notes)


def _value_text(name: str, value: float) -> str:
    if name.endswith("_flops"):
        return f"{value / 1e12:,.1f} TFLOP/s"
    if name.endswith("bytes_per_s"):
        return f"{bandwidth_text(value / 1e9).strip()} GB/s"
    return time_text(value) if name.endswith("_s") else f"{value:.4g}"


def _error_table(points: Mapping[str, Sequence[Point]], hardware: Hardware, world_size: int) -> Table:
    rows = []
    for what in (*MATMULS, *ATTENTIONS, "memory"):
        for point in points[what]:
            if what == "memory":
                size = size_text(point.amount)
                predicted_s = point.amount / (hardware["memory_bytes_per_s"] * hardware["memory_share"])
            else:
                size, predicted_s = point.size, operator_s(point.operator, hardware, None, world_size)
            error = f"{100 * (predicted_s / point.seconds - 1):+.0f} %"
            rows.append((what, size, time_text(point.seconds), time_text(predicted_s), error))
    return Table("operators with these figures", ("<operator", "size", "measured", "predicted", "error"), rows)
