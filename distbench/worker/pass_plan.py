"""How a launch's cases are spread over passes: how many passes, in which order, and how much of a case each takes.

A stretch of a launch has its own level, so samples taken in one go tell little beyond about five; passes do. Every rank
decides alike, from what all ranks were given.
"""

import contextlib
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from distbench.compare.medians import median, median_ci
from distbench.compare.passes import MIN_PASSES
from distbench.spec import Settings
from distbench.worker.rank.opened_case import CaseSpec, OpenedCase

SAMPLES_A_TURN = 5
SHORT_TURN_S = 0.02  # samples shorter than a fifth of this are taken until it is over
MAX_PASSES = 100
REOPEN_EVERY = 4  # passes: what one opening of a model has by luck must not look like a difference between two
# How many budgets a launch may take for the passes without which nothing can be compared: a quick one needs that.
STRETCH = 4.0


class PassPlan:
    """The passes of one launch.

    Args:
        settings: `max_case_s` is one case's share of the launch; `passes` 0 leaves their number to this plan.
        num_cases: of the launch.
        is_compared: whether a report will compare cases of this launch with each other.
    """

    def __init__(self, settings: Settings, num_cases: int, is_compared: bool) -> None:
        self._settings, self._num_cases = settings, num_cases
        self.is_automatic = settings.passes == 0 and is_compared
        self.num_passes = MIN_PASSES if self.is_automatic else max(settings.passes, 1)

    def order(self, number: int, count: int) -> list[int]:
        """Places in a list of `count` cases, in the order of one pass: drawn anew for each."""
        places = list(range(count))
        if self.num_passes > 1:
            random.Random(f"{self._settings.seed} pass {number}").shuffle(places)
        return places

    def limits(self, estimate_s: float) -> Settings:
        """What one turn may take of a case whose samples take that many seconds."""
        settings = self._settings
        if not self.is_automatic:
            return replace(settings, passes=self.num_passes).of_a_pass()
        sample_s = max(estimate_s, 1e-7) * settings.iterations_per_sample
        wanted = max(SAMPLES_A_TURN, int(SHORT_TURN_S / sample_s))
        count = min(max(int(settings.max_case_s / MIN_PASSES / sample_s), 1), wanted, settings.max_samples)
        return replace(settings, min_samples=count, max_samples=count, target_ci=0.0)

    def set_number(self, pass_s: float) -> None:
        """Choose the number of passes.

        Args:
            pass_s: seconds that a pass takes on the slowest rank, checks apart.
        """
        if not self.is_automatic:
            return
        budget_s = min(self._num_cases * self._settings.max_case_s, self._settings.budget_s)
        affordable = budget_s / max(pass_s, 1e-6)
        least = MIN_PASSES if STRETCH * affordable >= MIN_PASSES else max(int(STRETCH * affordable), 1)
        self.num_passes = min(max(int(affordable), least), MAX_PASSES)

    def goes_on(self, number: int, medians: Sequence[Sequence[float]]) -> bool:
        """Whether there is another pass.

        Args:
            number: passes so far.
            medians: seconds, for each case its median of each pass.
        """
        if number >= self.num_passes:
            return False
        return not (self.is_automatic and number >= MIN_PASSES and all(map(self._is_precise, medians)))

    def _is_precise(self, medians: Sequence[float]) -> bool:
        low, high = median_ci(medians)
        return bool(high - low <= self._settings.target_ci * median(medians))


@dataclass
class Turn:
    """A case on its way through the passes.

    Args:
        index: its place among the cases of the launch.
        case_spec: the case.
        medians: seconds, its median of each pass so far.
        limits: what one turn may take of it; None before it was first warmed up.
        estimate_s: seconds that an iteration takes.
        counters: of its row.
        opened_case: the case while it is open.
    """

    index: int
    case_spec: CaseSpec
    medians: list[float] = field(default_factory=list)
    limits: Settings | None = None
    estimate_s: float = 0.0
    counters: dict[str, Any] = field(default_factory=dict)
    opened_case: OpenedCase | None = None
    is_traced: bool = False
    _opened: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    @property
    def id(self) -> str:
        """The case's id."""
        return self.case_spec.case.id

    def open(self) -> OpenedCase:
        """Open the case until `close`."""
        self.opened_case = self._opened.enter_context(self.case_spec.open())
        return self.opened_case

    def close(self) -> None:
        """Close the case if it is open."""
        self.opened_case = None
        self._opened.close()

    def is_due_for_reopening(self, number: int) -> bool:
        """Whether this is one of the passes before which it is opened anew; cases take turns in that, too."""
        return (number + self.index) % REOPEN_EVERY == 0
