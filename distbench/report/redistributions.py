"""Redistributions of one run, with comparisons of each planner with greedy, pair by pair."""

from collections.abc import Iterator
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from distbench.report.planner_study import (
    Bools,
    PlannerTable,
    Ratios,
    laboratory_rows,
    median_of,
    planner_table_of,
    proof_lines,
    ratios,
    tally,
)
from distbench.report.planner_study_text import verdict_lines
from distbench.report.section_protocol import MAX_PANELS, NO_VERDICT, PER_ROW, Compared, Figures, ReportedRun, Section
from distbench.show import plots as style
from distbench.show.blocks import Rows, Table
from distbench.show.plots import Spot, hover
from distbench.show.units import (
    NOTHING,
    brief_time_text,
    percent_text,
    ratio_text,
    size_text,
    time_text,
    times_text,
    whole_text,
)
from distbench.spec.placements import BASELINE
from distbench.spec.printable_text import count_text
from distbench.statistics.intervals import Ints, margin_of
from distbench.statistics.pass_comparison import TOO_FEW
from distbench.statistics.verdicts import FASTER, SLOWER, WITHIN_NOISE

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

MAX_PAIRS = 20


class Comparison(NamedTuple):
    """The comparison of one planner with greedy on every pair of one shape and dtype that both measured."""

    table: PlannerTable
    planner: str
    shape: str
    dtype: str
    payload_bytes: float
    rows: Ints  # indexes of the pairs in the table, largest differences first
    ratios: Ratios  # time of planner / greedy, with all these pairs tested together

    def verdict(self, pair: int) -> str:
        """The winner of a pair, such as "min_cost by 15 %+", or "within noise", "same path" or "too few passes".

        The number is the share of time that the winner saves, at the end of the interval with the smaller difference.
        """
        if self.ratios.same[pair]:
            return "same path"
        if not self.ratios.enough[pair]:
            return TOO_FEW
        if self.ratios.side[pair] == 0:
            return "within noise"
        winner = self.planner if self.ratios.side[pair] < 0 else BASELINE
        return f"{winner} by {percent_text(1 - 1 / float(margin_of(self.ratios.ratio)[pair]))}+"


def _comparisons(frame: "pd.DataFrame") -> list[Comparison]:
    """Comparisons of every planner of a run with greedy, by shape and dtype."""
    table = planner_table_of(laboratory_rows(frame))
    if BASELINE not in table.planners:
        return []
    planners = sorted({*table.planners} - {BASELINE}, key=lambda name: (name != "min_cost", name))
    return [comparison for planner in planners for comparison in _of_planner(table, planner)]


def _of_planner(table: PlannerTable, planner: str) -> Iterator[Comparison]:
    both_measured = np.flatnonzero(table.measured[table.at(planner)] & table.measured[table.at(BASELINE)])
    for (shape, dtype), of_shape in table.pairs.iloc[both_measured].groupby(["shape", "dtype"], sort=False):
        rows = of_shape.index.to_numpy()
        compared = ratios(table, planner, BASELINE, table.mask(rows))
        # Different paths first, then the most certain and largest differences.
        distance, margin = np.abs(np.log(compared.ratio.center)), margin_of(compared.ratio)
        keys = (-distance, -margin, ~compared.enough, -np.abs(compared.side), compared.same)
        rows = rows[np.lexsort([key[rows] for key in keys])]
        size = float(of_shape["payload_bytes"].iloc[0])
        yield Comparison(table, planner, str(shape), str(dtype), size, rows, compared)


def _headline(reported: ReportedRun) -> Iterator[str]:
    """Comparisons of each planner with greedy over all shapes, or for the latest run of a study the study's verdict."""
    if reported.study:
        verdict = verdict_lines(reported.study)
        yield from (*verdict[:1], *verdict[1:][-1:]) if reported.run is reported.study.runs[-1] else ()
        return
    for planner, of_planner in groupby(_comparisons(reported.frame), key=lambda comparison: comparison.planner):
        yield from _planner_lines(planner, list(of_planner))


def _planner_lines(planner: str, of_planner: list[Comparison]) -> Iterator[str]:
    sides = [(part, pair) for part in of_planner for pair in part.rows.tolist() if not part.ratios.same[pair]]
    num_pairs = sum(len(part.rows) for part in of_planner)
    if not sides:
        yield f"{planner} plans the same path as {BASELINE} on all {count_text(num_pairs, 'pair')}"
        return
    enough = [(part, pair) for part, pair in sides if part.ratios.enough[pair]]
    of_pairs = f"of {len(sides)} pairs with another path, {count_text(num_pairs, 'pair')} in total"
    if not enough:
        yield f"{planner} compared with {BASELINE}: {NO_VERDICT} ({of_pairs})"
        return
    in_order = sorted(enough, key=lambda part_and_pair: part_and_pair[0].ratios.at(part_and_pair[1])[0])
    faster, slower = ([(part, pair) for part, pair in in_order if part.ratios.side[pair] == side] for side in (-1, 1))
    counts = f"{len(faster)} faster, {len(slower)} slower, {len(sides) - len(faster) - len(slower)} no difference"
    yield f"{planner} compared with {BASELINE}: {counts} ({of_pairs})"
    yield from (_pair_text(*side) for side in (*faster[:1], *slower[-1:]))
    yield from max(of_planner, key=lambda part: len(part.rows)).ratios.sentences[:1]


def _pair_text(comparison: Comparison, pair: int) -> str:
    ratio, low, high = comparison.ratios.at(pair)
    return f"{_pair_name(comparison, pair)}: {times_text(ratio, BASELINE, low, high)}"


def _pair_name(comparison: Comparison, pair: int) -> str:
    facts = comparison.table.pairs.iloc[pair]
    return f"{facts['source']}->{facts['target']} of {size_text(comparison.payload_bytes)}"


def _compared(reported: ReportedRun) -> Iterator[Compared]:
    """Every pair with another path, except pairs of a study."""
    for comparison in [] if reported.study else _comparisons(reported.frame):
        sides = {-1: FASTER, 1: SLOWER}
        for pair in comparison.rows.tolist():
            if not comparison.ratios.same[pair]:
                verdict = sides.get(int(comparison.ratios.side[pair]), WITHIN_NOISE)
                if not comparison.ratios.enough[pair]:
                    verdict = TOO_FEW
                name = f"{comparison.planner} {_pair_name(comparison, pair)}"
                yield Compared(name, BASELINE, *comparison.ratios.at(pair), verdict)


def _tables(reported: ReportedRun, full: bool = True) -> list[Table]:
    """One table per planner, shape and dtype. Without `full`, tables have only differences beyond noise. A study has
    other tables."""
    return [] if reported.study else [_table(comparison, full) for comparison in _comparisons(reported.frame)]


def _table(comparison: Comparison, full: bool) -> Table:
    planner, compared = comparison.planner, comparison.ratios
    columns = ("<planner", "<path", "median", "coll.", "sent", f"<{planner} / {BASELINE}")
    pairs = comparison.rows[full | (compared.side[comparison.rows] != 0)]
    sides = [(pair, name) for pair in pairs.tolist() for name in (BASELINE, planner)]
    rows = Rows(sides, lambda side: _row(comparison, *side))
    size = size_text(comparison.payload_bytes)
    title = f"{BASELINE} and {planner} on {comparison.dtype}[{comparison.shape}] ({size}), largest differences first"
    notes = [f"... {len(pairs) - MAX_PAIRS} more: see --format csv"] if len(pairs) > MAX_PAIRS else []
    if num_left_out := len(comparison.rows) - len(pairs):
        notes.append(f"{count_text(num_left_out, 'pair')} without a difference beyond noise: see --full")
    notes += _notes(comparison)
    if rows:
        notes.append("coll. = collectives on the path, sent = bytes that one rank must send on the path")
    breaks, cap = frozenset(range(2, len(rows), 2)), 2 * MAX_PAIRS
    return Table(title, columns, rows[:cap], notes, breaks, ("coll.", "sent"), together=True, beyond=rows[cap:])


def _row(comparison: Comparison, pair: int, planner: str) -> tuple[str, ...]:
    table = comparison.table
    at = table.at(planner), pair
    source, target = table.pairs["source"].iat[pair], table.pairs["target"].iat[pair]
    return (
        planner,
        table.paths[at] or f"{source}->{target}",
        time_text(float(table.times[at])),
        whole_text(float(table.numbers["num_collectives"][at])),
        size_text(float(table.numbers["wire_bytes"][at])),
        ratio_text(*comparison.ratios.at(pair)) if planner == BASELINE else comparison.verdict(pair),
    )


def _notes(comparison: Comparison) -> list[str]:
    table, planner, rows = comparison.table, comparison.planner, comparison.rows
    lines = [count_text(len(rows), "pair") + _outcome(comparison)]
    lines += [*comparison.ratios.sentences, *proof_lines([comparison.ratios])]
    planning = table.numbers["planning_cold_s"]
    cold = [time_text(median_of(planning[table.at(name), rows])) for name in (BASELINE, planner)]
    if NOTHING not in cold:
        lines.append(f"planning with empty caches, median: {BASELINE} {cold[0]}, {planner} {cold[1]}")
    return lines


def _outcome(comparison: Comparison) -> str:
    planner, compared = comparison.planner, comparison.ratios
    differing = comparison.rows[~compared.same[comparison.rows]]
    counts, num_too_few = tally(compared, differing), int((~compared.enough[differing]).sum())
    if not counts.num_pairs:
        return ", 0 with different paths"
    noise = counts.num_pairs - counts.num_faster - counts.num_slower - num_too_few
    few = f", {TOO_FEW} for a verdict in {num_too_few}" if num_too_few else ""
    return (
        f", {counts.num_pairs} with different paths: {planner} faster beyond noise in {counts.num_faster}, {BASELINE} "
        f"in {counts.num_slower}, neither in {noise}{few}; geometric mean of {planner} / {BASELINE} over "
        f"different paths {ratio_text(*counts.mean)}"
    )


def _figures(reported: ReportedRun) -> Figures:
    """Plots of each planner's median and greedy's median on the same pair, one figure per planner, one panel per
    shape."""
    parts = [] if reported.study else _comparisons(reported.frame)
    for planner, of_planner in groupby(parts, key=lambda comparison: comparison.planner):
        panels = list(of_planner)[:MAX_PANELS]
        figure, axes = style.panels(len(panels), PER_ROW, (5.2, 6.2), (0.6, 0), share=False)
        for panel, comparison in zip(axes, panels, strict=True):
            _planner_panel(panel, comparison)
        for panel in axes[::PER_ROW]:
            panel.set_ylabel(f"{planner}, median time")
        style.title(figure, f"{reported.run.scenario}: {planner} and {BASELINE}, one dot per pair")
        style.caption(figure, f"below the diagonal {planner} is faster; coloured dots: difference beyond noise")
        yield f"{planner}-against-{BASELINE}", figure


def _planner_panel(axes: "Axes", comparison: Comparison) -> None:
    planner, side, differing = comparison.planner, comparison.ratios.side, ~comparison.ratios.same
    times, greedys = (comparison.table.times[comparison.table.at(name)] for name in (planner, BASELINE))
    layers: tuple[tuple[str, Bools, dict[str, Any]], ...] = (
        ("same path", ~differing, {"facecolors": "none", "edgecolors": style.LIGHT, "s": 22}),
        ("no difference beyond noise", differing & (side == 0), {"color": style.GREY, "s": 22}),
        (f"{BASELINE} faster", differing & (side > 0), {"color": style.RED, "s": 34, "marker": "^"}),
        (f"{planner} faster", differing & (side < 0), {"color": style.BLUE, "s": 34, "marker": "v"}),
    )
    for label, layer, look in layers:
        rows = comparison.rows[layer[comparison.rows]]
        axes.scatter(greedys[rows], times[rows], label=f"{label} ({len(rows)})", **look)
    hover(axes, [_pair_spot(comparison, pair) for pair in comparison.rows.tolist()])
    all_times = np.concatenate([greedys[comparison.rows], times[comparison.rows]])
    low, high = float(all_times.min()) / 1.25, float(all_times.max()) * 1.25
    axes.plot([low, high], [low, high], color=style.GREY, linewidth=1, linestyle="--", zorder=0)
    style.square_time_axes(axes, low, high)
    axes.set_aspect("equal")
    axes.grid(visible=True)
    axes.set_xlabel(f"{BASELINE}, median time")
    size = size_text(comparison.payload_bytes)
    axes.set_title(f"{comparison.dtype} {comparison.shape} ({size})", fontweight="normal")
    axes.legend(loc="upper left", fontsize=8.5, handletextpad=0.3, borderaxespad=0.2)


def _pair_spot(comparison: Comparison, pair: int) -> Spot:
    table, facts = comparison.table, comparison.table.pairs.iloc[pair]
    lines, times = [f"{facts['source']} -> {facts['target']}"], []
    for name in (BASELINE, comparison.planner):
        place = table.at(name), pair
        times.append(float(table.times[place]))
        lines.append(f"{name}: {brief_time_text(times[-1])}")
        lines += [f"  {table.paths[place]}"] if table.paths[place] else []
    greedys, own = times
    return Spot(greedys, own, "\n".join([*lines, comparison.verdict(pair)]))


SECTION = Section(_headline, _tables, _figures, _compared)
