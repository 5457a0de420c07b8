"""The stages of a model: pruned copies of it, whose parameters keep their names; those of a rank as one module."""

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from distbench.spec import UserError
from distbench.spec.pipeline_plan import PipelinePlan, layers_of_stages

LAYERS = (nn.ModuleList, nn.ModuleDict)
PREFERRED = "layers"


class HandOn(nn.Module):
    """In the place of a module that is another stage's: returns the first thing that it is given."""

    def forward(self, given: Any, *_: Any, **__: Any) -> Any:
        """What it was given."""
        return given


class LocalStages(nn.Module):
    """The stages of one rank, as one module for whoever lists parameters, buffers or modules: names are those that they
    had in the whole model.

    Args:
        stages: stage index to module.
        held_names: of the parameters, in the model's order, as they were before any wrapper changed them.
    """

    def __init__(self, stages: dict[int, nn.Module], held_names: tuple[str, ...]) -> None:
        super().__init__()
        self.indices = tuple(stages)
        self.held_names = held_names
        self.stages = nn.ModuleList(stages.values())

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Each stage's modules; this one and the stages themselves are all called by the prefix."""
        memo = set() if memo is None else memo
        yield prefix, self
        for stage in self.stages:
            yield from stage.named_modules(memo, prefix, remove_duplicate)


def layers_name(model: nn.Module) -> str | None:
    """The name of the list of layers that a model is split at: "layers", else the longest list that it has itself."""
    found = {name: len(child) for name, child in model.named_children() if isinstance(child, LAYERS) and len(child)}
    return PREFERRED if PREFERRED in found else max(found, key=lambda name: found[name], default=None)


def num_layers(model: nn.Module) -> int:
    """Layers that the model can be split between; 0 where it has no list of them."""
    name = layers_name(model)
    return 0 if name is None else len(list(model.get_submodule(name).children()))


def stage_of(model: nn.Module, plan: PipelinePlan, stage: int, num_stages: int) -> nn.Module:
    """A stage of a model on the meta device, which stays as it is.

    Raises:
        UserError: the plan's `split` returns no module.
    """
    copied = copy.deepcopy(model)
    if plan.split is None:
        return _pruned(copied, layers_of_stages(num_layers(model), num_stages, plan.first_layers), stage)
    found = plan.split(copied, stage, num_stages)
    if not isinstance(found, nn.Module):
        raise UserError(
            f"PipelinePlan.split returns {type(found).__name__} for stage {stage}; return the stage, an nn.Module"
        )
    return found


def _pruned(model: nn.Module, layers: list[range], stage: int) -> nn.Module:
    own_layers, name_of_layers, is_before = layers[stage], layers_name(model), True
    for name, child in list(model.named_children()):
        if name == name_of_layers:
            is_before = False
            for place, (layer, _) in enumerate(list(child.named_children())):
                if place not in own_layers:
                    setattr(child, layer, HandOn())
        # What has buffers alone, a rotary table say, is every stage's.
        elif stage != (0 if is_before else len(layers) - 1) and not _is_shared(child):
            setattr(model, name, HandOn())
    return model


def _is_shared(module: nn.Module) -> bool:
    return next(module.parameters(), None) is None and next(module.buffers(), None) is not None


def check_split(model: nn.Module, stages: list[nn.Module]) -> None:
    """Refuse stages that do not have each parameter of the model exactly once, by the name that it has there.

    Raises:
        UserError: with the first parameter that is nobody's, several stages', or none of the model's.
    """
    known = dict(model.named_parameters(remove_duplicate=False))
    holders: dict[int, tuple[str, list[int]]] = {id(one): (name, []) for name, one in model.named_parameters()}
    for index, stage in enumerate(stages):
        for name, _ in stage.named_parameters():
            if name not in known:
                wrong = f"stage {index} has a parameter {name!r} that the model does not have"
                raise UserError(f"{wrong}; PipelinePlan.split must keep names")
            holders[id(known[name])][1].append(index)
    for name, held_by in holders.values():
        if len(held_by) != 1:
            where = f"stages {', '.join(map(str, held_by))}" if held_by else "no stage"
            wrong = f"parameter {name!r} is in {where} of the pipeline, it must be in exactly one"
            raise UserError(f"{wrong}; give PipelinePlan(split=...), or a model without tied weights")


def activations_of(stages: list[nn.Module], inputs: tuple[torch.Tensor, ...]) -> list[tuple[torch.Tensor, ...]]:
    """What each stage is given, and what the last one returns: tensors on the meta device, from running all of them.

    Raises:
        UserError: a stage does not run, or returns what cannot be passed on.
    """
    found, given = [inputs], inputs
    for index, stage in enumerate(stages):
        try:
            with torch.no_grad():
                output = stage(*given)
        except Exception as error:
            shapes = ", ".join(str(list(one.shape)) for one in given)
            first_line = next(iter(str(error).splitlines()), type(error).__name__)
            wrong = f"stage {index} of the pipeline, given {shapes}, does not run on the meta device: {first_line}"
            raise UserError(
                f"{wrong}; give PipelinePlan(split=...) whose stages take what the one before returns"
            ) from error
        given = tuple(output) if isinstance(output, list | tuple) else (output,)
        if not all(isinstance(one, torch.Tensor) for one in given) and index < len(stages) - 1:
            kinds = ", ".join(type(one).__name__ for one in given)
            raise UserError(
                f"stage {index} of the pipeline returns {kinds}; it must return a tensor or a tuple of them"
            )
        found.append(given)
    return found
