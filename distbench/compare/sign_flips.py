"""One family of paired tests, by flipping signs: exact for the family, whatever the cases have in common.

Where nothing changed, baseline and candidate of a pair are exchangeable, so the difference of every case in that pair
could as well have had the other sign, all cases together. The largest statistic over all tests under each choice of
signs is what chance alone gives (Westfall and Young, Resampling-Based Multiple Testing, 1993, single-step maxT). Unlike
Holm's correction this loses nothing to cases that rise and fall together with their launch, and needs no normal tails.

The statistic is a mean over a standard error that leans on the other cases' spread (as Smyth, Stat. Appl. Genet. Mol.
Biol. 3, 2004): with 5 pairs a case's own spread is hardly known. How far it leans is a matter of power only, since
flipping signs leaves sums of squares as they are.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from distbench.compare.log_differences import POWER, Floats

PRIOR_FREEDOM = 8.0  # degrees of freedom that the other cases' spread counts for
MAX_LENT = 4.0
MAX_EXACT_PAIRS = 11
NUM_RANDOM = 2048
SEED = 20260101
ROWS_AT_ONCE = 2000


@dataclass(frozen=True)
class Flipped:
    """What flipping signs says of one block of tests.

    Args:
        slower: p of "not slower", adjusted over the family; nan where no test was made.
        faster: likewise of "not faster".
        error: standard error of each mean difference, leaning on the other tests of its block.
        critical: what mean over error must exceed to be significant; infinite where so few pairs cannot show anything.
        freedom: degrees of freedom of `error`.
    """

    slower: Floats
    faster: Floats
    error: Floats
    critical: float
    freedom: Floats

    def detectable(self, tolerance: Floats) -> Floats:
        """The smallest true slowdown that such data would have called a regression four times in five.

        Args:
            tolerance: in logarithms, one a test.
        """
        luck = stdtrit(self.freedom, POWER)
        found: Floats = np.maximum(self.critical * self.error, tolerance) + luck * self.error
        return found


def flip_tests(blocks: Sequence[Floats], min_pairs: int, alpha: float) -> list[Flipped]:
    """Every row of every block tested as one family.

    Args:
        blocks: differences of logarithms, each [tests, pairs] with nan where a pair lacks the value; a block's tests
            lend each other their spread. Blocks may have different numbers of pairs.
        min_pairs: pairs below which a row is not tested.
        alpha: family-wise level, for `critical`.
    """
    signs = sign_choices(max((block.shape[1] for block in blocks), default=0))
    parts = [_Block.of(block, min_pairs) for block in blocks]
    largest = np.full(len(signs), -np.inf)
    for part in parts:
        for start in range(0, len(part.rows), ROWS_AT_ONCE):
            piece = slice(start, start + ROWS_AT_ONCE)
            np.maximum(largest, part.statistics(signs, piece).max(axis=0), out=largest)
    # So many choices of signs may reach a statistic that is still significant; the signs as given are one of them.
    allowed = int(alpha * len(largest) + 1e-9)
    others = np.sort(largest[1:])
    critical = float(others[-allowed]) if 0 < allowed <= len(others) else np.inf
    return [part.judged(np.sort(largest), critical) for part in parts]


@lru_cache(maxsize=8)
def sign_choices(num_pairs: int) -> NDArray[np.float64]:
    """Choices of signs, [choices, pairs]: the given ones first; all of them where those are few; closed under minus."""
    if num_pairs <= MAX_EXACT_PAIRS:
        bits = (np.arange(2**num_pairs)[:, None] >> np.arange(num_pairs)) & 1
        return (1.0 - 2.0 * bits).astype(float)
    half = np.random.default_rng(SEED).choice([-1.0, 1.0], size=(NUM_RANDOM, num_pairs))
    half[0] = 1.0
    return np.vstack([half, -half])


@dataclass(frozen=True)
class _Block:
    """One block, without what is missing.

    Args:
        num_rows: its tests.
        rows: those that have enough pairs.
        differences: of `rows`, 0 where missing: a sign does not matter there.
        count: pairs of each of `rows`.
        squares: their sums of squares.
        prior: the spread that they lean on: the median of mean squares, which flipping signs does not change.
    """

    num_rows: int
    rows: NDArray[np.int64]
    differences: Floats
    count: NDArray[np.int64]
    squares: Floats
    prior: float

    @classmethod
    def of(cls, block: Floats, min_pairs: int) -> "_Block":
        known = np.isfinite(block)
        rows = np.flatnonzero(known.sum(axis=1) >= max(min_pairs, 2))
        differences, count = np.where(known, block, 0.0)[rows], known.sum(axis=1)[rows]
        squares = (differences**2).sum(axis=1)
        prior = float(np.median(squares / count)) if len(rows) else 0.0
        return cls(len(block), rows, differences, count, squares, prior)

    def statistics(self, signs: Floats, piece: slice) -> Floats:
        """Mean over error, [rows of the piece, choices of signs]."""
        mean = self.differences[piece] @ signs[:, : self.differences.shape[1]].T / self.count[piece, None]
        error = self._error(mean, piece)
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(error > 0, mean / error, np.where(mean == 0, 0.0, np.copysign(np.inf, mean)))

    def _error(self, mean: Floats, piece: slice) -> Floats:
        """Standard error under each choice of signs: the mean takes its part of a sum of squares that stays."""
        count, squares = self.count[piece, None], self.squares[piece, None]
        rest = squares - count * mean**2
        rest = np.where(rest <= 1e-12 * squares, 0.0, rest)
        return leaning_error(rest, self.prior, count)

    def judged(self, chance: Floats, critical: float) -> Flipped:
        """This block's tests against the largest statistics that chance gave, sorted."""
        as_given = np.ones((1, self.differences.shape[1]))
        found = self.statistics(as_given, slice(None))[:, 0]
        mean = self.differences.sum(axis=1, keepdims=True) / self.count[:, None]
        return Flipped(
            slower=self._spread(_reached(chance, found)),
            faster=self._spread(_reached(chance, -found)),
            error=self._spread(self._error(mean, slice(None))[:, 0]),
            critical=critical,
            freedom=self._spread(self.count.astype(float) - 1 + PRIOR_FREEDOM),
        )

    def _spread(self, values: Floats) -> Floats:
        whole = np.full(self.num_rows, np.nan)
        whole[self.rows] = values
        return whole


def leaning_error(squares: Floats, prior: float, count: NDArray[np.int64]) -> Floats:
    """Standard error of a mean that leans on the other rows' spread, at most MAX_LENT times what the row's own says.

    Without that bound a steady row among noisy ones would not be told from them.

    Args:
        squares: sum of squared deviations from the mean.
        prior: the variance that the other rows lend.
        count: values behind each mean.
    """
    lent = np.sqrt((squares + PRIOR_FREEDOM * prior) / (count - 1 + PRIOR_FREEDOM) / count)
    return np.minimum(lent, MAX_LENT * np.sqrt(squares / (count - 1) / count)).astype(float)


def _reached(chance: Floats, found: Floats) -> Floats:
    """The share of choices of signs whose largest statistic is at least what was found."""
    # A little less than found: the same sum in another order may differ in its last bit.
    finite = np.where(np.isfinite(found), found, 0.0)
    least = np.where(np.isfinite(found), finite - 1e-9 * (1 + np.abs(finite)), found)
    return 1 - np.searchsorted(chance, least, side="left") / len(chance)
