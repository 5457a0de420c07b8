"""The user's own training step: its phases, its period and its optimizers, on a fake group; and what it rejects."""

import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from conftest import ROOT
from torch import nn

import distbench
from distbench.plans.training_step import step_of
from distbench.plans.user_step import loss_of_step, optimizers_of, period_of
from distbench.ranks.context import RankContext
from distbench.ranks.measure import no_stamp
from distbench.spec import DdpPlan, FsdpPlan, ParallelPlan, Scenario, UserError
from distbench.torch_private import fake_ranks
from distbench.worker.plan_rehearsal import rehearse

FULL = ("forward", "backward", "optimizer")


@pytest.fixture(scope="module")
def context() -> Iterator[RankContext]:
    with fake_ranks({"dp_shard": 2}) as mesh:
        assert dist.group.WORLD is not None
        yield RankContext(0, torch.device("cpu"), mesh, "gloo", dist.group.WORLD, 1)


def samples() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(4, 3), torch.zeros(4, dtype=torch.int64)


def backward_of(model: nn.Module, batch: Any) -> torch.Tensor:
    loss = F.cross_entropy(model(batch[0]), batch[1])
    loss.backward()
    return loss


def step(model: nn.Module, batch: Any, optimizer: Any) -> torch.Tensor:
    loss = backward_of(model, batch)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def given(step: Any = step, **fields: Any) -> Scenario:
    fields = {"make_optimizers": lambda model: torch.optim.SGD(model.parameters(), lr=0.1), **fields}
    return Scenario(**{"build_model": lambda: nn.Linear(3, 2), "make_batch": samples, "step": step, **fields})


def alternating(every: int, then: Callable[..., object]) -> Callable[..., torch.Tensor]:
    """A step that calls `then` in every so many calls, before its optimizer steps."""
    numbers = itertools.count(1)

    def alternate(model: nn.Module, batch: Any, optimizer: Any) -> torch.Tensor:
        loss = backward_of(model, batch)
        if next(numbers) % every == 0:
            then(model, optimizer)
        return loss

    return alternate


def optimizer_step(_: nn.Module, optimizer: Any) -> None:
    optimizer.step()


@pytest.mark.parametrize(
    ("calls", "period"),
    [("", None), ("ab", None), ("xaa", 1), ("abab", 2), ("xaabaab", 3), ("xabcabc", 3), ("abcdefgh", None)],
)
def test_a_period_is_that_of_the_last_calls(calls: str, period: int | None) -> None:
    assert period_of(calls) == period


def example(name: str) -> Scenario:
    sys.path.insert(0, str(ROOT / "docs" / "examples"))
    import own_step

    scenario = getattr(own_step, name)()
    assert isinstance(scenario, Scenario)
    return scenario


@pytest.mark.parametrize(
    ("name", "phases"),
    [
        # Unscaling and clipping, then the scaler's update and the average.
        ("clip_ema", ("forward", "backward", "other", "optimizer", "other")),
        ("gan", FULL * 2),
        ("accumulation", ("forward", "backward", *FULL)),
    ],
)
@pytest.mark.long
def test_phases_are_those_that_run_wherever_the_step_has_them(
    context: RankContext, name: str, phases: tuple[str, ...]
) -> None:
    own = step_of(example(name), context)
    assert own.phases == phases
    stamps: list[int] = []
    own(lambda: stamps.append(1))
    assert len(stamps) == len(phases)


def test_a_penalty_is_backward_and_a_closure_is_the_optimizer(context: RankContext) -> None:
    def penalised(model: nn.Module, batch: Any, optimizer: Any) -> torch.Tensor:
        def closure() -> torch.Tensor:
            loss = backward_of(model, batch)
            model.zero_grad()
            return loss

        x = batch[0].clone().requires_grad_()
        torch.autograd.grad(model(x).sum(), x)
        loss: torch.Tensor = optimizer.step(closure)
        return loss

    assert step_of(given(penalised), context).phases == FULL


@pytest.mark.parametrize(
    ("every", "then"),
    [(2, optimizer_step), (5, optimizer_step), (2, lambda model, _: nn.utils.clip_grad_norm_(model.parameters(), 1.0))],
)
def test_steps_of_several_kinds_need_a_declared_period(
    context: RankContext, every: int, then: Callable[..., object]
) -> None:
    with pytest.raises(UserError, match=rf"a period of {every} calls; declare Scenario\(period={every}\)"):
        _ = step_of(given(alternating(every, then)), context).phases
    own = step_of(given(alternating(every, then), period=every), context)
    assert own.phases.count("backward") == every


def test_a_later_call_of_another_kind_is_rejected(context: RankContext) -> None:
    numbers = itertools.count(1)

    def rarely(model: nn.Module, batch: Any, optimizer: Any) -> torch.Tensor:
        return backward_of(model, batch) if next(numbers) > 5 else step(model, batch, optimizer)

    own = step_of(given(rarely), context)
    own(no_stamp)
    with pytest.raises(UserError, match="runs forward, backward in this call, but ran forward, backward, optimizer in"):
        for _ in range(3):
            own(no_stamp)


STALE = nn.Parameter(torch.empty(2, device="meta"))  # as kept from build_model
SHARDED: dict[str, Any] = {"plan": ParallelPlan(fsdp=FsdpPlan())}


def penalised_twice(model: nn.Module, batch: Any, optimizer: Any) -> torch.Tensor:
    x = batch[0].clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    loss = gradient.square().mean()
    loss.backward()
    return loss


def twice(model: nn.Module, batch: Any, optimizer: Any) -> torch.Tensor:
    loss = step(model, batch, optimizer)
    optimizer.step()
    return loss


@pytest.mark.parametrize(
    ("scenario", "message"),
    [
        (given(lambda *_: None), r"step \(.*test_user_step.py:\d+\) returns nothing; return one number as loss"),
        (given(lambda model, batch, _: model(batch[0])), r"returns a tensor of shape \[2, 2\]; return one number"),
        (given(lambda *_: {}), "returns a dict; return one number"),
        (given(lambda model, batch, _: model(batch[0]).sum()), r"test_user_step.py:\d+\) runs no backward"),
        (
            given(twice),
            r"SGD twice without a backward in between, the second time at .*test_user_step.py:\d+; step the",
        ),
        (given(make_optimizers=lambda _: 3), r"make_optimizers \(.*:\d+\) returns an int, which has no step"),
        (given(make_optimizers=lambda _: [None]), "returns a list, which has no step"),
        (
            given(make_optimizers=lambda model: torch.optim.SGD([*model.parameters(), STALE])),
            "returns 'optimizer', which has parameters from before the parallel model; use",
        ),
        (given(penalised_twice, **SHARDED), r"step \(.*test_user_step.py:\d+\) differentiates a gradient, but FSDP"),
        (
            given(make_optimizers=lambda model: torch.optim.SGD([model.get_parameter("gate")])),
            r"raises AttributeError: .*gate.* \(.*test_user_step.py:\d+\); use parameters that .*\(weight, bias",
        ),
        (
            given(make_optimizers=lambda _: {"sgd": torch.optim.SGD(nn.Linear(3, 2).parameters())}),
            "returns 'sgd', which has no parameter of the parallel model; use",
        ),
    ],
)
def test_bad_steps_and_optimizers_are_named(context: RankContext, scenario: Scenario, message: str) -> None:
    with pytest.raises(UserError, match=message) as raised:
        step_of(scenario, context).forward_backward()
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"loss": F.cross_entropy}, "both step and loss; step runs the whole training step"),
        ({"plan": ParallelPlan(microbatches=2)}, "both step and plan.microbatches"),
        ({"optimizer": torch.optim.SGD}, "both optimizer and make_optimizers"),
        ({"period": 0}, "Scenario.period is 0; give the number of calls"),
        ({"step": None, "period": 2}, "Scenario.period is 2 without step"),
        (
            {"step": lambda model, batch: None},
            r"called as step\(model, batch, optimizers\), but accepts \(model, batch\)",
        ),
    ],
)
def test_a_scenario_with_a_step_has_no_other_way_to_train(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        given(**fields)


def test_ranks_with_other_phases_are_named(context: RankContext, monkeypatch: pytest.MonkeyPatch) -> None:
    own = step_of(given(), context)
    monkeypatch.setattr(type(context), "gather", lambda _, call: [call, call._replace(phases=call.phases[:2])])
    with pytest.raises(UserError, match="runs forward, backward on rank 1 and forward, backward, optimizer on rank 0"):
        _ = own.phases


def test_without_a_step_each_optimizer_and_scheduler_steps(context: RankContext) -> None:
    def make(model: nn.Module) -> Any:
        sgd = torch.optim.SGD(model.parameters(), lr=1.0)
        return [sgd], [{"scheduler": torch.optim.lr_scheduler.ExponentialLR(sgd, 0.5), "interval": "epoch"}]

    own = step_of(given(None, make_optimizers=make, loss=F.cross_entropy), context)
    assert own.phases == FULL
    own(no_stamp)
    own(no_stamp)
    made = optimizers_of(own.optimizer)
    assert made["0.0"].param_groups[0]["lr"] == 0.25 and [*made] == ["0.0", "1.0.scheduler", "1.0.interval"]
    own.start_anew()
    assert optimizers_of(own.optimizer)["0.0"].param_groups[0]["lr"] == 1.0


def test_gradients_of_a_check_are_those_with_which_an_optimizer_steps(context: RankContext) -> None:
    def clipped(model: nn.Module, batch: Any, optimizer: Any) -> dict[str, Any]:
        loss = backward_of(model, batch)
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()
        model.zero_grad()
        return {"one": loss, "two": 2.0}

    own = step_of(given(clipped), context)
    loss = own.forward_backward()
    norm = torch.stack([parameter.grad.norm() for parameter in own.model.parameters() if parameter.grad is not None])
    torch.testing.assert_close(norm.norm(), torch.tensor(1e-3), rtol=1e-3, atol=0)
    assert loss is not None and loss == loss_of_step({"one": loss - 2, "two": 2.0})


class Own:
    """An optimizer that is not torch's, and clears gradients."""

    def __init__(self, parameters: Any) -> None:
        self.parameters = list(parameters)

    @torch.no_grad()
    def step(self) -> None:
        for parameter in self.parameters:
            parameter.sub_(parameter.grad, alpha=0.1)

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None


@pytest.mark.parametrize("plan", [ParallelPlan(), ParallelPlan(ddp=DdpPlan(mesh_dims=("dp_shard",)))])
def test_gradients_of_an_optimizer_that_is_not_torchs_are_those_of_the_last_backward(
    context: RankContext, plan: ParallelPlan
) -> None:
    scenario = given(make_optimizers=lambda model: Own(model.parameters()), plan=plan)
    assert not rehearse(scenario, context).problems
    own = step_of(given(make_optimizers=lambda model: Own(model.parameters())), context)
    before = [parameter.detach().clone() for parameter in own.model.parameters()]
    own.forward_backward()
    for parameter, value in zip(own.model.parameters(), before, strict=True):
        assert parameter.grad is not None and parameter.grad.any()
        torch.testing.assert_close(value - parameter, 0.1 * parameter.grad)


@pytest.mark.long
def test_check_names_a_wrong_period_and_a_forward_that_ddp_does_not_see(context: RankContext) -> None:
    (problem,) = rehearse(given(alternating(2, optimizer_step), period=3), context).problems
    assert "a period of 2 calls; declare Scenario(period=2)" in problem

    def parts(model: Any, batch: Any, optimizer: Any) -> torch.Tensor:
        loss = F.cross_entropy(model.layer(batch[0]), batch[1])
        loss.backward()
        return loss

    ddp = given(parts, build_model=Inner, plan=ParallelPlan(ddp=DdpPlan(mesh_dims=("dp_shard",))))
    (problem,) = rehearse(ddp, context).problems
    assert "test_user_step.py:" in problem and "bypasses the model's forward, in which DDP prepares" in problem


class Inner(nn.Module):
    """As in Lightning: its training step calls a part of it, and its forward is never called by the user."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        return {"loss": F.cross_entropy(self.layer(batch[0]), batch[1]), "at": batch_idx}


def test_a_wrapped_method_runs_inside_the_models_forward() -> None:
    model, entered = Inner(), list[str]()
    model.register_forward_pre_hook(lambda *_: entered.append("forward"))
    call = distbench.wrap(Inner.training_step)
    assert call(model, samples()).ndim == 0 and entered == ["forward"]
    assert Scenario(call=call).call is call and "forward" not in vars(model)
