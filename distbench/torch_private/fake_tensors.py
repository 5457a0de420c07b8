"""Tensors without values, with which a model of any size runs in seconds, and a simulated device for them."""

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from distbench.torch_private.probe import PENDING, REDUCER, STRATEGIES, Unsupported, replaced, require

# torch can rename one device type per process; the kernels exist as long as their library.
_REGISTERED: dict[str, Any] = {}
_PINNED: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()  # of tensors without values
# Errors of fake tensors, by name.
NEED_VALUES = (
    *("DataDependentOutputException", "DynamicOutputShapeException"),
    *("UnsupportedFakeTensorException", "UnsupportedOperatorException"),
)
# Operators of torch's lists for accelerators that autocast runs in its own dtype, and in f32.
IN_AUTOCAST_DTYPE = ("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "scaled_dot_product_attention", "conv2d")
IN_F32 = ("softmax.int", "log_softmax.int", "layer_norm", "cross_entropy_loss", "nll_loss", "mse_loss")
# Arguments of operators that are equal if their types and values are.
OF_KEYS = {bool, int, float, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}
STRIDED_FLAG = "use_strided_shard_as_shard_order"
ON_LISTS = ("aten::_foreach_", "aten::_fused_")
GROUPED_MM = torch.ops.aten._grouped_mm.default
# Accelerators, but not CPUs, have kernels for these operators.
OWN_KERNELS = ("aten::_fused_rms_norm", "aten::_fused_rms_norm_backward")


class NeedsValues(Unsupported):
    """Code needs a value of a tensor without values; the message is a verb phrase without a subject."""

    is_deed = True


class ShapesOnly:
    """torch's fake tensors: tensors created while `on()` is open have a shape, dtype and device, but no memory."""

    def __init__(self) -> None:
        require("tensors without values")
        from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

        class OnNoDevice(FakeTensorMode):
            # torch.tensor(..., device=D) then makes a CPU tensor and copies it, instead of allocating memory on D.
            avoid_device_init = True

            def __init__(self, **options: Any) -> None:
                super().__init__(**options)
                self._keys: dict[tuple[object, ...], Any] = {}

            def _cache_key(self, *call: Any) -> Any:
                """Return torch's key for its cache of shapes. Keys are kept, because making keys is slow."""
                *_, func, args, kwargs = call
                brief: list[object] = [func, torch.get_default_dtype(), torch.is_inference_mode_enabled()]
                if not self._add(brief, args) or not self._add(brief, kwargs.values()):
                    return super()._cache_key(*call)
                brief += kwargs
                if (key := self._keys.get(made := tuple(brief))) is None:
                    key = self._keys[made] = super()._cache_key(*call)
                return key

            def _add(self, brief: list[object], values: Any) -> bool:
                """Add everything on which torch's key depends; return False for a value of another kind."""
                for value in values:
                    kind = type(value)
                    if kind is FakeTensor:
                        if value.fake_mode is not self or value.constant is not None or value.layout != torch.strided:
                            return False
                        brief += (value.shape, value.stride(), value.storage_offset(), value.dtype, value.fake_device)
                        brief += (value.requires_grad, value.is_conj(), value.is_neg(), value.is_inference())
                        brief.append(value.untyped_storage().nbytes())
                    elif kind is list or kind is tuple:
                        brief += (kind, len(value))
                        if not self._add(brief, value):
                            return False
                    elif kind in OF_KEYS:
                        brief += (kind, value)
                    else:
                        return False
                return True

            def create_symbolic_nested_int(self, **_: Any) -> Any:
                raise NeedsValues(
                    "uses nested tensors, which a simulated step does not have; pack the samples into one tensor by a "
                    "mask (x[mask])"
                )

        self._mode = OnNoDevice(allow_non_fake_inputs=True)

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        """Run the block with shapes only; tensors from outside have no values in the block.

        A gradient scaler finds no overflow. Raises `NeedsValues` if code needs a value, or an operator accepts only
        real tensors.
        """
        from torch.amp.grad_scaler import GradScaler

        # The parameters have torch's names, because a nested block checks the names again.
        def step(self: Any, optimizer: Any, optimizer_state: Any, *args: Any, **kwargs: Any) -> Any:
            return optimizer.step(*args, **kwargs)

        try:
            with self._mode, _WiderRules(), replaced(GradScaler, "_maybe_opt_step", step):
                yield
        except RuntimeError as error:
            if type(error).__name__ not in NEED_VALUES:
                raise
            raise NeedsValues(f"needs values ({getattr(error, 'func', None) or type(error).__name__})") from error
        except ValueError as error:
            if "FlexAttention is only supported" not in str(error):
                raise
            raise NeedsValues(
                "calls flex_attention, which torch runs on no simulated device; use scaled_dot_product_attention "
                '(transformers: attn_implementation="sdpa")'
            ) from error


@contextlib.contextmanager
def with_values_again() -> Iterator[None]:
    """Make tensors with values, or on the meta device, inside the block, even if `ShapesOnly` is active."""
    try:
        require("simulated device")
    except Unsupported:  # In this case no model is built without values.
        yield
        return
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    with unset_fake_temporarily():
        yield


def are_values_off() -> bool:
    """Return whether new tensors currently have no values."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def has_values(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is not fake."""
    from torch._subclasses.fake_tensor import FakeTensor

    return not isinstance(tensor, FakeTensor)


def pinned(tensor: torch.Tensor) -> torch.Tensor:
    """Mark the memory of a tensor without values as pinned memory of the host; return the tensor."""
    _PINNED.add(tensor.untyped_storage())
    return tensor


def is_pinned(tensor: torch.Tensor) -> bool:
    """Return whether a tensor without values is in pinned memory of the host."""
    return tensor.untyped_storage() in _PINNED


class _WiderRules(TorchDispatchMode):
    """Compute shapes for which torch's own rules require more than the operators do.

    `x[mask] = number` does not depend on the number of elements in the mask; vocabulary parallel embeddings use this.
    Accelerators multiply groups of matrices of any dtype. Memory of the host can be pinned without an accelerator.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.is_pinned.default:
            return is_pinned(args[0])
        if func is torch.ops.aten._pin_memory.default:
            return pinned(torch.empty_like(args[0]))
        if func is GROUPED_MM and args[0].dtype != torch.bfloat16:
            return func(*(matrix.bfloat16() for matrix in args[:2]), *args[2:], **(kwargs or {})).to(args[0].dtype)
        if func is torch.ops.aten.index_put_.default and len(args) == 3:
            tensor, (mask, *other_indices), value = args
            if not other_indices and mask is not None and mask.dtype == torch.bool and value.numel() == 1:
                shape = (*mask.shape, *(1 for _ in range(tensor.ndim - mask.ndim)))
                return tensor.masked_fill_(mask.reshape(shape), value.reshape(()))
        return func(*args, **(kwargs or {}))


def simulated_device(name: str, module: Any) -> None:
    """Register a device type in torch, with streams, events and current device of `module`, for tensors without values.

    A repeated call has no effect. Raises Unsupported if torch has given its one extra device type to another name.
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


def streams_of_accelerator(current: Callable[..., Any]) -> contextlib.AbstractContextManager[None]:
    """Replace `torch.accelerator.current_stream`, which FSDP2 calls for frozen units, in the block."""
    return replaced(torch.accelerator, "current_stream", current)


def _kernels_of_accelerators() -> Any:
    """Keep operators whole for which accelerators have kernels, but which torch decomposes on unknown devices.

    torch.nn.functional.silu's backward would be five operators instead of one. torch built for the CPU does not list
    the kernels of accelerators, so the CPU's kernels and the operators named above are used.
    """
    library = torch.library.Library("aten", "IMPL")
    decomposed, on_cpu, own = (
        {name for name in torch._C._dispatch_get_registrations_for_dispatch_key(key) if name.startswith("aten::")}
        for key in ("CompositeImplicitAutograd", "CPU", "PrivateUse1")
    )

    def never(*_: Any, **__: Any) -> Any:
        raise NeedsValues("needs values on a device without values")

    for name in (decomposed & {*on_cpu, *OWN_KERNELS}) - own:
        library.impl(name.removeprefix("aten::"), never, "PrivateUse1")
    # Without a kernel torch would decompose attention into multiplications of queries and keys.
    library.impl("scaled_dot_product_attention", _flash_attention, "AutogradPrivateUse1")
    others = torch.library.Library("_", "IMPL")
    others.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    for name in (*IN_AUTOCAST_DTYPE, *IN_F32):
        library.impl(name, _under_autocast(name), "AutocastPrivateUse1")
    return library, others


def _under_autocast(name: str) -> Callable[..., Any]:
    """Return an operator that casts its floating point inputs, as accelerators' kernels do under autocast."""
    operator = getattr(getattr(torch.ops.aten, name.partition(".")[0]), name.partition(".")[2] or "default")

    def run(*args: Any, **kwargs: Any) -> Any:
        device_type = args[0].device.type
        dtype = torch.float32 if name in IN_F32 else torch.get_autocast_dtype(device_type)

        def cast(value: Any) -> Any:
            return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

        with torch.autocast(device_type, enabled=False):
            return operator(*map(cast, args), **{key: cast(value) for key, value in kwargs.items()})

    return run


@contextlib.contextmanager
def meshes_with_values() -> Iterator[None]:
    """Make meshes in the block with values, because their ranks are read, and on the simulated device, for any device
    type in the code.
    """
    require("simulated device")
    from torch._subclasses.fake_tensor import unset_fake_temporarily
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp._fully_shard import _fully_shard

    shared: dict[tuple[int, ...], tuple[int, ...]] = {}

    def with_values(plain: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with unset_fake_temporarily():
                done = plain(*args, **kwargs)
            # FSDP2 makes a mesh per parameter that lists all ranks, 650 KB at 16,384 ranks.
            ranks = getattr(args[0], "_flatten_rank_map", None) if args else None
            if isinstance(ranks, tuple):
                args[0]._flatten_rank_map = shared.setdefault(ranks, ranks)
            return done

        return run

    def on_device(plain: Callable[..., None]) -> Callable[..., None]:
        return lambda mesh, device_type, *args, **kwargs: plain(mesh, *_REGISTERED, *args, **kwargs)

    with contextlib.ExitStack() as undo:
        for name in ("__init__", "__getitem__", "_flatten", "_concatenate", "_unflatten", "_compute_coordinate_on_dim"):
            original = vars(DeviceMesh).get(name)
            if original is not None:
                is_bound = isinstance(original, staticmethod | classmethod)
                new = type(original)(with_values(original.__func__)) if is_bound else with_values(original)
                if name == "__init__":
                    new = on_device(new)
                setattr(DeviceMesh, name, new)
                undo.callback(setattr, DeviceMesh, name, original)
        # FSDP2 makes the smaller mesh for resharding from a view of another mesh's ranks.
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
def chunks_on_demand() -> Iterator[None]:
    """Make FSDP2 create only the chunks of a parameter that it reads, instead of a chunk per rank."""
    try:
        require("chunks of parameters")
    except Unsupported:  # This is slower, but has the same result.
        yield
        return
    from torch.distributed.fsdp._fully_shard import _fsdp_param

    with replaced(_fsdp_param, "_chunk_with_empty", _Chunks):
        yield


@contextlib.contextmanager
def equal_tensors_once() -> Iterator[None]:
    """Make DTensor choose placements for an operator on lists, as of an optimizer, once per different tensor.

    torch chooses for each tensor, and for each reads the specs of all: the square of the number of parameters, which
    takes most of the time of a large model's first step.
    """
    try:
        require(STRATEGIES)
    except Unsupported:  # slower, with the same result
        yield
        return
    from torch.distributed.tensor._sharding_prop import ShardingPropagator as Propagator

    plain = Propagator.propagate_op_sharding_non_cached

    def chosen(propagator: Any, schema: Any) -> Any:
        if (different := _different(schema)) is None:
            return plain(propagator, schema)
        brief, places = different
        sharding = plain(propagator, brief)
        if sharding.needs_redistribute:
            return plain(propagator, schema)
        if (specs := sharding.output_spec) is not None:
            copies = [specs[place].shallow_copy_with_tensor_meta(specs[place].tensor_meta) for place in places]
            sharding.output_spec = type(specs)(copies)
        return sharding

    with replaced(Propagator, "propagate_op_sharding_non_cached", chosen):
        yield


def _different(schema: Any) -> tuple[Any, list[int]] | None:
    """Return an operator's arguments without repetitions in its lists, and the place of each element among the rest;
    None for an operator without repetitions.
    """
    lists = [arg for arg in schema.args_schema if isinstance(arg, list | tuple)]
    if not schema.op.name().startswith(ON_LISTS) or len({*map(len, lists)}) != 1 or schema.kwargs_schema:
        return None
    first_places: dict[Any, int] = {}
    try:
        # A spec's flag is not part of its comparison.
        keys = ([(of, getattr(of, STRIDED_FLAG, None)) for of in elements] for elements in zip(*lists, strict=True))
        places = [first_places.setdefault(tuple(key), len(first_places)) for key in keys]
    except TypeError:  # a value without a hash
        return None
    if len(first_places) == len(places):
        return None
    columns = zip(*([of for of, _ in key] for key in first_places), strict=True)
    arguments = [type(arg)(next(columns)) if isinstance(arg, list | tuple) else arg for arg in schema.args_schema]
    return type(schema)(schema.op, tuple(arguments), schema.kwargs_schema, schema.schema_info), places


@contextlib.contextmanager
def waited_for_when_used(at_once: bool) -> Iterator[tuple[type, ...]]:
    """Wait for functional collectives at the first use of their result, as an eager step does, unless `at_once`.

    Yields the class of a pending result. torch treats tensors without values as tensors of a compiler, and waits at
    once in graphs.
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
    """Enter `around()` whenever DTensor runs an operator on global shapes only for its metadata."""
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
    """scaled_dot_product_attention by its flash kernel, or by the kernel that accepts masks and values of another size
    than queries.

    No kernel accepts queries other than (batch, heads, sequence, head), for which an accelerator decomposes attention.
    """
    aten: Any = torch.ops.aten
    scale = options.get("scale")
    if query.ndim != 4:
        multiplied_out = aten._scaled_dot_product_attention_math
        return multiplied_out(query, key, value, attn_mask, dropout_p, is_causal, None, **options)[0]
    if attn_mask is None and value.shape[-1] == query.shape[-1]:
        flash = aten._scaled_dot_product_flash_attention
        return flash(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
    efficient = aten._scaled_dot_product_efficient_attention
    return efficient(query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale)[0]


@contextlib.contextmanager
def reducers_on_host(around: Callable[[], contextlib.AbstractContextManager[None]]) -> Iterator[None]:
    """Enter `around()` whenever DDP's reducer, in C++, is made, compares parameters of ranks, or rebuilds buckets.

    In these phases the reducer computes on the host, in its own memory.
    """
    try:
        require(REDUCER)
    except Unsupported:  # In this case torch reports these reads itself.
        yield
        return

    of_reducer = [(dist.Reducer, name) for name in ("_rebuild_buckets", "_set_static_graph")]
    places = [*of_reducer, (dist, "_verify_params_across_processes"), (dist, "Reducer")]
    with contextlib.ExitStack() as undo:
        for owner, name in places:
            undo.enter_context(replaced(owner, name, _within(around, getattr(owner, name))))
        yield
