"""A sweep by prediction: no rank is started.

Meshes are predicted as written, those that need the fewest fast links first; then changes of the best, one at a time;
with --around-my-plan the neighbours of the plan as written. At last the best are recorded with all layers.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from distbench.search.simulated_plan import Predictor, no_plan_fits, require_same_work, reserve_text
from distbench.search.space import Candidate, Setup, lower_bound_bytes
from distbench.search.sweep_state import Limits, SweepState
from distbench.show.units import disk_text
from distbench.simulate.hardware_file import Hardware
from distbench.spec.errors import UserError
from distbench.spec.printable_text import count_text

NUM_EXPANDED = 3  # of the best, whose changes are tried
NUM_WHOLE, MAX_WHOLE = 3, 8  # of the best, recorded with all layers until so many fit; and in all
AT_ONCE = 8
SEARCH_SHARE = 0.6  # of the budget; the rest is for recording all layers
MESH_SHARE = 0.5  # of what is tried; further meshes wait until no change of a better one is left


def predict(state: SweepState, predictor: Predictor, limits: Limits) -> None:
    """Search, and record the best whole; the outcomes are in `state`, also where this is interrupted.

    Raises:
        UserError: the plan as written does not work, where its neighbours are asked for.
    """
    try:
        if state.written is not None:
            predict_around(state, state.written, predictor, limits)
        else:
            explore(state, predictor, limits)
        _confirm(state, predictor, limits)
    finally:
        state.layers = predictor.layers


def predict_around(state: SweepState, written: Candidate, predictor: Predictor, limits: Limits) -> None:
    """Predict the plan as written and its neighbours. Raises as `predict`."""
    candidates = [written, *state.space.around(written)]
    if len(candidates) > limits.max_plans:
        candidates, state.stopped = candidates[: limits.max_plans], limits.reached
    take_in(state, predictor.outcomes([written]))
    if written not in state.predictions:
        instead = f"; it works with {state.option}" if _look_for_option(state, predictor) else ""
        raise UserError(f"the plan as written does not work: {state.left_out[written]}{instead}")
    take_in(state, predictor.outcomes(candidates[1:]))


def explore(state: SweepState, predictor: Predictor, limits: Limits) -> None:
    """Predict meshes and changes of the best, until none is left or a limit is reached."""
    space, capacity = state.space, predictor.hardware.usable_bytes
    bounds = {candidate: lower_bound_bytes(space.facts, candidate.mesh) for candidate in space.meshes}
    state.refused |= {candidate: bound for candidate, bound in bounds.items() if bound > capacity}
    meshes = [candidate for candidate in space.meshes if candidate not in state.refused]
    waiting: list[Candidate] = []
    expanded: set[Candidate] = set()
    while True:
        if not waiting:
            tried_candidates = {*state.predictions, *state.left_out}
            leaders = state.ranked_predictions[:NUM_EXPANDED]
            best = next((one for one in leaders if one.candidate not in expanded), None)
            is_early = (
                len(tried_candidates) < MESH_SHARE * limits.max_plans and limits.left_s(MESH_SHARE * SEARCH_SHARE) > 0
            )
            if meshes and (is_early or best is None):
                waiting, meshes = meshes[:AT_ONCE], meshes[AT_ONCE:]
            elif best is None:
                break
            else:
                expanded.add(best.candidate)
                waiting = [one for one in space.neighbours(best.candidate) if one not in tried_candidates]
            continue
        room = limits.max_plans - len(state.predictions) - len(state.left_out)
        if room <= 0:
            state.stopped = limits.reached
            break
        if limits.left_s(SEARCH_SHARE) < 0 and state.predictions:
            state.stopped = "the time for recording was used up (--budget)"
            break
        count = min(AT_ONCE, room)
        now, waiting = waiting[:count], waiting[count:]
        take_in(state, predictor.outcomes(now))
    if not state.predictions:
        _look_for_option(state, predictor)


def _look_for_option(state: SweepState, predictor: Predictor) -> bool:
    """Where no plan works, find the scenario's own parameter with which the first one does, for the message. No plan
    with it is ranked, because it computes something else. Return whether there is one."""
    first = next(iter(state.left_out), None)
    choices = [(name, value) for name, values in state.space.axes.items() for value in values[1:]] if first else []
    for name, value in choices[:AT_ONCE]:
        if first and not any(
            isinstance(outcome, str) for _, outcome in predictor.outcomes([first.with_choice(name, value)])
        ):
            state.option = f"--set {name}={value}"
            return True
    return False


def take_in(state: SweepState, outcomes: Iterable[tuple[Candidate, Any]]) -> None:
    """Keep predictions; a candidate that computes something else than the first one is left out."""
    for candidate, outcome in outcomes:
        if isinstance(outcome, str):
            state.left_out[candidate] = outcome
            continue
        first = next(iter(state.predictions.values()), outcome)
        if why := require_same_work(first, outcome):
            state.left_out[candidate] = why
        else:
            state.predictions[candidate] = outcome


def _confirm(state: SweepState, predictor: Predictor, limits: Limits) -> None:
    """Record the best with all layers, two at a time, until enough of them are known to fit. Their time stays that of
    few layers, as the others' is."""
    num_tried = 0
    while num_tried < MAX_WHOLE:
        fitting = [prediction for prediction in state.ranked_predictions if prediction.fits]
        if len(fitting) >= NUM_WHOLE or (num_tried and limits.left_s() < 0):
            break
        waiting = [prediction for prediction in state.ranked_predictions if prediction.fits is None][
            : min(2, NUM_WHOLE - len(fitting))
        ]
        if not waiting:
            break
        num_tried += len(waiting)
        for candidate, outcome in predictor.outcomes([prediction.candidate for prediction in waiting], whole=True):
            if isinstance(outcome, str):
                state.left_out[candidate] = outcome
                del state.predictions[candidate]
                continue
            few = state.predictions[candidate]
            state.estimates.append(few.reserved_bytes / outcome.reserved_bytes)
            state.predictions[candidate] = replace(
                few,
                reserved_bytes=outcome.reserved_bytes,
                fits=outcome.fits,
                is_tight=outcome.is_tight,
                takes_reserve=outcome.takes_reserve,
                is_whole=True,
            )


def require_fitting(setup: Setup, state: SweepState, hardware: Hardware) -> None:
    """Refuse to recommend a plan that does not fit."""
    if not state.predictions:
        raise no_plan_error(setup, state, hardware)
    best = state.ranked_predictions[0]
    if best.fits is False:
        raise no_plan_fits(setup.entry.name, setup.world, best, hardware, state.stopped)


def no_plan_error(setup: Setup, state: SweepState, hardware: Hardware | None) -> UserError:
    """Why no candidate has a prediction.

    Args:
        hardware: None where candidates are measured.
    """
    scenario, too_small = setup.entry.name, ""
    if state.refused and hardware is not None:
        reserve = reserve_text(hardware)
        capacity = disk_text(hardware["memory_bytes"]) + (f" (of which {reserve})" if reserve else "")
        candidate, bound = min(state.refused.items(), key=lambda item: item[1])
        need = f"parameters, gradients and optimizer state alone are {disk_text(bound)} a device"
        too_small = f"fits into {capacity}: in the nearest ({candidate.text}) {need}"
    if not state.left_out:
        return UserError(f"no plan of {scenario} {too_small}; give a larger --memory or --world")
    unsplit = setup.unsplit_text(state.space)
    split = f"{unsplit}; of the other meshes, " if unsplit else ""
    (candidate, why), *others = state.left_out.items()
    more = f"; {count_text(len(others), 'other plan')} failed too" if others else ""
    besides = f"; no plan on other meshes {too_small}" if too_small else ""
    none_works = f"no plan of {scenario} works"
    if len(state.left_out) < state.num_legal:
        stopped = f"; {state.stopped}" if state.stopped else ""
        none_works = f"no plan of {scenario} that was tried works ({len(state.left_out)} of {state.num_legal}{stopped})"
    advice = f"; {candidate.mesh_text} works with {state.option}" if state.option else ""
    if state.stopped and not advice:
        advice = "; give a larger --plans"
    return UserError(f"{none_works}: {split}{candidate.text}: {why}{more}{besides}{advice}")
