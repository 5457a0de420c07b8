"""What a cost model is to the planner, and torch's own one; the measured one is `costmodel.profile.measured_cost`."""

import math
from collections.abc import Sequence
from typing import Protocol

from distbench.costmodel.profile import LOCAL_OPS

# torch.distributed.tensor._collective_utils (2.11 to 2.13): GB/s and microseconds of an Ampere or Hopper cluster.
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
        """Seconds of a step.

        Args:
            op: "all_gather", "all_to_all", "all_reduce", "reduce_scatter", or local: "cut", "partition".
            mesh_dim: number of the mesh dim.
            payload_bytes: the full gathered or scattered buffer; for a local step what it copies.
            num_copies: tensor dims gathered or scattered that are not the first (0 to 2).
        """


class TorchCost:
    """torch's own `one_step_redistribute_cost`, in seconds.

    Args:
        mesh_shape: ranks along each mesh dim.
        devices_per_host: as torch counts them; it counts one for every CPU.
    """

    pads = False

    def __init__(self, mesh_shape: Sequence[int], devices_per_host: int) -> None:
        self._terms: dict[tuple[str, int], tuple[float, float]] = {}
        for mesh_dim, size in enumerate(mesh_shape):
            between_hosts = math.prod(mesh_shape[mesh_dim:]) > devices_per_host
            hop_us = TORCH_BETWEEN_HOSTS_HOP_US if between_hosts else TORCH_HOP_US
            gib_per_s = TORCH_GIB_PER_S * (TORCH_BETWEEN_HOSTS_SHARE if between_hosts else 1)
            for op in ("all_gather", "all_to_all", "all_reduce", "reduce_scatter"):
                num_hops = (size - 1) * (2 if op == "all_reduce" else 1)
                base_us = TORCH_LAUNCH_US + num_hops * hop_us + (TORCH_ALL_TO_ALL_US if op == "all_to_all" else 0)
                self._terms[op, mesh_dim] = base_us * 1e-6, num_hops / size / gib_per_s / 2**30

    def seconds(self, op: str, mesh_dim: int, payload_bytes: float, num_copies: int) -> float:
        """See `MeshCost`."""
        if op in LOCAL_OPS:
            return 0.0
        base_s, per_byte_s = self._terms[op, mesh_dim]
        return base_s + per_byte_s * payload_bytes
