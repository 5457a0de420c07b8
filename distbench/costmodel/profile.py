"""The cost of collectives on one machine: lines fitted to measured points, kept in a profile, asked for predictions.

A line is t = base + per_byte x payload (+ per_copied_byte x payload for each tensor dim that is not the first), with a
second slope beyond a knee where that halves the error. Payload is S as nccl-tests has it: the full gathered or
scattered buffer.
"""

import hashlib
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distbench.spec.errors import UserError, nearest

PROFILE_VERSION = 1
LOCAL_OPS = ("cut", "partition")
NATIVE_ALL_TO_ALL, DIRECT = "all_to_all_native", "direct"
# A second slope is fitted only if it leaves at most this share of an error that is there at all.
KNEE_GAIN, KNEE_MIN_SIZES, STRAIGHT_ERROR = 0.5, 5, 1e-3


@dataclass(frozen=True)
class Sample:
    """One measured point: payload in bytes, how often it is copied round besides (0 to 2 tensor dims), seconds."""

    payload_bytes: float
    num_copies: float
    seconds: float


@dataclass(frozen=True)
class Line:
    """The cost of one collective over one mesh dim.

    Args:
        op: "all_gather", "all_to_all", "all_reduce", "reduce_scatter", or local: "cut", "partition"; or
            "all_to_all_native", or "direct" over the whole mesh (its payload: `planning.Exchange.load`).
        mesh_dim: name of the mesh dim, or of all of them joined by "x".
        group_size: ranks in each of its groups.
        base_s: seconds of an empty one.
        per_byte_s: seconds of each payload byte, up to the knee.
        per_copied_byte_s: seconds more of each payload byte, for each tensor dim that is not the first.
        knee_bytes: payload where the second slope begins, if there is one.
        per_byte_beyond_s: seconds of each payload byte beyond the knee.
        error: median of |predicted / measured - 1| over the samples fitted, or given by hand.
        held_out_error: the same over samples that were not fitted.
        samples: what was fitted, (payload bytes, copies, seconds).
    """

    op: str
    mesh_dim: str
    group_size: int
    base_s: float
    per_byte_s: float
    per_copied_byte_s: float = 0.0
    knee_bytes: float | None = None
    per_byte_beyond_s: float = 0.0
    error: float = 0.0
    held_out_error: float | None = None
    samples: tuple[tuple[float, float, float], ...] = ()

    def seconds(self, payload_bytes: float, num_copies: float = 0) -> float:
        """Predicted seconds."""
        total = self.base_s + self.per_copied_byte_s * payload_bytes * num_copies
        if self.knee_bytes is None or payload_bytes <= self.knee_bytes:
            return total + self.per_byte_s * payload_bytes
        return total + self.per_byte_s * self.knee_bytes + self.per_byte_beyond_s * (payload_bytes - self.knee_bytes)


def fit_line(
    op: str, mesh_dim: str, group_size: int, samples: Sequence[Sample], held_out: Sequence[Sample] = ()
) -> Line:
    """Fit one line by non-negative least squares on the relative error, then centre it on the samples' median.

    Args:
        op: the collective.
        mesh_dim: name of the mesh dim.
        group_size: ranks in each group.
        samples: two sizes at least, each of more than 0 seconds.
        held_out: samples to judge the line by.

    Raises:
        ValueError: too few sizes.
    """
    sizes = sorted({sample.payload_bytes for sample in samples})
    if len(sizes) < 2:
        raise ValueError(f"a line of {op} over {mesh_dim} needs samples of two sizes, there are {len(sizes)}")
    blank = Line(op, mesh_dim, group_size, 0.0, 0.0)
    best, miss = _fit(blank, samples, None)
    if len(sizes) >= KNEE_MIN_SIZES and miss > STRAIGHT_ERROR * math.sqrt(len(samples)):
        bent = min((_fit(blank, samples, knee) for knee in sizes[1:-1]), key=lambda fitted: fitted[1])
        if bent[1] <= KNEE_GAIN * miss:
            best = bent[0]
    best = _centred(best, samples)
    points = tuple((sample.payload_bytes, sample.num_copies, sample.seconds) for sample in samples)
    held_out_error = relative_error(best, held_out) if held_out else None
    return replace(best, error=relative_error(best, samples), held_out_error=held_out_error, samples=points)


def relative_error(line: Line, samples: Sequence[Sample]) -> float:
    """Median of |predicted / measured - 1|."""
    return float(np.median([abs(line.seconds(s.payload_bytes, s.num_copies) / s.seconds - 1) for s in samples]))


def _centred(line: Line, samples: Sequence[Sample]) -> Line:
    """Scaled so that half of the samples are dearer: squares of relative errors favour what is too cheap."""
    factor = float(np.median([s.seconds / line.seconds(s.payload_bytes, s.num_copies) for s in samples]))
    costs = ("base_s", "per_byte_s", "per_copied_byte_s", "per_byte_beyond_s")
    return replace(line, **{name: getattr(line, name) * factor for name in costs})  # type: ignore[arg-type]


def _fit(blank: Line, samples: Sequence[Sample], knee: float | None) -> tuple[Line, float]:
    payload = np.array([sample.payload_bytes for sample in samples])
    copied = payload * [sample.num_copies for sample in samples]
    seconds = np.array([sample.seconds for sample in samples])
    below = payload if knee is None else np.minimum(payload, knee)
    beyond = payload - below
    columns = np.stack([np.ones_like(payload), below, beyond, copied], axis=1) / seconds[:, None]
    solution, miss = nonnegative_least_squares(columns, np.ones_like(seconds))
    names = ("base_s", "per_byte_s", "per_byte_beyond_s", "per_copied_byte_s")
    return replace(blank, knee_bytes=knee, **dict(zip(names, solution.tolist(), strict=True))), miss


def nonnegative_least_squares(
    columns: NDArray[np.float64], values: NDArray[np.float64]
) -> tuple[NDArray[np.float64], float]:
    """The non-negative x of least |columns x - values|, and that norm.

    Exact by trying every set of positive entries, which is cheap and cannot cycle for the handful of columns here
    (the optimum is an unconstrained least-squares solution on its own support: Lawson and Hanson 1974, chapter 23).

    Args:
        columns: (samples, parameters), few parameters.
        values: (samples,).
    """
    width = columns.shape[1]
    scale = np.linalg.norm(columns, axis=0)
    best, least = np.zeros(width), float(np.linalg.norm(values))
    for support in itertools.chain.from_iterable(itertools.combinations(range(width), n) for n in range(1, width + 1)):
        chosen = list(support)
        if not scale[chosen].all():
            continue
        part = np.linalg.lstsq(columns[:, chosen] / scale[chosen], values, rcond=None)[0] / scale[chosen]
        miss = float(np.linalg.norm(columns[:, chosen] @ part - values))
        if (part >= 0).all() and miss < least:
            best, least = np.zeros(width), miss
            best[chosen] = part
    return best, least


@dataclass(frozen=True)
class Prediction:
    """Predicted seconds, and by what share of them the prediction may be off."""

    seconds: float
    error: float


@dataclass(frozen=True)
class Profile:
    """What was measured of one machine, or written by hand for one that is not here.

    Args:
        machine: its name.
        backend: "gloo" or "nccl".
        torch: torch's version.
        mesh: mesh dim names to ranks, outermost first.
        lines: one for each op and mesh dim.
        source: where the numbers come from.
    """

    machine: str
    backend: str
    torch: str
    mesh: Mapping[str, int]
    lines: tuple[Line, ...]
    source: str = "measured by distbench calibrate"
    _by_key: dict[tuple[str, str, int], Line] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._by_key.update({(line.op, line.mesh_dim, line.group_size): line for line in self.lines})

    def line(self, op: str, mesh_dim: str, group_size: int) -> Line | None:
        """The line of an op over a mesh dim of this many ranks; None where there is none."""
        return self._by_key.get((op, mesh_dim, group_size))

    def predict(self, op: str, mesh_dim: str, payload_bytes: float, num_copies: int = 0) -> Prediction:
        """Seconds of one collective, with the line's held-out error (its fit error where nothing was held out).

        Raises:
            UserError: the profile has no such line.
        """
        line = self.line(op, mesh_dim, self.mesh.get(mesh_dim, 0))
        if line is None:
            known = sorted({f"{line.op} over {line.mesh_dim}" for line in self.lines})
            raise UserError(f"the profile has no {op} over {mesh_dim}; {nearest(f'{op} over {mesh_dim}', known)}")
        return Prediction(line.seconds(payload_bytes, num_copies), line_error(line))

    def natively(self) -> "Profile":
        """The same where an all-to-all runs as one; on gloo DTensor runs it as an all-gather unless told otherwise."""
        if self.backend != "gloo":
            return self
        native = [replace(line, op="all_to_all") for line in self.lines if line.op == NATIVE_ALL_TO_ALL]
        return replace(self, lines=(*(line for line in self.lines if line.op != "all_to_all"), *native))

    def digest(self) -> str:
        """A short hash of all that plans depend on: ranks whose digests differ would plan differently, and hang."""
        facts = [(x.op, x.mesh_dim, x.group_size, *(f.hex() for f in _parameters(x))) for x in self.lines]
        return hashlib.sha256(repr(sorted(facts)).encode()).hexdigest()[:16]

    def save(self, path: Path) -> None:
        """Write it as JSON, a line of the file for each line of the profile."""
        head = {name: getattr(self, name) for name in ("machine", "backend", "torch", "source")}
        texts = [json.dumps({"profile_version": PROFILE_VERSION, **head, "mesh": dict(self.mesh)})[1:-1]]
        lines = ",\n".join("  " + json.dumps(asdict(line)) for line in self.lines)
        path.write_text("{" + texts[0] + ',\n"lines": [\n' + lines + "\n]}\n")


def load_profile(path: Path) -> Profile:
    """Read what `Profile.save` wrote, or a hand-written file of the same fields.

    Raises:
        UserError: no such file, no such fields, or a version newer than ours.
    """
    try:
        record: dict[str, Any] = json.loads(path.read_text())
        if record.pop("profile_version") > PROFILE_VERSION:
            raise UserError(f"profile {path} is newer than this distbench; update distbench")
        lines = tuple(_line(fields) for fields in record.pop("lines"))
        return Profile(lines=lines, **{**record, "mesh": dict(record["mesh"])})
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"profile {path} cannot be read ({error}); write one with distbench calibrate") from error


def _line(fields: dict[str, Any]) -> Line:
    line = Line(**{**fields, "samples": tuple(map(tuple, fields.get("samples", ())))})
    if min(_parameters(line)) < 0:
        raise ValueError(f"{line.op} over {line.mesh_dim} has a negative cost")
    return line


def _parameters(line: Line) -> tuple[float, ...]:
    knee = math.inf if line.knee_bytes is None else line.knee_bytes
    numbers = (line.base_s, line.per_byte_s, line.per_copied_byte_s, line.per_byte_beyond_s, knee)
    return tuple(float(number) for number in numbers)


def line_error(line: Line) -> float:
    """The error to expect of a line's predictions."""
    return line.error if line.held_out_error is None else line.held_out_error


class MeasuredCost:
    """A profile's lines on one mesh; see `measured_cost`."""

    pads = True

    def __init__(self, lines: Mapping[tuple[str, int], Line]) -> None:
        self.lines = dict(lines)

    def seconds(self, op: str, mesh_dim: int, payload_bytes: float, num_copies: int) -> float:
        """See `planning.models.MeshCost`; a local step without a line costs nothing, as does a mesh dim of one rank."""
        line = self.lines.get((op, mesh_dim))
        return 0.0 if line is None else line.seconds(payload_bytes, num_copies)


def measured_cost(profile: Profile, mesh: Mapping[str, int]) -> MeasuredCost:
    """The profile's prices on a mesh whose dims it knows by name and size.

    Args:
        profile: what was measured.
        mesh: mesh dim names to ranks, outermost first.

    Raises:
        UserError: a collective over one of the mesh dims has no line.
    """
    return _measured_cost(profile.digest(), profile.lines, tuple(mesh.items()))


@lru_cache(maxsize=64)
def _measured_cost(digest: str, lines: tuple[Line, ...], mesh: tuple[tuple[str, int], ...]) -> MeasuredCost:
    by_key = {(line.op, line.mesh_dim, line.group_size): line for line in lines}
    found = {}
    for number, (name, size) in enumerate(mesh):
        for op in ("all_gather", "all_to_all", "all_reduce", "reduce_scatter", *LOCAL_OPS):
            line = by_key.get((op, name, size))
            if line is not None:
                found[op, number] = line
            elif size > 1 and op not in LOCAL_OPS:
                raise UserError(f"the profile has no {op} over {name} of {size} ranks; measure that mesh first")
    return MeasuredCost(found)
