"""What a sweep knows so far, predicted and measured, and how much more it may try."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from distbench.report.trace_rows import Trace
from distbench.search.ranking import RankedPlan
from distbench.search.simulated_plan import CLOSE, Prediction
from distbench.search.space import Candidate, Space, count_of


@dataclass(frozen=True)
class Limits:
    """How much is tried: candidates, and seconds."""

    max_plans: int
    budget_s: float
    started_s: float = field(default_factory=time.monotonic)

    @property
    def reached(self) -> str:
        """The sentence that says that so many candidates were tried."""
        return f"--plans {self.max_plans} allows no more"

    def left_s(self, share: float = 1.0) -> float:
        """Seconds left of a share of the budget."""
        return share * self.budget_s - (time.monotonic() - self.started_s)


@dataclass
class SweepState:
    """What a sweep knows.

    Args:
        written: the plan as the scenario has it, where only its neighbours are tried.
        predictions: of each candidate that was simulated.
        measured: the latest measurement of each candidate that ran here.
        final: plans of the last measured round, the recommended one first.
        left_out: candidate to why it was neither predicted nor measured.
        refused: meshes that even a lower bound of memory rules out, with that bound in bytes.
        stopped: why not all that could have been tried was; empty where the search ended by itself.
        layers: the parameter of which few were recorded, where times are extended from those.
        option: the --set under which a plan works, where no plan works without it.
        estimates: of each plan that was recorded whole after few layers of it: its estimated memory over that.
        traces: what each plan of the last measured round communicates.
        num_reused: measured rounds taken from an earlier sweep; None without --resume.
    """

    space: Space
    written: Candidate | None = None
    predictions: dict[Candidate, Prediction] = field(default_factory=dict)
    measured: dict[Candidate, RankedPlan] = field(default_factory=dict)
    final: list[RankedPlan] = field(default_factory=list)
    left_out: dict[Candidate, str] = field(default_factory=dict)
    refused: dict[Candidate, int] = field(default_factory=dict)
    stopped: str = ""
    layers: str | None = None
    option: str = ""
    estimates: list[float] = field(default_factory=list)
    run_files: list[str] = field(default_factory=list)
    traces: Mapping[Candidate, Trace] = field(default_factory=dict)
    num_reused: int | None = None
    interrupted: bool = False

    @property
    def num_legal(self) -> int:
        """Candidates in all."""
        return 1 + len(self.space.around(self.written)) if self.written else count_of(self.space)

    @property
    def ranked_predictions(self) -> list[Prediction]:
        """Predictions that fit or may fit, the fastest first; then those that do not fit, the smallest first.

        Of those that are too near to the fastest to be told apart, the one with the least memory comes first; of
        several with about as little, the fastest. Memory that is known whole counts before an estimate.
        """
        ranked = sorted(self.predictions.values(), key=_rank_of)
        usable = [prediction for prediction in ranked if prediction.fits is not False]
        near = [prediction for prediction in usable if prediction.step_s <= (1 + CLOSE) * usable[0].step_s]
        near = [prediction for prediction in near if prediction.is_whole] or near
        if near:
            least = min(prediction.reserved_bytes for prediction in near)
            best = next(prediction for prediction in near if prediction.reserved_bytes <= (1 + CLOSE) * least)
            ranked = [best, *(prediction for prediction in ranked if prediction is not best)]
        return ranked

    @property
    def fastest_measured(self) -> list[RankedPlan]:
        """Measured plans by time."""
        return sorted(self.measured.values(), key=lambda plan: plan.step_s)

    @property
    def ranked_measured(self) -> list[RankedPlan]:
        """Plans of the last round first, then all others by time."""
        final = {plan.candidate for plan in self.final}
        return [*self.final, *(plan for plan in self.fastest_measured if plan.candidate not in final)]


def _rank_of(prediction: Prediction) -> tuple[bool, float]:
    is_out = prediction.fits is False
    return is_out, prediction.reserved_bytes if is_out else 1 / prediction.tokens_per_s
