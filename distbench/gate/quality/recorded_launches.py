"""Series of launches of unchanged code, to try the gate on."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from distbench.compare.log_differences import Floats
from distbench.runs.find import run_files_in
from distbench.runs.launches import launch_of
from distbench.runs.run_file import read_run
from distbench.spec.errors import UserError

MIN_LAUNCHES = 10
ORIGIN = ("machine", "num_cpus", "torch", "scheduler", "git_commit")


@dataclass(frozen=True)
class RecordedSeries:
    """Launches of unchanged code, in the order in which they ran.

    Args:
        name: what a table calls it.
        case_ids: the cases that every launch measured.
        samples_s: seconds, [case][launch] to that launch's samples.
        origin: where it comes from.
    """

    name: str
    case_ids: tuple[str, ...]
    samples_s: Sequence[Sequence[Floats]]
    origin: str

    @property
    def num_launches(self) -> int:
        """Launches in the series."""
        return len(self.samples_s[0])


def recorded(folder: Path) -> RecordedSeries:
    """The launches below a folder that ran to their end, in time order, with the cases that all of them measured.

    Raises:
        UserError: fewer than MIN_LAUNCHES launches, or no case that all of them measured.
    """
    runs = [run for run in map(read_run, run_files_in(folder)) if run.footer is not None]
    runs.sort(key=lambda run: launch_of(run).started_at)
    if len(runs) < MIN_LAUNCHES:
        raise UserError(f"{folder} holds {len(runs)} launches; record at least {MIN_LAUNCHES}, better 60")
    measured = [
        {record["case"]["id"]: np.array(record["samples_s"]) for record in run.cases if record["status"] == "ok"}
        for run in runs
    ]
    ids = tuple(case_id for case_id in measured[0] if all(case_id in launch for launch in measured))
    if not ids:
        raise UserError(f"no case was measured by every launch below {folder}")
    facts = launch_of(runs[0]).facts
    origin = json.dumps({name: facts[name] for name in ORIGIN})
    return RecordedSeries(folder.name, ids, [[launch[case_id] for launch in measured] for case_id in ids], origin)
