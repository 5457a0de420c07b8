"""DTensor plans by a profile: our cheapest path instead of torch's, in one method, inside one context."""

import contextlib
import inspect
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from distbench.costmodel.mesh_costs import MeshCost, TorchCost, measured_cost
from distbench.costmodel.profile import Profile, load_profile
from distbench.planning import NoPath, NotHandled, Problem, State, cheapest_route
from distbench.planning.states import known_reduce_op
from distbench.spec.errors import UserError
from distbench.worker.torch_internals.dtensor_planners import clear_redistribution_caches, layout_of
from distbench.worker.torch_internals.probe import Unsupported, replaced, require

_METHOD_PARAMETERS = ("self", "src_state", "dst_state")
_STATE_FIELDS = ("placements", "tensor_dim_to_mesh_dim")

# Prices of a device mesh, or None for one that is not covered.
ModelOf = Callable[[Any], MeshCost | None]


class PlanCounts:
    """How many plans were ours, and why the others were left to torch; for a report, not for control."""

    def __init__(self) -> None:
        self.ours = 0
        self.left_to_torch: Counter[str] = Counter()
        self._lock = threading.Lock()

    def count(self, reason: str | None) -> None:
        """One more plan; `reason` says why torch made it, None that we did."""
        with self._lock:
            if reason is None:
                self.ours += 1
            else:
                self.left_to_torch[reason] += 1


@contextlib.contextmanager
def calibrated_planning(profile: Profile | str | os.PathLike[str], check_ranks: bool = True) -> Iterator[PlanCounts]:
    """Let DTensor plan every redistribution under a profile, implicit ones and those of backward included.

    It may be nested, also inside torch's own planner contexts, and restores what was there when it is left. Plans it
    does not know (symbolic shapes, `_StridedShard`, `_MaskPartial`, targets with Partial, meshes that the profile does
    not cover by name and size) stay torch's; so do the paths to Partial that DTensor plans only to price an operator's
    sharding. Enter and leave it on all ranks alike, and while no other thread plans.

    Args:
        profile: a profile or its file, the same on all ranks.
        check_ranks: compare the profile's digest over all ranks on entry, one small collective of the default group;
            ranks with different profiles would wait for each other for ever.

    Raises:
        Unsupported: torch's planner is not the one we know.
        UserError: the ranks' profiles differ, or the file cannot be read, on whichever rank.
    """
    try:
        known = profile if isinstance(profile, Profile) else load_profile(Path(profile))
    except UserError:
        if check_ranks:
            # Ranks that can read theirs must not be left waiting for this one.
            _on_all_ranks("unreadable")
        raise
    if check_ranks and len(set(_on_all_ranks(known.digest()))) > 1:
        raise UserError("the ranks hold different profiles and would wait for each other for ever; give all the same")
    with planning_under(lambda mesh: _cost_of(known, mesh)) as counts:
        yield counts


@contextlib.contextmanager
def planning_under(model_of: ModelOf) -> Iterator[PlanCounts]:
    """The same under any cost model, chosen for each device mesh; None leaves the plan to torch."""
    require_known_planner()
    from torch.distributed.tensor import _redistribute as module

    _plan_one_pair(module.DTensorRedistributePlanner)
    planner_class, counts = module.DTensorRedistributePlanner, PlanCounts()
    ours = _method(planner_class.find_min_cost_path, model_of, counts)
    clear_redistribution_caches()
    try:
        # torch would merge steps over mesh dims that were flattened into one: what runs is then not what was priced,
        # and where nested shards are uneven it is wrong (pytorch PR 194457).
        with (
            module.use_min_cost_redistribution_plan(True),
            module.disable_redistribute_transform_optimization(),
            replaced(planner_class, "find_min_cost_path", ours),
        ):
            yield counts
    finally:
        clear_redistribution_caches()


def require_known_planner() -> None:
    """Raise `Unsupported` unless torch's planner has the shape that we replace."""
    require("redistribution planners")
    require("calibrated planning")
    from torch.distributed.tensor import _redistribute as module

    known = "distbench knows torch 2.11 to 2.13"
    planner_class = module.DTensorRedistributePlanner
    parameters = tuple(inspect.signature(planner_class.find_min_cost_path).parameters)
    if parameters != _METHOD_PARAMETERS:
        raise Unsupported(f"calibrated planning: find_min_cost_path takes {', '.join(parameters)}; {known}")
    fields = getattr(getattr(planner_class, "DistState", None), "__dataclass_fields__", {})
    if tuple(name for name, field in fields.items() if field.init) != _STATE_FIELDS:
        raise Unsupported(f"calibrated planning: DistState is not of {' and '.join(_STATE_FIELDS)}; {known}")


def _method(original: Any, model_of: ModelOf, counts: PlanCounts) -> Any:
    def find_min_cost_path(self: Any, src_state: Any, dst_state: Any) -> Any:
        try:
            path = _our_path(self, src_state, dst_state, model_of)
        except (NotHandled, NoPath) as reason:
            counts.count(str(reason))
            return original(self, src_state, dst_state)
        counts.count(None)
        return path

    return find_min_cost_path


def _our_path(planner: Any, source: Any, target: Any, model_of: ModelOf) -> list[Any]:
    meta = planner.dtensor_meta
    if any(placement.is_partial() for placement in target.placements):
        raise NotHandled("a target with Partial")
    start, end = _state_of(source, len(meta.shape)), _state_of(target, len(meta.shape))
    problem = Problem(tuple(planner.device_mesh.shape), tuple(meta.shape), meta.dtype.itemsize)
    model = model_of(planner.device_mesh)
    if model is None:
        raise NotHandled("a mesh that the profile does not cover")
    route = cheapest_route(problem, model, start, end)
    state_class: Any = type(source)
    return [_dist_state(state_class, state) for state in route.states]


@lru_cache(maxsize=65536)
def _state_of(dist_state: Any, tensor_ndim: int) -> State:
    orders: list[tuple[int, ...]] = [()] * tensor_ndim
    for entry in dist_state.tensor_dim_to_mesh_dim:
        orders[entry.tensor_dim] = tuple(entry.mesh_dims)
    partials = []
    for mesh_dim, placement in enumerate(dist_state.placements):
        name = type(placement).__name__
        if name == "Partial":
            partials.append((mesh_dim, known_reduce_op(placement.reduce_op)))
        elif name not in ("Shard", "Replicate"):
            raise NotHandled(name)
    return State(len(dist_state.placements), tuple(orders), tuple(partials))


@lru_cache(maxsize=65536)
def _dist_state(state_class: Any, state: State) -> Any:
    return state_class(*layout_of(state))


def _cost_of(profile: Profile, mesh: Any) -> MeshCost | None:
    names = mesh.mesh_dim_names
    if names is None:
        names = tuple(profile.mesh) if tuple(profile.mesh.values()) == tuple(mesh.shape) else ()
    try:
        return measured_cost(profile, dict(zip(names, mesh.shape, strict=True)))
    except (UserError, ValueError):
        return None


def _on_all_ranks(digest: str) -> list[str]:
    if not dist.is_initialized() or dist.get_backend() == "fake":
        return [digest]
    digests: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(digests, digest)
    return digests


def _plan_one_pair(planner_class: Any) -> None:
    """Plan one pair with our method and hold each step against torch's own list of next states."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor._dtensor_spec import ShardOrderEntry, TensorMeta

    try:
        planner = object.__new__(planner_class)
        # As much of a device mesh as planning touches.
        planner.device_mesh, planner.tensor_dimension = SimpleNamespace(ndim=2, shape=(2, 2)), 2
        planner.dtensor_meta = TensorMeta(torch.Size((4, 4)), (4, 1), torch.float32)
        planner.strided_shard_placements_in_target, planner.partial_reduce_ops_in_target = set(), set()
        planner.cost_function = lambda before, after: 0.0
        state = planner_class.DistState
        source = state((Shard(0), Shard(0)), (ShardOrderEntry(0, (0, 1)),))
        target = state((Shard(1), Replicate()), (ShardOrderEntry(1, (0,)),))
        path = _our_path(planner, source, target, lambda mesh: TorchCost((2, 2), devices_per_host=1))
        legal = [
            after in planner.get_next_state(before.placements, before.tensor_dim_to_mesh_dim)
            for before, after in pairwise(path)
        ]
    except (AttributeError, TypeError, ValueError) as error:
        raise Unsupported(f"calibrated planning: torch {torch.__version__} does not plan one pair: {error}") from error
    if not (legal and all(legal) and path[0] == source and path[-1] == target):
        raise Unsupported(f"calibrated planning: torch {torch.__version__} has other steps than those we plan with")
