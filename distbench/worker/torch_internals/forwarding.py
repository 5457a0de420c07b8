"""Process groups that pass each collective on to a gloo backend of their own, and tell when it began and ended.

The mesh stays the same object: two equal meshes share DTensor's caches. Only what its groups' names resolve to changes.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from distbench.worker.torch_internals.collective_mode import CollectiveCall, flat_tensors
from distbench.worker.torch_internals.probe import require

BACKEND = "distbench_traced"
CPU = torch.device("cpu")
# Method of a process group to the kind of collective, the position of its input among the arguments, and the method of
# a backend that does it: backends know the old names only, and nothing coalesced of a single buffer. torch 2.11 calls
# the old names, 2.13 the new ones.
METHODS: dict[str, tuple[str, int, str]] = {
    "allgather": ("all_gather", 1, "allgather"),
    "allgather_coalesced": ("all_gather", 1, "allgather_coalesced"),
    "all_gather_single": ("all_gather", 1, "_allgather_base"),
    "_allgather_base": ("all_gather", 1, "_allgather_base"),
    "allreduce": ("all_reduce", 0, "allreduce"),
    "allreduce_coalesced": ("all_reduce", 0, "allreduce_coalesced"),
    "reduce_scatter": ("reduce_scatter", 1, "reduce_scatter"),
    "reduce_scatter_single": ("reduce_scatter", 1, "_reduce_scatter_base"),
    "_reduce_scatter_base": ("reduce_scatter", 1, "_reduce_scatter_base"),
    "all_to_all_single": ("all_to_all", 1, "alltoall_base"),
    "alltoall_base": ("all_to_all", 1, "alltoall_base"),
    "alltoall": ("all_to_all", 1, "alltoall"),
    "broadcast": ("broadcast", 0, "broadcast"),
    "reduce": ("reduce", 0, "reduce"),
    "gather": ("gather", 1, "gather"),
    "scatter": ("scatter", 1, "scatter"),
    "send": ("send", 0, "send"),
    "recv": ("recv", 0, "recv"),
}
# The same with lists of buffers, which a backend takes one by one.
COALESCED: dict[str, tuple[str, str]] = {
    "all_gather_single_coalesced": ("all_gather", "_allgather_base"),
    "allgather_into_tensor_coalesced": ("all_gather", "_allgather_base"),
    "reduce_scatter_single_coalesced": ("reduce_scatter", "_reduce_scatter_base"),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", "_reduce_scatter_base"),
}


@dataclass(slots=True)
class Issued:
    """One collective that went through a forwarding group.

    Args:
        call: what was issued.
        issued_s: when, seconds of CLOCK_MONOTONIC.
        completed_s: when it was done, or known to be: see `_timed`; None while it is not.
    """

    call: CollectiveCall
    issued_s: float
    completed_s: float | None = None


Tell = Callable[[Issued], None]


class ForwardingGroup(dist.ProcessGroup):
    """A process group that forwards to a backend; `tell` is told of each collective, None tells nobody.

    It calls the backend itself: the base class would dispatch the collective again, to this very group.
    """

    def __init__(self, backend: Any, rank: int, size: int) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._backend = backend
        # Whatever is not forwarded still arrives, untold.
        self._register_backend(CPU, dist.ProcessGroup.BackendType.GLOO, backend)
        self.ranks: tuple[int, ...] = ()
        self.tell: Tell | None = None

    def getBackendName(self) -> str:
        """The backend's name, as C++ asks for it."""
        return str(self._backend.name())

    def barrier(self, *args: Any, **kwargs: Any) -> Any:
        """Nothing travels, so nothing is told."""
        return self._backend.barrier(*args, **kwargs)

    def issue(self, name: str, kind: str, tensors: list[torch.Tensor], start: Callable[[], list[Any]]) -> Any:
        """Start a collective and tell of it.

        Args:
            name: the method that was called.
            kind: as in CollectiveCall.
            tensors: what this rank puts in.
            start: has the backend start it; its works.
        """
        if self.tell is None or not tensors:
            return _joined(start())
        numel = sum(tensor.numel() for tensor in tensors) * (len(self.ranks) if kind == "all_gather" else 1)
        issued = Issued(CollectiveCall(kind, name, self.ranks, tensors[0].dtype, numel), time.monotonic())
        self.tell(issued)
        works = start()
        return _timed(works[0] if len(works) == 1 else _joined(works), issued)


def _timed(work: Any, issued: Issued) -> Any:
    """The work to hand out, which stamps its completion; whoever waits waits for the same thing.

    Where the backend gives a future, its thread stamps when the collective is done, and the backend's own work is
    handed out: it lets waiters go after its future's callbacks, so they find the stamp. gloo's reduce-scatter has no
    future, since half of it is done by the waiter: there the end of the wait is the end.
    """

    def stamp(_: object = None) -> None:
        issued.completed_s = time.monotonic()

    try:
        future = work.get_future()
    except RuntimeError:

        def wait(timeout: Any) -> bool:
            done = bool(work.wait(timeout))
            stamp()
            return done

        return torch._C._distributed_c10d.PythonCallbackWork(wait)
    future.add_done_callback(stamp)
    return work


def _joined(works: list[Any]) -> Any:
    """One work that waits for all."""
    if len(works) == 1:
        return works[0]
    return torch._C._distributed_c10d.PythonCallbackWork(
        lambda timeout: False not in [work.wait(timeout) for work in works]
    )


def _forward(name: str, kind: str, position: int, method: str) -> Callable[..., Any]:
    def forward(self: ForwardingGroup, *args: Any, **kwargs: Any) -> Any:
        given = flat_tensors(args[position])
        return self.issue(name, kind, given, lambda: [getattr(self._backend, method)(*args, **kwargs)])

    return forward


def _forward_each(name: str, kind: str, method: str) -> Callable[..., Any]:
    def forward(self: ForwardingGroup, outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        def start() -> list[Any]:
            do = getattr(self._backend, method)
            return [do(output, given, *args, **kwargs) for output, given in zip(outputs, inputs, strict=True)]

        return self.issue(name, kind, list(inputs), start)

    return forward


for _name, (_kind, _position, _method) in METHODS.items():
    setattr(ForwardingGroup, _name, _forward(_name, _kind, _position, _method))
for _name, (_kind, _method) in COALESCED.items():
    setattr(ForwardingGroup, _name, _forward_each(_name, _kind, _method))


@dataclass
class Forwarding:
    """The forwarding groups of a mesh, made when first needed and kept: C++ holds them without their Python half.

    Args:
        mesh: the device mesh, on CPU.
    """

    mesh: DeviceMesh
    _groups: dict[str, tuple[Any, ForwardingGroup]] = field(default_factory=dict)

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        """Have every group name of the mesh resolve to a forwarding group, flattened mesh dims and the world included.

        What is built inside keeps the forwarding groups that it takes from the mesh. All ranks do this together.

        Raises:
            Unsupported: torch registers process groups elsewhere.
        """
        require("process groups that forward")
        self._make_missing()
        try:
            self._register({name: forwarding for name, (_, forwarding) in self._groups.items()})
            yield
        finally:
            self._register({name: plain for name, (plain, _) in self._groups.items()})

    @contextlib.contextmanager
    def told(self, tell: Tell) -> Iterator[None]:
        """Have `tell` called just before each collective is issued; inside `on`. The default group forwards too."""
        plain = dist.group.WORLD
        world = next(forwarding for bare, forwarding in self._groups.values() if bare is plain)
        for _, forwarding in self._groups.values():
            forwarding.tell = tell
        dist.distributed_c10d._update_default_pg(world)
        try:
            yield
        finally:
            dist.distributed_c10d._update_default_pg(plain)
            for _, forwarding in self._groups.values():
                forwarding.tell = None

    def _make_missing(self) -> None:
        for name in self._names():
            if name not in self._groups:
                plain = dist.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]
                self._groups[name] = (plain, _forwarding_to_own_backend(plain))

    def _names(self) -> list[str]:
        root: Any = self.mesh._get_root_mesh()
        assert dist.group.WORLD is not None
        flattened = [name for mesh in root._flatten_mapping.values() for name in mesh._dim_group_names]
        return list(dict.fromkeys([dist.group.WORLD.group_name, *root._dim_group_names, *flattened]))

    def _register(self, groups: dict[str, Any]) -> None:
        registry: Any = torch._C._distributed_c10d
        for name, group in groups.items():
            registry._unregister_process_group(name)
            registry._register_process_group(name, group)


def _forwarding_to_own_backend(plain: Any) -> ForwardingGroup:
    """A new group of the same ranks whose collectives go over connections of its own."""
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, _created, devices=["cpu"])
    ranks = tuple(dist.get_process_group_ranks(plain))
    group: Any = dist.new_group(list(ranks), backend=BACKEND, use_local_synchronization=True)
    group.ranks = ranks
    return group


def _created(store: Any, rank: int, size: int, timeout: Any) -> ForwardingGroup:
    """What torch calls for a new group; a group of ranks that do not exist has no connections."""
    if dist.get_backend() == "fake":
        return ForwardingGroup(torch._C._distributed_c10d.FakeProcessGroup._create_internal(rank, size), rank, size)
    return ForwardingGroup(dist.ProcessGroupGloo(store, rank, size, timeout), rank, size)
