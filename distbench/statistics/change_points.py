"""Change points of all cases of a scenario at once, compared with the same launches in random order.

A cut of a series explains a share of its sum of squares. A change is a cut that explains more than the best cut of any
case after a joint permutation of all cases' launches (maxT of Westfall and Young, 1993). Neighbouring launches share
the machine's drift, which is nearly the same for all cases, so the median over all cases is first subtracted from each
launch. The median is a separate series, whose launches are permuted in blocks of neighbours.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from distbench.statistics.intervals import Floats

Cuts = tuple[Floats, NDArray[np.int64]]
Search = Callable[[Floats], Cuts]

MIN_LAUNCHES = 3  # on each side of a change; fewer launches are outliers
LEVEL = 0.05  # probability of any false change, over all cases of a scenario
# Shares of LEVEL: for the median of all cases, whose blocks have fewer orders; for each case's own cuts; for temporary
# levels between two cuts.
SHARED_LEVEL, OWN_LEVEL, STRETCH_LEVEL = 0.035, 0.01, 0.005
MIN_CASES = 5  # for a median; with fewer cases the drift stays in each case
MIN_STEADY = 3  # cases without their own change that such a median needs
BLOCK = 3  # neighbouring launches that stay together if the machine's drift is in the series
MIN_BLOCKS = 6  # fewer have too few orders to distinguish a change from drift
NUM_ORDERS = 399
NUMBERS_AT_ONCE = 1 << 18
SEED = 20260101
OUTLIER = 4.0  # standard deviations from the median at which launches are clipped
MAD_TO_SD = 1 / 0.6745


@dataclass(frozen=True)
class ChangePoints:
    """Columns of launches at which levels change: the first launch of each new level.

    Args:
        own: changes of each case, in addition to the shared changes.
        shared: changes of the median over all cases; empty for fewer than MIN_CASES cases.
        own_share: the share of a case's sum of squares that a split must explain; nan without a test.
        shared_share: the same share for the median over all cases.
    """

    own: list[list[int]]
    shared: list[int]
    own_share: float
    shared_share: float


def change_points(logs: Floats) -> ChangePoints:
    """Return the changes of each case's level.

    Args:
        logs: logarithms of times, [cases, launches], oldest first; nan if a launch lacks the case.
    """
    rows = logs - np.nanmedian(logs, axis=1, keepdims=True)
    if len(rows) < MIN_CASES:
        own_cuts, own_share = _changes(rows, BLOCK, {best_cut: LEVEL})
        return ChangePoints(own_cuts, [], own_share, math.nan)
    common = np.nanmedian(rows, axis=0)
    own_cuts, own_share = _changes(rows - common, 1, {best_cut: OWN_LEVEL, two_cuts: STRETCH_LEVEL})
    steady = [not cuts for cuts in own_cuts]
    if MIN_STEADY <= sum(steady) < len(rows):
        # Changed cases moved the median, and thereby every other case.
        common = np.nanmedian(rows[steady], axis=0)
        own_cuts, own_share = _changes(rows - common, 1, {best_cut: OWN_LEVEL, two_cuts: STRETCH_LEVEL})
    [shared], shared_share = _changes(common[None], BLOCK, {best_cut: SHARED_LEVEL})
    return ChangePoints(own_cuts, shared, own_share, shared_share)


def _changes(rows: Floats, block: int, levels: Mapping[Search, float]) -> tuple[list[list[int]], float]:
    """Return the changes of each row, and the share that one cut must explain."""
    rows = _without_outliers(rows)

    @cache
    def critical(start: int, stop: int) -> list[float]:
        return _explained_by_chance(rows[:, start:stop], block, levels)

    def cuts_of(row: Floats, start: int, stop: int) -> list[int]:
        if stop - start < 2 * MIN_LAUNCHES:
            return []
        # One cut first, since a second cut would follow the noise.
        for search, least in zip(levels, critical(start, stop), strict=True):
            shares, cuts = search(row[None, start:stop])
            if shares[0] > least:
                inner = [start + cut for cut in cuts[0].tolist() if 0 < cut < stop - start]
                pieces = pairwise([start, *inner, stop])
                return sorted([*inner, *(cut for piece in pieces for cut in cuts_of(row, *piece))])
        return []

    return [cuts_of(row, 0, len(row)) for row in rows], critical(0, rows.shape[1])[0]


def best_cut(rows: Floats) -> Cuts:
    """Return each row's largest share of its sum of squares that one cut explains, and the cut's column, [rows, 1]."""
    gain = _gains(rows, 1)[:, 0, 1:-1]
    return gain.max(axis=1, initial=0.0), gain.argmax(axis=1)[:, None] + 1


def two_cuts(rows: Floats) -> Cuts:
    """Return the largest share that an interval different from the rest explains, and the interval's ends, [rows, 2].

    This is circular binary segmentation (Olshen et al., Biostatistics 5, 2004), which finds temporary levels.
    """
    gain = _gains(rows, rows.shape[1])
    size = gain.shape[1]
    best = gain.reshape(len(rows), -1).argmax(axis=1)
    return gain.max(axis=(1, 2)), np.stack(np.divmod(best, size), axis=1)


def _gains(rows: Floats, num_first: int) -> Floats:
    """Return the share that each interval of columns explains, [rows, first, one past the last]; 0 if not allowed.

    Args:
        num_first: number of first columns, 1 for intervals from the start of the series.
    """
    is_known = np.isfinite(rows)
    values = np.where(is_known, rows, 0.0)
    total = is_known.sum(axis=1)[:, None, None]
    mean = values.sum(axis=1) / np.maximum(total[:, 0, 0], 1)
    values = np.where(is_known, values - mean[:, None], 0.0)
    count, sums = (np.pad(array.cumsum(axis=1), ((0, 0), (1, 0))) for array in (is_known, values))
    before, sums_before = count[:, :num_first, None], sums[:, :num_first, None]
    after, inside = total - count[:, None, :], count[:, None, :] - before
    allowed = (inside >= MIN_LAUNCHES) & (total - inside >= MIN_LAUNCHES)
    for outside in (before, after):
        allowed &= (outside == 0) | (outside >= MIN_LAUNCHES)
    squares = (values**2).sum(axis=1)[:, None, None]
    part = (sums[:, None, :] - sums_before) ** 2 * total
    return np.where(allowed & (squares > 1e-18), part / np.maximum(inside * (total - inside) * squares, 1e-300), 0.0)


def _explained_by_chance(rows: Floats, block: int, levels: Mapping[Search, float]) -> list[float]:
    """Return the share that the best cuts of any row exceed with each search's probability; nan if too few launches."""
    num_launches = rows.shape[1]
    if num_launches < max(2 * MIN_LAUNCHES, MIN_BLOCKS * block if block > 1 else 0):
        return [math.nan] * len(levels)
    draw = np.random.default_rng(SEED)
    orders = np.array([_order(num_launches, block, draw) for _ in range(NUM_ORDERS)])
    # Many orders at a time are rows of one search; a search of two cuts has one number per row and pair of launches.
    num_pieces = math.ceil(NUM_ORDERS * len(rows) * (num_launches + 1) ** 2 / NUMBERS_AT_ONCE)
    pieces = np.array_split(orders, min(num_pieces, NUM_ORDERS))
    least = []
    for search, level in levels.items():
        shares = [search(rows[:, piece].reshape(-1, num_launches))[0].reshape(len(rows), -1) for piece in pieces]
        largest = np.sort(np.concatenate([of_piece.max(axis=0) for of_piece in shares]))
        least.append(float(largest[math.ceil((1 - level) * (NUM_ORDERS + 1)) - 1]))
    return least


def _order(num_launches: int, block: int, draw: np.random.Generator) -> NDArray[np.int64]:
    """Return launches in a random order that keeps blocks of neighbours; the first block may be shorter."""
    cuts = np.arange(draw.integers(block) or block, num_launches, block)
    blocks = np.split(np.arange(num_launches), cuts)
    return np.concatenate([blocks[index] for index in draw.permutation(len(blocks))])


def _without_outliers(rows: Floats) -> Floats:
    """Clip values far from their row's median, so that one launch is not a new level."""
    middle = np.nanmedian(rows, axis=1, keepdims=True)
    spread = np.nanmedian(np.abs(rows - middle), axis=1, keepdims=True) * MAD_TO_SD
    reach = np.where(spread > 0, OUTLIER * spread, np.inf)
    clipped: Floats = np.clip(rows, middle - reach, middle + reach)
    return clipped
