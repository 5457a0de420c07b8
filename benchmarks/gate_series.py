"""Series of launches of unchanged code to try a gate on: recorded ones, and synthetic ones of known variance.

Recorded launches are the judge. Synthetic ones check the arithmetic, with the variance that was measured of 4 gloo
ranks (standard deviations of logarithms): within a launch 0.5 to 0.9 contended and 0.3 to 0.8 idle, between launches
0.23 to 0.42 contended and 0 to 0.09 idle; a contended launch's minimum varies 2 to 5 times less than its mean.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from distbench.report.collect import run_files_in
from distbench.results import read_run

Floats = NDArray[np.float64]
MIN_LAUNCHES = 10


@dataclass(frozen=True)
class Series:
    """Launches of unchanged code, in the order in which they ran.

    Args:
        name: what a table calls it.
        case_ids: the cases that every launch measured.
        samples_s: seconds, [case][launch] to that launch's samples.
        origin: where it comes from.
    """

    name: str
    case_ids: tuple[str, ...]
    samples_s: Sequence[Sequence[Floats]]
    origin: str

    @property
    def num_launches(self) -> int:
        """Launches in the series."""
        return len(self.samples_s[0])


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


NOISES = {
    "quiet": Noise(between=0.05, shared=0.3, within=0.35, drift=0.005),
    "loaded": Noise(between=0.25, shared=0.5, within=0.7, drift=0.05),
}


def synthetic(name: str, num_cases: int = 30, num_launches: int = 80, num_samples: int = 40, seed: int = 1) -> Series:
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
    return Series(name, ids, samples_s, f"synthetic, seed {seed}: {noise}")


def recorded(folder: Path) -> Series:
    """The launches below a folder, one run file each, in time order, with the cases that all of them measured.

    Raises:
        ValueError: fewer than MIN_LAUNCHES launches, or no case that all of them measured.
    """
    runs = [read_run(path) for path in run_files_in(folder)]
    runs.sort(key=lambda run: run.header["job"]["started_at"])
    if len(runs) < MIN_LAUNCHES:
        raise ValueError(f"{folder} holds {len(runs)} launches; record at least {MIN_LAUNCHES}, better 60")
    measured = [
        {record["case"]["id"]: np.array(record["samples_s"]) for record in run.cases if record["status"] == "ok"}
        for run in runs
    ]
    ids = tuple(case_id for case_id in measured[0] if all(case_id in launch for launch in measured))
    if not ids:
        raise ValueError(f"no case was measured by every launch below {folder}")
    facts = runs[0].header["environment"]
    origin = json.dumps({name: facts.get(name) for name in ("machine", "num_cpus", "torch", "scheduler", "git_commit")})
    return Series(folder.name, ids, [[launch[case_id] for launch in measured] for case_id in ids], origin)
