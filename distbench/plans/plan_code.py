"""A plan or a plan's change as Python code, with imports."""

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

import torch

from distbench.spec import ParallelPlan
from distbench.spec.checked_dataclass import Declared

MAX_LINE = 90
PLACEMENTS = ("Replicate", "Shard", "Partial")
# Arguments that torch stores under another name, or that classes do not show: class to argument to attribute.
KEPT_AS: Mapping[str, Mapping[str, Callable[[Any], Any]]] = {
    "Replicate": {},
    "Shard": {"dim": lambda placement: placement.dim},
    "Partial": {"reduce_op": lambda placement: placement.reduce_op},
    "SequenceParallel": {"sequence_dim": lambda style: style.sequence_sharding[0].dim},
    "PrepareModuleInputOutput": {
        "input_layouts": lambda style: style.prepare_module_input.input_layouts,
        "desired_input_layouts": lambda style: style.prepare_module_input.desired_input_layouts,
        "input_kwarg_layouts": lambda style: style.prepare_module_input.input_kwarg_layouts,
        "desired_input_kwarg_layouts": lambda style: style.prepare_module_input.desired_input_kwarg_layouts,
        "use_local_input": lambda style: style.prepare_module_input.use_local_output,
        "output_layouts": lambda style: style.prepare_module_output.output_layouts,
        "desired_output_layouts": lambda style: style.prepare_module_output.desired_output_layouts,
        "use_local_output": lambda style: style.prepare_module_output.use_local_output,
    },
}

# Attributes that torch sets on a style when the plan is applied; they are not part of its constructor call.
SET_BY_APPLYING: Mapping[str, frozenset[str]] = {
    "ParallelStyle": frozenset({"src_data_rank"}),
    "RowwiseParallel": frozenset({"desired_input_layouts"}),
}


class _NoText(Exception):
    """A value that no code reproduces: a lambda, or an object that does not store its arguments."""


def plan_code(plan: ParallelPlan) -> list[str] | None:
    """Return lines of Python, imports first and `plan = ...` last; a comment lists names of the scenario's own files.

    None if a value cannot be written as code.
    """
    return _assignment(lambda writer: writer.text(plan))


def change_code(before: ParallelPlan, after: ParallelPlan) -> list[str] | None:
    """Return lines of Python, imports first, that change the plan `before` to `after`; [] if they are equal.

    None if a value that differs cannot be written as code.

    >>> change_code(ParallelPlan(), ParallelPlan(microbatches=2))
    ['from dataclasses import replace', 'plan = replace(plan, microbatches=2)']
    """
    if before == after:
        return []
    return _assignment(lambda writer: writer.difference(before, after, "plan"))


def _assignment(write: "Callable[[_Writer], str]") -> list[str] | None:
    writer = _Writer()
    try:
        text = write(writer)
    except _NoText:
        return None
    return [*writer.imports(), f"plan = {text}"]


class _Writer:
    """Writes values as text, and collects the imports that this text needs."""

    def __init__(self) -> None:
        self._names: dict[str, set[str]] = {}
        self._modules: set[str] = set()
        self._own: set[str] = set()

    def imports(self) -> list[str]:
        """Return the imports of all written values."""
        lines = [f"import {module}" for module in sorted(self._modules)]
        lines += [f"from {module} import {', '.join(sorted(names))}" for module, names in sorted(self._names.items())]
        if self._own:
            lines.append(f"# from the scenario's own files: {', '.join(sorted(self._own))}")
        return lines

    def text(self, value: Any, indent: str = "") -> str:
        """Return an expression, over as many lines as needed. Raises _NoText."""
        if value is None or isinstance(value, bool | int | float | str):
            if repr(value) in ("inf", "-inf", "nan") or type(value) not in (type(None), bool, int, float, str):
                raise _NoText(value)
            return repr(value)
        if isinstance(value, torch.dtype):
            self._modules.add("torch")
            return repr(value)
        if inspect.isroutine(value) or isinstance(value, type):
            return self._name(value)
        if isinstance(value, Mapping | tuple | list):
            return self._held(value, indent)
        return self._made(value, indent)

    def difference(self, before: Any, after: Any, name: str) -> str:
        """Return `replace(NAME, FIELD=..., ...)` with the fields that differ, on one line. Raises _NoText."""
        self._names.setdefault("dataclasses", set()).add("replace")
        changes = []
        for field in fields(after):
            old, new = getattr(before, field.name), getattr(after, field.name)
            if isinstance(new, Declared) and type(old) is type(new) and old != new:
                changes.append(f"{field.name}={self.difference(old, new, f'{name}.{field.name}')}")
            elif old != new:
                changes.append(f"{field.name}={' '.join(map(str.strip, self.text(new).splitlines()))}")
        return f"replace({', '.join([name, *changes])})"

    def _held(self, value: Any, indent: str) -> str:
        if isinstance(value, Mapping):
            parts = [(f"{self.text(key)}: ", item) for key, item in value.items()]
            return self._joined("{", parts, "}", indent)
        if type(value) not in (tuple, list):
            raise _NoText(value)
        opening, closing = ("(", ")") if type(value) is tuple else ("[", "]")
        alone = "," if type(value) is tuple and len(value) == 1 else ""
        return self._joined(opening, [("", item) for item in value], f"{alone}{closing}", indent)

    def _made(self, value: Any, indent: str) -> str:
        if isinstance(value, functools.partial):
            self._names.setdefault("functools", set()).add("partial")
            parts = [*(("", argument) for argument in (value.func, *value.args)), *_named(value.keywords)]
            return self._joined("partial(", parts, ")", indent)
        arguments = value.changed_fields() if isinstance(value, Declared) else _arguments(value)
        is_placement = type(value).__name__ in PLACEMENTS
        parts = [("", argument) for argument in arguments.values()] if is_placement else _named(arguments)
        return self._joined(f"{self._name(type(value))}(", parts, ")", indent)

    def _joined(self, opening: str, parts: list[tuple[str, Any]], closing: str, indent: str) -> str:
        inner = f"{indent}    "
        texts = [f"{name}{self.text(part, inner)}" for name, part in parts]
        short = opening + ", ".join(texts) + closing
        if "\n" not in short and len(short) <= MAX_LINE:
            return short
        return "\n".join([opening, *(f"{inner}{part}," for part in texts), f"{indent}{closing.lstrip(',')}"])

    def _name(self, value: Any) -> str:
        name, module = getattr(value, "__qualname__", ""), getattr(value, "__module__", None) or ""
        if not all(part.isidentifier() for part in name.split(".")):
            raise _NoText(value)  # a lambda, or made within a function
        # The outermost package that has the same object under its name.
        outer_name, parts = name.partition(".")[0], module.split(".")
        packages = (".".join(parts[:count]) for count in range(1, len(parts)))
        holders = (outer for outer in packages if getattr(sys.modules.get(outer), outer_name, None) is value)
        package = next(holders, module)
        if package.partition(".")[0] in ("torch", "distbench", "transformers", "torchao", "functools"):
            self._names.setdefault(package, set()).add(outer_name)
        elif package != "builtins":
            self._own.add(name)
        return str(name)


def _named(given: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return [(f"{name}=", value) for name, value in given.items()]


def _arguments(value: Any) -> dict[str, Any]:
    """Return the constructor arguments of an object of torch or the user, the fewest that make an equal object.

    Raises:
        _NoText: the object does not store its arguments, or they make a different object.
    """
    kind = type(value)
    elsewhere = KEPT_AS.get(kind.__name__, {})
    try:
        names = list(elsewhere) if kind.__name__ in PLACEMENTS else list(inspect.signature(kind).parameters)
        stored = {name: elsewhere[name](value) if name in elsewhere else getattr(value, name) for name in names}
    except (AttributeError, TypeError, ValueError, IndexError) as error:
        raise _NoText(value) from error
    # Styles wrap a single layout into a tuple in their constructor, and accept None for an empty dict.
    single = {name: kept[0] if type(kept) is tuple and len(kept) == 1 else kept for name, kept in stored.items()}
    some = {name: kept for name, kept in stored.items() if kept != {}}
    arguments = next((candidate for candidate in (stored, single, some) if _makes(candidate, value)), None)
    if arguments is None:
        raise _NoText(value)
    for name in names:
        fewer = {other_name: kept for other_name, kept in arguments.items() if other_name != name}
        if _makes(fewer, value):
            arguments = fewer
    return arguments


def _makes(given: Mapping[str, Any], value: Any) -> bool:
    try:
        rebuilt = type(value)(**given)
    except Exception:
        return False
    # The default text of an object has its memory address.
    has_text = getattr(type(value), "__repr__", None) != object.__repr__
    return (not has_text or repr(rebuilt) == repr(value)) and _state(rebuilt) == _state(value)


def _state(value: Any) -> dict[str, str]:
    later = {name for base in type(value).__mro__ for name in SET_BY_APPLYING.get(base.__name__, ())}
    return {name: repr(attribute) for name, attribute in getattr(value, "__dict__", {}).items() if name not in later}
