"""The registry of sections: the first screen, the report, the page and the plots are built from it."""

from collections.abc import Iterator
from dataclasses import replace

from distbench.judge.links_text import link_figures, link_lines, link_tables
from distbench.report import (
    calibrations,
    collectives,
    inference,
    operators,
    redistributions,
    simulated_steps,
    steps,
    trace_tables,
    user_calls,
)
from distbench.report.overview import Contents, overview, spent_line
from distbench.report.planner_study import code_blocks, story, verdict_lines
from distbench.report.planner_study_plots import laboratory_figures
from distbench.report.section_protocol import Figures, ReportedRun, Section
from distbench.report.trace_rows import traces_of
from distbench.report.trace_timeline import timeline_figures
from distbench.show.blocks import Block, Heading, Lines
from distbench.spec.file_io import short_path

LINKS = Section(
    lambda reported: link_lines(reported.run),
    lambda reported, full: link_tables(reported.run),
    lambda reported: link_figures(reported.run),
)
# In the order of a run's tables. A kind of case is added by a file with a SECTION and a word here.
SECTIONS = (
    simulated_steps.SECTION,
    collectives.SECTION,
    operators.SECTION,
    steps.SECTION,
    inference.SECTION,
    user_calls.SECTION,
    redistributions.SECTION,
    LINKS,
    calibrations.SECTION,
    trace_tables.SECTION,
)
# The first screen begins with what a step takes.
FIRST_ON_SCREEN = (steps.SECTION, inference.SECTION)
PATHS = "which path costs what: distbench report --paths {}"
EVERY_CASE = "every redistribution of this run: distbench report --format csv"


def report_blocks(contents: Contents, full: bool = True) -> list[Block]:
    """The report as text has it; where not `full`, without what confirms rather than tells."""
    studies = contents.studies
    blocks = overview(contents.reported, [Lines(verdict_lines(study)) for study in studies])
    blocks += [block for study in studies for block in story(study)]
    blocks += [block for reported in contents.reported for block in _run_blocks(reported, full)]
    return [*blocks, *(block for study in studies for block in code_blocks(study))]


def _run_blocks(reported: ReportedRun, full: bool) -> Iterator[Block]:
    """One run's own tables, and where to find more; where not `full`, time spent is left out."""
    run = reported.run
    yield Heading(run.scenario)
    yield Lines((f"run file: {short_path(run.path)}", *([EVERY_CASE] if reported.study else [])))
    for section in SECTIONS:
        yield from section.tables(reported, full)
    if full and (line := spent_line(run)):
        yield Lines((line,))
    if run.traces:
        yield Lines((PATHS.format(short_path(run.path)),))


def figures_in(contents: Contents) -> Figures:
    """(name, figure) of whatever there is something to draw of; the runs of a study are drawn one by one, too."""
    names = [run.scenario for run in contents.runs]
    for reported, name in zip(contents.reported, names, strict=True):
        stem = name if names.count(name) == 1 else reported.run.path.stem
        for section in SECTIONS:
            yield from ((f"{kind}-{stem}", figure) for kind, figure in section.figures(replace(reported, study=None)))
    yield from timeline_figures(traces_of(contents.runs)[0])
    for study in contents.studies:
        yield from ((f"{kind}-{study.machine}", figure) for kind, figure in laboratory_figures(study))
