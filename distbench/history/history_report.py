"""Series as a table of levels, and as plots: a point a launch, a line a level, changes named by their commit."""

import datetime
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from distbench.history.series import Point, Series
from distbench.render.blocks import Block, Heading, Lines, Table
from distbench.render.plot_style import BLUE, GREY, RED, label_axis, new_figure, save, styled, time_tick
from distbench.render.terminal import text_of
from distbench.render.units import time_text
from distbench.spec.printable import count_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_CASES = 40
SHORT_HASH = 8
COLUMNS = ("<from", "<commit", "launches", "median of p10", "change")


def text(series: Sequence[Series], notes: Sequence[str]) -> str:
    """Every case's levels, the case with the largest change first."""
    num_changed = sum(bool(one.changes) for one in series)
    first_line = f"{count_text(len(series), 'case')}, {num_changed} of them changed their level"
    blocks: list[Block] = [Heading("history", 1), Lines((first_line, *notes))]
    for one in series[:MAX_CASES]:
        rows = []
        changes = dict(zip((level.start for level in one.levels[1:]), one.changes, strict=True))
        for level in one.levels:
            first = one.points[level.start]
            change = f"{100 * changes[level.start][1]:+.0f} %" if level.start in changes else ""
            count = str(level.stop - level.start)
            named = " ".join([commit_text(first), *([f'"{first.label}"'] if first.label else [])])
            rows.append((_date(first), named, count, time_text(level.seconds), change))
        blocks.append(Table(f"{one.scenario}: {one.case_id}", COLUMNS, rows))
    if len(series) > MAX_CASES:
        blocks.append(Lines((f"... {len(series) - MAX_CASES} more cases: narrow the pattern",)))
    return text_of(blocks)


def _date(point: Point) -> str:
    if point.started_at <= 0:
        return "-"
    return datetime.datetime.fromtimestamp(point.started_at, datetime.UTC).strftime("%Y-%m-%d %H:%M")


def commit_text(point: Point) -> str:
    """`1a2b3c4d`, with a `+` where files differed from it; `-` where it is not known."""
    return "-" if point.commit is None else point.commit[:SHORT_HASH] + ("+" if point.dirty else "")


def draw(series: Sequence[Series], folder: Path) -> list[Path]:
    """One figure a case; the paths. An OSError where the folder cannot be written."""
    folder.mkdir(parents=True, exist_ok=True)
    with styled():
        drawn = [save(figure_of(one), folder, f"history-{n:02}") for n, one in enumerate(series[:MAX_CASES])]
    return list(chain.from_iterable(drawn))


def figure_of(one: Series) -> "Figure":
    """A case's series: a point a launch, a line a level."""
    figure, [axes] = new_figure(1, 9, 3.6)
    axes.plot(range(len(one.points)), [point.seconds for point in one.points], "o", color=GREY, markersize=4)
    for level in one.levels:
        axes.hlines(level.seconds, level.start - 0.4, level.stop - 0.6, color=BLUE, linewidth=2)
    for level, (point, change) in zip(one.levels[1:], one.changes, strict=True):
        colour = RED if change > 0 else BLUE
        axes.axvline(level.start - 0.5, color=colour, linewidth=1, linestyle=":")
        text = f"{100 * change:+.0f} %\n{commit_text(point)}"
        axes.annotate(text, (level.start - 0.4, 1), xycoords=("data", "axes fraction"), va="top", color=colour)
    title = f"{one.case_id}: the 10th percentile of each launch's samples"
    top = 1.25 * max(point.seconds for point in one.points)
    axes.set(title=title, xlabel="launch, oldest first", ylabel="time", ylim=(0, top))
    axes.grid(axis="y")
    label_axis(axes.yaxis, time_tick)
    return figure
