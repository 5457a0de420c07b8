"""Tensors in nested dicts, lists, tuples, dataclasses and other objects: each with its name, and the same tree with
others instead."""

import copy
import dataclasses
from collections import UserList, deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import nn

# Sequences that are filled anew, since they take more than their items.
FILLED = (deque, UserList)


def kind_of(tree: Any) -> str:
    """What somebody returned, for a sentence."""
    name = type(tree).__name__
    return "None" if tree is None else f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}"


def tensors_of(tree: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a batch with its name: keys, fields and positions joined by dots."""
    return ((name, leaf) for name, leaf in leaves_of(tree, name) if isinstance(leaf, torch.Tensor))


def leaves_of(tree: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Everything in a batch that has no parts, with its name."""
    parts = _parts(tree)
    if not parts:
        yield name, tree
    for key, value in parts:
        yield from leaves_of(value, f"{name}.{key}" if name else str(key))


def mapped(tree: Any, change: Callable[[str, torch.Tensor], torch.Tensor], name: str = "") -> Any:
    """The same with each tensor changed; what holds no tensor that changes is the same object."""
    if isinstance(tree, torch.Tensor):
        return change(name, tree)
    parts = _parts(tree)
    new = {key: mapped(value, change, f"{name}.{key}" if name else str(key)) for key, value in parts}
    return tree if all(new[key] is value for key, value in parts) else _with_parts(tree, new)


def _with_parts(tree: Any, new: dict[Any, Any]) -> Any:
    """Nothing is made anew where it can be copied: constructors may take something else, or change what they take."""
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return tree._replace(**new)  # type: ignore[attr-defined]
    if isinstance(tree, list | tuple):
        return type(tree)(list(new.values()))
    if isinstance(tree, Mapping) and not isinstance(tree, MutableMapping):
        return new
    changed = copy.copy(tree)
    if isinstance(changed, FILLED):
        changed.clear()
        changed.extend(new.values())
        return changed
    if isinstance(tree, Mapping):
        _unshare_items(changed)
    for key, value in new.items():
        if isinstance(tree, Mapping):
            changed[key] = value
        else:
            object.__setattr__(changed, key, value)
    return changed


def _unshare_items(mapping: Any) -> None:
    """A copy of somebody's own mapping may share the dict that has its items."""
    for attribute, value in list(getattr(mapping, "__dict__", {}).items()):
        if isinstance(value, MutableMapping):
            mapping.__dict__[attribute] = copy.copy(value)


def _parts(tree: Any) -> Sequence[tuple[Any, Any]]:
    if isinstance(tree, Mapping):
        return list(tree.items())
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return list(zip(tree._fields, tree, strict=True))
    if isinstance(tree, (list, tuple, *FILLED)):
        return list(enumerate(tree))
    return () if isinstance(tree, torch.Tensor | nn.Module | type) else _fields_of(tree)


def _fields_of(tree: Any) -> list[tuple[str, Any]]:
    """Of a dataclass, or one of attrs; of another object its attributes, where one of them is a tensor."""
    kind: Any = type(tree)
    declared = dataclasses.fields(tree) if dataclasses.is_dataclass(tree) else getattr(kind, "__attrs_attrs__", None)
    if declared is not None:
        names = [field.name for field in declared if hasattr(tree, field.name)]
        return [(name, getattr(tree, name)) for name in names]
    own = getattr(tree, "__dict__", {})
    return list(own.items()) if any(isinstance(value, torch.Tensor) for value in own.values()) else []
