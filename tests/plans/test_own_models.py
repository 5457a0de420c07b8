"""Anyone's model: batches of any form, parallelize functions of one's own, styles by name; on a fake group."""

import dataclasses
import sys
from collections import UserDict
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from conftest import ROOT
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.dispatch_mode import differences, rows_by_both
from distbench.cases.step import step_cases
from distbench.observe.module_attribution import OPTIMIZER, communications_of
from distbench.observe.trace import StepTrace
from distbench.plans.batch import Batch, loss_of
from distbench.plans.model import blueprint, load_initial_values, mapped, tensors_of
from distbench.plans.module_patterns import own_units
from distbench.plans.plan_check import problems
from distbench.plans.training_step import TrainingStep
from distbench.ranks.context import RankContext
from distbench.spec import FsdpPlan, ParallelPlan, Scenario, UserError
from distbench.torch_private import fake_ranks
from distbench.worker.plan_rehearsal import rehearse

HERE = __file__
CPU = torch.device("cpu")


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


@dataclasses.dataclass
class Item:
    x: torch.Tensor
    weight: float


@pytest.fixture(scope="module")
def context() -> Iterator[RankContext]:
    with fake_ranks({"dp_shard": 2, "tp": 2}) as mesh:
        assert dist.group.WORLD is not None
        yield RankContext(0, CPU, mesh, "gloo", dist.group.WORLD, 1)


@pytest.fixture(scope="module")
def examples() -> Any:
    sys.path.insert(0, str(ROOT / "docs" / "examples"))
    import own_parallelize

    return own_parallelize


# Batches


def test_a_batch_of_any_form_is_split_where_it_is_as_long_as_its_first_tensor() -> None:
    mask, one = torch.ones(3, 3), torch.tensor(2.0)
    tree = {"a": [torch.arange(8), Pair(torch.ones(8, 2), mask)], "b": Item(torch.zeros(8), 0.5), "c": one, "d": None}
    batch = Batch(tree)
    assert batch.length == 8 and set(batch.split_dims) == {"a.0", "a.1.x", "b.x"}
    part = batch.part(1, 4, CPU)
    assert part["a"][0].tolist() == [2, 3] and part["a"][1].x.shape == (2, 2) and type(part["a"][1]) is Pair
    assert part["b"] == Item(part["b"].x, 0.5) and len(part["b"].x) == 2
    assert torch.equal(part["a"][1].y, mask) and part["c"] == 2 and part["d"] is None
    assert len(tree["a"][0]) == 8, "the batch itself is as it was"


def test_what_is_said_of_tensor_dims_holds() -> None:
    tree = {"ids": torch.ones(6, 4), "bias": torch.ones(6, 6)}
    assert Batch(tree, {"ids": 1}).length == 4 and Batch(tree, {"ids": 1}).part(0, 2, CPU)["ids"].shape == (6, 2)
    assert Batch(tree, {"*": 0, "bias": None}).split_dims["ids"] == 0
    assert Batch(tree, {"ids": 0, "bias": None}).part(0, 2, CPU)["bias"].shape == (6, 6)
    for dims, message in (
        ({"idz": 0}, "batch has ids, bias"),
        ({"ids": 2}, "its shape is"),
        ({"ids": None}, "splits no"),
    ):
        with pytest.raises(UserError, match=message):
            _ = Batch(tree, dims).split_dims
    with pytest.raises(UserError, match="a dict without a tensor that can be split"):
        _ = Batch({"a": 1, "b": torch.tensor(1)}).length


def test_the_model_is_called_as_the_batch_is_made(examples: Any) -> None:
    model, (x, keep, labels) = examples.Classifier(), examples.examples()
    named = dict(zip(("x", "keep", "labels"), (x, keep, labels), strict=True))
    wanted = model(**named)["loss"]
    declared = (
        (Scenario(), named),
        (Scenario(), (x, keep, labels)),
        (Scenario(call=lambda model, batch: model(*batch)["loss"]), (x, keep, labels)),
        (Scenario(loss=lambda out, y: nn.functional.cross_entropy(out["logits"], y)), ({"x": x, "keep": keep}, labels)),
        (Scenario(loss=lambda out, batch: nn.functional.cross_entropy(out["logits"], batch["labels"])), named),
    )
    for scenario, batch in declared:
        assert torch.equal(loss_of(scenario, model, batch), wanted)
    for scenario, message in (
        (Scenario(), "returns a dict whose loss is None; give"),
        (Scenario(call=lambda model, batch: batch[0]), f"call .{HERE}:.* returns a tensor of shape .16, 64."),
    ):
        with pytest.raises(UserError, match=message):
            loss_of(scenario, model, (x, keep))


class Named(UserDict[str, torch.Tensor]):
    """Has something beside its items."""

    note = "none"


def test_a_dict_of_somebodys_class_stays_one() -> None:
    batch = Named(x=torch.ones(4))
    batch.note = "kept"
    part = Batch(batch).part(0, 2, CPU)
    assert type(part) is Named and part.note == "kept" and len(part["x"]) == 2 and len(batch["x"]) == 4


# Initial values


class Wrapped(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner


def test_a_wrapper_changes_no_initial_value(context: RankContext, examples: Any) -> None:
    values = []
    for build in (examples.Classifier, lambda: Wrapped(examples.Classifier())):
        model = build()
        load_initial_values(model, context, blueprint(build, 1))
        values.append([parameter.detach().clone() for parameter in model.parameters()])
    assert all(map(torch.equal, *values))
    assert len({float(value.flatten()[0]) for value in values[0]}) == len(values[0]), "each parameter has its own"
    built, model = blueprint(examples.Classifier, 1), Wrapped(examples.Classifier())
    load_initial_values(model, context, built)
    assert all(map(torch.equal, values[0], model.parameters()))
    del model.inner.head
    with pytest.raises(UserError, match="12 parameters, but build_model's model has 14"):
        load_initial_values(model, context, built)


# Plans


def step_of(context: RankContext, scenario: Scenario) -> TrainingStep:
    return TrainingStep(scenario, context)


def test_styles_by_name_are_torchs_and_what_is_unknown_is_named(context: RankContext, examples: Any) -> None:
    model = step_of(context, examples.dict_batch()).model
    up = model.blocks[0].up.weight
    assert [str(one) for one in up.placements][-1] == "S(0)" and up.to_local().shape == (64, 64)
    batch = examples.as_dict()

    def told(**plan: Any) -> str:
        built = blueprint(examples.Classifier, 1).model
        return " ".join(problems(built, batch, ParallelPlan(**{"fsdp": FsdpPlan(), **plan}), context))

    assert "unknown style 'colwize' for this model (nearest: colwise" in told(tp={"blocks.*.up": "colwize"})
    assert "Classifier lacks; give tp={'pattern': style}" in told(tp="auto")
    assert "_no_split_modules, but Classifier lists no class" in told(tp=examples.TP, fsdp=FsdpPlan(wrap="auto"))
    assert "TP pattern 'block.*.up' matches no module" in told(tp={"block.*.up": "colwise"})


def test_units_of_a_models_own_leave_out_what_shares_a_weight_with_others() -> None:
    """BERT names its embeddings, whose weight the output layer has too: FSDP2 has one unit a parameter, the root."""

    class Named(nn.Sequential):
        _no_split_modules = ("Linear", "Embedding")

    model = Named(nn.Embedding(8, 8), nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8, bias=False)))
    assert own_units(model) == {"0", "1", "2.0"}
    model[2][0].weight = model[0].weight
    assert own_units(model) == {"1"}


def test_attention_is_split_by_whole_heads(context: RankContext) -> None:
    """Three heads of keys on two ranks were refused for a view's shape, which named neither."""
    model = nn.ModuleDict({"k_proj": nn.Linear(8, 12)})
    model.config = SimpleNamespace(num_key_value_heads=3)  # type: ignore[assignment]
    (message,) = problems(model, torch.ones(4, 8), ParallelPlan(tp={"k_proj": "colwise"}, fsdp=FsdpPlan()), context)
    assert "num_key_value_heads=3 of SimpleNamespace cannot be split over mesh dim 'tp' of size 2: 3 is not" in message


@pytest.mark.long
def test_a_function_that_makes_its_own_mesh_is_seen_by_both_methods(context: RankContext, examples: Any) -> None:
    """Its meshes equal each other, so DTensor serves layouts that name the groups of the first one."""
    scenario = examples.own_parallelize()
    trace = StepTrace(step_of(context, scenario), context)
    rows, dispatched = rows_by_both(trace)
    assert len(rows) == len(dispatched) > 10 and differences(rows, dispatched) == []
    assert {row.mesh_dim for row in rows} == {"dp_shard", "tp"} and all(row.owner_known for row in rows)


class Doubled(torch.optim.SGD):
    """An optimizer that communicates."""

    def step(self, closure: Any = None) -> None:
        dist.all_reduce(torch.ones(1))


def test_collectives_of_hooks_and_of_the_optimizer_have_owners(context: RankContext, examples: Any) -> None:
    def hooked(model: nn.Module, mesh: Any) -> None:
        for parameter in model.blocks[1].norm.parameters():
            parameter.register_post_accumulate_grad_hook(lambda parameter: dist.all_reduce(parameter.grad))

    scenario = replace(
        examples.dict_batch(),
        plan=ParallelPlan(tp=examples.TP),
        after_materialize=hooked,
        optimizer=partial(Doubled, lr=0.1),
    )
    step = step_of(context, scenario)
    rows = communications_of(step, step.phases, step.plan, context, step.model)
    owners = [row.owner for row in rows if row.kind == "all_reduce" and row.mesh_dim == "dp_shardxtp"]
    assert owners == ["blocks.1.norm", "blocks.1.norm", OPTIMIZER] and all(row.owner_known for row in rows)


def test_what_a_function_sets_after_materialising_is_the_reference_s_too(context: RankContext, examples: Any) -> None:
    def ones(model: nn.Module, mesh: Any) -> None:
        nn.init.ones_(model.head.weight)

    step = step_of(context, replace(examples.dict_batch(), plan=ParallelPlan(tp=examples.TP), after_materialize=ones))
    with torch.no_grad():
        step.model.head.weight.zero_()
    step.restart()
    assert bool((step.model.head.weight == 1).all())


def raises(model: nn.Module, mesh: Any) -> None:
    raise RuntimeError("no such layer")


def forgets(model: nn.Module, mesh: Any) -> int:
    return 3


def hooks_at_once(model: nn.Module, mesh: Any) -> None:
    model.head.weight.register_hook(lambda gradient: gradient)


def makes_it_larger(model: nn.Module, mesh: Any) -> None:
    model.head = nn.Linear(64, 9, device="meta")


def drops_a_layer(model: nn.Module, mesh: Any) -> None:
    del model.blocks[1]


def asks_for_values(model: nn.Module, mesh: Any) -> None:
    float(next(model.parameters())[0])


class Lazy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.LazyLinear(2)


def leaves_on_meta(model: nn.Module, mesh: Any) -> None:
    model.head.weight = nn.Parameter(torch.empty(8, 64, device="meta"))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"parallelize": raises}, f"parallelize raises RuntimeError: no such layer ({HERE}:"),
        ({"parallelize": forgets}, f"parallelize ({HERE}:"),
        ({"after_materialize": leaves_on_meta}, "parameter head.weight of the parallel model is still on the meta"),
        (
            {"parallelize": hooks_at_once},
            "sets a hook on parameter head.weight, which is lost when the model gets",
        ),
        (
            {"parallelize": makes_it_larger},
            "parameter head.weight has shape [9, 64] in the parallel model (",
        ),
        ({"parallelize": drops_a_layer}, "8 parameters, but build_model's model has 14 (lacks 'blocks.1.norm.weight'"),
        ({"parallelize": asks_for_values}, f"on meta tensors ({HERE}:"),
        ({"build_model": Lazy}, "makes parameter 'linear.weight' without a shape, as lazy modules do"),
        ({"make_batch": lambda: {"x": np.ones(4), "y": torch.ones(4)}}, "returns x as a numpy array; return tensors"),
        ({"make_batch": lambda: {"x": torch.ones(0, 3)}}, "returns an empty batch; return at least one sample per"),
        ({"call": lambda model, batch: model.heat}, f"object has no attribute 'heat' ({HERE}:"),
        ({"optimizer": lambda parameters: 3}, "returns an int, which has no step()"),
        ({"make_batch": lambda: {"x": 3}}, " returns a dict without a tensor that can be split over ranks"),
        ({"make_batch": lambda: raises(nn.Identity(), 0)}, f"make_batch raises RuntimeError: no such layer ({HERE}:"),
        ({"build_model": lambda: 3}, f"build_model ({HERE}:"),
        ({"num_tokens": lambda batch: batch["ids"]}, f"num_tokens raises KeyError: 'ids' ({HERE}:"),
        ({"num_tokens": 0}, "num_tokens is 0; give the number of tokens of a global batch"),
        ({"batch_dims": {"x": 1}, "make_batch": lambda: {"x": torch.ones(4, 3)}}, f"a batch of 3 ({HERE}:"),
    ],
)
def test_bad_input_is_one_sentence_with_file_and_line(
    context: RankContext, examples: Any, given: dict[str, Any], message: str
) -> None:
    scenario = replace(examples.own_parallelize(), **given)
    with pytest.raises(UserError) as caught:
        list(step_cases(scenario, "mine", context))
        if result := rehearse(scenario, context).problems:
            raise UserError(result[0])
    assert message in str(caught.value) and "\n  - " not in str(caught.value).removeprefix(
        "the plan cannot work:\n  - "
    )


def test_a_mesh_dim_that_says_nothing_of_data_is_refused(context: RankContext, examples: Any) -> None:
    other = replace(context, mesh=init_device_mesh("cpu", (4,), mesh_dim_names=("data",)))
    built = blueprint(examples.Classifier, 1).model
    (text,) = problems(built, examples.as_dict(), examples.own_parallelize().step_plan, other)
    assert "the name of mesh dim 'data' does not define whether its ranks have different data" in text


def test_every_tensor_has_a_name_and_what_holds_none_stays() -> None:
    batch = {"a": (torch.ones(1), "text")}
    assert [name for name, _ in tensors_of(batch)] == ["a.0"]
    keep: Callable[[str, torch.Tensor], torch.Tensor] = lambda name, tensor: tensor  # noqa: E731
    assert mapped(batch, keep)["a"][1] == "text"
