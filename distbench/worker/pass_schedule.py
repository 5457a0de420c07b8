"""Schedule of a launch's cases over passes: number of passes, order of cases, and samples of a case per pass.

Cases that a report compares form a group: all training steps of a launch, or the planners of one redistribution. Groups
are measured one after the other, each in separate passes, so that the planners of a pair alternate within about a
second. Times drift over a launch, so more than about five consecutive samples add little. All ranks make the same
decisions.
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
from distbench.statistics.verdicts import MIN_PASSES

SAMPLES_A_TURN = 5
SHORT_TURN_S = 0.02  # A case with shorter samples than a fifth of this time takes samples up to this time.
MAX_PASSES = 100
REOPEN_EVERY = 4  # number of passes; more than one opening averages the effect of a single opening of a model
# Maximum number of budgets for the minimum number of passes that allows a comparison; a quick launch needs several.
STRETCH = 4.0
# Minimum samples per pass, without and with an untimed iteration, within this time, so that most of a pass is timed.
LEAST, LEAST_AFTER_TOUCH, LONG_TURN_S = 2, 3, 0.25
UNTOUCHED_S = 1e-3  # in a small group, longer iterations need no untimed iteration before
UNTOUCHED_STEP_S = 5e-3  # This is the limit for a model that has run since its check.
ENOUGH = 3  # The number of passes of cases without comparison. A single sample may be an outlier.


class PassPlan:
    """The plan of passes for one group, or for all cases without comparison.

    Args:
        settings: `max_case_s` is one case's share of the launch; with `passes` 0, this plan chooses the number of
            passes.
        num_cases: number of cases of the group.
        is_compared: whether a report compares these cases with each other.
        group: name of the group; each group has a different order.
        max_passes: maximum number of passes; 0 for MAX_PASSES.
        run_id: id of the launch's run, equal on all ranks. The id is part of the seed for orders: if every launch
            used the same seed, a case would precede another case in most passes of every launch.
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
        self, estimate_s: float, is_touched: bool = False, num_samples: int = 0, most: int = SAMPLES_A_TURN
    ) -> Settings:
        """Return the limits of one case in one pass.

        Args:
            estimate_s: seconds that an iteration takes.
            is_touched: whether an untimed iteration precedes the samples.
            num_samples: number of samples, if the case has one.
            most: number of samples of other cases, if the budget allows.
        """
        settings = self._settings
        if num_samples:
            return replace(settings, min_samples=num_samples, max_samples=num_samples, target_ci=0.0)
        if not self.is_automatic:
            return replace(settings, passes=self.num_passes).of_a_pass()
        sample_s = max(estimate_s, 1e-7) * settings.iterations_per_sample
        least = min(LEAST_AFTER_TOUCH if is_touched else LEAST, max(int(LONG_TURN_S / sample_s), 1))
        count = min(max(int(settings.max_case_s / MIN_PASSES / sample_s), least), most, settings.max_samples)
        return replace(settings, min_samples=count, max_samples=count, target_ci=0.0)

    def share_limits(self, turns: Sequence["CaseProgress"]) -> float:
        """Use the limits of the longest case for all compared cases; return the added seconds per pass.

        On a busy machine, a case's estimate is random, and would affect the case during the whole launch. The median of
        5 samples and the median of 30 samples have different means if samples are skewed.
        """
        longer_s = 0.0
        compared: dict[tuple[str, int], list[CaseProgress]] = {}
        for turn in turns:
            if turn.case_spec.group and turn.limits is not None:
                compared.setdefault((turn.case_spec.group, turn.case_spec.num_samples), []).append(turn)
        for (_, num_samples), group_turns in compared.items():
            longest_s = max(turn.estimate_s for turn in group_turns)
            short = int(SHORT_TURN_S / max(longest_s, 1e-7) / self._settings.iterations_per_sample)
            is_touched = any(turn.is_touched for turn in group_turns)
            limits = self.limits(longest_s, is_touched, num_samples, max(SAMPLES_A_TURN, short))
            shortest_s = min(turn.estimate_s for turn in group_turns)
            for turn in group_turns:
                longer_s += (limits.max_samples - turn.limits.max_samples) * turn.estimate_s if turn.limits else 0.0
                turn.limits, turn.shortest_s, turn.longest_s = limits, shortest_s, longest_s
        return longer_s * self._settings.iterations_per_sample

    def set_number(self, pass_s: float, stretch: float = STRETCH) -> None:
        """Choose the number of passes. A pass takes `pass_s` seconds on the slowest rank without checks; MIN_PASSES
        passes may use up to `stretch` budgets.
        """
        if not self.is_automatic:
            return
        budget_s = min(self._num_cases * self._settings.max_case_s, self._settings.budget_s)
        affordable = budget_s / max(pass_s, 1e-6)
        # Passes beyond the budget are useless if their number is too small for a comparison.
        least = MIN_PASSES if stretch * affordable >= MIN_PASSES else min(max(int(stretch * affordable), 1), ENOUGH)
        self.num_passes = min(max(int(affordable), least), self._max_passes)

    def goes_on(self, number: int, medians: Sequence[Sequence[float]]) -> bool:
        """Return whether to run another pass after `number` passes, from each case's median per pass (seconds)."""
        if number >= self.num_passes:
            return False
        target_ci = self._settings.target_ci
        return not (self.is_automatic and number >= MIN_PASSES and all(is_steady(case, target_ci) for case in medians))

    def must_be_seen(self, number: int) -> bool:
        """Return whether `goes_on` may depend on the results of `number` passes."""
        return number >= min(MIN_PASSES, self.num_passes)


def groups_of(
    case_specs: Sequence[CaseSpec], settings: Settings, done: Collection[str] = (), run_id: str = ""
) -> list[tuple[PassPlan, list[CaseSpec]]]:
    """Return the cases of a launch by group, in order of first appearance, each group with its plan.

    If `settings.passes` is not 0, all cases form one group. `done` contains ids with a row from an earlier launch of
    the job. Complete groups before the last group with a done id are omitted.
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

    index: int  # index among the cases of the launch
    case_spec: CaseSpec
    medians: list[float] = field(default_factory=list)  # median seconds of each finished pass
    limits: Settings | None = None  # limits of one pass; None before the first warm-up
    is_touched: bool = False  # whether an untimed iteration precedes the samples
    estimate_s: float = 0.0  # seconds of an iteration at the first warm-up
    shortest_s: float = 0.0  # smallest estimate of all compared cases
    longest_s: float = 0.0  # largest estimate of all compared cases
    counters: dict[str, Any] = field(default_factory=dict)  # counters of the case's row
    held_bytes: int = 0  # memory of the open case on the rank with the most
    opened_case: OpenedCase | None = None
    is_traced: bool = False
    stays_open: bool = True  # whether the case may remain open between passes; set by `open`
    has_settled: bool = False  # whether the case has run since its check, after which an optimizer may have no state
    _opened: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    @property
    def id(self) -> str:
        """The case's id."""
        return self.case_spec.case.id

    def open(self) -> OpenedCase:
        """Open the case until `close`, after closing an open case."""
        self.close()
        self.opened_case = self._opened.enter_context(self.case_spec.open())
        self.stays_open = self.opened_case.stays_open
        return self.opened_case

    def close(self) -> None:
        """Close the case if it is open."""
        self.opened_case = None
        self._opened.close()

    def needs_touch(self, is_small: bool, is_on_cpu: bool) -> bool:
        """Return whether an untimed iteration precedes a further pass of an open case; False if iterations are so long
        that caches do not matter.
        """
        if is_small:
            return self.shortest_s < UNTOUCHED_S
        return not (is_on_cpu and self.has_settled and self.shortest_s >= UNTOUCHED_STEP_S)

    def is_due_for_reopening(self, number: int) -> bool:
        """Return whether the case is opened again before this pass; different cases are opened in different passes."""
        return (number + self.index) % REOPEN_EVERY == 0
