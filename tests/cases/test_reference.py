"""What checking a step against one device holds at a time, in one process that stands for one rank of several."""

import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from distbench.cases.single_device_reference import compare, reference_of
from distbench.plans.model import blueprint, load_initial_values
from distbench.ranks.context import RankContext
from distbench.spec import Scenario
from distbench.torch_private import fake_ranks

LAYERS, SIDE = 6, 32


class OneOfTwo(RankContext):
    """A rank that hears nothing of the others."""

    def gather(self, value: Any) -> list[Any]:
        return [value]


@pytest.fixture(scope="module")
def contexts() -> Iterator[list[RankContext]]:
    with fake_ranks({"dp_shard": 2}) as mesh:
        assert dist.group.WORLD is not None
        yield [OneOfTwo(rank, torch.device("cpu"), mesh, "gloo", dist.group.WORLD, 1) for rank in range(2)]


def stack() -> nn.Module:
    return nn.Sequential(*(nn.Linear(SIDE, SIDE, bias=False) for _ in range(LAYERS)))


def scenario_of(build_model: Any = stack) -> Scenario:
    torch.manual_seed(0)
    batch = torch.randn(4, SIDE), torch.randn(4, SIDE)
    return Scenario(build_model=build_model, make_batch=lambda: batch, loss=nn.functional.mse_loss)


def whole_step(scenario: Scenario, context: RankContext) -> tuple[nn.Module, float]:
    """The model after one step on the whole batch: what a plan of one rank computes."""
    assert scenario.build_model and scenario.make_batch and scenario.loss
    model: nn.Module = scenario.build_model()
    load_initial_values(model, context, blueprint(scenario.build_model, context.seed))
    inputs, targets = scenario.make_batch()
    loss = scenario.loss(model(inputs), targets)
    loss.backward()
    return model, float(loss.detach())


def test_another_rank_holds_one_full_gradient_at_a_time(
    contexts: list[RankContext], monkeypatch: pytest.MonkeyPatch
) -> None:
    held, most = weakref.WeakSet[torch.Tensor](), 0

    def broadcast(tensor: torch.Tensor, *_: Any, **__: Any) -> None:
        nonlocal most
        if tensor.shape == (SIDE, SIDE):
            held.add(tensor)
        most = max(most, len(held))

    monkeypatch.setattr(dist, "broadcast", broadcast)
    scenario = scenario_of()
    model, loss = whole_step(scenario, contexts[1])
    compare(model, loss, reference_of(scenario, contexts[1]), contexts[1])
    assert most == 1


def test_on_one_device_no_gradient_outlives_its_place_in_backward(contexts: list[RankContext]) -> None:
    with_gradients: list[int] = []
    built: list[weakref.ref[nn.Module]] = []

    def watched() -> nn.Module:
        model = stack()
        built.append(weakref.ref(model))
        parameters = [weakref.ref(parameter) for parameter in model.parameters()]
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(partial(count, parameters))
        return model

    def count(parameters: list[Any], _: torch.Tensor) -> None:
        with_gradients.append(sum(one().grad is not None for one in parameters))

    reference = reference_of(scenario_of(watched), contexts[0])
    assert with_gradients == [1] * LAYERS
    on_device = [model for one in built if (model := one()) and next(model.parameters()).device.type != "meta"]
    assert not on_device
    assert {tuple(gradient.shape) for gradient in reference.gradients.values()} == {(SIDE, SIDE)}


def test_what_is_the_same_differs_by_nothing(contexts: list[RankContext]) -> None:
    scenario = scenario_of()
    model, loss = whole_step(scenario, contexts[0])
    result = compare(model, loss, reference_of(scenario, contexts[0]), contexts[0])
    assert result.loss.apart == 0 and len(result.gradients) == LAYERS
    assert all(one.apart == 0 < one.size for one in result.gradients.values())


def test_what_the_plan_multiplies_gradients_by_leaves_the_reference_alone(contexts: list[RankContext]) -> None:
    """Rounding is measured against it afterwards."""
    scenario = scenario_of()
    model, loss = whole_step(scenario, contexts[0])
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad *= 2
    reference = reference_of(scenario, contexts[0])
    before = {name: gradient.clone() for name, gradient in reference.gradients.items()}
    result = compare(model, loss, reference, contexts[0], gradient_scale=2.0)
    assert all(one.apart == 0 for one in result.gradients.values())
    assert all(torch.equal(before[name], gradient) for name, gradient in reference.gradients.items())


def test_what_backward_reaches_in_two_parts_is_added_up(contexts: list[RankContext]) -> None:
    """As reentrant checkpoints do, each of which runs a backward of its own."""

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(SIDE, SIDE)

        def forward(self, given: torch.Tensor) -> torch.Tensor:
            from torch.utils.checkpoint import checkpoint

            given = given.clone().requires_grad_()
            for _ in range(2):
                given = checkpoint(self.layer, given, use_reentrant=True)
            return given

    scenario = scenario_of(Shared)
    model, loss = whole_step(scenario, contexts[0])
    result = compare(model, loss, reference_of(scenario, contexts[0]), contexts[0])
    assert all(one.apart < 1e-6 * one.size for one in result.gradients.values())


def test_the_loss_alone_needs_no_gradients(contexts: list[RankContext]) -> None:
    scenario = scenario_of()
    model, loss = whole_step(scenario, contexts[0])
    reference = reference_of(scenario, contexts[0], with_gradients=False)
    assert not reference.gradients
    result = compare(model, loss, reference, contexts[0], gradient_scale=None)
    assert result.loss.apart == 0 and not result.gradients
