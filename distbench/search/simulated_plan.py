"""A candidate's predicted step: from recordings of a model of few layers extended linearly, or of one of them all.

Time extends linearly in layers, to 1 %, and so do the bytes that are alive at the peak. What the allocator reserves
does not: its free blocks are a smaller share of more layers. It is an estimate until all layers were recorded.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from distbench.search.space import Candidate
from distbench.search.sweep_child import Question, SweepChild
from distbench.show.units import disk_text
from distbench.simulate.hardware_file import Figure, Hardware
from distbench.simulate.recording import Collective, Recording, load_recordings
from distbench.simulate.replay import Simulation, fullest, slowest
from distbench.simulate.simulation_text import assumptions
from distbench.spec.errors import UserError
from distbench.spec.plan import folded
from distbench.spec.printable_text import count_text

# Parameters of a scenario that say how many layers its model has, and the numbers that are recorded in their place.
LAYERS = ("num_layers", "n_layers", "n_layer", "layers", "depth")
FEW = (2, 4)
CLOSE = 0.01  # predicted times that are nearer are not told apart
SURELY = 1.02  # of the memory that a plan needs: free blocks may be too small for what it asks for
COMPUTE, IDLE, BUBBLE = "compute", "idle", "bubble"
CommunicationPath = tuple[str, str, str]


@dataclass(frozen=True)
class Prediction:
    """What a candidate's step would take.

    Args:
        parts_s: `compute`, `idle` (no kernel runs, for the host has issued none) and, of a pipeline, `bubble`, seconds.
        exposed_s: exposed communication by (mesh dim, collective, owner).
        implicit_s: exposed communication of redistributions that nobody asked for, by (owner, redistribution).
        reserved_bytes: by the allocator at its peak.
        live_bytes: of that, alive at the peak.
        is_whole: all layers were recorded.
        fits: whether that many bytes are there and the reserve is left free; None where it is not known.
        is_tight: it fits only because the allocator gives back what it cached.
        takes_reserve: it does not fit, but would without a reserve.
        assumed: what a reader must know of the figures: what was guessed, fitted, extrapolated and left out.
    """

    candidate: Candidate
    step_s: float
    parts_s: Mapping[str, float]
    exposed_s: Mapping[CommunicationPath, float]
    implicit_s: Mapping[tuple[str, str], float]
    reserved_bytes: float
    is_whole: bool
    num_parameters: int
    batch_size: int
    num_tokens: int | None
    fits: bool | None = None
    is_tight: bool = False
    takes_reserve: bool = False
    live_bytes: float = 0.0
    assumed: Sequence[str] = ()

    @property
    def tokens_per_s(self) -> float:
        """Tokens (samples, where the scenario names none) a second, of all devices."""
        return (self.num_tokens or self.batch_size) / self.step_s


def layers_of(base: Mapping[str, Any], swept: Collection[str] = ()) -> str | None:
    """The parameter that says how many layers there are, where there are more than need be recorded.

    Args:
        swept: parameters that take several values, which candidates differ by.
    """
    names = (name for name in LAYERS if type(base.get(name)) is int and base[name] > FEW[-1])
    return next((name for name in names if name not in swept), None)


def with_memory(hardware: Hardware, memory_bytes: float | None) -> Hardware:
    """The same machine with as much memory as --memory says."""
    if memory_bytes is None:
        return hardware
    figure = Figure(int(memory_bytes), "published", "--memory")
    return replace(hardware, figures={**hardware.figures, "memory_bytes": figure})


def predicted(
    candidate: Candidate,
    recordings: Sequence[tuple[int, Sequence[Recording]]],
    num_layers: int,
    hardware: Hardware,
    float8: tuple[str, ...] = (),
) -> Prediction:
    """From recordings of (layers, step by each of some ranks); of one as it is, of two on the line through both at
    `num_layers`. Time is the slowest rank's, memory the fullest one's. What is alive at the peak lies on that line too.
    What the allocator reserves beyond it is taken to grow with the square root of it: in plans recorded whole it grows
    more slowly than what is alive (`python -m benchmarks.memory_estimates`).

    Args:
        float8: patterns of modules whose matmuls are in float8.

    Raises:
        UserError: the recordings cannot be replayed on this hardware.
    """
    points = [(layers, _of(candidate, ranks, hardware, float8)) for layers, ranks in recordings]
    if len(points) == 1:
        return points[0][1]
    (few, low), (more, high) = points
    share = (num_layers - few) / (more - few)
    live = _line(low.live_bytes, high.live_bytes, share)
    growth = live / high.live_bytes if high.live_bytes else 1.0
    prediction = replace(
        high,
        step_s=_line(low.step_s, high.step_s, share),
        parts_s=_lines(low.parts_s, high.parts_s, share),
        exposed_s=_lines(low.exposed_s, high.exposed_s, share),
        implicit_s=_lines(low.implicit_s, high.implicit_s, share),
        reserved_bytes=live + (high.reserved_bytes - high.live_bytes) * math.sqrt(max(growth, 0.0)),
        live_bytes=live,
        num_parameters=round(_line(low.num_parameters, high.num_parameters, share)),
        is_whole=False,
    )
    # Estimates may be a tenth too large or too small, so only what is alive rules a plan out.
    fits = False if live > hardware.usable_bytes else None
    is_near = fits is False and live <= hardware["memory_bytes"]
    return replace(prediction, fits=fits, is_tight=False, takes_reserve=is_near)


def _of(
    candidate: Candidate, recordings: Sequence[Recording], hardware: Hardware, float8: tuple[str, ...]
) -> Prediction:
    ranks = Simulation.all_of(recordings, hardware, expandable=False, float8=float8)
    simulation = slowest(ranks)
    head, parts = simulation.recording.head, simulation.parts
    bubble = {BUBBLE: parts.bubble_s} if head.pipeline is not None else {}
    exposed: dict[CommunicationPath, float] = defaultdict(float)
    for key, seconds in simulation.exposed_s.items():
        exposed[key.mesh_dim, key.kind, key.owner] += seconds
    implicit: dict[tuple[str, str], float] = defaultdict(float)
    for span in simulation.timed.spans:
        if isinstance(span.what, Collective) and span.what.explicit is False:
            implicit[folded(span.what.owner), span.what.redistribution] += span.end_s - span.start_s
    fits = all(one.memory_usable.out_of_memory is None for one in ranks)
    return Prediction(
        candidate=candidate,
        step_s=simulation.timed.step_s,
        parts_s={COMPUTE: parts.compute_s, IDLE: max(parts.idle_s, 0.0), **bubble},
        exposed_s=exposed,
        implicit_s=implicit,
        reserved_bytes=fullest(ranks).memory.reserved_bytes,
        live_bytes=fullest(ranks).memory.live_bytes,
        is_whole=True,
        num_parameters=head.num_parameters,
        batch_size=head.batch_size,
        num_tokens=head.num_tokens,
        fits=fits,
        is_tight=any(one.memory_usable.num_retries > 0 for one in ranks),
        takes_reserve=not fits and all(one.memory_here.out_of_memory is None for one in ranks),
        assumed=assumptions(simulation),
    )


def _line(low: float, high: float, share: float) -> float:
    return low + (high - low) * share


def _lines(low: Mapping[Any, float], high: Mapping[Any, float], share: float) -> dict[Any, float]:
    keys = [*low, *(key for key in high if key not in low)]
    values = {key: _line(low.get(key, 0.0), high.get(key, 0.0), share) for key in keys}
    return {key: max(value, 0.0) for key, value in values.items()}


def require_same_work(first: Prediction, other: Prediction) -> str | None:
    """Why two candidates cannot be compared; None where they compute the same."""
    if first.num_parameters != other.num_parameters:
        parameters = count_text(other.num_parameters, "parameter")
        return f"its model has {parameters}, and the plan as written {first.num_parameters:,}"
    if first.batch_size != other.batch_size:
        return f"its global batch is {other.batch_size}, and that of the plan as written {first.batch_size}"
    if first.num_tokens != other.num_tokens:
        return f"its global batch has {other.num_tokens} tokens, and that of the plan as written {first.num_tokens}"
    return None


def reserve_text(hardware: Hardware) -> str:
    """`4.34 GB are left to the context, NCCL's buffers and workspaces`; empty for a host."""
    if hardware.host is not None:
        return ""
    return f"{disk_text(hardware['reserve_bytes'])} are left to the context, NCCL's buffers and workspaces"


def memory_for(hardware: Hardware, need_bytes: float) -> float:
    """The memory of a device of which so much is usable."""
    memory = need_bytes
    for _ in range(20):  # the reserve may be a share of the memory
        memory = need_bytes + with_memory(hardware, memory)["reserve_bytes"]
    return memory if hardware.host is None else need_bytes


def no_plan_fits(scenario: str, world: int, nearest: Prediction, hardware: Hardware, stopped: str = "") -> UserError:
    """That the memory is too small for every plan that was tried, and what the nearest would need.

    Args:
        stopped: why not all plans were tried; empty where they were.
    """
    memory_bytes, reserve = hardware["memory_bytes"], reserve_text(hardware)
    need = nearest.reserved_bytes
    about = "" if nearest.is_whole else "about "
    problem = (
        f"no plan of {scenario} on {count_text(world, 'device')} was found that fits into {disk_text(memory_bytes)}"
    )
    why = "; ".join(reason for reason in (reserve and f"of which {reserve}", stopped) if reason)
    problem += f" ({why})" if why else ""
    near = f"the nearest ({nearest.candidate.text}) needs {about}{disk_text(need)}"
    unit, name = (1e9, "GB") if need >= 1e10 else (1e6, "MB")
    enough = f"{math.ceil(memory_for(hardware, need * SURELY) / unit)}{name}"
    return UserError(f"{problem}; {near}; give --memory {enough} or more, a larger --world, or a smaller batch")


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
    _few_layers_work: bool = field(default=False, init=False)

    def outcomes(self, candidates: Sequence[Candidate], whole: bool = False) -> Iterator[tuple[Candidate, Any]]:
        """(candidate, prediction or why there is none) as answers come."""
        self.tell(len(candidates), 0)
        failed: list[tuple[Candidate, str]] = []
        for candidate, outcome in self._answers(candidates, whole):
            if isinstance(outcome, str) and self.layers and not whole and not self._few_layers_work:
                failed.append((candidate, outcome))
                continue
            self._few_layers_work = self._few_layers_work or not isinstance(outcome, str)
            self.tell(0, 1)
            yield candidate, outcome
        for result in failed if self._few_layers_work or not failed else self._without_few_layers(failed):
            self.tell(0, 1)
            yield result

    def _without_few_layers(self, failed: Sequence[tuple[Candidate, str]]) -> Iterator[tuple[Candidate, Any]]:
        """Outcomes of candidates of which none works with few layers: a plan may name layers that those lack."""
        self._few_layers_work = True
        first, *others = (candidate for candidate, _ in failed)
        ((_, outcome),) = self._answers([first], whole=True)
        if isinstance(outcome, str):
            yield from failed
            return
        self.layers = None
        yield first, outcome
        yield from self._answers(others, whole=True)

    def _answers(self, candidates: Sequence[Candidate], whole: bool) -> Iterator[tuple[Candidate, Any]]:
        few: list[dict[str, Any]] = [{self.layers: count} for count in FEW] if self.layers and not whole else [{}]
        questions = [
            Question("record", [{**plan.variant(self.base), **count} for count in few], plan.mesh)
            for plan in candidates
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
