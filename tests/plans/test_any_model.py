"""Models as people have them: tensors that are no buffers, values made of parameters, and what a parallelize function
asks of FSDP2; on a fake group."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from any_model import GIVEN, SHARDED, batch, net, on, problems_of, shards
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from distbench.cases.single_device_reference import _shared, model_on_device, reference_of
from distbench.cases.step import step_cases
from distbench.cases.step_correctness import StepCheck, measured_rounding
from distbench.observe.memory import memory_counters
from distbench.plans.model import blueprint, initial_value
from distbench.plans.training_step import TrainingStep, state_of
from distbench.ranks.context import RankContext
from distbench.ranks.failure import blamed
from distbench.ranks.measure import no_stamp
from distbench.simulate.recorded_step import _one_sentence_errors
from distbench.spec import DdpPlan, FsdpPlan, ParallelPlan, Scenario, UserError
from distbench.torch_private import NeedsValues, no_collectives
from distbench.worker.child_verbs import _optimizer_share
from distbench.worker.plan_rehearsal import answer_of

HERE = __file__
CPU = torch.device("cpu")


@pytest.fixture
def context() -> Iterator[RankContext]:
    yield from on({"dp_shard": 2})


# Models


class OwnTensors(nn.Module):
    """Tensors that are no buffers, a buffer on its parameter's device, and one that is made of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.rates = [rate.item() for rate in torch.linspace(0, 1, 3)]
        self.scale = torch.linspace(0.5, 1.5, 4)
        self.tables = {"shift": [torch.full((4,), 0.25)]}
        self.register_buffer("mask", torch.ones(4, device=self.layer.weight.device))
        self.register_buffer("mean", self.layer.weight.detach().clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x * self.scale.to(x.device) * self.mask + self.tables["shift"][0]) + self.mean.sum()


def test_a_model_of_tensors_that_are_no_parameters_runs_as_it_is(context: RankContext) -> None:
    scenario = Scenario(**{**GIVEN, "build_model": OwnTensors, "plan": SHARDED})
    assert answer_of(scenario, context)["problems"] == []
    step = TrainingStep(scenario, context)
    step(no_stamp)
    one = model_on_device(scenario, context, blueprint(OwnTensors, context.seed))
    for model in (step.model, one):
        assert model.scale.tolist() == pytest.approx([0.5, 0.8333333, 1.1666667, 1.5])
        assert model.tables["shift"][0].tolist() == [0.25] * 4 and model.mask.tolist() == [1.0] * 4
    assert torch.equal(step.model.mean, one.mean) and float(one.mean.abs().sum()) > 0


class Reading(nn.Module):
    """Values of its parameters while it is built, numpy's put into one, and a weight that two modules share."""

    def __init__(self, scaled: bool = True) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.rates = [rate.item() for rate in torch.linspace(0, 1, 3)]
        self.scale = self.first.weight.abs().max().item() if scaled else 1.0
        if scaled:
            self.first.bias.data = torch.from_numpy(np.ones(4, dtype=np.float32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)) * self.scale


@pytest.mark.parametrize("scaled", [True, False])
def test_a_model_that_reads_its_parameters_is_the_same_on_one_device(context: RankContext, scaled: bool) -> None:
    """Also where a weight is shared, which building it on the CPU made two of."""

    def build() -> nn.Module:
        return Reading(scaled)

    built = blueprint(build, context.seed)
    assert built.needs_values == scaled and built.model.first.weight.is_meta
    assert built.parameters == ["first.weight", "first.bias", "second.bias"]
    assert problems_of(context, build_model=build) == []
    one = model_on_device(Scenario(**{**GIVEN, "build_model": build}), context, built)
    assert one.scale == built.model.scale and one.first.weight is one.second.weight


def test_values_made_of_a_large_model_s_parameters_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distbench.plans.model.MOST_DRAWN", 9)
    with pytest.raises(UserError, match="computes mask from parameters, which have no values in a model of 10"):
        blueprint(OwnTensors, 1)


def test_sparse_gradients_are_refused_by_name(context: RankContext) -> None:
    (message,) = problems_of(context, build_model=lambda: nn.Sequential(nn.EmbeddingBag(4, 2, sparse=True)))
    assert message.startswith("0 (EmbeddingBag) has sparse gradients")


def test_a_scalar_parameter_is_named_with_what_to_do(context: RankContext) -> None:
    class Scaled(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 2)
            self.scale = nn.Parameter(torch.tensor(1.0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * self.scale

    (message,) = problems_of(context, build_model=Scaled)
    assert message.endswith(
        "parameter scale is a scalar, which fully_shard does not accept; add scale to FsdpPlan(whole=...)"
    )
    assert problems_of(context, build_model=Scaled, plan=ParallelPlan(fsdp=FsdpPlan(whole=("scale",)))) == []


def test_mixed_dtypes_are_refused_before_ranks_do(context: RankContext) -> None:
    """On shapes alone a norm takes any dtype; the CPU's kernel does not."""

    def build() -> nn.Module:
        return nn.Sequential(nn.LayerNorm(4).to(torch.bfloat16), nn.Linear(4, 2))

    (message,) = problems_of(context, build_model=build, plan=ParallelPlan(), parallelize=lambda model, mesh: None)
    assert message.startswith("0, given f32[2,4], cannot run: RuntimeError: mixed dtype")


# Functions of one's own


@pytest.mark.parametrize("sizes", [{"dp_replicate": 2, "dp_shard": 1}, {"dp_shard": 1, "tp": 2}])
def test_what_scatters_nothing_is_divided_once(sizes: dict[str, int]) -> None:
    """Gradients of units without shards came out divided by the factor twice, and so the step as `wrong`. The fake
    group's sum over two replicas is this rank's own gradient."""
    mesh_dims = ("dp_replicate", "dp_shard") if "tp" not in sizes else ("dp_shard",)

    def own(model: nn.Module, mesh: Any) -> None:
        shards(model, mesh[mesh_dims], 4.0)

    for context in on(sizes):
        step = TrainingStep(Scenario(**GIVEN, parallelize=own, gradient_divide_factor=4.0), context)
        step.forward_backward()
        model = model_on_device(Scenario(**GIVEN), context, blueprint(net, context.seed))
        part = slice(0, 2) if "tp" not in sizes else slice(None)
        x, y = batch()
        F.cross_entropy(model(x[part]), y[part]).backward()
        for ours, theirs in zip(step.model.parameters(), model.parameters(), strict=True):
            assert torch.allclose(ours.grad.to_local() * 4, theirs.grad, atol=1e-6)


class Ops:
    """A reduce-scatter that notes how it reduces."""

    def __init__(self) -> None:
        self.ops: list[Any] = []

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, **_: Any) -> None:
        self.ops.append(op)
        output_tensor.copy_(input_tensor[: output_tensor.numel()])


def test_only_what_is_divided_by_a_number_of_its_own_is_summed_first(context: RankContext) -> None:
    """Said or unsaid: only NCCL has a sum that divides, and an average stays one."""
    noted = Ops()

    def own(model: nn.Module, mesh: Any) -> None:
        shards(model, mesh)
        model[0].set_gradient_divide_factor(3.0)
        for one in (model[0], model):
            one.set_custom_reduce_scatter(noted)

    TrainingStep(Scenario(**GIVEN, parallelize=own), context).forward_backward()
    assert noted.ops == [dist.ReduceOp.AVG, dist.ReduceOp.SUM]


def test_a_function_s_own_policies_say_how_far_off_a_step_may_be(context: RankContext) -> None:
    """bf16 of a function's own was judged as f32, and so came out as `wrong`."""
    bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)

    def own(model: nn.Module, mesh: Any) -> nn.Module:
        shards(model, mesh, mp_policy=bf16)
        return nn.Sequential(model)

    step = TrainingStep(Scenario(**GIVEN, parallelize=own), context)
    assert step.units == [("0", bf16), ("", bf16)]


def freezes(model: nn.Module, mesh: Any) -> None:
    model[0].requires_grad_(False)


def casts(model: nn.Module, mesh: Any) -> None:
    model.to(torch.bfloat16)


def adds_without_value(model: nn.Module, mesh: Any) -> None:
    model.register_buffer("steps", torch.zeros(3, device="meta"))


def gives_up(model: nn.Module, mesh: Any) -> nn.Module:
    return nn.Identity()


def replaces(model: nn.Module, mesh: Any) -> None:
    shards(model, mesh)
    model[1].bias = nn.Parameter(torch.empty(2, device="meta"))


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        (freezes, "parameter 0.weight is frozen in the parallel model ("),
        (casts, "parameter 0.weight is of bf16 in the parallel model ("),
        (adds_without_value, "has a buffer 'steps' that build_model did not make and that has no values"),
        (gives_up, f"the parallel model ({HERE}:"),
        (replaces, f"the model of parallelize ({HERE}:"),
    ],
)
def test_what_a_function_may_not_do_is_one_sentence(
    context: RankContext, own: Callable[..., Any], expected: str
) -> None:
    (message,) = problems_of(context, plan=ParallelPlan(), parallelize=own)
    assert expected in message


def test_a_buffer_that_a_function_adds_keeps_its_values(context: RankContext) -> None:
    def own(model: nn.Module, mesh: Any) -> None:
        shards(model, mesh)
        model.register_buffer("steps", torch.arange(3))

    assert TrainingStep(Scenario(**GIVEN, parallelize=own), context).model.steps.tolist() == [0, 1, 2]


def test_a_renamed_module_keeps_its_values(context: RankContext) -> None:
    """Names and order changed, so that a place among the others says nothing."""

    def own(model: nn.Module, mesh: Any) -> nn.Module:
        return nn.ModuleDict({"last": model[1], "first": model[0]})

    step = TrainingStep(Scenario(**GIVEN, parallelize=own), context)
    one = model_on_device(Scenario(**GIVEN), context, blueprint(net, context.seed))
    assert torch.equal(step.model.first.weight, one[0].weight) and torch.equal(step.model.last.bias, one[1].bias)


def test_what_autocast_computes_in_says_how_far_off_a_step_may_be(context: RankContext) -> None:
    def cast(model: Any, given: Any) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.cross_entropy(model(given[0]).float(), given[1])

    scenario = Scenario(**{**GIVEN, "loss": None}, call=cast)
    reference = reference_of(scenario, context)
    assert reference.computed_in == torch.bfloat16
    rounding = measured_rounding(scenario, context, reference)
    assert rounding.by == "moving each parameter by one unit in bf16's last place" and rounding.loss > 1e-4


def test_a_style_s_class_and_what_is_no_style_are_named(context: RankContext) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel

    for given, expected in (
        (ColwiseParallel, "ColwiseParallel is a class; give an instance"),
        (3, "3 is a int; give a"),
    ):
        (message,) = problems_of(context, plan=replace(SHARDED, tp={"0": given}, tp_dim="dp_shard"))
        assert f"TP pattern '0': {expected}" in message


def test_a_tie_that_a_plan_breaks_is_refused() -> None:
    """The other copy had no initial values: LFM2 under its own plan, which is of its output layer alone."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(2, 4), nn.Linear(4, 2, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.embedding(x))

    def own(model: nn.Module, mesh: Any) -> Any:
        style = ColwiseParallel(output_layouts=Replicate())
        return parallelize_module(model, mesh["tp"], {"head": style})

    def as_in(wrapped: bool) -> Any:
        return lambda model, mesh: nn.Sequential(own(model, mesh)) if wrapped else own(model, mesh)

    for context in on({"tp": 2}):
        for wrapped in (False, True):
            given = {"build_model": Tied, "make_batch": lambda: (batch()[1], batch()[1]), "plan": ParallelPlan()}
            (message,) = problems_of(context, **given, parallelize=as_in(wrapped))
            assert message.startswith("parameter embedding.weight is shared with head.weight in build_model")


def test_a_default_dtype_of_the_user_s_own_stays_out_of_values_and_what_is_shared(context: RankContext) -> None:
    """Rank 0 alone builds the model once more, so that ranks had other dtypes from then on."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert initial_value(0, "weight", (2,), 1).dtype == torch.float32
        assert _shared(None, (2,), context).dtype == torch.float32
    finally:
        torch.set_default_dtype(before)


def test_memory_that_fsdp_has_freed_is_no_index(context: RankContext) -> None:
    """`check` leaves out what an index says that other ranks would have sent, and left this out with it."""

    class Twice(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.detach().requires_grad_()
            output = super().forward(x)
            (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
            return output + slope[:, :2]

    (message,) = problems_of(
        context,
        build_model=lambda: Twice(nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 2))),
        plan=ParallelPlan(fsdp=FsdpPlan(wrap=("0",))),
    )
    assert "are out of bounds for storage of size 0" in message


def test_modules_in_a_plain_list_are_named_where_a_step_fails(context: RankContext) -> None:
    class Hiding(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 2)
            self.extra = [nn.Linear(4, 4)]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(self.extra[0](x))

    (message,) = problems_of(context, build_model=Hiding)
    assert message.endswith("; extra has modules in a plain list (use ModuleList or ModuleDict)")


def test_a_gradient_that_only_some_ranks_would_have_is_refused(context: RankContext) -> None:
    """An expert that no token of a rank chooses: FSDP2 then reduces tensors of other sizes on each rank."""

    class Choosing(nn.Module):
        def __init__(self, always: bool) -> None:
            super().__init__()
            self.experts, self.always = nn.ModuleList(nn.Linear(4, 2) for _ in range(3)), always

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            chosen = int(x[0, 0] > 0)
            return self.experts[chosen](x) + sum(0 * one(x) for one in self.experts[:2] if self.always)

    x = torch.tensor([1.0, 1, -1, -1])[:, None].expand(4, 4)
    given = {"make_batch": lambda: (x, batch()[1])}
    (message,) = problems_of(context, build_model=lambda: Choosing(False), **given)
    assert message.startswith("parameter experts.0.bias gets a gradient from part 1 of the batch but not from part 0")
    # The third one, which nobody uses, is nobody's.
    assert problems_of(context, build_model=lambda: Choosing(True), **given) == []


@pytest.mark.parametrize("given", [{"loss": torch.nn.CrossEntropyLoss}, {"plan": ParallelPlan(tp={"0": "colwise"})}])
def test_what_contradicts_itself_is_refused_where_it_is_said(given: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=r"Scenario\.loss is the class CrossEntropyLoss|both parallelize and plan.tp"):
        Scenario(**{**GIVEN, "parallelize": shards, **given})


@pytest.mark.parametrize("given", [{"gradient_divide_factor": 0.0}, {"tolerance": -1.0}])
def test_numbers_that_mean_nothing_are_refused_where_they_are_said(given: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=f"Scenario.{next(iter(given))} is"):
        replace(Scenario(**GIVEN), **given)


class Own:
    """Momentum as somebody writes it: no Optimizer, no `state`, and no zero_grad."""

    def __init__(self, parameters: Any) -> None:
        self.parameters = list(parameters)
        self.sums = [torch.zeros_like(one) for one in self.parameters]

    @torch.no_grad()
    def step(self) -> None:
        for parameter, total in zip(self.parameters, self.sums, strict=True):
            parameter -= 0.1 * total.add_(parameter.grad)


@pytest.mark.long
def test_an_optimizer_of_ones_own_needs_no_more_than_step(context: RankContext) -> None:
    given = {"optimizer": Own, "plan": SHARDED}
    assert problems_of(context, **given) == []
    step = TrainingStep(Scenario(**{**GIVEN, **given}), context)
    step(no_stamp)
    assert all(parameter.grad is None for parameter in step.model.parameters())
    counters = memory_counters(step, context)
    # A rank's half of two weights and biases of 4 x 4 + 4 and 4 x 2 + 2.
    assert counters["predicted_peak_bytes"] > 2 * 4 * 15
    sums = [one.to_local() for one in state_of(step.optimizer)[0]["sums"]]
    assert sum(one.numel() for one in sums) == 15
    assert _optimizer_share(Scenario(**{**GIVEN, **given}), step.model) == 1
    (message,) = problems_of(context, **{**given, "plan": replace(SHARDED, state_dict=True)})
    assert "state_dict=True cannot save" in message


def test_a_function_that_asks_for_values_in_a_simulation_is_named() -> None:
    """Not our exception's class: "it parallelize raises NeedsValues"."""

    def parallelize(model: nn.Module, mesh: Any) -> None:
        raise NeedsValues("needs a tensor's value")

    with pytest.raises(UserError) as caught, _one_sentence_errors(), blamed("parallelize", parallelize):
        parallelize(net(), None)
    assert str(caught.value).startswith("it cannot be simulated: parallelize needs a tensor's value (")


def test_check_names_a_call_that_ddp_does_not_see(context: RankContext) -> None:
    plan = ParallelPlan(ddp=DdpPlan(mesh_dims=("dp_shard",)))
    of_parts = {"loss": None, "call": lambda model, given: F.cross_entropy(model[1](model[0](given[0])), given[1])}
    (message,) = problems_of(context, **of_parts, plan=plan)
    assert message.startswith(f"call ({HERE}:") and "bypasses the model's forward" in message
    (message,) = problems_of(context, **of_parts)
    assert (
        "mixed torch.Tensor and DTensor" in message and "in which FSDP gathers parameters; call model(...)" in message
    )
    whole = {"loss": None, "call": lambda model, given: F.cross_entropy(model(given[0]), given[1])}
    assert problems_of(context, **whole, plan=plan) == []


@pytest.mark.long
def test_a_step_leaves_the_default_dtype_as_it_was_and_is_told_where_it_does_not(context: RankContext) -> None:
    def call(model: nn.Module, given: Any) -> torch.Tensor:
        torch.set_default_dtype(torch.float64)
        return F.cross_entropy(model(given[0]), given[1])

    (case_spec,) = step_cases(Scenario(**{**GIVEN, "loss": None, "call": call, "plan": SHARDED}), "own", context)
    with case_spec.open() as opened_case:
        opened_case.call(no_stamp)
        # Of fake ranks no gradient is right.
        wrong = opened_case.check()
        assert wrong and "changes torch's default dtype from float32 to float64" in wrong and "in place" not in wrong
        opened_case.call(no_stamp)
        opened_case.pause()
        assert torch.get_default_dtype() == torch.float32
        opened_case.call(no_stamp)
    assert torch.get_default_dtype() == torch.float32


def test_what_raises_where_one_device_is_alone_raises_on_every_rank(context: RankContext) -> None:
    """Which all find in what they gather: rank 0 has raised, and this one has not."""

    class Other(RankContext):
        def gather(self, value: Any) -> list[Any]:
            return [(RuntimeError, "rank 0 alone"), value] if value is None else [value]

    other = Other(1, CPU, context.mesh, "gloo", context.control, 1)
    scenario = Scenario(**{**GIVEN, "plan": SHARDED})
    check = StepCheck(TrainingStep(scenario, context), scenario, other)
    with pytest.raises(RuntimeError, match="rank 0 alone"):
        check._alone(lambda: 1)


def test_nothing_communicates_where_one_device_is_alone(context: RankContext) -> None:
    for issue in (dist.barrier, lambda: dist.all_reduce(torch.ones(1)), lambda: dist.send(torch.ones(1), 1)):
        with no_collectives(), pytest.raises(RuntimeError, match="no other rank computes this step"):
            issue()
