"""Series as a table of levels, and as plots: a point a launch, a line a level, changes named by their commit."""

import datetime
from collections.abc import Sequence
from itertools import chain, pairwise
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

# Those that changed, each with a table of its own; and those that did not.
MAX_CASES, MAX_STEADY = 40, 60
SHORT_HASH = 8
COLUMNS = ("<from", "<commit", "launches", "median of p10", "change")
STEADY_COLUMNS = ("<scenario", "<case", "launches", "median of p10", "<from", "<commit")


def text(series: Sequence[Series], notes: Sequence[str]) -> str:
    """The cases that changed their level, the largest change first; then those that did not, a line each."""
    changed = [one for one in series if one.changes]
    first_line = f"{count_text(len(series), 'case')}, {len(changed)} of them changed their level"
    blocks: list[Block] = [Heading("history", 1), Lines((first_line, *notes))]
    blocks += map(_changed, changed[:MAX_CASES])
    steady = [one for one in series if not one.changes]
    left_out = max(len(changed) - MAX_CASES, 0) + max(len(steady) - MAX_STEADY, 0)
    if steady:
        rows = [_steady_row(one) for one in steady[:MAX_STEADY]]
        blocks.append(Table("no change of their own:", STEADY_COLUMNS, rows, optional=("commit", "from", "scenario")))
    if left_out:
        blocks.append(Lines((f"... {left_out} more cases: narrow the pattern, e.g. distbench history SCENARIO",)))
    if changed:
        blocks.append(Lines((_next_step(changed[0]),)))
    return text_of(blocks)


def _next_step(one: Series) -> str:
    """How to find out whether the code made the largest change."""
    change = max(zip(pairwise(one.levels), one.changes, strict=True), key=lambda item: abs(item[1][1]))
    before, after = (one.points[index] for index in (change[0][0].stop - 1, change[0][1].start))
    if before.commit and after.commit and before.commit != after.commit:
        why = "launches both in turn and decides whether the commit or the machine changed"
        return f"next: distbench ab {before.commit[:SHORT_HASH]} {after.commit[:SHORT_HASH]} -- {one.scenario}   {why}"
    why = "the commit is the same before and after the change" if before.commit else "no commit is recorded"
    return f"next: distbench ab A B -- {one.scenario}   with the revisions to compare; here {why}"


def _changed(one: Series) -> Table:
    changes = dict(zip((level.start for level in one.levels[1:]), one.changes, strict=True))
    rows = []
    for level in one.levels:
        change = f"{100 * changes[level.start][1]:+.0f} %" if level.start in changes else ""
        first = one.points[level.start]
        rows.append((_date(first), _named(first), str(level.stop - level.start), time_text(level.seconds), change))
    return Table(f"{one.scenario}: {one.case_id}", COLUMNS, rows)


def _steady_row(one: Series) -> tuple[str, ...]:
    (level,), first = one.levels, one.points[0]
    count = str(level.stop - level.start)
    return one.scenario, one.case_id, count, time_text(level.seconds), _date(first), _named(first)


def _named(point: Point) -> str:
    return " ".join([commit_text(point), *([f'"{point.label}"'] if point.label else [])])


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
