"""The first screen, a few lines a scenario, verdicts first: what ran, what was found, how sure that is, what next."""

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from distbench.compare.passes import MIN_PASSES
from distbench.laboratory.study_verdict import verdict_lines
from distbench.render.blocks import Block, Heading, Lines, shorten
from distbench.render.units import counts_text
from distbench.report import findings
from distbench.report.contents import Contents
from distbench.report.operators import operator_lines
from distbench.report.overview import NOT_OK, busy_line, cautions_of, machine_line
from distbench.runs.record_checks import STATUSES
from distbench.runs.run_file import Run
from distbench.spec.mesh import format_mesh

if TYPE_CHECKING:
    import pandas as pd

MAX_REASON = 200
# What a reader must not miss comes first: what failed, what differs beyond noise, everything else.
FAILED, DIFFERS, OTHER = range(3)


def summary(contents: Contents, report: str = "distbench report") -> list[Block]:
    """The first screen; `report` is the command that shows these runs, for those that come next."""
    runs = contents.runs
    counted = Counter(case["status"] for run in runs for case in run.cases)
    count = f"{len(runs)} scenario{'s' if len(runs) != 1 else ''}"
    statuses = counts_text({status: counted[status] for status in STATUSES}) or "no case finished"
    cautions = (*dict.fromkeys(line for run in runs for line in cautions_of(run)), *busy_line(runs))
    found = [_of_run(run, frame, contents) for run, frame in zip(runs, contents.frames, strict=True)]
    found.sort(key=lambda one: one[0])
    return [
        Heading(f"distbench: {count}: {statuses}", 1),
        Lines((*dict.fromkeys(map(machine_line, runs)), *cautions)),
        Lines(tuple(line for _, lines in found for line in lines)),
        Lines((*_too_few(found), _next(runs, report))),
    ]


def _of_run(run: Run, frame: "pd.DataFrame", contents: Contents) -> tuple[int, list[str]]:
    """Where it stands in the order, and its lines."""
    failed = _failed(run, contents.is_studied(run))
    lines = [*findings.step_lines(frame), *findings.collective_lines(frame), *findings.call_lines(frame)]
    lines += operator_lines(frame)
    lines += _of_study(run, contents) if contents.is_studied(run) else findings.redistribution_lines(frame)
    lines += findings.trace_lines(run)
    differs = any(line.startswith(("best:", "worst:")) for line in lines)
    rank = FAILED if failed else DIFFERS if differs else OTHER
    return rank, [_head(run), *(f"  {line}" for line in (*failed, *lines))]


def _too_few(found: Sequence[tuple[int, list[str]]]) -> list[str]:
    """What to do where passes were too few for verdicts."""
    count = sum(any(findings.NO_VERDICT in line for line in lines) for _, lines in found)
    told = f"in {count} scenario{'s' if count != 1 else ''} passes were too few to tell variants apart"
    return [f"{told}: measure without --quick, or with --passes {MIN_PASSES}"] if count else []


def _head(run: Run) -> str:
    about, environment = run.about, run.about.environment
    device = "/".join(part for part in (environment.device or about.device, environment.backend) if part)
    ranks = f"{environment.world_size} ranks" if environment.world_size else ""
    mesh = "" if about.mesh is None else format_mesh(about.mesh)
    where = ", ".join(filter(None, (mesh, device, ranks, f"label {about.label}" if about.label else "")))
    counted = Counter(case["status"] for case in run.cases)
    statuses = counts_text({status: counted[status] for status in STATUSES}) or "no case finished"
    return f"{run.scenario} ({where}): {statuses}"


def _failed(run: Run, is_studied: bool) -> list[str]:
    """Why the run did not end as it should, and the first case that is not ok; what a study covers is told there."""
    footer, lines = run.footer, []
    status = str((footer or {}).get("status") or "interrupted")
    if status != "complete":
        message = str((footer or {}).get("message") or "its cases up to then count")
        lines.append(f"NOT COMPLETE: {status}: {shorten(message, MAX_REASON)}")
    bad = [
        case
        for case in run.cases
        if case["status"] in NOT_OK and not (is_studied and case["case"].get("kind") == "redistribute")
    ]
    bad.sort(key=lambda case: STATUSES.index(case["status"]))
    if bad:
        more = f"; {len(bad) - 1} more" if len(bad) > 1 else ""
        reason = shorten(str(bad[0].get("error") or "no reason is recorded"), MAX_REASON)
        lines.append(f"NOT OK: {bad[0]['case']['id']} is {bad[0]['status']}: {reason}{more}")
    return lines


def _of_study(run: Run, contents: Contents) -> list[str]:
    """The planners' verdict, once a study: with its latest run."""
    study = next(study for study in contents.studies if any(run is other for other in study.runs))
    lines = verdict_lines(study)
    return [*lines[:1], *lines[1:][-1:]] if run is study.runs[-1] else []


def _next(runs: Sequence[Run], report: str) -> str:
    """The commands to go on with."""
    traced = [f"{report} --paths (what each path costs)"] if any(run.traces for run in runs) else []
    own = f"{report} {runs[0].scenario} (its own tables)"
    return f"next: {'; '.join([own, f'{report} --full (everything)', *traced, f'{report} --page FILE (to send on)'])}"
