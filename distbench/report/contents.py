"""What a report is made of."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from distbench.laboratory.study import Study, studies_of
from distbench.runs.run_file import Run

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Contents:
    """Runs, the frame of each one's cases, and what the laboratories among them say."""

    runs: Sequence[Run]
    frames: Sequence["pd.DataFrame"]
    studies: Sequence[Study]

    @classmethod
    def of(cls, runs: Sequence[Run], frame: "pd.DataFrame", with_studies: bool = True) -> "Contents":
        """Contents of runs and the one frame of all their cases; studies take time, and are not always shown."""
        ends = accumulate((len(run.cases) for run in runs), initial=0)
        frames = [frame.iloc[start:end] for start, end in pairwise(ends)]
        return cls(runs, frames, studies_of(runs, frames) if with_studies else [])

    def is_studied(self, run: Run) -> bool:
        """Whether a study covers this run's redistributions."""
        return any(run is other for study in self.studies for other in study.runs)
