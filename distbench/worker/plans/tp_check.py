"""What keeps tensor parallel styles and parameter annotations from working on a mesh."""

import inspect
from collections.abc import Iterator
from typing import Any

from torch import nn

from distbench.spec import ParallelPlan, ShardParam
from distbench.spec.errors import nearest
from distbench.worker.plans.divisibility import Undivided, undivided
from distbench.worker.plans.materialise import owners_of
from distbench.worker.plans.patterns import annotations_by_parameter, is_of_transformers, styles_by_module, tp_patterns
from distbench.worker.rank.rank_context import BATCH_DIMS, RankContext

SHARDING_STYLES = ("ColwiseParallel", "RowwiseParallel")
# The projections of models of transformers that are sharded by whole heads, and which field of their config has those.
HEADS = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads", "v_proj": "num_key_value_heads"}


def tp_problems(model: nn.Module, plan: ParallelPlan, context: RankContext) -> Iterator[str | Undivided]:
    """One sentence for each problem of the plan's `tp`, `shard_params` and `loss_parallel`."""
    yield from _styles(model, plan, context)
    yield from _undivided_heads(model, plan, context)
    yield from _unknown_inputs(model, plan)
    yield from _tied(model, plan)
    yield from _annotations(model, plan, context)
    if plan.loss_parallel and plan.tp is None:
        yield "loss parallel needs a TP plan whose last module leaves its output sharded over the vocabulary"


def _styles(model: nn.Module, plan: ParallelPlan, context: RankContext) -> Iterator[str | Undivided]:
    dims = [name for name in plan.tp_dims if name in context.mesh_dims]
    _, size = context.index(plan.tp_dims)
    for pattern, name, module, style in styles_by_module(plan, model):
        kind = _kind(style)
        if kind in SHARDING_STYLES and not isinstance(module, nn.Linear | nn.Embedding):
            given = type(module).__name__
            yield f"TP pattern {pattern!r}: {kind} shards Linear and Embedding, but {name or 'the root'} is a {given}"
            continue
        for attribute, tensor_dim in _sharded_by(style, module):
            shape = list(getattr(module, attribute).shape)
            if shape[tensor_dim] % size:
                parameter = _join(name, attribute)
                what = f"parameter {parameter} of shape {shape} cannot be sharded on tensor dim {tensor_dim}"
                yield undivided(what, shape[tensor_dim], dims, context, parameter)


def _undivided_heads(model: nn.Module, plan: ParallelPlan, context: RankContext) -> Iterator[str | Undivided]:
    """A shard of a projection may be of any length, but attention views it as heads."""
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    dims = [name for name in plan.tp_dims if name in context.mesh_dims]
    fields = {
        HEADS.get(pattern.rpartition(".")[2])
        for pattern, given in tp_patterns(plan, model).items()
        if given == "colwise"
    }
    for field in sorted(filter(None, fields)):
        heads = getattr(config, field, None)
        if isinstance(heads, int) and heads % context.index(plan.tp_dims)[1]:
            yield undivided(f"{field}={heads} of {type(config).__name__} cannot be split", heads, dims, context)


def _unknown_inputs(model: nn.Module, plan: ParallelPlan) -> Iterator[str]:
    """torch leaves a layout for an input of another name unused, and says nothing."""
    for pattern, name, module, style in styles_by_module(plan, model):
        taken = inspect.signature(module.forward).parameters
        if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in taken.values()):
            continue
        opened_case = getattr(style, "prepare_module_input", style)
        for key in getattr(opened_case, "input_kwarg_layouts", None) or ():
            if key not in taken:
                yield f"TP pattern {pattern!r}: {name or 'the root'} takes no input {key!r} ({nearest(key, taken)})"


def local_shape(name: str, model: nn.Module, plan: ParallelPlan, context: RankContext) -> list[int]:
    """A parameter's shape on one rank after TP, where the plan's styles shard it evenly."""
    shape = list(model.get_parameter(name).shape)
    for _, module_name, module, style in styles_by_module(plan, model):
        for attribute, tensor_dim in _sharded_by(style, module):
            if _join(module_name, attribute) == name:
                shape[tensor_dim] //= context.index(plan.tp_dims)[1]
    for annotation in annotations_by_parameter(plan, model).get(name, []):
        if not 0 <= annotation.tensor_dim < len(shape):
            continue  # a problem of its own
        shape[annotation.tensor_dim] //= context.index(annotation.mesh_dims)[1]
    return shape


def _kind(style: Any) -> str:
    """torch's name of a style; transformers' styles take more kinds of modules and shards of unequal length."""
    return "" if is_of_transformers(style) else type(style).__name__


def _join(module: str, attribute: str) -> str:
    return f"{module}.{attribute}" if module else attribute


def _sharded_by(style: Any, module: nn.Module) -> Iterator[tuple[str, int]]:
    kind = _kind(style)
    embedding = isinstance(module, nn.Embedding)
    if kind == "ColwiseParallel":
        yield "weight", 1 if embedding else 0
        if getattr(module, "bias", None) is not None:
            yield "bias", 0
    elif kind == "RowwiseParallel":
        yield "weight", 0 if embedding else 1


def _tied(model: nn.Module, plan: ParallelPlan) -> Iterator[str]:
    sharded = {
        _join(name, attribute): tensor_dim
        for _, name, module, style in styles_by_module(plan, model)
        for attribute, tensor_dim in _sharded_by(style, module)
    }
    styled = {name for _, name, _, style in styles_by_module(plan, model) if _kind(style) in SHARDING_STYLES}
    for owners in owners_of(model).values():
        # Laid out alike by each of its holders, it stays one parameter.
        if len({sharded.get(_join(name, attribute)) for name, _, attribute in owners}) == 1:
            continue
        names = [_join(name, attribute) for name, _, attribute in owners]
        touched = [name for name, _, _ in owners if name in styled]
        if len(owners) > 1 and touched:
            yield (
                f"parameter {names[0]} is shared with {', '.join(names[1:])}, and TP would give each its own copy; "
                f"take {', '.join(touched)} out of the TP plan or untie them"
            )


def _annotations(model: nn.Module, plan: ParallelPlan, context: RankContext) -> Iterator[str | Undivided]:
    parameters = dict(model.named_parameters())
    styled = {
        _join(name, attribute)
        for _, name, module, style in styles_by_module(plan, model)
        for attribute, _ in _sharded_by(style, module)
    }
    for name, annotations in annotations_by_parameter(plan, model).items():
        shape = list(parameters[name].shape)
        over: dict[int, list[str]] = {}
        seen: list[str] = []
        for annotation in annotations:
            yield from _bad_annotation(name, shape, annotation, seen, plan, context)
            seen += annotation.mesh_dims
            over.setdefault(annotation.tensor_dim, []).extend(annotation.mesh_dims)
        for tensor_dim, mesh_dims in over.items():
            present = [mesh_dim for mesh_dim in context.mesh_dims if mesh_dim in mesh_dims]
            if 0 <= tensor_dim < len(shape) and shape[tensor_dim] % context.index(tuple(present))[1]:
                what = f"parameter {name} of shape {shape} cannot be sharded on tensor dim {tensor_dim}"
                yield undivided(what, shape[tensor_dim], present, context, name)
        if name in styled:
            yield f"parameter {name} is sharded by a TP style and by shard_params; leave it to one of them"


def _bad_annotation(
    name: str, shape: list[int], annotation: ShardParam, seen: list[str], plan: ParallelPlan, context: RankContext
) -> Iterator[str]:
    if not 0 <= annotation.tensor_dim < len(shape):
        yield f"parameter {name} of shape {shape} has no tensor dim {annotation.tensor_dim}; use 0 to {len(shape) - 1}"
    for mesh_dim in annotation.mesh_dims:
        if mesh_dim in seen:
            yield f"shard_params shards parameter {name} over mesh dim {mesh_dim!r} twice; name each mesh dim once"
        if mesh_dim in BATCH_DIMS:
            yield f"shard_params cannot use mesh dim {mesh_dim!r}, whose ranks have different data; leave it to FSDP"
        elif mesh_dim not in plan.tp_dims:
            tp_dims = ", ".join(plan.tp_dims)
            yield f"shard_params shards over mesh dim {mesh_dim!r}, tp_dim has only {tp_dims}; add it there"
        elif mesh_dim not in context.mesh_dims:
            yield f"shard_params needs mesh dim {mesh_dim!r}, the mesh has {', '.join(context.mesh_dims)}"
