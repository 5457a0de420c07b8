"""Process groups that pass each collective on to a gloo backend of their own, and record when it began and ended.

The mesh stays the same object: two equal meshes share DTensor's caches. Only what its groups' names resolve to changes.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from distbench.torch_private.collective_mode import OF_EACH_RANK, PEERS, PUT_OUT, CollectiveCall, flat_tensors, kind_of
from distbench.torch_private.probe import require

BACKEND = "distbench_traced"
CPU = torch.device("cpu")
# Methods of a process group, by the position of their input among the arguments.
INPUT_FIRST = ("allreduce", "allreduce_coalesced", "broadcast", "reduce", "send", "recv")
INPUT_SECOND = (
    *("allgather", "allgather_coalesced", "all_gather_single", "_allgather_base", "gather", "scatter"),
    *("reduce_scatter", "reduce_scatter_single", "_reduce_scatter_base"),
    *("alltoall", "all_to_all_single", "alltoall_base"),
)
# Those with lists of buffers, which a backend takes one by one.
COALESCED = (
    *("all_gather_single_coalesced", "allgather_into_tensor_coalesced"),
    *("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"),
)
# Backends know the old names only, and nothing coalesced of a single buffer; torch 2.11 calls those, 2.13 the new ones.
SINGLE = {"all_gather": "_allgather_base", "reduce_scatter": "_reduce_scatter_base", "all_to_all": "alltoall_base"}


@dataclass(slots=True)
class Issued:
    """One collective that went through a forwarding group: seconds of CLOCK_MONOTONIC, None while it is not known to
    be done (see `_timed`)."""

    call: CollectiveCall
    issued_s: float
    completed_s: float | None = None


OnIssue = Callable[[Issued], None]


class ForwardingGroup(dist.ProcessGroup):
    """A process group that forwards to a backend, and calls `on_issue`, where there is one, for each collective.

    It calls the backend itself: the base class would dispatch the collective again, to this very group.
    """

    def __init__(self, backend: Any, rank: int, size: int, ranks: tuple[int, ...]) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self.backend = backend
        # Whatever is not forwarded still arrives, unrecorded.
        self._register_backend(CPU, dist.ProcessGroup.BackendType.GLOO, backend)
        # Since torch 2.15 its flight recorder asks every group for its default backend.
        self._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        self.ranks = ranks
        self.on_issue: OnIssue | None = None

    def getBackendName(self) -> str:
        """The backend's name, as C++ asks for it."""
        return str(self.backend.name())

    def barrier(self, *args: Any, **kwargs: Any) -> Any:
        """Communicates nothing, so it is not recorded."""
        return self.backend.barrier(*args, **kwargs)

    def issue(self, name: str, tensors: list[torch.Tensor], start: Callable[[], list[Any]], given: Any = ()) -> Any:
        """Have the backend start the collective of a method with this rank's input, and report it; `given` are the
        method's arguments."""
        if self.on_issue is None or not tensors:
            return _joined(start())
        kind = kind_of(name)
        numel = sum(tensor.numel() for tensor in tensors) * (len(self.ranks) if kind in OF_EACH_RANK else 1)
        peer = self.ranks[given[1]] if kind in PEERS else None
        call = CollectiveCall(kind, name, self.ranks, tensors[0].dtype, numel, peer, id(tensors[0]))
        issued = Issued(call, time.monotonic())
        self.on_issue(issued)
        return _timed(_joined(start()), issued)


def _timed(work: Any, issued: Issued) -> Any:
    """The work to hand out, which stamps its completion; whoever waits waits for the same thing.

    Where the backend gives a future, its thread stamps when the collective is done, and the backend's own work is
    handed out: it lets waiters go after its future's callbacks, so they find the stamp. gloo's reduce-scatter has no
    future, since half of it is done by the waiter: there the end of the wait is the end. Its messages have none either,
    and a pipeline waits for them long after they are through: a thread of ours waits for each at once.
    """

    def stamp(_: object = None) -> None:
        issued.completed_s = time.monotonic()

    try:
        future = work.get_future()
    except RuntimeError:
        if issued.call.kind in PEERS:
            return _waited_for_at_once(work, stamp)

        def wait(timeout: Any) -> bool:
            done = bool(work.wait(timeout))
            stamp()
            return done

        return torch._C._distributed_c10d.PythonCallbackWork(wait)
    future.add_done_callback(stamp)
    return work


def _waited_for_at_once(work: Any, stamp: Callable[[], None]) -> Any:
    raised: list[Exception] = []

    def wait() -> None:
        try:
            work.wait()
        except Exception as error:
            raised.append(error)
        stamp()

    waiter = threading.Thread(target=wait, daemon=True)
    waiter.start()

    def join(_: object) -> bool:
        waiter.join()
        if raised:
            raise raised[0]
        return True

    return torch._C._distributed_c10d.PythonCallbackWork(join)


def _joined(works: list[Any]) -> Any:
    if len(works) == 1:
        return works[0]
    return torch._C._distributed_c10d.PythonCallbackWork(
        lambda timeout: False not in [work.wait(timeout) for work in works]
    )


def _forward(name: str) -> Callable[..., Any]:
    by_one = name in COALESCED
    method = SINGLE[kind_of(name)] if by_one or name.endswith("_single") else name

    def forward(self: ForwardingGroup, *args: Any, **kwargs: Any) -> Any:
        def start() -> list[Any]:
            do = getattr(self.backend, method)
            pairs = zip(*args[:2], strict=True) if by_one else [args[:2]]
            return [do(*buffers, *args[2:], **kwargs) for buffers in pairs]

        is_first = name in INPUT_FIRST or kind_of(name) in PUT_OUT
        return self.issue(name, flat_tensors(args[0 if is_first else 1]), start, args)

    return forward


for _name in (*INPUT_FIRST, *INPUT_SECOND, *COALESCED):
    setattr(ForwardingGroup, _name, _forward(_name))


@dataclass
class Forwarding:
    """The forwarding groups of a mesh on CPU, made when first needed and kept."""

    mesh: DeviceMesh
    _groups: dict[str, tuple[Any, ForwardingGroup]] = field(default_factory=dict)

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        """Have every group name of the mesh resolve to a forwarding group, flattened mesh dims included.

        The default group forwards too, so that groups which are made inside do as well. What is built inside keeps the
        groups that it takes from the mesh. All ranks do this together.
        """
        require("process groups that forward")
        plain_world = dist.group.WORLD
        assert plain_world is not None
        self._make_missing(plain_world)
        try:
            self._register({name: forwarding for name, (_, forwarding) in self._groups.items()})
            dist.distributed_c10d._update_default_pg(self._groups[plain_world.group_name][1])
            yield
        finally:
            dist.distributed_c10d._update_default_pg(plain_world)
            self._register({name: plain for name, (plain, _) in self._groups.items()})

    @contextlib.contextmanager
    def observed(self, on_issue: OnIssue) -> Iterator[None]:
        """Have `on_issue` called just before each collective of a forwarding group is issued; inside `on`."""
        # torch's table of groups is also what keeps them alive: C++ alone would hold them without their Python half.
        groups = [group for group in dist.distributed_c10d._world.pg_map if isinstance(group, ForwardingGroup)]
        for group in groups:
            group.on_issue = on_issue
        try:
            yield
        finally:
            for group in groups:
                group.on_issue = None

    def _make_missing(self, plain_world: Any) -> None:
        """For every group that this rank is in: the mesh's, and those of meshes that the model made for itself, whose
        names DTensor's caches may serve for an equal mesh. All ranks make them in the order in which they were made."""
        known = {forwarding.group_name for _, forwarding in self._groups.values()}
        groups = [plain_world, *dist.distributed_c10d._world.pg_map]
        for plain in groups:
            name = plain.group_name
            if name not in self._groups and name not in known and not isinstance(plain, ForwardingGroup):
                self._groups[name] = (plain, _forwarding_to_own_backend(plain))

    def _register(self, groups: dict[str, Any]) -> None:
        registry: Any = torch._C._distributed_c10d
        for name, group in groups.items():
            registry._unregister_process_group(name)
            registry._register_process_group(name, group)


def _forwarding_to_own_backend(plain: Any) -> ForwardingGroup:
    """A new group of the same ranks whose collectives go over connections of its own."""
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, _created, extended_api=True, devices=["cpu"])
    group: Any = dist.new_group(dist.get_process_group_ranks(plain), backend=BACKEND, use_local_synchronization=True)
    return group


def _created(given: Any, _: Any) -> ForwardingGroup:
    """What torch calls for a new group; one of a fake process group has no connections."""
    world: Any = dist.group.WORLD
    of_world = world.backend if isinstance(world, ForwardingGroup) else world._get_backend(CPU)
    rank, size = given.group_rank, given.group_size
    fake = torch._C._distributed_c10d.FakeProcessGroup
    backend: Any
    if isinstance(of_world, fake):
        backend = fake._create_internal(rank, size)
    else:
        backend = dist.ProcessGroupGloo(given.store, rank, size, given.timeout)
    return ForwardingGroup(backend, rank, size, tuple(given.global_ranks_in_group))
