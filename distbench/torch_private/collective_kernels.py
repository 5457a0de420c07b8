"""Every collective of this process on its way to a backend: stamped when it begins and ends, or ended at once.

c10d dispatches all of them: those of Python, of DDP's reducer in C++, of functional collectives and of compiled code.
Kernels of ours for a dispatch key that c10d leaves free come before the backends'. Nothing else goes through Python,
and process groups stay as they are.
"""

import _thread
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from distbench.torch_private.collective_dispatch_mode import PEERS, CollectiveCall, call_of
from distbench.torch_private.fake_tensors import EndedWork
from distbench.torch_private.probe import KERNELS, require

# torch has `gather_into_tensor_` since 2.14.
OPERATORS = (
    *("allreduce_", "allreduce_coalesced_", "broadcast_", "reduce_", "gather_", "gather_into_tensor_", "scatter_"),
    *("allgather_", "_allgather_base_", "allgather_coalesced_", "allgather_into_tensor_coalesced_"),
    *("reduce_scatter_", "_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_", "alltoall_", "alltoall_base_"),
    *("send", "recv_", "recv_any_source_", "barrier"),
)

# An operator of c10d, a call that passes it on to the backend, its arguments.
Handle = Callable[[Any, Callable[[], Any], Any], Any]


@dataclass(slots=True)
class Issued:
    """One collective: seconds of CLOCK_MONOTONIC, None while it is not known to be done (see `_timed`)."""

    call: CollectiveCall
    issued_s: float
    completed_s: float | None = None


OnIssue = Callable[[Issued], None]


@contextlib.contextmanager
def timed_collectives(on_issue: OnIssue) -> Iterator[None]:
    """Have `on_issue` called just before each collective of this process is issued; on CPU it learns when it ends."""

    def handle(operator: Any, pass_on: Callable[[], Any], args: Any) -> Any:
        if (call := call_of(operator, args, {})) is None:
            return pass_on()
        issued = Issued(call, time.monotonic())
        on_issue(issued)
        found = pass_on()
        return _with_work(found, _timed(found, issued))

    with _handled(handle):
        yield


@contextlib.contextmanager
def nothing_sent() -> Iterator[None]:
    """Have the collectives of this process end at once.

    What they should have received has any value, so what is computed meanwhile has no meaning but its shapes.
    """
    works: list[EndedWork] = []  # C++ keeps half of a work

    def handle(operator: Any, _: Any, args: Any) -> Any:
        filled = args[0] if isinstance(args[0], list) else [args[0]]
        works.append(EndedWork(filled, bool))
        return (args[0], works[-1].boxed()) if len(operator._schema.returns) > 1 else works[-1].boxed()

    with _handled(handle):
        yield


@contextlib.contextmanager
def _handled(handle: Handle) -> Iterator[None]:
    require(KERNELS)
    key = torch._C.DispatchKey.BackendSelect
    after = torch._C._dispatch_keyset_full_after(key)
    library = torch.library.Library("c10d", "IMPL")

    def kernel(operator: Any, keyset: Any, *args: Any) -> Any:
        return handle(operator, lambda: operator.redispatch(keyset & after, *args), args)

    for name in OPERATORS:
        if hasattr(torch.ops.c10d, name):
            operator = getattr(torch.ops.c10d, name).default
            library.impl(operator, partial(kernel, operator), key.name, with_keyset=True)
    try:
        yield
    finally:
        library._destroy()


def _with_work(found: Any, work: Any) -> Any:
    """What an operator returns: its work, alone or after the tensors that it fills."""
    return (*found[:-1], work) if isinstance(found, tuple) else work


def _timed(found: Any, issued: Issued) -> Any:
    """The work to hand out, which stamps its completion; waiting for it waits for the same thing.

    Where the backend gives a future, its thread stamps when the collective is done, and the backend's own work is
    handed out: it lets waiters go after its future's callbacks, so they find the stamp. gloo's reduce-scatter has no
    future, since half of it is done by the waiter: there the end of the wait is the end. Its messages have none either,
    and a pipeline waits for them long after they are through: a thread of ours waits for each at once.
    """
    boxed = found[-1] if isinstance(found, tuple) else found
    work: Any = dist.Work.unbox(boxed)

    def stamp(_: object = None) -> None:
        issued.completed_s = time.monotonic()

    try:
        future = work.get_future()
    except RuntimeError:
        wait = _waited_for_at_once(work, stamp) if issued.call.kind in PEERS else _waited_for(work, stamp)
        return torch._C._distributed_c10d.PythonCallbackWork(wait).boxed()
    future.add_done_callback(stamp)
    return boxed


def _waited_for(work: Any, stamp: Callable[[], None]) -> Callable[[Any], bool]:
    def wait(timeout: Any) -> bool:
        done = bool(work.wait(timeout))
        stamp()
        return done

    return wait


def _waited_for_at_once(work: Any, stamp: Callable[[], None]) -> Callable[[Any], bool]:
    raised: list[Exception] = []
    is_over = threading.Lock()
    is_over.acquire()

    def wait() -> None:
        try:
            work.wait()
        except Exception as error:
            raised.append(error)
        stamp()
        is_over.release()

    # Not `threading.Thread`, whose start waits for the new thread: on busy CPUs a tenth of a millisecond per message.
    _thread.start_new_thread(wait, ())

    def join(_: object) -> bool:
        with is_over:
            if raised:
                raise raised[0]
        return True

    return join
