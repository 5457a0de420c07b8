"""Declarations: dataclasses with a check of each field against its annotation at construction."""

import functools
import inspect
import numbers
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from typing import Any, ClassVar, Literal, Self, Union

from distbench.spec.errors import nearest

MAX_SHOWN = 60
WORDS: dict[Any, str] = {str: "text", int: "a whole number", float: "a number", bool: "True or False", Any: "anything"}
SEVERAL: dict[Any, str] = {int: "whole numbers", float: "numbers"}


class Declared:
    """Base of dataclasses that users construct.

    Raises:
        TypeError: an unknown field, a value of a wrong type, or a function with wrong arguments.
    """

    # Name of a field with a function to the names of the function's arguments.
    called_with: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    # Name of a field of an older version to the advice for its replacement.
    removed_fields: ClassVar[Mapping[str, str]] = {}

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Raise TypeError for names that are not fields."""
        field_names = [field.name for field in fields(cls)]  # type: ignore[arg-type]  # subclasses are dataclasses
        for name in kwargs:
            if name in cls.removed_fields:
                raise TypeError(f"{cls.__name__}.{name} was removed; {cls.removed_fields[name]}")
            if name not in field_names:
                raise TypeError(f"{cls.__name__} has no field {name!r} ({nearest(name, field_names)})")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        """Check each field against its annotation; convert lists to tuples for fields of tuples."""
        kind: Any = type(self)
        for name, hint in _hints(kind).items():
            value = getattr(self, name)
            if isinstance(value, list) and fits(tuple(value), hint):
                object.__setattr__(self, name, tuple(value))
            elif not fits(value, hint):
                instead = f": ({value!r},)" if isinstance(value, str) and fits((value,), hint) else ""
                raise TypeError(f"{kind.__name__}.{name} is {shown(value)}; give {in_words(hint)}{instead}")
            elif callable(value) and name in self.called_with:
                self._require_callable_with(name, value)

    def changed_fields(self) -> dict[str, Any]:
        """Return the fields that differ from their defaults."""
        changed = {}
        for field in fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            default = field.default_factory() if field.default_factory is not MISSING else field.default
            if default is MISSING or repr(value) != repr(default):
                changed[field.name] = value
        return changed

    def arguments_of(self, name: str) -> tuple[str, ...]:
        """Return the argument names of the function in a field."""
        return self.called_with[name]

    def _require_callable_with(self, name: str, function: Callable[..., Any]) -> None:
        arguments = self.arguments_of(name)
        try:
            signature = inspect.signature(function)
        except (TypeError, ValueError):  # functions that are not written in Python may have no signature
            return
        try:
            signature.bind(*arguments)
        except TypeError as error:
            called = f"{name}({', '.join(arguments)})"
            raise TypeError(
                f"{type(self).__name__}.{name} is called as {called}, but accepts {signature}; change its arguments"
            ) from error


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    names = {field.name for field in fields(kind)}
    return {name: hint for name, hint in typing.get_type_hints(kind).items() if name in names}


def fits(value: Any, hint: Any) -> bool:
    """Return whether a value has an annotation's type; for functions, any callable fits."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        return any(fits(value, part) for part in inner)
    if origin is Literal:
        return value in inner
    if origin is not None:
        return isinstance(value, origin) and _parts_fit(value, origin, inner)
    if hint in (int, float):
        kind = numbers.Integral if hint is int else numbers.Real
        return isinstance(value, kind) and not isinstance(value, bool)
    return hint is Any or isinstance(value, type(None) if hint is None else hint)


def _parts_fit(value: Any, origin: Any, inner: tuple[Any, ...]) -> bool:
    if origin is tuple:
        types_of_parts = inner[:1] * len(value) if inner[1:] == (...,) else inner
        return len(value) == len(types_of_parts) and all(map(fits, value, types_of_parts))
    is_mapping = issubclass(origin, Mapping)
    return not is_mapping or all(fits(key, inner[0]) and fits(part, inner[1]) for key, part in value.items())


def in_words(hint: Any) -> str:
    """Describe the allowed values of an annotation in words."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(map(in_words, inner)))
    if origin is Literal:
        return " or ".join(map(repr, inner))
    if origin is tuple:
        several = SEVERAL.get(inner[0]) or in_words(inner[0])
        return f"a tuple of {several}" if inner[1:] == (...,) else f"({', '.join(map(in_words, inner))})"
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return f"a dict of {in_words(inner[0])} to {in_words(inner[1])}"
    if origin is not None:
        return "a function"
    return "None" if hint is type(None) else WORDS.get(hint, f"a {getattr(hint, '__name__', hint)}")


def shown(value: Any) -> str:
    """Describe a value for a message: by its repr if short, else by its type."""
    text = repr(value)
    short = len(text) <= MAX_SHOWN and "\n" not in text and not text.startswith("<")
    return text if short else f"a {type(value).__qualname__}"
