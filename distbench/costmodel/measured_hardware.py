"""A hardware file of the machine that ranks ran on: what operators, collectives and whole steps took there.

Operators and collectives are measured one by one, the host's share by steps so small that they are nothing else, and
whole steps of two kinds say how much longer operators take there than alone.
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from distbench.costmodel.lines import nonnegative_least_squares
from distbench.runs.run_file import Run
from distbench.simulate.hardware.host_figures import OPERATOR_CURVES, HostFigures
from distbench.simulate.host_time import FSDP, collective_on_host, is_listed, num_listed, on_host, operator_on_host
from distbench.simulate.recording import Collective, Operator, Recording
from distbench.spec.errors import UserError

Points = list[tuple[float, float]]
# Of scenario `calibrate_steps`: steps that are the host's time alone, and those that operators are held against.
TINY, WHOLE = ("host", "host_fsdp", "host_tp"), ("whole", "whole_tp")
OPTIMIZER = "optimizer"
HOST_COSTS = ("operator_s", "fsdp_s", "redistribution_s")


class MeasuredStep(NamedTuple):
    """A step that was measured and recorded; seconds by phase, which add up to the step's: medians."""

    phases_s: Mapping[str, float]
    step_s: float
    recording: Recording


def measured_curves(run: Run) -> tuple[dict[str, Points], dict[tuple[str, int, str], Points]]:
    """Points of operators by name, and of collectives by kind, group size and how a group lies on several hosts."""
    operators: dict[str, Points] = {name: [] for name in OPERATOR_CURVES}
    collectives: dict[tuple[str, int, str], Points] = {}
    for record in run.cases:
        if record["case"].get("kind") != "compute" or record["status"] != "ok":
            continue
        params, counters = record["case"]["params"], record["counters"]
        point = float(counters["amount"]), statistics.median(record["samples_s"]) / counters["repeats"]
        if params["what"] == "collective":
            key = params["op"], record["group_size"], params.get("lies", "")
            collectives.setdefault(key, []).append(point)
        else:
            operators[params["what"]].append(point)
    for name, points in operators.items():
        if not points:
            raise UserError(f"{run.path} has no {name}; measure it with distbench calibrate")
    return {name: rising(points) for name, points in operators.items()}, {
        key: rising(points) for key, points in collectives.items()
    }


def rising(points: Iterable[tuple[float, float]]) -> Points:
    """Ascending, one of an amount; more never takes less."""
    found: Points = []
    for amount, seconds in sorted(points):
        least = found[-1][1] if found else 0.0
        if found and found[-1][0] == amount:
            found.pop()
        found.append((amount, max(seconds, least)))
    return found


def measured_steps(run: Run, recordings: Sequence[Recording]) -> dict[str, MeasuredStep]:
    """Each part of scenario `calibrate_steps`: measured, and recorded."""
    by_variant = {recording.head.variant: recording for recording in recordings}
    found = {}
    for record in run.cases:
        variant = record["case"].get("params", {}).get("variant")
        # A report's baseline is measured a second time, under a name that nobody recorded.
        if record["case"].get("kind") == "step" and record["status"] == "ok" and variant in by_variant:
            phases = {name: statistics.median(times) for name, times in record["phases_s"].items()}
            step_s = statistics.median(record["samples_s"])
            # Each phase is that of its slowest rank, which is not always the same one.
            share = step_s / sum(phases.values())
            phases = {name: seconds * share for name, seconds in phases.items()}
            found[variant.rpartition("=")[2]] = MeasuredStep(phases, step_s, by_variant[variant])
    if missing := [part for part in (*TINY, *WHOLE) if part not in found]:
        raise UserError(f"{run.path} has no step {missing[0]}; measure it with distbench calibrate")
    return found


def host_costs(steps: Mapping[str, MeasuredStep], blank: HostFigures) -> dict[str, float]:
    """What the host takes for itself: an operator, a collective of FSDP2, of DTensor, a tensor of the optimizer."""
    rows, values = [], []
    for part in TINY:
        step = steps[part]
        own = sum(seconds for name, seconds in step.phases_s.items() if name != OPTIMIZER)
        left = own - parts_s(step.recording, blank, optimizer=False)
        rows.append([count / own for count in _counts(step.recording)])
        values.append(max(left, 0.0) / own)
    solution, _ = nonnegative_least_squares(np.array(rows, dtype=float), np.array(values))
    found = dict(zip(HOST_COSTS, map(float, solution), strict=True))
    listed = left_s = 0.0
    for part in TINY:
        step = steps[part]
        if any(one.phase == OPTIMIZER for one in _communicating(step.recording)):
            continue  # its time is that of its collectives
        listed += sum(num_listed(one) for one in _operators(step.recording) if is_listed(one))
        others_s = parts_s(step.recording, blank, optimizer=True)
        left_s += max(step.phases_s.get(OPTIMIZER, 0.0) - others_s, 0.0)
    return {**found, "listed_s": left_s / max(listed, 1)}


def operator_factors(steps: Mapping[str, MeasuredStep], host: HostFigures) -> dict[str, float]:
    """By whole step, how many times as long as alone its operators took: what collectives and the host's own time,
    which were measured in steps or among waiting ranks, leave of it; 0 where they leave nothing.

    Args:
        host: without factors.
    """
    found = {}
    for part in WHOLE:
        recording, rest_s, operators_s = steps[part].recording, 0.0, 0.0
        for event in recording.step:
            if isinstance(event, Operator | Collective):
                took = on_host(event, host)
                rest_s += took.host_s
                if isinstance(event, Operator):
                    operators_s += took.seconds
                else:
                    rest_s += took.seconds
        found[part] = max(steps[part].step_s - rest_s, 0.0) / operators_s
    return found


def parts_s(recording: Recording, host: HostFigures, optimizer: bool) -> float:
    """Operators and collectives of the optimizer, or of the rest, seconds without the host's own."""
    operators = sum(
        operator_on_host(one, host) for one in _operators(recording) if (one.phase == OPTIMIZER) == optimizer
    )
    return operators + sum(
        collective_on_host(one, host) for one in _communicating(recording) if (one.phase == OPTIMIZER) == optimizer
    )


def _operators(recording: Recording) -> list[Operator]:
    return [event for event in recording.step if isinstance(event, Operator)]


def _communicating(recording: Recording) -> list[Collective]:
    return [one for one in recording.collectives if one.group_size > 1]


def _counts(recording: Recording) -> tuple[int, int, int]:
    """Operators, FSDP2's collectives, others; the optimizer's left out."""
    operators = sum(one.phase != OPTIMIZER for one in _operators(recording))
    collectives = [one for one in _communicating(recording) if one.phase != OPTIMIZER]
    of_fsdp = sum(one.source == FSDP for one in collectives)
    return operators, of_fsdp, len(collectives) - of_fsdp
