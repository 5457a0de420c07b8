"""The parts of a report: overview, summary, and each run's sections from the registry of kinds of case."""

import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

from distbench.judge.links_text import link_figures, link_lines, link_tables
from distbench.records.run_file import STATUSES, Run
from distbench.report import calibrations, checkpoints, collectives, operators, redistributions, steps, trace_tables
from distbench.report.headline import NOT_OK, SKIPPED, UNDECIDED, Outcome, outcome_of, side_of, status_of
from distbench.report.planner_study import Study, studies_of
from distbench.report.planner_study_text import code_blocks, laboratory_figures, planner_tables, verdict_lines
from distbench.report.section_protocol import NO_VERDICT, Figures, ReportedRun, Section
from distbench.report.trace_rows import traces_of
from distbench.report.trace_timeline import timeline_figures
from distbench.show.blocks import Block, Code, Heading, Lines, Notes, Table, TableColumns, capped, shorten, table_of
from distbench.show.terminal import cells, width_here
from distbench.show.units import NOTHING, brief_time_text, counts_text, known, percent_text, size_text
from distbench.spec.file_io import short_path
from distbench.spec.mesh import format_mesh
from distbench.spec.printable_text import count_text, listed
from distbench.statistics.verdicts import MIN_PASSES

if TYPE_CHECKING:
    import pandas as pd

LINKS = Section(
    lambda reported: link_lines(reported.run),
    lambda reported, full: link_tables(reported.run),
    lambda reported: link_figures(reported.run),
)
# In the order of a run's tables. A new kind of case needs a file with a Section, and an entry here.
SECTIONS = (
    steps.SIMULATED_STEPS,
    collectives.SECTION,
    collectives.WAYS,
    operators.SECTION,
    steps.TRAINING_STEPS,
    steps.FORWARD_PASSES,
    checkpoints.SECTION,
    operators.USER_CALLS,
    redistributions.SECTION,
    LINKS,
    calibrations.SECTION,
    trace_tables.SECTION,
)
# The summary begins with times of steps.
FIRST_ON_SCREEN = (steps.TRAINING_STEPS, steps.FORWARD_PASSES)


@dataclass(frozen=True)
class Contents:
    """The runs of a report, and the planner studies among them."""

    reported: Sequence[ReportedRun]
    studies: Sequence[Study]

    @classmethod
    def of(cls, runs: Sequence[Run], frame: "pd.DataFrame", with_studies: bool = True) -> "Contents":
        """Contents of runs with the frame of all cases. Studies take time, and are not always shown."""
        ends = accumulate((len(run.cases) for run in runs), initial=0)
        frames = [frame.iloc[start:end] for start, end in pairwise(ends)]
        studies = studies_of(runs, frames) if with_studies else []
        study_of = {id(run): study for study in studies for run in study.runs}
        return cls(
            [ReportedRun(run, part, study_of.get(id(run))) for run, part in zip(runs, frames, strict=True)], studies
        )

    @property
    def runs(self) -> list[Run]:
        """The runs without frames."""
        return [reported.run for reported in self.reported]

    def name_of(self, run: Run) -> str:
        """The run's scenario, with the name of the run file if other runs have the same scenario."""
        return run.scenario if self._num_runs[run.scenario] == 1 else f"{run.scenario} ({run.path.stem})"

    @cached_property
    def _num_runs(self) -> Counter[str]:
        return Counter(run.scenario for run in self.runs)

    @cached_property
    def outcome(self) -> Outcome:
        """The outcome of all runs together."""
        return outcome_of(
            self.reported,
            [
                (self.name_of(reported.run), variant)
                for reported in self.reported
                for section in SECTIONS
                for variant in section.compared(reported)
            ],
        )


def report_blocks(contents: Contents, full: bool = True) -> list[Block]:
    """The blocks of a report. Without `full`, rows that confirm the expected result and the line on time spent are left
    out."""
    studies = contents.studies
    blocks = overview(contents.reported, [Lines(verdict_lines(study)) for study in studies])
    blocks += [block for study in studies for block in planner_tables(study)]
    for reported in contents.reported:
        run = reported.run
        every_case = ["every redistribution of this run: distbench report --format csv"] if reported.study else []
        blocks += [Heading(run.scenario), Lines((f"run file: {short_path(run.path)}", *every_case))]
        blocks += [table for section in SECTIONS for table in section.tables(reported, full)]
        if full and (line := spent_line(run)):
            blocks.append(Lines((line,)))
        if run.traces:
            blocks.append(Lines((f"communication by path: distbench report --paths {short_path(run.path)}",)))
    return [*blocks, *(block for study in studies for block in code_blocks(study)), *ending(contents, full)]


def ending(contents: Contents, full: bool = False) -> list[Block]:
    """The warnings on times, in one line without `full`, and the headline."""
    notes = tuple(warnings_of(contents.runs))
    return [Lines(notes) if full else Notes(notes), Lines(contents.outcome.lines())]


def figures_in(contents: Contents) -> Figures:
    """(name, figure) of each figure with data. Runs of a study also have separate figures."""
    names = [run.scenario for run in contents.runs]
    for reported, name in zip(contents.reported, names, strict=True):
        stem = name if names.count(name) == 1 else reported.run.path.stem
        for section in SECTIONS:
            yield from ((f"{kind}-{stem}", figure) for kind, figure in section.figures(replace(reported, study=None)))
    yield from timeline_figures(traces_of(contents.runs)[0])
    for study in contents.studies:
        yield from ((f"{kind}-{study.machine}", figure) for kind, figure in laboratory_figures(study))


# The top of a report: runs and machines, cases that are not ok, and the use of each run's time.

NOT_OK_TITLE = "NOT OK"
MAX_CASES, MAX_ERROR, MAX_BUSY = 40, 600, 4
# A load per CPU above this before the run means that another program ran.
BUSY_PER_CPU = 0.5
CASE_COLUMNS: TableColumns = (
    ("<status", lambda case: str(case["status"])),
    ("<case", lambda case: str(case["case"]["id"])),
    ("<error", lambda case: shorten(str(case.get("error") or "-"), MAX_ERROR)),
)
RUN_COLUMNS: TableColumns = (
    ("<scenario", lambda run: run.scenario),
    ("<mesh", lambda run: NOTHING if run.about.mesh is None else format_mesh(run.about.mesh)),
    ("<device", lambda run: _device_text(run) or NOTHING),
    ("ranks", lambda run: str(run.about.environment.world_size or NOTHING)),
    (
        "<status",
        lambda run: status_of(run) + (f": {shorten(message, MAX_ERROR)}" if (message := _message(run)) else ""),
    ),
    ("wall", lambda run: brief_time_text((run.footer or {}).get("wall_s") or float("nan"))),
    ("<cases", lambda run: _statuses_text([run], "none finished")),
)


def overview(reported: Sequence[ReportedRun], opening: Sequence[Block] = ()) -> list[Block]:
    """Title, `opening`, machines, one row per run, cases that are not ok, and skipped cases.

    Redistributions of a study are left out, because the study shows them.
    """
    runs = [part.run for part in reported]
    by_label: dict[str, dict[str, None]] = {}
    for run in runs:
        by_label.setdefault(run.about.label or "", {})[run.scenario] = None
    labels = [f'labelled "{label}": {", ".join(scenarios)}' for label, scenarios in by_label.items() if label]
    tables = (_cases_table(NOT_OK_TITLE, NOT_OK, reported), _cases_table("skipped", SKIPPED, reported))
    blocks: list[Block] = [
        Heading(f"distbench report: {count_text(len(runs), 'run')}", 1),
        *opening,
        Lines(tuple(dict.fromkeys(map(_machine_line, runs)))),
        table_of("runs", RUN_COLUMNS, runs, optional=("wall", "device", "ranks")),
        Lines(tuple(labels)),
    ]
    return [*blocks, *(table for table in tables if table.rows)]


def _cases_with(reported: Iterable[ReportedRun], statuses: Sequence[str]) -> list[dict[str, Any]]:
    """The cases of these statuses, except redistributions of a study, most serious status first."""
    cases = [
        case
        for part in reported
        for case in part.run.cases
        if case["status"] in statuses and not (part.study and case["case"].get("kind") == "redistribute")
    ]
    return sorted(cases, key=lambda case: STATUSES.index(case["status"]))


def _cases_table(name: str, statuses: Sequence[str], reported: Sequence[ReportedRun]) -> Table:
    cases = _cases_with(reported, statuses)
    title = f"{name}: {len(cases)} of {count_text(sum(len(part.run.cases) for part in reported), 'case')}"
    return capped(replace(table_of(title, CASE_COLUMNS, cases), prose="error"), MAX_CASES)


def _statuses_text(runs: Iterable[Run], otherwise: str) -> str:
    """A text such as `3 ok, 1 wrong`, or `otherwise` if no case finished."""
    counts = Counter(case["status"] for run in runs for case in run.cases)
    return counts_text({status: counts[status] for status in STATUSES}) or otherwise


def _message(run: Run) -> str:
    return str((run.footer or {}).get("message") or "")


def _device_text(run: Run) -> str:
    """A text such as `cpu/gloo`, empty if unknown."""
    environment = run.about.environment
    return "/".join(part for part in (environment.device or run.about.device, environment.backend) if part)


def spent_line(run: Run) -> str | None:
    """A line on the parts of the run's wall time, largest part first, or None if the footer has no times."""
    footer = run.footer or {}
    spent_s, measuring = footer.get("spent_s"), footer.get("measuring_s")
    parts = {name: value for name, value in spent_s.items() if known(value)} if isinstance(spent_s, dict) else {}
    total = sum(parts.values())
    if not total > 0:
        return None
    shares = sorted(parts.items(), key=lambda part: -part[1])
    text = ", ".join(f"{name} {percent_text(value / total)}" for name, value in shares if value / total >= 0.005)
    line = f"time spent: {brief_time_text(total)} = {text}"
    if not known(measuring) or not measuring > 0 or "timed" not in parts:
        return line
    share = f"{percent_text(parts['timed'] / measuring)} of the {brief_time_text(measuring)}"
    return f"{line}; {share} between the start of the first case and the end of the last case is timed"


def _machine_line(run: Run) -> str:
    facts = run.about.environment
    commit = (facts.git_commit or "")[:8] + (" (dirty)" if facts.git_dirty else "")
    parts = (
        f"{count_text(facts.num_cpus, 'CPU')} ({facts.cpu_model or 'model unknown'})" if facts.num_cpus else "",
        f"{facts.num_devices} x {facts.device_name}" if facts.device_name else "",
        size_text(facts.memory_bytes) if facts.memory_bytes else "",
        f"{facts.num_hosts} hosts" if facts.num_hosts and facts.num_hosts != 1 else "",
        f"torch {facts.torch or 'unknown'}",
        f"NCCL {facts.nccl}" if facts.nccl else "",
        f"commit {commit}" if facts.git_commit else "",
    )
    return f"{facts.machine or 'unknown machine'}: " + ", ".join(filter(None, parts))


def warnings_of(runs: Sequence[Run]) -> list[str]:
    """Warnings on the times of all runs, without repetitions."""
    warnings = dict.fromkeys(line for run in runs for line in _warnings_of(run))
    loads = [(run.scenario, run.about.environment.load_per_cpu) for run in runs]
    busy = [(name, load) for name, load in loads if load and load > BUSY_PER_CPU]
    if not busy:
        return [*warnings]
    names, most = list(dict.fromkeys(name for name, _ in busy)), max(load for _, load in busy)
    load = f"load {'up to ' * (len(names) > 1)}{most:.1f} per CPU"
    return [*warnings, f"warning: the machine was busy when {listed(names, MAX_BUSY)} started ({load})"]


def _warnings_of(run: Run) -> Iterator[str]:
    """Warnings on the times of a run, and on differences between hosts."""
    facts, repeats = run.about.environment, run.about.settings.get("iterations_per_sample", 1)
    if facts.device == "cpu" and facts.num_cpus and facts.world_size:
        on_each = facts.world_size / (facts.num_hosts or 1)
        if on_each > facts.num_cpus:
            less = " (less under SCHED_BATCH, as here)" if facts.scheduler == "batch" else ""
            shared = f"{on_each:g} ranks on {count_text(facts.num_cpus, 'CPU')}"
            yield f"warning: {shared} wait for a CPU{less}. Compare variants; do not quote times"
    yield from (f"warning: {sentence}" for sentence in facts.cautions or ())
    if run.footer and (count := run.footer.get("num_relaunches")):
        times = count_text(count, "time")
        yield f"warning: the ranks of {run.scenario} were started again {times}, because a rank hung or ended in a case"
    if known(repeats) and repeats > 1:
        yield f"note: {run.scenario} is pipelined, so a sample is the mean of {repeats} iterations back to back"


# The summary, with a few lines per scenario: runs, findings, uncertainty, and the next command.

MAX_RUNS = 20


def summary(contents: Contents, report: str = "") -> list[Block]:
    """The summary. `report` is the command that shows these runs, with which the next command begins. If empty, no next
    command is shown."""
    runs = contents.runs
    names = Counter(run.scenario for run in runs)
    count = count_text(len(names), "scenario")
    if len(names) < len(runs):
        count = f"{count_text(len(runs), 'run')} of {count}"
    parts = [(*_run_lines(reported, names[reported.run.scenario] > 1), reported.run) for reported in contents.reported]
    if len(names) < len(runs):
        parts.reverse()  # the latest run of a scenario first
    parts.sort(key=lambda part: part[0])
    most = MAX_RUNS if report else len(parts)  # a page has all runs
    more = [f"... {len(parts) - most} more"] if len(parts) > most else []
    num_too_few = sum(any(NO_VERDICT in line for line in lines) for _, lines, _ in parts)
    where = f"too few passes for a verdict in {count_text(num_too_few, 'scenario')}"
    too_few = (f"{where}. Measure without --quick, or with --passes {MIN_PASSES}",) if num_too_few else ()
    next_lines, *pasted = _next(runs, parts[0][2].scenario, report) if report and parts else [Lines(())]
    assert isinstance(next_lines, Lines)
    in_answer = {*contents.outcome.lines(), *contents.outcome.links}
    findings = [line for _, lines, _ in parts[:most] for line in lines if line.strip() not in in_answer]
    notes, headline = ending(contents)
    return [
        Heading(f"distbench: {count}: {_statuses_text(runs, 'no case finished')}", 1),
        Lines(tuple(dict.fromkeys(map(_machine_line, runs)))),
        Lines((*findings, *more)),
        notes,
        Lines((*too_few, *next_lines.texts)),
        *pasted,
        headline,
    ]


def _run_lines(reported: ReportedRun, with_file: bool) -> tuple[int, list[str]]:
    """The place of a run in the order (failed, then with differences beyond noise, then others), and the run's lines.

    With `with_file`, the run file is shown, because other runs have the same scenario.
    """
    run, about = reported.run, reported.run.about
    failed, status = [], status_of(run)
    if status != "complete":
        message = _message(run) or "the finished cases count"
        failed.append(f"NOT COMPLETE: {status}: {shorten(message, MAX_ERROR)}")
    if bad := _cases_with([reported], NOT_OK):
        more = f"; {len(bad) - 1} more" if len(bad) > 1 else ""
        reason = shorten(str(bad[0].get("error") or "no reason is recorded"), MAX_ERROR)
        failed.append(f"NOT OK: {bad[0]['case']['id']} is {bad[0]['status']}: {reason}{more}")
    sections = dict.fromkeys((*FIRST_ON_SCREEN, *SECTIONS))
    lines = [line for section in sections for line in section.headline(reported)]
    where = (
        "" if about.mesh is None else format_mesh(about.mesh),
        _device_text(run),
        count_text(about.environment.world_size, "rank") if about.environment.world_size else "",
        f"label {about.label}" if about.label else "",
        run.path.name if with_file else "",
    )
    head = f"{run.scenario} ({', '.join(filter(None, where))}): {_statuses_text([run], 'no case finished')}"
    differs = any(side_of(variant) != UNDECIDED for section in SECTIONS for variant in section.compared(reported))
    order = 0 if failed else 1 if differs or any(line.startswith("FAIL:") for line in lines) else 2
    if order == 2 and len(lines) == 1 and cells(f"{head}, {lines[0]}") <= width_here():
        return order, [f"{head}, {lines[0]}"]
    return order, [head, *(f"  {line}" for line in (*failed, *lines))]


def _next(runs: Sequence[Run], scenario: str, report: str) -> list[Block]:
    """The next command, which continues an interrupted run if there is one. A long command is a separate block."""
    command, purpose = f"{report} {scenario}", "tables; --full shows all tables, --page FILE writes HTML"
    if any(run.traces for run in runs):
        purpose += ", --paths shows communication"
    if cut_short := next((run for run in runs if status_of(run) == "interrupted"), None):
        command = f"distbench run --resume {shlex.quote(str(short_path(cut_short.path)))}"
        purpose = "measures the missing cases"
    if cells(f"Next: {command}") > width_here():
        return [Lines(("Next:",)), Code((command,))]
    return [Lines((f"Next: {command}   ({purpose})",))]
