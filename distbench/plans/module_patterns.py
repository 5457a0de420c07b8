"""Glob patterns of a plan over the names of a model, and the layout that a model itself declares."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import nn

from distbench.plans.model import owners_of
from distbench.plans.pipeline import HandOn
from distbench.spec import ParallelPlan, ShardParam, UserError
from distbench.spec.errors import nearest
from distbench.spec.plan import matching

# Value of a plan that requests the model's own plan or units.
AUTO = "auto"
TRANSFORMERS = "transformers"


def matching_modules(patterns: Iterable[str], model: nn.Module) -> dict[str, nn.Module]:
    """Map module name to module for every match of any pattern, in the model's order; "auto" means `own_units`."""
    modules = _own_modules(model)
    chosen = own_units(model) if patterns == AUTO else {n for pattern in patterns for n in matching(pattern, modules)}
    return {name: module for name, module in modules.items() if name in chosen}


def _own_modules(model: nn.Module) -> dict[str, nn.Module]:
    return {name: module for name, module in model.named_modules() if not isinstance(module, HandOn)}


def own_units(model: nn.Module) -> set[str]:
    """Return the names of the modules whose classes a transformers model lists in `_no_split_modules`.

    Modules that share a parameter with an outside module (embeddings that are also the output layer) are left out,
    because FSDP2 would need both in one unit, the root.

    Raises:
        UserError: the model lists no class.
    """
    classes = {name for module in model.modules() for name in getattr(module, "_no_split_modules", None) or ()}
    # fully_shard gives a module its own class, a subclass of the listed one.
    units = {n for n, module in model.named_modules() if classes & {base.__name__ for base in type(module).__mro__}}
    if not units:
        kind = type(model).__name__
        raise UserError(
            f"wrap='auto' uses the classes of _no_split_modules, but {kind} lists no class; give module names"
        )
    shared = [[name for name, *_ in owners] for owners in owners_of(model).values() if len(owners) > 1]
    # A module cannot be a unit if a parameter has holders both inside and outside of it.
    return {
        unit
        for unit in units
        if all(len({f"{holder}.".startswith(f"{unit}.") for holder in holders}) == 1 for holders in shared)
    }


def _own_plan(model: nn.Module) -> dict[str, str]:
    """Return the plan of a transformers model, pattern to style name. Raise UserError without a plan."""
    for prefix, module in model.named_modules():
        plan = getattr(module, "tp_plan", None)
        if isinstance(plan, Mapping) and plan:
            return {f"{prefix}.{pattern}" if prefix else pattern: style for pattern, style in plan.items()}
    raise UserError(
        "tp='auto' uses the model's own plan (base_model_tp_plan of its config, _tp_plan of its class), which "
        f"{type(model).__name__} lacks; give tp={{'pattern': style}}"
    )


def tp_patterns(plan: ParallelPlan, model: nn.Module) -> Mapping[str, Any]:
    """Map patterns to styles or style names; {} for a callable plan, the model's own plan or UserError for "auto"."""
    if isinstance(plan.tp, str):
        return _own_plan(model)
    return plan.tp if isinstance(plan.tp, Mapping) else {}


def styles_by_module(plan: ParallelPlan, model: nn.Module) -> Iterator[tuple[str, str, nn.Module, Any]]:
    """Yield (pattern, module name, module, style) for every match of a TP plan of patterns, not of a callable plan."""
    modules = _own_modules(model)
    for pattern, style_or_name in tp_patterns(plan, model).items():
        for name in matching(pattern, modules):
            style = _style_of(style_or_name, model, pattern)
            if style is not None:
                yield pattern, name, modules[name], style


def styles_by_parameter(plan: ParallelPlan, model: nn.Module) -> dict[str, Any]:
    """Map parameter names to transformers styles: the style of the parameter's own pattern, else of its module."""
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    of_modules = {name: style for _, name, _, style in styles_by_module(plan, model) if is_of_transformers(style)}
    styles = {name: of_modules[holder] for name in names if (holder := name.rpartition(".")[0]) in of_modules}
    for pattern, style_or_name in tp_patterns(plan, model).items():
        if isinstance(style_or_name, str):
            styles |= dict.fromkeys(matching(pattern, names), _style_of(style_or_name, model, pattern))
    return {name: style for name, style in styles.items() if is_of_transformers(style)}


def is_of_transformers(style: Any) -> bool:
    """Return whether a style or class belongs to transformers, whose styles change parameters and forwards."""
    kind = style if isinstance(style, type) else type(style)
    return kind.__module__.partition(".")[0] == TRANSFORMERS


def _style_of(given: Any, model: nn.Module, pattern: str) -> Any:
    """Return the style of a name: transformers' own for a transformers model, else torch's; None for "replicate".

    Values other than text are returned unchanged. Raises UserError for unknown names and invalid styles.
    """
    if not isinstance(given, str):
        _require_style(given, pattern)
        return given
    if any(is_of_transformers(kind) for module in model.modules() for kind in type(module).__mro__):
        # Older versions import the class from this module too.
        from transformers.integrations.tensor_parallel import ALL_PARALLEL_STYLES

        styles: Mapping[str, Any] = {name: ALL_PARALLEL_STYLES[name] for name in ALL_PARALLEL_STYLES}
    else:
        styles = _torch_styles()
    if given not in styles:
        raise UserError(f"TP pattern {pattern!r}: unknown style {given!r} for this model ({nearest(given, styles)})")
    return styles[given]


def _require_style(given: Any, pattern: str) -> None:
    from torch.distributed.tensor.parallel import ParallelStyle

    if isinstance(given, type) and issubclass(given, ParallelStyle):
        raise UserError(f"TP pattern {pattern!r}: {given.__name__} is a class; give an instance, {given.__name__}()")
    if not isinstance(given, ParallelStyle) and (isinstance(given, type) or not is_of_transformers(given)):
        kind = type(given).__name__
        raise UserError(f"TP pattern {pattern!r}: {given!r} is a {kind}; give a ParallelStyle or its name")


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
    """Map parameter names to every annotation whose pattern matches."""
    names = [name for name, _ in model.named_parameters()]
    annotations: dict[str, list[ShardParam]] = {}
    for pattern, annotation in plan.shard_params.items():
        for name in matching(pattern, names):
            annotations.setdefault(name, []).append(annotation)
    return annotations
