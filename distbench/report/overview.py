"""What a report is made of, and its top: what ran where, what is not ok, how the time of each run was spent."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

from distbench.records.run_file import STATUSES, Run
from distbench.report.planner_study import Study, studies_of
from distbench.report.section_protocol import ReportedRun
from distbench.show.blocks import Block, Heading, Lines, Table, TableColumns, capped, shorten, table_of
from distbench.show.units import brief_time_text, counts_text, known, percent_text, size_text
from distbench.spec.mesh import format_mesh
from distbench.spec.printable_text import count_text, listed

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Contents:
    """The runs of a report, and the planner studies among them."""

    reported: Sequence[ReportedRun]
    studies: Sequence[Study]

    @classmethod
    def of(cls, runs: Sequence[Run], frame: "pd.DataFrame", with_studies: bool = True) -> "Contents":
        """Contents of runs and the one frame of all their cases; studies take time, and are not always shown."""
        ends = accumulate((len(run.cases) for run in runs), initial=0)
        frames = [frame.iloc[start:end] for start, end in pairwise(ends)]
        studies = studies_of(runs, frames) if with_studies else []
        study_of = {id(run): study for study in studies for run in study.runs}
        return cls(
            [ReportedRun(run, part, study_of.get(id(run))) for run, part in zip(runs, frames, strict=True)], studies
        )

    @property
    def runs(self) -> list[Run]:
        """The runs alone."""
        return [reported.run for reported in self.reported]


RUN_COLUMNS = ("<scenario", "<mesh", "<device", "ranks", "<status", "wall", "<cases")
MAX_CASES = 40
# Cases that cannot work here and say so beforehand: `distbench run` exits with 0 for them.
SKIPPED = ("skipped",)
NOT_OK = tuple(status for status in STATUSES if status not in ("ok", *SKIPPED))
NOT_OK_TITLE = "NOT OK"
MAX_ERROR = 400
# Above this many runnable processes a CPU before the run began, somebody else was measured too.
BUSY_PER_CPU = 0.5
MAX_BUSY = 4  # named
CASE_COLUMNS: TableColumns = (
    ("<status", lambda case: str(case["status"])),
    ("<case", lambda case: str(case["case"]["id"])),
    ("<error", lambda case: shorten(str(case.get("error") or "-"), MAX_ERROR)),
)


def overview(reported: Sequence[ReportedRun], opening: Sequence[Block] = ()) -> list[Block]:
    """Title, `opening`, machines, one row a run, the cases that are not ok, and those that were skipped.

    Redistributions that a study covers are shown there, those that are not ok too.
    """
    runs = [part.run for part in reported]
    cautions = (*_labels(runs), *cautions_in(runs))
    tables = (_cases_table(NOT_OK_TITLE, NOT_OK, reported), _cases_table("skipped", SKIPPED, reported))
    blocks: list[Block] = [
        Heading(f"distbench report: {count_text(len(runs), 'run')}", 1),
        *opening,
        Lines(tuple(dict.fromkeys(map(machine_line, runs)))),
        Table("runs", RUN_COLUMNS, [*map(_run_row, runs)], optional=("wall", "device", "ranks")),
        *([Lines(cautions)] if cautions else []),
    ]
    return [*blocks, *(table for table in tables if table.rows)]


def cases_with(reported: Iterable[ReportedRun], statuses: Sequence[str]) -> list[dict[str, Any]]:
    """The cases of these statuses that no study covers, the worst first."""
    cases = [
        case
        for part in reported
        for case in part.run.cases
        if case["status"] in statuses and not (part.study and case["case"].get("kind") == "redistribute")
    ]
    return sorted(cases, key=lambda case: STATUSES.index(case["status"]))


def _cases_table(name: str, statuses: Sequence[str], reported: Sequence[ReportedRun]) -> Table:
    cases = cases_with(reported, statuses)
    title = f"{name}: {len(cases)} of {count_text(sum(len(part.run.cases) for part in reported), 'case')}"
    return capped(replace(table_of(title, CASE_COLUMNS, cases), prose="error"), MAX_CASES)


def statuses_text(runs: Iterable[Run], otherwise: str) -> str:
    """`3 ok, 1 wrong`; `otherwise` where no case finished."""
    counts = Counter(case["status"] for run in runs for case in run.cases)
    return counts_text({status: counts[status] for status in STATUSES}) or otherwise


def device_text(run: Run) -> str:
    """`cpu/gloo`; empty where it is not known."""
    environment = run.about.environment
    return "/".join(part for part in (environment.device or run.about.device, environment.backend) if part)


def spent_line(run: Run) -> str | None:
    """How the run's wall time was spent, largest part first; None where the footer does not say."""
    spent_s = (run.footer or {}).get("spent_s")
    parts = {name: value for name, value in spent_s.items() if known(value)} if isinstance(spent_s, dict) else {}
    total = sum(parts.values())
    if not total > 0:
        return None
    shares = sorted(parts.items(), key=lambda part: -part[1])
    text = ", ".join(f"{name} {percent_text(value / total)}" for name, value in shares if value / total >= 0.005)
    line = f"time spent: {brief_time_text(total)} = {text}"
    measuring = (run.footer or {}).get("measuring_s")
    if not known(measuring) or not measuring > 0 or "timed" not in parts:
        return line
    share = f"{percent_text(parts['timed'] / measuring)} of the {brief_time_text(measuring)}"
    return f"{line}; {share} from the first case opened to the last one closed is timed"


def _run_row(run: Run) -> tuple[str, ...]:
    about, environment, footer = run.about, run.about.environment, run.footer or {}
    # A run without a footer was interrupted.
    status, message = str(footer.get("status") or "interrupted"), footer.get("message")
    return (
        run.scenario,
        "-" if about.mesh is None else format_mesh(about.mesh),
        device_text(run) or "-",
        str(environment.world_size or "-"),
        status + (f": {shorten(str(message), MAX_ERROR)}" if message else ""),
        brief_time_text(footer.get("wall_s") or float("nan")),
        statuses_text([run], "none finished"),
    )


def machine_line(run: Run) -> str:
    """What it ran on."""
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
    return f"{facts.machine or 'unknown machine'}: " + ", ".join(part for part in parts if part)


def cautions_in(runs: Sequence[Run]) -> list[str]:
    """What readers must know of the times of all these runs, each sentence once."""
    return [*dict.fromkeys(line for run in runs for line in cautions_of(run)), *_busy_line(runs)]


def cautions_of(run: Run) -> Iterator[str]:
    """What every time of the run includes besides its own, and in what its hosts differ."""
    facts, repeats = run.about.environment, run.about.settings.get("iterations_per_sample", 1)
    if facts.device == "cpu" and facts.num_cpus and facts.world_size:
        on_each = facts.world_size / (facts.num_hosts or 1)
        if on_each > facts.num_cpus:
            calm = " (less of it: the ranks ran under SCHED_BATCH)" if facts.scheduler == "batch" else ""
            shared = f"{on_each:g} ranks share {facts.num_cpus} CPUs"
            yield f"caution: {shared}, so every time includes waiting for a CPU{calm}"
    yield from (f"caution: {sentence}" for sentence in facts.cautions or ())
    if known(repeats) and repeats > 1:
        yield f"{run.scenario} is pipelined: a sample is the mean of {repeats} iterations back to back"


def _labels(runs: Sequence[Run]) -> Iterator[str]:
    by_label: dict[str, list[str]] = {}
    for run in runs:
        if run.about.label:
            by_label.setdefault(run.about.label, []).append(run.scenario)
    for label, scenarios in by_label.items():
        yield f'labelled "{label}": {", ".join(dict.fromkeys(scenarios))}'


def _busy_line(runs: Sequence[Run]) -> Iterator[str]:
    """On the runs that began while the machine was at other work."""
    loads = [(run.scenario, run.about.environment.load_per_cpu) for run in runs]
    busy = [(name, load) for name, load in loads if load and load > BUSY_PER_CPU]
    if busy:
        names = list(dict.fromkeys(name for name, _ in busy))
        load = max(load for _, load in busy)
        yield f"caution: begun on a busy machine (load up to {load:.1f} a CPU): {listed(names, MAX_BUSY)}"
