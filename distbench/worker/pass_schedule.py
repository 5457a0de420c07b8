"""Schedule of a launch's cases over passes: how many passes, in which order, and how much of a case each takes.

Cases that a report compares form a group: all training steps of a launch, or the planners of one redistribution. Groups
are measured one after the other, each in its own passes, so that a pair's planners alternate within about a second.
Times drift over a launch, so more than about five consecutive samples add little. All ranks make the same decisions.
"""

import contextlib
import random
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from distbench.ranks.case_protocol import CaseSpec, OpenedCase
from distbench.spec import Settings
from distbench.statistics.intervals import is_steady
from distbench.statistics.pass_comparison import MIN_PASSES

SAMPLES_A_TURN = 5
SHORT_TURN_S = 0.02  # samples shorter than a fifth of this repeat for this long
MAX_PASSES = 100
REOPEN_EVERY = 4  # passes: the effect of one opening of a model must not look like a difference between two models
# Budgets that a launch may take for the fewest passes that allow a comparison: a quick launch needs that.
STRETCH = 4.0
# Samples per pass, and of one that begins with an untimed iteration, within that time: most of a pass is timed.
LEAST, LEAST_AFTER_TOUCH, LONG_TURN_S = 2, 3, 0.25
UNTOUCHED_S = 1e-3  # longer iterations of a small group need no untimed one before
UNTOUCHED_STEP_S = 5e-3  # the same for a model that has run since its check
ENOUGH = 3  # passes of cases without comparison: a single sample may be an outlier


class PassPlan:
    """The passes of one group, or of all cases if none are compared.

    Args:
        settings: `max_case_s` is one case's share of the launch; `passes` 0 leaves their number to this plan.
        num_cases: number of cases of the group.
        is_compared: whether a report compares these cases with each other.
        group: its name: each group has its own order.
        max_passes: at most; 0 for MAX_PASSES.
        run_id: of the launch, the same on all ranks. It is part of the seed of orders: with the same seed in every
            launch, some case would precede another one in most passes of every launch.
    """

    def __init__(
        self,
        settings: Settings,
        num_cases: int,
        is_compared: bool,
        group: str = "",
        max_passes: int = 0,
        run_id: str = "",
    ) -> None:
        self._settings, self._num_cases, self._group, self._run_id = settings, num_cases, group, run_id
        self._max_passes = max_passes or MAX_PASSES
        self.is_automatic = settings.passes == 0 and is_compared
        self.num_passes = MIN_PASSES if self.is_automatic else max(settings.passes, 1)

    def order(self, number: int, count: int) -> list[int]:
        """Return the indices of `count` cases in the random order of one pass."""
        places = list(range(count))
        if self.num_passes > 1:
            random.Random(f"{self._settings.seed} {self._run_id} {self._group} pass {number}").shuffle(places)
        return places

    def limits(
        self, estimate_s: float, is_touched: bool = False, most: int = 0, num_samples: int = SAMPLES_A_TURN
    ) -> Settings:
        """Return the limits of one case in one pass.

        Args:
            estimate_s: seconds that an iteration takes.
            is_touched: whether an untimed iteration precedes the samples.
            most: maximum number of samples, if not 0.
            num_samples: samples, if the budget allows them.
        """
        settings = self._settings
        if not self.is_automatic:
            of_a_pass = replace(settings, passes=self.num_passes).of_a_pass()
            if not most:
                return of_a_pass
            least, most = min(of_a_pass.min_samples, most), min(of_a_pass.max_samples, most)
            return replace(of_a_pass, min_samples=least, max_samples=most)
        sample_s = max(estimate_s, 1e-7) * settings.iterations_per_sample
        least = min(LEAST_AFTER_TOUCH if is_touched else LEAST, max(int(LONG_TURN_S / sample_s), 1))
        count = min(max(int(settings.max_case_s / MIN_PASSES / sample_s), least), num_samples, settings.max_samples)
        count = min(count, most or count)
        return replace(settings, min_samples=count, max_samples=count, target_ci=0.0)

    def share_limits(self, turns: Sequence["CaseProgress"]) -> float:
        """Use the limits of the longest case for all cases that are compared; return the added seconds per pass.

        On a busy machine a case's own estimate is random, and it would affect the case for the whole launch. The median
        of 5 samples and the median of 30 samples have different means if samples are skewed.
        """
        longer_s = 0.0
        compared: dict[tuple[str, int], list[CaseProgress]] = {}
        for turn in turns:
            if turn.case_spec.group and turn.limits is not None:
                compared.setdefault((turn.case_spec.group, turn.case_spec.most_samples), []).append(turn)
        for (_, most), group_turns in compared.items():
            longest_s = max(turn.estimate_s for turn in group_turns)
            short = int(SHORT_TURN_S / max(longest_s, 1e-7) / self._settings.iterations_per_sample)
            is_touched = any(turn.is_touched for turn in group_turns)
            limits = self.limits(longest_s, is_touched, most, max(SAMPLES_A_TURN, short))
            shortest_s = min(turn.estimate_s for turn in group_turns)
            for turn in group_turns:
                longer_s += (limits.max_samples - turn.limits.max_samples) * turn.estimate_s if turn.limits else 0.0
                turn.limits, turn.shortest_s, turn.longest_s = limits, shortest_s, longest_s
        return longer_s * self._settings.iterations_per_sample

    def set_number(self, pass_s: float, stretch: float = STRETCH) -> None:
        """Choose the number of passes, which take `pass_s` seconds each on the slowest rank without checks; up to
        `stretch` budgets may be used for MIN_PASSES of them.
        """
        if not self.is_automatic:
            return
        budget_s = min(self._num_cases * self._settings.max_case_s, self._settings.budget_s)
        affordable = budget_s / max(pass_s, 1e-6)
        # Passes beyond the budget would be wasted if they are too few for a comparison.
        least = MIN_PASSES if stretch * affordable >= MIN_PASSES else min(max(int(stretch * affordable), 1), ENOUGH)
        self.num_passes = min(max(int(affordable), least), self._max_passes)

    def goes_on(self, number: int, medians: Sequence[Sequence[float]]) -> bool:
        """Return whether there is another pass after `number`, with each case's median of each pass (seconds)."""
        if number >= self.num_passes:
            return False
        target_ci = self._settings.target_ci
        return not (self.is_automatic and number >= MIN_PASSES and all(is_steady(case, target_ci) for case in medians))

    def must_be_seen(self, number: int) -> bool:
        """Return whether `goes_on` may depend on the results of that many passes."""
        return number >= min(MIN_PASSES, self.num_passes)


def groups_of(
    case_specs: Sequence[CaseSpec], settings: Settings, done: Collection[str] = (), run_id: str = ""
) -> list[tuple[PassPlan, list[CaseSpec]]]:
    """Return the cases of a launch by group, in order of first appearance, each group with its plan.

    If `settings.passes` is not 0, all cases form one group. `done` has ids with a row from an earlier launch of the
    job: a group before one of those is finished, if complete.
    """
    if settings.passes:
        return [(PassPlan(settings, len(case_specs), is_compared=False, run_id=run_id), list(case_specs))]
    sizes = Counter(case_spec.group for case_spec in case_specs)
    groups: dict[str, list[CaseSpec]] = {}
    for case_spec in case_specs:
        groups.setdefault(case_spec.group if sizes[case_spec.group] > 1 else "", []).append(case_spec)
    planned_groups = [
        (PassPlan(settings, len(group), bool(name), name, group[0].max_passes, run_id), group)
        for name, group in groups.items()
    ]
    are_done = [[case_spec.case.id in done for case_spec in group] for _, group in planned_groups]
    last = max((place for place, group_done in enumerate(are_done) if any(group_done)), default=0)
    return [planned for place, planned in enumerate(planned_groups) if place >= last or not all(are_done[place])]


@dataclass
class CaseProgress:
    """Progress of a case through the passes."""

    index: int  # its place among the cases of the launch
    case_spec: CaseSpec
    medians: list[float] = field(default_factory=list)  # seconds, of each pass so far
    limits: Settings | None = None  # of one pass; None before its first warm-up
    is_touched: bool = False  # whether an untimed iteration precedes its samples
    estimate_s: float = 0.0  # of an iteration at the first warm-up
    shortest_s: float = 0.0  # the smallest estimate of the cases that it is compared with
    longest_s: float = 0.0  # the largest one
    counters: dict[str, Any] = field(default_factory=dict)  # of its row
    held_bytes: int = 0  # memory that it takes while it is kept open, on this rank
    opened_case: OpenedCase | None = None
    is_traced: bool = False
    stays_open: bool = True  # whether it may be kept open between passes, set when it is opened
    has_settled: bool = False  # whether it has run since its check, which may leave an optimizer without state
    _opened: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    @property
    def id(self) -> str:
        """The case's id."""
        return self.case_spec.case.id

    def open(self) -> OpenedCase:
        """Open the case until `close`; it is closed first if it is open."""
        self.close()
        self.opened_case = self._opened.enter_context(self.case_spec.open())
        self.stays_open = self.opened_case.stays_open
        return self.opened_case

    def close(self) -> None:
        """Close the case if it is open."""
        self.opened_case = None
        self._opened.close()

    def needs_touch(self, is_small: bool, is_on_cpu: bool) -> bool:
        """Return whether an untimed iteration precedes a further pass of a case that was kept open: not if iterations
        are so long that caches do not matter.
        """
        if is_small:
            return self.shortest_s < UNTOUCHED_S
        return not (is_on_cpu and self.has_settled and self.shortest_s >= UNTOUCHED_STEP_S)

    def is_due_for_reopening(self, number: int) -> bool:
        """Return whether it is opened again before this pass; different cases are opened in different passes."""
        return (number + self.index) % REOPEN_EVERY == 0
