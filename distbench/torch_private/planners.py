"""DTensor's redistribution planners: the active planner, and its path."""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard

from distbench.planning.cost_profile import ALL_TO_ALL, CUT, PARTITION, REDUCE_SCATTER, ZERO_FILL
from distbench.planning.placement_states import NotHandled, State, known_reduce_op
from distbench.spec.placements import TORCH_PLANNERS
from distbench.torch_private.probe import PATHS, PLANNERS, replaced, require


class OrderedPlacements(tuple[Any, ...]):
    """Target placements with an explicit shard order, which torch's public API cannot express."""

    shard_order: tuple[Any, ...]

    @classmethod
    def of(cls, state: State) -> "OrderedPlacements":
        """Return the placements and the shard order of a `State`."""
        placements, shard_order = layout_of(state)
        ordered = cls(placements)
        ordered.shard_order = shard_order
        return ordered


class OrderedTensor:
    """The part of a DTensor that a redistribution needs, for layouts that `DTensor.redistribute` does not support.

    torch's operators redistribute in the same way, with explicit shard orders on either side, and to Partial. `full`
    has the full shape, stride and dtype, and its values are not read.
    """

    def __init__(self, local: torch.Tensor, mesh: DeviceMesh, state: State, full: torch.Tensor) -> None:
        require(PATHS)
        self._local, self._spec = local, _spec_of(mesh, state, full)
        self.placements, self.shape, self.ndim, self.dtype = self._spec.placements, full.shape, full.ndim, full.dtype

    def to_local(self) -> torch.Tensor:
        """Return this rank's shard."""
        return self._local

    def redistribute(self, mesh: DeviceMesh, placements: Sequence[Any]) -> torch.Tensor:
        """Return this rank's shard under the target, like `DTensor.redistribute`."""
        from torch.distributed.tensor import _redistribute as module

        return module.redistribute_local_tensor(
            self._local, self._spec, _spec(self._spec, placements), is_explicit=True
        )


def clear_redistribution_caches() -> None:
    """Clear all cached paths and planners, which torch would use for another planner."""
    from torch.distributed.tensor import _redistribute as module

    module._gen_transform_infos.cache_clear()
    module.clear_redistribute_planner_cache()


@contextlib.contextmanager
def planner(name: str) -> Iterator[None]:
    """Let DTensor plan by `greedy` or `min_cost`, with caches cleared before and after; ValueError for other names."""
    if name not in TORCH_PLANNERS:
        raise ValueError(f"planner {name!r} is unknown; use {' or '.join(TORCH_PLANNERS)}")
    require(PLANNERS)
    from torch.distributed.tensor import _redistribute as module

    clear_redistribution_caches()
    try:
        with module.use_min_cost_redistribution_plan(enabled=name == "min_cost"):
            yield
    finally:
        clear_redistribution_caches()


@contextlib.contextmanager
def remembered_steps() -> Iterator[None]:
    """Compute the steps out of a layout once in torch's graph search, not for each pair, for equal paths in less time.

    The steps and their costs depend on the planner's mesh and tensor, and on earlier targets.
    """
    from torch.distributed.tensor import _redistribute as module

    plain: Any = getattr(module.DTensorRedistributePlanner, "get_next_state", None)
    if plain is None:
        yield
        return
    known_steps: dict[Any, Any] = {}

    def steps(self: Any, placements: Any, order: Any) -> Any:
        target_kinds = frozenset(self.partial_reduce_ops_in_target), frozenset(self.strided_shard_placements_in_target)
        key = self.device_mesh, self.dtensor_meta, placements, order, target_kinds
        if key not in known_steps:
            known_steps[key] = plain(self, placements, order)
        return known_steps[key]

    with replaced(module.DTensorRedistributePlanner, "get_next_state", steps):
        yield


class OwnPlans:
    """Planned paths of one case, which DTensor uses while `used` is open, and which are kept while other cases plan."""

    def __init__(self) -> None:
        self._cached: Any = None

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Replace DTensor's cache of paths, inside of the planner's own context."""
        from torch.distributed.tensor import _redistribute as module

        # The context may have replaced torch's planner, so the function below torch's cache may be out of date.
        self._cached = self._cached or cache(module._gen_transform_infos_non_cached)
        with replaced(module, "_gen_transform_infos", self._cached):
            yield


@dataclass(frozen=True)
class PathStep:
    """One step of a redistribution path on this rank."""

    op: str | None  # "all_gather", "all_to_all", "reduce_scatter", "all_reduce", or None for a local step
    group_size: int
    logical_numel: int  # elements of the tensor before this mesh dim shards it
    mesh_dim: str = ""  # or several, flattened into one; empty if the mesh has no names
    num_copies: int = 0  # gathered or scattered tensor dims other than the first (0 to 2)
    local_op: str = CUT  # one of `cost_profile.LOCAL_OPS` if `op` is None

    @property
    def does(self) -> str:
        """Name of the collective, or of the local operation."""
        return self.op or self.local_op

    @property
    def payload_numel(self) -> int:
        """Number of elements of the full gathered or scattered buffer (nccl-tests' size), or of a local step's copy."""
        return self.logical_numel // (self.group_size if self.does in (ALL_TO_ALL, CUT) else 1)

    @property
    def held_after(self) -> int:
        """Number of elements of the local tensor afterwards."""
        return self.logical_numel // (self.group_size if self.does in (ALL_TO_ALL, REDUCE_SCATTER, CUT) else 1)


def plan_path(dtensor: Any, placements: Sequence[Any]) -> tuple[str, list[PathStep]]:
    """Return DTensor's current path, in torch's own notation and step by step."""
    source = dtensor._spec
    infos, text = _planned(source, _spec(source, placements))
    steps, held_numel = [], dtensor.to_local().numel()
    for info in infos:
        steps.append(_path_step(info, source.mesh, held_numel))
        held_numel = steps[-1].held_after
    return text, steps


def partition(local: torch.Tensor, mesh: DeviceMesh, mesh_dim: int) -> torch.Tensor:
    """Run the local step from a replica to Partial(sum); return this rank's part. The parts add up to `local`."""
    require("partition to Partial")
    return Partial("sum")._partition_value(local, mesh, mesh_dim)


def path_between(mesh: DeviceMesh, shape: Sequence[int], dtype: torch.dtype, source: State, target: State) -> str:
    """Return DTensor's current path, in torch's own notation, for a contiguous tensor with shard orders."""
    require(PATHS)
    full = torch.empty(tuple(shape), dtype=dtype, device="meta")
    return _planned(_spec_of(mesh, source, full), _spec_of(mesh, target, full))[1]


def layout_of(state: State) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return torch's placements and shard order of a `State`."""
    from torch.distributed.tensor._dtensor_spec import ShardOrderEntry

    placements: list[Any] = [Replicate()] * state.mesh_ndim
    for mesh_dim, reduce_op in state.partials:
        placements[mesh_dim] = Partial(reduce_op)
    for tensor_dim, order in enumerate(state.orders):
        for mesh_dim in order:
            placements[mesh_dim] = Shard(tensor_dim)
    shard_order = [ShardOrderEntry(tensor_dim, order) for tensor_dim, order in enumerate(state.orders) if order]
    return tuple(placements), tuple(shard_order)


@lru_cache(maxsize=65536)
def dist_state(state_class: Callable[..., Any], state: State) -> Any:
    """Convert a `State` to the planner's (`DTensorRedistributePlanner.DistState`)."""
    return state_class(*layout_of(state))


@lru_cache(maxsize=65536)
def state_of_layout(placements: tuple[Any, ...], shard_order: tuple[Any, ...], tensor_ndim: int) -> State:
    """Return the `State` of torch's placements and shard order; NotHandled for unknown placements and reduce ops."""
    orders: list[tuple[int, ...]] = [()] * tensor_ndim
    for entry in shard_order:
        orders[entry.tensor_dim] = tuple(entry.mesh_dims)
    partials = []
    for mesh_dim, placement in enumerate(placements):
        name = type(placement).__name__
        if name == "Partial":
            partials.append((mesh_dim, known_reduce_op(placement.reduce_op)))
        elif name not in ("Shard", "Replicate"):
            raise NotHandled(name)
    return State(len(placements), tuple(orders), tuple(partials))


def plan_only(dtensor: Any, placements: Sequence[Any]) -> Callable[[], object]:
    """Return a call that only plans this redistribution."""
    from torch.distributed.tensor import _redistribute as module

    return partial(module._gen_transform_infos, dtensor._spec, _spec(dtensor._spec, placements))


def _spec_of(mesh: DeviceMesh, state: State, full: torch.Tensor) -> Any:
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    placements, shard_order = layout_of(state)
    meta = TensorMeta(full.shape, full.stride(), full.dtype)
    return DTensorSpec(mesh, placements, tensor_meta=meta, shard_order=shard_order)


def _spec(source: Any, placements: Sequence[Any]) -> Any:
    from torch.distributed.tensor._dtensor_spec import DTensorSpec

    order: Any = getattr(placements, "shard_order", None)
    return DTensorSpec(source.mesh, tuple(placements), tensor_meta=source.tensor_meta, shard_order=order)


def _planned(source: Any, target: Any) -> tuple[list[Any], str]:
    """Return (torch's steps, the path in torch's notation) between two specs."""
    require(PATHS)
    from torch.distributed.tensor import _redistribute as module

    infos = module._optimize_transform_infos(
        module._gen_transform_infos(source, target), source.mesh, source.placements, target.placements
    )
    try:
        text = module.DTensorRedistributePlanner.stringify_transform_infos(
            source.mesh, infos, source.placements, source.shard_order
        )
    except ValueError:
        # torch cannot format greedy's paths over mesh dims of one rank, whose shards its shard order lacks.
        current = list(map(str, source.placements))
        texts = ["".join(current)]
        for info in infos:
            current[info.mesh_dim] = str(info.src_dst_placements[1])
            texts.append("".join(current))
        text = "->".join(texts)
    return infos, text


def _path_step(info: Any, mesh: DeviceMesh, held: int) -> PathStep:
    """Convert a step of torch.

    Greedy's logical shape is correct only for gathers. For a replica or a partial, that shape is the shape at the
    path's start, so the `held` elements of the local tensor are used instead.
    """
    group_mesh = getattr(info, "mesh", mesh)
    gathers = info._comm_type_key() in ("all_gather", "all_to_all")
    numel = math.prod(int(size) for size in info.logical_shape) if gathers else held
    names, group_size = group_mesh.mesh_dim_names, group_mesh.size(info.mesh_dim)
    before, after = info.src_dst_placements
    is_filled = before.is_shard() and after.is_partial("sum")
    local_op = ZERO_FILL if is_filled else PARTITION if after.is_partial() else CUT
    return PathStep(
        op=info._comm_type_key(),
        group_size=group_size,
        logical_numel=numel * group_size if local_op == ZERO_FILL else numel,
        mesh_dim=names[info.mesh_dim] if names else "",
        num_copies=sum(getattr(placement, "dim", 0) > 0 for placement in info.src_dst_placements),
        local_op=local_op,
    )


@contextlib.contextmanager
def native_all_to_all(enabled: bool = True) -> Iterator[None]:
    """Make DTensor use the backend's own all-to-all on CPU meshes, as on other meshes, if `enabled`.

    torch's substitute is older than gloo's all-to-all. All ranks must enter and leave this context together, because a
    rank that gathers would wait forever for ranks that exchange.
    """
    if not enabled:
        yield
        return
    require("native all-to-all on CPU")
    # placement_types imports the function by name, so the function is replaced in that module.
    from torch.distributed.tensor import placement_types as module

    with replaced(module, "shard_dim_alltoall", _shard_dim_alltoall):
        yield


def _shard_dim_alltoall(input: torch.Tensor, gather_dim: int, shard_dim: int, mesh: Any, mesh_dim: int) -> torch.Tensor:
    group_name = mesh.get_group(mesh_dim).group_name
    return torch.ops._dtensor.shard_dim_alltoall(input, gather_dim, shard_dim, group_name)
