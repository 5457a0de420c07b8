"""What was measured of a machine whose host runs the operators itself: the `host` part of a hardware file.

On a CPU there are no streams: an operator, and a collective that FSDP2 or DTensor waits for, ends before the next thing
begins. Times are those of a rank while all ranks of the machine run, so what they share is in them.
"""

import bisect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

from distbench.spec.errors import nearest
from distbench.spec.fields import NAME, SIZE, TEXT, Kind, Kinds, list_of, number_within, one_of, shown, wrong_field

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
        _wrong_in_figures(record["figures"])
        or _wrong_in_operators(record["operators"])
        or next(filter(None, (_wrong_in_line(one, at) for at, one in enumerate(record["collectives"]))), None)
        or _lacking(record["collectives"])
    )


def _wrong_in_figures(figures: Mapping[str, Any]) -> str | None:
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
