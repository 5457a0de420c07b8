"""The first screen, a few lines a scenario, verdicts first: what ran, what was found, how sure that is, what next."""

import shlex
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from distbench.compare.passes import MIN_PASSES
from distbench.laboratory.study_verdict import verdict_lines
from distbench.links.link_text import link_lines
from distbench.render.blocks import Block, Code, Heading, Lines, shorten
from distbench.render.screen import cells, width_here
from distbench.render.units import counts_text
from distbench.report import findings
from distbench.report.calibrations import calibration_lines
from distbench.report.contents import Contents
from distbench.report.latencies import latency_lines
from distbench.report.operators import operator_lines
from distbench.report.overview import NOT_OK, busy_line, cautions_of, machine_line
from distbench.report.sections import short_path
from distbench.report.simulated_steps import simulated_lines
from distbench.runs.record_checks import STATUSES
from distbench.runs.run_file import Run
from distbench.spec.mesh import format_mesh
from distbench.spec.printable import count_text

if TYPE_CHECKING:
    import pandas as pd

MAX_REASON, MAX_RUNS = 200, 20
# What a reader must not miss comes first: what failed, what differs beyond noise, everything else.
FAILED, DIFFERS, OTHER = range(3)


def summary(contents: Contents, report: str = "") -> list[Block]:
    """The first screen; `report` is the command that shows these runs, for those that come next; empty: none do."""
    runs = contents.runs
    counted = Counter(case["status"] for run in runs for case in run.cases)
    names = Counter(run.scenario for run in runs)
    count = count_text(len(names), "scenario")
    if len(names) < len(runs):
        count = f"{count_text(len(runs), 'run')} of {count}"
    statuses = counts_text({status: counted[status] for status in STATUSES}) or "no case finished"
    cautions = (*dict.fromkeys(line for run in runs for line in cautions_of(run)), *busy_line(runs))
    found = [
        (*_of_run(run, frame, contents, names[run.scenario] > 1), run)
        for run, frame in zip(runs, contents.frames, strict=True)
    ]
    if len(names) < len(runs):
        found.reverse()  # the latest run of a scenario first
    found.sort(key=lambda one: one[0])
    sections = [lines for _, lines, _ in found]
    most = MAX_RUNS if report else len(found)  # a page has them all
    more = [f"... {len(found) - most} more"] if len(found) > most else []
    return [
        Heading(f"distbench: {count}: {statuses}", 1),
        Lines((*dict.fromkeys(map(machine_line, runs)), *cautions)),
        Lines((*(line for lines in sections[:most] for line in lines), *more)),
        *_joined(Lines((*_too_few(sections),)), _next(runs, found[0][2].scenario, report) if report and found else []),
    ]


def _of_run(run: Run, frame: "pd.DataFrame", contents: Contents, with_file: bool) -> tuple[int, list[str]]:
    """Where it stands in the order, and its lines; `with_file` names its file, where others are of its scenario."""
    failed = _failed(run, contents.is_studied(run))
    lines = [*findings.step_lines(frame), *latency_lines(frame), *findings.collective_lines(frame)]
    lines += findings.call_lines(frame)
    lines += operator_lines(frame)
    lines += _of_study(run, contents) if contents.is_studied(run) else findings.redistribution_lines(frame)
    lines += [*simulated_lines(run), *calibration_lines(run), *findings.trace_lines(run), *link_lines(run)]
    differs = any(line.startswith(("best:", "worst:", "SLOW:")) for line in lines)
    rank = FAILED if failed else DIFFERS if differs else OTHER
    return rank, [_head(run, with_file), *(f"  {line}" for line in (*failed, *lines))]


def _too_few(sections: Sequence[Sequence[str]]) -> list[str]:
    """What to do where passes were too few for verdicts."""
    count = sum(any(findings.NO_VERDICT in line for line in lines) for lines in sections)
    told = f"in {count_text(count, 'scenario')} passes were too few to tell variants apart"
    return [f"{told}: measure without --quick, or with --passes {MIN_PASSES}"] if count else []


def _head(run: Run, with_file: bool) -> str:
    about, environment = run.about, run.about.environment
    device = "/".join(part for part in (environment.device or about.device, environment.backend) if part)
    ranks = count_text(environment.world_size, "rank") if environment.world_size else ""
    mesh = "" if about.mesh is None else format_mesh(about.mesh)
    label, file = f"label {about.label}" if about.label else "", run.path.name if with_file else ""
    where = ", ".join(filter(None, (mesh, device, ranks, label, file)))
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


def _joined(first: Lines, rest: list[Block]) -> list[Block]:
    """No blank line between both, where the rest begins with sentences too."""
    match rest:
        case [Lines(texts), *more]:
            return [Lines((*first.texts, *texts)), *more]
    return [first, *rest]


def _next(runs: Sequence[Run], scenario: str, report: str) -> list[Block]:
    """The commands to go on with, an interrupted run first; those that are too long for a line alone, to be pasted."""
    cut_short = [run for run in runs if run.footer is None or run.footer.get("status") == "interrupted"]
    resume = [f"distbench run --resume {shlex.quote(str(short_path(run.path)))}" for run in cut_short[:1]]
    commands = {
        f"{report} {scenario}": "its own tables",
        f"{report} --full": "everything",
        **({f"{report} --paths": "what each path costs"} if any(run.traces for run in runs) else {}),
        f"{report} --page FILE": "to send on",
    }
    width = max(map(cells, commands))
    lines = [f"  {command}  the cases that it lacks" for command in resume]
    lines += [f"  {command}{' ' * (width - cells(command))}  {what}" for command, what in commands.items()]
    if max(map(cells, lines)) <= width_here():
        return [Lines(("next:", *lines))]
    return [Lines(("next:",)), Code((*resume, *commands))]
