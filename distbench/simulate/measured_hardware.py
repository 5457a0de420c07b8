"""A hardware file of the machine that ranks ran on: measured times of operators, collectives and whole steps.

Operators and collectives are measured one by one, and the host's share by very small steps. Two kinds of whole steps
show how much longer operators take in a step than alone.
"""

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from distbench.planning.cost_profile import nonnegative_least_squares
from distbench.planning.profile_fit import hosts_of
from distbench.records.run_file import Run
from distbench.show.blocks import Table
from distbench.show.terminal import text_of
from distbench.show.units import NOTHING, size_text, time_text
from distbench.simulate.compile_float8 import HALF
from distbench.simulate.hardware_file import (
    DEFAULTS_FROM,
    HOST_FIGURES,
    LEFT_OUT,
    OPERATOR_CURVES,
    VERSION,
    Curve,
    Hardware,
    HostFigures,
    hardware_of,
)
from distbench.simulate.operator_costs import FSDP, collective_on_host, is_listed, num_listed, on_host, operator_on_host
from distbench.simulate.recording import MATMUL, Collective, Operator, Recording
from distbench.spec.errors import UserError
from distbench.spec.file_io import write_whole
from distbench.spec.printable_text import count_text

Points = list[tuple[float, float]]
# Steps of scenario `calibrate_steps` that measure the host's time, and steps that measure operators in a step.
TINY, WHOLE, WHOLE_BF16 = ("host", "host_fsdp", "host_tp"), ("whole", "whole_tp"), "whole_bf16"
OPTIMIZER, NEW_BLOCK = "optimizer", "new_block"
ABSURD, ADVICE = "the measurement", "calibrate again on an idle machine"
GUESSED_NETWORK = "only one machine was measured, so its internal links count as network"
DIGITS = 4  # Significant digits of points, as precise as a measurement.
CALLED = {
    "matmul_f32": "matmul, f32",
    "matmul_bf16": "matmul, bf16",
    "memory": "elementwise, f32",
    "attention": "attention, f32",
    "attention_backward": "attention's backward, f32",
}
HOST = {
    "operator_s": "an operator, its module and its autograd node",
    "fsdp_s": "a collective of FSDP2, its hooks and copies",
    "redistribution_s": "a collective of DTensor, its dispatch",
    "optimizer_redistribution_s": "the same in the optimizer",
    "listed_s": "a tensor of the optimizer's lists",
}


class MeasuredStep(NamedTuple):
    """A measured and recorded step; its median seconds by phase add up to the step."""

    phases_s: Mapping[str, float]
    step_s: float
    recording: Recording


def _measured_curves(run: Run) -> tuple[dict[str, Points], dict[tuple[str, int, str], Points]]:
    """Return points of operators by name, also of writes to a new block, and of collectives by kind, group size and
    placement on several hosts.
    """
    operators: dict[str, Points] = {name: [] for name in (*OPERATOR_CURVES, NEW_BLOCK)}
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
    if missing := next((name for name, points in operators.items() if not points), None):
        raise UserError(f"{run.path} has no {missing}; measure with distbench calibrate")
    rising_operators = {name: rising(points) for name, points in operators.items()}
    return rising_operators, {key: rising(points) for key, points in collectives.items()}


def rising(points: Points) -> Points:
    """Return ascending points, one per amount; times never fall with larger amounts."""
    longest_s, by_amount = 0.0, dict[float, float]()
    for amount, seconds in sorted(points):
        longest_s = by_amount[amount] = max(seconds, longest_s)
    return list(by_amount.items())


def _measured_steps(run: Run, recordings: Sequence[Recording]) -> dict[str, MeasuredStep]:
    """Return each part of scenario `calibrate_steps`, measured and recorded."""
    by_variant = {recording.head.variant: recording for recording in recordings}
    steps = {}
    for record in run.cases:
        variant = record["case"].get("params", {}).get("variant")
        # A report's baseline is also measured as a control, which has no recording under its name.
        if record["case"].get("kind") == "step" and record["status"] == "ok" and variant in by_variant:
            phases = {name: statistics.median(times) for name, times in record["phases_s"].items()}
            step_s = statistics.median(record["samples_s"])
            # Each phase's time is its slowest rank's, and that rank may differ between phases.
            share = step_s / sum(phases.values())
            scaled = {name: seconds * share for name, seconds in phases.items()}
            steps[variant.rpartition("=")[2]] = MeasuredStep(scaled, step_s, by_variant[variant])
    if missing := [part for part in (*TINY, *WHOLE, WHOLE_BF16) if part not in steps]:
        raise UserError(f"{run.path} has no step {missing[0]}; measure with distbench calibrate")
    return steps


def _host_costs(steps: Mapping[str, MeasuredStep], blank: HostFigures) -> dict[str, float]:
    """Return the host's time per operator, per collective of FSDP2 and DTensor, and per tensor of the optimizer.

    DTensor's collectives in the optimizer have a figure of their own. They have no module and no autograd node, and
    took 1.9 and 2.1 ms where those of the model took 5.0 and 5.5 ms (two calibrations, 2 cores, 4 ranks).
    """
    model, optimizer = [], []
    for part in TINY:
        step = steps[part]
        model_events = [event for event in _events(step.recording) if event.phase != OPTIMIZER]
        operators = sum(isinstance(event, Operator) for event in model_events)
        of_fsdp = sum(isinstance(event, Collective) and event.source == FSDP for event in model_events)
        model_s = sum(seconds for name, seconds in step.phases_s.items() if name != OPTIMIZER)
        model.append((model_s, model_events, (operators, of_fsdp, len(model_events) - operators - of_fsdp)))
        optimizer_events = [event for event in _events(step.recording) if event.phase == OPTIMIZER]
        listed = sum(
            num_listed(event) for event in optimizer_events if isinstance(event, Operator) and is_listed(event)
        )
        collectives = sum(isinstance(event, Collective) for event in optimizer_events)
        optimizer.append((step.phases_s.get(OPTIMIZER, 0.0), optimizer_events, (listed, collectives)))
    costs = {
        **_fitted(("operator_s", "fsdp_s", "redistribution_s"), model, blank),
        **_fitted(("listed_s", "optimizer_redistribution_s"), optimizer, blank),
    }
    if not any(collectives for *_, (_, collectives) in optimizer):
        del costs["optimizer_redistribution_s"]  # It was not measured, so the default is used instead of 0.
    return costs


def _fitted(names: Sequence[str], phases: Sequence[Any], blank: HostFigures) -> dict[str, float]:
    """Return the host's seconds per count, fitted to the rest of each phase after its operators and collectives.

    Args:
        names: the names of the counts.
        phases: seconds, events and counts of each phase.
    """
    phases = [phase for phase in phases if phase[0] > 0]
    rows = [[count / seconds for count in counts] for seconds, _, counts in phases]
    left = [max(seconds - _parts_s(events, blank), 0.0) / seconds for seconds, events, _ in phases]
    solution, _ = nonnegative_least_squares(np.array(rows, dtype=float), np.array(left))
    return dict(zip(names, map(float, solution), strict=True))


def _operator_factors(steps: Mapping[str, MeasuredStep], host: HostFigures) -> dict[str, float]:
    """Return for each whole step its operators' time divided by their time alone.

    The operators' time is the rest of the step after collectives and the host's own time, which were measured in steps
    or among waiting ranks. The ratio is 0 without a rest.

    Args:
        host: figures without factors.
    """
    factors = {}
    for part in WHOLE:
        took = [(event, on_host(event, host)) for event in _events(steps[part].recording)]
        operators_s = sum(seconds for event, (_, seconds) in took if isinstance(event, Operator))
        rest_s = sum(host_s + seconds for _, (host_s, seconds) in took) - operators_s
        factors[part] = max(steps[part].step_s - rest_s, 0.0) / operators_s
    return factors


def _bf16_factor(step: MeasuredStep, host: HostFigures) -> float:
    """Return the time of a step's bf16 matmuls divided by their time alone; the rest of the step is as predicted.

    Three calibrations had 1.39 to 1.50, where all other operators had 1.63 to 1.67 (2 cores, 4 ranks).

    Args:
        host: figures with factors, 1 for bf16 matmuls.
    """
    matmuls_s = rest_s = 0.0
    for event in _events(step.recording):
        host_s, seconds = on_host(event, host)
        rest_s += host_s
        if isinstance(event, Operator) and event.kind == MATMUL and event.dtype in HALF:
            matmuls_s += seconds
        else:
            rest_s += seconds
    return max(step.step_s - rest_s, 0.0) / matmuls_s


def _parts_s(events: Sequence[Operator | Collective], host: HostFigures) -> float:
    """Return the seconds without the host's own work."""
    operators = (operator_on_host(event, host) for event in events if isinstance(event, Operator))
    collectives = (collective_on_host(event, host) for event in events if isinstance(event, Collective))
    return sum(operators) + sum(collectives)


def _events(recording: Recording) -> list[Operator | Collective]:
    """Return operators, and collectives with a payload."""
    return [
        event
        for event in recording.step
        if isinstance(event, Operator) or (isinstance(event, Collective) and event.group_size > 1)
    ]


def write_hardware(path: Path, operators: Run, steps: Run, recordings: Sequence[Recording]) -> Hardware:
    """Write the hardware file of the machine of both runs.

    Raises:
        UserError: a part has no measurement, a figure is out of range, or the file cannot be written.
    """
    return save_hardware(path, _hardware_record(operators, steps, recordings))


def save_hardware(path: Path, record: dict[str, Any]) -> Hardware:
    """Write a hardware file, one line per figure and curve, and return the machine.

    Raises:
        UserError: a figure is out of range, or the file cannot be written.
    """
    hardware = hardware_of(record, ABSURD, ADVICE)
    head = {name: value for name, value in record.items() if name not in ("figures", "host")}
    text = f'{{{json.dumps(head)[1:-1]},\n"figures": {_by_line(record["figures"])}'
    if host := record.get("host"):
        inner = ",\n".join(f'  "{part}": {_by_line(host[part])}' for part in ("figures", "operators", "collectives"))
        ranks = json.dumps({name: host[name] for name in ("num_ranks", "hosts") if name in host})[1:-1]
        text += f',\n"host": {{{ranks},\n{inner}}}'
    try:
        write_whole(path, text + "}\n")
    except OSError as error:
        raise UserError(f"--hardware-out {path} cannot be written ({error.strerror}); choose another file") from error
    return hardware


def _by_line(part: Any) -> str:
    if isinstance(part, dict):
        return "{\n" + ",\n".join(f"    {json.dumps(key)}: {json.dumps(value)}" for key, value in part.items()) + "}"
    return "[\n" + ",\n".join(f"    {json.dumps(entry)}" for entry in part) + "]"


def _hardware_record(of_operators: Run, of_steps: Run, recordings: Sequence[Recording]) -> dict[str, Any]:
    """Return the record of a hardware file; its factor is the whole steps' geometric mean."""
    environment = of_operators.header["environment"]
    num_ranks = int(environment["world_size"])
    ranks = count_text(num_ranks, "rank")
    operators, collectives = _measured_curves(of_operators)
    ((block_bytes, new_block_s),) = operators.pop(NEW_BLOCK)
    world_points = next((points for (*of, _), points in collectives.items() if of == ["all_gather", num_ranks]), None)
    if world_points is None:
        raise UserError(f"{of_operators.path} has no all_gather of all {ranks}; measure with distbench calibrate")
    steps, hosts = _measured_steps(of_steps, recordings), hosts_of(of_operators)
    source = f"distbench calibrate, run {of_operators.header['run_id']}"
    # Neighbours come first, because a group on fewer hosts has fewer plus signs in its shape.
    in_order = sorted(
        (kind, size, shape.count("+"), shape, points) for (kind, size, shape), points in collectives.items()
    )
    required = HOST_FIGURES.keys() - LEFT_OUT.keys() - DEFAULTS_FROM.keys()
    record: dict[str, Any] = {
        "hardware_version": VERSION,
        "name": str(environment["machine"]),
        "summary": f"{environment.get('cpu_model') or environment['device']}, {ranks} on "
        f"{count_text(environment['num_cpus'], 'core')}, {environment['backend']}, torch {environment['torch']}",
        "figures": _device_figures(environment, operators, world_points, source),
        "host": {
            "num_ranks": num_ranks,
            "figures": _figures(dict.fromkeys(required, 0.0), "measured", source),
            "operators": {name: rounded(points) for name, points in operators.items()},
            **({"hosts": list(hosts)} if len(set(hosts)) > 1 else {}),
            "collectives": [
                {"kind": kind, "group_size": size, **({"hosts": shape} if shape else {}), "points": rounded(points)}
                for kind, size, _, shape, points in in_order
            ],
        },
    }
    blank = hardware_of(record, ABSURD, ADVICE)
    assert blank.host is not None
    costs = _host_costs(steps, blank.host)
    factors = _operator_factors(steps, replace(blank.host, figures={**blank.host.figures, **costs}))
    parts = []
    for part, factor in factors.items():
        head = steps[part].recording.head
        parts.append(f"{head.label} ({head.num_parameters / 1e6:.1f} M parameters) {factor:.2f}")
    factor_source = (
        f"geometric mean of operators' time in whole steps divided by alone: {', '.join(parts)}; run "
        f"{of_steps.header['run_id']}"
    )
    mean_factor = {"operator_factor": math.prod(factors.values()) ** (1 / len(factors))}
    of_bf16 = _bf16_factor(
        steps[WHOLE_BF16], replace(blank.host, figures={**blank.host.figures, **costs, **mean_factor})
    )
    bf16_source = f"bf16 matmuls' time in {steps[WHOLE_BF16].recording.head.label} divided by alone"
    # A write to a new block takes longer than a write to an old one, by the page faults.
    old_block_s = blank.host.operators["memory"].seconds(block_bytes)
    costs |= {"page_faults_s_per_byte": max(new_block_s - old_block_s, 0.0) / block_bytes}
    fitted = _figures(mean_factor, "fitted", factor_source)
    fitted |= _figures({"matmul_bf16_factor": of_bf16}, "fitted", bf16_source)
    record["host"]["figures"] = _figures(costs, "measured", source) | fitted
    record["figures"]["host_s"]["value"] = short(costs["operator_s"])
    return record


def _figures(values: Mapping[str, float], basis: str, source: str) -> dict[str, Any]:
    return {name: {"value": short(value), "basis": basis, "source": source} for name, value in values.items()}


def _device_figures(
    environment: Mapping[str, Any], operators: Mapping[str, Points], whole: Points, source: str
) -> dict[str, Any]:
    """Return the figures of every hardware file; rates are the best of the measured sizes.

    Args:
        whole: curve of an all-gather of all ranks.
    """
    num_ranks = int(environment["world_size"])
    rates = {name: max(amount / seconds for amount, seconds in points) for name, points in operators.items()}
    largest, seconds = whole[-1]
    node = (num_ranks - 1) / num_ranks * largest / seconds
    base = whole[0][1]
    measured = {
        "memory_bytes": int(environment["memory_bytes"]) // num_ranks,
        "peak_bf16_flops": max(rates["matmul_bf16"], rates["matmul_f32"]),
        "matmul_bf16_flops": rates["matmul_bf16"],
        "matmul_f32_flops": rates["matmul_f32"],
        "attention_flops": rates["attention"],
        "attention_backward_flops": rates["attention_backward"],
        "memory_bytes_per_s": rates["memory"],
        "memory_share": 1.0,
        "operator_s": operators["memory"][0][1],
        "launch_s": 0.0,
        "host_s": 0.0,
        "devices_per_node": num_ranks,
        "node_bytes_per_s": node,
        "node_base_s": base,
    }
    guessed = {"network_bytes_per_s": node, "network_base_s": base, "network_hop_s": 0.0}
    return _figures(measured, "measured", source) | _figures(guessed, "guess", GUESSED_NETWORK)


def rounded(points: Points) -> list[list[float]]:
    """Return points as in a file."""
    return [[amount, short(seconds)] for amount, seconds in points]


def short(value: float) -> float:
    """Return a figure as in a file; an int remains an int."""
    return value if isinstance(value, int) else float(f"{value:.{DIGITS}g}")


def hardware_text(hardware: Hardware) -> str:
    """Format the measured figures as text."""
    assert hardware.host is not None
    host = hardware.host
    rows = [_row(CALLED[name], curve, is_of_operations=name != "memory") for name, curve in host.operators.items()]
    # On one host by the group's size, on several hosts by the group's ranks per host.
    collectives = sorted((host.by_shape or host.collectives).items())
    rows += [_row(f"{kind} in groups of {group}", curve) for (kind, group), curve in collectives]
    columns = ("<measured", "smallest", "takes", "largest", "takes", "best rate")
    notes = [f"all {host.num_ranks} ranks measure at once; times are the slowest rank's"]
    curves = Table(f"{hardware.name}: {hardware.summary}", columns, rows, notes, frozenset([len(CALLED)]))
    costs = [(name, time_text(host[figure]) if host[figure] else NOTHING) for figure, name in HOST.items()]
    faults_s = host["page_faults_s_per_byte"] * (1 << 30)
    costs.append(("page faults of a new block, per GiB", time_text(faults_s) if faults_s else NOTHING))
    notes = [
        f"operators are {host['operator_factor']:.2f}x slower in whole steps than alone, bf16 matmuls "
        f"{host['matmul_bf16_factor']:.2f}x"
    ]
    return text_of([curves, Table("the host's own time", ("<of", "time"), costs, notes)])


def _row(name: str, curve: Curve, is_of_operations: bool = False) -> tuple[str, ...]:
    """Return a curve's name, its smallest and largest amount, the time of each, and its best rate."""
    cells = [name]
    for amount, seconds in (curve.points[0], curve.points[-1]):
        cells += [f"{amount / 1e6:,.1f} MFLOP" if is_of_operations else size_text(int(amount)), time_text(seconds)]
    best = max(amount / seconds for amount, seconds in curve.points)
    return (*cells, f"{best / 1e9:,.1f} {'GFLOP/s' if is_of_operations else 'GB/s'}")
