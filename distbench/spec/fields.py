"""What a field of a file may hold: kinds of values, and the first field of a record that holds something else."""

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from distbench.spec.reading import MAX_COUNT

DAY_S = 86_400.0
LATEST = 1e11  # seconds since the epoch, year 5138: beyond it dates cannot be written
MAX_SHOWN = 60
NUMBERS = {int, float}  # exact types: True is an int to isinstance


class Kind(NamedTuple):
    """Which values a field may hold, how a message calls them, and the same as JSON Schema has it."""

    fits: Callable[[Any], bool]
    what: str
    schema: Mapping[str, Any] = MappingProxyType({})


Kinds = Mapping[str, Kind]


def _is_number(value: Any) -> bool:
    return type(value) in NUMBERS and math.isfinite(value)


def _within(low: float, high: float) -> Callable[[Any], bool]:
    return lambda value: type(value) in NUMBERS and low <= value <= high


def is_time(value: Any) -> bool:
    """Whether it is a measured time: seconds above 0 and up to a day."""
    return type(value) in NUMBERS and 0 < value <= DAY_S


def are_times(values: Any) -> bool:
    """Whether it is a list of such times."""
    if not isinstance(values, list):
        return False
    return not values or (NUMBERS.issuperset(map(type, values)) and min(values) > 0 and max(values) <= DAY_S)


def _are_durations(values: Any) -> bool:
    if not isinstance(values, list):
        return False
    return not values or (NUMBERS.issuperset(map(type, values)) and min(values) >= 0 and max(values) <= DAY_S)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_COUNT


def _bounds(low: float, high: float) -> dict[str, Any]:
    return {"type": "number", "minimum": low, "maximum": high}


_TIME = {"type": "number", "exclusiveMinimum": 0, "maximum": DAY_S}
_COUNT = {"type": "integer", "minimum": 0, "maximum": MAX_COUNT}
TEXT = Kind(lambda value: type(value) is str, "text", {"type": "string"})
FLAG = Kind(lambda value: type(value) is bool, "true or false", {"type": "boolean"})
COUNT = Kind(_is_count, "a whole number from 0 on", _COUNT)
SIZE = Kind(lambda value: _is_count(value) and value > 0, "a whole number above 0", {**_COUNT, "minimum": 1})
NUMBER = Kind(_is_number, "a number", {"type": "number"})
AMOUNT = Kind(_within(0, sys.float_info.max), "a number from 0 on", {"type": "number", "minimum": 0})
BYTES = Kind(_within(0, MAX_COUNT), f"a number from 0 to {MAX_COUNT:g}", _bounds(0, MAX_COUNT))
TIME = Kind(is_time, "a time above 0 s and up to a day", _TIME)
DURATION = Kind(_within(0, DAY_S), "seconds from 0 up to a day", _bounds(0, DAY_S))
MOMENT = Kind(_within(-DAY_S, DAY_S), "seconds within a day", _bounds(-DAY_S, DAY_S))
DATE = Kind(_within(0, LATEST), "seconds since 1970", _bounds(0, LATEST))
TIMES = Kind(are_times, "a list of times above 0 s and up to a day", {"type": "array", "items": _TIME})
DURATIONS = Kind(_are_durations, "a list of seconds from 0 up to a day", {"type": "array", "items": _bounds(0, DAY_S)})
RECORD = Kind(lambda value: isinstance(value, dict), "an object", {"type": "object"})
LIST = Kind(lambda value: isinstance(value, list), "a list", {"type": "array"})
NAME = Kind(lambda value: type(value) is str and bool(value), "a name", {"type": "string", "minLength": 1})


def number_within(low: float, high: float) -> Kind:
    """A number within bounds, which belong to it."""
    return Kind(_within(low, high), f"a number from {low:g} to {high:g}", _bounds(low, high))


def one_of(names: Sequence[str]) -> Kind:
    """One of these texts."""
    known = frozenset(names)
    return Kind(
        lambda value: isinstance(value, str) and value in known,
        f"one of {', '.join(names)}",
        {"enum": list(names)},
    )


def list_of(kind: Kind) -> Kind:
    """A list of values of that kind."""
    return Kind(
        lambda value: isinstance(value, list) and all(map(kind.fits, value)),
        f"a list of {kind.what}",
        {"type": "array", "items": kind.schema},
    )


def mapping_of(kind: Kind) -> Kind:
    """An object whose values are all of that kind."""
    return Kind(
        lambda value: isinstance(value, dict) and all(map(kind.fits, value.values())),
        f"an object with {kind.what} in each place",
        {"type": "object", "additionalProperties": kind.schema},
    )


def or_none(kind: Kind) -> Kind:
    """Such a value, or null."""
    return Kind(lambda value: value is None or kind.fits(value), f"{kind.what} or null", nullable(kind.schema))


def nullable(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema, or null."""
    return {"anyOf": [dict(schema), {"type": "null"}]}


def wrong_field(record: Mapping[str, Any], kinds: Kinds, needed: Sequence[str] = (), within: str = "") -> str | None:
    """The first field that holds something else than its kind, or is needed and missing, in words; None for none.

    A field that is null counts as missing; fields that `kinds` does not name may hold anything.

    Args:
        within: put before a field's name, such as `case.`.
    """
    for name in needed:
        if record.get(name) is None:
            return f"{within}{name} is missing"
    for name, value in record.items():
        if value is not None and (kind := kinds.get(name)) and not kind.fits(value):
            return f"{within}{name} {_what_it_is(value, kind)}, not {kind.what}"
    return None


def _what_it_is(value: Any, kind: Kind) -> str:
    """Of a list or an object, the first part that is wrong by itself."""
    parts: list[tuple[Any, Any]] = []
    if isinstance(value, list):
        parts = [(one, [one]) for one in value]
    elif isinstance(value, dict):
        parts = [(one, {name: one}) for name, one in value.items()]
    return next((f"holds {shown(one)}" for one, part in parts if not kind.fits(part)), f"is {shown(value)}")


def shown(value: Any) -> str:
    """A value for a message: its beginning, on one line."""
    if isinstance(value, list | dict):
        kind = "a list" if isinstance(value, list) else "an object"
        return f"{kind} of {len(value)}"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    text = ascii(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."
