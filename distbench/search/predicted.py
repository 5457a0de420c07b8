"""A sweep by prediction: steps are recorded and replayed, without starting ranks.

Plans as written are predicted on all meshes, meshes with the fewest fast links first, then changes of the best plans,
one at a time. With --around-my-plan, only neighbours of the plan as written are predicted.
"""

import contextlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from distbench.search.space import Candidate, Setup, Space, lower_bound_bytes
from distbench.search.sweep_child import Question, SweepChild, digest
from distbench.search.sweep_result import (
    BUBBLE,
    CLOSE,
    COMPUTE,
    IDLE,
    ON_HOST,
    CommunicationPath,
    Limits,
    Prediction,
    SweepState,
)
from distbench.show.units import brief_time_text, disk_text
from distbench.simulate.compile_float8 import FLOAT8_RATES
from distbench.simulate.hardware_file import Figure, Hardware
from distbench.simulate.recording import Collective, Recording, load_recordings
from distbench.simulate.simulation import Simulation, fullest, slowest
from distbench.simulate.simulation_text import assumptions
from distbench.spec.errors import UserError
from distbench.spec.file_io import write_whole
from distbench.spec.plan import LOSS, folded
from distbench.spec.printable_text import count_text

SURELY = 1.02  # factor on a plan's memory: free blocks may be too small for its requests
NUM_EXPANDED = 3  # number of best plans whose changes are tried
AT_ONCE = 64  # Between two groups, all but one process wait for the last recording.
SECONDS_EACH = 4.0  # of the time left, per candidate of a group: twice what a candidate takes
COMPILE = "plan.compile"
MESH_SHARE = 0.5  # Share of candidates and budget; further meshes are tried after all changes of better meshes.


def with_memory(hardware: Hardware, memory_bytes: float | None, headroom_bytes: float | None = None) -> Hardware:
    """Return the same machine with the memory of --memory, and the reserve of --headroom.

    Raises:
        UserError: the reserve is the whole memory.
    """
    options = {"memory_bytes": ("--memory", memory_bytes), "reserve_bytes": ("--headroom", headroom_bytes)}
    own = {
        name: Figure(int(value), "published", option) for name, (option, value) in options.items() if value is not None
    }
    machine = replace(hardware, figures={**hardware.figures, **own})
    if headroom_bytes is not None and machine.usable_bytes <= 0:
        memory = disk_text(machine["memory_bytes"])
        raise UserError(f"--headroom {disk_text(headroom_bytes)} is the whole memory ({memory}); give less")
    return machine


def predicted(
    candidate: Candidate, recordings: Sequence[Recording], hardware: Hardware, float8: tuple[str, ...] = ()
) -> Prediction:
    """Predict from the recordings of a step on some ranks: time is the slowest rank's, memory the fullest rank's.

    Args:
        float8: patterns of modules whose matmuls are in float8.

    Raises:
        UserError: the recordings cannot be replayed on this hardware.
    """
    ranks = Simulation.all_of(recordings, hardware, expandable=False, float8=float8)
    simulation, memory = slowest(ranks), fullest(ranks).memory
    head, parts = simulation.recording.head, simulation.parts
    exposed: dict[CommunicationPath, float] = defaultdict(float)
    for key, seconds in simulation.exposed_s.items():
        exposed[key.mesh_dim, key.kind, key.owner] += seconds
    implicit: dict[tuple[str, str], float] = defaultdict(float)
    for span in simulation.timed.spans:
        if isinstance(span.what, Collective) and span.what.explicit is False:
            implicit[folded(span.what.owner), span.what.redistribution] += span.end_s - span.start_s
    fits = all(rank.memory_usable.out_of_memory is None for rank in ranks)
    bubble = {BUBBLE: parts.bubble_s} if head.pipeline is not None else {}
    on_host = {ON_HOST: parts.on_host_s} if parts.on_host_s else {}
    return Prediction(
        candidate=candidate,
        step_s=simulation.timed.step_s,
        parts_s={COMPUTE: parts.compute_s, IDLE: max(parts.idle_s, 0.0), **bubble, **on_host},
        exposed_s=exposed,
        implicit_s=implicit,
        reserved_bytes=memory.reserved_bytes,
        live_bytes=memory.live_bytes,
        num_parameters=head.num_parameters,
        batch_size=head.batch_size,
        num_tokens=head.num_tokens,
        fits=fits,
        is_tight=any(rank.memory_usable.num_retries > 0 for rank in ranks),
        takes_reserve=not fits and all(rank.memory_here.out_of_memory is None for rank in ranks),
        assumed=tuple(assumptions(simulation)),
        mfu=simulation.model_share,
        step_bar=simulation.step_bar,
        memory_bar=simulation.memory_bar,
    )


@dataclass
class Predictor:
    """Predictor of candidates from recordings of the child process.

    Args:
        base: all parameters of the scenario, as chosen by the user.
        space: the space of the candidates.
        `on_progress`: called with the numbers of queries and of answers.
        float8: patterns of modules whose matmuls are in float8.
    """

    recorder: SweepChild
    base: dict[str, Any]
    space: Space
    hardware: Hardware
    on_progress: Callable[[int, int], None]
    float8: tuple[str, ...] = ()

    def outcomes(self, candidates: Sequence[Candidate]) -> Iterator[tuple[Candidate, Any]]:
        """Yield (candidate, prediction or the reason without one) as answers come."""
        self.on_progress(len(candidates), 0)
        for outcome in self._answers(candidates):
            yield outcome
            self.on_progress(0, 1)

    def _answers(self, candidates: Sequence[Candidate]) -> Iterator[tuple[Candidate, Any]]:
        by_recording: dict[Candidate, list[Candidate]] = defaultdict(list)
        for candidate in candidates:
            by_recording[self.space.recorded_as(candidate)].append(candidate)
        recorded = [*by_recording]
        questions = [Question("record", [plan.variant(self.base)], plan.mesh) for plan in recorded]
        damaged = []
        for place, answer in self.recorder.ask(questions):
            try:
                yield from self._outcomes(by_recording[recorded[place]], answer)
            except UserError:  # from a recording of an earlier sweep
                damaged.append(place)
        for place in damaged:
            self.recorder.forget(questions[place])
        for index, answer in self.recorder.ask([questions[place] for place in damaged]):
            yield from self._outcomes(by_recording[recorded[damaged[index]]], answer)

    def _outcomes(self, candidates: Sequence[Candidate], answer: dict[str, Any]) -> list[tuple[Candidate, Any]]:
        """Return the outcomes of candidates with one recording; UserError if it is damaged."""
        if "left_out" in answer:
            return [(candidate, str(answer["left_out"])) for candidate in candidates]
        files = [Path(file) for file in answer["answers"]]
        kept = {candidate: self._kept_file(candidate, files) for candidate in candidates}
        known = {candidate: _kept_prediction(file, files, candidate) for candidate, file in kept.items()}
        recordings: list[Recording] = []
        if None in known.values():
            recordings = [recording for file in files for recording in load_recordings(file)]
        return [
            (candidate, known[candidate] or self._outcome(candidate, recordings, kept[candidate]))
            for candidate in candidates
        ]

    def _kept_file(self, candidate: Candidate, files: Sequence[Path]) -> Path:
        """Return the file of a prediction, next to its recording, named by the other inputs of the prediction."""
        inputs = [self._compiles_loss(candidate), self.float8, self.hardware]
        return files[0].with_suffix(f".{digest(inputs)}.prediction")

    def _compiles_loss(self, candidate: Candidate) -> bool:
        """Return whether the recording has another loss: the replay compiles the loss."""
        return self.space.recorded_as(candidate) != candidate

    def _outcome(self, candidate: Candidate, recordings: Sequence[Recording], kept: Path) -> Prediction | str:
        if self._compiles_loss(candidate):
            recordings = [
                replace(recording, head=replace(recording.head, compiled=(*recording.head.compiled, LOSS)))
                for recording in recordings
            ]
        try:
            prediction = predicted(candidate, recordings, self.hardware, self.float8)
        except UserError as error:
            return str(error)
        with contextlib.suppress(OSError):  # a full disk: the next sweep predicts again
            # A candidate's choices may have values of any type; the reader adds its own candidate.
            write_whole(kept, msgspec.msgpack.encode(replace(prediction, candidate=Candidate(()))))
        return prediction


def _kept_prediction(kept: Path, files: Sequence[Path], candidate: Candidate) -> Prediction | None:
    """Return a prediction of an earlier sweep; None without one that is newer than its recordings."""
    try:
        if kept.stat().st_mtime_ns < max(file.stat().st_mtime_ns for file in files):
            return None
        return replace(msgspec.msgpack.decode(kept.read_bytes(), type=Prediction), candidate=candidate)
    except (OSError, msgspec.MsgspecError):
        return None


def predict(state: SweepState, predictor: Predictor, limits: Limits) -> None:
    """Search; `state` has the outcomes, also after an interrupt.

    Raises:
        UserError: the plan as written does not work, and its neighbours were requested.
    """
    if state.written is not None:
        predict_around(state, state.written, predictor, limits)
    else:
        explore(state, predictor, limits)
    _try_outside(state, predictor, limits)


def predict_around(state: SweepState, written: Candidate, predictor: Predictor, limits: Limits) -> None:
    """Predict the plan as written and its neighbours. Raises the errors of `predict`."""
    candidates = [written, *state.space.around(written)]
    if len(candidates) > limits.max_plans:
        candidates, state.stopped = candidates[: limits.max_plans], limits.reached
    take_in(state, predictor.outcomes([written]))
    if written not in state.predictions:
        _look_for_option(state, predictor)
        instead = f"; it works with {state.option}" if state.option else ""
        raise UserError(f"the plan as written does not work: {state.left_out[written]}{instead}")
    take_in(state, predictor.outcomes(candidates[1:]))


def explore(state: SweepState, predictor: Predictor, limits: Limits) -> None:
    """Predict meshes and changes of the best plans, until all are tried or a limit is reached."""
    space, capacity = state.space, predictor.hardware.usable_bytes
    bounds = {candidate: lower_bound_bytes(space.facts, candidate.mesh) for candidate in space.meshes}
    state.refused |= {candidate: bound for candidate, bound in bounds.items() if bound > capacity}
    meshes = [candidate for candidate in space.meshes if candidate not in state.refused]
    waiting: list[Candidate] = []
    expanded: set[Candidate] = set()
    while True:
        tried = {*state.predictions, *state.left_out}
        if not waiting:
            leaders = [prediction.candidate for prediction in state.leading_predictions[: NUM_EXPANDED + 1]]
            best = next((candidate for candidate in leaders if candidate not in expanded), None)
            share = math.ceil(MESH_SHARE * limits.max_plans) - len(tried) if limits.left_s(MESH_SHARE) > 0 else 0
            if meshes and (best is None or share > 0):
                count = min(AT_ONCE, share) if share > 0 else AT_ONCE
                waiting, meshes = meshes[:count], meshes[count:]
            elif best is None:
                break
            else:
                expanded.add(best)
                waiting = [candidate for candidate in space.neighbours(best) if candidate not in tried]
            continue
        room = limits.max_plans - len(tried)
        if room <= 0:
            state.stopped = limits.reached
            break
        if limits.left_s() < 0 and state.predictions:
            state.stopped = "the time for recording was used up (--budget)"
            break
        count = min(AT_ONCE, room, max(int(limits.left_s() / SECONDS_EACH), 1))
        take_in(state, predictor.outcomes(waiting[:count]))
        waiting = waiting[count:]
    if not state.predictions:
        _look_for_option(state, predictor)


def _look_for_option(state: SweepState, predictor: Predictor) -> None:
    """If no plan works, find a scenario parameter with which the first plan works, for the message. The changed plans
    compute something else, so they are not ranked.
    """
    if not state.left_out:
        return
    first = next(iter(state.left_out))
    choices = [(name, value) for name, values in state.space.axes.items() for value in values[1:]]
    for name, value in choices[:AT_ONCE]:
        ((_, outcome),) = predictor.outcomes([first.with_choice(name, value)])
        if not isinstance(outcome, str):
            state.option = f"--set {name}={value}"
            return


def take_in(state: SweepState, outcomes: Iterable[tuple[Candidate, Any]]) -> None:
    """Add predictions to `state`; leave out candidates that compute something else than the first candidate."""
    for candidate, outcome in outcomes:
        first = next(iter(state.predictions.values()), outcome)
        if isinstance(outcome, str):
            state.left_out[candidate] = outcome
        elif why := other_work(first, outcome):
            state.left_out[candidate] = why
        else:
            state.predictions[candidate] = outcome


def other_work(first: Prediction, other: Prediction) -> str:
    """Return the reason why two candidates cannot be compared; "" if they compute the same."""
    if first.num_parameters != other.num_parameters:
        parameters = count_text(other.num_parameters, "parameter")
        return f"its model has {parameters}, but the plan as written has {first.num_parameters:,}"
    if first.batch_size != other.batch_size:
        return f"its global batch is {other.batch_size}, but the plan as written has {first.batch_size}"
    if first.num_tokens != other.num_tokens:
        return f"its global batch has {other.num_tokens} tokens, but the plan as written has {first.num_tokens}"
    return ""


def _try_outside(state: SweepState, predictor: Predictor, limits: Limits) -> None:
    """Predict the recommended plan with compilation and with float8, which the search leaves as written."""
    hardware, facts = predictor.hardware, state.space.facts
    best = state.ranked_predictions[0] if state.predictions else None
    if best is None or not best.fits or hardware.host is not None or facts["pipeline"]:
        return
    candidate, float8 = best.candidate, predictor.float8
    is_open = COMPILE not in {*state.space.pinned, *state.space.axes}
    if facts["compilable"] and is_open and limits.left_s() > 0:
        candidate = candidate.with_choice(COMPILE, "inductor")
        _take_faster(state, best, predictor.outcomes([candidate]), f"--set {COMPILE}=inductor")
    modules = tuple(facts["checkpointable"])
    if not float8 and modules and hardware.figures.keys() & FLOAT8_RATES and limits.left_s() > 0:
        option = f"--float8 '{','.join(modules)}'"
        options = option if candidate is best.candidate else f"--set {COMPILE}=inductor {option}"
        predictor.float8 = modules
        _take_faster(state, best, predictor.outcomes([candidate]), options)
        predictor.float8 = float8


def _take_faster(state: SweepState, best: Prediction, outcomes: Iterable[tuple[Candidate, Any]], option: str) -> None:
    for _, outcome in outcomes:
        if isinstance(outcome, str) or other_work(best, outcome):
            continue
        if outcome.step_s < best.step_s * (1 - CLOSE):
            state.faster_outside[option] = outcome


def require_fitting(setup: Setup, state: SweepState, hardware: Hardware) -> None:
    """Raise UserError if the recommended plan does not fit."""
    if not state.predictions:
        raise no_plan_error(setup, state, hardware)
    best = state.ranked_predictions[0]
    if best.fits and best.step_s > state.max_step_s:
        problem = f"no tried plan of {setup.entry.name} takes at most {brief_time_text(state.max_step_s)} per step"
        fastest = f"the fastest that fits ({best.candidate.text}) takes {brief_time_text(best.step_s)}"
        raise UserError(f"{problem}; {fastest}; give a larger --max-step, --world or --plans")
    if not best.fits:
        raise no_plan_fits(setup.entry.name, setup.world, best, hardware, state.stopped)


def no_plan_error(setup: Setup, state: SweepState, hardware: Hardware | None) -> UserError:
    """Return the error that no candidate has a prediction.

    Args:
        hardware: None if candidates are measured.
    """
    scenario, too_small = setup.entry.name, ""
    if state.refused and hardware is not None:
        reserve = _reserve_text(hardware)
        capacity = disk_text(hardware["memory_bytes"]) + (f" (of which {reserve})" if reserve else "")
        candidate, bound = min(state.refused.items(), key=lambda item: item[1])
        need = f"parameters, gradients and optimizer state alone are {disk_text(bound)} per device"
        too_small = f"fits into {capacity} (in the nearest, {candidate.text}, {need})"
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
        none_works = f"no tried plan of {scenario} works ({len(state.left_out)} of {state.num_legal}{stopped})"
    advice = f"; {candidate.mesh_text} works with {state.option}" if state.option else ""
    if state.stopped and not advice:
        advice = "; give a larger --plans"
    return UserError(f"{none_works}: {split}{candidate.text}: {why}{more}{besides}{advice}")


def no_plan_fits(scenario: str, world: int, nearest: Prediction, hardware: Hardware, stopped: str = "") -> UserError:
    """Return the error that the memory is too small for every tried plan, with the need of the nearest plan.

    Args:
        stopped: the reason why some plans were not tried, or "".
    """
    need, reserve = nearest.reserved_bytes, _reserve_text(hardware)
    capacity = disk_text(hardware["memory_bytes"])
    why = "; ".join(reason for reason in (reserve and f"of which {reserve}", stopped) if reason)
    problem = f"no tried plan of {scenario} on {count_text(world, 'device')} fits into {capacity}"
    near = f"the nearest plan ({nearest.candidate.text}) needs {disk_text(need)}"
    unit, name = (1e9, "GB") if need >= 1e10 else (1e6, "MB")
    enough = f"{math.ceil(memory_for(hardware, need * SURELY) / unit)}{name}"
    advice = f"give --memory {enough} or more, a larger --world, or a smaller batch"
    return UserError(f"{problem}{f' ({why})' if why else ''}; {near}; {advice}")


def _reserve_text(hardware: Hardware) -> str:
    """Return the reserve of a device in words; "" for a host."""
    if hardware.host is not None:
        return ""
    return f"{disk_text(hardware['reserve_bytes'])} are reserved for the context, NCCL's buffers and workspaces"


def memory_for(hardware: Hardware, need_bytes: float) -> float:
    """Return the memory of a device with `need_bytes` of usable memory."""
    memory = need_bytes
    if hardware.host is None:
        for _ in range(20):  # the reserve may be a share of the memory
            memory = need_bytes + with_memory(hardware, memory)["reserve_bytes"]
    return memory
