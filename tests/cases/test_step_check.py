"""How far off a step may be: rounding as measured on one device, the bounds that follow, and the sentences."""

import importlib
import inspect
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from distbench.cases.single_device_reference import Difference, Differences, reference_of
from distbench.cases.step import step_cases
from distbench.cases.step_correctness import (
    Allowance,
    Finding,
    Rounding,
    StepCheck,
    measured_rounding,
    of_compiled,
    reduction_rounding,
)
from distbench.plans.batch import batch_of
from distbench.plans.model import blueprint
from distbench.plans.training_step import step_of
from distbench.ranks.context import RankContext
from distbench.spec import FsdpPlan, ParallelPlan, Scenario
from distbench.spec.versions import release
from distbench.torch_private import fake_ranks, loses_gradients_of_pending_inputs

BASE = Allowance(1e-5, 1e-5, "as for every f32 step")
RIGHT = Difference(0.0, 1.0)


class OneOfTwo(RankContext):
    """A rank that hears nothing of the others."""

    def gather(self, value: Any) -> list[Any]:
        return [value]


@pytest.fixture(scope="module")
def context() -> Iterator[RankContext]:
    with fake_ranks({"dp_shard": 2}) as mesh:
        assert dist.group.WORLD is not None
        yield OneOfTwo(0, torch.device("cpu"), mesh, "gloo", dist.group.WORLD, 1)


class Keys(nn.Module):
    """Attention whose keys have a bias: softmax takes the same off every score, so that its gradient is nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(32, 32) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.query(x), self.key(x), self.value(x)
        return F.softmax(query @ key.transpose(1, 2) / 32**0.5, -1) @ value


def squared_error(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """As F.mse_loss, whose backward in torch 2.11 takes no bf16 output with an f32 target."""
    return ((output - target) ** 2).mean()


def scenario_of(model: Any = Keys, dtype: torch.dtype = torch.float32, **plan: Any) -> Scenario:
    generator = torch.Generator().manual_seed(0)
    batch = torch.randn(4, 16, 32, generator=generator), torch.randn(4, 16, 32, generator=generator)
    return Scenario(
        build_model=lambda: model().to(dtype),
        make_batch=lambda: (batch[0].to(dtype), batch[1].to(dtype)),
        loss=squared_error,
        plan=ParallelPlan(**plan),
    )


def gradient(allowance: Allowance, name: str, **result: Difference) -> Finding:
    """What is judged of one gradient among others that are right."""
    findings = allowance.judged(Differences(1.0, RIGHT, {name: result.pop(name), **result}))
    return next(finding for finding in findings if finding.what == f"the gradient of {name}")


def rounding_of(scenario: Scenario, context: RankContext) -> tuple[Rounding, dict[str, float]]:
    """As measured, and the size of each gradient."""
    reference = reference_of(scenario, context)
    sizes = {name: float(one.abs().max()) for name, one in reference.gradients.items()}
    fsdp = scenario.plan.fsdp
    units = [("", fsdp.mixed_precision)] if fsdp is not None and fsdp.mixed_precision is not None else []
    return measured_rounding(scenario, context, reference, units), sizes


def test_f32s_rounding_is_what_f64_says_it_is(context: RankContext) -> None:
    """Expected: the same step in f64. A factor of three either way, as each is one draw."""
    scenario = scenario_of()
    rounding, _ = rounding_of(scenario, context)
    exact: dict[str, torch.Tensor] = reference_of(scenario_of(dtype=torch.float64), context).gradients
    single = reference_of(scenario, context).gradients
    for name in ("query.weight", "key.weight", "value.weight", "value.bias"):
        off = float((single[name] - exact[name]).abs().max())
        assert off / 3 < rounding.gradients[name] < off * 8, name
    assert "one unit in its last place" in rounding.by


@pytest.mark.parametrize(
    ("dtype", "policy", "by"),
    [
        (torch.bfloat16, None, "computing in f32 instead of bf16"),
        (torch.float32, MixedPrecisionPolicy(param_dtype=torch.bfloat16), "computing in bf16 instead of f32"),
        (torch.float32, MixedPrecisionPolicy(output_dtype=torch.bfloat16), "computing in bf16 instead of f32"),
    ],
)
def test_below_f32_rounding_is_that_of_the_precision(
    context: RankContext, dtype: torch.dtype, policy: Any, by: str
) -> None:
    rounding, sizes = rounding_of(scenario_of(dtype=dtype, fsdp=FsdpPlan(mixed_precision=policy)), context)
    assert rounding.by == by
    relative = rounding.gradients["value.weight"] / sizes["value.weight"]
    # Half a unit in bf16's last place is 2e-3 to 4e-3; of outputs alone fewer are rounded, and f32's is 6e-8.
    assert (1e-3 if policy is None or policy.param_dtype else 5e-4) < relative < 5e-2
    if policy and policy.param_dtype:
        # Of what is nothing in f32, bf16 leaves a thousand times as much.
        assert rounding.gradients["key.bias"] > 100 * sizes["key.bias"]


def test_sums_over_more_ranks_cost_more(context: RankContext) -> None:
    model = blueprint(Keys, 1).model
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    in_f32 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    assert reduction_rounding(model, [], 2) == 0
    # Half a unit in bf16's last place, 2**-8, times the root of two ranks; torch 2.15 reduces in f32, of 2**-24.
    expected = (2**-24 if release(torch.__version__) >= (2, 15) else 2**-8) * math.sqrt(2)
    assert reduction_rounding(model, [("", policy)], 2) == pytest.approx(expected)
    assert reduction_rounding(model, [("", in_f32)], 2) < 1e-6


def test_a_gradient_that_is_nothing_is_held_against_the_largest() -> None:
    """A ViT's key bias, as seen: 9e-9 where the largest gradient is 3, and as much off."""
    result = {"bias": Difference(1e-8, 9e-9), "weight": Difference(1e-7, 3.0)}
    finding = gradient(BASE, "weight", **result)
    assert not finding.is_wrong
    in_bf16 = replace(BASE, rounding=Rounding("computing in bf16", 0.0, {"bias": 2e-4, "weight": 3e-2}, 0.0))
    result = {"bias": Difference(3e-4, 9e-9), "weight": Difference(3e-2, 3.0)}
    assert not any(finding.is_wrong for finding in in_bf16.judged(Differences(1.0, RIGHT, result)))
    result["bias"] = Difference(0.2, 9e-9)
    message = str(gradient(in_bf16, "bias", **result))
    assert "relative to the largest gradient" in message and "6.67e-02" in message


@pytest.mark.parametrize("share", [1.0, 1e-2, 1e-4])
@pytest.mark.parametrize("factor", [0.5, 2.0, 0.99])
def test_a_small_gradient_is_not_hidden_by_a_large_one(share: float, factor: float) -> None:
    measured = replace(BASE, rounding=Rounding("x", 0.0, {"norm": share * 1e-6, "weight": 1e-6}, 0.0))
    result = {"norm": Difference(share * abs(1 - factor), share), "weight": Difference(1e-6, 1.0)}
    assert gradient(BASE, "norm", **result).is_wrong and gradient(measured, "norm", **result).is_wrong


def test_an_error_within_this_models_own_rounding_is_allowed_and_the_next_is_not() -> None:
    """Qwen3, as seen: 1.17e-5 where one device's f32 is 1.35e-5 from its f64."""
    result = {"norm": Difference(1.17e-5, 1.0), "weight": Difference(0.0, 1.0)}
    assert gradient(BASE, "norm", **result).is_wrong
    own = Rounding("moving parameters", 0.0, {"norm": 1.35e-5, "weight": 1e-6}, 0.0)
    finding = gradient(replace(BASE, rounding=own), "norm", **result)
    assert not finding.is_wrong and finding.rounding == pytest.approx(1.35e-5)
    message = str(gradient(replace(BASE, rounding=own), "norm", **(result | {"norm": Difference(1e-2, 1.0)})))
    assert "4e-05 is allowed, 3 times its rounding on one device, measured by moving parameters" in message


def test_a_tolerance_that_the_scenario_names_is_neither_widened_nor_narrowed() -> None:
    own = Rounding("x", 1.0, {"a": 0.1, "b": 0.1}, 0.0)
    named = Allowance(1e-2, 1e-2, "the scenario's tolerance", is_named=True, rounding=own)
    for apart, is_wrong in ((0.9e-2, False), (1.1e-2, True)):
        finding = gradient(named, "a", a=Difference(apart, 1.0), b=RIGHT)
        assert finding.is_wrong == is_wrong and finding.allowed == 1e-2
    assert named.judged(Differences(1.0, Difference(1.1e-2, 1.0)))[0].is_wrong


def test_what_cannot_be_compared_is_wrong_and_said() -> None:
    finding = gradient(BASE, "a", a=Difference(math.inf, 1.0))
    assert finding.is_wrong and "is missing, is not a number, or has another shape" in str(finding)


class FakeStep:
    """A parallel step that is one device's, its loss off by `off`."""

    unshards_output, gradient_scale, num_data_parallel = False, 1.0, 2
    units: list[Any] = []  # noqa: RUF012
    pipeline, plan, default_dtype, optimizer = None, ParallelPlan(), torch.float32, None

    def __init__(self, scenario: Scenario, off: float = 0.0) -> None:
        assert scenario.build_model and scenario.make_batch and scenario.loss
        self.model, self.off, self.kept_outputs = nn.Identity(), off, None
        self.batch = batch_of(scenario)

    def restart(self) -> None:
        """Nothing to do."""

    def own_values(self) -> None:
        """Its parameters have the values that the seed gives."""

    def forward_backward(self, stamp: Any) -> torch.Tensor:
        return torch.tensor(self.off)


class Dropped(nn.Module):
    def __init__(self, drop: Any) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(32, 32), drop

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.linear(x))


class SkippedPath(nn.Module):
    """Stochastic depth, as models of vision have it."""

    def __init__(self) -> None:
        super().__init__()
        self.drop_prob = 0.1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (torch.rand_like(x) > self.drop_prob) if self.training else x


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (lambda: Dropped(nn.Dropout(0.1)), "the likely cause: drop (Dropout, 0.1) draws different random numbers"),
        (
            lambda: Dropped(F.dropout),
            "the likely cause: the model (Dropped) draws different random numbers on each rank, even",
        ),
        (lambda: Dropped(SkippedPath()), "the likely cause: drop (SkippedPath, 0.1) draws different random numbers"),
        (lambda: Dropped(nn.Dropout(0.1)).eval(), None),
        (lambda: Dropped(nn.Dropout(0.0)), None),
        (Normed, "the likely cause: norm (BatchNorm1d) computes statistics over one of 2 parts of the batch"),
        (lambda: Normed().eval(), None),
    ],
)
def test_dropout_and_batch_statistics_are_named_and_nothing_else_is(
    context: RankContext, model: Any, expected: str | None
) -> None:
    scenario = scenario_of(model)
    step: Any = FakeStep(scenario, off=100.0)
    message = StepCheck(step, scenario, replace(context, check="loss"))()
    assert message is not None and "the loss differs" in message
    assert expected in message if expected else "cause" not in message


def test_a_factor_of_each_part_of_the_batch_is_named(context: RankContext) -> None:
    """Without a plan, no gradient is summed, so this rank's gradients are twice its part of the mean."""
    scenario = scenario_of(lambda: nn.Linear(32, 32))
    wrong = StepCheck(step_of(scenario, context), scenario, context)()
    assert wrong is not None and "multiplies the gradients of the 2 parts of the batch by 2, 0, such as" in wrong


@pytest.mark.parametrize(("error", "is_told"), [(1.0, True), (math.inf, True), (0.1, False)])
def test_a_gradient_that_compiled_code_may_have_dropped_is_told_where_a_module_is_compiled(
    error: float, is_told: bool
) -> None:
    assert not list(of_compiled(None, error, lambda: True))
    assert not list(of_compiled("0", error, lambda: False))
    message = list(of_compiled("0", error, lambda: True))
    what = f"0 is compiled, and torch {torch.__version__} drops"
    assert [one.startswith(what) for one in message] == [True] * is_told


@pytest.mark.long
def test_whether_torch_drops_such_gradients_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch 2.11 keeps them; 2.12 to 2.15 drop them (pytorch PR 191113)."""
    module: Any = importlib.import_module("torch._functorch.aot_autograd")
    plain = inspect.unwrap(module.process_inputs)  # without the work-around that an earlier test may have left
    monkeypatch.setattr(module, "process_inputs", plain)
    torch.compiler.reset()
    assert loses_gradients_of_pending_inputs.__wrapped__() == (release(torch.__version__) >= (2, 12))
    torch.compiler.reset()


def test_a_model_that_cannot_be_rounded_otherwise_keeps_the_blanket_bound(context: RankContext) -> None:
    """As a kernel of one precision: what would be measured raises, and says so only where the step is wrong."""

    class Only(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(32, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.linear.weight.dtype != torch.bfloat16:
                raise TypeError("bf16 only")
            return self.linear(x)

    scenario = scenario_of(Only, torch.bfloat16)
    step: Any = FakeStep(scenario, off=100.0)
    message = StepCheck(step, scenario, replace(context, check="loss"))()
    assert message is not None and "5e-02 is allowed" in message
    assert "rounding could not be measured (TypeError: bf16 only)" in message


@pytest.mark.long
def test_a_variant_again_is_checked_again_and_a_wrong_one_after_a_right_one_is_wrong(
    context: RankContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both of two ranks have the same half of a batch, so that one of them computes what one device computes. Its
    memory is known from the first time; whether it is right is not."""
    half = torch.randn(2, 16, 32, generator=torch.Generator().manual_seed(0))
    batch = torch.cat([half, half])
    monkeypatch.setattr("distbench.cases.step.problems", lambda *_: [])
    scenario = replace(scenario_of(), make_batch=lambda: (batch, -batch))
    [case_spec] = step_cases(scenario, "mine", context)
    message, known = [], []
    for factor in (1, 2, 1):
        with case_spec.open() as opened:
            step: Any = opened.call
            step.model.register_forward_hook(lambda _, given, output, factor=factor: output * factor)
            step(lambda: None)
            message.append(opened.check())
            known.append("peak_bytes" in opened.after())
    assert message[0] is None and message[2] is None
    assert message[1] is not None and "the loss differs" in message[1]
    assert known == [True, False, False]
