"""A cost profile: lines fitted to measured collectives, as a file, and the price of a step on one mesh."""

import hashlib
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import product
from pathlib import Path
from typing import Annotated, Protocol

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from distbench.spec.errors import UserError
from distbench.spec.file_io import shown, write_whole
from distbench.spec.json_decoder import Amount, Bytes, Duration, Format, Name, Size, Time, is_of_type, read_record
from distbench.spec.mesh import (
    SHAPE,
    fits,
    layout_text,
    level_of,
    mesh_shapes,
    more_like,
    ranks_per_host,
    sizes_of,
    slowest,
)

Floats = NDArray[np.float64]

ALL_GATHER, ALL_TO_ALL, ALL_REDUCE, REDUCE_SCATTER = "all_gather", "all_to_all", "all_reduce", "reduce_scatter"
COLLECTIVES = (ALL_GATHER, ALL_TO_ALL, ALL_REDUCE, REDUCE_SCATTER)
# From a replica to a shard, from a replica to a partial, and from a shard to a partial.
CUT, PARTITION, ZERO_FILL = "cut", "partition", "zero_fill"
LOCAL_OPS = (CUT, PARTITION, ZERO_FILL)
NATIVE_ALL_TO_ALL, DIRECT = "all_to_all_native", "direct"
COSTS = ("base_s", "per_byte_s", "per_copied_byte_s", "per_byte_beyond_s", "per_message_s")
# A second slope is fitted only if it reduces a nonzero error to at most this share.
KNEE_GAIN, KNEE_MIN_SIZES, STRAIGHT_ERROR = 0.5, 5, 1e-3


@dataclass(frozen=True)
class Sample:
    """One measured point: payload in bytes, number of copies (0 to 2 tensor dims), seconds, messages."""

    payload_bytes: float
    num_copies: float
    seconds: float
    num_messages: float = 0


# Seconds per byte, at most 1: every link is faster than one byte per second.
PerByte = Annotated[float, Meta(ge=0, le=1, description="a number from 0 to 1")]
Point = Annotated[
    tuple[Amount, ...],
    Meta(min_length=3, max_length=4, description="a point (payload bytes, copies, seconds, messages)"),
]
Shape = Annotated[
    str,
    Meta(
        pattern=rf"^(?:{SHAPE.pattern})?\Z",
        description="ranks of a group on each of its hosts, such as 4, 1+1 or 2|1+1",
    ),
]


class Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The cost of one collective over one mesh dim, in groups of `group_size` ranks: a line fitted to measured points.

    t = base + per_byte x payload (+ per_copied_byte x payload for each tensor dim that is not the first, + per_message
    for each message of a direct exchange), with a second slope beyond a knee if that halves the error. Payload is S as
    in nccl-tests: the full gathered or scattered buffer.
    """

    op: Name  # one of COLLECTIVES, LOCAL_OPS, NATIVE_ALL_TO_ALL, or DIRECT over the whole mesh (see `Exchange.load`)
    mesh_dim: Name  # or all of them joined by "x"
    group_size: Size
    base_s: Duration
    per_byte_s: PerByte
    per_copied_byte_s: PerByte = 0.0
    knee_bytes: Bytes | None = None  # payload where the second slope begins
    per_byte_beyond_s: PerByte = 0.0  # beyond the knee
    per_message_s: Duration = 0.0  # per message that the busiest rank sends or receives, of DIRECT
    error: Amount = 0.0  # median of |predicted / measured - 1| over the samples fitted, or set by hand
    held_out_error: Amount | None = None  # the same over samples that were not fitted
    samples: tuple[Point, ...] = ()  # the points fitted; older files lack the messages
    hosts: Shape = ""  # how many ranks of a group each host has; empty for unknown, as in older files

    @property
    def key(self) -> tuple[str, str, int]:
        """Key of a line, unique in a profile: op, mesh dim, group size."""
        return self.op, self.mesh_dim, self.group_size

    @property
    def expected_error(self) -> float:
        """Expected relative error of predictions."""
        return self.error if self.held_out_error is None else self.held_out_error

    @property
    def worst_error(self) -> float:
        """Largest |predicted / measured - 1| of the samples fitted; 0 without samples."""
        ratios = (
            self.seconds(payload_bytes, num_copies, *num_messages) / seconds
            for payload_bytes, num_copies, seconds, *num_messages in self.samples
        )
        return max((abs(ratio - 1) for ratio in ratios), default=0.0)

    @property
    def parameters(self) -> tuple[float, ...]:
        """All parameters of a prediction: COSTS and the knee (infinity without a knee)."""
        knee = math.inf if self.knee_bytes is None else self.knee_bytes
        return (*(float(getattr(self, name)) for name in COSTS), float(knee))

    def seconds(self, payload_bytes: float, num_copies: float = 0, num_messages: float = 0) -> float:
        """Return predicted seconds."""
        total = self.base_s + self.per_copied_byte_s * payload_bytes * num_copies + self.per_message_s * num_messages
        if self.knee_bytes is None or payload_bytes <= self.knee_bytes:
            return total + self.per_byte_s * payload_bytes
        return total + self.per_byte_s * self.knee_bytes + self.per_byte_beyond_s * (payload_bytes - self.knee_bytes)


def lines_by_key(lines: Sequence[Line]) -> dict[tuple[str, str, int], Line]:
    """Map each line's `key` to the line.

    A zero-fill without a line gets the line of its mesh dim's partition, which writes as much, because torch before
    2.14 has no zero-fill to measure. A free zero-fill and a cut would replace the partition.
    """
    by_key = {(ZERO_FILL, line.mesh_dim, line.group_size): line for line in lines if line.op == PARTITION}
    return by_key | {line.key: line for line in lines}


def fit_line(
    op: str,
    mesh_dim: str,
    group_size: int,
    samples: Sequence[Sample],
    held_out: Sequence[Sample] = (),
    is_straight: bool = False,
) -> Line:
    """Fit a line by non-negative least squares on the relative error, centred on the median; `held_out` samples
    validate it. A straight line has no knee.

    Raises ValueError for samples of fewer than two sizes.
    """
    sizes = sorted({sample.payload_bytes for sample in samples})
    if len(sizes) < 2:
        raise ValueError(f"a line of {op} over {mesh_dim} needs samples of two sizes, but has {len(sizes)}")
    blank = Line(op, mesh_dim, group_size, 0.0, 0.0)
    best, miss = _fit(blank, samples, None)
    if not is_straight and len(sizes) >= KNEE_MIN_SIZES and miss > STRAIGHT_ERROR * math.sqrt(len(samples)):
        bent = min((_fit(blank, samples, knee) for knee in sizes[1:-1]), key=lambda fitted: fitted[1])
        if bent[1] <= KNEE_GAIN * miss:
            best = bent[0]
    # The line is centred on the median, because squares of relative errors would favour predictions that are too low.
    factor = float(np.median(1 / _over_measured(best, samples)))
    best = msgspec.structs.replace(best, **{name: getattr(best, name) * factor for name in COSTS})
    return msgspec.structs.replace(
        best,
        error=relative_error(best, samples),
        held_out_error=relative_error(best, held_out) if held_out else None,
        samples=tuple((point.payload_bytes, point.num_copies, point.seconds, point.num_messages) for point in samples),
    )


def relative_error(line: Line, samples: Sequence[Sample]) -> float:
    """Return the median of |predicted / measured - 1|."""
    return float(np.median(np.abs(_over_measured(line, samples) - 1)))


def _over_measured(line: Line, samples: Sequence[Sample]) -> Floats:
    predicted = [line.seconds(sample.payload_bytes, sample.num_copies, sample.num_messages) for sample in samples]
    return np.array(predicted) / [sample.seconds for sample in samples]


def _fit(blank: Line, samples: Sequence[Sample], knee: float | None) -> tuple[Line, float]:
    """Return the line of least squared relative error with its knee there, and the root of the sum of these squares."""
    payload = np.array([sample.payload_bytes for sample in samples])
    copied = payload * [sample.num_copies for sample in samples]
    messages = np.array([sample.num_messages for sample in samples], dtype=float)
    seconds = np.array([sample.seconds for sample in samples])
    below = payload if knee is None else np.minimum(payload, knee)
    columns = np.stack([np.ones_like(payload), below, copied, payload - below, messages], axis=1) / seconds[:, None]
    solution, miss = nonnegative_least_squares(columns, np.ones_like(seconds))
    costs = dict(zip(COSTS, solution.tolist(), strict=True))
    return msgspec.structs.replace(blank, knee_bytes=knee, **costs), miss


def nonnegative_least_squares(columns: Floats, values: Floats) -> tuple[Floats, float]:
    """Return the non-negative x that minimizes |columns x - values|, and that norm.

    Args:
        columns: (samples, parameters), in any units.
        values: (samples,).
    """
    from scipy.optimize import nnls

    scale = np.linalg.norm(columns, axis=0)
    scale[scale == 0] = 1
    solution, miss = nnls(columns / scale, values)
    return solution / scale, float(miss)


# 2: `hosts`, of the profile and of each line.
PROFILE_VERSION = 2
FORMAT = Format("profile", "write a profile with distbench calibrate", "profile_version", PROFILE_VERSION)


@dataclass(frozen=True)
class Profile:
    """The lines of one machine, measured or written by hand."""

    machine: str
    backend: str  # "gloo" or "nccl"
    torch: str
    mesh: Mapping[str, Size]  # mesh dim names to ranks, outermost first
    lines: tuple[Line, ...]  # one per op and mesh dim, and per op and shape of groups that no mesh dim has
    source: str = "measured by distbench calibrate"
    hosts: tuple[str, ...] = ()  # each rank's, in rank order; empty where unknown, as in older files

    def line(self, op: str, mesh_dim: str, group_size: int) -> Line | None:
        """Return the line of an op over a mesh dim of this many ranks; None if there is no line."""
        return self._by_key.get((op, mesh_dim, group_size))

    @cached_property
    def _by_key(self) -> dict[tuple[str, str, int], Line]:
        return lines_by_key(self.lines)

    def on(self, mesh: Mapping[str, int], hosts: Sequence[str] = ()) -> "Profile":
        """Return the profile for a mesh (names to ranks, outermost first) over all ranks on `hosts`, in rank order.

        Without hosts, each host is assumed to have as many ranks as in the measurement.
        """
        hosts = tuple(hosts) or more_like(self.hosts, math.prod(mesh.values()))
        if not self.hosts or len(hosts) != math.prod(mesh.values()):
            return self
        return replace(self, hosts=hosts).of_shapes(
            mesh, mesh_shapes(mesh, hosts), by_name_only=ranks_per_host(hosts) != ranks_per_host(self.hosts)
        )

    def of_shapes(self, mesh: Mapping[str, int], shapes: Mapping[str, str], by_name_only: bool = False) -> "Profile":
        """Return the profile with lines for each mesh dim, chosen by the placement of its groups on hosts, not by name.

        A mesh dim gets the line of its own name if the shapes are equal, else any line of its shape. If groups of a
        mesh dim differ in shape and have no common line, the groups that cross most hosts count. A profile without
        hosts is returned unchanged.

        Args:
            shapes: placement of the groups (`spec.mesh.SHAPE`) by mesh dim, or by all mesh dims joined by "x".
            by_name_only: hosts have another number of ranks, so lines of other mesh dims do not apply.
        """
        if not shapes or not any(line.hosts for line in self.lines):
            return self
        lines = dict(self._by_key)
        by_shape = {} if by_name_only else {(line.op, line.hosts): line for line in reversed(self.lines)}
        for op, (name, shape) in product(dict.fromkeys(line.op for line in self.lines), shapes.items()):
            key = op, name, mesh.get(name, math.prod(mesh.values()))
            own_line = lines.pop(key, None)
            fits_own = own_line is not None and fits(own_line.hosts, shape)
            line = own_line if own_line is not None and own_line.hosts in ("", shape) else by_shape.get((op, shape))
            # A line of groups of several shapes costs as much as its slowest groups.
            line = line or (own_line if fits_own else by_shape.get((op, slowest(shape))))
            if line is not None:
                lines[key] = msgspec.structs.replace(line, mesh_dim=name, group_size=key[2])
        return replace(self, lines=tuple(lines.values()))

    def natively(self) -> "Profile":
        """Return the profile for native all-to-alls, which DTensor on gloo replaces by all-gathers by default. An
        all-to-all without a native measurement keeps its price.
        """
        if self.backend != "gloo":
            return self
        native = [msgspec.structs.replace(line, op=ALL_TO_ALL) for line in self.lines if line.op == NATIVE_ALL_TO_ALL]
        replaced = {line.key for line in native}
        return replace(self, lines=(*(line for line in self.lines if line.key not in replaced), *native))

    def digest(self) -> str:
        """Return a short hash of all inputs of plans, to compare ranks: ranks with different plans would hang."""
        facts = [(*line.key, *(number.hex() for number in line.parameters)) for line in self.lines]
        return hashlib.sha256(repr(sorted(facts)).encode()).hexdigest()[:16]

    def save(self, path: Path) -> None:
        """Write the profile as JSON, one line of the file per line of the profile."""
        fields = {name: getattr(self, name) for name in ("machine", "backend", "torch", "source")}
        head = json.dumps({"profile_version": PROFILE_VERSION, **fields, "mesh": dict(self.mesh), "hosts": self.hosts})
        lines = ",\n".join("  " + json.dumps(msgspec.structs.asdict(line)) for line in self.lines)
        write_whole(path, head[:-1] + ',\n"lines": [\n' + lines + "\n]}\n")


def load_profile(path: Path | str) -> Profile:
    """Read a file of `Profile.save`, or a hand-written file of the same fields; UserError for other files."""
    return read_record(Path(path), Profile, FORMAT, _require_consistent)


def _require_consistent(profile: Profile) -> None:
    """Raise a ValueError if fields contradict each other."""
    num_ranks = math.prod(profile.mesh.values())
    if profile.hosts and len(profile.hosts) != num_ranks:
        raise ValueError(f"hosts has {len(profile.hosts)} entries, but mesh has {num_ranks} ranks, each with one host")
    for index, line in enumerate(profile.lines):
        if line.hosts and sizes_of(line.hosts) != {line.group_size}:
            problem = f"which does not describe groups of {line.group_size} ranks"
            raise ValueError(f"lines[{index}].hosts is {shown(line.hosts)}, {problem}")
        if not all(is_of_type(point[2], Time) for point in line.samples):
            raise ValueError(f"lines[{index}].samples has seconds that are not above 0 s and at most one day")
    counts = Counter(line.key for line in profile.lines)
    if twice := next((key for key, count in counts.items() if count > 1), None):
        raise ValueError("two lines have the same key: {} over {} in groups of {}".format(*map(shown, twice)))


# torch.distributed.tensor._collective_utils (2.11 to 2.15): GB/s and microseconds of an Ampere or Hopper cluster.
TORCH_GIB_PER_S, TORCH_HOP_US, TORCH_LAUNCH_US = 87.7, 0.6, 6.6
TORCH_BETWEEN_HOSTS_SHARE, TORCH_BETWEEN_HOSTS_HOP_US, TORCH_ALL_TO_ALL_US = 0.22, 2.7, 1.0


class MeshCost(Protocol):
    """Prices of steps on one mesh, hashable; more bytes or copies must never be cheaper."""

    @property
    def pads(self) -> bool:
        """Return whether payloads of uneven tensors include padding as sent; otherwise payloads are even shares."""

    def __hash__(self) -> int:
        """Return a hash, because models are keys of caches."""

    def seconds(self, op: str, mesh_dim: int, payload_bytes: float, num_copies: int) -> float:
        """Return the seconds of a step, one of COLLECTIVES or LOCAL_OPS, over mesh dim number `mesh_dim`.

        The payload is the full gathered or scattered buffer, or the local copy; `num_copies` counts tensor dims other
        than the first (0 to 2).
        """


class TorchCost:
    """torch's own `one_step_redistribute_cost`, in seconds; torch assumes one CPU device per host."""

    pads = False

    def __init__(self, mesh_shape: Sequence[int], devices_per_host: int) -> None:
        self._terms: dict[tuple[str, int], tuple[float, float]] = {}
        for mesh_dim, size in enumerate(mesh_shape):
            between_hosts = math.prod(mesh_shape[mesh_dim:]) > devices_per_host
            hop_us = TORCH_BETWEEN_HOSTS_HOP_US if between_hosts else TORCH_HOP_US
            gib_per_s = TORCH_GIB_PER_S * (TORCH_BETWEEN_HOSTS_SHARE if between_hosts else 1)
            for op in COLLECTIVES:
                num_hops = (size - 1) * (2 if op == ALL_REDUCE else 1)
                base_us = TORCH_LAUNCH_US + num_hops * hop_us + (TORCH_ALL_TO_ALL_US if op == ALL_TO_ALL else 0)
                self._terms[op, mesh_dim] = base_us * 1e-6, num_hops / size / gib_per_s / 2**30

    def seconds(self, op: str, mesh_dim: int, payload_bytes: float, num_copies: int) -> float:
        """Return the seconds of a step; see `MeshCost`."""
        if op in LOCAL_OPS:
            return 0.0
        base_s, per_byte_s = self._terms[op, mesh_dim]
        return base_s + per_byte_s * payload_bytes


class MeasuredCost:
    """A profile's lines on one mesh, by op and mesh dim; see `measured_cost`."""

    pads = True

    def __init__(self, lines: Mapping[tuple[str, int], Line]) -> None:
        self.lines = dict(lines)

    def seconds(self, op: str, mesh_dim: int, payload_bytes: float, num_copies: int) -> float:
        """Return the seconds of a step; 0 for a local step without a line and for a mesh dim of one rank."""
        line = self.lines.get((op, mesh_dim))
        return 0.0 if line is None else line.seconds(payload_bytes, num_copies)


def measured_cost(profile: Profile, mesh: Mapping[str, int]) -> MeasuredCost:
    """Return the profile's prices on a mesh (names to ranks, outermost first); the same object for the same lines.

    Raises:
        UserError: a collective over one of the mesh dims has no line.
    """
    return _measured_cost(profile.lines, tuple(mesh.items()))


def profile_on(profile: Profile, mesh: Mapping[str, int], hosts: Sequence[str] = ()) -> Profile:
    """Return the profile for a mesh on `hosts`, each rank's host in rank order; without hosts as in `Profile.on`.

    Raises:
        UserError: a collective over one of the mesh dims has no line on these hosts.
    """
    mesh_profile = profile.on(mesh, hosts)
    try:
        measured_cost(mesh_profile, mesh)
    except UserError as error:
        if not (hosts and profile.hosts):
            raise
        shapes = mesh_shapes(mesh, hosts)
        lacking = next(
            name
            for name, size in mesh.items()
            if size > 1 and not all(mesh_profile.line(op, name, size) for op in COLLECTIVES)
        )
        raise UserError(
            f"it was measured with {layout_text(profile.hosts)} and has no line for {lacking}, whose groups on this "
            f"run's {layout_text(hosts)} are {level_of(shapes[lacking])} ({shapes[lacking]} ranks); run distbench "
            "calibrate on these hosts"
        ) from error
    return mesh_profile


@lru_cache(maxsize=64)
def _measured_cost(lines: tuple[Line, ...], mesh: tuple[tuple[str, int], ...]) -> MeasuredCost:
    by_key = lines_by_key(lines)
    line_of = {}
    for mesh_dim, (name, size) in enumerate(mesh):
        for op in (*COLLECTIVES, *LOCAL_OPS):
            if line := by_key.get((op, name, size)):
                line_of[op, mesh_dim] = line
            elif size > 1 and op in COLLECTIVES:
                raise UserError(
                    f"the profile has no {op} over {name} of {size} ranks; run distbench calibrate on this mesh"
                )
    return MeasuredCost(line_of)
