"""What a test asks for: its marker, a function that ranks can find, and arguments that can travel to them."""

import inspect
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from inspect import Parameter
from pathlib import Path
from typing import Any

from distbench.spec import Entry, UserError
from distbench.spec.errors import nearest
from distbench.spec.mesh import check_mesh_dims, format_mesh, mesh_size
from distbench.spec.printable import count_text

DEFAULT_RANKS = 2
DEFAULT_TIMEOUT_S = 300.0
KEYWORDS = ("ranks", "mesh", "timeout_s", "quick")


@dataclass(frozen=True)
class Asked:
    """What `@pytest.mark.distbench(...)` asks for; quick: few samples; given up after `timeout_s` without progress."""

    mesh: dict[str, int]
    timeout_s: float = DEFAULT_TIMEOUT_S
    quick: bool = False


def asked_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Asked:
    """A marker's arguments; UserError for an unknown one, a wrong value, or ranks and a mesh that disagree."""
    if args:
        raise UserError(f"@pytest.mark.distbench takes its arguments by name; write ranks={args[0]!r} or mesh=...")
    for name in kwargs:
        if name not in KEYWORDS:
            raise UserError(f"@pytest.mark.distbench takes no {name!r} ({nearest(name, KEYWORDS)})")
    timeout_s = kwargs.get("timeout_s", DEFAULT_TIMEOUT_S)
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not timeout_s > 0:
        raise UserError(f"@pytest.mark.distbench(timeout_s={timeout_s!r}): give a positive number of seconds")
    return Asked(_mesh(kwargs.get("ranks"), kwargs.get("mesh")), float(timeout_s), bool(kwargs.get("quick", False)))


def _mesh(ranks: Any, mesh: Any) -> dict[str, int]:
    if ranks is not None and not _is_count(ranks):
        raise UserError(f"@pytest.mark.distbench(ranks={ranks!r}): give a whole number, 1 or more")
    if mesh is None:
        return {"dp_shard": DEFAULT_RANKS if ranks is None else ranks}
    if not isinstance(mesh, Mapping) or not mesh or not all(_is_count(size) for size in mesh.values()):
        raise UserError(f"@pytest.mark.distbench(mesh={mesh!r}): give mesh dims and their sizes, such as {{'tp': 2}}")
    check_mesh_dims(mesh)
    if ranks is not None and ranks != mesh_size(mesh):
        raise UserError(
            f"@pytest.mark.distbench(ranks={ranks}, mesh={dict(mesh)}): the mesh {format_mesh(mesh)} has "
            f"{count_text(mesh_size(mesh), 'rank')}; leave ranks out"
        )
    return dict(mesh)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def entry_of(function: Callable[..., Any], axes: Mapping[str, Sequence[Any]], mesh: Mapping[str, int]) -> Entry:
    """The function as a scenario's entry, so that it becomes a job as scenarios do; axes: parameter to its values.

    Raises:
        UserError: ranks could not find the function, or an argument cannot travel to them.
    """
    file = _file_of(function)
    for name, values in axes.items():
        for value in values:
            if not _is_plain(value):
                raise UserError(
                    f"{function.__name__}: argument {name!r} is a {type(value).__name__}, which cannot travel to ranks "
                    "in other processes; give numbers, text, None, lists or dicts of them, and make the rest there"
                )
    params = {name: values[0] for name, values in axes.items()}
    summary = (inspect.getdoc(function) or "").partition("\n")[0]
    swept = {name: tuple(values) for name, values in axes.items()}
    return Entry(function.__name__, file, dict(mesh), swept, {}, (), summary, params)


def _file_of(function: Any) -> Path:
    """The file whose top level has this function under its own name."""
    name = getattr(function, "__name__", "")
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    file = getattr(module, "__file__", None)
    if not callable(function) or not name or not file or getattr(module, name, None) is not function:
        what = getattr(function, "__qualname__", None) or repr(function)
        raise UserError(
            f"distbench got {what}, which ranks in other processes cannot find; give a function from the top level of "
            "a file (no closure, lambda, method or partial) and what it needs as arguments: distbench(function, value)"
        )
    return Path(file).resolve()


def _is_plain(value: Any) -> bool:
    """Whether JSON gives it back (a tuple as a list)."""
    if isinstance(value, list | tuple):
        return all(_is_plain(item) for item in value)
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
    return value is None or type(value) in (bool, int, str) or (type(value) is float and math.isfinite(value))


def arguments_of(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """What the function is called with after the mesh, by parameter name.

    Raises:
        UserError: ranks could not find it, they do not fit its signature, or a parameter has no name to be given by.
    """
    _file_of(function)
    name = getattr(function, "__name__", repr(function))
    signature = inspect.signature(function)
    parameters = list(signature.parameters.values())
    if not parameters or parameters[0].kind not in (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD):
        raise UserError(f"{name} has no first parameter for the mesh; write def {name}(mesh, ...)")
    if any(one.kind in (Parameter.VAR_POSITIONAL, Parameter.POSITIONAL_ONLY) for one in parameters[1:]):
        raise UserError(f"{name} takes arguments without a name after the mesh; give each parameter a name")
    try:
        bound = signature.bind(None, *args, **kwargs).arguments
    except TypeError as error:
        raise UserError(f"{name} cannot be called so: {error}; it gets the mesh first, then what you give") from error
    given: dict[str, Any] = {}
    for one in parameters[1:]:
        if one.name in bound:
            given |= bound[one.name] if one.kind is Parameter.VAR_KEYWORD else {one.name: bound[one.name]}
    return given
