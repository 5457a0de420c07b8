"""Calls the function that builds a model, in the cheapest way that it bears: on the meta device, with values for what
is no parameter, or whole on the CPU."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from distbench.spec import UserError
from distbench.worker.models.trees import mapped, tensors_of
from distbench.worker.rank.failure import blamed, place_of

# Of a model of more parameters none are drawn to learn what is made of them.
MOST_DRAWN = 100_000_000
# What every module has.
OWN_ATTRIBUTES = frozenset(vars(nn.Module()))


def whole_on_cpu(build_model: Callable[[], Any], seed: int) -> Any:
    """A model with all its values, the same on every rank; for one that reads those of its parameters.

    Raises:
        MemoryError: it has more than 100 M parameters.
    """
    with _seeded(seed), torch.device("cpu"), _registering(_at_most(MOST_DRAWN)):
        return build_model()


def built_on_meta(build_model: Callable[[], Any], seed: int) -> tuple[Any, bool]:
    """The model, by its function under the meta device. One that reads values of other tensors than its parameters (the
    rates of stochastic depth, say) is built on the CPU, its parameters alone on the meta device; one that reads these
    too is built with all values first, which is told."""
    needs_values = False
    with blamed("build_model", build_model):
        try:
            with torch.device("meta"):
                return build_model(), False
        except Exception as error:
            try:
                with _parameters_on_meta(), torch.device("cpu"):
                    model = build_model()
            except Exception:
                needs_values = True
                try:
                    model = whole_on_cpu(build_model, seed)
                except Exception:
                    raise error from None
    if isinstance(model, nn.Module):
        _move_parameters(model)
        for module in model.to("meta").modules():
            for attribute, value in list(vars(module).items()):
                if attribute not in OWN_ATTRIBUTES and _tensors(value):
                    setattr(module, attribute, mapped(value, lambda _, one: one.to("meta")))
    return model, needs_values


def _move_parameters(model: nn.Module) -> None:
    """Onto the meta device, those that modules share as one: torch would make each holder its own."""
    moved: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
    for module in model.modules():
        for name, given in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            _, meta = moved.setdefault(id(given), (given, _on_meta(given)))
            module.register_parameter(name, meta)


def built_with_values(
    build_model: Callable[[], Any], seed: int, num_parameters: int, attributes: Mapping[tuple[str, str], Any]
) -> nn.Module:
    """The model with values for what is no parameter, and for its parameters where others are made of them."""
    with blamed("build_model", build_model), _seeded(seed), torch.device("cpu"):
        with _parameters_on_meta():
            model: nn.Module = build_model()
        of_parameters = _without_value(model, attributes)
        if of_parameters is None:
            return model
        if num_parameters > MOST_DRAWN:
            what = f"build_model ({place_of(build_model)}) makes {of_parameters} of parameters"
            raise UserError(f"{what}, which have no values in a model of {num_parameters:,}; make it of constants")
        return build_model()  # type: ignore[no-any-return]


def _without_value(model: nn.Module, attributes: Mapping[tuple[str, str], Any]) -> str | None:
    """The first buffer or attribute that is still on the meta device, as those are that are made of parameters."""
    buffers = (name for name, buffer in model.named_buffers() if buffer.is_meta)
    known = attributes_of(model, attributes)
    others = (".".join(filter(None, key)) for key in attributes if any(one.is_meta for one in _tensors(known.get(key))))
    return next((*buffers, *others).__iter__(), None)


def attributes_of(model: nn.Module, wanted: Iterable[tuple[str, str]] | None = None) -> dict[tuple[str, str], Any]:
    """Tensors on the meta device, or lists, tuples and dicts of them, that modules keep as plain attributes; or those
    that are wanted, wherever they are."""
    keys = None if wanted is None else set(wanted)
    return {
        (name, attribute): value
        for name, module in model.named_modules()
        for attribute, value in vars(module).items()
        if (attribute not in OWN_ATTRIBUTES and any(one.is_meta for one in _tensors(value)))
        or (keys is not None and (name, attribute) in keys)
    }


def _tensors(value: Any) -> list[torch.Tensor]:
    """Of an attribute; parameters among them are registered elsewhere."""
    if not isinstance(value, torch.Tensor | list | tuple | dict):
        return []
    return [one for _, one in tensors_of(value) if not isinstance(one, nn.Parameter)]


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def _parameters_on_meta() -> contextlib.AbstractContextManager[None]:
    return _registering(_on_meta)


def _on_meta(given: nn.Parameter) -> nn.Parameter:
    """One that is there stays what it is, as modules may share it."""
    if given.is_meta:
        return given
    return nn.Parameter(given.detach().to("meta"), requires_grad=given.requires_grad)


def _at_most(number: int) -> Callable[[nn.Parameter], nn.Parameter]:
    total = 0

    def counted(given: nn.Parameter) -> nn.Parameter:
        nonlocal total
        total += given.numel()
        if total > number:
            raise MemoryError(f"more than {number:,} parameters")
        return given

    return counted


@contextlib.contextmanager
def _registering(change: Callable[[nn.Parameter], nn.Parameter]) -> Iterator[None]:
    register = nn.Module.register_parameter

    def register_changed(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(self, name, None if param is None else change(param))

    nn.Module.register_parameter = register_changed  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
