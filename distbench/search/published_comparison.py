"""Published steps next to their simulation, recorded once for equal steps.

Time is linear in micro-batches, so a row without published memory is recorded with few of them. Recordings are kept in
a folder, named by a digest of their inputs.
"""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distbench.search.sweep_child import Question, SweepChild
from distbench.simulate.hardware_file import Figure, Hardware, load_hardware
from distbench.simulate.published import Published
from distbench.simulate.recording import Recording, load_recordings
from distbench.simulate.replay import Simulation, fullest, slowest
from distbench.spec import Entry, find
from distbench.spec.errors import UserError
from distbench.spec.job import MESH, brief_mesh, parse_choices, variants_of
from distbench.spec.mesh import mesh_size
from distbench.spec.plan import LOSS

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


@dataclass(frozen=True)
class _Step:
    """A row's step: the scenario, its variant, and the numbers of micro-batches that are recorded instead."""

    row: Published
    entry: Entry
    variant: dict[str, Any]
    mesh: dict[str, int]

    @property
    def microbatches(self) -> int:
        """The step's own micro-batches."""
        value = self.variant.get("microbatches")
        return value if type(value) is int else 1

    @property
    def recorded(self) -> tuple[int, ...]:
        """Numbers of micro-batches to record."""
        has_batch = type(self.variant.get("batch")) is int
        is_long = self.microbatches > MICROBATCHES[-1] and has_batch and self.row.reserved_gib is None
        return MICROBATCHES if is_long else (self.microbatches,)

    def question(self, microbatches: int) -> Question:
        """Return the query for a number of micro-batches. Compilation is a rule of the replay."""
        changes: dict[str, Any] = {"compiled": False} if "compiled" in self.variant else {}
        if microbatches != self.microbatches:
            batch = self.variant["batch"] * microbatches // self.microbatches
            changes |= {"microbatches": microbatches, "batch": batch}
        return Question("record", [{**self.variant, **changes}], self.mesh)


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
        for question in map(step.question, step.recorded):
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
    seconds: dict[int, float] = {}
    for microbatches in step.recorded:
        file = files[_key(step.question(microbatches))]
        if isinstance(file, str):
            raise UserError(file)
        recordings = [_as_run(recording, row) for recording in load_recordings(file)]
        float8 = LAYERS_IN_FLOAT8 if row.dtype == "float8" else ()
        ranks = Simulation.all_of(recordings, machine, row.expandable_segments == "yes", float8)
        seconds[microbatches] = slowest(ranks).timed.step_s
    reserved = float(fullest(ranks).memory.reserved_bytes) if row.reserved_gib is not None else None
    head = ranks[0].recording.head
    tokens = (head.num_tokens or head.batch_size) * step.microbatches / microbatches
    return Compared(
        row, _on_line(seconds, step.microbatches), tokens / mesh_size(step.mesh) / row.tokens_per_s, reserved
    )


def _machine(row: Published) -> Hardware:
    hardware = load_hardware(row.hardware)
    own = {name: Figure(value, "published", row.source) for name, value in row.figures.items()}
    return dataclasses.replace(hardware, figures={**hardware.figures, **own})


def _as_run(recording: Recording, row: Published) -> Recording:
    """Return the recording with layers and loss compiled if the row's were."""
    names = tuple(f"layers.{number}" for number in range(MAX_LAYERS)) if row.mode == "compile" else ()
    names = (*names, LOSS) if row.loss == "compiled" else names
    return dataclasses.replace(recording, head=dataclasses.replace(recording.head, compiled=names))


def _on_line(seconds: Mapping[int, float], microbatches: int) -> float:
    """Return the time of a number of micro-batches, linear in recorded ones.

    >>> _on_line({1: 3.0, 2: 5.0}, 10)
    21.0
    """
    (first, first_s), (last, last_s) = min(seconds.items()), max(seconds.items())
    return first_s + (last_s - first_s) * (microbatches - first) / max(last - first, 1)
