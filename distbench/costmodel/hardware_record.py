"""The record of a measured hardware file: every figure with its basis, checked as its reader checks it."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from distbench.costmodel.calibration_run import hosts_of
from distbench.costmodel.measured_hardware import (
    MeasuredStep,
    Points,
    host_costs,
    measured_curves,
    measured_steps,
    operator_factors,
)
from distbench.runs.run_file import Run
from distbench.simulate.hardware.hardware_file import VERSION, Hardware, hardware_of
from distbench.simulate.hardware.host_figures import HOST_FIGURES, LEFT_OUT
from distbench.simulate.recording import Recording
from distbench.spec.errors import UserError
from distbench.spec.printable import count_text
from distbench.spec.writing import write_whole

ABSURD, ADVICE = "what was measured here", "calibrate again on a machine that does nothing else"
GUESSED_NETWORK = "one machine was measured: taken as within it"
# Points are written with as many digits as a measurement has.
DIGITS = 4


def write_hardware(path: Path, operators: Run, steps: Run, recordings: Sequence[Recording]) -> Hardware:
    """Write the hardware file of the machine that both runs ran on.

    Raises:
        UserError: a part was not measured, a figure is absurd, or the file cannot be written.
    """
    record = hardware_record(operators, steps, recordings)
    hardware = hardware_of(record, ABSURD, ADVICE)
    figures, host = record.pop("figures"), record.pop("host")
    head = json.dumps(record)[1:-1]
    inner = ",\n".join(f'  "{part}": {_by_line(host[part])}' for part in ("figures", "operators", "collectives"))
    ranks = json.dumps({name: host[name] for name in ("num_ranks", "hosts") if name in host})[1:-1]
    text = f'{{{head},\n"figures": {_by_line(figures)},\n"host": {{{ranks},\n{inner}}}}}\n'
    try:
        write_whole(path, text)
    except OSError as error:
        raise UserError(f"--hardware-out {path} cannot be written: {error.strerror}; give another file") from error
    return hardware


def _by_line(part: Any) -> str:
    if isinstance(part, dict):
        return "{\n" + ",\n".join(f"    {json.dumps(key)}: {json.dumps(value)}" for key, value in part.items()) + "}"
    return "[\n" + ",\n".join(f"    {json.dumps(one)}" for one in part) + "]"


def hardware_record(of_operators: Run, of_steps: Run, recordings: Sequence[Recording]) -> dict[str, Any]:
    """The record of a hardware file; its last factor is the geometric mean of those of the whole steps."""
    environment = of_operators.header["environment"]
    num_ranks = int(environment["world_size"])
    operators, collectives = measured_curves(of_operators)
    whole = next((points for (*of, _), points in collectives.items() if of == ["all_gather", num_ranks]), None)
    if whole is None:
        what = f"all_gather of all {count_text(num_ranks, 'rank')}"
        raise UserError(f"{of_operators.path} has no {what}; measure it with distbench calibrate")
    steps, hosts = measured_steps(of_steps, recordings), hosts_of(of_operators)
    source = f"distbench calibrate, run {of_operators.header['run_id']}"
    record: dict[str, Any] = {
        "hardware_version": VERSION,
        "name": str(environment["machine"]),
        "summary": f"{environment.get('cpu_model') or environment['device']}, {count_text(num_ranks, 'rank')} on "
        f"{count_text(environment['num_cpus'], 'core')}, {environment['backend']}, torch {environment['torch']}",
        "figures": _device_figures(environment, operators, whole, source),
        "host": {
            "num_ranks": num_ranks,
            "figures": _host_figures(dict.fromkeys(HOST_FIGURES.keys() - LEFT_OUT.keys(), 0.0), source),
            "operators": {name: _rounded(points) for name, points in operators.items()},
            **({"hosts": list(hosts)} if len(set(hosts)) > 1 else {}),
            "collectives": [
                {"kind": kind, "group_size": size, **({"hosts": shape} if shape else {}), "points": _rounded(points)}
                for (kind, size, shape), points in sorted(collectives.items(), key=_neighbours_first)
            ],
        },
    }
    blank = hardware_of(record, ABSURD, ADVICE)
    assert blank.host is not None
    costs = host_costs(steps, blank.host)
    factors = operator_factors(steps, replace(blank.host, figures=LEFT_OUT | costs))
    parts = ", ".join(f"{_what(steps[part])} {factor:.2f}" for part, factor in factors.items())
    said = f"operators in whole steps over alone: {parts}; their geometric mean; run {of_steps.header['run_id']}"
    factor = {
        "value": _short(math.prod(factors.values()) ** (1 / len(factors))),
        **{"basis": "fitted", "source": said},
    }
    record["host"]["figures"] = {**_host_figures(costs, source), "operator_factor": factor}
    record["figures"]["host_s"]["value"] = _short(costs["operator_s"])
    return record


def _what(step: MeasuredStep) -> str:
    head = step.recording.head
    return f"{head.scenario}/{head.variant} ({head.num_parameters / 1e6:.1f} M parameters)"


def _host_figures(values: Mapping[str, float], source: str) -> dict[str, Any]:
    return {name: {"value": _short(value), "basis": "measured", "source": source} for name, value in values.items()}


def _device_figures(
    environment: Mapping[str, Any],
    operators: Mapping[str, Points],
    whole: Points,
    source: str,
) -> dict[str, Any]:
    """The figures that every hardware file has; rates are the best of the sizes measured.

    Args:
        whole: an all-gather of all ranks.
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
    return {
        **{name: {"value": _short(value), "basis": "measured", "source": source} for name, value in measured.items()},
        **{
            name: {"value": _short(value), "basis": "guess", "source": GUESSED_NETWORK}
            for name, value in guessed.items()
        },
    }


def _neighbours_first(line: tuple[tuple[str, int, str], Points]) -> tuple[str, int, int, str]:
    (kind, size, shape), _ = line
    return kind, size, shape.count("+"), shape


def _rounded(points: Points) -> list[list[float]]:
    return [[amount, _short(seconds)] for amount, seconds in points]


def _short(value: float) -> float:
    return value if isinstance(value, int) else float(f"{value:.{DIGITS}g}")
