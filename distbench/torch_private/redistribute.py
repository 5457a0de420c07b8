"""What DTensor calls to plan, to price and to run a redistribution, replaced for as long as a context is open.

Planning is `_gen_transform_infos`, with and without its cache; `_optimize_transform_infos` merges a plan's steps, and
what runs must be what was priced; `redistribute_cost` prices a redistribution for an operator that chooses its
sharding. torch's own caches stay as they are.
"""

import contextlib
import functools
import inspect
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

from distbench.planning.placement_states import NotHandled
from distbench.planning.search import NoPath
from distbench.torch_private.probe import replaced, require


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
            if reason is not None:
                self.left_to_torch[reason] += 1
                return
            self.ours += 1
            self.above_max_bytes += bool(steps.above_max_bytes)
            warning = steps.above_max_bytes if self.above_max_bytes == 1 else ""
        if warning:
            warnings.warn(f"{warning}; further ones are only counted, in above_max_bytes", stacklevel=2)


class Steps(list[Any]):
    """torch's steps of a path of ours, which torch must not merge.

    It merges those over mesh dims that were flattened into one: what runs is then not what was priced, and where nested
    shards are uneven it is wrong (pytorch PR 194457).
    """

    above_max_bytes = ""  # why it holds more than was asked for, a sentence


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
    """Let DTensor plan redistributions, and its operators price them, by this; nesting and leaving restore.

    Contexts may be left in any order, as by threads, or by a generator that is closed late: one that was left under
    another that still stands passes on to what it had replaced.
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
    """What stands in the place of torch's functions from when one context is entered until it is left."""

    _lock = threading.Lock()

    def __init__(self, planning: Planning) -> None:
        self.planning, self.counts, self.is_left = planning, PlanCounts(), False

    @contextlib.contextmanager
    def replaced(self, owner: Any, name: str, wrapper: Callable[[Any], Any]) -> Iterator[None]:
        """`made(before)` is in the place of what was there before."""
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
        """`_gen_transform_infos`, which keeps what it planned."""
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
        from torch.distributed.tensor import _redistribute as module

        @functools.wraps(original)
        def plan(src_spec: Any, dst_spec: Any, use_graph_based_transform: bool | None = None) -> Any:
            if self.is_left:
                return original(src_spec, dst_spec, use_graph_based_transform)
            forced = module._FORCE_MIN_COST_REDISTRIBUTION_PLAN
            steps, reason = self.planning.plan(src_spec, dst_spec, use_graph_based_transform, forced)
            self.counts.count(steps, reason)
            return steps

        return plan

    def merged(self, original: Any) -> Any:
        """`_optimize_transform_infos`, which leaves ours as they are."""

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
