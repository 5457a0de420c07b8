"""Which candidates are predicted, and in which order: meshes as written, then changes of the best, one a time."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from distbench.search.child import Question, SweepChild
from distbench.search.prediction import CLOSE, FEW, Prediction, predicted, require_same_work, reserve_text
from distbench.search.space import Candidate, Space, lower_bound_bytes
from distbench.show.units import disk_text
from distbench.simulate.hardware_file import Hardware
from distbench.simulate.recording import Recording, load_recordings
from distbench.spec.errors import UserError
from distbench.spec.safe_text import count_text

NUM_EXPANDED = 3  # of the best, whose changes are tried
NUM_WHOLE, MAX_WHOLE = 3, 8  # of the best, recorded with all layers until so many fit; and in all
AT_ONCE = 8
SEARCH_SHARE = 0.6  # of the budget; the rest is for recording all layers
MESH_SHARE = 0.5  # of what is tried; further meshes wait until nothing that is better known can be changed


@dataclass
class ExploredPlans:
    """What a sweep knows.

    Args:
        left_out: candidate to why there is no prediction.
        refused: meshes that even a lower bound of memory rules out, with that bound in bytes.
        stopped: why not all that could have been tried was; empty where the search ended by itself.
        num_legal: candidates in all.
        written: the plan as the scenario has it, where changes are held against that.
        facts: of the scenario's plan and model, as the child process answers them.
        layers: the parameter of which few were recorded, where times are extended from those.
        unsplit: why the batch rules meshes out, where it does.
        estimates: of each plan that was recorded whole after few layers of it: its estimated memory over that.
        option: the --set under which a plan works, where no plan works without it.
    """

    found: dict[Candidate, Prediction] = field(default_factory=dict)
    left_out: dict[Candidate, str] = field(default_factory=dict)
    refused: dict[Candidate, int] = field(default_factory=dict)
    stopped: str = ""
    num_legal: int = 0
    written: Candidate | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    layers: str | None = None
    unsplit: str = ""
    option: str = ""
    estimates: list[float] = field(default_factory=list)

    @property
    def ranked(self) -> list[Prediction]:
        """What fits or may fit, the fastest first; then what does not, the smallest first.

        Of those that are too near to the fastest to be told apart, the one with the least memory comes first; of
        several with about as little, the fastest. Memory that is known whole counts before an estimate.
        """
        ranked = sorted(self.found.values(), key=rank_of)
        usable = [one for one in ranked if one.fits is not False]
        near = [one for one in usable if one.step_s <= (1 + CLOSE) * usable[0].step_s]
        near = [one for one in near if one.is_whole] or near
        if near:
            least = min(one.reserved_bytes for one in near)
            best = next(one for one in near if one.reserved_bytes <= (1 + CLOSE) * least)
            ranked = [best, *(one for one in ranked if one is not best)]
        return ranked


def rank_of(prediction: Prediction) -> tuple[bool, float]:
    """What predictions are sorted by."""
    is_out = prediction.fits is False
    return is_out, prediction.reserved_bytes if is_out else 1 / prediction.tokens_per_s


@dataclass(frozen=True)
class Limits:
    """How much is tried: candidates, and seconds."""

    max_plans: int
    budget_s: float
    started_s: float = field(default_factory=time.monotonic)

    @property
    def reached(self) -> str:
        """That so many candidates were tried."""
        return f"--plans {self.max_plans} allows no more"

    def left_s(self, share: float = 1.0) -> float:
        """Of a share of the budget."""
        return share * self.budget_s - (time.monotonic() - self.started_s)


@dataclass
class Predictor:
    """Candidates to predictions, by the child process.

    Args:
        base: all parameters of the scenario, as the user chose them.
        tell: is called as questions are put and answered: (asked, answered).
        float8: patterns of modules whose matmuls are in float8.
        layers: the parameter of the number of layers, where few of them are recorded.
    """

    recorder: SweepChild
    base: dict[str, Any]
    hardware: Hardware
    tell: Callable[[int, int], None]
    float8: tuple[str, ...] = ()
    layers: str | None = None
    _is_sure: bool = field(default=False, init=False)

    def outcomes(self, candidates: Sequence[Candidate], whole: bool = False) -> Iterator[tuple[Candidate, Any]]:
        """(candidate, prediction or why there is none) as answers come."""
        self.tell(len(candidates), 0)
        failed: list[tuple[Candidate, str]] = []
        for candidate, outcome in self._answers(candidates, whole):
            if isinstance(outcome, str) and self.layers and not whole and not self._is_sure:
                failed.append((candidate, outcome))
                continue
            self._is_sure = self._is_sure or not isinstance(outcome, str)
            self.tell(0, 1)
            yield candidate, outcome
        if failed and not self._is_sure:
            yield from self._without_layers(failed)
        else:
            self.tell(0, len(failed))
            yield from failed

    def _without_layers(self, failed: Sequence[tuple[Candidate, str]]) -> Iterator[tuple[Candidate, Any]]:
        """What comes of candidates of which none works with few layers: a plan may name layers that those lack."""
        self._is_sure = True
        (first, *_), before = [candidate for candidate, _ in failed], self.layers
        ((_, outcome),) = self._answers([first], whole=True)
        self.tell(0, 1)
        if isinstance(outcome, str):
            yield from failed
            self.tell(0, len(failed) - 1)
            return
        assert before is not None
        self.layers = None
        yield first, outcome
        for answer in self._answers([candidate for candidate, _ in failed[1:]], whole=True):
            self.tell(0, 1)
            yield answer

    def _answers(self, candidates: Sequence[Candidate], whole: bool) -> Iterator[tuple[Candidate, Any]]:
        layers = None if whole else self.layers
        few: list[dict[str, Any]] = [{}] if layers is None else [{layers: count} for count in FEW]
        questions = [
            Question("record", [{**one.variant(self.base), **count} for count in few], one.mesh) for one in candidates
        ]
        damaged = []
        for place, answer in self.recorder.ask(questions):
            try:
                recordings = _loaded(answer)
            except UserError:  # of a recording that an earlier sweep left
                damaged.append(place)
                continue
            yield candidates[place], self._outcome(candidates[place], answer, recordings)
        for place in damaged:
            self.recorder.forget(questions[place])
        for index, answer in self.recorder.ask([questions[place] for place in damaged]):
            candidate = candidates[damaged[index]]
            yield candidate, self._outcome(candidate, answer, _loaded(answer))

    def _outcome(
        self, candidate: Candidate, answer: dict[str, Any], recordings: Sequence[Sequence[Recording]]
    ) -> Prediction | str:
        if "left_out" in answer:
            return str(answer["left_out"])
        is_few = len(recordings) > 1
        numbers, num_layers = (FEW, int(self.base[str(self.layers)])) if is_few else ((0,), 0)
        try:
            points = list(zip(numbers, recordings, strict=True))
            return predicted(candidate, points, num_layers, self.hardware, self.float8)
        except UserError as error:
            return str(error)


def _loaded(answer: dict[str, Any]) -> list[list[Recording]]:
    return [load_recordings(Path(file)) for file in answer.get("answers", ())]


def explore(space: Space, predictor: Predictor, limits: Limits, explored: ExploredPlans) -> None:
    """Fill `explored`; what is known stays there when this is interrupted."""
    capacity = predictor.hardware.usable_bytes
    bounds = {candidate: lower_bound_bytes(space.facts, candidate.mesh) for candidate in space.meshes}
    explored.refused |= {candidate: bound for candidate, bound in bounds.items() if bound > capacity}
    meshes = [candidate for candidate in space.meshes if candidate not in explored.refused]
    waiting: list[Candidate] = []
    expanded: set[Candidate] = set()
    while True:
        if not waiting:
            tried = {*explored.found, *explored.left_out}
            best = next((one for one in _leaders(explored) if one.candidate not in expanded), None)
            is_early = len(tried) < MESH_SHARE * limits.max_plans and limits.left_s(MESH_SHARE * SEARCH_SHARE) > 0
            if meshes and (is_early or best is None):
                waiting, meshes = meshes[:AT_ONCE], meshes[AT_ONCE:]
            elif best is None:
                break
            else:
                expanded.add(best.candidate)
                waiting = [one for one in space.neighbours(best.candidate) if one not in tried]
            continue
        room = limits.max_plans - len(explored.found) - len(explored.left_out)
        if room <= 0:
            explored.stopped = limits.reached
            break
        if limits.left_s(SEARCH_SHARE) < 0 and explored.found:
            explored.stopped = "the time for recording was used up (--budget)"
            break
        count = min(AT_ONCE, room)
        now, waiting = waiting[:count], waiting[count:]
        take_in(explored, predictor.outcomes(now))
    if not explored.found:
        look_for_option(space, predictor, explored)


def look_for_option(space: Space, predictor: Predictor, explored: ExploredPlans) -> bool:
    """Where no plan works, find the scenario's own parameter with which the first one does, for the message. No plan
    with it is ranked, because it computes something else. Return whether there is one."""
    first = next(iter(explored.left_out), None)
    choices = [(name, value) for name, values in space.axes.items() for value in values[1:]] if first else []
    for name, value in choices[:AT_ONCE]:
        if first and not any(isinstance(one, str) for _, one in predictor.outcomes([first.with_choice(name, value)])):
            explored.option = f"--set {name}={value}"
            return True
    return False


def take_in(explored: ExploredPlans, outcomes: Iterable[tuple[Candidate, Any]]) -> None:
    """Keep what was found; what computes something else than the first is left out."""
    for candidate, outcome in outcomes:
        if isinstance(outcome, str):
            explored.left_out[candidate] = outcome
            continue
        first = next(iter(explored.found.values()), outcome)
        if why := require_same_work(first, outcome):
            explored.left_out[candidate] = why
        else:
            explored.found[candidate] = outcome


def _leaders(explored: ExploredPlans) -> list[Prediction]:
    return explored.ranked[:NUM_EXPANDED]


def confirm(predictor: Predictor, limits: Limits, explored: ExploredPlans) -> None:
    """Record the best with all layers, two at a time, until enough of them are known to fit. Their time stays that of
    few layers, as the others' is."""
    num_tried = 0
    while num_tried < MAX_WHOLE:
        known = [one for one in explored.ranked if one.fits]
        if len(known) >= NUM_WHOLE or (num_tried and limits.left_s() < 0):
            break
        waiting = [one for one in explored.ranked if one.fits is None][: min(2, NUM_WHOLE - len(known))]
        if not waiting:
            break
        num_tried += len(waiting)
        for candidate, outcome in predictor.outcomes([one.candidate for one in waiting], whole=True):
            if isinstance(outcome, str):
                explored.left_out[candidate] = outcome
                del explored.found[candidate]
                continue
            few = explored.found[candidate]
            explored.estimates.append(few.reserved_bytes / outcome.reserved_bytes)
            explored.found[candidate] = replace(
                few,
                reserved_bytes=outcome.reserved_bytes,
                fits=outcome.fits,
                is_tight=outcome.is_tight,
                takes_reserve=outcome.takes_reserve,
                is_whole=True,
            )


def no_plan_error(scenario: str, explored: ExploredPlans, hardware: Hardware | None) -> UserError:
    """Why no candidate has a prediction.

    Args:
        hardware: None where candidates are measured.
    """
    too_small = ""
    if explored.refused and hardware is not None:
        reserve = reserve_text(hardware)
        capacity = disk_text(hardware["memory_bytes"]) + (f" (of which {reserve})" if reserve else "")
        candidate, bound = min(explored.refused.items(), key=lambda item: item[1])
        need = f"parameters, gradients and optimizer state alone are {disk_text(bound)} a device"
        too_small = f"fits into {capacity}: in the nearest ({candidate.text}) {need}"
    split = f"{explored.unsplit}; of the other meshes, " if explored.unsplit else ""
    if not explored.left_out:
        return UserError(f"no plan of {scenario} {too_small}; give a larger --memory or --world")
    (candidate, why), *others = explored.left_out.items()
    more = f"; {count_text(len(others), 'other plan')} failed too" if others else ""
    besides = f"; no plan on other meshes {too_small}" if too_small else ""
    found = f"no plan of {scenario} works"
    if len(explored.left_out) < explored.num_legal:
        stopped = f"; {explored.stopped}" if explored.stopped else ""
        found = (
            f"no plan of {scenario} that was tried works ({len(explored.left_out)} of {explored.num_legal}{stopped})"
        )
    advice = f"; {candidate.mesh_text} works with {explored.option}" if explored.option else ""
    if explored.stopped and not advice:
        advice = "; give a larger --plans"
    return UserError(f"{found}: {split}{candidate.text}: {why}{more}{besides}{advice}")
