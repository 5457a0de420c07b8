"""All tests of one comparison as one family: by flipping signs where launches are paired, by Holm where not."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from distbench.compare.intervals import side_of_bound
from distbench.compare.log_differences import Floats, LogDifference, holm
from distbench.compare.options import SLOWER_SHARE, Options
from distbench.compare.sign_flips import PRIOR_FREEDOM, flip_tests
from distbench.compare.verdicts import IMPROVEMENT, INCONCLUSIVE, PASS, REGRESSION

Words = NDArray[np.str_]


@dataclass(frozen=True)
class Block:
    """One metric of one group of launches: a row a case; tolerances in logarithms."""

    difference: LogDifference
    tolerance: Floats


@dataclass(frozen=True)
class Tested:
    """What the family says of one block; every field one element a case, nan where there was no test.

    Args:
        slower: p of "not slower", adjusted over the family: of all tests, both ways.
        faster: likewise of "not faster".
        detectable: the smallest true slowdown, in logarithms, that would have been found four times in five.
        needed: launches a side in all that would settle it.
    """

    slower: Floats
    faster: Floats
    detectable: Floats
    needed: Floats


def tested(blocks: Sequence[Block], options: Options) -> tuple[list[Tested], int]:
    """Every block tested, and the number of tests in the family.

    Regressions get SLOWER_SHARE of alpha, improvements the rest. Where some groups are paired, others are not, and both
    may fail a build, each design gets half of it.
    """
    enough = [block.difference.num_launches >= options.least_launches(block.difference.is_paired) for block in blocks]
    num_tests = int(sum(each.sum() for each in enough))
    paired = [block.difference.pairs for block in blocks if block.difference.pairs is not None]
    designs = 2 if 0 < len(paired) < len(blocks) and options.dedicated else 1
    alpha = SLOWER_SHARE * options.alpha / designs
    flipped = iter(flip_tests(paired, options.least_launches(paired=True), alpha))
    corrected = iter(_holm(blocks, enough))
    found = []
    each = alpha / max(num_tests, 1)
    for difference, tolerance in ((block.difference, block.tolerance) for block in blocks):
        if difference.is_paired:
            of = next(flipped)
            slower, faster, detectable = of.slower, of.faster, of.detectable(tolerance)
            # How the largest statistic will behave with more pairs is not known; Bonferroni's bound on it is.
            needed = difference.launches_to_settle(each, options.confidence, tolerance, of.error, PRIOR_FREEDOM)
        else:
            slower, faster = next(corrected)
            detectable = difference.detectable(each, tolerance)
            needed = difference.launches_to_settle(each, options.confidence, tolerance)
        slower, faster = slower * designs / SLOWER_SHARE, faster * designs / (1 - SLOWER_SHARE)
        found.append(Tested(np.minimum(slower, 1.0), np.minimum(faster, 1.0), detectable, needed))
    return found, num_tests


def _holm(blocks: Sequence[Block], enough: Sequence[np.ndarray]) -> list[tuple[Floats, Floats]]:
    """Adjusted p of "not slower" and of "not faster" for each block whose launches are not paired."""
    differences = (block.difference for block in blocks)
    unpaired = [(one, each) for one, each in zip(differences, enough, strict=True) if not one.is_paired]
    if not unpaired:
        return []
    bounds = np.cumsum([len(each) for _, each in unpaired])[:-1]
    sides = []
    for sign in (1, -1):
        p = [np.where(each, difference.p_above(sign), np.nan) for difference, each in unpaired]
        sides.append(np.split(holm(np.concatenate(p)), bounds))
    return list(zip(*sides, strict=True))


def tolerance_words(
    block: Block, found: Tested, options: Options, is_believed: bool, may_pass: bool
) -> tuple[Words, Words]:
    """REGRESSION, IMPROVEMENT, PASS or INCONCLUSIVE for each test; and the change that was seen, or "".

    Args:
        found: what the block's family says of it.
        is_believed: whether a change that was seen may be held against the candidate.
        may_pass: whether a candidate that looks no slower may pass.
    """
    difference, tolerance = block.difference, block.tolerance
    low, high = difference.interval(options.confidence)
    # Beyond the family's test, a case's own interval must agree: other cases' spread may be too small for it.
    side = side_of_bound(low, high, 0.0)
    enough = difference.num_launches >= options.least_launches(difference.is_paired)
    regressed = enough & (side > 0) & (difference.estimate > tolerance) & (found.slower <= options.alpha)
    improved = enough & (side < 0) & (difference.estimate < -tolerance) & (found.faster <= options.alpha)
    passed = enough & (high < tolerance) & may_pass & ~regressed & ~improved
    seen = np.select([regressed, improved], [REGRESSION, IMPROVEMENT], "")
    return np.select([is_believed & (seen != ""), passed], [seen, PASS], INCONCLUSIVE), seen
