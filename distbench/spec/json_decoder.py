"""The decoder of records: converts plain JSON data to the type that a file declares, or reports the first wrong field.

A record's type is a `msgspec.Struct`, a dataclass or a NamedTuple. The type's annotations are checked, are the allowed
values in messages, and are exported to docs/run_file.schema.json. Fields that are not in the type may have any value,
so distbench reads files of newer versions that only add fields.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from distbench.spec.errors import UserError, nearest
from distbench.spec.file_io import DAY_S, LATEST, MAX_COUNT, read_json, shown

T = TypeVar("T")

# Types of fields; the description is the allowed value in messages.
Name = Annotated[str, Meta(min_length=1, description="a name")]
Count = Annotated[int, Meta(ge=0, le=MAX_COUNT, description="a whole number >= 0")]
Size = Annotated[int, Meta(ge=1, le=MAX_COUNT, description="a whole number above 0")]
Amount = Annotated[float, Meta(ge=0, description="a number >= 0")]
# A whole number of bytes remains an int.
_BYTES = f"a number from 0 to {MAX_COUNT:g}"
Bytes = (
    Annotated[int, Meta(ge=0, le=MAX_COUNT, description=_BYTES)]
    | Annotated[float, Meta(ge=0, le=MAX_COUNT, description=_BYTES)]
)
Time = Annotated[float, Meta(gt=0, le=DAY_S, description="a time above 0 s and up to a day")]
Duration = Annotated[float, Meta(ge=0, le=DAY_S, description="seconds from 0 up to a day")]
Moment = Annotated[float, Meta(ge=-DAY_S, le=DAY_S, description="seconds within a day")]
Date = Annotated[float, Meta(ge=0, le=LATEST, description="seconds since 1970")]


def among(names: Iterable[str]) -> Meta:
    """Return the annotation for a text out of the given names."""
    return Meta(pattern=rf"^(?:{'|'.join(map(re.escape, names))})\Z", description=f"one of {', '.join(names)}")


_VERSION: Any = Size
_WORDS = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}
_MISSING = re.compile(r"Object missing required field `(.*)`")
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`")
_STEP = re.compile(r"\.(\w+)|\[(\d+|\.\.\.)\]")


def optional(kind: Any, *names: str) -> list[tuple[str, Any, None]]:
    """Return fields of one type for `msgspec.defstruct`; each field may be missing or null."""
    return [(name, kind | None, None) for name in names]


class Format(NamedTuple):
    """The format of a file that is one JSON document.

    Args:
        label: the file's name in messages.
        advice: the next step for a damaged file.
        version_field: the field with the format's version, a whole number.
        newest: the newest version that this distbench reads.
    """

    label: str
    advice: str
    version_field: str = ""
    newest: int = 0


def read_record(path: Path, kind: type[T], form: Format, require: Callable[[T], None] = lambda _: None) -> T:
    """Read a JSON document.

    Args:
        require: check of the record; raises ValueError if fields contradict each other.

    Raises:
        UserError: the file is not readable or newer than this distbench, or a field has a value that is not allowed.
    """
    try:
        record = read_json(path, form.label)
    except UserError as error:
        raise UserError(f"{error}; {form.advice}") from error
    return document(record, kind, f"{form.label} {path}", form, require)


def document(record: Any, kind: type[T], where: str, form: Format, require: Callable[[T], None] = lambda _: None) -> T:
    """Decode a parsed document; `where` begins messages. Raise UserError as `read_record` does."""
    try:
        if form.version_field and isinstance(record, dict):
            version = decode(record.get(form.version_field), _VERSION, form.version_field)
            if version > form.newest:
                raise UserError(f"{where} is newer than this distbench; update distbench")
        value = decode(record, kind)
        require(value)
    except ValueError as error:
        raise UserError(f"{where} cannot be used: {error}; {form.advice}") from error
    return value


def decode(value: Any, kind: type[T], where: str = "") -> T:
    """Convert plain JSON data to a record.

    Args:
        where: the path to `value` if the value is a part of a record.

    Raises:
        ValueError: one sentence with the first wrong field, its value and the allowed values.
    """
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise ValueError(_sentence(error, value, kind, where)) from error


def is_of_type(value: Any, kind: Any) -> bool:
    """Return whether plain JSON data is of a type."""
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError:
        return False
    return True


def _sentence(error: msgspec.ValidationError, value: Any, kind: Any, where: str) -> str:
    text, _, path = str(error).partition(" - at `$")
    for name, index in _STEP.findall(path):
        step, kind, value = _part(kind, value, name, index)
        where += step
    where = where.removeprefix(".")
    inner = f"{where}." if where else ""
    if match := _MISSING.fullmatch(text):
        return f"{inner}{match[1]} is missing"
    if match := _UNKNOWN.fullmatch(text):
        return f"{inner}{match[1]} is unknown ({nearest(match[1], _hints(kind))})"
    if error.__cause__ is not None:  # a check of the type's constructor, in words that begin with a field
        return f"{inner}{text}"
    if where and value is None:
        return f"{where} is missing or null"
    return f"{where or 'it'} is {shown(value)}, not {_allowed(kind)}"


def _part(kind: Any, value: Any, name: str, index: str) -> tuple[str, Any, Any]:
    """Follow one step of msgspec's path into a value; return the step's text, and the type and the value at its end.

    Args:
        name: name of a field; "" for another step.
        index: index of an item, or `...` for a value of a mapping, because msgspec does not report the key.
    """
    for member in _members(kind):
        origin, inner = get_origin(member) or member, get_args(member)
        if name and name in (hints := _hints(origin)):
            return f".{name}", hints[name], value.get(name)
        if index == "..." and issubclass(origin, Mapping):
            key = next(key for key, part in value.items() if not is_of_type(part, inner[1]))
            return f".{key}" if key.isidentifier() else f"[{shown(key)}]", inner[1], value[key]
        if index.isdecimal() and hasattr(origin, "_fields"):
            name = origin._fields[int(index)]
            return f".{name}", _hints(origin)[name], value[int(index)]
        if index.isdecimal() and issubclass(origin, Sequence):
            item_type = inner[int(index)] if origin is tuple and ... not in inner else inner[0]
            return f"[{index}]", item_type, value[int(index)]
    raise AssertionError(f"{kind} has no {name or index}")


def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True) if hasattr(kind, "__annotations__") else {}


def _members(kind: Any) -> list[Any]:
    """The types of a union, or a list of the type, without annotations."""
    if get_origin(kind) is Annotated:
        return _members(get_args(kind)[0])
    if get_origin(kind) in (Union, UnionType):
        return [member for inner in get_args(kind) for member in _members(inner)]
    return [kind]


def _allowed(kind: Any) -> str:
    origin, inner = get_origin(kind) or kind, get_args(kind)
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(_allowed(member) for member in inner if member is not NoneType))
    if origin is Annotated:
        description = next((meta.description for meta in kind.__metadata__ if isinstance(meta, Meta)), None)
        return description or _allowed(inner[0])
    if origin is Literal:
        return f"one of {', '.join(inner)}"
    if origin is tuple and ... not in inner:
        return f"a list ({', '.join(map(_allowed, inner))})"
    if issubclass(origin, Sequence) and origin is not str:
        return f"a list of {_allowed(inner[0])}" if inner and inner[0] is not Any else "a list"
    return _WORDS.get(origin, "an object")
