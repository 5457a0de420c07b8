"""Pipelines: stages, schedules, bubbles, paths; plain data, one rank on a fake group, and four gloo ranks."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import torch
from conftest import ROOT
from processes import Ranks
from torch import nn

from distbench.observe.module_attribution import communications_of
from distbench.plans.batch import Batch
from distbench.plans.module_patterns import matching_modules
from distbench.plans.pipeline import activations_of, check_split, stage_of
from distbench.plans.plan_check import problems
from distbench.plans.training_step import TrainingStep
from distbench.ranks.context import RankContext
from distbench.ranks.measure import no_stamp
from distbench.report.trace_rows import Trace, bubble_shares, bubbles_text, doubts, rows_of
from distbench.spec import CpPlan, DdpPlan, FsdpPlan, ParallelPlan, PipelinePlan, Scenario, UserError
from distbench.spec.plan import SCHEDULES, layers_of_stages
from distbench.torch_private import V_SCHEDULES, fake_ranks, needs_newer
from distbench.worker.plan_rehearsal import answer_on


class Layers(nn.Module):
    def __init__(self, num_layers: int = 6, tied: bool = False) -> None:
        super().__init__()
        self.before = nn.Linear(8, 8, bias=False)
        self.dropped = nn.Dropout(0.0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(num_layers))
        self.after = nn.Linear(8, 8, bias=False)
        self.register_buffer("table", torch.ones(8))
        if tied:
            self.after.weight = self.before.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.dropped(self.before(x)) * self.table
        for layer in self.layers:
            x = layer(x).relu()
        return self.after(x)


class Residual(Layers):
    """Without arithmetic between what a stage may lack, so that stages one after another are the whole."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.dropped(self.before(x))
        for layer in self.layers:
            x = layer(x)
        return self.after(x)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(8, 8), torch.ones(8, 8)


def context_of(mesh: Any, rank: int = 0) -> RankContext:
    group = torch.distributed.group.WORLD
    assert group is not None
    return RankContext(rank, torch.device("cpu"), mesh, "gloo", group, 1)


def step_time(num_ranks: int, microbatches: int, forward: float, backward: float) -> float:
    """GPipe by hand: a micro-batch begins on a rank when it is through with the one before, and the rank before (in
    backward: after) it with this one."""
    ends: dict[tuple[int, int], float] = {}
    for part in range(microbatches):
        for rank in range(num_ranks):
            ends[rank, part] = max(ends.get((rank - 1, part), 0), ends.get((rank, part - 1), 0)) + forward
    back: dict[tuple[int, int], float] = {}
    for part in range(microbatches):
        for rank in reversed(range(num_ranks)):
            own = back.get((rank, part - 1), ends[rank, microbatches - 1])
            back[rank, part] = max(back.get((rank + 1, part), 0), own) + backward
    return max(back.values())


@pytest.mark.parametrize(("num_ranks", "microbatches"), [(1, 4), (2, 2), (4, 8), (8, 3)])
def test_the_least_bubble_is_what_a_schedule_by_hand_leaves(num_ranks: int, microbatches: int) -> None:
    whole = step_time(num_ranks, microbatches, 1.0, 2.0)
    least = PipelinePlan("gpipe").least_bubble(num_ranks, microbatches)
    assert least == pytest.approx(1 - 3 * microbatches / whole)


def test_stages_lie_on_ranks_in_turns_or_as_a_v_and_each_is_on_one() -> None:
    assert [PipelinePlan("interleaved_1f1b").stages_on(rank, 2) for rank in (0, 1)] == [(0, 2), (1, 3)]
    assert [PipelinePlan("zbv").stages_on(rank, 4) for rank in range(4)] == [(0, 7), (1, 6), (2, 5), (3, 4)]
    for name in SCHEDULES:
        plan = PipelinePlan(name)
        held = sorted(stage for rank in range(4) for stage in plan.stages_on(rank, 4))
        assert held == list(range(4 * plan.stages_of_a_rank))


def test_layers_are_shared_evenly_or_as_said() -> None:
    assert layers_of_stages(7, 3) == [range(3), range(3, 5), range(5, 7)]
    assert layers_of_stages(7, 3, (1, 2)) == [range(1), range(1, 2), range(2, 7)]


def test_stages_one_after_another_are_the_model_and_share_its_parameters_out() -> None:
    model = Residual()
    stages = [stage_of(model, PipelinePlan("gpipe"), stage, 4) for stage in range(4)]
    check_split(model, stages)
    names = [[name for name, _ in stage.named_parameters()] for stage in stages]
    assert names[0] == ["before.weight", *(f"layers.{n}.{what}" for n in (0, 1) for what in ("weight", "bias"))]
    assert names[3] == ["layers.5.weight", "layers.5.bias", "after.weight"]
    assert list(matching_modules(("layers.*", "after"), stages[3])) == ["layers.5", "after"]
    x = torch.randn(3, 8)
    assert torch.equal(activations_of(stages, (x,))[-1][0], model(x))


def own_split(model: nn.Module, stage: int, num_stages: int) -> Any:
    return "no module"


REFUSED: list[tuple[ParallelPlan, dict[str, Any], str]] = [
    (ParallelPlan(pipeline=PipelinePlan("gpip")), {}, "pipeline schedule 'gpip' is unknown; use gpipe, 1f1b"),
    (
        ParallelPlan(pipeline=PipelinePlan(mesh_dim="tp")),
        {},
        "a pipeline needs mesh dim 'tp', but the mesh has pp, dp_shard",
    ),
    (ParallelPlan(pipeline=PipelinePlan("gpipe", stages_per_rank=2)), {}, "has 1 stage per rank, not 2; leave"),
    (
        ParallelPlan(pipeline=PipelinePlan("gpipe", first_layers=(7,))),
        {},
        "6 layers cannot be split into 2 stages, stage 1",
    ),
    (ParallelPlan(pipeline=PipelinePlan("gpipe", first_layers=(1, 2))), {}, "must be 1 ascending layers"),
    (
        ParallelPlan(pipeline=PipelinePlan("gpipe")),
        {"num_layers": 1},
        "1 layer cannot be split into 2 stages; use more",
    ),
    (ParallelPlan(pipeline=PipelinePlan("gpipe")), {"tied": True}, "'before.weight' is in stages 0, 1 of the pipeline"),
    (
        ParallelPlan(pipeline=PipelinePlan("gpipe", split=own_split)),
        {},
        "split returns str for stage 0; return an nn.Module",
    ),
    (ParallelPlan(pipeline=PipelinePlan("zbv"), microbatches=4), {}, "use FsdpPlan(reshard_after_forward=False), 1f1b"),
    (ParallelPlan(pipeline=PipelinePlan("gpipe"), cp=CpPlan()), {}, "a pipeline cannot be combined with cp"),
    (ParallelPlan(pipeline=PipelinePlan("gpipe"), ddp=DdpPlan()), {}, "use FsdpPlan, whose gradients torch's stages"),
    (
        ParallelPlan(pipeline=PipelinePlan("gpipe", activation_shards={"tp": 1, "cp": 1})),
        {},
        "activation_shards has mesh dim 'cp', but the mesh has pp, dp_shard",
    ),
]


@pytest.mark.parametrize(("plan", "model", "message"), REFUSED, ids=[message[:40] for _, _, message in REFUSED])
def test_a_pipeline_that_cannot_work_is_refused(plan: ParallelPlan, model: dict[str, Any], message: str) -> None:
    with fake_ranks({"pp": 2, "dp_shard": 2}) as mesh:
        plan = replace(plan, fsdp=None if plan.ddp else FsdpPlan())
        with torch.device("meta"):
            built = Layers(**model)
        result = problems(built, Batch(batch()), plan, context_of(mesh))
    assert any(message in sentence for sentence in result), result


def pipelined(schedule: str, rank: int, **parts: Any) -> tuple[TrainingStep, list[Any]]:
    plan = ParallelPlan(pipeline=PipelinePlan(schedule), microbatches=4, **parts)
    scenario = Scenario(build_model=Residual, make_batch=batch, loss=nn.functional.mse_loss, plan=plan)
    with fake_ranks({"pp": 3}, rank=rank) as mesh:
        context = context_of(mesh, rank)
        step = TrainingStep(scenario, context)
        step(no_stamp)
        return step, communications_of(step, step.phases, plan, context, step.model)


def test_every_message_of_a_rank_is_a_path_with_its_stage_microbatch_and_both_ends() -> None:
    step, rows = pipelined("1f1b", rank=1)
    assert step.phases == ("schedule",) and len(rows) == 16
    message = {
        (row.phase, row.source, row.kind, row.group, row.mesh_dim, row.group_size, row.payload_bytes) for row in rows
    }
    size = 2 * 8 * 4  # a micro-batch of 2 samples, f32
    assert message == {
        ("forward", "pp", "recv", "0,1", "pp", 2, size),
        ("forward", "pp", "send", "1,2", "pp", 2, size),
        ("backward", "pp", "recv", "2,1", "pp", 2, size),
        ("backward", "pp", "send", "1,0", "pp", 2, size),
    }
    sent = [row.owner for row in rows if row.kind == "send" and row.phase == "forward"]
    assert sent == [f"stage1.microbatch.{part}" for part in range(4)]
    # 1F1B: this rank is two stages from the end, so it begins the first backward after two forwards.
    order = [row.phase[0] for row in rows if row.kind == "recv"]
    assert order == list("ffbfbfbb")


def test_a_v_passes_between_its_own_two_stages_without_a_message() -> None:
    _, rows = pipelined("zbv", rank=2)  # stages 2 and 3 of 6
    assert {(row.kind, row.phase, row.owner.partition(".")[0]) for row in rows} == {
        ("recv", "forward", "stage2"),
        ("send", "backward", "stage2"),
        ("send", "forward", "stage3"),
        ("recv", "backward", "stage3"),
    }


def test_a_stage_that_returns_less_than_the_next_one_expects_says_so() -> None:
    plan = ParallelPlan(pipeline=PipelinePlan("gpipe", activation_shards={"tp": 1}), tp={"after": None}, microbatches=2)
    scenario = Scenario(
        build_model=Residual, make_batch=batch, loss=nn.functional.mse_loss, plan=replace(plan, tp=None)
    )
    with fake_ranks({"pp": 2, "tp": 2}) as mesh:
        step = TrainingStep(scenario, context_of(mesh))
        with pytest.raises(
            UserError, match=r"stage 0 .* returns float32\[4, 8\], but the next stage expects float32\[4, 4\]"
        ):
            step(no_stamp)


def test_a_loss_that_fails_on_the_last_stage_alone_is_found_before_ranks_start() -> None:
    plan = ParallelPlan(pipeline=PipelinePlan("gpipe"), microbatches=2)
    right = Scenario(build_model=Residual, make_batch=batch, loss=nn.functional.mse_loss, plan=plan)
    wrong = replace(right, loss=lambda output, targets: nn.functional.mse_loss(output, targets[:, :3]))
    sizes = {"pp": 2}
    job: Any = SimpleNamespace(device="cpu", settings=SimpleNamespace(seed=1))
    assert not answer_on(sizes, right, job)["problems"]
    (result,) = answer_on(sizes, wrong, job)["problems"]
    assert result.startswith("on rank 1: ") and "3" in result


def test_a_schedule_that_torch_refuses_is_named_with_its_micro_batches() -> None:
    plan = ParallelPlan(pipeline=PipelinePlan("1f1b"))
    scenario = Scenario(build_model=Residual, make_batch=batch, loss=nn.functional.mse_loss, plan=plan)
    refused = r"PipelinePlan.schedule '1f1b' with microbatches=1: torch rejects this \(ValueError: .*stages \(2\)\)"
    with fake_ranks({"pp": 2}) as mesh, pytest.raises(UserError, match=refused):
        TrainingStep(scenario, context_of(mesh))


def test_a_pipeline_needs_a_loss_of_outputs_and_targets() -> None:
    plan = ParallelPlan(pipeline=PipelinePlan("gpipe"), microbatches=2)
    scenario = Scenario(build_model=Residual, make_batch=lambda: {"x": torch.ones(8, 8)}, plan=plan)
    with fake_ranks({"pp": 2}) as mesh, pytest.raises(UserError, match=r"a pipeline needs loss=\(output, targets\)"):
        TrainingStep(scenario, context_of(mesh))


def trace_by_hand(clock_shared: bool = True) -> Trace:
    """Two ranks, 10 s: rank 0 works until 2, sends what rank 1 asked for at 1 from 2 to 3, and works from 8 to 10."""
    names = ("rank", "kind", "group", "issued_s", "completed_s")
    messages = [(0, "send", "0,1", 2.0, 3.0), (1, "recv", "0,1", 1.0, 3.0)]
    shared = {
        "step": 0,
        "seq": 0,
        "group_size": 2,
        "owner": "stage0.microbatch.0",
        "owner_known": True,
        "exposed_s": None,
    }
    rows = [dict(zip(names, one, strict=True)) | shared for one in messages]
    record = {"columns": list(rows[0]), "rows": [list(row.values()) for row in rows], "clock_shared": clock_shared}
    record["pipeline"] = {"schedule": "gpipe", "num_stages": 2, "microbatches": 1, "least_idle_share": 0.5}
    phases = pd.DataFrame(
        [(0, 0, "schedule", 0.0, 10.0), (1, 0, "schedule", 0.0, 8.0)],
        columns=["rank", "step", "phase", "start_s", "end_s"],
    )
    working = pd.DataFrame(
        [(0, 0, 0.0, 2.0), (0, 0, 8.0, 10.0), (1, 0, 3.0, 8.0)], columns=["rank", "step", "start_s", "end_s"]
    )
    return Trace(None, record, None, rows_of(record, phases), phases, (0, 1), (0,), working)  # type: ignore[arg-type]


def test_a_bubble_is_where_a_rank_neither_works_nor_has_a_message_under_way() -> None:
    # Rank 0: 3 to 8. Rank 1 waits until 2 although it asked at 1, and is done 2 s before the other.
    assert bubble_shares(trace_by_hand()) == {0: 0.5, 1: 0.4}
    assert bubble_shares(trace_by_hand(clock_shared=False))[1] == pytest.approx(2 / 8)
    text = bubbles_text(trace_by_hand())
    assert text is not None and text.startswith("bubbles are 45 % of forward and backward per rank (rank 1 40 %")
    assert text.endswith("is 50 % for equally long stages")


def test_what_one_rank_sends_and_another_receives_are_one_message() -> None:
    trace = trace_by_hand()
    assert trace.rows["straggler_s"].tolist() == [0.0, 1.0]
    record = {**trace.record, "simulated": False}
    assert doubts(replace(trace, record=record, run=type("Run", (), {"is_simulated": False})())) == []  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def on_ranks(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    file = tmp_path_factory.mktemp("pipelines") / "found"
    done = ranks.run_forked(4, ROOT / "tests" / "ranks" / "pipeline_checks.py", file)
    assert done.returncode == 0, done.stderr[-4000:]
    return [line.split() for line in Path(file).read_text().splitlines()]


@pytest.mark.long
def test_loss_and_gradients_are_those_of_one_device_under_each_schedule_plain_with_fsdp_and_tp(
    on_ranks: list[list[str]],
) -> None:
    assert len(on_ranks) == 7 - (2 if needs_newer(V_SCHEDULES) else 0)
    for name, loss, gradient, num_gradients, idle in on_ranks[:-1]:
        assert float(loss) <= 1e-5 and float(gradient) <= 1e-5, name
        assert int(num_gradients) == 2 + 8 * 4 + 2
        assert 0 < float(idle) < 1


@pytest.mark.long
def test_every_message_has_its_times_on_both_ends(on_ranks: list[list[str]]) -> None:
    timed, seen, spans = map(int, on_ranks[-1])
    # 3 borders, 8 micro-batches, two directions, two ends.
    assert timed == seen == 3 * 8 * 2 * 2
    assert spans == 8 + 8 + 1  # rank 0: forwards, backwards, and gradients divided
