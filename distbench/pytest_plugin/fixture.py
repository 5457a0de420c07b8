"""The fixture: a function to a job, the job to its ranks, their run file to cases; anything not ok fails the test."""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from distbench import launch
from distbench.launch.display import Quiet
from distbench.pytest_plugin.asked import arguments_of, asked_of, entry_of
from distbench.pytest_plugin.case import MeasuredCase
from distbench.pytest_plugin.rows import add_rows
from distbench.runs.run_file import read_run
from distbench.spec import Job, UserError

MARKER = "distbench"
LOG_LINES = 30


class Distbench:
    """What a test calls; run files and logs go to `out`, cases that pytest-benchmark does not show to `unshown`."""

    def __init__(self, item: pytest.Item, out: Path, unshown: list[MeasuredCase]) -> None:
        self._item, self._out, self._unshown = item, out, unshown

    def __call__(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> list[MeasuredCase]:
        """Time what `function(mesh, *args, **kwargs)` returns on every rank: `call`, or `(call, check)`.

        The function is of a module's top level, its arguments plain data. `call()` is timed until it returns; `check()`
        runs once afterwards, and asserts, or returns None or True where this rank's result is right, False or a
        sentence where not.

        Raises:
            pytest.fail.Exception: a case is not ok, a rank died or hung, or the test asks for what cannot be.
        """
        with _user_errors():
            arguments = arguments_of(function, args, kwargs)
            return self._measure(function, {name: (value,) for name, value in arguments.items()})

    def sweep(self, function: Callable[..., Any], /, **axes: Sequence[Any]) -> list[MeasuredCase]:
        """As a call, of all combinations of the values in one launch: `sweep(function, numel=(1024, 4096))`."""
        with _user_errors():
            for name, values in axes.items():
                if not isinstance(values, list | tuple) or not values:
                    raise UserError(f"sweep({name}={values!r}): give a list of the values that {name!r} runs through")
            arguments_of(function, (), {name: values[0] for name, values in axes.items()})
            return self._measure(function, axes)

    def _measure(self, function: Callable[..., Any], axes: Mapping[str, Sequence[Any]]) -> list[MeasuredCase]:
        job = self._job(function, axes)
        with _pytests_modules():
            outcome = launch.launch(job, None, Quiet())
        if outcome.status == "interrupted":
            raise KeyboardInterrupt
        run_file = Path(job.run_file)
        records = read_run(run_file).cases if run_file.exists() else []
        cases = MeasuredCase.all_of(records, run_file)
        if wrong := _what_is_wrong(outcome, cases):
            self._show_logs(Path(job.log_dir))
            pytest.fail(wrong, pytrace=False)
        if not add_rows(self._item, cases, job):
            self._unshown += cases
        return cases

    def _job(self, function: Callable[..., Any], axes: Mapping[str, Sequence[Any]]) -> Job:
        marker = self._item.get_closest_marker(MARKER)
        asked = asked_of(marker.args if marker else (), marker.kwargs if marker else {})
        request = launch.Request(
            targets=(),
            mesh=asked.mesh,
            device="cpu",
            quick=asked.quick,
            out=self._out,
            timeout_s=asked.timeout_s,
            started_at=time.time(),
        )
        (job,) = launch.jobs_of_entries(request, [entry_of(function, axes, asked.mesh)], None)
        return replace(job, is_call=True)

    def _show_logs(self, log_dir: Path) -> None:
        """The end of each rank's log, in the failing test's report: on a CI machine the files are soon gone."""
        for log in sorted(log_dir.glob("rank*.log")):
            lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
            if lines:
                self._item.add_report_section("call", f"{log.stem} of distbench", "\n".join(lines[-LOG_LINES:]))


def _what_is_wrong(outcome: launch.JobOutcome, cases: Sequence[MeasuredCase]) -> str:
    """Why the test fails, a line a reason; empty where every case is ok."""
    lines = [outcome.message] if outcome.message else []
    lines += [
        f"{case.id} is {case.status}: {case.error}"
        for case in cases
        if case.status != "ok" and case.id not in outcome.message
    ]
    if not cases and not outcome.user_can_fix:
        lines.append("nothing was measured; `distbench doctor` says what this machine can run")
    return "\n".join(lines)


@contextlib.contextmanager
def _user_errors() -> Iterator[None]:
    """A user's mistake fails the test with its sentence alone."""
    try:
        yield
    except UserError as error:
        raise pytest.fail.Exception(str(error), pytrace=False) from None


@contextlib.contextmanager
def _pytests_modules() -> Iterator[None]:
    """Ranks find the modules that pytest finds, whatever conftest files and import modes did to the path."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
        yield
