"""Series of launches of unchanged code, to try the gate on."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from distbench.compare.log_differences import Floats
from distbench.runs.baselines import read_baseline
from distbench.runs.find import run_files_in
from distbench.runs.launches import Launch, Value, launch_of
from distbench.runs.run_file import Run, read_run
from distbench.spec.errors import UserError

MIN_LAUNCHES = 10
ORIGIN = ("machine", "num_cpus", "torch", "scheduler", "git_commit")


@dataclass(frozen=True)
class RecordedSeries:
    """Launches of unchanged code, in the order in which they ran.

    Args:
        case_ids: the cases that every launch measured.
        samples_s: seconds, [case][launch] to that launch's samples; empty where they come from a stored baseline.
        origin: machine, CPUs, torch, scheduler and commit, as JSON.
        values: [case][launch] to what the gate keeps of samples, where there are none; else empty.
    """

    name: str
    case_ids: tuple[str, ...]
    samples_s: Sequence[Sequence[Floats]]
    origin: str
    values: Sequence[Sequence[Value]] = ()

    @property
    def num_launches(self) -> int:
        """Launches in the series."""
        return len(self.values[0] if self.values else self.samples_s[0])


def stored(path: Path) -> RecordedSeries:
    """The launches of a stored baseline, with the cases that all of them measured. Raises as `read_baseline`."""
    launches = sorted(read_baseline(path), key=lambda launch: launch.started_at)
    ids = [one for one in launches[0].cases if all(one in each.cases for each in launches)]
    origin = json.dumps({name: launches[0].facts[name] for name in ORIGIN})
    return RecordedSeries(path.stem, tuple(ids), (), origin, [[each.cases[one] for each in launches] for one in ids])


def recorded(folder: Path) -> RecordedSeries:
    """The launches below a folder that ran to their end, in time order, with the cases that all of them measured.

    Run files of one `distbench run` are one launch, whose cases are those of all its scenarios.

    Raises:
        UserError: fewer than MIN_LAUNCHES launches, or no case that all of them measured.
    """
    invocations: dict[str, list[tuple[Launch, Run]]] = {}
    for run in map(read_run, run_files_in(folder)):
        invocations.setdefault(run.about.invocation_id or str(run.path), []).append((launch_of(run), run))
    whole = [runs for runs in invocations.values() if all(launch.complete for launch, _ in runs)]
    whole.sort(key=lambda runs: min(launch.started_at for launch, _ in runs))
    if len(whole) < MIN_LAUNCHES:
        failed = f" that ran to their end, and {num} that did not" if (num := len(invocations) - len(whole)) else ""
        raise UserError(f"{folder} holds {len(whole)} launches{failed}; record at least {MIN_LAUNCHES}, better 60")
    measured = [_samples(runs) for runs in whole]
    keys = [key for key in measured[0] if all(key in launch for launch in measured)]
    if not keys:
        raise UserError(f"no case was measured by every launch below {folder}; record launches of the same scenarios")
    several = len({scenario for scenario, _ in keys}) > 1
    ids = tuple(f"{scenario}: {case_id}" if several else case_id for scenario, case_id in keys)
    origin = json.dumps({name: whole[0][0][0].facts[name] for name in ORIGIN})
    return RecordedSeries(folder.name, ids, [[launch[key] for launch in measured] for key in keys], origin)


def _samples(runs: Sequence[tuple[Launch, Run]]) -> dict[tuple[str, str], Floats]:
    """(scenario, case id) to the samples of each case that was measured and right."""
    return {
        (launch.scenario, record["case"]["id"]): np.array(record["samples_s"])
        for launch, run in runs
        for record in run.cases
        if record["status"] == "ok"
    }
