"""What a person reads of run files: tables, Markdown, CSV, JSON, plots and a page. Only `render` puts them together."""

from collections.abc import Sequence
from pathlib import Path

from distbench.laboratory.reproducer import write_reproducers
from distbench.render.blocks import Block
from distbench.render.plot_style import draw
from distbench.render.terminal import text_of
from distbench.report.contents import Contents
from distbench.report.groups import grouped, table
from distbench.report.output import DATA_FORMS, FORMS, Rendered, rendered
from distbench.report.overview import overview
from distbench.report.page import page_blocks, write_page
from distbench.report.plots import figures_in
from distbench.report.sections import report_blocks
from distbench.report.summary import summary
from distbench.runs.find import collect, is_scenario_name
from distbench.runs.frame import frame_of
from distbench.runs.run_file import no_garbage_collection
from distbench.spec.errors import UserError


def render(
    runs: tuple[Path, ...],
    out: Path,
    form: str,
    plots: Path | None,
    group_by: tuple[str, ...],
    page: Path | None = None,
    reproducers: Path | None = None,
    full: bool = False,
    command: str = "distbench report",
) -> Rendered:
    """The report on some runs.

    Args:
        runs: run files, folders of them and names of scenarios, as `runs.find.collect` takes them; empty for every
            scenario of the latest `distbench run` under `out`.
        form: one of FORMS; "csv" and "json" give every column of the frame, one row (record) a case. "table" gives the
            summary, or the tables of the scenarios that are named.
        plots: folder to draw plots in as well.
        group_by: columns to summarise cases by; empty to list them.
        page: HTML file for the same report with its figures.
        reproducers: folder for one script for each cause of wrong or broken redistributions.
        full: every table of every scenario, in "table" too; the other forms are always whole.
        command: what shows these runs again, for the summary's commands to go on with.
    """
    if form not in FORMS:
        raise UserError(f"format {form!r} is unknown; use {', '.join(FORMS)}")
    with no_garbage_collection():
        found, warnings = collect(runs, out)
        whole = frame_of(found)
    groups = grouped(whole, group_by) if group_by else None
    is_data_alone = (groups is not None or form in DATA_FORMS) and not (plots or page or reproducers)
    contents = Contents.of(found, whole, with_studies=not is_data_alone)
    written = draw(figures_in(contents), plots) if plots else []
    messages = [write_page(page, page_blocks(contents))] if page else []
    if reproducers:
        messages += _write_reproducers(reproducers, contents)
    return rendered(
        form,
        lambda: whole if groups is None else groups,
        lambda: (
            _blocks(contents, runs, command, full or form != "table")
            if groups is None
            else [*overview(found), table(groups)]
        ),
        warnings,
        written,
        messages,
    )


def summary_of(run_files: Sequence[Path], report: str) -> str:
    """The first screen on some run files, as `distbench run` ends with it; `report` is the command that shows them."""
    with no_garbage_collection():
        found, _ = collect(tuple(run_files), None)
        contents = Contents.of(found, frame_of(found))
    return text_of(summary(contents, report))


def _blocks(contents: Contents, named: tuple[Path, ...], command: str, full: bool) -> list[Block]:
    if full or any(is_scenario_name(name) for name in named):
        return report_blocks(contents, full)
    return summary(contents, command)


def _write_reproducers(folder: Path, contents: Contents) -> list[str]:
    lines = []
    for study in contents.studies:
        written, left_out = write_reproducers(study.failures, study.versions, folder)
        lines += [*(f"reproducer written: {path}" for path in written), *left_out]
    return lines or ["no reproducer written: no redistribution of these runs is wrong or broken"]


__all__ = ["FORMS", "Rendered", "render", "summary_of"]
