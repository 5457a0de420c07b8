"""Recordings of few layers, extended to all layers: the same events as in a recording of the whole model."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from processes import Children

from distbench.simulate.recording import (
    MEMORY,
    Allocated,
    Event,
    EventRecorded,
    EventWaited,
    Freed,
    Operator,
    StepBegun,
)
from distbench.simulate.repeated_layers import FEW, LayerNames, NotRepeated, extended, repeated_layers
from distbench.spec.versions import release

PROGRAM = Path(__file__).parents[1] / "whole_recordings.py"
ALL = 20


@dataclass
class Step:
    """The events of a step of equal layers: parameters, forward, backward, and an optimizer with one operator."""

    events: list[Event] = field(default_factory=list)
    layers: dict[int, int] = field(default_factory=dict)
    is_empty: bool = False  # this rank's shards have no elements

    def allocate(self, num_bytes: int, layer: int | None, owner: str = "") -> int:
        block = sum(isinstance(event, Allocated) for event in self.events)
        if layer is not None:
            self.layers[block] = layer
        self.events.append(Allocated(block, num_bytes, 0, "other", owner))
        return block

    def run(self, owner: str, reads: list[int], writes: list[int], num_bytes: int, phase: str = "forward") -> None:
        size, num_bytes = (0, 0) if self.is_empty else (8, num_bytes)
        touched = [[(block, size) for block in blocks] for blocks in (reads, writes)]
        self.events.append(Operator(0, "aten.op", MEMORY, 0, "f32", num_bytes, *touched, phase, owner))


def step_of(count: int, odd_layer: int | None = None, stacked: bool = False, is_empty: bool = False) -> Step:
    """Events of a step with `count` layers. `odd_layer` has another size; `stacked` makes a tensor of all layers."""
    step = Step(is_empty=is_empty)
    weights = [step.allocate(64, layer) for layer in range(count)]
    step.events.append(StepBegun(2))
    hidden, kept = step.allocate(32, None), []
    for layer, weight in enumerate(weights):
        owner = f"layers.{layer}.linear"
        event = len([one for one in step.events if isinstance(one, EventRecorded)])
        step.events += [EventRecorded(1, event), EventWaited(0, event)]
        new = step.allocate(48 if layer == odd_layer else 32, layer, owner)
        step.run(owner, [weight, hidden], [new], 24)
        kept.append(hidden)
        hidden = new
    if stacked:
        step.run("", kept, [step.allocate(8 * count, None)], 16 * count)
    gradients: dict[int, int] = {}
    for layer in reversed(range(count)):
        owner = f"layers.{layer}.linear"
        gradients[layer] = step.allocate(64, layer, owner)
        step.run(owner, [weights[layer], kept[layer]], [gradients[layer]], 24, "backward")
        step.events.append(Freed(kept[layer]))
    ordered = [gradients[layer] for layer in range(count)]
    step.run("", [*ordered, *weights], weights, 24 * count, "optimizer")
    step.events += [Freed(block) for block in ordered]
    return step


def extended_step(step: Step, few: int = FEW) -> list[Event]:
    return extended(step.events, step.layers, LayerNames("layers.", ALL, few))


@pytest.mark.parametrize("is_empty", [False, True])
@pytest.mark.parametrize("few", [FEW, FEW + 4])
def test_the_events_of_few_layers_are_extended_to_those_of_all(few: int, is_empty: bool) -> None:
    assert extended_step(step_of(few, is_empty=is_empty), few) == step_of(ALL, is_empty=is_empty).events


def test_a_middle_layer_that_differs_is_not_repeated() -> None:
    with pytest.raises(NotRepeated, match="is not repeated"):
        extended_step(step_of(FEW, odd_layer=2))


def test_a_result_of_all_layers_is_not_repeated() -> None:
    with pytest.raises(NotRepeated, match="has a result that depends on the number of layers"):
        extended_step(step_of(FEW, stacked=True))


class Part:
    """A module with the parts of torch's modules that are read."""

    def __init__(self, width: int, **attributes: Any) -> None:
        self.width = width
        vars(self).update(attributes)

    def named_parameters(self, recurse: bool = True) -> list[tuple[str, Any]]:
        return [("weight", SimpleNamespace(shape=(self.width,), dtype="f32", requires_grad=True))]

    def named_buffers(self, recurse: bool = True) -> list[tuple[str, Any]]:
        return []


class Model(Part):
    def __init__(self, widths: Mapping[int, int] | int, **attributes: Any) -> None:
        super().__init__(8, **attributes)
        widths = dict.fromkeys(range(widths), 8) if isinstance(widths, int) else widths
        self.parts = {f"layers.{number}": Part(width, number=number) for number, width in widths.items()}

    def named_modules(self) -> list[tuple[str, Any]]:
        return [("", self), *self.parts.items()]


@dataclass
class Plan:
    wrap: tuple[str, ...] = ("layers.*",)


def test_equal_layers_are_those_without_another_size_attribute_or_plan() -> None:
    whole, few = Model(ALL, num_layers=ALL), Model(FEW, num_layers=FEW)
    assert repeated_layers(whole, few, Plan(), Plan()) == LayerNames("layers.", ALL, FEW)
    first = Plan(("layers.*", "layers.0"))
    assert repeated_layers(whole, few, first, first).num_layers == ALL
    wider = Model({number: 16 if number == ALL - 1 else 8 for number in range(ALL)}, num_layers=ALL)
    for model, less, plan in (
        (wider, few, Plan()),
        (whole, Model(FEW, num_layers=FEW, scale=2.0), Plan()),
        (whole, few, Plan(("layers.*", f"layers.{ALL - 1}"))),
        (whole, Model(FEW - 1, num_layers=FEW - 1), Plan()),
        (Model(2 * FEW - 1, num_layers=2 * FEW - 1), few, Plan()),
        (few, few, Plan()),
    ):
        with pytest.raises(NotRepeated):
            repeated_layers(model, less, plan, plan)


# Scenario, file, mesh, variant; the number of layers is set to 16. With `False` all layers must be recorded.
LLAMA3, MESH = "llama3", {"dp_replicate": 1, "dp_shard": 8, "cp": 1}
SMALL = {"dim": 64, "hidden": 128, "sequence": 64}
FAST = [("llama_3d", "llama_3d", {"dp_replicate": 1, "dp_shard": 2, "cp": 2, "tp": 2}, SMALL, True)]
LONG = [
    ("llama3_8b", LLAMA3, MESH, {"batch": 16, "plan.prefetch": 2}, True),
    ("llama3_8b", LLAMA3, MESH, {"batch": 32, "plan.microbatches": 4, "plan.checkpoint": "full"}, True),
    ("llama3_8b", LLAMA3, {"dp_replicate": 2, "dp_shard": 2, "cp": 2}, {"batch": 16}, True),
    ("llama3_70b", LLAMA3, {"dp_replicate": 1, "dp_shard": 4, "cp": 1, "tp": 8}, {"batch": 64}, True),
    ("moe_tp", "moe", {"dp_shard": 1, "ep": 2, "tp": 2}, {**SMALL, "capacity": 1.25, "load": "zipf"}, True),
    ("recompute", "recompute", {"dp_shard": 4}, {"dim": 64, "hidden": 128, "sequence": 32}, True),
    ("ddp", "ddp", {"dp_replicate": 4}, {**SMALL, "knob": "plain"}, False),
    ("decoder", "decoder", {"dp_replicate": 1, "dp_shard": 8}, {"checkpoint": "alternate"}, False),
]


def compared(children: Children, cases: list[Any]) -> list[dict[str, Any]]:
    done = children.run(children.forked_python, PROGRAM, json.dumps(cases), text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    answer: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return answer


if release(torch.__version__) >= (2, 13):
    LONG.append(("llama3_8b", LLAMA3, MESH, {"batch": 16, "plan.reduce_scatter_buffers": 3}, True))


@pytest.mark.parametrize("cases", [FAST, pytest.param(LONG, marks=pytest.mark.long)])
def test_a_recording_of_few_layers_has_the_second_step_and_the_memory_of_a_recording_of_all(
    children: Children, cases: list[Any]
) -> None:
    for case, answer in zip(cases, compared(children, cases), strict=True):
        assert answer["first_difference"] is None, case
        # Before torch 2.13, FSDP2 waits for every layer at the end of backward, so that all layers are recorded.
        assert answer["is_repeated"] == case[-1] or release(torch.__version__) < (2, 13), case
