"""The `distbench` fixture: run a test's function as a job, and return the cases of the run file.

A case that is not ok fails the test.
"""

import contextlib
import inspect
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from inspect import Parameter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from distbench import launch
from distbench.launch.display import Display
from distbench.records.run_file import Record, read_run
from distbench.spec import Entry, Job
from distbench.spec.errors import UserError, nearest
from distbench.spec.mesh import check_mesh_dims, format_mesh, mesh_size
from distbench.spec.printable_text import count_text
from distbench.statistics.intervals import median, median_ci, summarise
from distbench.statistics.verdicts import FASTER, SLOWER

DEFAULT_TIMEOUT_S = 300.0
KEYWORDS = ("ranks", "mesh", "timeout_s", "quick")
MARKER = "distbench"
LOG_LINES = 30


@dataclass(frozen=True)
class CaseRequest:
    """The arguments of `@pytest.mark.distbench(...)`.

    Args:
        timeout_s: seconds without progress until failure.
        quick: whether to take few samples."""

    mesh: dict[str, int]
    timeout_s: float = DEFAULT_TIMEOUT_S
    quick: bool = False


def case_request(args: Sequence[Any], kwargs: Mapping[str, Any]) -> CaseRequest:
    """Return a marker's arguments. Raise UserError for an unknown argument, a wrong value, or ranks and a mesh that
    disagree."""
    if args:
        raise UserError(f"@pytest.mark.distbench accepts arguments by name only; write ranks={args[0]!r} or mesh=...")
    for name in kwargs:
        if name not in KEYWORDS:
            raise UserError(f"@pytest.mark.distbench has no argument {name!r} ({nearest(name, KEYWORDS)})")
    timeout_s = kwargs.get("timeout_s", DEFAULT_TIMEOUT_S)
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not timeout_s > 0:
        raise UserError(f"@pytest.mark.distbench(timeout_s={timeout_s!r}): give a positive number of seconds")
    mesh = _mesh(kwargs.get("ranks"), kwargs.get("mesh"))
    return CaseRequest(mesh, float(timeout_s), bool(kwargs.get("quick", False)))


def _mesh(ranks: Any, mesh: Any) -> dict[str, int]:
    if ranks is not None and not _is_count(ranks):
        raise UserError(f"@pytest.mark.distbench(ranks={ranks!r}): give a whole number, 1 or more")
    if mesh is None:
        return {"dp_shard": 2 if ranks is None else ranks}
    if not isinstance(mesh, Mapping) or not mesh or not all(_is_count(size) for size in mesh.values()):
        raise UserError(f"@pytest.mark.distbench(mesh={mesh!r}): give mesh dims and their sizes, such as {{'tp': 2}}")
    check_mesh_dims(mesh)
    if ranks is not None and ranks != mesh_size(mesh):
        problem = f"the mesh {format_mesh(mesh)} has {count_text(mesh_size(mesh), 'rank')}; leave ranks out"
        raise UserError(f"@pytest.mark.distbench(ranks={ranks}, mesh={dict(mesh)}): {problem}")
    return dict(mesh)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def entry_of(function: Callable[..., Any], axes: Mapping[str, Sequence[Any]], mesh: Mapping[str, int]) -> Entry:
    """Return a scenario's entry for the function, from which a job is made; `axes`: parameter to its values.

    Raises:
        UserError: ranks cannot import the function, or an argument cannot be sent to them.
    """
    file = _file_of(function)
    for name, values in axes.items():
        for value in values:
            if not _is_plain(value):
                raise UserError(
                    f"{function.__name__}: argument {name!r} is a {type(value).__name__}, which cannot be sent to "
                    "ranks in other processes; give numbers, text, None, or lists or dicts of these, and create "
                    "other objects inside the function"
                )
    params = {name: values[0] for name, values in axes.items()}
    summary = (inspect.getdoc(function) or "").partition("\n")[0]
    swept = {name: tuple(values) for name, values in axes.items()}
    return Entry(function.__name__, file, dict(mesh), swept, {}, (), summary, params)


def _file_of(function: Any) -> Path:
    """Return the file with this function at its top level. Raise UserError if ranks could not import the function
    there."""
    name = getattr(function, "__name__", "")
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    file = getattr(module, "__file__", None)
    if not callable(function) or not name or not file or getattr(module, name, None) is not function:
        qualified_name = getattr(function, "__qualname__", None) or repr(function)
        raise UserError(
            f"{qualified_name} cannot be imported by ranks in other processes; give a function from the "
            "top level of a file (not a closure, lambda, method or partial) with its inputs as arguments: "
            "distbench(function, value)"
        )
    return Path(file).resolve()


def _is_plain(value: Any) -> bool:
    """Whether JSON preserves the value (a tuple as a list)."""
    if isinstance(value, list | tuple):
        return all(_is_plain(item) for item in value)
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
    return value is None or type(value) in (bool, int, str) or (type(value) is float and math.isfinite(value))


def arguments_of(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the function's arguments after the mesh, by parameter name.

    Raises:
        UserError: ranks cannot import the function, its signature does not fit, or a parameter is positional-only.
    """
    _file_of(function)
    name = getattr(function, "__name__", repr(function))
    signature = inspect.signature(function)
    parameters = list(signature.parameters.values())
    if not parameters or parameters[0].kind not in (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD):
        raise UserError(f"{name} has no parameter for the mesh; write def {name}(mesh, ...)")
    if any(parameter.kind in (Parameter.VAR_POSITIONAL, Parameter.POSITIONAL_ONLY) for parameter in parameters[1:]):
        raise UserError(f"{name} has parameters without a name after the mesh; give each parameter a name")
    try:
        bound = signature.bind(None, *args, **kwargs).arguments
    except TypeError as error:
        problem = f"{name} cannot be called with these arguments: {error}"
        raise UserError(f"{problem}; its first argument is the mesh, followed by your arguments") from error
    del bound[parameters[0].name]
    if parameters[-1].kind is Parameter.VAR_KEYWORD:
        bound |= bound.pop(parameters[-1].name, {})
    return bound


@dataclass(frozen=True)
class CaseRatio:
    """The ratio of two cases' times.

    Args:
        ratio: geometric mean over the passes of both cases.
        low: lower bound of the ratio's 95 % interval; nan with fewer than 8 passes.
        high: upper bound of the interval, or nan.
        verdict: "faster", "slower", "within noise" or "too few passes", as in a report's tables.
    """

    ratio: float
    low: float
    high: float
    verdict: str

    def inverse(self) -> "CaseRatio":
        """Return the inverse ratio."""
        verdict = {FASTER: SLOWER, SLOWER: FASTER}.get(self.verdict, self.verdict)
        return CaseRatio(1 / self.ratio, 1 / self.high, 1 / self.low, verdict)


class Sweep:
    """The cases of one launch, whose passes alternated."""

    def __init__(self) -> None:
        self.cases: list[MeasuredCase] = []

    @cached_property
    def ratios(self) -> dict[tuple[str, str], CaseRatio]:
        """Return the ratio of every pair of cases, by their ids; the pairs are tested as one family."""
        import numpy as np

        from distbench.statistics.pass_comparison import as_table, compare_pairs

        pairs, comparison = compare_pairs(as_table([np.array(case.pass_medians_s) for case in self.cases]))
        bounds = (values.tolist() for values in (comparison.ratio, comparison.low, comparison.high))
        rows = zip(pairs, *bounds, comparison.verdict, strict=True)
        return {(self.cases[first].id, self.cases[second].id): CaseRatio(*row) for (first, second), *row in rows}


@dataclass(frozen=True)
class MeasuredCase:
    """One measured case; the run file contains its complete record.

    Args:
        id: `call/<function>/<arguments>/<mesh>`.
        status: "ok"; for any other status the fixture fails the test.
        samples_s: seconds of each sample, on the sample's slowest rank.
        params: the case's call, variant and mesh, as text.
        counters: other numbers of the case; the counter `checked` is whether the result was checked.
        stop_reason: the reason that ended sampling: "passes" of a sweep, else "steady", "max_samples" or "max_case_s".
        error: one sentence if status is not "ok", else None.
        passes: (number of a pass, number of its samples), in the order of `samples_s`.
        sweep: all cases of the same launch.
    """

    id: str
    status: str
    samples_s: tuple[float, ...]
    rank_median_s: tuple[float, ...]
    params: dict[str, Any]
    counters: dict[str, Any]
    stop_reason: str | None
    error: str | None
    run_file: Path
    passes: tuple[tuple[int, int], ...] = ()
    sweep: Sweep = field(default_factory=Sweep, repr=False, compare=False)

    @classmethod
    def all_of(cls, records: Sequence[Record], run_file: Path) -> "list[MeasuredCase]":
        """Return the cases of a run file's records."""
        sweep = Sweep()
        for record in records:
            case = cls(
                id=record["case"]["id"],
                status=record["status"],
                samples_s=tuple(record.get("samples_s") or ()),
                rank_median_s=tuple(record.get("rank_median_s") or ()),
                params=dict(record["case"].get("params") or {}),
                counters=dict(record.get("counters") or {}),
                stop_reason=record.get("stop_reason"),
                error=record.get("error"),
                run_file=run_file,
                passes=tuple((number, count) for number, count in record.get("passes") or ()),
                sweep=sweep,
            )
            sweep.cases.append(case)
        return sweep.cases

    @property
    def median_s(self) -> float:
        """Median in seconds: over the passes if there are several, else over the samples."""
        return median(self.pass_medians_s) if len(self.passes) > 1 else median(self.samples_s)

    def versus(self, other: "MeasuredCase") -> CaseRatio:
        """Return this case's time divided by the time of another case of the same sweep.

        The interval and the verdict are adjusted for all pairs of the sweep's cases.

        Raises:
            UserError: the other case is this case, or is of another launch, so that the cases did not alternate.
        """
        if self.run_file != other.run_file:
            problem = f"{self.id} and {other.id} belong to different launches"
            raise UserError(f"{problem}; compare cases of the same distbench.sweep(...)")
        if self.id == other.id:
            raise UserError(f"{self.id} is compared with itself; give another case of the sweep")
        ratios = self.sweep.ratios
        return ratios.get((self.id, other.id)) or ratios[other.id, self.id].inverse()

    @property
    def pass_medians_s(self) -> list[float]:
        """The median sample of each pass, seconds; nan for a pass without samples."""
        from distbench.statistics.pass_comparison import pass_medians

        num_passes = 1 + max((number for number, _ in self.passes), default=-1)
        return pass_medians(self.samples_s, self.passes, num_passes).tolist()

    @property
    def ci_s(self) -> tuple[float, float]:
        """95 % confidence interval of the median pass, seconds; (nan, nan) with fewer than 8 passes."""
        from distbench.statistics.pass_comparison import MIN_PASSES

        return median_ci(self.pass_medians_s) if len(self.passes) >= MIN_PASSES else (math.nan, math.nan)

    @property
    def quartiles_s(self) -> tuple[float, float]:
        """The quartiles of the samples, seconds (not an interval of the median); (nan, nan) with fewer than 4
        samples."""
        columns = summarise([self.samples_s])
        return float(columns["q1_s"][0]), float(columns["q3_s"][0])

    def line(self) -> str:
        """Format the case as a line for a terminal."""
        is_known = not math.isnan(self.ci_s[0])
        (low, high), name = (self.ci_s, "95 % CI") if is_known else (self.quartiles_s, "quartiles")
        spread = "" if math.isnan(low) else f", {name} [{1e3 * low:.3g}, {1e3 * high:.3g}]"
        return f"{self.id}: median {1e3 * self.median_s:.3g} ms{spread}, {count_text(len(self.samples_s), 'sample')}"


def _add_rows(item: pytest.Item, cases: Sequence[MeasuredCase], job: Job) -> bool:
    """Add cases to pytest-benchmark's table, JSON, autosave and compare, with one round per sample.

    Like other plugins, this uses `config._benchmarksession.benchmarks` and `pytest_benchmark.stats.Metadata`, which are
    not public. If a version lacks these names, a warning is printed, and the cases are printed without
    pytest-benchmark.

    Returns:
        Whether pytest-benchmark shows the cases; False if pytest-benchmark is not installed, disabled or incompatible.
    """
    session = getattr(item.config, "_benchmarksession", None)
    if session is None or session.disabled or session.skip:
        return False
    try:
        from pytest_benchmark.stats import Metadata

        options = {
            "disable_gc": False,
            "timer": "each rank's monotonic clock",
            "min_rounds": job.settings.min_samples,
            "max_time": job.settings.max_case_s,
            "min_time": 0.0,
            "warmup": job.settings.warmup_iterations,
        }
        rows = [Metadata(_row(item, case), iterations=1, options=options) for case in cases]
        for row, case in zip(rows, cases, strict=True):
            for seconds in case.samples_s:
                row.update(seconds)
        session.benchmarks.extend(rows)
    except (ImportError, AttributeError, TypeError) as error:
        item.warn(pytest.PytestWarning(f"this version of pytest-benchmark does not accept distbench's rows: {error}"))
        return False
    return True


def _row(item: pytest.Item, case: MeasuredCase) -> SimpleNamespace:
    """The attributes that pytest-benchmark reads from its own fixture."""
    short_id = case.id.removeprefix("call/")
    group = item.get_closest_marker("benchmark")
    callspec = getattr(item, "callspec", None)
    params = callspec.params if callspec else {}
    return SimpleNamespace(
        name=f"{item.name}::{short_id}",
        fullname=f"{item.nodeid}::{short_id}",
        group=group.kwargs.get("group") if group else None,
        param=callspec.id if callspec else None,
        params={**params, "variant": case.params.get("variant"), "mesh": case.params["mesh"]},
        extra_info={
            "distbench": case.id,
            "round": "one iteration, on its slowest rank",
            "rank_median_s": list(case.rank_median_s),
            "stop_reason": case.stop_reason,
            "checked": case.counters.get("checked"),
        },
        cprofile_stats=None,
        has_error=False,
    )


class Distbench:
    """The fixture. Run files and logs are written to `out`; cases that pytest-benchmark does not show are added to
    `unshown`."""

    def __init__(self, item: pytest.Item, out: Path, unshown: list[MeasuredCase]) -> None:
        self._item, self._out, self._unshown = item, out, unshown

    def __call__(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> list[MeasuredCase]:
        """Call `function(mesh, *args, **kwargs)` on every rank, and time the returned `call`, or the call of `(call,
        check)`.

        The function is at a module's top level, and its arguments are plain data. `call()` is timed until it returns.
        `check()` runs once afterwards. For a correct result on this rank, `check()` returns None or True; for an
        incorrect result, `check()` raises, or returns False or a sentence.

        Raises:
            pytest.fail.Exception: a case is not ok, a rank died or hung, or the request is not valid.
        """
        with _user_errors():
            arguments = arguments_of(function, args, kwargs)
            return self._measure(function, {name: (value,) for name, value in arguments.items()})

    def sweep(self, function: Callable[..., Any], /, **axes: Sequence[Any]) -> list[MeasuredCase]:
        """Time a function with all combinations of the values in one launch: `sweep(function, numel=(1024, 4096))`."""
        with _user_errors():
            for name, values in axes.items():
                if not isinstance(values, list | tuple) or not values:
                    raise UserError(f"sweep({name}={values!r}): give a list of values for {name!r}")
            arguments_of(function, (), {name: values[0] for name, values in axes.items()})
            return self._measure(function, axes)

    def _measure(self, function: Callable[..., Any], axes: Mapping[str, Sequence[Any]]) -> list[MeasuredCase]:
        job = self._job(function, axes)
        with _pytests_modules():
            outcome = launch.launch(job, None, Display())
        if outcome.status == "interrupted":
            raise KeyboardInterrupt
        run_file = Path(job.run_file)
        records = read_run(run_file).cases if run_file.exists() else []
        cases = MeasuredCase.all_of(records, run_file)
        if problems := _problems(outcome, cases):
            self._show_logs(Path(job.log_dir))
            pytest.fail("\n".join(problems), pytrace=False)
        if not _add_rows(self._item, cases, job):
            self._unshown += cases
        return cases

    def _job(self, function: Callable[..., Any], axes: Mapping[str, Sequence[Any]]) -> Job:
        marker = self._item.get_closest_marker(MARKER)
        marked = case_request(marker.args if marker else (), marker.kwargs if marker else {})
        request = launch.Request(
            targets=(),
            mesh=marked.mesh,
            device="cpu",
            quick=marked.quick,
            out=self._out,
            timeout_s=marked.timeout_s,
            started_at=time.time(),
        )
        (job,) = launch.jobs_of_entries(request, [entry_of(function, axes, marked.mesh)], None)
        return replace(job, is_call=True)

    def _show_logs(self, log_dir: Path) -> None:
        """Add the end of each rank's log to the failing test's report, because a CI machine soon deletes the files."""
        for log in sorted(log_dir.glob("rank*.log")):
            lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
            if lines:
                self._item.add_report_section("call", f"{log.stem} of distbench", "\n".join(lines[-LOG_LINES:]))


def _problems(outcome: launch.JobOutcome, cases: Sequence[MeasuredCase]) -> list[str]:
    """Return the reasons for the test's failure; empty if every case is ok."""
    lines = [outcome.message] if outcome.message else []
    lines += [
        f"{case.id} is {case.status}: {case.error}"
        for case in cases
        if case.status != "ok" and case.id not in outcome.message
    ]
    if not cases and not outcome.user_can_fix:
        lines.append("nothing was measured; check this machine with `distbench doctor`")
    return lines


@contextlib.contextmanager
def _user_errors() -> Iterator[None]:
    """Fail the test with the sentence of a UserError, without a traceback."""
    try:
        yield
    except UserError as error:
        raise pytest.fail.Exception(str(error), pytrace=False) from None


@contextlib.contextmanager
def _pytests_modules() -> Iterator[None]:
    """Pass pytest's import path to the ranks, with changes by conftest files and import modes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
        yield
