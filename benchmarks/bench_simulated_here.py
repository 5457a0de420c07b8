"""Predicted against measured steps on this machine: forty plans of four models over four ranks.

`distbench calibrate` writes a hardware file, every plan is recorded and replayed on it, and all of them are measured in
turn in each of four launches. A plan may be 45 % slower throughout one launch, so its time is the median over launches,
and the time lost by predicting one half of the launches by the other half is printed as the noise. One factor is
fitted, on two steps that are none of these. Kept in `build/simulated_here`: what is there is not measured again;
hardware file and predictions are made anew of it, so that another way of fitting needs no new run. `plans.json` has
what each plan's step was predicted to be made of. About 50 minutes on two quiet cores.
"""

import dataclasses
import json
import math
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

from benchmarks.claims import Claim, Row
from benchmarks.simulated_here_plans import MODELS, PLANS, model_of
from distbench.launch import Request, jobs_of
from distbench.records.run_file import read_run
from distbench.simulate.hardware_file import Hardware, load_hardware
from distbench.simulate.measured_hardware import write_hardware
from distbench.simulate.recording import record_steps
from distbench.simulate.simulation import Simulation
from distbench.spec import Job

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "build" / "simulated_here"
FILE = Path(__file__).with_name("simulated_here_plans.py")
LAUNCHES, PASSES, BUDGET_S = 4, 4, 150
WANTED_ERROR, WANTED_ORDER, WANTED_REGRETS = 0.12, 0.9, (0.02, 0.05, 0.1)
APART = 1.03  # pairs of plans that are closer have no order
NUM_CHOICES = 5  # a choice is among that many plans of a model; every such set of plans counts
# Above it, what a plan's time is predicted to be made of is printed with it.
OFF = 0.12
IS_LONG = True
CLAIMS = (
    Claim(
        f"calibrated predictions of step times here, {len(PLANS)} plans of four models: median error; pairs of plans "
        "of a model, over 3 % apart, in the right order",
        "{:.0%}; {:.0%} of {:.0f}",
        "at most 12 %; at least 90 %",
        ("median error", "pairs in order", "pairs"),
    ),
    Claim(
        f"time lost by the predicted fastest of {NUM_CHOICES} of these plans, over all choices: median; 95th "
        "percentile; worst (the same between halves of the measured launches)",
        "{:.1%}; {:.1%}; {:.1%} ({:.1%}; {:.1%}; {:.1%})",
        "at most 2 %; 5 %; 10 %",
        ("regret*", "noise*"),
    ),
)


def main() -> list[Row]:
    """Rows for the benchmark table; each plan goes to stderr."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    hardware = calibrated()
    launches = measured()
    times = _medians(launches)
    simulations = simulated(hardware)
    (FOLDER / "plans.json").write_text(json.dumps(_as_record(times, simulations), indent=1))
    for name, simulation in sorted(simulations.items(), key=lambda item: times[item[0]]):
        predicted_s = simulation.timed.step_s
        error = predicted_s / times[name] - 1
        print(
            f"  {name:<18} measured {times[name] * 1e3:7.1f} ms, predicted {predicted_s * 1e3:7.1f} ms ({error:+.0%})"
            f"{': ' + made_of(simulation) if abs(error) > OFF else ''}",
            file=sys.stderr,
        )
    predicted = {name: simulation.timed.step_s for name, simulation in simulations.items()}
    errors = [abs(predicted[name] / times[name] - 1) for name in PLANS]
    pairs = []
    for model in MODELS:
        names = _in_order(model, times)
        pairs += [pair for pair in combinations(names, 2) if times[pair[1]] > APART * times[pair[0]]]
    in_order = [predicted[fast] < predicted[slow] for fast, slow in pairs]
    halves = _medians(launches[::2]), _medians(launches[1::2])
    noise = sorted(_regrets(*halves) + _regrets(*reversed(halves)))
    return [
        ("median error", statistics.median(errors), WANTED_ERROR),
        ("pairs in order", statistics.mean(in_order), -WANTED_ORDER),
        ("pairs", float(len(pairs)), -1.0),
        *_shares("regret", sorted(_regrets(predicted, times)), WANTED_REGRETS),
        *_shares("noise", noise, (math.inf,) * len(WANTED_REGRETS)),
    ]


def _in_order(model: str, times: Mapping[str, float]) -> list[str]:
    """The model's plans, the fastest first."""
    return sorted((name for name in PLANS if model_of(name) == model), key=times.__getitem__)


def _regrets(predicted: Mapping[str, float], times: Mapping[str, float]) -> list[float]:
    """Time lost by the predicted fastest of each choice of NUM_CHOICES plans of a model."""
    return [
        times[min(choices, key=predicted.__getitem__)] / times[choices[0]] - 1
        for model in MODELS
        for choices in combinations(_in_order(model, times), NUM_CHOICES)
    ]


def _shares(name: str, losses: list[float], allowed: Sequence[float]) -> list[Row]:
    shares = {"median": 0.5, "95th percentile": 0.95, "worst": 1.0}
    return [
        (f"{name}: {label}", losses[math.ceil(share * len(losses)) - 1], most)
        for (label, share), most in zip(shares.items(), allowed, strict=True)
    ]


def calibrated() -> Hardware:
    """The hardware file of the calibration that was measured, now or before."""
    hardware, runs = FOLDER / "hardware.json", FOLDER / "calibrated"
    if not any(runs.glob("*/*.jsonl")):
        file = ("--hardware-out", str(hardware), "--results", str(runs))
        _distbench("calibrate", "--only", "hardware", *file, "--device", "cpu")
        return load_hardware(str(hardware))
    operators, steps = (next(runs.glob(f"*/*{name}*.jsonl")) for name in ("calibrate_operators", "calibrate_steps"))
    of_steps = read_run(steps)
    ((recordings, _),) = record_steps([Job.from_record(of_steps.header["job"])])
    return write_hardware(hardware, read_run(operators), of_steps, recordings)


def simulated(machine: Hardware) -> dict[str, Simulation]:
    """Every plan, recorded and replayed."""
    result = record_steps([_job(name) for name in PLANS])
    return {name: Simulation(recorded.recordings[0], machine) for name, recorded in zip(PLANS, result, strict=True)}


def _job(name: str) -> Job:
    request = Request((f"{FILE}::planned",), (f"plan={name}",), device="cpu", shapes_only=True)
    (job,) = jobs_of(request, None)
    return dataclasses.replace(job, mesh=PLANS[name].mesh)


def measured() -> list[Mapping[str, float]]:
    """Each launch's seconds of each plan: the median over its passes."""
    out = FOLDER / "measured"
    for _ in range(LAUNCHES - len(list(out.glob("*/*.jsonl")))):
        passes = ("--passes", str(PASSES), "--budget", str(BUDGET_S))
        _distbench("run", f"{FILE}::measured", *passes, "--results", str(out), "--device", "cpu")
    return [
        {case["case"]["params"]["call"]: statistics.median(case["samples_s"]) for case in read_run(file).cases}
        for file in sorted(out.glob("*/*.jsonl"))  # not what is in logs
    ]


def _medians(launches: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: statistics.median(launch[name] for launch in launches) for name in PLANS}


def _as_record(times: Mapping[str, float], simulations: Mapping[str, Simulation]) -> dict[str, Any]:
    return {
        name: {
            "measured_s": times[name],
            "predicted_s": simulation.timed.step_s,
            "host_s": simulation.timed.host_s,
            "operators_s": dict(simulation.parts.by_kind_s),
            "communication_s": dict(simulation.parts.communication_s),
        }
        for name, simulation in simulations.items()
    }


def made_of(simulation: Simulation) -> str:
    """What a predicted step is made of, ms."""
    parts = simulation.parts
    of_kinds = {**parts.by_kind_s, **{f"over {dim}": seconds for dim, seconds in parts.communication_s.items()}}
    message = ", ".join(f"{name} {seconds * 1e3:.0f}" for name, seconds in of_kinds.items())
    return f"{message}, host {simulation.timed.host_s * 1e3:.0f}"


def _distbench(*arguments: str) -> None:
    command = [sys.executable, "-m", "distbench", *arguments, "--quiet"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=ROOT)


if __name__ == "__main__":
    for name, value, allowed in main():
        print(f"{name}: {value:g} (allowed {allowed:g})")
