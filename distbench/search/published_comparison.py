"""Published steps next to their simulation: recorded with few layers and micro-batches, once for equal steps.

Time is linear in layers, and in micro-batches; a row with published memory is recorded with all layers. Recordings are
kept in a folder, named by a digest of their inputs.
"""

import dataclasses
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from distbench.search.sweep_child import Question, SweepChild
from distbench.simulate.hardware_file import Figure, Hardware, load_hardware
from distbench.simulate.published import Published
from distbench.simulate.recording import Recording, load_recordings
from distbench.simulate.repeated_layers import LAYERS
from distbench.simulate.replay import Simulation, fullest, slowest
from distbench.spec import Entry, find
from distbench.spec.errors import UserError
from distbench.spec.job import MESH, brief_mesh, parse_choices, variants_of
from distbench.spec.mesh import mesh_size
from distbench.spec.plan import LOSS

FEW = (2, 4)  # layers that are recorded instead of all
MICROBATCHES = (1, 2)  # that are recorded instead of more
LAYERS_IN_FLOAT8 = ("layers.*",)
MAX_LAYERS = 1000


@dataclass(frozen=True)
class Compared:
    """A published row next to its simulation.

    Args:
        step_s: simulated; None without a simulation.
        reserved_bytes: simulated; None where nothing was published.
        why: the reason without a simulation.
    """

    row: Published
    step_s: float | None = None
    published_s: float | None = None
    reserved_bytes: float | None = None
    why: str = ""

    @property
    def log_error(self) -> float:
        """Logarithm of simulated over published step time; positive is too slow."""
        assert self.step_s is not None and self.published_s is not None
        return math.log(self.step_s / self.published_s)

    @property
    def memory_log_error(self) -> float | None:
        """Logarithm of simulated over published reserved memory."""
        if self.reserved_bytes is None or self.row.reserved_gib is None:
            return None
        return math.log(self.reserved_bytes / (1 << 30) / self.row.reserved_gib)


def _layers_of(base: Mapping[str, Any]) -> str | None:
    """Return the parameter for the number of layers, if the model has more layers than must be recorded."""
    return next((name for name in LAYERS if type(base.get(name)) is int and base[name] > FEW[-1]), None)


class _Point(NamedTuple):
    """One recorded size of a row's step."""

    layers: int
    microbatches: int


@dataclass(frozen=True)
class _Step:
    """A row's step: the scenario, its variant, and the sizes that are recorded instead."""

    row: Published
    entry: Entry
    variant: dict[str, Any]
    mesh: dict[str, int]

    @property
    def layers_name(self) -> str | None:
        """The parameter for the number of layers, unless all layers are recorded."""
        return None if self.row.reserved_gib is not None else _layers_of(self.variant)

    @property
    def whole(self) -> _Point:
        """The step's own size."""
        return _Point(self.variant.get(str(self.layers_name), 0), self.variant.get("microbatches", 1))

    @property
    def points(self) -> list[_Point]:
        """Sizes to record: the corners of a plane in layers and micro-batches."""
        layers, microbatches = self.whole
        parts = MICROBATCHES if microbatches > MICROBATCHES[-1] else (microbatches,)
        return [_Point(*sizes) for sizes in itertools.product(FEW if self.layers_name else (layers,), parts)]

    def variant_at(self, point: _Point) -> dict[str, Any]:
        """Return the variant of one recorded size. Compilation is a rule of the replay."""
        changes: dict[str, Any] = {"compiled": False} if "compiled" in self.variant else {}
        if self.layers_name:
            changes[self.layers_name] = point.layers
        if point.microbatches != self.whole.microbatches:
            batch = self.variant["batch"] * point.microbatches // self.whole.microbatches
            changes |= {"microbatches": point.microbatches, "batch": batch}
        return {**self.variant, **changes}


def compared(rows: Sequence[Published], folder: Path, on_progress: Callable[[int, int], None]) -> list[Compared]:
    """Simulate rows, in their order.

    Args:
        folder: keeps the recordings.
        on_progress: called with the number of recordings and of those that exist.
    """
    results: dict[int, Compared] = {}
    steps: dict[int, _Step] = {}
    for place, row in enumerate(rows):
        try:
            if row.not_simulated:
                raise UserError(row.not_simulated)
            steps[place] = _step_of(row)
        except UserError as error:
            results[place] = Compared(row, why=str(error))
    files: dict[str, Path | str] = {}  # by question: the recording or the reason without one
    by_scenario: dict[tuple[Path, str], dict[str, Question]] = defaultdict(dict)
    for step in steps.values():
        for point in step.points:
            question = Question("record", [step.variant_at(point)], step.mesh)
            by_scenario[step.entry.file, step.entry.name].setdefault(_key(question), question)
    on_progress(sum(map(len, by_scenario.values())), 0)
    for (file, scenario), questions in by_scenario.items():
        with SweepChild(file, scenario, folder, resume=True) as child:
            for place, answer in child.ask([*questions.values()]):
                reason = answer.get("left_out")
                files[[*questions][place]] = str(reason) if reason else Path(answer["answers"][0])
                on_progress(0, 1)
    for place, step in steps.items():
        try:
            results[place] = _compared(step, files)
        except UserError as error:
            results[place] = Compared(step.row, why=str(error))
    return [results[place] for place in range(len(rows))]


def _key(question: Question) -> str:
    return repr((sorted(question.variants[0].items()), sorted(question.mesh.items())))


def _step_of(row: Published) -> _Step:
    entries = find(row.scenario)
    if len(entries) != 1:
        raise UserError(f"{row.scenario} has {len(entries)} scenarios; name one")
    (entry,) = entries
    mesh = {**dict.fromkeys(entry.mesh, 1), **row.sizes}
    texts = (*row.choice_texts, "plan.loss=chunked") if row.loss == "chunked" else row.choice_texts
    variants = variants_of(entry, parse_choices(texts, entry.params), False)
    if len(variants) != 1:
        raise UserError(
            f"choices {row.choices!r} select {len(variants)} variants of {row.scenario}; choose one variant"
        )
    return _Step(row, entry, {**variants[0], MESH: brief_mesh(mesh)}, mesh)


def _compared(step: _Step, files: Mapping[str, Path | str]) -> Compared:
    row, machine = step.row, _machine(step.row)
    seconds: dict[_Point, float] = {}
    reserved = None
    for point in step.points:
        file = files[_key(Question("record", [step.variant_at(point)], step.mesh))]
        if isinstance(file, str):
            raise UserError(file)
        recordings = [_as_run(recording, row) for recording in load_recordings(file)]
        float8 = LAYERS_IN_FLOAT8 if row.dtype == "float8" else ()
        ranks = Simulation.all_of(recordings, machine, row.expandable_segments == "yes", float8)
        seconds[point] = slowest(ranks).timed.step_s
        head = ranks[0].recording.head
        if row.reserved_gib is not None and point == step.whole:
            reserved = float(fullest(ranks).memory.reserved_bytes)
    step_s = _on_plane(seconds, step.whole)
    tokens = (head.num_tokens or head.batch_size) * step.whole.microbatches / point.microbatches
    return Compared(row, step_s, tokens / mesh_size(step.mesh) / row.tokens_per_s, reserved)


def _machine(row: Published) -> Hardware:
    hardware = load_hardware(row.hardware)
    own = {name: Figure(value, "published", row.source) for name, value in row.figures.items()}
    return dataclasses.replace(hardware, figures={**hardware.figures, **own})


def _as_run(recording: Recording, row: Published) -> Recording:
    """Return the recording, with layers and loss compiled if the row's were."""
    names = tuple(f"layers.{number}" for number in range(MAX_LAYERS)) if row.mode == "compile" else ()
    names = (*names, LOSS) if row.loss == "compiled" else names
    return recording.with_compiled(*names)


def _on_plane(seconds: Mapping[_Point, float], whole: _Point) -> float:
    """Interpolate at `whole`, linearly in layers and in micro-batches (bilinear).

    >>> corners = {_Point(2, 1): 3.0, _Point(4, 1): 5.0, _Point(2, 2): 5.0, _Point(4, 2): 9.0}  # 1 + layers * parts
    >>> _on_plane(corners, _Point(10, 3))
    31.0
    """
    shares = []
    for axis in range(2):
        low, high = min(point[axis] for point in seconds), max(point[axis] for point in seconds)
        share = (whole[axis] - low) / (high - low) if high > low else 0.0
        shares.append({low: 1 - share, high: share} if high > low else {low: 1.0})
    return sum(shares[0][point.layers] * shares[1][point.microbatches] * value for point, value in seconds.items())
