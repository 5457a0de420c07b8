"""Tensors without values, on which a model of any size runs in seconds, and a device without hardware for them."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from distbench.torch_private.probe import PENDING, REDUCER, Unsupported, replaced, require

# torch has one device type to give away in a process; its kernels are there as long as their library.
_REGISTERED: dict[str, Any] = {}
# What fake tensors raise, by name.
NEED_VALUES = (
    *("DataDependentOutputException", "DynamicOutputShapeException"),
    *("UnsupportedFakeTensorException", "UnsupportedOperatorException"),
)
# Accelerators have kernels for these, a CPU has not.
OWN_KERNELS = ("aten::_fused_rms_norm", "aten::_fused_rms_norm_backward")


class NeedsValues(Unsupported):
    """Code asks for a value where only shapes are; the message is what it does, without a subject."""

    is_deed = True


class ShapesOnly:
    """torch's fake tensors: what is created while `on()` is open has a shape, dtype and device, but no memory."""

    def __init__(self) -> None:
        require("tensors without values")
        from torch._subclasses.fake_tensor import FakeTensorMode

        self._mode = FakeTensorMode(allow_non_fake_inputs=True)

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        """Run what is inside on shapes alone; `NeedsValues` where it asks for a value, or for an operator that takes
        real tensors only. Tensors from outside lose their values inside."""
        try:
            with self._mode, _MaskedWrites():
                yield
        except RuntimeError as error:
            if type(error).__name__ not in NEED_VALUES:
                raise
            raise NeedsValues(f"asks for values ({getattr(error, 'func', None) or type(error).__name__})") from error


@contextlib.contextmanager
def with_values_again() -> Iterator[None]:
    """Tensors made inside have values, or lie on the meta device, though `ShapesOnly` may be on."""
    try:
        require("simulated device")
    except Unsupported:  # nothing is built while they have none
        yield
        return
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    with unset_fake_temporarily():
        yield


def has_values(tensor: torch.Tensor) -> bool:
    """Whether a tensor is no fake one."""
    from torch._subclasses.fake_tensor import FakeTensor

    return not isinstance(tensor, FakeTensor)


class _MaskedWrites(TorchDispatchMode):
    """`x[mask] = number` without asking how many elements the mask has; vocabulary parallel embeddings do that."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.index_put_.default and len(args) == 3:
            tensor, (mask, *other_indices), value = args
            if not other_indices and mask is not None and mask.dtype == torch.bool and value.numel() == 1:
                shape = (*mask.shape, *(1 for _ in range(tensor.ndim - mask.ndim)))
                return tensor.masked_fill_(mask.reshape(shape), value.reshape(()))
        return func(*args, **(kwargs or {}))


def simulated_device(name: str, module: Any) -> None:
    """Make a device type known to torch, with the streams, events and current device of `module`, for tensors without
    values. The same again does nothing; Unsupported where torch has given its one extra device type to another.
    """
    require("simulated device")
    if name in _REGISTERED:
        return
    from torch.distributed import Backend
    from torch.testing._internal.distributed import fake_pg  # noqa: F401 - it registers the backend
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    try:
        _setup_privateuseone_for_python_backend(name, backend_module=module)
    except RuntimeError as error:
        raise Unsupported(f"torch cannot simulate a device in this process: {error}") from error
    capable = Backend.backend_capability["fake"]
    capable += [] if name in capable else [name]
    Backend.default_device_backend_map[name] = "fake"
    _REGISTERED[name] = _kernels_of_accelerators()


def _kernels_of_accelerators() -> Any:
    """Keep operators whole that accelerators have kernels for, and that torch decomposes on unknown devices.

    torch.nn.functional.silu's backward would be five operators instead of one. A torch built for the CPU alone does not
    know the kernels of accelerators: taken are those of the CPU, and those named above.
    """
    library = torch.library.Library("aten", "IMPL")
    decomposed, on_cpu, own = (
        {name for name in torch._C._dispatch_get_registrations_for_dispatch_key(key) if name.startswith("aten::")}
        for key in ("CompositeImplicitAutograd", "CPU", "PrivateUse1")
    )

    def never(*_: Any, **__: Any) -> Any:
        raise NeedsValues("asks for values on a device that has none")

    for name in (decomposed & {*on_cpu, *OWN_KERNELS}) - own:
        library.impl(name.removeprefix("aten::"), never, "PrivateUse1")
    # Without a kernel torch would multiply queries and keys out.
    library.impl("scaled_dot_product_attention", _flash_attention, "AutogradPrivateUse1")
    return library


@contextlib.contextmanager
def meshes_with_values() -> Iterator[None]:
    """Give values to meshes that are made while tensors have none: their ranks are read."""
    require("simulated device")
    from torch._subclasses.fake_tensor import unset_fake_temporarily
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp._fully_shard import _fully_shard

    shared: dict[tuple[int, ...], tuple[int, ...]] = {}

    def with_values(plain: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with unset_fake_temporarily():
                done = plain(*args, **kwargs)
            # FSDP2 makes a mesh a parameter, and each lists all ranks: 650 KB at 16,384 of them.
            ranks = getattr(args[0], "_flatten_rank_map", None) if args else None
            if isinstance(ranks, tuple):
                args[0]._flatten_rank_map = shared.setdefault(ranks, ranks)
            return done

        return run

    with contextlib.ExitStack() as undo:
        for name in ("__init__", "__getitem__", "_flatten", "_concatenate", "_unflatten", "_compute_coordinate_on_dim"):
            original = vars(DeviceMesh).get(name)
            if original is not None:
                is_bound = isinstance(original, staticmethod | classmethod)
                new = type(original)(with_values(original.__func__)) if is_bound else with_values(original)
                setattr(DeviceMesh, name, new)
                undo.callback(setattr, DeviceMesh, name, original)
        # FSDP2 makes the smaller mesh that it reshards to out of a view of another one's ranks.
        smaller = "_get_post_forward_mesh_info"
        undo.enter_context(replaced(_fully_shard, smaller, with_values(getattr(_fully_shard, smaller))))
        yield


class _Chunks:
    """A parameter's chunks, each made at its first use."""

    def __init__(self, tensor: torch.Tensor, num_chunks: int, dim: int) -> None:
        self._tensor, self._dim = tensor, dim
        self._length = -(-tensor.size(dim) // num_chunks)

    def __getitem__(self, number: int) -> torch.Tensor:
        start = number * self._length
        length = min(self._tensor.size(self._dim) - start, self._length)
        return self._tensor.narrow(self._dim, start, length) if length > 0 else self._tensor.new_empty(0)


@contextlib.contextmanager
def chunks_when_asked_for() -> Iterator[None]:
    """Have FSDP2 make those chunks of a parameter that it looks at, instead of one per rank of thousands."""
    try:
        require("chunks of parameters")
    except Unsupported:  # it is slower then, with the same result
        yield
        return
    from torch.distributed.fsdp._fully_shard import _fsdp_param

    with replaced(_fsdp_param, "_chunk_with_empty", _Chunks):
        yield


@contextlib.contextmanager
def waited_for_when_used(at_once: bool) -> Iterator[tuple[type, ...]]:
    """Wait for functional collectives at the first use of their result, as an eager step does, unless `at_once`; yields
    the class of a result that nobody has waited for yet.

    torch takes tensors without values for a compiler at work, and waits in its graphs at once.
    """
    if at_once:
        yield ()
        return
    require("simulated device")
    require(PENDING)
    from torch.distributed import _functional_collectives

    with replaced(_functional_collectives, "_are_we_tracing", lambda: False):
        yield (_functional_collectives.AsyncCollectiveTensor,)


@contextlib.contextmanager
def global_metadata(around: Callable[[], contextlib.AbstractContextManager[None]]) -> Iterator[None]:
    """Enter `around()` whenever DTensor runs an operator on global shapes only to learn its metadata."""
    require("simulated device")
    from torch.distributed.tensor._sharding_prop import ShardingPropagator as Propagator

    within = _within(around, Propagator._propagate_tensor_meta_non_cached)
    with replaced(Propagator, "_propagate_tensor_meta_non_cached", within):
        yield


def _within(around: Callable[[], contextlib.AbstractContextManager[None]], plain: Callable[..., Any]) -> Any:
    def run(*args: Any, **kwargs: Any) -> Any:
        with around():
            return plain(*args, **kwargs)

    return run


def _flash_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> torch.Tensor:
    """scaled_dot_product_attention by its flash kernel; with a mask, by the one that takes it as a bias.

    No kernel takes queries that are not (batch, heads, sequence, head): an accelerator multiplies those out.
    """
    aten: Any = torch.ops.aten
    scale = options.get("scale")
    if query.ndim != 4:
        multiplied_out = aten._scaled_dot_product_attention_math
        return multiplied_out(query, key, value, attn_mask, dropout_p, is_causal, None, **options)[0]
    if attn_mask is None:
        flash = aten._scaled_dot_product_flash_attention
        return flash(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
    efficient = aten._scaled_dot_product_efficient_attention
    return efficient(query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale)[0]


@contextlib.contextmanager
def reducers_on_host(around: Callable[[], contextlib.AbstractContextManager[None]]) -> Iterator[None]:
    """Enter `around()` whenever DDP's reducer, in C++, is made, compares the ranks' parameters, or makes its buckets
    again: there it counts on the host, in memory of its own."""
    try:
        require(REDUCER)
    except Unsupported:  # torch then reports what it reads
        yield
        return

    of_reducer = [(dist.Reducer, name) for name in ("_rebuild_buckets", "_set_static_graph")]
    places = [*of_reducer, (dist, "_verify_params_across_processes"), (dist, "Reducer")]
    with contextlib.ExitStack() as undo:
        for owner, name in places:
            undo.enter_context(replaced(owner, name, _within(around, getattr(owner, name))))
        yield


class EndedWork(dist.Work):
    """A collective that has ended, as c10d hands them out.

    Args:
        result: of its future.
        on_wait: called by the first wait; then both are forgotten, as by NCCL's works.
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
        """Return a future that has ended, too."""
        done: torch.futures.Future[Any] = torch.futures.Future()
        done.set_result(self._result)
        return done
