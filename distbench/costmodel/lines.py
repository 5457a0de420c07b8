"""What one step of a redistribution costs by its size: a line fitted to measured points.

t = base + per_byte x payload (+ per_copied_byte x payload for each tensor dim that is not the first, + per_message for
each message of a direct exchange), with a second slope beyond a knee where that halves the error. Payload is S as
nccl-tests has it: the full gathered or scattered buffer.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

ALL_GATHER, ALL_TO_ALL, ALL_REDUCE, REDUCE_SCATTER = "all_gather", "all_to_all", "all_reduce", "reduce_scatter"
COLLECTIVES = (ALL_GATHER, ALL_TO_ALL, ALL_REDUCE, REDUCE_SCATTER)
# From a replica to a shard, from a replica to a partial, and from a shard to a partial.
CUT, PARTITION, ZERO_FILL = "cut", "partition", "zero_fill"
LOCAL_OPS = (CUT, PARTITION, ZERO_FILL)
NATIVE_ALL_TO_ALL, DIRECT = "all_to_all_native", "direct"
COSTS = ("base_s", "per_byte_s", "per_copied_byte_s", "per_byte_beyond_s", "per_message_s")
# A second slope is fitted only if it leaves at most this share of an error that is there at all.
KNEE_GAIN, KNEE_MIN_SIZES, STRAIGHT_ERROR = 0.5, 5, 1e-3


@dataclass(frozen=True)
class Sample:
    """One measured point: payload in bytes, how often it is also copied (0 to 2 tensor dims), seconds, messages."""

    payload_bytes: float
    num_copies: float
    seconds: float
    num_messages: int = 0


@dataclass(frozen=True)
class Line:
    """The cost of one collective over one mesh dim, in groups of `group_size` ranks.

    Args:
        op: one of COLLECTIVES, LOCAL_OPS, NATIVE_ALL_TO_ALL, or DIRECT over the whole mesh (payload: `Exchange.load`).
        mesh_dim: name of the mesh dim, or of all of them joined by "x".
        base_s: seconds of an empty one.
        per_byte_s: seconds of each payload byte, up to the knee.
        per_copied_byte_s: seconds more of each payload byte, for each tensor dim that is not the first.
        knee_bytes: payload where the second slope begins, if there is one.
        per_byte_beyond_s: seconds of each payload byte beyond the knee.
        per_message_s: seconds of each message that the busiest rank sends or receives, of DIRECT.
        error: median of |predicted / measured - 1| over the samples fitted, or given by hand.
        held_out_error: the same over samples that were not fitted.
        hosts: how many ranks of a group each host has, as `levels` writes it; empty for unknown, as in older files.
        samples: what was fitted, (payload bytes, copies, seconds, messages); files of before lack the last.
    """

    op: str
    mesh_dim: str
    group_size: int
    base_s: float
    per_byte_s: float
    per_copied_byte_s: float = 0.0
    knee_bytes: float | None = None
    per_byte_beyond_s: float = 0.0
    per_message_s: float = 0.0
    error: float = 0.0
    held_out_error: float | None = None
    samples: tuple[tuple[float, ...], ...] = ()
    hosts: str = ""

    @property
    def key(self) -> tuple[str, str, int]:
        """What a profile has at most one line of: op, mesh dim, group size."""
        return self.op, self.mesh_dim, self.group_size

    @property
    def expected_error(self) -> float:
        """The share by which its predictions may be off."""
        return self.error if self.held_out_error is None else self.held_out_error

    @property
    def parameters(self) -> tuple[float, ...]:
        """COSTS and the knee (infinity for none): all that a prediction depends on."""
        knee = math.inf if self.knee_bytes is None else self.knee_bytes
        return (*(float(getattr(self, name)) for name in COSTS), float(knee))

    def seconds(self, payload_bytes: float, num_copies: float = 0, num_messages: int = 0) -> float:
        """Predicted seconds."""
        total = self.base_s + self.per_copied_byte_s * payload_bytes * num_copies + self.per_message_s * num_messages
        if self.knee_bytes is None or payload_bytes <= self.knee_bytes:
            return total + self.per_byte_s * payload_bytes
        return total + self.per_byte_s * self.knee_bytes + self.per_byte_beyond_s * (payload_bytes - self.knee_bytes)


def lines_by_key(lines: Sequence[Line]) -> dict[tuple[str, str, int], Line]:
    """Each line by its `key`.

    A zero-fill without a line has the partition's of its mesh dim, which writes as much: torch before 2.14 has no
    zero-fill to measure. For nothing, it and a cut would be taken in place of the partition.
    """
    found = {(ZERO_FILL, line.mesh_dim, line.group_size): line for line in lines if line.op == PARTITION}
    return found | {line.key: line for line in lines}


def fit_line(
    op: str, mesh_dim: str, group_size: int, samples: Sequence[Sample], held_out: Sequence[Sample] = ()
) -> Line:
    """Fit a line by non-negative least squares on the relative error, centred on the median; `held_out` judges it.

    Raises:
        ValueError: samples of fewer than two sizes.
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
    # Half of the samples shall take longer: squares of relative errors favour predictions that are too low.
    factor = float(np.median(1 / _over_measured(best, samples)))
    best = replace(best, **{name: getattr(best, name) * factor for name in COSTS})  # type: ignore[arg-type]
    return replace(
        best,
        error=relative_error(best, samples),
        held_out_error=relative_error(best, held_out) if held_out else None,
        samples=tuple((one.payload_bytes, one.num_copies, one.seconds, one.num_messages) for one in samples),
    )


def relative_error(line: Line, samples: Sequence[Sample]) -> float:
    """Median of |predicted / measured - 1|."""
    return float(np.median(np.abs(_over_measured(line, samples) - 1)))


def _over_measured(line: Line, samples: Sequence[Sample]) -> Floats:
    return np.array(
        [line.seconds(one.payload_bytes, one.num_copies, one.num_messages) / one.seconds for one in samples]
    )


def _fit(blank: Line, samples: Sequence[Sample], knee: float | None) -> tuple[Line, float]:
    """The line of least squared relative error with its knee there, and the root of the sum of these squares."""
    payload = np.array([sample.payload_bytes for sample in samples])
    copied = payload * [sample.num_copies for sample in samples]
    messages = np.array([sample.num_messages for sample in samples], dtype=float)
    seconds = np.array([sample.seconds for sample in samples])
    below = payload if knee is None else np.minimum(payload, knee)
    columns = np.stack([np.ones_like(payload), below, copied, payload - below, messages], axis=1) / seconds[:, None]
    solution, miss = nonnegative_least_squares(columns, np.ones_like(seconds))
    return replace(blank, knee_bytes=knee, **dict(zip(COSTS, solution.tolist(), strict=True))), miss


def nonnegative_least_squares(columns: Floats, values: Floats) -> tuple[Floats, float]:
    """The non-negative x of least |columns x - values|, and that norm.

    Args:
        columns: (samples, parameters); of any scale: some are in seconds, others in seconds a byte.
        values: (samples,).
    """
    from scipy.optimize import nnls

    scale = np.linalg.norm(columns, axis=0)
    scale[scale == 0] = 1
    solution, miss = nnls(columns / scale, values)
    return solution / scale, float(miss)
