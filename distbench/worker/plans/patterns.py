"""Glob patterns of a plan over the names of a model."""

import fnmatch
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from distbench.spec import ParallelPlan, ShardParam


def matching(pattern: str, names: Iterable[str]) -> list[str]:
    """Names that a glob pattern matches, part by part: `*` never crosses a dot."""
    parts = pattern.split(".")
    split = {name: name.split(".") for name in names}
    return [name for name, own in split.items() if len(own) == len(parts) and all(map(fnmatch.fnmatchcase, own, parts))]


def matching_modules(patterns: Iterable[str], model: nn.Module) -> dict[str, nn.Module]:
    """Module name to module for every match of any of the patterns, in the model's order."""
    modules = dict(model.named_modules())
    chosen = {name for pattern in patterns for name in matching(pattern, modules)}
    return {name: module for name, module in modules.items() if name in chosen}


def styles_by_module(plan: ParallelPlan, model: nn.Module) -> Iterator[tuple[str, str, nn.Module, Any]]:
    """(pattern, module name, module, style) for every match of a TP plan of patterns; nothing for a callable plan."""
    if plan.tp is None or callable(plan.tp):
        return
    modules = dict(model.named_modules())
    for pattern, style in plan.tp.items():
        for name in matching(pattern, modules):
            yield pattern, name, modules[name], style


def annotations_by_parameter(plan: ParallelPlan, model: nn.Module) -> dict[str, list[ShardParam]]:
    """Parameter name to every annotation whose pattern matches it."""
    names = [name for name, _ in model.named_parameters()]
    found: dict[str, list[ShardParam]] = {}
    for pattern, annotation in plan.shard_params.items():
        for name in matching(pattern, names):
            found.setdefault(name, []).append(annotation)
    return found
