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
from distbench.report.overview import overview, spent_line
from distbench.report.plots import figures_of
from distbench.runs.header import scenario_name
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


def report_blocks(runs: Sequence[Run], frames: Sequence["pd.DataFrame"], studies: Sequence[Study]) -> list[Block]:
    """The report as text has it."""
    told = [run for study in studies for run in study.runs]
    blocks = overview(runs, [block for study in studies for block in opening(study)], told)
    blocks += [block for study in studies for block in story(study)]
    for run, frame in zip(runs, frames, strict=True):
        blocks += section(run, frame, told)
    return [*blocks, *(block for study in studies for block in code_blocks(study))]


def section(run: Run, frame: "pd.DataFrame", told: Sequence[Run] = ()) -> list[Block]:
    """One run's own tables; those of its redistributions are left out where a story tells of them.

    Args:
        run: the run.
        frame: its cases.
        told: runs whose redistributions a story tells of.
    """
    is_told = any(run is other for other in told)
    spent = spent_line(run)
    return [
        Heading(scenario_name(run)),
        Lines((f"run file: {_short(run.path)}", *([EVERY_CASE] if is_told else []))),
        *collectives.tables(frame),
        *steps.tables(frame),
        *calls.tables(frame),
        *([] if is_told else redistributions.tables(frame)),
        *([Lines((spent,))] if spent else []),
        *([Lines((PATHS.format(_short(run.path)),))] if run.traces else []),
    ]


def page_blocks(
    runs: Sequence[Run], frames: Sequence["pd.DataFrame"], studies: Sequence[Study]
) -> tuple[list[Block | Picture], str]:
    """(blocks of a page, its title): verdict, code, the story with figures, where the numbers come from."""
    told = [run for study in studies for run in study.runs]
    names = ", ".join(dict.fromkeys(scenario_name(run) for run in runs))
    blocks: list[Block | Picture] = []
    for study in studies:
        blocks.append(Heading(f"Which redistribution planner to use on {study.machine}", 1))
        blocks += [Verdict(lines.texts) for lines in opening(study) if isinstance(lines, Lines)]
        blocks += [*code_blocks(study), *_with_figures(story(study), study)]
    head = overview(runs, (), told)
    if studies:
        head[0] = Heading("Where these numbers come from")
    blocks += head
    for run, frame in zip(runs, frames, strict=True):
        blocks += section(run, frame, told)
        is_told = any(run is other for other in told)
        own = frame[frame["kind"] != "redistribute"] if is_told else frame
        blocks += [Picture(figure) for _, figure in figures_of(scenario_name(run), own)]
        blocks += _paths_of(run)
    return blocks, f"distbench: {names}"


def _paths_of(run: Run) -> list[Block | Picture]:
    """What each traced step spends on which path, its timeline first."""
    traces, failed = traces_of([run])
    blocks: list[Block | Picture] = [Lines(tuple(failed))] if failed else []
    for trace in traces:
        heading, opening, *tables = trace_blocks(trace)
        pictures = [Picture(figure) for _, figure in timeline_figures([trace])]
        blocks += [heading, opening, *pictures, *tables]
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
