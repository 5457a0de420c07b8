"""Every collective of a process, recorded, timed or rejected when it is dispatched to a backend; every operator that is
dispatched.
"""

import _thread
import contextlib
import functools
import importlib
import inspect
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from distbench.torch_private.probe import COALESCED, KERNELS, STORE, replaced, require

READS_DEVICE = torch.ops.prim.device.default
NAMESPACES = ("c10d", "_c10d_functional", "_dtensor")
FAMILIES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
OTHERS = ("broadcast", "reduce", "gather", "scatter", "send", "recv")
# Messages between two ranks, to torch's name for the other rank's index in the group.
PEERS = {"send": "dst", "recv": "src"}
# Operators of the same namespaces without communication.
SILENT = ("wait_tensor", "_wrap_tensor_autograd", "check_for_nan", "barrier")
# Collectives whose size is that of the whole buffer, of which a rank's tensor is a part.
OF_EACH_RANK = ("all_gather", "scatter")
INPUTS = ("input", "inputs", "input_tensor", "input_tensors", "input_list", "tensors", "tensor")


@dataclass(frozen=True)
class CollectiveCall:
    """One collective as issued on this rank."""

    kind: str  # "all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast"; any other op by its own name
    op: str  # torch's operator, e.g. "c10d._allgather_base_"
    ranks: tuple[int, ...]  # global ranks of its group
    dtype: torch.dtype
    payload_numel: int  # elements of nccl-tests' size S: the full gathered or scattered buffer, else the input
    peer: int | None = None  # global rank that a message is sent to or received from
    tensor_id: int = 0  # `id` of the first tensor, while that tensor is alive
    group: str = ""  # torch's name of its group; groups of the same ranks have communicators of their own


def kind_of(name: str) -> str:
    """Map torch's and kineto's names to one name ("_allgather_base_": "all_gather"); unknown names are unchanged."""
    for kind in FAMILIES:
        if kind.replace("_", "") in name.replace("_", ""):
            return kind
    return name.strip("_") if name.strip("_") in OTHERS else name


@contextlib.contextmanager
def each_operator(handle: Callable[[Any, Any, Any], Any], own_dispatch: tuple[type, ...] = ()) -> Iterator[None]:
    """Call `handle(operator, args, kwargs)` instead of each operator on plain tensors; `handle` must call the operator.

    Args:
        own_dispatch: tensor subclasses that dispatch first, such as DTensor, for example to wait.
    """
    require("collectives seen at dispatch")
    with _Mode(handle, own_dispatch):
        yield


class _Mode(TorchDispatchMode):
    # Compiled code has higher-order operators that do not communicate, such as for the state of random numbers.
    supports_higher_order_operators = True

    def __init__(self, handle: Callable[[Any, Any, Any], Any], own_dispatch: tuple[type, ...]) -> None:
        super().__init__()
        self._handle, self._own_dispatch = handle, (torch.distributed.tensor.DTensor, *own_dispatch)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Run compiled code compiled, and trace its operators as it runs."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Half of the dispatches of a recorded step: C++ reads the device of a tensor without values.
        if func is READS_DEVICE:
            return args[0].device
        # Subclasses dispatch first; the operators that they issue return here with plain tensors.
        if any(issubclass(kind, self._own_dispatch) for kind in types):
            return NotImplemented
        if not isinstance(func, torch._ops.OpOverload):
            return func(*args, **(kwargs or {}))
        return self._handle(func, args, kwargs or {})


def is_pending(tensor: torch.Tensor) -> bool:
    """Return whether a tensor, or a DTensor's local tensor, is a functional collective's result that torch waits for at
    the first use. Callers require PENDING.
    """
    name = _held_in(tensor)
    return isinstance(getattr(tensor, name) if name else tensor, _pending_type())


def waited_for(tensor: torch.Tensor) -> torch.Tensor:
    """Wait for the collective of a plain tensor, or of a DTensor of plain tensors; keep the autograd history."""
    if not is_pending(tensor):
        return tensor
    if name := _held_in(tensor):
        setattr(tensor, name, getattr(tensor, name).wait())
        return tensor
    return _Waited.apply(tensor)  # type: ignore[no-any-return]


def keep_gradients_of_pending_inputs() -> None:
    """Make compiled code keep the gradients of pending inputs (see `is_pending`), for the rest of the process.

    This also covers graphs that begin in the middle of a module. AOTAutograd of torch 2.12 to 2.15 waits for a pending
    input before the check whether the input needs a gradient, and the result of the wait needs none:
    https://github.com/pytorch/pytorch/pull/191113. Torch 2.11 keeps the gradient.
    """
    from torch._functorch import aot_autograd as module

    plain: Any = getattr(module, "process_inputs", None)
    if plain is None or hasattr(plain, "__wrapped__"):
        return

    @functools.wraps(plain)
    def process_inputs(flat_args: Any, *args: Any, **kwargs: Any) -> Any:
        pending = [(place, tensor) for place, tensor in enumerate(flat_args) if isinstance(tensor, _pending_type())]
        asking = [place for place, tensor in pending if tensor.requires_grad]
        result = plain(flat_args, *args, **kwargs)
        fakes = result[0] if isinstance(result, tuple) else result
        for place in asking:
            fakes[place].requires_grad_()
        return result

    module.process_inputs = process_inputs  # type: ignore[attr-defined]


@functools.cache
def loses_gradients_of_pending_inputs() -> bool:
    """Return whether compiled code drops the gradient of an input that a collective has not yet filled.

    This compiles a function of one element without a collective, because torch wraps the results of all collectives in
    one type.
    """
    leaf = torch.ones(1, requires_grad=True)
    with torch.enable_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's compiler reads .grad of non-leaf tensors, which causes a warning.
        pending = _Pending.apply(leaf)
        return not torch.compile(lambda pending: pending * 1.0, backend="aot_eager")(pending).requires_grad


def keep_compiled_graphs_apart() -> None:
    """Disable AOTAutograd's cache of graphs, which ranks share on disk, for the rest of the process.

    The cache's key has a submesh's shape and the ranks of the whole mesh, but not this rank's group, so code of another
    rank refers to a group that does not exist on this rank: https://github.com/pytorch/pytorch/issues/188390. Kernels
    remain cached.
    """
    with contextlib.suppress(ImportError, AttributeError):
        config: Any = importlib.import_module("torch._functorch.config")
        config.enable_autograd_cache = False


def is_compiled(module: Any) -> bool:
    """Return whether the user has called `module.compile()`, or wrapped it in `torch.compile`."""
    return type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None


def accepts_no_hooks(module: Any) -> bool:
    """Return whether a module was compiled in place with fullgraph=True, so that hooks would stop its compilation."""
    compiled = getattr(module, "_compiled_call_impl", None)
    variables = inspect.getclosurevars(compiled).nonlocals if compiled is not None else {}
    return bool(getattr(variables.get("self"), "fullgraph", False))


class _Pending(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, given: Any) -> torch.Tensor:
        return _pending_type()(given.detach())  # type: ignore[no-any-return]

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient


class _Waited(torch.autograd.Function):
    # The wait inside of the wrapper has no autograd history, but the wrapper has a history.
    @staticmethod
    def forward(_: Any, given: Any) -> torch.Tensor:
        return given.wait().detach()

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient


def _held_in(tensor: Any) -> str | None:
    """Return the attribute of a DTensor's local tensor; None for a plain tensor."""
    return tensor.__tensor_flatten__()[0][0] if isinstance(tensor, torch.distributed.tensor.DTensor) else None


def _pending_type() -> Any:
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    return AsyncCollectiveTensor


def call_of(func: Any, args: Any, kwargs: Any) -> CollectiveCall | None:
    """Return the collective that an operator of NAMESPACES issues; None if it does not communicate."""
    name, argument_names = _names_of(func)
    if name in SILENT:
        return None
    arguments = dict(zip(argument_names, args, strict=False)) | kwargs
    group: Any = arguments.get("group_name", arguments.get("process_group"))
    if isinstance(group, str):
        group = dist.distributed_c10d._resolve_process_group(group)  # type: ignore[arg-type]
    elif not isinstance(group, dist.ProcessGroup):
        group = dist.ProcessGroup.unbox(group)
    ranks, kind = tuple(dist.get_process_group_ranks(group)), kind_of(name)
    # Only the root of a scatter has an input.
    inputs = ("output_tensors",) if kind == "scatter" else INPUTS
    tensors = tensors_in(next(arguments[name] for name in inputs if name in arguments))
    numel = sum(tensor.numel() for tensor in tensors) * (len(ranks) if kind in OF_EACH_RANK else 1)
    peer = ranks[arguments[PEERS[kind]]] if kind in PEERS else None
    op, first = f"{func.namespace}.{name}", tensors[0]
    return CollectiveCall(kind, op, ranks, first.dtype, numel, peer, id(first), group.group_name)


def is_async(func: Any, args: Any, kwargs: Any) -> bool:
    """Return whether a collective of c10d runs on its communicator's stream instead of the current stream."""
    arguments = {name.replace("_", "").lower(): value for name, value in arguments_of(func, args, kwargs).items()}
    return bool(arguments.get("asyncop", True))


def tensors_in(value: object) -> list[torch.Tensor]:
    """Return the tensors in nested containers, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple | deque) else ()
    return [tensor for part in parts for tensor in tensors_in(part)]


def is_attention(func: Any) -> tuple[bool, bool]:
    """Return whether an operator is attention's fused forward, and whether it is attention's fused backward."""
    name = func.overloadpacket.__name__
    fused = name.startswith("_scaled_dot_product_") and "attention" in name
    return fused and not name.endswith("_backward"), fused and name.endswith("_backward")


def arguments_of(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """Return an operator's given arguments by name."""
    return dict(zip(_names_of(func)[1], args, strict=False)) | dict(kwargs)


@functools.cache
def _names_of(func: Any) -> tuple[str, tuple[str, ...]]:
    """Return an operator's name without namespace and its arguments' names; cached, because a read takes 50 us."""
    return func._schema.name.split("::")[1], tuple(argument.name for argument in func._schema.arguments)


def written_by(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Return the arguments of an operator that the operator writes to."""
    if not (names := _written_names(func)):
        return []
    arguments = arguments_of(func, args, kwargs)
    return [tensor for name in names for tensor in tensors_in(arguments.get(name))]


@functools.cache
def _written_names(func: Any) -> tuple[str, ...]:
    infos = ((argument.name, argument.alias_info) for argument in func._schema.arguments)
    return tuple(name for name, info in infos if info is not None and info.is_write)


class EndedWork(dist.Work):
    """Work of an ended collective, for c10d's callers.

    Args:
        result: result of the work's future.
        on_wait: called by the first wait, which then drops both arguments, as NCCL's works do.
    """

    def __init__(self, result: Any, on_wait: Callable[[], object]) -> None:
        super().__init__()
        self._result, self._on_wait = result, on_wait

    def wait(self, timeout: Any = None) -> bool:
        """Return at once."""
        on_wait, self._result, self._on_wait = self._on_wait, None, bool
        on_wait()
        return True

    def get_future(self) -> Any:
        """Return an ended future."""
        done: torch.futures.Future[Any] = torch.futures.Future()
        done.set_result(self._result)
        return done


# torch has `gather_into_tensor_` since 2.14.
OPERATORS = (
    *("allreduce_", "allreduce_coalesced_", "broadcast_", "reduce_", "gather_", "gather_into_tensor_", "scatter_"),
    *("allgather_", "_allgather_base_", "allgather_coalesced_", "allgather_into_tensor_coalesced_"),
    *("reduce_scatter_", "_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_", "alltoall_", "alltoall_base_"),
    *("send", "recv_", "recv_any_source_", "barrier"),
)


@dataclass(slots=True)
class Issued:
    """One collective, with times in seconds of CLOCK_MONOTONIC; the end is None until recorded (see `_timed`)."""

    call: CollectiveCall
    issued_s: float
    completed_s: float | None = None
    is_async: bool = False  # The caller may continue before the end of the collective.


@contextlib.contextmanager
def timed_collectives(on_issue: Callable[[Issued], None]) -> Iterator[None]:
    """Call `on_issue` just before each collective of this process is issued; on CPU its end is stamped later."""

    def handle(operator: Any, pass_on: Callable[[], Any], args: Any) -> Any:
        if (call := call_of(operator, args, {})) is None:
            return pass_on()
        issued = Issued(call, time.monotonic(), is_async=is_async(operator, args, {}))
        on_issue(issued)
        result = pass_on()
        if isinstance(result, tuple):  # follows the filled tensors
            return (*result[:-1], _timed(result[-1], issued))
        return _timed(result, issued)

    with _handled(handle):
        yield
    wait_for_stamps(0.001)


@contextlib.contextmanager
def issued_collectives(on_issue: Callable[[CollectiveCall], None]) -> Iterator[None]:
    """Call `on_issue` just before each collective of this process is issued, on any device."""

    def handle(operator: Any, pass_on: Callable[[], Any], args: Any) -> Any:
        if (call := call_of(operator, args, {})) is not None:
            on_issue(call)
        return pass_on()

    with _handled(handle):
        yield


@contextlib.contextmanager
def nothing_sent() -> Iterator[None]:
    """Make the collectives of this process end at once, with undefined received values."""
    works: list[EndedWork] = []  # C++ keeps only half of a work alive
    with _handled(lambda operator, _, args: _ended(operator, args, works)):
        yield


@contextlib.contextmanager
def no_collectives(is_alone: bool = False) -> Iterator[None]:
    """Raise RuntimeError in code that issues a collective, barrier or message.

    Only one rank runs this code, so a collective would never end, or would match the next collective of other ranks.
    With `is_alone` an all-reduce does not change its tensors, as in a group of one rank.
    """
    works: list[EndedWork] = []

    def handle(operator: Any, _: Any, args: Any) -> Any:
        kind = kind_of(_names_of(operator)[0])
        if not is_alone or kind != "all_reduce":
            raise RuntimeError(f"it issues {kind}, but no other rank computes this step")
        return _ended(operator, args, works)

    num_ranks: Any = contextlib.nullcontext()
    if is_alone:
        num_ranks = replaced(dist, "get_world_size", lambda *_, **__: 1)
    with num_ranks, _handled(handle):
        yield


def _ended(operator: Any, args: Any, works: list[EndedWork]) -> Any:
    """Return an operator's results at once, with its tensors as they are; its work is added to `works`."""
    works.append(EndedWork(args[0] if isinstance(args[0], list) else [args[0]], bool))
    return (args[0], works[-1].boxed()) if len(operator._schema.returns) > 1 else works[-1].boxed()


@contextlib.contextmanager
def _handled(handle: Callable[[Any, Callable[[], Any], Any], Any]) -> Iterator[None]:
    """Call `handle(c10d's operator, call of the backend, arguments)` for each collective.

    c10d dispatches all collectives, also those of DDP's reducer in C++, functional collectives and compiled code.
    Kernels of distbench for a dispatch key that c10d leaves free run before the backends' kernels. No other operator
    passes through Python, and process groups are unchanged. Functional collectives of fake tensors do not reach c10d.
    """
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


# Callbacks that a backend's thread still has: it drops them by its last use of the GIL.
_stamps: weakref.WeakSet[Callable[..., None]] = weakref.WeakSet()


def _timed(boxed: Any, issued: Issued) -> Any:
    """Return the caller's work, which stamps the collective's completion; its wait is the collective's wait.

    If the backend returns a future, its thread stamps the completion, and the caller gets the backend's own work, which
    releases waiters after the future's callbacks, so after the stamp. gloo's reduce-scatter has no future, because the
    waiter does half of the work, so the end of the wait is the collective's end. gloo's messages have no future either,
    and a pipeline waits for messages long after their end, so a separate thread waits for each message at once.
    """
    work: Any = dist.Work.unbox(boxed)

    def stamp(_: object = None) -> None:
        issued.completed_s = time.monotonic()

    try:
        future = work.get_future()
    except RuntimeError:

        def wait(timeout: Any) -> bool:
            done = bool(work.wait(timeout))
            stamp()
            return done

        waiter = _waited_for_at_once(work, stamp) if issued.call.kind in PEERS else wait
        return torch._C._distributed_c10d.PythonCallbackWork(waiter).boxed()
    _stamps.add(stamp)
    future.add_done_callback(stamp)
    return boxed


def wait_for_stamps(limit_s: float) -> None:
    """Wait at most so many seconds until the backends' threads have stamped the ends of all timed collectives.

    DDP waits for futures, and waiters of a future continue before its callbacks. A thread of gloo that needs the GIL
    for a callback deadlocks with a DDP model that is the last owner of the process group: `~Reducer` joins the thread,
    and holds the GIL (pytorch/pytorch#56297). At the end of the interpreter such a thread aborts the process.
    """
    ends_at = time.monotonic() + limit_s
    while _stamps and time.monotonic() < ends_at:
        time.sleep(0.0002)


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

    # Not `threading.Thread`, whose start waits for the new thread, on busy CPUs 0.1 ms per message.
    _thread.start_new_thread(wait, ())

    def join(_: object) -> bool:
        with is_over:
            if raised:
                raise raised[0]
        return True

    return join


@contextlib.contextmanager
def coalesced(group: dist.ProcessGroup) -> Iterator[None]:
    """Issue the all-reduces of this block as one collective of several tensors, and wait for it."""
    require(COALESCED)
    with dist.distributed_c10d._coalescing_manager(group=group):
        yield


def default_store() -> Any:
    """Return the store of the default process group, which ranks share without a collective."""
    require(STORE)
    return dist.distributed_c10d._get_default_store()
