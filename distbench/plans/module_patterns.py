"""Glob patterns of a plan over the names of a model, and what a model itself says of how to lay it out."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import nn

from distbench.plans.model import owners_of
from distbench.plans.pipeline import HandOn
from distbench.spec import ParallelPlan, ShardParam, UserError
from distbench.spec.errors import nearest
from distbench.spec.plan import matching

# A plan that asks for the model's own.
AUTO = "auto"
TRANSFORMERS = "transformers"


def matching_modules(patterns: Iterable[str], model: nn.Module) -> dict[str, nn.Module]:
    """Module name to module for every match of any of the patterns, in the model's order; "auto" for `own_units`."""
    modules = _own_modules(model)
    chosen = own_units(model) if patterns == AUTO else {n for pattern in patterns for n in matching(pattern, modules)}
    return {name: module for name, module in modules.items() if name in chosen}


def _own_modules(model: nn.Module) -> dict[str, nn.Module]:
    return {name: module for name, module in model.named_modules() if not isinstance(module, HandOn)}


def own_units(model: nn.Module) -> set[str]:
    """Names of the modules whose classes a model of transformers names in `_no_split_modules`; UserError without any.

    Without those that share a parameter with a module outside of them (embeddings that the output layer uses too):
    FSDP2 would need both in one unit, which is the root.
    """
    classes = {name for module in model.modules() for name in getattr(module, "_no_split_modules", None) or ()}
    # fully_shard gives a module a class of its own, below the one that is named.
    units = {n for n, module in model.named_modules() if classes & {base.__name__ for base in type(module).__mro__}}
    if not units:
        kind = type(model).__name__
        raise UserError(f"wrap='auto' takes the units from _no_split_modules, and {kind} names none; name modules")
    shared = [[name for name, *_ in owners] for owners in owners_of(model).values() if len(owners) > 1]
    # A parameter is split from a unit where some of its holders are in the unit and some are not.
    return {
        unit
        for unit in units
        if all(len({f"{holder}.".startswith(f"{unit}.") for holder in holders}) == 1 for holders in shared)
    }


def _own_plan(model: nn.Module) -> dict[str, str]:
    """The plan that a model of transformers brings along, pattern to the name of a style; UserError without one."""
    for prefix, module in model.named_modules():
        plan = getattr(module, "tp_plan", None)
        if isinstance(plan, Mapping) and plan:
            return {f"{prefix}.{pattern}" if prefix else pattern: style for pattern, style in plan.items()}
    raise UserError(
        f"tp='auto' takes the model's own plan (base_model_tp_plan of its config, _tp_plan of its class), and "
        f"{type(model).__name__} brings none; give tp={{'pattern': style}}"
    )


def tp_patterns(plan: ParallelPlan, model: nn.Module) -> Mapping[str, Any]:
    """Pattern to style, or its name; nothing for a callable plan; for "auto" the model's own, UserError without one."""
    if isinstance(plan.tp, str):
        return _own_plan(model)
    return plan.tp if isinstance(plan.tp, Mapping) else {}


def styles_by_module(plan: ParallelPlan, model: nn.Module) -> Iterator[tuple[str, str, nn.Module, Any]]:
    """(pattern, module name, module, style) for every match of a TP plan of patterns; nothing for a callable plan."""
    modules = _own_modules(model)
    for pattern, style_or_name in tp_patterns(plan, model).items():
        for name in matching(pattern, modules):
            style = _style_of(style_or_name, model, pattern)
            if style is not None:
                yield pattern, name, modules[name], style


def styles_by_parameter(plan: ParallelPlan, model: nn.Module) -> dict[str, Any]:
    """Parameter name to its style of transformers: its own pattern's, else that of the module that holds it."""
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    of_modules = {name: style for _, name, _, style in styles_by_module(plan, model) if is_of_transformers(style)}
    styles = {name: of_modules[holder] for name in names if (holder := name.rpartition(".")[0]) in of_modules}
    for pattern, style_or_name in tp_patterns(plan, model).items():
        if isinstance(style_or_name, str):
            styles |= dict.fromkeys(matching(pattern, names), _style_of(style_or_name, model, pattern))
    return {name: style for name, style in styles.items() if is_of_transformers(style)}


def is_of_transformers(style: Any) -> bool:
    """Whether a style, or a class, is transformers' own, which changes parameters and forwards in its own way."""
    kind = style if isinstance(style, type) else type(style)
    return kind.__module__.partition(".")[0] == TRANSFORMERS


def _style_of(given: Any, model: nn.Module, pattern: str) -> Any:
    """The style of a name, transformers' own for a model of transformers and else torch's; None for "replicate".

    What is no text is returned as it is; UserError where it is no style, or no style has that name.
    """
    if not isinstance(given, str):
        _require_style(given, pattern)
        return given
    if any(is_of_transformers(kind) for module in model.modules() for kind in type(module).__mro__):
        # From where older versions have it too.
        from transformers.integrations.tensor_parallel import ALL_PARALLEL_STYLES

        styles: Mapping[str, Any] = {name: ALL_PARALLEL_STYLES[name] for name in ALL_PARALLEL_STYLES}
    else:
        styles = _torch_styles()
    if given not in styles:
        raise UserError(
            f"TP pattern {pattern!r}: there is no style {given!r} for this model ({nearest(given, styles)})"
        )
    return styles[given]


def _require_style(given: Any, pattern: str) -> None:
    from torch.distributed.tensor.parallel import ParallelStyle

    if isinstance(given, type) and issubclass(given, ParallelStyle):
        raise UserError(f"TP pattern {pattern!r}: {given.__name__} is a class; give a style of it, {given.__name__}()")
    if not isinstance(given, ParallelStyle) and (isinstance(given, type) or not is_of_transformers(given)):
        kind = type(given).__name__
        raise UserError(f"TP pattern {pattern!r}: {given!r} is a {kind}; give a ParallelStyle, or the name of one")


def _torch_styles() -> dict[str, Any]:
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

    styles: dict[str, Any] = {"colwise": ColwiseParallel(), "rowwise": RowwiseParallel()}
    for name in ("colwise_rep", "colwise_gather_output", "embedding_colwise"):
        styles[name] = ColwiseParallel(output_layouts=Replicate())
    for name in ("rowwise_rep", "rowwise_split_input", "embedding_rowwise"):
        styles[name] = RowwiseParallel(input_layouts=Replicate())
    return {**styles, "sequence_parallel": SequenceParallel(use_local_output=True), "replicate": None}


def annotations_by_parameter(plan: ParallelPlan, model: nn.Module) -> dict[str, list[ShardParam]]:
    """Parameter name to every annotation whose pattern matches it."""
    names = [name for name, _ in model.named_parameters()]
    annotations: dict[str, list[ShardParam]] = {}
    for pattern, annotation in plan.shard_params.items():
        for name in matching(pattern, names):
            annotations.setdefault(name, []).append(annotation)
    return annotations
