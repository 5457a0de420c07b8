"""Made-up times of links with known faults, for the judge of `distbench preflight` on more ranks than this machine has.

Messages take 1 ms within a host and 3 ms between hosts, small messages 20 us and 40 us, a burst 250 ms. Each rank and
each link differs from these by a fixed factor (standard deviations SPREAD_RANK, SPREAD_LINK), each sample by NOISE, and
one sample in OUTLIER_ONE_IN takes three times as long. Faults are those of the lab.
"""

import numpy as np

from benchmarks.links_lab import Faults
from distbench.cases.links import SMALL_BYTES, WITHIN, link_rounds
from distbench.judge.links import BANDWIDTH, COMPUTE, LATENCY, ComparisonGroup, LinkRun

RANKS_PER_HOST, NUM_PASSES, SIZE_BYTES = 8, 8, 1 << 26
# Rank: "8 % average variation of one model in five clusters", arXiv:2208.11035, as in the hardware files.
SPREAD_RANK, SPREAD_LINK, OUTLIER_ONE_IN = 0.015, 0.02, 100
NOISE = {BANDWIDTH: 0.05, LATENCY: 0.1, COMPUTE: 0.02}
SECONDS = {(BANDWIDTH, True): 1e-3, (BANDWIDTH, False): 3e-3, (LATENCY, True): 2e-5, (LATENCY, False): 4e-5}
# Segments per pair, of which healthy links retransmit one; a lost packet costs up to 45 segments, here 10.
SEGMENTS, LOST_ONE_IN, SEGMENTS_PER_LOSS = 4500, 50, 10


def simulated(num_ranks: int, faults: Faults, random: np.random.Generator) -> LinkRun:
    """Return the measured links of one launch; its rounds are those of a real launch."""
    hosts = tuple(f"node{rank // RANKS_PER_HOST}" for rank in range(num_ranks))
    of_rank, groups = np.exp(random.normal(0, SPREAD_RANK, num_ranks)), []
    by_level: dict[str, list[tuple[int, int]]] = {}
    for link_round in link_rounds(hosts):
        by_level.setdefault(link_round.level, []).extend(link_round.pairs)
    for level, pairs in by_level.items():
        pairs.sort()
        of_pair = np.exp(random.normal(0, SPREAD_LINK, len(pairs)))
        slow = np.array([slowdown_of_pair(pair, faults) for pair in pairs])
        flapping = np.array([bool({*pair} & {*faults.flaps}) for pair in pairs])
        for quantity, size_bytes in ((LATENCY, SMALL_BYTES), (BANDWIDTH, SIZE_BYTES)):
            times = SECONDS[quantity, level == WITHIN] * of_pair * samples(random, quantity, len(pairs))
            if quantity == BANDWIDTH:
                flaps = np.where(flapping & (random.random((NUM_PASSES, len(pairs))) < 0.5), 4, 1)
                times *= np.maximum(slow, flaps)
            groups.append(ComparisonGroup(quantity, level, tuple(pairs), times, size_bytes))
    slow = np.where(np.isin(np.arange(num_ranks), faults.computes), 2, 1)
    times = 0.25 * of_rank * slow * samples(random, COMPUTE, num_ranks)
    groups.append(ComparisonGroup(COMPUTE, "", tuple((rank,) for rank in range(num_ranks)), times))
    segments = {}
    for pair in (pair for pairs in by_level.values() for pair in pairs):
        for rank, other in (pair, pair[::-1]):
            num_lost = random.binomial(SEGMENTS // 40, 1 / LOST_ONE_IN) if other in faults.lossy else 0
            segments[pair, rank, "eth0"] = SEGMENTS // 2, random.poisson(0.5) + SEGMENTS_PER_LOSS * int(num_lost)
    return LinkRun(hosts, tuple(groups), segments=segments)


def samples(
    random: np.random.Generator, quantity: str, count: int
) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    """Factors of the times, shape (passes, count): noise, rare outliers, and a drift that all of a pass share."""
    shape = NUM_PASSES, count
    noise = np.exp(random.normal(0, NOISE[quantity], shape) + random.normal(0, 0.05, (NUM_PASSES, 1)))
    return np.where(random.random(shape) < 1 / OUTLIER_ONE_IN, 3, 1) * noise


def slowdown_of_pair(pair: tuple[int, int], faults: Faults) -> float:
    """The factor of a pair's large messages."""
    return 2.0 if {*pair} & {*faults.cable, *faults.one_way} or {*pair} == {*faults.link} else 1.0
