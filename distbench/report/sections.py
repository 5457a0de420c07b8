"""What stands where in a report: the verdict, the overview, the laboratory's story, then each run's own tables."""

from typing import TYPE_CHECKING

from distbench.judge.links_text import link_tables
from distbench.records.run_file import Run
from distbench.report import calls, collectives, inference, operators, redistributions, steps
from distbench.report.calibrations import calibration_tables
from distbench.report.overview import Contents, overview, spent_line
from distbench.report.simulated_steps import simulated_tables
from distbench.report.study import code_blocks, opening, story
from distbench.show.blocks import Block, Heading, Lines, Table
from distbench.spec.file_io import short_path

if TYPE_CHECKING:
    import pandas as pd

PATHS = "which path costs what: distbench report --paths {}"
EVERY_CASE = "every redistribution of this run: distbench report --format csv"


def report_blocks(contents: Contents, full: bool = True) -> list[Block]:
    """The report as text has it; where not `full`, without what confirms rather than tells."""
    studies = contents.studies
    blocks = overview(contents.runs, [opening(study) for study in studies], contents.is_studied)
    blocks += [block for study in studies for block in story(study)]
    for run, frame in zip(contents.runs, contents.frames, strict=True):
        blocks += _section(run, frame, contents.is_studied(run), full)
    return [*blocks, *(block for study in studies for block in code_blocks(study))]


def _section(run: Run, frame: "pd.DataFrame", is_studied: bool, full: bool = True) -> list[Block]:
    """One run's own tables, and where to find more; where not `full`, time spent is left out."""
    spent = spent_line(run) if full else None
    return [
        Heading(run.scenario),
        Lines((f"run file: {short_path(run.path)}", *([EVERY_CASE] if is_studied else []))),
        *simulated_tables(run),
        *tables_of(frame, is_studied, full),
        *link_tables(run),
        *calibration_tables(run),
        *([Lines((spent,))] if spent else []),
        *([Lines((PATHS.format(short_path(run.path)),))] if run.traces else []),
    ]


def tables_of(frame: "pd.DataFrame", is_studied: bool, full: bool = True) -> list[Table]:
    """One run's tables; those of its redistributions are left out where a study covers them.

    Where not `full`, what is within noise is counted alone, and agreement with one device is left out.
    """
    others = [] if is_studied else redistributions.tables(frame, full)
    of_steps = [*steps.tables(frame, full), *inference.tables(frame, full)]
    return [*collectives.tables(frame), *operators.tables(frame), *of_steps, *calls.tables(frame), *others]
