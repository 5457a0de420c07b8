"""What stands where in a report: the verdict, the overview, the laboratory's story, then each run's own tables."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from distbench.laboratory import redistributions
from distbench.laboratory.study import Study
from distbench.laboratory.study_plots import laboratory_figures
from distbench.laboratory.study_text import opening, story
from distbench.laboratory.study_verdict import code_blocks
from distbench.render.blocks import Block, Heading, Lines
from distbench.render.html import Picture, Verdict
from distbench.report import calls, collectives, steps
from distbench.report.contents import Contents
from distbench.report.overview import overview, spent_line
from distbench.report.plots import figures_of
from distbench.runs.run_file import Run
from distbench.traces.path_tables import trace_blocks
from distbench.traces.records import traces_of
from distbench.traces.timeline import timeline_figures

if TYPE_CHECKING:
    import pandas as pd

# Figure of the laboratory to the table that it stands before.
BEFORE = {
    "ratio-by-size": "Time over greedy's",
    "cost-over-best": "What each choice costs",
    "predicted-against-measured": "Predicted by",
}
PATHS = "which path costs what in its traced steps: distbench report --paths {}"
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
    """One run's own tables; those of its redistributions are left out where a study covers them.

    Where not `full`, what is within noise is counted alone, and agreement with one device and time spent are left out.
    """
    spent = spent_line(run) if full else None
    return [
        Heading(run.scenario),
        Lines((f"run file: {_short(run.path)}", *([EVERY_CASE] if is_studied else []))),
        *collectives.tables(frame),
        *steps.tables(frame, full),
        *calls.tables(frame),
        *([] if is_studied else redistributions.tables(frame, full)),
        *([Lines((spent,))] if spent else []),
        *([Lines((PATHS.format(_short(run.path)),))] if run.traces else []),
    ]


def page_blocks(contents: Contents) -> tuple[list[Block | Picture], str]:
    """(blocks of a page, its title): verdict, code, the story with figures, where the numbers come from."""
    blocks: list[Block | Picture] = []
    for study in contents.studies:
        blocks.append(Heading(f"Which redistribution planner to use on {study.machine}", 1))
        blocks += [Verdict(opening(study).texts), *code_blocks(study), *_with_figures(story(study), study)]
    head = overview(contents.runs, (), contents.is_studied)
    if contents.studies:
        head[0] = Heading("Where these numbers come from")
    blocks += head
    for run, frame in zip(contents.runs, contents.frames, strict=True):
        is_studied = contents.is_studied(run)
        blocks += _section(run, frame, is_studied)
        own = frame[frame["kind"] != "redistribute"] if is_studied else frame
        blocks += [Picture(figure) for _, figure in figures_of(run.scenario, own)]
        blocks += _paths_of(run)
    return blocks, "distbench: " + ", ".join(dict.fromkeys(run.scenario for run in contents.runs))


def _paths_of(run: Run) -> list[Block | Picture]:
    """What each traced step spends on which path, its timeline first."""
    traces, failed = traces_of([run])
    blocks: list[Block | Picture] = [Lines(tuple(failed))]
    for trace in traces:
        heading, first, *tables = trace_blocks(trace)
        pictures = [Picture(figure) for _, figure in timeline_figures([trace])]
        blocks += [heading, first, *pictures, *tables]
    return blocks


def _with_figures(blocks: Sequence[Block], study: Study) -> list[Block | Picture]:
    figures = dict(laboratory_figures(study))
    placed: list[Block | Picture] = []
    for block in blocks:
        for name, title in BEFORE.items():
            if name in figures and getattr(block, "title", "").startswith(title):
                placed.append(Picture(figures.pop(name)))
        placed.append(block)
    return [*placed, *(Picture(figure) for figure in figures.values())]


def _short(path: Path) -> Path:
    """Relative to the working folder, where it lies below that."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
