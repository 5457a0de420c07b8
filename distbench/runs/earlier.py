"""How long a scenario took before: the newest finished run of it among the run files of a machine."""

from collections.abc import Callable
from pathlib import Path

from distbench.runs.find import read_each, run_files_in
from distbench.runs.header import Header, header_of
from distbench.runs.machine import machine_name
from distbench.runs.record_reader import RecordReader
from distbench.runs.run_file import Run, read_run


def newest_finished(out: Path, scenario: str, fits: Callable[[Header], bool] = lambda about: True) -> Run | None:
    """The newest run of a scenario that was made on this machine and ran to its end; None where there is none.

    Args:
        out: the results folder.
        fits: whether a run of it is one to be taken.
    """
    folder = out / machine_name()
    found = read_each(run_files_in(folder), _head, []) if folder.is_dir() else []
    chosen = [(about, path) for about, path in found if about.scenario == scenario and fits(about)]
    for _, path in sorted(chosen, key=lambda one: one[0].started_at, reverse=True):
        for run in read_each([path], read_run, []):
            footer = run.footer or {}
            if footer.get("status") == "complete" and footer.get("wall_s") and run.cases:
                return run
    return None


def _head(path: Path) -> tuple[Header, Path]:
    return header_of(RecordReader(path, []).header()), path
