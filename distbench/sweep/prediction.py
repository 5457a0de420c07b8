"""A candidate's predicted step: from recordings of a model of few layers extended linearly, or from one of them all.

Time extends linearly in layers, to 1 %; memory does not, for the allocator's free blocks are not in proportion: it is
an estimate until all layers were recorded.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from distbench.simulate.hardware.hardware_file import Figure, Hardware
from distbench.simulate.recording import Recording
from distbench.simulate.simulation import Simulation
from distbench.spec.errors import UserError
from distbench.spec.parallel import folded
from distbench.sweep.candidates import Candidate

# Parameters of a scenario that say how many layers its model has, and the numbers that are recorded in their place.
LAYERS = ("num_layers", "n_layers", "n_layer", "layers", "depth")
FEW = (2, 4)
BEYOND = 1.05
EXPOSED, COMPUTE, IDLE = "exposed", "compute", "idle"
Path = tuple[str, str, str]


@dataclass(frozen=True)
class Prediction:
    """What a candidate's step would take.

    Args:
        parts_s: `compute` and `idle` (no kernel runs, for the host has issued none), seconds.
        exposed_s: exposed communication by (mesh dim, collective, owner).
        moved_bytes: payload of collectives by (mesh dim, collective, owner).
        implicit_s: exposed communication of redistributions that nobody asked for, by (owner, redistribution).
        reserved_bytes: by the allocator at its peak.
        is_whole: all layers were recorded.
        fits: whether that many bytes are there; None where it is not known.
    """

    candidate: Candidate
    step_s: float
    parts_s: Mapping[str, float]
    exposed_s: Mapping[Path, float]
    moved_bytes: Mapping[Path, float]
    implicit_s: Mapping[tuple[str, str], float]
    reserved_bytes: float
    is_whole: bool
    num_parameters: int
    batch_size: int
    num_tokens: int | None
    fits: bool | None = None

    @property
    def tokens_per_s(self) -> float:
        """Tokens (samples, where the scenario names none) a second, of all devices."""
        return (self.num_tokens or self.batch_size) / self.step_s


def layers_of(base: Mapping[str, Any]) -> str | None:
    """The parameter that says how many layers there are, where there are more than need be recorded."""
    found = (name for name in LAYERS if type(base.get(name)) is int and base[name] > FEW[-1])
    return next(found, None)


def with_memory(hardware: Hardware, memory_bytes: float | None) -> Hardware:
    """The same machine with as much memory as --memory says."""
    if memory_bytes is None:
        return hardware
    figure = Figure(int(memory_bytes), "published", "--memory")
    return replace(hardware, figures={**hardware.figures, "memory_bytes": figure})


def predicted(
    candidate: Candidate, recordings: Sequence[tuple[int, Recording]], num_layers: int, hardware: Hardware
) -> Prediction:
    """From recordings of (layers, step); of one, as it is, of two, on the line through both at `num_layers`."""
    points = [(layers, _of(candidate, recording, hardware)) for layers, recording in recordings]
    if len(points) == 1:
        return points[0][1]
    (few, low), (more, high) = points
    share = (num_layers - few) / (more - few)
    found = replace(
        high,
        step_s=_line(low.step_s, high.step_s, share),
        parts_s=_lines(low.parts_s, high.parts_s, share),
        exposed_s=_lines(low.exposed_s, high.exposed_s, share),
        moved_bytes=_lines(low.moved_bytes, high.moved_bytes, share),
        implicit_s=_lines(low.implicit_s, high.implicit_s, share),
        reserved_bytes=_line(low.reserved_bytes, high.reserved_bytes, share),
        num_parameters=round(_line(low.num_parameters, high.num_parameters, share)),
        is_whole=False,
    )
    # Estimates are rather too small, so one that is beyond the memory by so much is believed.
    return replace(found, fits=False if found.reserved_bytes > BEYOND * hardware["memory_bytes"] else None)


def _of(candidate: Candidate, recording: Recording, hardware: Hardware) -> Prediction:
    simulation = Simulation(recording, hardware)
    head = recording.head
    exposed: dict[Path, float] = defaultdict(float)
    for key, seconds in simulation.exposed_s.items():
        exposed[key.mesh_dim, key.kind, key.owner] += seconds
    moved: dict[Path, float] = defaultdict(float)
    implicit: dict[tuple[str, str], float] = defaultdict(float)
    for one in recording.collectives:
        moved[one.mesh_dim, one.kind, folded(one.owner)] += one.payload_bytes
        if one.explicit is False:
            implicit[folded(one.owner), one.redistribution] += 0.0
    _implicit_times(simulation, implicit)
    return Prediction(
        candidate=candidate,
        step_s=simulation.timed.step_s,
        parts_s={COMPUTE: simulation.parts.compute_s, IDLE: max(simulation.parts.idle_s, 0.0)},
        exposed_s=exposed,
        moved_bytes=moved,
        implicit_s=implicit,
        reserved_bytes=simulation.memory.reserved_bytes,
        is_whole=True,
        num_parameters=head.num_parameters,
        batch_size=head.batch_size,
        num_tokens=head.num_tokens,
        fits=simulation.memory_here.out_of_memory is None,
    )


def _implicit_times(simulation: Simulation, found: dict[tuple[str, str], float]) -> None:
    """How long redistributions that nobody asked for take, exposed or not."""
    for span in simulation.timed.spans:
        what = span.what
        key = (folded(what.owner), getattr(what, "redistribution", ""))
        if key in found and getattr(what, "explicit", None) is False:
            found[key] += span.end_s - span.start_s


def _line(low: float, high: float, share: float) -> float:
    return low + (high - low) * share


def _lines(low: Mapping[Any, float], high: Mapping[Any, float], share: float) -> dict[Any, float]:
    keys = [*low, *(key for key in high if key not in low)]
    found = {key: _line(low.get(key, 0.0), high.get(key, 0.0), share) for key in keys}
    return {key: max(value, 0.0) for key, value in found.items()}


def require_same_work(first: Prediction, other: Prediction) -> str | None:
    """Why two candidates cannot be compared; None where they compute the same."""
    if first.num_parameters != other.num_parameters:
        return f"its model has {other.num_parameters:,} parameters, and the plan as written {first.num_parameters:,}"
    if first.batch_size != other.batch_size:
        return f"its global batch is {other.batch_size}, and that of the plan as written {first.batch_size}"
    return None


def no_plan_fits(scenario: str, world: int, nearest: Prediction, memory_bytes: float) -> UserError:
    """That the memory is too small for every plan that was tried, and what the nearest would need."""
    need = nearest.reserved_bytes / 1e9
    about = "" if nearest.is_whole else "about "
    what = f"no plan of {scenario} on {world} devices was found that fits into {memory_bytes / 1e9:.3g} GB"
    near = f"the nearest ({nearest.candidate.text}) needs {about}{need:.3g} GB"
    return UserError(f"{what}; {near}; give --memory {need * 1.02:.0f}GB or more, a larger --world, or a smaller batch")
