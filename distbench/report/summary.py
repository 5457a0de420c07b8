"""The first screen, a few lines a scenario, verdicts first: what ran, what was found, how sure that is, what next."""

import shlex
from collections import Counter
from collections.abc import Sequence

from distbench.records.run_file import Run
from distbench.report.overview import (
    NOT_OK,
    Contents,
    cases_with,
    cautions_in,
    device_text,
    machine_line,
    statuses_text,
)
from distbench.report.section_protocol import NO_VERDICT, ReportedRun
from distbench.report.sections import FIRST_ON_SCREEN, SECTIONS
from distbench.show.blocks import Block, Code, Heading, Lines, shorten
from distbench.show.terminal import cells, width_here
from distbench.spec.file_io import short_path
from distbench.spec.mesh import format_mesh
from distbench.spec.printable_text import count_text
from distbench.statistics.pass_comparison import MIN_PASSES

MAX_REASON, MAX_RUNS = 200, 20
# What a reader must not miss comes first: what failed, what differs beyond noise, everything else.
FAILED, DIFFERS, OTHER = range(3)
DIFFERENCES = ("best:", "worst:", "SLOW:")


def summary(contents: Contents, report: str = "") -> list[Block]:
    """The first screen; `report` is the command that shows these runs, for those that come next; empty: none do."""
    runs = contents.runs
    names = Counter(run.scenario for run in runs)
    count = count_text(len(names), "scenario")
    if len(names) < len(runs):
        count = f"{count_text(len(runs), 'run')} of {count}"
    parts = [(*_of_run(reported, names[reported.run.scenario] > 1), reported.run) for reported in contents.reported]
    if len(names) < len(runs):
        parts.reverse()  # the latest run of a scenario first
    parts.sort(key=lambda part: part[0])
    most = MAX_RUNS if report else len(parts)  # a page has them all
    more = [f"... {len(parts) - most} more"] if len(parts) > most else []
    return [
        Heading(f"distbench: {count}: {statuses_text(runs, 'no case finished')}", 1),
        Lines((*dict.fromkeys(map(machine_line, runs)), *cautions_in(runs))),
        Lines((*(line for _, lines, _ in parts[:most] for line in lines), *more)),
        *_joined(
            Lines((*_too_few([lines for _, lines, _ in parts]),)),
            _next(runs, parts[0][2].scenario, report) if report and parts else [],
        ),
    ]


def _of_run(reported: ReportedRun, with_file: bool) -> tuple[int, list[str]]:
    """Where it stands in the order, and its lines; `with_file` names its file, where others are of its scenario."""
    failed = _failed(reported)
    sections = dict.fromkeys((*FIRST_ON_SCREEN, *SECTIONS))
    lines = [line for section in sections for line in section.headline(reported)]
    differs = any(line.startswith(DIFFERENCES) for line in lines)
    rank = FAILED if failed else DIFFERS if differs else OTHER
    return rank, [_head(reported.run, with_file), *(f"  {line}" for line in (*failed, *lines))]


def _too_few(sections: Sequence[Sequence[str]]) -> list[str]:
    """What to do where passes were too few for verdicts."""
    count = sum(any(NO_VERDICT in line for line in lines) for lines in sections)
    where = f"in {count_text(count, 'scenario')} passes were too few to tell variants apart"
    return [f"{where}: measure without --quick, or with --passes {MIN_PASSES}"] if count else []


def _head(run: Run, with_file: bool) -> str:
    about, world_size = run.about, run.about.environment.world_size
    ranks = count_text(world_size, "rank") if world_size else ""
    mesh = "" if about.mesh is None else format_mesh(about.mesh)
    label, file = f"label {about.label}" if about.label else "", run.path.name if with_file else ""
    where = ", ".join(filter(None, (mesh, device_text(run), ranks, label, file)))
    return f"{run.scenario} ({where}): {statuses_text([run], 'no case finished')}"


def _failed(reported: ReportedRun) -> list[str]:
    """Why the run did not end as it should, and the first case that is not ok."""
    footer, lines = reported.run.footer or {}, []
    status = str(footer.get("status") or "interrupted")
    if status != "complete":
        message = str(footer.get("message") or "its cases up to then count")
        lines.append(f"NOT COMPLETE: {status}: {shorten(message, MAX_REASON)}")
    if bad := cases_with([reported], NOT_OK):
        more = f"; {len(bad) - 1} more" if len(bad) > 1 else ""
        reason = shorten(str(bad[0].get("error") or "no reason is recorded"), MAX_REASON)
        lines.append(f"NOT OK: {bad[0]['case']['id']} is {bad[0]['status']}: {reason}{more}")
    return lines


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
    lines += [f"  {command}{' ' * (width - cells(command))}  {purpose}" for command, purpose in commands.items()]
    if max(map(cells, lines)) <= width_here():
        return [Lines(("next:", *lines))]
    return [Lines(("next:",)), Code((*resume, *commands))]
