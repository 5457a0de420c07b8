"""Functions of the user's own that use DDP, or that raise on one rank: on a fake group, and launched."""

import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import ROOT
from processes import Ranks
from torch import nn

from benchmarks.dispatch_mode import differences, rows_by_both
from distbench.observe.module_attribution import Communication, communications_of
from distbench.observe.trace import StepTrace
from distbench.plans.training_step import TrainingStep
from distbench.ranks.context import RankContext
from distbench.spec import DdpPlan, FsdpPlan, ParallelPlan, Scenario, Settings
from distbench.torch_private import fake_ranks
from distbench.worker.plan_rehearsal import answer_on, rehearse


class WithUnused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x).mean()


def test_ddp_of_ones_own_is_tried_and_what_ddp_waits_for_is_named() -> None:
    """torch's replicate in a function of the user's own was refused, since a fake group's work has no result."""
    from torch.distributed._composable.replicate import replicate

    def own(model: nn.Module, mesh: Any) -> None:
        replicate(model.used, device_mesh=mesh["dp_replicate"])

    given = {"build_model": WithUnused, "make_batch": lambda: {"x": torch.ones(4, 4)}}
    message = ParallelPlan(ddp=DdpPlan(find_unused_parameters=True))
    with fake_ranks({"dp_replicate": 4}) as mesh:
        assert dist.group.WORLD is not None
        context = RankContext(0, torch.device("cpu"), mesh, "gloo", dist.group.WORLD, 1)
        assert rehearse(Scenario(**given, parallelize=own), context).problems == ()
        step = TrainingStep(Scenario(**given, parallelize=own), context)
        step(lambda: None)
        step(lambda: None)
        rows = communications_of(step, step.phases, step.plan, context, step.model)
        assert [row.kind for row in rows] == ["all_reduce"] and step.num_setup_steps == 2
        (problem,) = rehearse(Scenario(**given, plan=ParallelPlan(ddp=DdpPlan())), context).problems
        assert problem.startswith("parameter unused.weight and 1 more gets no gradient, but DDP waits for its gradient")
        assert rehearse(Scenario(**given, plan=message), context).problems == ()
        step = TrainingStep(Scenario(**given, plan=message), context)
        for _ in range(step.num_setup_steps):
            step(lambda: None)
        owners = [row.owner for row in communications_of(step, step.phases, message, context, step.model)]
        assert owners == ["DDP bucket 0", "DDP used parameters"]


def seen(scenario: Scenario, sizes: dict[str, int]) -> list[Communication]:
    """What both ways of looking see of a step that `check` passes, each with an owner."""
    with fake_ranks(sizes) as mesh:
        assert dist.group.WORLD is not None
        context = RankContext(0, torch.device("cpu"), mesh, "gloo", dist.group.WORLD, 1)
        assert rehearse(scenario, context).problems == ()
        rows, dispatched = rows_by_both(StepTrace(TrainingStep(scenario, context), context))
        assert differences(rows, dispatched) == [] and all(row.owner_known for row in rows)
        return rows


@pytest.mark.long
def test_experts_and_stages_of_the_docs_are_seen_by_both_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer exchanges counts, tokens there and back, and in backward tokens twice; the first one's input has no
    gradient. Rank 0 of a pipeline passes on 8 micro-batches and is given their gradients."""
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "examples"))
    import own_experts
    import own_pipeline

    for scenario, sizes in (
        (own_experts.experts_left_alone(), {"ep": 4}),
        (own_experts.own_experts(), {"dp_shard": 2, "ep": 2}),
    ):
        rows = seen(scenario, sizes)
        exchanges = Counter(row.phase for row in rows if row.kind == "all_to_all")
        assert exchanges == {"forward": 6, "backward": 3}
        assert {row.mesh_dim for row in rows if row.kind == "all_to_all"} == {"ep"}
        assert {row.owner for row in rows if row.kind == "all_to_all"} == {"layers.0.experts", "layers.1.experts"}
    messages = Counter((row.kind, row.source) for row in seen(own_pipeline.own_pipeline(), {"pp": 4}))
    assert messages == {("send", "pp"): 8, ("recv", "pp"): 8}


def test_check_calls_a_function_as_other_ranks_would() -> None:
    def own(model: nn.Module, mesh: Any) -> None:
        if dist.get_rank() == 2:
            raise ValueError("only here")

    given = {"build_model": WithUnused, "make_batch": lambda: {"x": torch.ones(4, 4)}}
    job: Any = SimpleNamespace(device="cpu", settings=Settings())
    (message,) = answer_on({"dp_shard": 4}, Scenario(**given, parallelize=own), job)["problems"]
    assert message.startswith(f"on rank 2: parallelize raises ValueError: only here ({__file__}:")


def backward_of(model: nn.Module, batch: Any) -> torch.Tensor:
    loss = model(batch).sum()
    loss.backward()
    return loss


def step(model: nn.Module, batch: Any, optimizer: Any) -> torch.Tensor:
    loss = backward_of(model, batch)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def raising(model: nn.Module, batch: Any, optimizer: Any) -> torch.Tensor:
    if dist.get_rank() == 1:
        raise ValueError("only here")
    return step(model, batch, optimizer)


def without_backward(model: nn.Module, batch: Any, optimizer: Any) -> torch.Tensor:
    return step(model, batch, optimizer) if dist.get_rank() != 1 else model(batch).sum()


def without_optimizer(model: nn.Module, batch: Any, optimizer: Any) -> torch.Tensor:
    return step(model, batch, optimizer) if dist.get_rank() != 3 else backward_of(model, batch)


def with_a_barrier(model: nn.Module, batch: Any, optimizer: Any) -> torch.Tensor:
    loss = step(model, batch, optimizer)
    if dist.get_rank() == 1:
        dist.barrier()
    return loss


def with_step(own: Any) -> Scenario:
    return Scenario(
        build_model=lambda: nn.Linear(4, 2),
        make_batch=lambda: torch.ones(4, 4),
        step=own,
        make_optimizers=lambda model: torch.optim.SGD(model.parameters()),
        plan=ParallelPlan(fsdp=FsdpPlan()),
    )


@pytest.mark.parametrize(
    ("own", "sentence"),
    [
        (raising, r"on rank 1: .* cannot run: ValueError: only here \(.*test_own_functions.py:\d+\)"),
        (without_backward, r"on rank 1: step \(.*test_own_functions.py:\d+\) runs no backward; call loss"),
        (
            without_optimizer,
            "runs forward, backward on rank 3 and forward, backward, optimizer on rank 0; run the same",
        ),
        (with_a_barrier, "runs forward, backward, optimizer, other on rank 1 and forward, backward, optimizer on rank"),
    ],
)
@pytest.mark.long
def test_check_runs_a_step_as_other_ranks_would(own: Any, sentence: str) -> None:
    job: Any = SimpleNamespace(device="cpu", settings=Settings())
    (problem,) = answer_on({"dp_shard": 4}, with_step(own), job)["problems"]
    assert re.search(sentence, problem), problem


@pytest.mark.long
def test_check_shows_as_which_ranks_a_step_ran() -> None:
    job: Any = SimpleNamespace(device="cpu", settings=Settings())
    assert answer_on({"dp_shard": 4}, with_step(step), job)["step"] == "its own step runs as ranks 0, 1 and 3 of 4"


@pytest.mark.long
def test_a_parallelize_function_that_raises_on_one_rank_only_is_said(ranks: Ranks, tmp_path: Path) -> None:
    """The others wait in a collective by then; none is left behind, and the sentence has file and line."""
    file = tmp_path / "mine.py"
    file.write_text(ONE_RANK_RAISES)
    done = ranks.run_here("run", str(file), "--quick", "--results", str(tmp_path / "out"))
    assert done.exit_code == 2, done.output
    message = f"on rank 1 of 2 only: parallelize raises ValueError: only here ({file}:10); fix it"
    assert message in " ".join(done.output.split())


ONE_RANK_RAISES = """import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
import torch
from distbench.spec import Scenario, scenario


def parallelize(model, mesh):
    if dist.get_rank() == 1:
        raise ValueError("only here")
    fully_shard(model, mesh=mesh)


@scenario(mesh={"dp_shard": 2})
def mine() -> Scenario:
    def loss(model, batch):
        return model(batch).mean()
    return Scenario(
        build_model=lambda: nn.Linear(4, 4), make_batch=lambda: torch.ones(4, 4), call=loss, parallelize=parallelize
    )
"""
