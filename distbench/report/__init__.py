"""What a person reads of run files: tables, Markdown, CSV, JSON, plots and a page. Only `render` puts them together."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from distbench.records.dataframe import frame_of, records_of
from distbench.records.results_folder import collect, is_scenario_name
from distbench.records.run_file import no_garbage_collection
from distbench.report.overview import Contents, overview
from distbench.report.page import page_blocks, write_page
from distbench.report.report_formats import DATA_FORMS, FORMS, Rendered, rendered
from distbench.report.reproducer import write_reproducers
from distbench.report.sections import figures_in, report_blocks
from distbench.report.summary import summary
from distbench.show.blocks import Block, Table, TableColumns, capped, key_columns, table_of
from distbench.show.plots import draw
from distbench.show.terminal import text_of
from distbench.show.units import time_text
from distbench.spec.errors import UserError, nearest
from distbench.statistics.intervals import geometric_mean

if TYPE_CHECKING:
    import pandas as pd


# Cases summarised by columns of the frame.

MAX_ROWS = 200
STATISTICS = ("num_cases", "num_ok", "geometric_mean_s", "min_s", "max_s")


def grouped(frame: "pd.DataFrame", group_by: tuple[str, ...]) -> "pd.DataFrame":
    """One row a group, in order of first appearance: the columns asked for, then STATISTICS.

    Means, minima and maxima are of the medians of the group's ok cases, in seconds: a wrong result's time says nothing.
    """
    import pandas as pd

    for name in group_by:
        if name not in frame.columns:
            raise UserError(f"--group-by {name}: no such column ({nearest(name, map(str, frame.columns))})")
    by = list(dict.fromkeys(group_by))
    is_ok = frame["status"] == "ok"
    marked = frame[by].assign(_median_s=frame["median_s"].where(is_ok), _ok=is_ok)
    aggregated = marked.groupby(by, sort=False, dropna=False).agg(
        num_cases=("_ok", "size"),
        num_ok=("_ok", "sum"),
        geometric_mean_s=("_median_s", lambda values: geometric_mean(values.to_numpy(float))),
        min_s=("_median_s", "min"),
        max_s=("_median_s", "max"),
    )
    # A statistic wins over a column of the same name, such as min_s, so that the result has each name once.
    keys = aggregated.index.to_frame(index=False)
    keys.columns = pd.Index([f"{name}_group" if name in STATISTICS else name for name in by])
    return pd.concat([keys, aggregated.reset_index(drop=True)], axis=1)


def table(groups: "pd.DataFrame") -> Table:
    """The groups as a table."""
    keys = [str(name) for name in groups.columns if name not in STATISTICS]
    columns: TableColumns = [
        *key_columns(keys),
        ("cases", lambda row: str(row["num_cases"])),
        ("ok", lambda row: str(row["num_ok"])),
        ("geometric mean", lambda row: time_text(row["geometric_mean_s"])),
        ("min", lambda row: time_text(row["min_s"])),
        ("max", lambda row: time_text(row["max_s"])),
    ]
    title, notes = f"by {', '.join(keys)}", ["times are of the ok cases' medians"]
    return capped(table_of(title, columns, records_of(groups), notes), MAX_ROWS)


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
        all_runs, warnings = collect(runs, out)
        frame = frame_of(all_runs)
    groups = grouped(frame, group_by) if group_by else None
    is_data_alone = (groups is not None or form in DATA_FORMS) and not (plots or page or reproducers)
    contents = Contents.of(all_runs, frame, with_studies=not is_data_alone)
    figure_files = draw(figures_in(contents), plots) if plots else []
    messages = [write_page(page, page_blocks(contents))] if page else []
    if reproducers:
        messages += _write_reproducers(reproducers, contents)
    return rendered(
        form,
        lambda: frame if groups is None else groups,
        lambda: (
            _blocks(contents, runs, command, full or form != "table")
            if groups is None
            else [*overview(Contents.of(all_runs, frame, with_studies=False).reported), table(groups)]
        ),
        warnings,
        figure_files,
        messages,
    )


def summary_of(run_files: Sequence[Path], report: str) -> str:
    """The first screen on some run files, as `distbench run` ends with it; `report` is the command that shows them."""
    with no_garbage_collection():
        runs, _ = collect(tuple(run_files), None)
        contents = Contents.of(runs, frame_of(runs))
    return text_of(summary(contents, report))


def _blocks(contents: Contents, targets: tuple[Path, ...], command: str, full: bool) -> list[Block]:
    if full or any(is_scenario_name(name) for name in targets):
        return report_blocks(contents, full)
    return summary(contents, command)


def _write_reproducers(folder: Path, contents: Contents) -> list[str]:
    lines = []
    for study in contents.studies:
        scripts, left_out = write_reproducers(study.failures, study.versions, folder)
        lines += [*(f"reproducer written: {path}" for path in scripts), *left_out]
    return lines or ["no reproducer written: no redistribution of these runs is wrong or broken"]


__all__ = ["FORMS", "Rendered", "render", "summary_of"]
