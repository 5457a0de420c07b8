"""A rank's context: device, coordinate on the mesh and process groups."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from distbench.planning.cost_profile import Profile, load_profile, profile_on
from distbench.ranks.device import ends_within
from distbench.spec import Job, UserError

GROUP_WORKS_S = 30.0  # seconds, long enough for a first collective, which creates a communicator


@dataclass(frozen=True)
class RankContext:
    """The device, mesh, process groups and job of one rank."""

    rank: int
    device: torch.device
    mesh: DeviceMesh
    backend: str  # name of the backend for tensors on the device
    control: dist.ProcessGroup  # a gloo group of all ranks for barriers and gathers that are never timed
    seed: int  # for data and initial parameters
    profile: Profile | None = None
    check: str = "full"  # the check of steps against one device: a value of `spec.job.CHECKS`
    hosts: tuple[str, ...] = ()  # each rank's host, in rank order; empty without ranks

    @property
    def mesh_dims(self) -> tuple[str, ...]:
        """Names of the mesh dims, outermost first."""
        return tuple(self.mesh.mesh_dim_names or ())

    @property
    def mesh_shape(self) -> tuple[int, ...]:
        """Number of ranks along each mesh dim."""
        return tuple(self.mesh.mesh.shape)

    @property
    def coordinate(self) -> tuple[int, ...]:
        """This rank's index along each mesh dim."""
        return tuple(self.mesh.get_coordinate() or ())

    def size(self, mesh_dim: str) -> int:
        """Number of ranks along one mesh dim; 1 for a mesh dim that this mesh lacks."""
        return dict(zip(self.mesh_dims, self.mesh_shape, strict=True)).get(mesh_dim, 1)

    def index(self, mesh_dims: tuple[str, ...]) -> tuple[int, int]:
        """The index of this rank among the ranks that differ only along the given mesh dims, and the number of these
        ranks."""
        position, count = 0, 1
        for name, size, along in zip(self.mesh_dims, self.mesh_shape, self.coordinate, strict=True):
            if name in mesh_dims:
                position, count = position * size + along, count * size
        return position, count

    def any(self, flag: bool) -> bool:
        """Return, on every rank, whether the flag of any rank is set. Do not call this inside timed iterations."""
        flags = torch.tensor([int(flag)])
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self.control)
        return bool(flags.item())

    def group_works(self, mesh_dim: str) -> bool:
        """Return whether an all_reduce over this rank's group of a mesh dim still gives the correct sum. Never inside
        timed iterations.

        On an accelerator, a collective never ends if another rank has left it, so the wait has a time limit.
        """
        ones = torch.ones(1, device=self.device)
        dist.all_reduce(ones, group=self.mesh.get_group(mesh_dim))
        return ends_within(self.device, GROUP_WORKS_S) and ones.item() == self.size(mesh_dim)

    @property
    def is_fake(self) -> bool:
        """Whether this rank is alone, on a process group that does not communicate."""
        return "fake" in dist.get_backend(self.control)

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value on every rank, in rank order; on a fake process group, only this rank's value. Do
        not call this inside timed iterations.
        """
        return [value] if self.is_fake else gather_objects(self.control, value)


def gather_objects(group: dist.ProcessGroup, value: Any) -> list[Any]:
    """Return the value of every rank of a group on every rank, in rank order."""
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, value, group=group)
    return gathered


def profile_of(job: Job) -> Profile | None:
    """Read the cost profile of the job."""
    return load_profile(Path(job.profile)) if job.profile else None


def profile_here(profile: Profile | None, job: Job, hosts: tuple[str, ...]) -> Profile | None:
    """Adapt the job's cost profile to the job's mesh on these hosts. Raise UserError if the profile has no lines for
    the mesh."""
    if profile is None or not profile.hosts:
        return profile
    try:
        return profile_on(profile, job.mesh, hosts)
    except UserError as error:
        raise UserError(f"profile {job.profile}: {error}") from error


def shape_text(shape: tuple[int, ...] | torch.Size) -> str:
    """`(4, 8)` to `"[4,8]"`."""
    return "[" + ",".join(str(int(size)) for size in shape) + "]"
