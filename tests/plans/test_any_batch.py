"""Batches as people have them, containers of any class among them; and what of a batch or loss makes a step `wrong`."""

import dataclasses
from collections import OrderedDict, UserList, deque, namedtuple
from collections.abc import Iterator, MutableMapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from any_model import GIVEN, SHARDED, batch, on, problems_of, problems_or_error, shards

from distbench.cases.step_correctness import (
    StepCheck,
    held_gradients,
    of_another_run,
    of_batches,
    of_loss,
    of_part_factors,
    of_replicas,
    of_scales,
    part_factors,
)
from distbench.cases.trained_tensors import fingerprint
from distbench.plans.batch import Batch, batch_of, loss_of
from distbench.plans.training_step import TrainingStep
from distbench.ranks.context import RankContext
from distbench.ranks.measure import no_stamp
from distbench.spec import Scenario, UserError

HERE = __file__
CPU = torch.device("cpu")


@pytest.fixture
def context() -> Iterator[RankContext]:
    yield from on({"dp_shard": 2})


class Stored(MutableMapping[str, Any]):
    """A copy shares the dict that has its items."""

    def __init__(self, items: dict[str, Any]) -> None:
        self._items = dict(items)

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._items[key] = value

    def __delitem__(self, key: str) -> None:
        del self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


class Output(OrderedDict[str, Any]):
    """As transformers' outputs."""

    def update(self, *_: Any, **__: Any) -> None:
        raise RuntimeError("no update")


class OfPair(namedtuple("OfPair", "x y")):
    def __new__(cls, pair: Any) -> "OfPair":
        return super().__new__(cls, *pair)


class Holder:
    def __init__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.x, self.y, self.note = x, y, "kept"


@dataclasses.dataclass(frozen=True)
class Scaled:
    """Would scale twice if it were made anew, and asks for what it does not keep."""

    given: dataclasses.InitVar[torch.Tensor]
    x: torch.Tensor = dataclasses.field(init=False)
    count: int = 3

    def __post_init__(self, given: torch.Tensor) -> None:
        object.__setattr__(self, "x", given / 2)


def test_a_batch_of_somebodys_own_class_is_copied_and_not_made_anew() -> None:
    x, y = torch.arange(8.0), torch.ones(8)
    for given in (Stored({"x": x, "y": y}), Output(x=x, y=y)):
        part = Batch(given).part(1, 2, CPU)
        assert type(part) is type(given) and part["x"].tolist() == [4, 5, 6, 7] and len(given["x"]) == 8
    pair = Batch(OfPair((x, y))).part(1, 2, CPU)
    assert type(pair) is OfPair and pair.x.tolist() == [4, 5, 6, 7]
    scaled = Batch(Scaled(x)).part(1, 2, CPU)
    assert scaled.x.tolist() == [2, 2.5, 3, 3.5] and scaled.count == 3
    size = torch.Size([2, 3])
    assert Batch({"x": x, "size": size, "n": np.int64(3)}).part(0, 2, CPU)["size"] is size
    assert batch_of(Scenario(make_batch=lambda: {"x": x, "n": np.int64(3)})).length == 8


def test_objects_that_hold_tensors_are_split_like_any_other_container() -> None:
    x, y = torch.arange(8.0), torch.ones(8)
    for given in (SimpleNamespace(x=x, y=y, note="kept"), Holder(x, y)):
        part = Batch({"of": given, "y": y}).part(1, 2, CPU)
        assert type(part["of"]) is type(given) and part["of"].x.tolist() == [4, 5, 6, 7] and len(given.x) == 8
        assert part["of"].note == "kept"
    for filled in (deque([x, y], maxlen=2), UserList([x, y])):
        part = Batch(filled).part(0, 2, CPU)
        assert type(part) is type(filled) and [len(one) for one in part] == [4, 4] and len(filled[0]) == 8
    assert Batch({"x[0]": x}, dims={"x[0]": 0}).split_dims == {"x[0]": 0}
    whole = Batch({"x": x, "adjacency": torch.eye(8).to_sparse()}, dims={"x": 0}).part(0, 2, CPU)
    assert whole["adjacency"].is_sparse and fingerprint(whole) != fingerprint({})


def test_what_no_rank_can_have_a_part_of_is_named(context: RankContext) -> None:
    jagged = torch.nested.nested_tensor([torch.ones(n, 4) for n in (1, 2)], layout=torch.jagged)
    for given, expected in (
        ({"x": jagged}, "returns x as a jagged tensor, which cannot be split over ranks"),
        ({"x": torch.eye(4).to_sparse()}, "returns x as a sparse_coo tensor"),
        ({"x": torch.ones(4, 4, device="meta")}, "returns x on the meta device; return values"),
    ):
        message = problems_or_error(
            context, make_batch=lambda given=given: given, loss=None, call=lambda m, b: m(b["x"])
        )
        assert f"make_batch ({HERE}:" in message and expected in message
    samples = [{"x": torch.ones(4), "y": torch.tensor(1)} for _ in range(4)]
    message = problems_or_error(
        context, make_batch=lambda: samples, loss=None, call=lambda m, b: m(torch.stack([one["x"] for one in b])).sum()
    )
    assert message.endswith("a list of samples is split within each sample, so stack the samples, batch first")


def test_a_batch_that_was_computed_outlives_a_step(context: RankContext) -> None:
    """Its history is not a step's: the second step would run backward through it again."""
    weight = torch.ones(4, requires_grad=True)
    scenario = Scenario(**{**GIVEN, "plan": SHARDED, "make_batch": lambda: (batch()[0] * weight * weight, batch()[1])})
    step = TrainingStep(scenario, context)
    step(no_stamp)
    step(no_stamp)
    assert weight.grad is None


def test_a_loss_that_nothing_learns_from_and_an_output_without_one_are_named(context: RankContext) -> None:
    (message,) = problems_of(context, loss=lambda output, labels: F.cross_entropy(output, labels).detach())
    assert f"the loss ({HERE}:" in message and "does not depend on a trainable parameter (it was detached" in message
    (message,) = problems_of(context, build_model=lambda: torch.nn.Linear(4, 2).requires_grad_(False))
    assert "no parameter has requires_grad); use Scenario(inference=True)" in message
    Named = namedtuple("Named", "logits loss")
    taken = loss_of(Scenario(), lambda x: Named(torch.ones(2, 2), torch.tensor(3.0)), {"x": 1})
    assert float(taken) == 3
    with pytest.raises(UserError, match="returns a dict whose keys are losses; give loss="):
        loss_of(Scenario(), lambda x: {"losses": 1}, {"x": 1})


def test_what_ranks_do_not_divide_is_said_with_file_line_and_the_tensor(context: RankContext) -> None:
    (message,) = problems_of(context, make_batch=lambda: (torch.ones(3, 4), torch.ones(3).long()))
    assert message.startswith(f"a batch of 3 ({HERE}:") and "over mesh dim 'dp_shard' of size 2" in message
    named = {"at": torch.ones(1, 4), "x": torch.ones(4, 4)}
    (message,) = problems_of(context, make_batch=lambda: named, loss=None, call=lambda model, b: model(b["x"]).sum())
    assert message.endswith(
        "of the batch at is split over data parallel ranks and x is not (change this with batch_dims)"
    )
    uneven = {"x": torch.ones(4, 4), "table": torch.ones(3, 4)}
    (message,) = problems_of(
        context, make_batch=lambda: uneven, batch_dims=0, loss=None, call=lambda model, b: model(b["x"]).sum()
    )
    assert message.startswith(f"a batch of 3 (table, {HERE}:")


@pytest.mark.parametrize(("given", "tokens"), [(np.int64(8), 8), (torch.tensor(8), 8), ("many", None), (0, None)])
def test_tokens_are_counted_by_any_whole_number_and_check_says_what_is_none(
    context: RankContext, given: Any, tokens: int | None
) -> None:
    message = problems_or_error(context, num_tokens=lambda _: given)
    assert (message == "") == (tokens is not None) and ("give the number of tokens of a global batch" in message) == (
        tokens is None
    )


def test_likely_causes_are_named(context: RankContext) -> None:
    def masked() -> Any:
        x, y = batch()
        return x, y.masked_fill(torch.arange(4) < 1, -100)

    own = partial(shards, factor=3.0)
    scenario = Scenario(**{**GIVEN, "make_batch": masked}, parallelize=lambda model, mesh: own(model, mesh))
    wrong = StepCheck(TrainingStep(scenario, context), scenario, context)()
    assert wrong is not None
    assert "the 2 parts of 1 have unequal numbers of -100" in wrong
    assert "divides gradients by 3, but 2 ranks have data; set gradient_divide_factor=3" in wrong


def test_a_sum_over_the_batch_is_told_from_a_wrong_loss() -> None:
    (message,) = of_loss(2.5, 10.0, 4)
    assert message == "the loss is a sum over a batch of 4 parts; return a mean"
    assert not [*of_loss(2.6, 10.0, 4), *of_loss(10.0, 10.0, 1), *of_loss(None, 10.0, 4), *of_loss(0.0, 0.0, 4)]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"make_batch": lambda: (torch.randn(4, 4), batch()[1])}, "make_batch makes a different tensor 0 in each call"),
        (
            {"loss": None, "call": lambda model, b: F.cross_entropy(model(b[0].mul_(2)), b[1])},
            "a step changes tensor 0 of its",
        ),
        ({"loss": lambda output, labels: output.sum() * float("nan")}, "one device's loss is nan"),
    ],
)
def test_what_a_batch_or_loss_is_to_blame_for_is_named(
    context: RankContext, given: dict[str, Any], message: str
) -> None:
    scenario = Scenario(**{**GIVEN, "plan": SHARDED, **given})
    step = TrainingStep(scenario, context)
    step(no_stamp)
    assert f"the likely cause: {message}" in str(StepCheck(step, scenario, context)())


def test_gradients_that_nobody_sums_and_models_that_remember_are_told(context: RankContext) -> None:
    """Shards of one parameter may differ, copies of one part may not."""
    step = TrainingStep(Scenario(**{**GIVEN, "plan": SHARDED}), context)
    step.forward_backward()
    held = held_gradients(step.model)
    assert {part for part, _ in held.values()} == {(0,)} and len(held) == 4
    (message,) = of_replicas([{"a": ((0,), 1.0), "b": ((), 2.0)}, {"a": ((1,), 5.0), "b": ((), 2.1)}])
    assert message.startswith("ranks 0 and 1 hold the same part of b with different gradients, which are not summed")
    assert not [*of_replicas([held, held]), *of_replicas([{"a": ((0,), 1.0)}, {"a": ((1,), 5.0)}, {}])]
    parts = [torch.tensor([[1.0, 2.0, 0.0], [0.0, 1.0, 3.0]]), torch.tensor([[2.0, 0.0, 1.0], [1.0, 1.0, 0.0]])]
    factors = part_factors((1 * parts[0] + 3 * parts[1]) / 2, parts)  # a loss scaled by 1 on rank 0 and 3 on rank 1
    (message,) = of_part_factors(factors, "step (train.py:3)")
    assert message.startswith("step (train.py:3) multiplies the gradients of the 2 parts of the batch by 1, 3, such")
    assert not [*of_part_factors(part_factors((parts[0] + parts[1]) / 2, parts), "step")]
    assert part_factors(parts[0] + torch.eye(2, 3), parts) == []  # no mean of the parts' gradients
    (message,) = of_scales([{"scaler": 1.0}, {"scaler": 1.0}, {"scaler": 2.0}])
    assert message.startswith("scaler 'scaler' has the scale 1.0 on rank 0 and 2.0 on rank 2")
    assert not [*of_scales([{"scaler": 1.0}, {"scaler": 1.0}]), *of_scales([{}, {}])]
    (message,) = of_another_run(1.0, 2.0)
    assert "neither parameter nor buffer" in message
    assert not [*of_another_run(1.0, 1.0), *of_another_run(None, 1.0)]


def test_a_guess_of_what_is_split_is_told_where_nothing_else_is_to_blame(context: RankContext) -> None:
    given = {"mask": torch.tril(torch.ones(2, 2)), "x": batch()[0]}
    scenario = Scenario(
        **{**GIVEN, "plan": SHARDED, "loss": None, "make_batch": lambda: given},
        call=lambda model, b: model(b["x"]).square().mean() * b["mask"].sum(),
    )
    message = StepCheck(TrainingStep(scenario, context), scenario, context)()
    assert message is not None and message.endswith(
        "mask is split over data parallel ranks and x is not (change this with batch_dims)"
    )


def test_ranks_whose_batches_differ_are_told() -> None:
    x, y = torch.ones(2), torch.zeros(2)
    prints = [fingerprint({"x": one}) for one in (x, x, y)]
    (message,) = of_batches({"x": x}, {"x": x}, {"x": x}, prints)
    assert message.startswith("make_batch makes a different batch on rank 2 than on rank 0")
    assert not [*of_batches({"x": x}, {"x": x}, {"x": x}, prints[:2])]
