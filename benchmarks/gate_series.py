"""Synthetic series of launches of known variance, to check a gate's arithmetic on; recorded launches are the judge.

The variance is what was measured of 4 gloo ranks
(standard deviations of logarithms): within a launch 0.5 to 0.9 contended and 0.3 to 0.8 idle, between launches
0.23 to 0.42 contended and 0 to 0.09 idle; a contended launch's minimum varies 2 to 5 times less than its mean.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from distbench.judge.gate_self_test import RecordedSeries, series_of
from distbench.records.baselines import read_baseline
from distbench.records.launches import Value


@dataclass(frozen=True)
class Noise:
    """What a synthetic series is made of; standard deviations of logarithms.

    Args:
        between: between launches.
        shared: share of that variance which all cases of a launch have in common.
        within: of a sample above the fastest possible one, within a launch.
        drift: of the step from one launch to the next, in a walk that all cases share.
    """

    between: float
    shared: float
    within: float
    drift: float


LAUNCHES = Path(__file__).parent / "launches"
NOISES = {
    "quiet": Noise(between=0.05, shared=0.3, within=0.35, drift=0.005),
    "loaded": Noise(between=0.25, shared=0.5, within=0.7, drift=0.05),
}


def synthetic(
    name: str, num_cases: int = 30, num_launches: int = 80, num_samples: int = 40, seed: int = 1
) -> RecordedSeries:
    """A series with the noise of NOISES[name].

    A sample is a launch's own level times a factor above one whose logarithm is exponential: a floor that cannot be
    undercut, and a long tail, as times have.
    """
    noise, draw = NOISES[name], np.random.default_rng(seed)
    common = np.sqrt(noise.shared) * noise.between * draw.standard_normal(num_launches)
    common += np.cumsum(noise.drift * draw.standard_normal(num_launches))
    own = np.sqrt(1 - noise.shared) * noise.between * draw.standard_normal((num_cases, num_launches))
    # Contention that slows a launch slows its unlucky samples more than its luckiest one.
    level = (common + own)[:, :, None]
    excess = noise.within * draw.exponential(size=(num_cases, num_launches, num_samples))
    samples_s = 1e-2 * np.exp(0.5 * level + excess * np.exp(0.8 * level))
    ids = tuple(f"synthetic/f32[{number}]/{name}" for number in range(num_cases))
    return RecordedSeries(name, ids, samples_s, f"synthetic, seed {seed}: {noise}")


def shrunk(series: RecordedSeries, spread: float) -> RecordedSeries:
    """Recorded launches with smaller deviations from each case's mean, all by one factor.

    Args:
        spread: standard deviation of a launch's p10, as a logarithm, that the median case has afterwards.
    """
    logs = np.log([[(value.mean_s, value.p10_s) for value in row] for row in series.values])
    middle = logs.mean(axis=1, keepdims=True)
    factor = spread / float(np.median(logs[..., 1].std(axis=1, ddof=1)))
    times = np.exp(middle + factor * (logs - middle)).tolist()
    values = [[Value("ok", 1, *pair) for pair in row] for row in times]
    return RecordedSeries(f"{series.name}, shrunk", series.case_ids, (), series.origin, values)


def stored(path: Path) -> RecordedSeries:
    """The launches of a stored baseline, with the cases that all of them measured. Raises as `read_baseline`."""
    return series_of(path.stem, sorted(read_baseline(path), key=lambda launch: launch.started_at))


def recorded_here() -> RecordedSeries:
    """60 launches of `collectives --quick --passes 8`, 4 gloo ranks on 2 cores that others kept 62 to 84 % busy."""
    return stored(LAUNCHES / "collectives-busy.json")


def quiet_here() -> RecordedSeries:
    """50 launches of the same, on the same machine with little other work: a launch's p10 varies by 7 %."""
    return stored(LAUNCHES / "collectives-quiet.json")
