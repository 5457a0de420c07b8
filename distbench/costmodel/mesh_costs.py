"""What a planner asks: the price of a step on one mesh, by torch's own constants or by a profile."""

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Protocol

from distbench.costmodel.lines import ALL_REDUCE, ALL_TO_ALL, COLLECTIVES, LOCAL_OPS, Line, lines_by_key
from distbench.costmodel.profile import Profile
from distbench.spec.errors import UserError
from distbench.spec.levels import layout_text, level_of, mesh_shapes

# torch.distributed.tensor._collective_utils (2.11 to 2.15): GB/s and microseconds of an Ampere or Hopper cluster.
TORCH_GIB_PER_S, TORCH_HOP_US, TORCH_LAUNCH_US = 87.7, 0.6, 6.6
TORCH_BETWEEN_HOSTS_SHARE, TORCH_BETWEEN_HOSTS_HOP_US, TORCH_ALL_TO_ALL_US = 0.22, 2.7, 1.0


class MeshCost(Protocol):
    """Prices steps on one mesh. It must be hashable, and more bytes or copies must never be cheaper."""

    @property
    def pads(self) -> bool:
        """Whether it wants the payload as sent, padding included, or the even share of an uneven tensor."""

    def __hash__(self) -> int:
        """Models are keys of caches."""

    def seconds(self, op: str, mesh_dim: int, payload_bytes: float, num_copies: int) -> float:
        """Seconds of a step over the mesh dim of this number.

        Args:
            op: one of COLLECTIVES, or of LOCAL_OPS.
            payload_bytes: the full gathered or scattered buffer; for a local step what it copies.
            num_copies: tensor dims gathered or scattered that are not the first (0 to 2).
        """


class TorchCost:
    """torch's own `one_step_redistribute_cost`, in seconds; by torch's count, a host holds one CPU device."""

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
        """See `MeshCost`."""
        if op in LOCAL_OPS:
            return 0.0
        base_s, per_byte_s = self._terms[op, mesh_dim]
        return base_s + per_byte_s * payload_bytes


class MeasuredCost:
    """A profile's lines on one mesh; see `measured_cost`."""

    pads = True

    def __init__(self, lines: Mapping[tuple[str, int], Line]) -> None:
        self.lines = dict(lines)

    def seconds(self, op: str, mesh_dim: int, payload_bytes: float, num_copies: int) -> float:
        """See `MeshCost`; a local step without a line costs nothing, as does a mesh dim of one rank."""
        line = self.lines.get((op, mesh_dim))
        return 0.0 if line is None else line.seconds(payload_bytes, num_copies)


def measured_cost(profile: Profile, mesh: Mapping[str, int]) -> MeasuredCost:
    """The profile's prices on a mesh (names to ranks, outermost first); the same object for the same lines.

    Raises:
        UserError: a collective over one of the mesh dims has no line.
    """
    return _measured_cost(profile.lines, tuple(mesh.items()))


def profile_on(profile: Profile, mesh: Mapping[str, int], hosts: Sequence[str] = ()) -> Profile:
    """The profile with the lines of a mesh on these hosts, each rank's in rank order (none: as `Profile.on`).

    Raises:
        UserError: a collective over one of the mesh dims has no line there.
    """
    found = profile.on(mesh, hosts)
    try:
        measured_cost(found, mesh)
    except UserError as error:
        if not (hosts and profile.hosts):
            raise
        shapes = mesh_shapes(mesh, hosts)
        lacking = next(
            name
            for name, size in mesh.items()
            if size > 1 and not all(found.line(op, name, size) for op in COLLECTIVES)
        )
        raise UserError(
            f"it was measured with {layout_text(profile.hosts)}, here are {layout_text(hosts)}, and it has no line for "
            f"{lacking}, whose groups lie {level_of(shapes[lacking])} ({shapes[lacking]} ranks); run distbench "
            "calibrate on these hosts"
        ) from error
    return found


@lru_cache(maxsize=64)
def _measured_cost(lines: tuple[Line, ...], mesh: tuple[tuple[str, int], ...]) -> MeasuredCost:
    by_key = lines_by_key(lines)
    found = {}
    for mesh_dim, (name, size) in enumerate(mesh):
        for op in (*COLLECTIVES, *LOCAL_OPS):
            if line := by_key.get((op, name, size)):
                found[op, mesh_dim] = line
            elif size > 1 and op in COLLECTIVES:
                raise UserError(f"the profile has no {op} over {name} of {size} ranks; measure that mesh first")
    return MeasuredCost(found)
