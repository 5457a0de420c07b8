"""What DTensor calls to plan, to price and to run a redistribution, replaced for as long as a context is open.

Planning is `_gen_transform_infos`, with and without its cache; `_optimize_transform_infos` merges a plan's steps, and
what runs must be what was priced; `redistribute_cost` prices a redistribution for an operator that chooses its
sharding. torch's own caches stay as they are.
"""

import contextlib
import functools
import inspect
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any, Protocol

import torch

from distbench.planning import NoPath, NotHandled
from distbench.worker.torch_internals.probe import replaced, require


class PlanCounts:
    """How many plans were ours, and why the others were left to torch; for a report, not for control.

    Attributes:
        above_max_bytes: how many of ours hold more than was asked for, because every path does.
    """

    def __init__(self) -> None:
        self.ours, self.above_max_bytes = 0, 0
        self.left_to_torch: Counter[str] = Counter()
        self._lock = threading.Lock()

    def count(self, steps: Any, reason: str | None) -> None:
        """One more plan; `reason` says why torch made it, None that we did."""
        with self._lock:
            if reason is None:
                self.ours += 1
                self.above_max_bytes += steps.is_above_max_bytes
            else:
                self.left_to_torch[reason] += 1


class Steps(list[Any]):
    """torch's steps of a path of ours, which torch must not merge.

    It merges those over mesh dims that were flattened into one: what runs is then not what was priced, and where nested
    shards are uneven it is wrong (pytorch PR 194457).
    """

    is_above_max_bytes = False


class Planning(Protocol):
    """Who plans and prices instead of torch."""

    @property
    def kept(self) -> Any:
        """`plan`, cached."""

    def plan(self, source: Any, target: Any, use_graph: bool | None, forced: bool | None) -> tuple[Any, str | None]:
        """(torch's steps between two specs, why torch planned them or None); the flags are those torch plans by."""

    def price(self, source: Any, target: Any) -> float:
        """Microseconds between two specs; NotHandled or NoPath where torch is to say it."""


@contextlib.contextmanager
def planned_by(planning: Planning) -> Iterator[PlanCounts]:
    """Let DTensor plan redistributions, and its operators price them, by this; nesting and leaving restore."""
    from torch.distributed.tensor import _redistribute as module
    from torch.distributed.tensor._ops import utils as operators

    counts = PlanCounts()
    with contextlib.ExitStack() as stack:
        stack.enter_context(replaced(module, "_gen_transform_infos", _planned_once(planning, counts, module)))
        stack.enter_context(replaced(module, "_gen_transform_infos_non_cached", _planned(planning, counts, module)))
        stack.enter_context(replaced(module, "_optimize_transform_infos", _merged(module._optimize_transform_infos)))
        stack.enter_context(replaced(operators, "redistribute_cost", _price(planning, operators.redistribute_cost)))
        yield counts


def _planned_once(planning: Planning, counts: PlanCounts, module: Any) -> Any:
    counted: set[int] = set()

    @functools.wraps(module._gen_transform_infos)
    def plan(src_spec: Any, dst_spec: Any, use_graph_based_transform: bool | None = None) -> Any:
        forced = module._FORCE_MIN_COST_REDISTRIBUTION_PLAN
        found = planning.kept(src_spec, dst_spec, use_graph_based_transform, forced)
        if id(found) not in counted:
            counted.add(id(found))
            counts.count(*found)
        return found[0]

    def clear() -> None:
        counted.clear()
        planning.kept.cache_clear()

    made: Any = plan
    made.cache_clear, made.cache_info = clear, planning.kept.cache_info
    return made


def _planned(planning: Planning, counts: PlanCounts, module: Any) -> Any:
    @functools.wraps(module._gen_transform_infos_non_cached)
    def plan(src_spec: Any, dst_spec: Any, use_graph_based_transform: bool | None = None) -> Any:
        forced = module._FORCE_MIN_COST_REDISTRIBUTION_PLAN
        steps, reason = planning.plan(src_spec, dst_spec, use_graph_based_transform, forced)
        counts.count(steps, reason)
        return steps

    return plan


def _merged(original: Any) -> Any:
    @functools.wraps(original)
    def merge(transform_infos: Any, *arguments: Any, **named: Any) -> Any:
        return transform_infos if isinstance(transform_infos, Steps) else original(transform_infos, *arguments, **named)

    return merge


def _price(planning: Planning, original: Any) -> Any:
    torchs = inspect.unwrap(original)

    @functools.wraps(original)
    def price(current_spec: Any, target_spec: Any) -> Any:
        try:
            return planning.price(current_spec, target_spec)
        except (NotHandled, NoPath):
            return torchs(current_spec, target_spec)

    return price


@contextlib.contextmanager
def native_all_to_all(enabled: bool = True) -> Iterator[None]:
    """Let DTensor use the backend's own all-to-all on CPU meshes too (other meshes use it already), where `enabled`.

    torch's substitute is from the time when gloo had none. All ranks enter and leave it together: a rank that gathers
    waits for ever for ranks that exchange.
    """
    if not enabled:
        yield
        return
    require("native all-to-all on CPU")
    # placement_types imports the function by name, so this is where it is looked up.
    from torch.distributed.tensor import placement_types as module

    with replaced(module, "shard_dim_alltoall", _shard_dim_alltoall):
        yield


def _shard_dim_alltoall(input: torch.Tensor, gather_dim: int, shard_dim: int, mesh: Any, mesh_dim: int) -> torch.Tensor:
    group_name = mesh.get_group(mesh_dim).group_name
    return torch.ops._dtensor.shard_dim_alltoall(input, gather_dim, shard_dim, group_name)
