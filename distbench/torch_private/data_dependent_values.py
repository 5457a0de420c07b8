"""Values of tensors that follow from constants, shapes, the batch and assumptions, in a step without other values."""

import contextlib
import fnmatch
import math
import re
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules import module as global_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from distbench.spec.assumptions import Assumption
from distbench.spec.expert_loads import UNIFORM, choice_ends, weights_of
from distbench.torch_private.collectives import NAMESPACES, arguments_of, call_of, tensors_in, written_by
from distbench.torch_private.fake_tensors import (
    NEED_VALUES,
    NeedsValues,
    are_values_off,
    has_values,
    with_values_again,
)
from distbench.torch_private.probe import replaced, require

# The largest number of elements of a tensor whose values are kept.
MAX_KNOWN = 1 << 22
# Operators that choose, with the position of the chosen indices.
CHOOSE = ("topk", "max", "min", "argmax", "argmin", "sort", "multinomial")
READ = "_local_scalar_dense"
EMPTY = ("empty", "new_empty")
NO_VALUE = "needs a tensor's value, which a simulated step does not have"


class KnownValues(TorchDispatchMode):
    """Mode that keeps values of tensors that do not depend on parameters, so that code and shapes may depend on the
    values.

    On the host, a tensor with known values is real. On a device, a tensor has no memory, and its values are kept by
    storage. All ranks are assumed to send the same values in a collective.

    Args:
        assume: glob pattern over module names to an assumption for all choices, masks and reads of these modules.
    """

    def __init__(self, assume: Mapping[str, Assumption] | None = None) -> None:
        super().__init__()
        require("tensors without values")
        from torch._subclasses.fake_tensor import FakeTensor

        self._fake, self._assume = FakeTensor, assume or {}
        self._kept: weakref.WeakKeyDictionary[torch.UntypedStorage, torch.UntypedStorage] = weakref.WeakKeyDictionary()
        self._unknown: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()  # real storages that were written into
        self._other_counts: dict[str, str] = {}  # modules whose assumed counts are of another number of choices
        self._chosen_in: weakref.WeakKeyDictionary[torch.UntypedStorage, str] = weakref.WeakKeyDictionary()
        self._names: dict[nn.Module, str] = {}
        self._running: list[nn.Module] = []
        self.used: set[str] = set()

    @contextlib.contextmanager
    def on(self, model: nn.Module | None = None) -> Iterator[None]:
        """Keep values while the block runs, inside of `ShapesOnly.on()`."""
        self._names = {} if model is None else {module: name for name, module in model.named_modules()}
        self._running.clear()
        enter = global_hooks.register_module_forward_pre_hook(lambda module, _: self._running.append(module))
        leave = global_hooks.register_module_forward_hook(lambda *_: self._leave(), always_call=True)
        try:
            # C++ reads the memory of a tensor on the host.
            with self, self._checked("tolist"), self._checked("numpy"):
                yield
        finally:
            enter.remove()
            leave.remove()

    def _leave(self) -> None:
        self._running.pop()

    def _checked(self, name: str) -> contextlib.AbstractContextManager[None]:
        plain = getattr(torch.Tensor, name)

        def read(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if has_values(tensor) and not self._knows([tensor]):
                number = self._number(tensor)
                with with_values_again():
                    tensor = torch.full_like(tensor, number)
            return plain(tensor, *args, **kwargs)

        return replaced(torch.Tensor, name, read)

    @property
    def _place(self) -> str:
        """Return the name of the innermost running module; "" for the root."""
        return next((self._names[module] for module in reversed(self._running) if module in self._names), "")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind is not self._fake for kind in types):
            return NotImplemented  # subclasses dispatch first; the operators that they issue return here
        kwargs = kwargs or {}
        if not are_values_off():
            return func(*args, **kwargs)
        tensors = tensors_in([args, kwargs])
        if func.overloadpacket.__name__ == READ:
            return self._number(args[0])
        if func.namespace in NAMESPACES:
            return self._communicated(func, args, kwargs)
        func, args = self._indices_of_masks(func, args)
        try:
            out = func(*args, **kwargs)
        except RuntimeError as error:
            if type(error).__name__ not in NEED_VALUES:
                raise
            out = None
            if not self._knows(tensors):
                self._need(tensors, f"needs values ({func})", error)
        if self._knows(tensors) and self._can_compute(func, tensors, out):
            return self._computed(func, args, kwargs, out)
        self._forget(written_by(func, args, kwargs))
        self._note_choices(func, args, kwargs, tensors, out)
        return out

    def _values(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return a tensor's values, in memory that its views share; None if unknown."""
        if not self._knows([tensor]) or has_values(tensor):
            return tensor if self._knows([tensor]) else None
        kept = self._kept[tensor.untyped_storage()]
        with with_values_again():
            values = torch.empty(0, dtype=tensor.dtype)
            return values.set_(kept, tensor.storage_offset(), tensor.shape, tensor.stride())

    def _knows(self, tensors: Sequence[torch.Tensor]) -> bool:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if has_values(tensor):
                if tensor.is_meta or storage in self._unknown:
                    return False
            elif (kept := self._kept.get(storage)) is None or kept.nbytes() != storage.nbytes():
                return False
        return True

    def _can_compute(self, func: Any, tensors: Sequence[torch.Tensor], out: Any) -> bool:
        outputs = tensors_in(out)
        if any(tensor.is_meta for tensor in outputs) or sum(tensor.numel() for tensor in outputs) > MAX_KNOWN:
            return False
        on_host = all(tensor.device.type == "cpu" for tensor in (*tensors, *outputs))
        # Random numbers of the device and unwritten memory have no known values.
        is_drawn = torch.Tag.nondeterministic_seeded in func.tags
        is_made = func.overloadpacket.__name__.startswith(EMPTY) and outputs[0].is_floating_point()
        return on_host or not (is_drawn or is_made)

    def _computed(self, func: Any, args: Any, kwargs: Any, out: Any) -> Any:
        """Run an operator with values; return real results on the host, and results without memory on a device."""
        device = next((tensor.device for tensor in tensors_in([args, kwargs]) if tensor.device.type != "cpu"), None)
        with_values = _mapped([args, kwargs], self._values)
        if "device" in kwargs:
            with_values[1]["device"] = torch.device("cpu")
        with with_values_again():
            with_values[1].pop("pin_memory", None)
            try:
                done = func(*with_values[0], **with_values[1])
            except NotImplementedError:  # a kernel that only accelerators have
                self._forget(written_by(func, args, kwargs))
                return out
            if func.overloadpacket.__name__.startswith(EMPTY):
                done.zero_()
        if out is None:  # The shape of the result was unknown.
            out = _mapped(done, lambda tensor: torch.empty_like(tensor, device=device or "cpu"))
        results = tensors_in(done)
        for shapes, values in zip(tensors_in(out), results, strict=True):
            if shapes.device.type != "cpu":
                self._keep(shapes, values)
        places = iter(results)

        def chosen(tensor: torch.Tensor) -> torch.Tensor:
            values = next(places)
            return values if tensor.device.type == "cpu" else tensor

        return _mapped(out, chosen)

    def _keep(self, tensor: torch.Tensor, values: torch.Tensor) -> None:
        """Keep values of a tensor on a device; views and in-place operators have already changed the values."""
        storage = tensor.untyped_storage()
        kept = self._kept.get(storage)
        if kept is None or kept.nbytes() != storage.nbytes():
            with with_values_again():
                self._kept[storage] = torch.zeros(storage.nbytes(), dtype=torch.uint8).untyped_storage()
        elif kept.data_ptr() == values.untyped_storage().data_ptr():
            return
        into = self._values(tensor)
        assert into is not None
        with with_values_again():
            into.copy_(values)

    def _forget(self, tensors: Sequence[torch.Tensor]) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._kept.pop(storage, None)
            self._chosen_in.pop(storage, None)
            if has_values(tensor):
                self._unknown.add(storage)

    def _number(self, tensor: torch.Tensor) -> Any:
        if (values := self._values(tensor)) is not None:
            with with_values_again():
                return values.item()
        assumed = self._assumed_at(self._place)
        if isinstance(assumed, float):
            return (
                bool(assumed) if tensor.dtype == torch.bool else assumed if tensor.is_floating_point() else int(assumed)
            )
        self._need([tensor], NO_VALUE)

    def _indices_of_masks(self, func: Any, args: Any) -> tuple[Any, Any]:
        """Replace known masks, and masks with an assumed share, by the indices of the kept elements."""
        name = func.overloadpacket.__name__
        if name == "nonzero":
            self._know_mask(args[0])
        if name == "masked_select" and args[0].shape == args[1].shape:
            by_index, indexed = self._indices_of_masks(torch.ops.aten.index.Tensor, (args[0], [args[1]]))
            return (func, args) if indexed[1][0] is args[1] else (by_index, indexed)
        if name not in ("index", "index_put", "index_put_"):
            return func, args
        indices: list[Any] = []
        for index in args[1]:
            if index is None or index.dtype != torch.bool:
                indices.append(index)
                continue
            self._know_mask(index)
            if not self._knows([index]):
                return func, args
            # The mode is inactive here, so run it for the indices.
            coordinates = self.__torch_dispatch__(torch.ops.aten.nonzero.default, (), (index,))
            indices += [self._column(coordinates, place) for place in range(index.ndim)]
        return func, (args[0], indices, *args[2:])

    def _column(self, coordinates: torch.Tensor, place: int) -> torch.Tensor:
        column: torch.Tensor = self.__torch_dispatch__(torch.ops.aten.select.int, (), (coordinates, 1, place))
        return column

    def _know_mask(self, mask: torch.Tensor) -> None:
        if mask.dtype != torch.bool or self._knows([mask]):
            return
        if not isinstance(share := self._assumed_at(self._place), float):
            return
        if not 0 <= share <= 1:
            raise NeedsValues(f"masks elements, but --assume gives {share:g}; give the kept share from 0 to 1")
        storage = mask.untyped_storage()
        with with_values_again():
            steps = torch.arange(storage.nbytes() + 1, dtype=torch.float64).mul(share).add(1e-9).floor()
            self._kept[storage] = (
                steps.diff().bool().untyped_storage()
            )  # the whole storage, because a mask may be expanded

    def _note_choices(self, func: Any, args: Any, kwargs: Any, tensors: Sequence[torch.Tensor], out: Any) -> None:
        """Give the assumed values to indices that a module chooses; remember the module of other indices."""
        outputs = [tensor for tensor in tensors_in(out) if not tensor.is_floating_point() and not tensor.is_complex()]
        if func.overloadpacket.__name__ in CHOOSE and tensors and tensors[0].is_floating_point():
            for indices in outputs:
                load = self._assumed_at(self._place)
                if isinstance(load, str | list):
                    self._choose(indices, func, args, kwargs, load)
                else:
                    self._chosen_in[indices.untyped_storage()] = self._place
            return
        origins = (self._chosen_in.get(tensor.untyped_storage()) for tensor in tensors)
        if (origin := next((name for name in origins if name is not None), None)) is not None:
            for tensor in outputs:
                self._chosen_in[tensor.untyped_storage()] = origin

    def _choose(self, indices: torch.Tensor, func: Any, args: Any, kwargs: Any, load: Any) -> None:
        """Let rows choose by the load; choices of a row differ unless a share is above one choice per row."""
        arguments = arguments_of(func, args, kwargs)
        scores: torch.Tensor = arguments["self"]
        dim = arguments.get("dim", -1)
        if dim is None or not scores.ndim:
            return
        count = scores.shape[dim]
        if isinstance(load, list) and len(load) != count:
            self._other_counts[self._place] = f"has {len(load)} counts, but the module chooses from {count}"
            self._chosen_in[indices.untyped_storage()] = self._place
            return
        with with_values_again():
            is_kept = indices.ndim == scores.ndim
            shape = list(indices.shape) if is_kept else [*indices.shape, 1]
            num_choices = shape.pop(dim if is_kept else -1)
            numel = indices.numel()
            weights = load if isinstance(load, list) else weights_of(load, count, num_choices)
            ends = torch.tensor(choice_ends(weights, numel))
            chosen = torch.searchsorted(ends, torch.arange(numel), right=True)
            values = chosen.reshape(num_choices, *shape)
            self._keep(indices, values.movedim(0, dim) if is_kept else values[0])

    def _communicated(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Fill the result of a collective from this rank's own values, as all ranks would send them."""
        call = call_of(func, args, kwargs)
        tensors = tensors_in([args, kwargs])
        out = func(*args, **kwargs)
        returned = [tensor for tensor in tensors_in(out) if tensor.dtype != torch.bool]
        if call is None:  # This operator waits or wraps.
            if tensors and returned and (values := self._values(tensors[0])) is not None:
                self._keep_or_forget(returned[0], values)
            return out
        is_functional = func.namespace != "c10d"
        outputs = returned if is_functional else tensors_in(args[0])
        inputs = (
            tensors_in(args[0]) if is_functional or call.kind in ("all_reduce", "broadcast") else tensors_in(args[1])
        )
        for place, output in enumerate(outputs):
            values = self._values(inputs[place * len(inputs) // len(outputs)]) if inputs else None
            with with_values_again():
                filled = None if values is None else _received(call.kind, values, call.ranks, output.shape)
            self._keep_or_forget(output, filled)
        return out

    def _keep_or_forget(self, tensor: torch.Tensor, values: torch.Tensor | None) -> None:
        if values is None or tensor.numel() > MAX_KNOWN:
            self._forget([tensor])
        elif has_values(tensor):
            with with_values_again():
                tensor.copy_(values)
        else:
            self._keep(tensor, values)

    def _assumed_at(self, name: str) -> Assumption | None:
        for pattern, assumed in self._assume.items():
            if fnmatch.fnmatchcase(name, pattern):
                self.used.add(pattern)
                return assumed
        return None

    def _need(self, tensors: Sequence[torch.Tensor], what: str, cause: Exception | None = None) -> None:
        """Raise NeedsValues with a sufficient assumption."""
        origins = (self._chosen_in.get(tensor.untyped_storage()) for tensor in tensors)
        chosen_in = next((name for name in origins if name is not None), None)
        where = f"module {name!r}" if (name := self._place if chosen_in is None else chosen_in) else "the root module"
        value = UNIFORM
        if chosen_in is None:
            is_mask = what != NO_VALUE and any(tensor.dtype == torch.bool for tensor in tensors)
            value = "SHARE, the kept share of its mask" if is_mask else "NUMBER, the value read"
        why = f"in {where}" if chosen_in is None else f"from a choice by {where}"
        pattern = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name) or "*"
        option, comma, meaning = value.partition(", ")
        explained = f" ({meaning})" if comma else ""
        if chosen_in in self._other_counts:
            why += f": --assume {self._other_counts[chosen_in]}"
            option = f"FILE of this model, or {option}"
        raise NeedsValues(f"{what}, {why}; give --assume '{pattern}={option}'{explained}") from cause


def _received(kind: str, sent: torch.Tensor, ranks: Sequence[int], shape: Sequence[int]) -> torch.Tensor | None:
    """Return the values that this rank receives if all ranks send the same; None if unknown."""
    size = len(ranks)
    if kind == "broadcast":
        return sent
    if kind == "all_gather":
        is_whole = math.prod(shape) == size * sent.numel()
        return (sent.reshape(-1).repeat(size) if is_whole else sent).reshape(tuple(shape))
    if kind == "all_to_all" and tuple(sent.shape) == tuple(shape) and sent.shape[0] % size == 0:
        return sent.chunk(size)[ranks.index(dist.get_rank())].repeat(size, *(1 for _ in shape[1:]))
    return None


def _mapped(tree: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    if isinstance(tree, torch.Tensor):
        return change(tree)
    if isinstance(tree, dict):
        return {name: _mapped(value, change) for name, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(_mapped(value, change) for value in tree)
    return tree
