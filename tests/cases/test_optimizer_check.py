"""Optimizers that differ from one device's: what is compared, which errors are allowed, and the named causes."""

import json
import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import Ranks
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.utils import clip_grad_norm_

from distbench.cases.optimizer_correctness import (
    OptimizerCheck,
    Signs,
    measured_rounding_of_steps,
    of_decay,
    of_differing_bits,
    of_options,
    of_scales,
    of_signs,
)
from distbench.cases.single_device_reference import Reference, gradient_differences, model_on_device, reference_of
from distbench.cases.trained_tensors import Trained, own_part, part_of, trained_tensors
from distbench.ranks.context import RankContext
from distbench.spec import Scenario
from distbench.torch_private import fake_ranks, no_collectives


class OneOfTwo(RankContext):
    """A rank that gets nothing from the others."""

    def gather(self, value: Any) -> list[Any]:
        return [value]


@pytest.fixture(scope="module")
def context() -> Iterator[RankContext]:
    with fake_ranks({"dp_shard": 2}) as mesh:
        assert dist.group.WORLD is not None
        yield OneOfTwo(0, torch.device("cpu"), mesh, "gloo", dist.group.WORLD, 1)


class Norms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(16), nn.Linear(16, 16)
        self.frozen = nn.LayerNorm(4).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.norm(x))


def squared_error(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return ((output - target) ** 2).mean()


def scenario_of(optimizer: Any) -> Scenario:
    generator = torch.Generator().manual_seed(0)
    batch = torch.randn(8, 16, generator=generator), torch.randn(8, 16, generator=generator)
    return Scenario(build_model=Norms, make_batch=lambda: batch, loss=squared_error, optimizer=optimizer)


class Around:
    """An optimizer of torch with something around its step where its parameters are `parallel`."""

    def __init__(self, parameters: Any, act: Callable[["Around"], None], make: Any = torch.optim.AdamW) -> None:
        self.parameters = list(parameters)
        self.inner, self.act = make([each for each in self.parameters if each.requires_grad], lr=1e-2), act
        self.ema = [each.detach().clone() for each in self.parameters]

    @property
    def is_parallel(self) -> bool:
        return hasattr(self.parameters[0], "is_parallel")

    @torch.no_grad()
    def step(self) -> None:
        if self.is_parallel:
            self.act(self)
        else:
            self.average()

    def average(self) -> None:
        self.inner.step()
        for average, parameter in zip(self.ema, self.parameters, strict=True):
            average.lerp_(parameter, 1e-3)


def checked(scenario: Scenario, context: RankContext) -> tuple[str | None, OptimizerCheck]:
    """Check a "parallel" model, which is whole, in the place of rank 0."""
    reference = reference_of(scenario, context, gradient_scale=1.0)
    model = model_on_device(scenario, context, reference.built)
    for parameter in model.parameters():
        parameter.is_parallel = True  # type: ignore[attr-defined]
        parameter.grad = torch.full_like(parameter, 7.0) if parameter.requires_grad else None
    gradient_differences(model, reference, reference.gradients, context, is_given=True)
    step: Any = SimpleNamespace(model=model, gradient_scale=1.0, optimizer=None)
    step.optimize = lambda: step.optimizer.step()
    check = OptimizerCheck(step, scenario, context, reference, 1e-5)
    return check(), check


def clipped(optimizer: Around) -> None:
    clip_grad_norm_(optimizer.parameters, 1e-2)
    optimizer.average()


def nothing_of_norms(optimizer: Around) -> None:
    optimizer.parameters[0].grad = None
    optimizer.average()


def twice(optimizer: Around) -> None:
    optimizer.average()
    optimizer.average()


def without_average(optimizer: Around) -> None:
    optimizer.inner.step()


def decaying(optimizer: Around) -> None:
    optimizer.average()
    torch._foreach_mul_([each for each in optimizer.parameters if each.requires_grad], 0.99)


class RateOfItsOwn(torch.optim.AdamW):
    def __init__(self, parameters: Any) -> None:
        given = list(parameters)
        super().__init__(given, lr=2e-2 if hasattr(given[0], "is_parallel") else 1e-2)


def with_noise(optimizer: Around) -> None:
    optimizer.average()
    optimizer.parameters[0].add_(torch.randn(16), alpha=1e-4)


def with_nan(optimizer: Around) -> None:
    optimizer.average()
    optimizer.parameters[1].fill_(math.nan)


def with_frozen(optimizer: Around) -> None:
    optimizer.average()
    optimizer.parameters[-1].add_(1.0)


def scaled(optimizer: Around) -> None:
    for parameter in optimizer.parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(0.5)
    optimizer.average()


def shuffled(optimizer: Around) -> None:
    optimizer.average()
    if optimizer.inner.state[optimizer.parameters[0]]["step"] == 2:
        weight = max(optimizer.parameters, key=lambda each: each.numel())
        weight.copy_(weight.flip(0).clone())


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (clipped, "multiplied by one factor"),  # Adam hides it from the parameters; its moments do not
        (scaled, "multiplied by one factor (0.5 on every rank)"),
        (nothing_of_norms, "the optimizer never changes norm.weight on rank 0"),
        (twice, "step count of norm.weight on rank 0 is 2 times one device's"),
        (without_average, "the optimizer never changes ema of"),
        (decaying, "weight decay applies either on the ranks or on one device"),
        (RateOfItsOwn, "lr of norm.weight is 0.02 on rank 0 and 0.01 on one device"),
        (with_noise, "draws random numbers on rank 0"),
        (with_nan, "has another shape than one device's, or is not a number"),
        (with_frozen, "frozen.bias differs"),
        (shuffled, "right values of linear.weight in the wrong places"),
    ],
)
def test_what_an_optimizer_does_otherwise_on_ranks_is_wrong_and_named(
    context: RankContext, act: Any, message: str
) -> None:
    wrong, _ = checked(scenario_of(act if isinstance(act, type) else partial(Around, act=act)), context)
    assert wrong is not None and message in wrong


@pytest.mark.parametrize(
    "make",
    [
        partial(Around, act=Around.average),
        partial(Around, act=Around.average, make=torch.optim.SGD),
        partial(torch.optim.Adagrad, lr=1e-2),
        partial(torch.optim.AdamW, lr=1e-2, fused=True),
    ],
)
def test_a_right_optimizer_is_right_to_the_bit_and_its_bound_is_of_its_own_steps(
    context: RankContext, make: Any
) -> None:
    wrong, check = checked(scenario_of(make), context)
    assert wrong is None and "optimizer_check" not in check.counters
    assert check.counters["param_rel_error"] == 0 and check.counters["param_tolerance"] < 1e-2


def test_gradients_are_one_devices_before_the_steps_and_each_steps_are_the_same(context: RankContext) -> None:
    """The gradients of `checked` are 7 everywhere; an optimizer that clears them gets them again."""

    class Clears(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            super().step()
            self.zero_grad()

    assert checked(scenario_of(partial(Clears, lr=0.1)), context)[0] is None


def test_an_optimizer_that_cannot_run_alone_is_not_compared_and_that_is_recorded(context: RankContext) -> None:
    class Gathers(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            super().step()
            dist.broadcast(torch.ones(1), src=0)

    class Draws(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            super().step()
            torch.rand(1)

    for kind, reason in ((Gathers, "issues broadcast"), (Draws, "draws random numbers")):
        _, check = checked(scenario_of(partial(kind, lr=0.1)), context)
        assert reason in check.counters["optimizer_check"]


def test_on_one_device_a_sum_over_ranks_is_its_own_and_other_collectives_are_refused(context: RankContext) -> None:
    value = torch.ones(3)
    with no_collectives(is_alone=True):
        dist.all_reduce(value)
        work = dist.all_reduce(value, async_op=True)
        assert work is not None and work.wait() and dist.get_world_size() == 1
        with pytest.raises(RuntimeError, match="it issues broadcast"):
            dist.broadcast(value, src=0)
    assert value.tolist() == [1, 1, 1] and dist.get_world_size() == 2
    with no_collectives(), pytest.raises(RuntimeError, match="it issues all_reduce"):
        dist.all_reduce(value)


def test_rounding_of_a_step_is_that_of_its_lowest_precision(context: RankContext) -> None:
    class Rough(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.grad = parameter.grad.bfloat16().float()
            super().step()

    relative = []
    for kind in (torch.optim.SGD, Rough):
        scenario = scenario_of(partial(kind, lr=1.0))
        reference: Reference = reference_of(scenario, context, gradient_scale=1.0)
        rounding, _ = measured_rounding_of_steps(scenario, context, reference, 1.0)
        relative.append(rounding["linear.weight"] / float(reference.gradients["linear.weight"].abs().max()))
    # Twice a gradient, of which half a unit in the last place is rounded: f32's is 6e-8, bf16's 4e-3.
    assert relative[0] < 1e-4 and 4e-3 < relative[1] < 5e-2


def test_tensors_are_labelled_by_their_parameters(context: RankContext) -> None:
    model = Norms()
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    optimizer.step()
    kept = {"adamw": optimizer, "by name": {"norm.weight": torch.ones(16)}, "model": model}
    kept["list"] = [torch.ones_like(each) for each in model.parameters()]
    kept["hook"] = lambda: model.norm and bound
    bound = torch.zeros(2)
    labels = set(trained_tensors(dict(model.named_parameters()), kept, model))
    assert {"norm.weight", "frozen.bias", "adamw.exp_avg of linear.bias", "by name of norm.weight"} <= labels
    assert {"list of frozen.bias", "hook.bound"} <= labels and "adamw.exp_avg of frozen.bias" not in labels


def test_a_plain_tensor_of_a_shard_is_compared_with_that_part(context: RankContext) -> None:
    whole = torch.arange(12.0).reshape(6, 2)
    parameter = DTensor.from_local(torch.zeros(3, 2), context.mesh, [Shard(0)], run_check=False)
    for owner in ("weight", ""):
        parts = own_part(Trained(torch.ones(3, 2), owner), whole, {"weight": parameter})
        assert parts is not None and torch.equal(parts[1], whole[:3])
    assert own_part(Trained(torch.ones(5, 2)), whole, {"weight": parameter}) is None
    assert part_of(parameter) == (0,) and part_of(torch.ones(2)) == ()
    assert part_of(DTensor.from_local(torch.zeros(3), context.mesh, [Replicate()], run_check=False)) == ()


def test_options_scales_copies_and_decay_are_told_from_each_other() -> None:
    [message] = of_options({"w": {"lr": 1.0}}, [{"w": {"lr": 1.0}}, {"w": {"lr": 2.0}}])
    assert "lr of w is 2.0 on rank 1 and 1.0 on one device" in message
    assert not [*of_options({"w": {"lr": 1.0}}, [{"w": {"lr": 1.0}}] * 2)]
    assert "one device has w in a parameter group, but the parallel model does not" in next(
        of_options({"w": {}, "v": {}}, [{"v": {}}])
    )
    bits = [{("w", ()): "a", ("v", (0,)): "b"}, {("w", ()): "a", ("v", (1,)): "c"}]
    assert not [*of_differing_bits(bits)]
    assert "ranks 0 and 1 hold the same part of w" in next(of_differing_bits([bits[0], {("w", ()): "x"}]))
    mixed = [{"w": Signs(scale=2.0), "v": Signs(scale=3.0)}]
    assert not [*of_scales(mixed, [1.0], False)]
    own = [{"w": Signs(scale=2.0)}, {"w": Signs(scale=4.0)}]
    assert "norm of its own shards" in next(of_scales(own, [2.0, 1.0], False))
    assert "one factor (2 on rank 0, 4 on rank 1)" in next(of_scales(own, [2.0, 2.0], False))
    assert "error of 0.1 times its own value" in next(of_decay("w", [{"w": Signs(decay=0.1)}]))
    assert "rank 0 holds the part of w that belongs to the rank at [1]" in next(
        of_signs("w", [{"w": Signs(other_part=(1,))}])
    )


RIGHT = ("AdamW, foreach", "clip_grad_norm_, SGD", "Adafactor of DTensors", "EMA of shards", "step with scaler*")
MISTAKEN = (
    *("clip by the rank's own norm, AdamW", "EMA on rank 0 only", "Muon of a shard", "no reduction of replicas"),
    *("wrong parameter group", "loss scale of its own", "step that clips*"),
)


@pytest.mark.long
def test_on_ranks_mistaken_optimizers_are_wrong_with_their_cause_and_right_ones_are_not(
    ranks: Ranks, tmp_path: Path
) -> None:
    """TP with FSDP on four ranks, where norms are copies along TP."""
    file = tmp_path / "rows.json"
    done = ranks.run_forked(4, "-m", "benchmarks.optimizer_ranks", file, *RIGHT, *MISTAKEN)
    assert done.returncode == 0, done.stderr[-4000:]
    rows, _ = json.loads(file.read_text())
    assert sum(row["is_right"] for row in rows) == len(RIGHT) and len(rows) == len(RIGHT) + len(MISTAKEN)
    for row in rows:
        if row["is_right"]:
            assert row["wrong"] is None and "optimizer_check" not in row, row
        else:
            assert row["cause"] in (row["wrong"] or ""), row
    copies = next(row["wrong"] for row in rows if row["what"] == "no reduction of replicas")
    assert "ranks 0 and 1 hold the same part of layers.0.input_layernorm.weight" in copies
