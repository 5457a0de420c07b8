"""A context in which DTensor plans by a profile, with distbench's cheapest path and its prices for operators.

The open context replaces three functions: `_gen_transform_infos`, with and without its cache;
`_optimize_transform_infos`, which would merge a plan's steps after pricing; and `redistribute_cost`, by which an
operator chooses its sharding. torch plans and prices all other cases. torch's caches do not change, and distbench's
plans outlive the context, so that a second context reuses them.
"""

import contextlib
import dataclasses
import functools
import inspect
import math
import os
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from distbench.planning.cheapest_path import Problem
from distbench.planning.cost_profile import MeshCost, Profile, TorchCost, load_profile, measured_cost
from distbench.planning.placement_states import NotHandled, State
from distbench.planning.redistribution_plans import Plan, Setting, plan_redistribution, require_max_bytes
from distbench.spec.errors import UserError
from distbench.spec.placements import CALIBRATED
from distbench.spec.versions import SUPPORTED
from distbench.torch_private.mesh import group_shapes, is_strided_shard, unordered_groups
from distbench.torch_private.planners import dist_state, state_of_layout
from distbench.torch_private.probe import PLANNERS, ZERO_FILLS, Unsupported, lacks, require


class PlanCounts:
    """Number of plans by distbench, and reasons for plans by torch; for reports, not for control.

    `above_max_bytes` of distbench's plans hold more than the limit, because every path does.
    """

    def __init__(self) -> None:
        self.ours, self.above_max_bytes = 0, 0
        self.left_to_torch: Counter[str] = Counter()
        self._lock = threading.Lock()

    def count(self, steps: Any, reason: str | None) -> None:
        """Count a plan. `reason` is the reason why torch made the plan, or None for a plan by distbench."""
        with self._lock:
            if reason is not None:
                self.left_to_torch[reason] += 1
                return
            self.ours += 1
            self.above_max_bytes += bool(steps.above_max_bytes)
            warning = steps.above_max_bytes if self.above_max_bytes == 1 else ""
        if warning:
            warnings.warn(
                f"{warning}; further plans above the limit are only counted, in above_max_bytes", stacklevel=2
            )


class Steps(list[Any]):
    """A path by distbench as steps of torch, which torch must not merge.

    torch merges steps over mesh dims that were flattened into one. The steps would then differ from the priced steps,
    and be wrong for uneven nested shards (pytorch PR 194457). `above_max_bytes` has the reason for a path above the
    limit.
    """

    above_max_bytes = ""


@contextlib.contextmanager
def _planned_by(planning: "_Planning") -> Iterator[PlanCounts]:
    """Let DTensor plan redistributions, and its operators price redistributions, by `planning`.

    Contexts may be left in any order, as by threads or by a generator that is closed late. A context that is left under
    another open context passes calls on to the replaced functions.
    """
    from torch.distributed.tensor import _redistribute as module
    from torch.distributed.tensor._ops import utils as operators

    context = _Context(planning)
    with contextlib.ExitStack() as stack:
        for owner, name, wrapper in (
            (module, "_gen_transform_infos", context.planned_once),
            (module, "_gen_transform_infos_non_cached", context.planned),
            (module, "_optimize_transform_infos", context.merged),
            (operators, "redistribute_cost", context.price),
        ):
            stack.enter_context(context.replaced(owner, name, wrapper))
        yield context.counts


class _Context:
    """Replacement of torch's functions from the entry of a context until its exit."""

    _lock = threading.Lock()

    def __init__(self, planning: "_Planning") -> None:
        self.planning, self.counts, self.is_left = planning, PlanCounts(), False

    @contextlib.contextmanager
    def replaced(self, owner: Any, name: str, wrapper: Callable[[Any], Any]) -> Iterator[None]:
        """Replace a function by `wrapper(before)`."""
        with self._lock:
            before = getattr(owner, name)
            new = wrapper(before)
            new.context, new.before = self, before
            setattr(owner, name, new)
        try:
            yield
        finally:
            with self._lock:
                self.is_left = True
                current = getattr(owner, name)
                while (context := getattr(current, "context", None)) and context.is_left:
                    current = current.before
                setattr(owner, name, current)

    def planned_once(self, original: Any) -> Any:
        """Return `_gen_transform_infos` with a cache of distbench's plans."""
        from torch.distributed.tensor import _redistribute as module

        planning, counted_ids = self.planning, set[int]()

        @functools.wraps(original)
        def plan(src_spec: Any, dst_spec: Any, use_graph_based_transform: bool | None = None) -> Any:
            if self.is_left:
                return original(src_spec, dst_spec, use_graph_based_transform)
            forced = module._FORCE_MIN_COST_REDISTRIBUTION_PLAN
            planned = planning.kept(src_spec, dst_spec, use_graph_based_transform, forced)
            if id(planned) not in counted_ids:
                counted_ids.add(id(planned))
                self.counts.count(*planned)
            return planned[0]

        def clear() -> None:
            counted_ids.clear()
            planning.kept.cache_clear()

        function: Any = plan
        function.cache_clear, function.cache_info = clear, planning.kept.cache_info
        return function

    def planned(self, original: Any) -> Any:
        """`_gen_transform_infos_non_cached`."""

        @functools.wraps(original)
        def plan(src_spec: Any, dst_spec: Any, use_graph_based_transform: bool | None = None) -> Any:
            if self.is_left:
                return original(src_spec, dst_spec, use_graph_based_transform)
            steps, reason = self.planning.plan(src_spec, dst_spec, use_graph_based_transform)
            self.counts.count(steps, reason)
            return steps

        return plan

    def merged(self, original: Any) -> Any:
        """Return `_optimize_transform_infos` without changes to distbench's steps."""

        @functools.wraps(original)
        def merge(transform_infos: Any, *arguments: Any, **named: Any) -> Any:
            if isinstance(transform_infos, Steps):
                return transform_infos
            return original(transform_infos, *arguments, **named)

        return merge

    def price(self, original: Any) -> Any:
        """`redistribute_cost`."""
        torchs = inspect.unwrap(original)

        @functools.wraps(original)
        def price(current_spec: Any, target_spec: Any) -> Any:
            if self.is_left:
                return original(current_spec, target_spec)
            try:
                return self.planning.price(current_spec, target_spec)
            except NotHandled:
                return torchs(current_spec, target_spec)

        return price


US_PER_S = 1e6
# Collectives that torch runs correctly with any order of a group's ranks; None is a local step.
ORDERLESS_STEPS = ("all_reduce", None)

# Prices of a device mesh, or None for a mesh without prices.
ModelOf = Callable[[Any], MeshCost | None]


@contextlib.contextmanager
def calibrated_planning(
    profile: Profile | str | os.PathLike[str], check_ranks: bool = True, *, max_bytes: int | None = None
) -> Iterator[PlanCounts]:
    """Let DTensor plan every redistribution under a profile, including implicit redistributions and backward.

    Operators choose a sharding by prices of redistributions, which also come from the profile.
    DTensor caches an operator's choice, both inside and outside of the context.

    The context may be nested, also inside torch's own planner contexts, and restores the previous planner. torch plans
    and prices unsupported cases (symbolic shapes, undecodable `_StridedShard`, `_MaskPartial`, meshes that the profile
    does not cover by name and size). Enter and leave the context on all ranks; contexts may be left in any order. The
    context also plans for other threads, because backward may run on its own threads.

    Args:
        profile: a profile or its file, the same on all ranks.
        check_ranks: compare the profile's digest over all ranks on entry, by one small collective of the default group,
            because ranks with different profiles would wait for each other forever.
        max_bytes: limit on the bytes of local tensors before and after a step on any rank, without a collective's own
            memory; the same on all ranks. The cheapest path within the limit is used; if every path is above, the path
            that holds least, with a warning (and `PlanCounts.above_max_bytes`).

    Raises:
        Unsupported: torch's planner has another interface than the replaced interface.
        UserError: `max_bytes` is not a positive number; the ranks' profiles or limits differ; the file cannot be read
            on some rank; in the context, a step's ranks do not ascend (`mesh.unordered_groups`).
    """
    try:
        require_max_bytes(max_bytes)
        loaded = profile if isinstance(profile, Profile) else load_profile(Path(profile))
    except UserError:
        if check_ranks:
            # Ranks that can enter must not wait for this rank.
            _on_all_ranks("unreadable")
        raise
    digest = loaded.digest()
    if check_ranks and len(set(_on_all_ranks(f"{digest}, {max_bytes}"))) > 1:
        raise UserError(
            "the ranks have different profiles or max_bytes and would wait forever; use the same profile and max_bytes "
            "on all ranks"
        )
    rank = dist.get_rank() if dist.is_initialized() else 0
    require_known_planner()
    with _planned_by(_kept_planning(_PlanKey(digest, tuple(loaded.mesh.items()), rank, max_bytes, loaded))) as counts:
        yield counts


@contextlib.contextmanager
def planning_under(model_of: ModelOf) -> Iterator[PlanCounts]:
    """Plan under any cost model, chosen per device mesh; None leaves the mesh to torch. Plans end with the context."""
    require_known_planner()
    with _planned_by(_Planning(model_of)) as counts:
        yield counts


@dataclass(frozen=True)
class _PlanKey:
    """Key of a plan, which includes the rank, because steps of uneven shards have the rank's sizes."""

    digest: str
    mesh: tuple[tuple[str, int], ...]
    rank: int
    max_bytes: int | None
    profile: Profile = field(compare=False)


@functools.lru_cache(maxsize=8)
def _kept_planning(key: _PlanKey) -> "_Planning":
    return _Planning(functools.partial(_cost_of, key.profile), key.max_bytes)


def forget_plans() -> None:
    """Drop the plans and prices of every profile, so that the next context starts like a process's first."""
    _kept_planning.cache_clear()
    _price_us.cache_clear()


class _Planning:
    """Plans and prices under one choice of cost models; `kept` caches the plan of each pair of specs."""

    def __init__(self, model_of: ModelOf, max_bytes: int | None = None) -> None:
        self.max_bytes = max_bytes
        self._model_of = functools.cache(model_of)
        self.kept = functools.cache(self.plan)

    def plan(
        self, source: Any, target: Any, use_graph: bool | None, forced: bool | None = None
    ) -> tuple[Any, str | None]:
        """Return (torch's steps between two specs, reason if torch planned them); torch's flags are a key of `kept`.

        Raises UserError if a step's group has non-ascending ranks.
        """
        steps, reason = self._planned(source, target, use_graph)
        unordered = unordered_groups(source.mesh)
        for step in steps:
            if step.mesh_dim in unordered and step._comm_type_key() not in ORDERLESS_STEPS:
                raise UserError(
                    f"{step._comm_type_key()} over mesh dim {step.mesh_dim} of {source.mesh} would give wrong values, "
                    f"because torch sorts a group's ranks, but {unordered[step.mesh_dim]} do not ascend; make a mesh "
                    "with ascending ranks"
                )
        return steps, reason

    def _planned(self, source: Any, target: Any, use_graph: bool | None) -> tuple[Any, str | None]:
        from torch.distributed.tensor import _redistribute as module

        try:
            planner: Any = module.DTensorRedistributePlanner(source.mesh, source.tensor_meta)
            plans: list[Plan] = []

            def path(source: Any, target: Any) -> list[Any]:
                plans.append(self.plan_of(planner.device_mesh, planner.dtensor_meta, source, target))
                return [dist_state(module.DTensorRedistributePlanner.DistState, state) for state in plans[0].states]

            planner.find_min_cost_path = path
            steps = Steps(planner.generate_graph_based_transform_infos(source, target, source.shape))
            if steps and self.max_bytes is not None and plans[0].peak_bytes > self.max_bytes:
                steps.above_max_bytes = (
                    f"a redistribution of {tuple(source.shape)} from {source.placements} to {target.placements} holds "
                    f"{plans[0].peak_bytes} bytes per rank on any path, but max_bytes is {self.max_bytes}; allow more"
                )
            return steps, None
        except NotHandled as error:
            reason = str(error)
        except ValueError:
            # torch raises this error for a strided shard without a shard order.
            if not any(map(is_strided_shard, (*source.placements, *target.placements))):
                raise
            reason = "_StridedShard"
        return inspect.unwrap(module._gen_transform_infos_non_cached)(source, target, use_graph), reason

    def plan_of(self, mesh: Any, meta: Any, source: Any, target: Any) -> Plan:
        """Return the plan between two of torch's states; raises NotHandled without a plan."""
        start, end = (
            state_of_layout(spec.placements, spec.tensor_dim_to_mesh_dim, len(meta.shape)) for spec in (source, target)
        )
        return _plan(*self._priced(mesh, meta), start, end, self.max_bytes)

    def price(self, source: Any, target: Any) -> float:
        """Return microseconds between two specs, with `redistribute_cost`'s two exceptions; raises NotHandled
        without a plan.

        Local steps cost nothing. From a shard or another partial to a partial the price is infinite, because an
        operator that gathers an input for a later sum would gain nothing. torch prices its zero-fill in the same way.
        """
        meta = source.tensor_meta
        if source.mesh != target.mesh or meta is None or source.shard_order is None or target.shard_order is None:
            raise NotHandled("specs without a path between them")
        start, end = (state_of_layout(spec.placements, spec.shard_order, len(meta.shape)) for spec in (source, target))
        if start == end or not (start.partials or any(start.orders)):
            return 0.0
        used_dims = {mesh_dim for order in start.orders for mesh_dim in order} | dict(start.partials).keys()
        if any(partial not in start.partials and partial[0] in used_dims for partial in end.partials):
            return math.inf
        return _price_us(*self._priced(source.mesh, meta), start, end, self.max_bytes)

    def _priced(self, mesh: Any, meta: Any) -> tuple[Problem, MeshCost]:
        problem = Problem(tuple(mesh.shape), tuple(meta.shape), meta.dtype.itemsize)
        model = self._model_of(mesh)
        if model is None:
            raise NotHandled("a mesh that the profile does not cover")
        return problem, model


@functools.lru_cache(maxsize=65536)
def _price_us(problem: Problem, model: MeshCost, source: State, target: State, max_bytes: int | None) -> float:
    plan = _plan(problem, model, source, target, max_bytes)
    return plan.seconds * US_PER_S if plan.num_collectives else 0.0


def _plan(problem: Problem, model: MeshCost, source: State, target: State, max_bytes: int | None) -> Plan:
    names = {f"m{mesh_dim}": size for mesh_dim, size in enumerate(problem.mesh_shape)}
    setting, zero_fill = Setting(problem, names, "", 1, model), lacks(ZERO_FILLS) is None
    return plan_redistribution(setting, source, target, CALIBRATED, max_bytes, zero_fill, may_exceed=True)


def require_known_planner() -> None:
    """Raise `Unsupported` unless torch's planner has the replaced interface."""
    try:
        from torch.distributed.tensor import _redistribute as module

        planner_class = module.DTensorRedistributePlanner
        methods = planner_class.find_min_cost_path, planner_class.get_next_state
    except (ImportError, AttributeError):
        require(PLANNERS)
        require("calibrated planning")
        raise
    _require_known(planner_class, *methods)


@functools.lru_cache(maxsize=4)
def _require_known(planner_class: Any, find_min_cost_path: Any, get_next_state: Any) -> None:
    require(PLANNERS)
    require("calibrated planning")
    supported = f"distbench supports {SUPPORTED}"
    parameters = tuple(inspect.signature(find_min_cost_path).parameters)
    if parameters != ("self", "src_state", "dst_state"):
        raise Unsupported(
            f"calibrated planning: find_min_cost_path has parameters {', '.join(parameters)}; {supported}"
        )
    fields, known_fields = dataclasses.fields(planner_class.DistState), ("placements", "tensor_dim_to_mesh_dim")
    if tuple(field.name for field in fields if field.init) != known_fields:
        raise Unsupported(
            f"calibrated planning: DistState does not have the fields {' and '.join(known_fields)}; {supported}"
        )
    _plan_one_pair(planner_class)


def _cost_of(profile: Profile, mesh: Any) -> MeshCost | None:
    names = mesh.mesh_dim_names
    if names is None:
        names = tuple(profile.mesh) if tuple(profile.mesh.values()) == tuple(mesh.shape) else ()
    try:
        sizes = dict(zip(names, mesh.shape, strict=True))
        return measured_cost(profile.of_shapes(sizes, group_shapes(mesh, names, profile.hosts)), sizes)
    except (UserError, ValueError):
        return None


def _on_all_ranks(digest: str) -> list[str]:
    if not dist.is_initialized() or dist.get_backend() == "fake":
        return [digest]
    digests: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(digests, digest)
    return digests


class _SmallMesh:
    """Parts of a device mesh that planning uses."""

    ndim, shape = 2, (2, 2)


def _plan_one_pair(planner_class: Any) -> None:
    """Plan one pair by distbench, and compare each step with torch's list of next states."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor._dtensor_spec import ShardOrderEntry, TensorMeta

    try:
        planner = object.__new__(planner_class)
        planner.device_mesh, planner.tensor_dimension = _SmallMesh(), 2
        planner.dtensor_meta = TensorMeta(torch.Size((4, 4)), (4, 1), torch.float32)
        planner.strided_shard_placements_in_target, planner.partial_reduce_ops_in_target = set(), set()
        planner.cost_function = lambda before, after: 0.0
        state = planner_class.DistState
        source = state((Shard(0), Shard(0)), (ShardOrderEntry(0, (0, 1)),))
        target = state((Shard(1), Replicate()), (ShardOrderEntry(1, (0,)),))
        planning = _Planning(lambda mesh: TorchCost((2, 2), devices_per_host=1))
        plan = planning.plan_of(planner.device_mesh, planner.dtensor_meta, source, target)
        path = [dist_state(state, layout) for layout in plan.states]
        legal = [
            after in planner.get_next_state(before.placements, before.tensor_dim_to_mesh_dim)
            for before, after in pairwise(path)
        ]
    except (AttributeError, TypeError, ValueError) as error:
        raise Unsupported(f"calibrated planning: torch {torch.__version__} cannot plan one pair ({error})") from error
    if not (legal and all(legal) and path[0] == source and path[-1] == target):
        raise Unsupported(f"calibrated planning: torch {torch.__version__} has other steps than this planner")
