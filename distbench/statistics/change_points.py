"""Change points of all cases of a scenario at once, compared with the same launches in random order.

A cut of a series explains a share of its sum of squares. A change is a cut that explains more than the best cut of any
case after a joint permutation of all cases' launches (maxT of Westfall and Young, 1993). Neighbouring launches share
the machine's drift, which is nearly the same for all cases, so the median over all cases is first subtracted from each
launch. The median is a separate series, whose launches are permuted in blocks of neighbours.

Of more than MAX_ROWS cases, permutations of a random sample of cases give the limit for all of them: the upper tail of
the cuts' shares is extrapolated to the level divided by the number of cases (Knijnenburg et al., Bioinformatics 25,
2009, with an exponential tail).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from distbench.statistics.intervals import Floats, Ints

Cuts = tuple[Floats, Ints]
Search = Callable[[Floats, float], Cuts]

MIN_LAUNCHES = 3  # on each side of a change; fewer launches are outliers
LEVEL = 0.05  # probability of any false change, over all cases of a scenario
# Shares of LEVEL: for the median of all cases, whose blocks have fewer orders; for each case's own cuts; for temporary
# levels between two cuts.
SHARED_LEVEL, OWN_LEVEL, STRETCH_LEVEL = 0.035, 0.01, 0.005
MIN_CASES = 5  # The number of cases for a median. With fewer cases the drift is not subtracted.
MIN_STEADY = 3  # The number of cases without a change of their own that such a median needs.
BLOCK = 3  # neighbouring launches that remain together if the machine's drift is in the series
MIN_BLOCKS = 6  # Fewer blocks have too few orders to distinguish a change from drift.
NUM_ORDERS = 399
MAX_ROWS = 200  # If there are more cases, this number of cases is permuted.
TAIL = 1000  # The number of largest shares to which the tail is fitted.
NUMBERS_AT_ONCE = 1 << 16  # This many numbers fit into a core's cache.
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
    rows = logs - row_medians(logs)[:, None]
    if len(rows) < MIN_CASES:
        own_cuts, own_share = _changes(rows, BLOCK, {best_cut: LEVEL})
        return ChangePoints(own_cuts, [], own_share, math.nan)
    common = row_medians(rows.T)
    own_cuts, own_share = _changes(rows - common, 1, {best_cut: OWN_LEVEL, two_cuts: STRETCH_LEVEL})
    steady = [not cuts for cuts in own_cuts]
    if MIN_STEADY <= sum(steady) < len(rows):
        # Changed cases moved the median, and thereby every other case.
        common = row_medians(rows[steady].T)
        own_cuts, own_share = _changes(rows - common, 1, {best_cut: OWN_LEVEL, two_cuts: STRETCH_LEVEL})
    [shared], shared_share = _changes(common[None].copy(), BLOCK, {best_cut: SHARED_LEVEL})
    return ChangePoints(own_cuts, shared, own_share, shared_share)


def row_medians(rows: Floats) -> Floats:
    """Return each row's median without nan; nan for a row of nan. Unlike numpy.nanmedian, this function needs no
    copy.
    """
    medians = np.full(len(rows), np.nan)
    for part in _parts(np.arange(len(rows)), rows.shape[1]):
        ordered = np.sort(rows[part], axis=1)  # nan last
        count = np.isfinite(ordered).sum(axis=1)
        middle = np.stack([np.maximum(count - 1, 0) // 2, count // 2 % max(rows.shape[1], 1)], axis=1)
        medians[part] = np.take_along_axis(ordered, middle, axis=1).mean(axis=1)
    return medians


def _parts(rows: Ints, size: int) -> list[Ints]:
    """Split indexes of rows of `size` numbers, so that each part has about NUMBERS_AT_ONCE numbers."""
    return np.array_split(rows, max(math.ceil(len(rows) * size / NUMBERS_AT_ONCE), 1))


def _changes(rows: Floats, block: int, levels: Mapping[Search, float]) -> tuple[list[list[int]], float]:
    """Return the changes of each row, and the share that one cut must explain. `rows` is overwritten."""
    _clip_outliers(rows)
    num_rows, num_launches = rows.shape
    permuted = rows
    if num_rows > MAX_ROWS:
        permuted = rows[np.random.default_rng(SEED).choice(num_rows, MAX_ROWS, replace=False)]

    @cache
    def limits(start: int, stop: int) -> list[float]:
        return _explained_by_chance(permuted[:, start:stop], block, levels, num_rows)

    def critical(start: int, stop: int) -> list[float]:
        size = stop - start
        if len(permuted) == num_rows or size == num_launches:
            return limits(start, stop)
        # In a large family, cases change at many places. The limits of a few lengths are therefore used for all pieces.
        # Shorter series have higher limits.
        return limits(0, size - size % (1 << max(size.bit_length() - 3, 0)))

    cuts: list[list[int]] = [[] for _ in range(num_rows)]
    pending = {(0, num_launches): np.arange(num_rows)}
    while pending:
        (start, stop), candidates = pending.popitem()
        if stop - start < 2 * MIN_LAUNCHES:
            continue
        pieces: dict[tuple[int, int], list[int]] = {}
        # One cut is tried first, because a second cut would follow the noise.
        for search, least in zip(levels, critical(start, stop), strict=True):
            shares, intervals = search(rows[candidates, start:stop], least)
            is_changed = shares > least
            for row, interval in zip(candidates[is_changed].tolist(), intervals[is_changed].tolist(), strict=True):
                inner = [start + cut for cut in interval if cut > 0]
                cuts[row] += inner
                for piece in pairwise([start, *inner, stop]):
                    pieces.setdefault(piece, []).append(row)
            candidates = candidates[~is_changed]
        for piece, of_rows in pieces.items():
            pending[piece] = np.concatenate([pending.get(piece, np.empty(0, np.int64)), np.array(of_rows)])
    return [sorted(of_row) for of_row in cuts], critical(0, num_launches)[0]


def best_cut(rows: Floats, least: float = 0.0) -> Cuts:
    """Return each row's largest share of its sum of squares that one cut explains, and the interval before the cut,
    [rows, 2]. The interval is only found where the share exceeds `least`."""
    return _search(rows, least, _best_cut)


def two_cuts(rows: Floats, least: float = 0.0) -> Cuts:
    """Return the largest share that an interval different from the rest explains, and the interval's ends, [rows, 2].

    This is circular binary segmentation (Olshen et al., Biostatistics 5, 2004), which finds temporary levels.
    """
    return _search(rows, least, _best_interval)


def _search(rows: Floats, least: float, best: Callable[[NDArray[np.float32], float], Cuts]) -> Cuts:
    """Search rows with nan: `best` gets cumulative sums of the known values, [values + 1, rows]."""
    is_known = np.isfinite(rows)
    count = is_known.sum(axis=1)
    shares, intervals = np.zeros(len(rows)), np.zeros((len(rows), 2), np.int64)
    for size in set(count[count >= 2 * MIN_LAUNCHES].tolist()):
        for part in _parts(np.flatnonzero(count == size), size):
            columns = np.argsort(~is_known[part], axis=1, kind="stable")[:, :size] if size < rows.shape[1] else None
            values = rows[part] if columns is None else np.take_along_axis(rows[part], columns, axis=1)
            values = values - values.mean(axis=1, keepdims=True)
            squares = (values**2).sum(axis=1, keepdims=True)
            values *= np.where(squares > 1e-18, 1 / np.sqrt(np.maximum(squares, 1e-300)), 0)
            sums = np.zeros((size + 1, len(part)), np.float32)
            sums[1:] = values.cumsum(axis=1).T
            shares[part], ends = best(sums, least)
            # A cut is at the first known value after the cut.
            intervals[part] = ends if columns is None else np.where(ends, np.take_along_axis(columns, ends, axis=1), 0)
    return shares, intervals


def _best_cut(sums: NDArray[np.float32], least: float) -> Cuts:
    size = len(sums) - 1
    inside = np.arange(MIN_LAUNCHES, size - MIN_LAUNCHES + 1)
    gain = sums[inside] ** 2 * (size / (inside * (size - inside))).astype(np.float32)[:, None]
    best = gain.argmax(axis=0)
    shares = gain[best, np.arange(len(best))]
    return shares, np.stack([np.zeros_like(best), np.where(shares > least, inside[best], 0)], axis=1)


def _best_interval(sums: NDArray[np.float32], least: float) -> Cuts:
    size = len(sums) - 1
    shares, ends = _best_cut(sums, least)
    length = np.zeros(len(shares), np.int64)
    # All other intervals have launches on both sides.
    inner = sums[MIN_LAUNCHES : size - MIN_LAUNCHES + 1]
    buffer = np.empty_like(inner)
    for inside in range(MIN_LAUNCHES, size - 2 * MIN_LAUNCHES + 1):
        difference = np.subtract(inner[inside:], inner[:-inside], out=buffer[: len(inner) - inside])
        largest = np.maximum(np.maximum.reduce(difference), -np.minimum.reduce(difference))
        gain = largest**2 * np.float32(size / (inside * (size - inside)))
        length[gain > shares] = inside
        np.maximum(shares, gain, out=shares)
    for row in np.flatnonzero((length > 0) & (shares > least)).tolist():
        inside = int(length[row])
        first = int(np.abs(inner[inside:, row] - inner[:-inside, row]).argmax()) + MIN_LAUNCHES
        ends[row] = first, first + inside
    return shares, ends


def _explained_by_chance(rows: Floats, block: int, levels: Mapping[Search, float], num_rows: int) -> list[float]:
    """Return the share that the best cuts of any row exceed with each search's probability; nan if too few launches.

    Args:
        num_rows: number of rows of the family, of which `rows` may be a sample.
    """
    num_launches = rows.shape[1]
    if num_launches < max(2 * MIN_LAUNCHES, MIN_BLOCKS * block if block > 1 else 0):
        return [math.nan] * len(levels)
    orders = _orders(num_launches, block)
    least = []
    for search, level in levels.items():
        shares = np.stack([search(row[orders], math.inf)[0] for row in rows])
        if num_rows > len(rows):
            least.append(_tail_limit(shares.ravel(), level / num_rows))
            continue
        largest = np.sort(shares.max(axis=0))
        least.append(float(largest[math.ceil((1 - level) * (NUM_ORDERS + 1)) - 1]))
    return least


def _tail_limit(shares: Floats, probability: float) -> float:
    """Return the share that one row exceeds with a probability far below 1 / len(shares)."""
    # -log(1 - share) has an exponential tail for a share of normal noise's sum of squares.
    tail = np.sort(-np.log1p(-np.minimum(shares, 1 - 1e-12)))[-TAIL:]
    excess = float((tail - tail[0]).mean())
    return -math.expm1(-(float(tail[0]) + excess * math.log(len(tail) / len(shares) / probability)))


@lru_cache(maxsize=256)
def _orders(num_launches: int, block: int) -> Ints:
    """Return launches in random orders that keep blocks of neighbours, [orders, launches]; the first block may be
    shorter."""
    draw = np.random.default_rng(SEED)
    orders = []
    for _ in range(NUM_ORDERS):
        cuts = np.arange(draw.integers(block) or block, num_launches, block)
        blocks = np.split(np.arange(num_launches), cuts)
        orders.append(np.concatenate([blocks[index] for index in draw.permutation(len(blocks))]))
    return np.array(orders)


def _clip_outliers(rows: Floats) -> None:
    """Clip values far from their row's median in place, so that a single launch is not a new level."""
    middle = row_medians(rows)[:, None]
    for part in _parts(np.arange(len(rows)), rows.shape[1]):
        distances = np.abs(rows[part] - middle[part])
        spread = row_medians(distances)[:, None] * MAD_TO_SD
        reach = np.where(spread > 0, OUTLIER * spread, np.inf)
        rows[part] = np.clip(rows[part], middle[part] - reach, middle[part] + reach)
