"""Redistributions: each planner against greedy on the same pair, and how much of the difference is noise."""

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from distbench.compare.intervals import (
    MIN_CONTROLS,
    MIN_SAMPLES_FOR_CI,
    Interval,
    geometric_mean,
    geometric_mean_ci,
    margin_of,
    ratio_of,
    side_of_one,
    widened,
    widening_for,
)
from distbench.render.blocks import Table
from distbench.render.units import NOTHING, percent_text, ratio_text, size_text, time_ci_text, time_text, whole_text
from distbench.runs.frame import Row
from distbench.spec.planner_names import BASELINE

if TYPE_CHECKING:
    import pandas as pd

MAX_PAIRS = 20
PAIR = ["shape", "dtype", "source", "target"]
TIMES = ["median_s", "ci_low_s", "ci_high_s", "num_samples"]
VALUES = [*TIMES, "path", "backend_op", "num_collectives", "wire_bytes", "planning_cold_s"]
ORDER = ["same_path", "side", "enough", "margin", "log_distance"]
SAME_PATH, NOISE, TOO_FEW = "same path", "within noise", "too few samples"


class NoiseCheck(NamedTuple):
    """What pairs with the same path, which cannot differ, say about the intervals.

    Args:
        num_controls: pairs with the same path and enough samples.
        num_false: those whose own interval leaves one out all the same; about 5 % should.
        widening: what every interval was widened by, so that it holds for the controls (`stats.widening_for`).
    """

    num_controls: int
    num_false: int
    widening: float


class Comparison(NamedTuple):
    """One planner against greedy on every pair of one shape and dtype that both measured.

    Args:
        planner: the planner that is compared with greedy.
        shape: the global tensor's shape, as text.
        dtype: its dtype.
        payload_bytes: its size.
        pairs: one row a pair, most striking first: VALUES of greedy and (suffix _other) of the planner, `ratio`,
            `ratio_low`, `ratio_high` (planner's median over greedy's, 95 % CI, widened), `side` (-1 the planner is
            faster beyond noise, 1 greedy is, 0 neither), `margin` (by which factor at least), `same_path`, `enough`.
        noise: how far the intervals can be trusted.
    """

    planner: str
    shape: str
    dtype: str
    payload_bytes: float
    pairs: "pd.DataFrame"
    noise: NoiseCheck


def comparisons(frame: "pd.DataFrame") -> list[Comparison]:
    """Every planner of a run against greedy, by shape and dtype. A ratio's interval: `stats.ratio_of`, then widened."""
    kept = frame[(frame["kind"] == "redistribute") & (frame["status"] == "ok") & frame["median_s"].notna()]
    greedy = kept[kept["planner"] == BASELINE].drop_duplicates(PAIR)
    planners = [name for name in kept["planner"].dropna().unique() if name != BASELINE]
    found = []
    for planner in sorted(planners, key=lambda name: (name != "min_cost", name)):
        other = kept[kept["planner"] == planner].drop_duplicates(PAIR)
        both = greedy.merge(other[[*PAIR, *VALUES]], on=PAIR, suffixes=("", "_other"))
        for (shape, dtype), pairs in both.groupby(["shape", "dtype"], sort=False, dropna=False):
            size = float(pairs["payload_bytes"].iloc[0])
            found.append(Comparison(planner, str(shape), str(dtype), size, *_compared(pairs)))
    return found


def _compared(pairs: "pd.DataFrame") -> "tuple[pd.DataFrame, NoiseCheck]":
    times = ("median_s", "ci_low_s", "ci_high_s")
    ratio = ratio_of(
        Interval(*(pairs[f"{name}_other"].to_numpy(float) for name in times)),
        Interval(*(pairs[name].to_numpy(float) for name in times)),
    )
    enough = pairs[["num_samples", "num_samples_other"]].min(axis=1).to_numpy() >= MIN_SAMPLES_FOR_CI
    same_path = (pairs["path"] == pairs["path_other"]).to_numpy(bool, na_value=False)
    # One path may run as other collectives, as +native does: then its times may differ.
    same_path = same_path & (pairs["backend_op"].fillna("") == pairs["backend_op_other"].fillna("")).to_numpy(bool)
    controls = same_path & enough
    noise = NoiseCheck(
        num_controls=int(controls.sum()),
        num_false=int(np.count_nonzero(side_of_one(ratio, controls))),
        widening=widening_for(ratio, controls),
    )
    ratio = widened(ratio, noise.widening)
    pairs = pairs.assign(
        ratio=ratio.center,
        ratio_low=ratio.low,
        ratio_high=ratio.high,
        side=side_of_one(ratio, enough & ~same_path),
        margin=margin_of(ratio),
        enough=enough,
        same_path=same_path,
        log_distance=np.abs(np.log(ratio.center)),
    )
    return pairs.sort_values(ORDER, ascending=[True, False, False, False, False], key=_rank), noise


def _rank(column: "pd.Series[Any]") -> "pd.Series[Any]":
    """A win counts as much as a loss when rows are ordered."""
    return column.abs() if column.name == "side" else column


class Tally(NamedTuple):
    """How a planner did against greedy over many pairs.

    Args:
        num_pairs: all pairs.
        num_differing: pairs where the two took different paths; all that follows is of these.
        num_faster: the planner is faster beyond noise.
        num_slower: greedy is.
        num_too_few: too few samples to tell.
        mean: geometric mean of the ratio, with the bounds of its 95 % CI over pairs.
    """

    num_pairs: int
    num_differing: int
    num_faster: int
    num_slower: int
    num_too_few: int
    mean: tuple[float, float, float]


def tally(pairs: "pd.DataFrame") -> Tally:
    """Counts and the geometric mean of a comparison's pairs."""
    differing = pairs[~pairs["same_path"]]
    ratios = differing["ratio"].to_numpy(float)
    return Tally(
        num_pairs=len(pairs),
        num_differing=len(differing),
        num_faster=int((differing["side"] < 0).sum()),
        num_slower=int((differing["side"] > 0).sum()),
        num_too_few=int((~differing["enough"]).sum()),
        mean=(geometric_mean(ratios), *geometric_mean_ci(ratios)),
    )


def tables(frame: "pd.DataFrame") -> list[Table]:
    """One table a planner, shape and dtype, of one run's frame."""
    return [_table(comparison) for comparison in comparisons(frame)]


def _table(comparison: Comparison) -> Table:
    planner = comparison.planner
    shown: list[Row] = comparison.pairs.head(MAX_PAIRS).to_dict("records")
    columns = ("<planner", "<path", "median", "<95 % CI", "coll.", "sent", f"<{planner} / {BASELINE}")
    rows = [row for record in shown for row in _rows(record, planner)]
    size = size_text(comparison.payload_bytes)
    title = f"{BASELINE} and {planner} on {comparison.dtype}[{comparison.shape}] ({size}), most striking first"
    notes = [*summary(comparison), "coll. = collectives on the path; sent = bytes one rank must send along it"]
    if len(comparison.pairs) > MAX_PAIRS:
        notes.insert(0, f"... {len(comparison.pairs) - MAX_PAIRS} more pairs: --format csv")
    return Table(title, columns, rows, notes, frozenset(range(2, len(rows), 2)))


def _rows(record: Row, planner: str) -> list[tuple[str, ...]]:
    return [
        (
            *_planner_cells(record, BASELINE, ""),
            ratio_text(record["ratio"], record["ratio_low"], record["ratio_high"]),
        ),
        (*_planner_cells(record, planner, "_other"), verdict(record, planner)),
    ]


def _planner_cells(record: Row, planner: str, suffix: str) -> tuple[str, ...]:
    median_s, low_s, high_s = (record[name + suffix] for name in ("median_s", "ci_low_s", "ci_high_s"))
    path = record["path" + suffix]
    return (
        planner,
        path if isinstance(path, str) else f"{record['source']}->{record['target']}",
        time_text(median_s),
        time_ci_text(median_s, low_s, high_s, record["num_samples" + suffix]),
        whole_text(record["num_collectives" + suffix]),
        size_text(record["wire_bytes" + suffix]),
    )


def verdict(record: Row, planner: str) -> str:
    """Who won a pair and by how much at least: "min_cost by 15 %+", "within noise", "same path", "too few samples".

    The number is how much less time the winner takes, at the end of the interval that is kindest to the loser.
    """
    if record["same_path"]:
        return SAME_PATH
    if not record["enough"]:
        return TOO_FEW
    if record["side"] == 0:
        return NOISE
    winner = planner if record["side"] < 0 else BASELINE
    return f"{winner} by {percent_text(1 - 1 / record['margin'])}+"


def summary(comparison: Comparison) -> list[str]:
    """What all pairs say together, in sentences."""
    counts, planner = tally(comparison.pairs), comparison.planner
    lines = [f"{counts.num_pairs} pairs, {counts.num_differing} with differing paths" + _outcome(counts, planner)]
    if comparison.noise.num_controls:
        lines.append(_noise_line(comparison.noise))
    cold = [time_text(comparison.pairs[f"planning_cold_s{suffix}"].median()) for suffix in ("", "_other")]
    if NOTHING not in cold:
        lines.append(f"planning with empty caches, median: {BASELINE} {cold[0]}, {planner} {cold[1]}")
    return lines


def _noise_line(noise: NoiseCheck) -> str:
    share = percent_text(noise.num_false / noise.num_controls)
    line = (
        f"noise check: of {noise.num_controls} pairs with the same path, {noise.num_false} ({share}) differ beyond "
        "their own 95 % interval; "
    )
    if noise.num_controls < MIN_CONTROLS:
        return line + "too few such pairs to correct the intervals by"
    if noise.widening == 1:
        return line + "the intervals stand as they are"
    return line + f"so every interval of a ratio here is widened {noise.widening:.1f} times, to hold for them"


def _outcome(counts: Tally, planner: str) -> str:
    if not counts.num_differing:
        return ""
    noise = counts.num_differing - counts.num_faster - counts.num_slower - counts.num_too_few
    text = f": {planner} faster beyond noise in {counts.num_faster}, {BASELINE} in {counts.num_slower}, "
    text += f"neither in {noise}"
    if counts.num_too_few:
        text += f", too few samples to tell in {counts.num_too_few}"
    return f"{text}; geometric mean of {planner}/{BASELINE} over them {ratio_text(*counts.mean)}"
