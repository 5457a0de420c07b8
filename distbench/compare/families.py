"""All tests of one comparison as one family: by flipping signs where launches are paired, by Holm where not."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from distbench.compare.log_differences import Floats, LogDifference, holm
from distbench.compare.options import Options
from distbench.compare.sign_flips import PRIOR_FREEDOM, Flipped, flip_tests


@dataclass(frozen=True)
class Block:
    """One metric of one group of launches: a row a case.

    Args:
        difference: the differences of the sides.
        pairs: each pair's difference, [cases, pairs], where launches are paired; else None.
        tolerance: in logarithms, one a case.
    """

    difference: LogDifference
    pairs: Floats | None
    tolerance: Floats


@dataclass(frozen=True)
class Tested:
    """What the family says of one block; every field one element a case, nan where there was no test.

    Args:
        slower: p of "not slower", adjusted over the family.
        faster: p of "not faster", adjusted over all tests the other way.
        detectable: the smallest true slowdown, in logarithms, that would have been found four times in five.
        needed: launches a side in all that would settle it.
    """

    slower: Floats
    faster: Floats
    detectable: Floats
    needed: Floats


def tested(blocks: Sequence[Block], options: Options) -> tuple[list[Tested], int]:
    """Every block tested, and the number of tests in the family.

    Where some groups are paired, others are not, and both may fail a build, each design gets half of alpha.
    """
    enough = [block.difference.num_launches >= options.least_launches(block.pairs is not None) for block in blocks]
    num_tests = int(sum(each.sum() for each in enough))
    both = len({block.pairs is None for block in blocks}) == 2 and options.dedicated
    designs = 2 if both else 1
    alpha = options.alpha / designs
    paired = [block.pairs for block in blocks if block.pairs is not None]
    flipped = iter(flip_tests(paired, options.least_launches(paired=True), alpha))
    corrected = iter(_holm(blocks, enough))
    found = []
    for block in blocks:
        each = alpha / max(num_tests, 1)
        if block.pairs is None:
            slower, faster = next(corrected)
            detectable = block.difference.detectable(each, block.tolerance)
            needed = block.difference.launches_to_settle(each, options.confidence, block.tolerance)
        else:
            slower, faster, detectable, needed = _paired(block, next(flipped), each, options)
        found.append(Tested(slower * designs, faster * designs, detectable, needed))
    return found, num_tests


def _paired(block: Block, flipped: Flipped, alpha: float, options: Options) -> tuple[Floats, Floats, Floats, Floats]:
    # How the largest statistic will behave with more pairs is not known; Bonferroni's bound on it is.
    needed = block.difference.launches_to_settle(
        alpha, options.confidence, block.tolerance, flipped.error, PRIOR_FREEDOM
    )
    return flipped.slower, flipped.faster, flipped.detectable(block.tolerance), needed


def _holm(blocks: Sequence[Block], enough: Sequence[np.ndarray]) -> list[tuple[Floats, Floats]]:
    unpaired = [(block, each) for block, each in zip(blocks, enough, strict=True) if block.pairs is None]
    if not unpaired:
        return []
    bounds = np.cumsum([len(each) for _, each in unpaired])[:-1]
    sides = [
        np.split(
            holm(np.concatenate([np.where(each, block.difference.p_above(sign), np.nan) for block, each in unpaired])),
            bounds,
        )
        for sign in (1, -1)
    ]
    return list(zip(*sides, strict=True))
