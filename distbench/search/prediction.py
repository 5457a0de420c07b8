"""A candidate's predicted step: from recordings of a model of few layers extended linearly, or of one of them all.

Time extends linearly in layers, to 1 %, and so do the bytes that are alive at the peak. What the allocator reserves
does not: its free blocks are a smaller share of more layers. It is an estimate until all layers were recorded.
"""

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from distbench.search.space import Candidate
from distbench.show.units import disk_text
from distbench.simulate.hardware_file import Figure, Hardware
from distbench.simulate.recording import Recording
from distbench.simulate.simulation import Simulation, fullest, slowest
from distbench.simulate.simulation_text import assumptions
from distbench.spec.errors import UserError
from distbench.spec.plan import folded
from distbench.spec.safe_text import count_text

# Parameters of a scenario that say how many layers its model has, and the numbers that are recorded in their place.
LAYERS = ("num_layers", "n_layers", "n_layer", "layers", "depth")
FEW = (2, 4)
CLOSE = 0.01  # predicted times that are nearer are not told apart
SURELY = 1.02  # of the memory that a plan needs: free blocks may be too small for what it asks for
COMPUTE, IDLE, BUBBLE = "compute", "idle", "bubble"
Path = tuple[str, str, str]


@dataclass(frozen=True)
class Prediction:
    """What a candidate's step would take.

    Args:
        parts_s: `compute`, `idle` (no kernel runs, for the host has issued none) and, of a pipeline, `bubble`, seconds.
        exposed_s: exposed communication by (mesh dim, collective, owner).
        moved_bytes: payload of collectives by (mesh dim, collective, owner).
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
    exposed_s: Mapping[Path, float]
    moved_bytes: Mapping[Path, float]
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
    found = (name for name in LAYERS if type(base.get(name)) is int and base[name] > FEW[-1])
    return next((name for name in found if name not in swept), None)


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
    `num_layers`. Time is the slowest rank's, memory the fullest one's. What is alive at the peak lies on that line too;
    what is reserved is taken to exceed it by the same share as in the recording of more layers.

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
    found = replace(
        high,
        step_s=_line(low.step_s, high.step_s, share),
        parts_s=_lines(low.parts_s, high.parts_s, share),
        exposed_s=_lines(low.exposed_s, high.exposed_s, share),
        moved_bytes=_lines(low.moved_bytes, high.moved_bytes, share),
        implicit_s=_lines(low.implicit_s, high.implicit_s, share),
        reserved_bytes=live * high.reserved_bytes / high.live_bytes if high.live_bytes else high.reserved_bytes,
        live_bytes=live,
        num_parameters=round(_line(low.num_parameters, high.num_parameters, share)),
        is_whole=False,
    )
    # Estimates may be a tenth too large or too small, so only what is alive rules a plan out.
    fits = False if live > hardware.usable_bytes else None
    is_near = fits is False and live <= hardware["memory_bytes"]
    return replace(found, fits=fits, is_tight=False, takes_reserve=is_near)


def _of(
    candidate: Candidate, recordings: Sequence[Recording], hardware: Hardware, float8: tuple[str, ...]
) -> Prediction:
    ranks = Simulation.all_of(recordings, hardware, expandable=False, float8=float8)
    simulation = slowest(ranks)
    recording, parts = simulation.recording, simulation.parts
    head = recording.head
    bubble = {BUBBLE: parts.bubble_s} if head.pipeline is not None else {}
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
    fits = all(one.memory_usable.out_of_memory is None for one in ranks)
    return Prediction(
        candidate=candidate,
        step_s=simulation.timed.step_s,
        parts_s={COMPUTE: parts.compute_s, IDLE: max(parts.idle_s, 0.0), **bubble},
        exposed_s=exposed,
        moved_bytes=moved,
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
        return (
            f"its model has {count_text(other.num_parameters, 'parameter')}, and the plan as written "
            f"{first.num_parameters:,}"
        )
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
    what = f"no plan of {scenario} on {count_text(world, 'device')} was found that fits into {disk_text(memory_bytes)}"
    why = "; ".join(one for one in (reserve and f"of which {reserve}", stopped) if one)
    what += f" ({why})" if why else ""
    near = f"the nearest ({nearest.candidate.text}) needs {about}{disk_text(need)}"
    unit, name = (1e9, "GB") if need >= 1e10 else (1e6, "MB")
    enough = f"{math.ceil(memory_for(hardware, need * SURELY) / unit)}{name}"
    return UserError(f"{what}; {near}; give --memory {enough} or more, a larger --world, or a smaller batch")
