"""One run's redistributions: each planner against greedy on the same pair, and how much of the difference is noise."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from distbench.compare.intervals import Ints, margin_of
from distbench.compare.passes import TOO_FEW
from distbench.laboratory.comparisons import Ratios, proof_lines, ratios, run_of, tally
from distbench.laboratory.planner_table import PlannerTable, laboratory_rows, median_of, planner_table_of
from distbench.render.blocks import Rows, Table
from distbench.render.units import NOTHING, percent_text, ratio_text, size_text, time_text, whole_text
from distbench.spec.planner_names import BASELINE
from distbench.spec.printable import count_text

if TYPE_CHECKING:
    import pandas as pd

MAX_PAIRS = 20


class Comparison(NamedTuple):
    """One planner against greedy on every pair of one shape and dtype that both measured."""

    table: PlannerTable
    planner: str
    shape: str
    dtype: str
    payload_bytes: float
    rows: Ints  # indexes of the pairs in the table, most striking first
    ratios: Ratios  # planner over greedy, these pairs tested together


def comparisons(frame: "pd.DataFrame") -> list[Comparison]:
    """Every planner of a run against greedy, by shape and dtype."""
    table = planner_table_of(laboratory_rows(frame))
    if BASELINE not in table.planners:
        return []
    others = sorted({*table.planners} - {BASELINE}, key=lambda name: (name != "min_cost", name))
    return [comparison for planner in others for comparison in _of_planner(table, planner)]


def _of_planner(table: PlannerTable, planner: str) -> Iterator[Comparison]:
    one, other = run_of(table, planner), run_of(table, BASELINE)
    both = np.flatnonzero(table.measured[table.at(planner)] & table.measured[table.at(BASELINE)])
    for (shape, dtype), of_shape in table.pairs.iloc[both].groupby(["shape", "dtype"], sort=False):
        rows = of_shape.index.to_numpy()
        found, size = ratios(one, other, table.mask(rows)), float(of_shape["payload_bytes"].iloc[0])
        # Differing paths first, then the surest and largest win or loss.
        distance, margin = np.abs(np.log(found.ratio.center)), margin_of(found.ratio)
        keys = (-distance, -margin, ~found.enough, -np.abs(found.side), found.same)
        rows = rows[np.lexsort([key[rows] for key in keys])]
        yield Comparison(table, planner, str(shape), str(dtype), size, rows, found)


def tables(frame: "pd.DataFrame", full: bool = True) -> list[Table]:
    """One table a planner, shape and dtype, of one run's frame; where not `full`, of differences beyond noise alone."""
    return [_table(comparison, full) for comparison in comparisons(frame)]


def _table(comparison: Comparison, full: bool) -> Table:
    planner, found = comparison.planner, comparison.ratios
    columns = ("<planner", "<path", "median", "coll.", "sent", f"<{planner} / {BASELINE}")
    told = comparison.rows[full | (found.side[comparison.rows] != 0)]
    sides = [(pair, name) for pair in told.tolist() for name in (BASELINE, planner)]
    rows = Rows(sides, lambda side: _row(comparison, *side))
    size = size_text(comparison.payload_bytes)
    title = f"{BASELINE} and {planner} on {comparison.dtype}[{comparison.shape}] ({size}), most striking first"
    notes = _summary(comparison)
    if rows:
        notes.append("coll. = collectives on the path; sent = bytes one rank must send along it")
    if num_left_out := len(comparison.rows) - len(told):
        notes.insert(0, f"{num_left_out} more pairs without a difference beyond noise: --full lists them")
    if len(told) > MAX_PAIRS:
        notes.insert(0, f"... {len(told) - MAX_PAIRS} more pairs: --format csv")
    breaks, cap = frozenset(range(2, len(rows), 2)), 2 * MAX_PAIRS
    return Table(title, columns, rows[:cap], notes, breaks, ("coll.", "sent"), together=True, beyond=rows[cap:])


def _row(comparison: Comparison, pair: int, planner: str) -> tuple[str, ...]:
    table, ratio = comparison.table, comparison.ratios.ratio
    at = table.at(planner), pair
    is_baseline = planner == BASELINE
    source, target = table.pairs["source"].iat[pair], table.pairs["target"].iat[pair]
    return (
        planner,
        table.paths[at] or f"{source}->{target}",
        time_text(float(table.times[at])),
        whole_text(float(table.numbers["num_collectives"][at])),
        size_text(float(table.numbers["wire_bytes"][at])),
        ratio_text(*(float(part[pair]) for part in ratio)) if is_baseline else pair_verdict(comparison, pair),
    )


def pair_verdict(comparison: Comparison, pair: int) -> str:
    """Who won a pair and by how much at least: "min_cost by 15 %+", "within noise", "same path", "too few passes".

    The number is how much less time the winner takes, at the end of the interval that is kindest to the loser.
    """
    found = comparison.ratios
    if found.same[pair]:
        return "same path"
    if not found.enough[pair]:
        return TOO_FEW
    if found.side[pair] == 0:
        return "within noise"
    winner = comparison.planner if found.side[pair] < 0 else BASELINE
    return f"{winner} by {percent_text(1 - 1 / float(margin_of(found.ratio)[pair]))}+"


def _summary(comparison: Comparison) -> list[str]:
    table, planner, rows = comparison.table, comparison.planner, comparison.rows
    lines = [count_text(len(rows), "pair") + _outcome(comparison)]
    lines += [*comparison.ratios.told, *proof_lines([comparison.ratios])]
    planning = table.numbers["planning_cold_s"]
    cold = [time_text(median_of(planning[table.at(name), rows])) for name in (BASELINE, planner)]
    if NOTHING not in cold:
        lines.append(f"planning with empty caches, median: {BASELINE} {cold[0]}, {planner} {cold[1]}")
    return lines


def _outcome(comparison: Comparison) -> str:
    planner, found = comparison.planner, comparison.ratios
    differing = comparison.rows[~found.same[comparison.rows]]
    counts, num_too_few = tally(found, differing), int((~found.enough[differing]).sum())
    if not counts.num_pairs:
        return ", 0 with differing paths"
    noise = counts.num_pairs - counts.num_faster - counts.num_slower - num_too_few
    text = f", {counts.num_pairs} with differing paths: {planner} faster beyond noise in {counts.num_faster}, "
    text += f"{BASELINE} in {counts.num_slower}, neither in {noise}"
    if num_too_few:
        text += f", {TOO_FEW} to tell in {num_too_few}"
    return f"{text}; geometric mean of {planner}/{BASELINE} over them {ratio_text(*counts.mean)}"
