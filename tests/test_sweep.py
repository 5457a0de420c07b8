"""Sweeps: what is tried, refused and recommended, on plain data; and two commands that record real steps."""

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from click.testing import CliRunner, Result
from processes import Children

from distbench.cli import main
from distbench.render.terminal import text_of
from distbench.simulate.hardware.hardware_file import load_hardware
from distbench.simulate.hardware.host_figures import HostFigures
from distbench.spec import UserError
from distbench.spec.job import parse_choices
from distbench.spec.plan_knobs import brief_mesh, mesh_of, parse_brief_mesh, split_variant
from distbench.spec.quantities import BYTES, SECONDS, amount
from distbench.sweep import explore as explore_module
from distbench.sweep import measured_sweep as measured_module
from distbench.sweep import predicted_sweep as predicted_sweep_module
from distbench.sweep.candidates import BATCH_DIMS, Candidate, Space, all_of, count_of, factorizations, lower_bound_bytes
from distbench.sweep.explore import Explored, Limits, Predictor, explore, take_in
from distbench.sweep.measured_sweep import Measured, changes_of_best, combined, judged, num_affordable
from distbench.sweep.predicted_sweep import found_of, measured_found, predicted_around
from distbench.sweep.prediction import Prediction, layers_of, no_plan_fits, require_same_work
from distbench.sweep.ranking import (
    RankedPlan,
    changes_of,
    cost_a_billion,
    cost_a_step,
    memory_text,
    plan_of,
    reasons,
    record_of,
    undominated,
)
from distbench.sweep.run_sweep import is_here
from distbench.sweep.setup import set_up
from distbench.sweep.sweep_child import Question, SweepChild
from distbench.sweep.sweep_text import Found, recommendation, why
from distbench.sweep.sweep_text import blocks_of as sweep_blocks
from distbench.worker.rank import rank_context

FACTS: dict[str, Any] = {
    "mesh_dims": ["dp_shard", "tp"],
    "shard_dims": ["dp_shard", "tp"],
    "fsdp": {"reshard_after_forward": None, "mixed_precision": True, "prefetch": False},
    "cp": None,
    "checkpoint": [],
    "is_selective": False,
    "checkpointable": ["layers.*"],
    "microbatches": 1,
    "parameter_bytes": 4_000,
    "trained_bytes": 4_000,
    "pipeline": False,
    "optimizer_share": 2.0,
    "batch_size": 4,
    "num_tokens": 64,
}


def space(world: int = 4, **facts: Any) -> Space:
    return Space({"dp_shard": 2, "tp": 2}, FACTS["mesh_dims"], world, {**FACTS, **facts}, {})


def prediction(step_s: float, reserved: float = 1e9, fits: bool | None = True, **fields: Any) -> Prediction:
    candidate = fields.pop("candidate", Candidate((("dp_shard", 4),)))
    given = {"parts_s": {}, "exposed_s": {}, "moved_bytes": {}, "implicit_s": {}, **fields}
    return Prediction(
        candidate, step_s, reserved_bytes=reserved, is_whole=True, num_parameters=10, batch_size=4, num_tokens=100,
        fits=fits, **given,
    )  # fmt: skip


def test_every_mesh_of_a_world_is_tried() -> None:
    assert sorted(factorizations(4, 2)) == [(1, 4), (2, 2), (4, 1)]
    # C(6 + 2, 2) ways to share six factors of 2 between three mesh dims.
    assert len(list(factorizations(64, 3))) == 28
    found = [one.mesh_text for one in space().meshes]
    assert found == ["dp_shard=4", "dp_shard=2,tp=2", "tp=4"]
    assert next(one.mesh for one in space().meshes) == {"dp_shard": 4, "tp": 1}


def test_mesh_dims_that_the_scenario_does_not_declare_stand_in_their_order() -> None:
    hybrid = Space({"dp_shard": 4, "tp": 1}, ["dp_replicate", "cp", "dp_shard"], 4, FACTS, {})
    assert [*hybrid.meshes[0].mesh] == ["dp_shard", "tp"]
    assert {tuple(one.mesh) for one in hybrid.meshes if one.mesh.get("dp_replicate", 1) == 2} == {
        ("dp_replicate", "dp_shard", "tp"),
        ("dp_replicate", "dp_shard", "cp", "tp"),
    }


def test_a_mesh_that_the_batch_cannot_be_split_over_is_not() -> None:
    assert [one.mesh_text for one in space(batch_size=2).meshes] == ["dp_shard=2,tp=2", "tp=4"]
    setup = set_up("fsdp_stack", (), 4, None, False)
    one_dim = Space({"dp_shard": 2}, ["dp_shard"], 4, {**FACTS, "batch_size": 3}, {})
    with pytest.raises(UserError, match="no mesh over dp_shard has 4 ranks that a global batch of 3 can be split over"):
        setup.require_meshes(one_dim)


def test_every_change_of_a_plan_is_tried_where_it_has_something_to_change() -> None:
    options = {
        one.mesh_text: {name.removeprefix("plan."): values[1:] for name, values in space().alternatives(one).items()}
        for one in space().meshes
    }
    common = {"reshard_after_forward": [False], "prefetch": [2], "checkpoint": ["full"]}
    assert options == {
        "dp_shard=4": common,
        "dp_shard=2,tp=2": {**common, "microbatches": [2]},
        "tp=4": {**common, "microbatches": [2, 4]},
    }
    assert count_of(space()) == len(set(all_of(space()))) == 8 + 16 + 24
    selective = space(checkpoint=["layers.*"], is_selective=True)
    assert selective.alternatives(selective.meshes[0])["plan.checkpoint"][1:] == ["none", "full"]
    pinned = replace(space(), pinned=frozenset({"plan.prefetch"}))
    assert "plan.prefetch" not in pinned.alternatives(pinned.meshes[0])


def test_ranks_of_experts_have_different_parts_of_the_batch() -> None:
    mixture = Space({"ep": 2, "dp_shard": 2}, ["ep", "dp_shard"], 4, {**FACTS, "batch_size": 2}, {})
    assert mixture.meshes == [] and BATCH_DIMS == rank_context.BATCH_DIMS


def test_neighbours_differ_by_one_change() -> None:
    written = space().meshes[0]
    assert [one.changes_text for one in space().neighbours(written)] == [
        "checkpoint=full",
        "reshard_after_forward=False",
        "prefetch=2",
    ]
    changed = written.with_choice("plan.prefetch", 2)
    assert written in space().neighbours(changed)
    assert [one.mesh_text for one in space().moved_meshes(written)] == ["dp_shard=2,tp=2"]


def test_the_lower_bound_is_of_shards_of_parameters_gradients_and_optimizer() -> None:
    # 4,000 bytes of parameters, as many of gradients, and twice as many of AdamW's moments, over 4 ranks.
    assert lower_bound_bytes(FACTS, {"dp_shard": 2, "tp": 2}) == (4_000 + 4_000 + 8_000) // 4
    assert lower_bound_bytes(FACTS, {"dp_replicate": 8, "tp": 2}) == 8_000
    # What is frozen has neither gradients nor optimizer state.
    assert lower_bound_bytes({**FACTS, "trained_bytes": 1_000}, {"tp": 1}) == 4_000 + 1_000 + 2_000


def test_changes_of_the_best_are_tried_before_the_last_meshes() -> None:
    class Known:
        hardware = load_hardware("h100")

        def outcomes(self, candidates: Sequence[Candidate]) -> Iterator[tuple[Candidate, Prediction]]:
            """Slower from mesh to mesh; no change makes a difference."""
            return ((one, prediction(1.0 + sizes.index(one.sizes), candidate=one)) for one in candidates)

    names = {"dp_replicate": 1, "dp_shard": 64, "tp": 1}
    many = Space(names, [*names], 64, {**FACTS, "batch_size": 64}, {})
    sizes = [mesh.sizes for mesh in many.meshes]
    explored = Explored()
    explore(many, cast(Predictor, Known()), Limits(20, 600.0), explored)
    tried = list(explored.found)
    assert len(sizes) == 28 and tried[:16] == many.meshes[:16]
    assert len(tried) == 20 and all(one.sizes == sizes[0] and one.choices for one in tried[16:19])
    explored = Explored()
    explore(many, cast(Predictor, Known()), Limits(500, 600.0), explored)
    assert {*many.meshes} <= {*explored.found} and not explored.stopped


def test_plans_are_ranked_by_time_and_those_that_do_not_fit_come_last() -> None:
    a, b, c = (Candidate((("dp_shard", size),)) for size in (1, 2, 4))
    explored = Explored()
    other = replace(prediction(0.1, candidate=c), num_parameters=11)
    outcomes: list[tuple[Candidate, Any]] = [
        (a, prediction(2.0, candidate=a)),
        (b, prediction(1.0, fits=False, candidate=b)),
        (c, other),
    ]
    take_in(explored, outcomes)
    assert [one.candidate for one in explored.ranked] == [a, b]
    assert explored.left_out[c] == "its model has 11 parameters, and the plan as written 10"


def test_what_is_faster_or_smaller_than_all_others_is_undominated() -> None:
    rows = [(3.0, 1e9, True), (1.0, 3e9, True), (2.0, 3e9, True), (2.5, 2e9, True), (0.5, 9e9, False)]
    plans = [plan_of(prediction(*row)) for row in rows]
    assert [(plan.step_s, plan.memory_bytes) for plan in undominated(plans)] == [(1.0, 3e9), (2.5, 2e9), (3.0, 1e9)]


def test_costs() -> None:
    # 64 devices at 2.50 an hour are 160 an hour: 0.08 in 1.8 s; 1e9 tokens at 1e6 a second take 1,000 s.
    assert cost_a_step(2.5, 64, 1.8) == pytest.approx(0.08)
    assert cost_a_billion(2.5, 64, 1e6) == pytest.approx(160 * 1000 / 3600)


def test_the_next_plan_is_told_apart_by_its_paths() -> None:
    ours = prediction(1.0, exposed_s={("tp", "all_gather", "layers.*"): 0.1})
    theirs = prediction(1.3, exposed_s={("tp", "all_gather", "layers.*"): 0.5}, parts_s={"compute": 0.0})
    assert reasons(plan_of(ours), plan_of(theirs)) == ["400 ms more exposed all_gather over tp of layers.*"]


def test_what_is_squeezed_into_memory_says_so() -> None:
    """43 GiB that fit into 38 GiB are no slip of the pen."""
    tight = plan_of(prediction(1.0, 43 * (1 << 30), is_tight=True))
    assert memory_text(tight) == "43 GiB (tight)" and record_of(tight, 1, None)["is_tight"] is True
    assert memory_text(plan_of(prediction(1.0, 43 * (1 << 30), fits=False, is_tight=True))) == "43 GiB (no)"
    found = Found("mine", [tight], "predicted", 1, "tokens", (), "", capacity_bytes=38 * (1 << 30))
    assert "43 GiB at the peak, squeezed into 38 GiB because the allocator gives back" in recommendation(found)
    assert "(tight): it fits because" in text_of(sweep_blocks(found))


def test_a_mesh_that_the_plan_as_written_cannot_take_says_why() -> None:
    for mesh, says in (
        ({"pp": 2}, "the plan does not use mesh dim 'pp'; it uses dp_shard, tp"),
        ({"dp_shard": 3}, "a batch of 4 cannot be split over mesh dp_shard=3,tp=1; give another --mesh"),
    ):
        setup = set_up("llama_2d", (), None, mesh, True)
        with pytest.raises(UserError, match=says):
            setup.as_written(setup.space({**FACTS, "mesh_dims": ["dp_shard", "tp"]}))


def test_a_plan_without_a_next_one_says_why() -> None:
    found = Found("mine", [plan_of(prediction(1.0))], "predicted", 1, "tokens", (), "")
    assert why(found) == ["there is no other plan to hold it against"]
    beside = replace(found, plans=[*found.plans, plan_of(prediction(2.0, fits=False))])
    assert why(beside) == ["no other plan that was tried fits"]
    # Few a second are shown with their digits.
    slow = replace(found, plans=[plan_of(prediction(1e4))], world=4)
    assert "(0.00250 tokens/s a device)" in recommendation(slow)


def test_around_a_plan_says_how_many_neighbours_were_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    setup, explored = set_up("llama_2d", (), 4, None, True), Explored()
    monkeypatch.setattr(predicted_sweep_module, "facts_of", lambda *_: FACTS)
    monkeypatch.setattr(predicted_sweep_module, "confirm", lambda *_: None)
    monkeypatch.setattr(
        Predictor,
        "outcomes",
        lambda self, candidates, whole=False: [(one, prediction(1.0, candidate=one)) for one in candidates],
    )
    child = cast(SweepChild, None)
    predicted_around(setup, child, load_hardware("h100"), Limits(3, 60.0), lambda *_: None, explored)
    assert len(explored.found) == 3 < explored.num_legal and explored.stopped == "--plans 3 allows no more"
    said = found_of(setup, (), load_hardware("h100"), explored, None).notes
    assert any("the plan as written, and those that differ from it by one change" in note for note in said)


def test_changes_are_held_against_the_plan_as_written() -> None:
    written = space().meshes[0]
    changed = written.with_choice("plan.reshard_after_forward", False)
    moved = Candidate((("dp_shard", 2), ("tp", 2)))
    plans = [
        plan_of(prediction(1.0, 2e9, candidate=written)),
        plan_of(prediction(0.9, 3e9, candidate=changed)),
        plan_of(prediction(0.5, 9e9, fits=False, candidate=moved)),
    ]
    found = changes_of(plans, written)
    assert [(one.code, round(one.time_share, 3), one.memory_bytes) for one in found] == [
        (["plan = replace(plan, fsdp=replace(plan.fsdp, reshard_after_forward=False))"], -0.1, 1e9),
        (["mesh = {'dp_shard': 2, 'tp': 2}"], -0.5, 7e9),
    ]


@pytest.mark.parametrize(("is_selective", "rest"), [(False, ")"), (True, ", checkpoint_context=None)")])
def test_a_change_names_the_modules_that_it_checkpoints(is_selective: bool, rest: str) -> None:
    written = space().meshes[0]
    plans = [
        plan_of(prediction(1.0, candidate=one)) for one in (written, written.with_choice("plan.checkpoint", "full"))
    ]
    (change,) = changes_of(plans, written, {**FACTS, "is_selective": is_selective})
    assert change.code == [f"plan = replace(plan, checkpoint=('layers.*',){rest}"]


def test_a_hardware_file_is_of_this_machine_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTBENCH_MACHINE", "this-one")
    setup = set_up("llama_2d", (), 4, None, True)
    figures = HostFigures(4, {}, {}, {})
    assert is_here(setup, replace(load_hardware("h100"), name="this-one", host=figures))
    assert not is_here(setup, replace(load_hardware("h100"), name="another", host=figures))
    assert not is_here(setup, replace(load_hardware("h100"), name="this-one"))


def test_memory_that_no_plan_fits_names_the_nearest() -> None:
    said = str(no_plan_fits("llama3_70b", 8, prediction(1.0, 100e9), 80e9))
    assert said.startswith(
        "no plan of llama3_70b on 8 devices was found that fits into 80.0 GB; the nearest (dp_shard=4)"
    )
    assert "needs 100 GB; give --memory 102GB or more" in said
    # Rounded up: 20.4 GB would not be enough of 20.04 GB and what is lost to blocks that are too small.
    assert "give --memory 21GB or more" in str(no_plan_fits("llama3_70b", 1, prediction(1.0, 20.04e9), 8e9))
    assert "llama3_70b on 1 device was" in str(no_plan_fits("llama3_70b", 1, prediction(1.0, 20e9), 8e9))
    small = str(no_plan_fits("tp_mlp", 2, prediction(1.0, 7e6), 1e6, "it was interrupted; --resume goes on"))
    assert "fits into 1.00 MB (it was interrupted; --resume goes on); the nearest" in small
    assert "give --memory 8MB or more" in small


class Recorder:
    """A child process that answers as it is told.

    Args:
        of: number of variants to what it answers, one after another.
    """

    def __init__(self, of: dict[int, list[dict[str, Any]]]) -> None:
        self.of, self.forgotten = of, 0

    def ask(self, questions: Sequence[Question]) -> Iterator[tuple[int, dict[str, Any]]]:
        for place, question in enumerate(questions):
            yield place, self.of[len(question.variants)].pop(0)

    def forget(self, question: Question) -> None:
        self.forgotten += 1


def outcomes_of(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> tuple[list[Any], Predictor]:
    def load(file: Path) -> list[Any]:
        if file.name == "damaged":
            raise UserError("recording damaged, line 1: it is no JSON")
        return []

    monkeypatch.setattr(explore_module, "load_recordings", load)
    monkeypatch.setattr(explore_module, "predicted", lambda candidate, points, *_: len(points))
    base = {"num_layers": 32}
    predictor = Predictor(cast(SweepChild, recorder), base, load_hardware("h100"), lambda *_: None, (), "num_layers")
    return list(predictor.outcomes(space().meshes[:2])), predictor


def test_where_no_plan_works_with_few_layers_all_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    few, one, other = (
        {"left_out": "layers.31 matches no module"},
        {"answers": ["whole"]},
        {"left_out": "its own reason"},
    )
    found, predictor = outcomes_of(Recorder({2: [few, few], 1: [one, other]}), monkeypatch)
    assert [outcome for _, outcome in found] == [1, "its own reason"] and predictor.layers is None
    # What works neither way is left out for what few layers say, and no other plan is recorded whole.
    found, predictor = outcomes_of(Recorder({2: [few, few], 1: [other]}), monkeypatch)
    assert [outcome for _, outcome in found] == [few["left_out"]] * 2 and predictor.layers == "num_layers"
    assert layers_of({"num_layers": 32}) == "num_layers" and layers_of({"num_layers": 32}, {"num_layers": ()}) is None


def test_a_damaged_recording_of_an_earlier_sweep_is_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder({2: [{"answers": ["2", "damaged"]}, {"left_out": "other"}, {"answers": ["2", "4"]}]})
    found, _ = outcomes_of(recorder, monkeypatch)
    assert sorted(str(outcome) for _, outcome in found) == ["2", "other"] and recorder.forgotten == 1


@pytest.mark.parametrize("lasts", [True, False])
def test_what_may_go_well_another_time_is_not_remembered(tmp_path: Path, lasts: bool) -> None:
    entry = set_up("tp_mlp", (), 2, None, True).entry
    child = SweepChild(entry.file, entry.name, tmp_path, resume=True)
    question = Question("record", [{"dim": 8}], {"tp": 2})
    child._recorded(question, {"left_out": "it raises OSError: no space left", "lasts": lasts})
    assert (child._known(question) is not None) is lasts


def test_what_computes_something_else_is_no_plan_to_compare() -> None:
    first = prediction(1.0)
    assert require_same_work(first, replace(first, step_s=2.0)) is None
    assert "has 50 tokens" in str(require_same_work(first, replace(first, num_tokens=50)))


def test_an_interrupt_between_rounds_keeps_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured_module, "RankProcesses", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(measured_module.Rounds, "_job", lambda self: None)
    rounds = measured_module.Rounds(set_up("tp_mlp", (), 2, None, True), Limits(5, 60.0), tmp_path, False, True)

    def measure(self: Any, _: Any, number: int, candidates: Sequence[Candidate], __: Any) -> None:
        assert number == 0
        self.measured.plans |= {one: measured(1.0) for one in candidates}

    def interrupted(*_: Any) -> list[Candidate]:
        raise KeyboardInterrupt

    monkeypatch.setattr(measured_module.Rounds, "_round", measure)
    found = rounds.run(space().meshes[:1], interrupted)
    assert found.interrupted and [*found.plans] == space().meshes[:1]


def measured(step_s: float, *choices: tuple[str, Any]) -> RankedPlan:
    return RankedPlan(Candidate((("dp_shard", 4),), choices), step_s, 100 / step_s, None, "measured", True)


def test_changes_of_the_fastest_mesh_are_screened_first_and_as_many_as_there_is_time_for() -> None:
    one = space()
    slow, fast = one.meshes[0], one.meshes[1]
    found = changes_of_best(one, [fast, slow, slow.with_choice("plan.prefetch", 2)])
    num_of_fast = len([*one.neighbours(fast)])
    for changed, mesh in ((found[:num_of_fast], fast), (found[num_of_fast:], slow)):
        assert set(changed) == {*one.neighbours(mesh)} and len(changed) == len({*changed})
        names = [name for candidate in changed for name, _ in candidate.choices]
        soonest = [name in ("plan.mixed_precision", "plan.reshard_after_forward") for name in names]
        assert any(soonest) and soonest == sorted(soonest, reverse=True), names
    # 20 s, half of them for the second look, and 2 s a plan.
    assert num_affordable(2.0, 20.0, 80) == 5 and num_affordable(2.0, 20.0, 3) == 3
    assert (
        num_affordable(2.0, -1.0, 80) == 4 and num_affordable(0.0, 20.0, 7) == 7 and num_affordable(2.0, 20.0, -1) == 0
    )


def test_the_two_best_changes_are_tried_together() -> None:
    plans = [measured(0.8, ("plan.prefetch", 2)), measured(0.9, ("plan.checkpoint", "full")), measured(1.0)]
    known = {plan.candidate: plan for plan in plans}
    both = (("plan.checkpoint", "full"), ("plan.prefetch", 2))
    assert [one.choices for one in combined(plans, known)] == [both]
    assert combined([measured(0.8, ("plan.prefetch", 2)), measured(0.7)], known) == []


def test_the_last_round_has_verdicts_against_its_fastest() -> None:
    passes = [[1.0 + 0.001 * number for number in range(10)], [1.5 + 0.001 * number for number in range(10)]]
    found = judged([measured(1.0), measured(1.5, ("plan.prefetch", 2))], passes)
    assert [plan.verdict for plan in found] == ["recommended", "slower"]
    assert found[1].measured is not None and found[1].measured[0] == pytest.approx(1.5, rel=0.01)


def test_changes_around_a_plan_are_single_ones_also_where_two_were_measured_together() -> None:
    one, policy = ("plan.prefetch", 2), ("plan.mixed_precision", "bf16")
    plans = [replace(measured(2.0), verdict="recommended"), measured(1.0, one), measured(1.5, policy, one)]
    of = Measured({plan.candidate: plan for plan in plans}, final=plans[:1])
    where = Space({"dp_shard": 4}, ["dp_shard"], 4, FACTS, {})
    setup = set_up("llama_2d", (), 4, None, True)
    found = measured_found(setup, (), where, of, plans[0].candidate, None)
    assert [change.plan.candidate.choices for change in found.changes] == [(one,)]
    # A faster one that is not recommended was measured in another round.
    assert "without a verdict: times of an earlier, shorter round" in text_of(sweep_blocks(found))
    assert "without a verdict" not in text_of(sweep_blocks(replace(found, plans=plans[:1])))


def test_changes_of_a_plan_are_parameters_of_any_scenario() -> None:
    chosen = parse_choices(["plan.mesh=dp_shard4,dp_shard2xtp2", "plan.microbatches=2"], {})
    assert chosen == {"plan.mesh": ["dp_shard4", "dp_shard2xtp2"], "plan.microbatches": [2]}
    assert split_variant({"dim": 1, "plan.prefetch": 2}) == ({"dim": 1}, {"plan.prefetch": 2})
    assert brief_mesh({"dp_shard": 2, "cp": 1, "tp": 2}) == "dp_shard2xtp2"
    assert parse_brief_mesh("dp_replicate2xtp16") == {"dp_replicate": 2, "tp": 16}
    assert mesh_of({"plan.mesh": "tp4"}, {"dp_shard": 2, "tp": 2}) == {"dp_shard": 1, "tp": 4}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("plan.reshard=True", "plan.reshard: no such change to a plan (nearest: "),
        ("plan.rotate=left", "--set plan.rotate=left is unknown; use allgather, alltoall, ulysses"),
        ("plan.microbatches=0", "give a whole number from 1"),
        ("plan.mesh=4", "is no mesh; write for example plan.mesh=dp_shard2xtp2"),
        ("plan.prefetch=two", "plan.prefetch takes int values such as 2"),
    ],
)
def test_a_change_that_cannot_be_is_refused(text: str, says: str) -> None:
    with pytest.raises(UserError) as refused:
        parse_choices([text], {})
    assert says in str(refused.value)


def test_a_mesh_of_other_ranks_than_the_launch_is_refused() -> None:
    with pytest.raises(UserError, match="has 8 ranks, and the launch 4"):
        mesh_of({"plan.mesh": "tp8"}, {"tp": 4})


def test_the_batch_grows_with_the_world_where_nobody_gave_one() -> None:
    setup = set_up("llama3_8b", (), 64, None, False)
    assert setup.base["batch"] == 128 and setup.note.startswith("batch=128, as 16 on the 8 ranks")
    assert setup.command(Candidate((("dp_shard", 64),))) == "distbench run llama3_8b --mesh dp_shard=64 --set batch=128"
    assert set_up("llama3_8b", ("batch=64",), 64, None, False).base["batch"] == 64


def test_the_command_measures_the_candidate_alone() -> None:
    """Of a scenario with axes, and of values to try, the one that the plan has."""
    setup = set_up("fsdp_stack", ("batch=8,16", "dim=64"), 4, None, False)
    plain = Candidate((("dp_shard", 4),))
    own = "--set reshard_after_forward=True --set batch=8"
    assert setup.base["reshard_after_forward"] is True and "reshard_after_forward" in setup.axes
    assert setup.command(plain) == f"distbench run fsdp_stack --mesh dp_shard=4 --set dim=64 {own}"
    other = setup.command(plain.with_choice("batch", 16))
    assert "--set batch=16" in other and "batch=8" not in other and "--set reshard_after_forward=True" in other


@pytest.mark.parametrize(
    ("text", "size"), [("80GB", 80e9), ("80", 80e9), ("79.5 GiB", 79.5 * (1 << 30)), ("1tb", 1e12)]
)
def test_amounts_of_memory(text: str, size: float) -> None:
    assert amount(text, "--memory", BYTES, "GB", 1e15) == size
    assert amount("10min", "--budget", SECONDS, "s", 1e9) == 600 and amount("90", "--budget", SECONDS, "s", 1e9) == 90


def sweep(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["sweep", *arguments])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ("llama_2d", "--memory", "lots", "--hardware", "h100"),
            "--memory lots cannot be used; give a positive number",
        ),
        (("llama_2d", "--memory", "2000TB", "--hardware", "h100"), "--memory 2000TB is too much; give at most 1e+06GB"),
        (("llama_2d", "--budget", "0"), "--budget 0 cannot be used; give a positive number with one of s, min, h"),
        (("llama_2d", "--price", "-1"), "--price"),
        (("llama_2d", "--world", "0"), "--world 0 is no number of ranks"),
        (("llama_2d", "--memory", "80GB"), "--memory goes with --hardware"),
        (("llama_2d", "--float8", "layers.*"), "--float8 goes with --hardware"),
        (("llama_2d", "--mesh", "tp=2"), "--mesh goes with --around-my-plan only"),
        (("llama_2d", "--set", "plan.mesh=tp4"), "leave --set plan.mesh out"),
        (("llama3_8b", "--world", "64"), "no CPU runs; predict it: --hardware h100"),
        (("llama_2d", "--hardware", "h1000"), "--hardware 'h1000' is unknown"),
        (("llama_2d", "--hardware", ""), "--hardware '' is unknown"),
        (("llama_2d", "--mesh", "", "--around-my-plan"), "mesh part '' is not NAME=SIZE"),
        (("llama_2d", "--memory", "", "--hardware", "h100"), "--memory  cannot be used"),
        (("lama_2d",), "no scenario 'lama_2d'"),
    ],
)
def test_bad_input_is_one_sentence(arguments: tuple[str, ...], says: str, tmp_path: Path) -> None:
    done = sweep(*arguments, "--out", str(tmp_path))
    assert done.exit_code == 2 and says in done.output and "Traceback" not in done.output


@pytest.fixture(scope="module")
def predicted(children: Children, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    """A sweep of three plans of a small scenario, and the same again from what it left."""
    out = tmp_path_factory.mktemp("sweep")
    asked = ("tp_mlp", "--quick", "--world", "2", "--hardware", "h100", "--plans", "3", "--out", str(out), "--quiet")
    with children.forked():
        first = sweep(*asked, "--price", "2.5")
        kept = {file.name: file.stat().st_mtime_ns for file in (out / "recordings").iterdir()}
        again = sweep(*asked, "--resume", "--format", "json", "--page", str(out / "page.html"))
        small = sweep(*asked, "--resume", "--memory", "1MB")
        with SweepChild(own_scenario(out.parent), "own") as child:
            facts = child.one(Question("facts", [{}], {"dp_shard": 2}))
        staged = sweep(
            *("pipeline", "--quick", "--set", "schedule=gpipe", "--set", "microbatches=4", "--set", "num_layers=2"),
            *("--world", "2", "--hardware", "h100", "--plans", "1", "--out", str(out.parent / "staged"), "--quiet"),
        )
    after = {file.name: file.stat().st_mtime_ns for file in (out / "recordings").iterdir()}
    runs = {"first": first, "again": again, "small": small, "staged": staged, "facts": facts}
    return {**runs, "kept": kept, "after": after, "out": out}


OWN = """
import os
import torch
from torch import nn
from distbench.spec import Scenario, scenario

def build():
    os.write(1, b"a library prints")
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

@scenario(mesh={"dp_shard": 2})
def own() -> Scenario:
    return Scenario(
        build_model=build,
        make_batch=lambda: {"ids": torch.zeros(8, 3)},
        call=lambda model, batch: model(batch["ids"]).mean(),
        num_tokens=lambda batch: batch["ids"].numel(),
        parallelize=lambda model, mesh: None,
        optimizer=torch.optim.AdamW,
    )
"""


def own_scenario(folder: Path) -> Path:
    """A scenario that writes to standard output, whose batch is a dict, and whose function shards what it likes."""
    file = folder / "own.py"
    file.write_text(OWN)
    return file


def test_a_function_that_shards_what_it_likes_rules_no_mesh_out(predicted: Mapping[str, Any]) -> None:
    facts = predicted["facts"]
    assert (facts["batch_size"], facts["num_tokens"], facts["optimizer_share"]) == (8, 24, 2.0)
    # 2 layers of 4 x 4 + 4 numbers of 4 bytes, over all 4 ranks at best; gradients nobody knows before it has run.
    assert lower_bound_bytes(facts, {"dp_shard": 2, "tp": 2}) == 2 * 20 * 4 / 4


def test_a_sweep_ends_with_a_plan_to_paste_and_a_picture(predicted: Mapping[str, Any]) -> None:
    first = predicted["first"]
    assert first.exit_code == 0, first.output
    assert "use --mesh " in first.stdout and "a step predicted on h100" in first.stdout
    assert "plan = ParallelPlan(" in first.stdout and "distbench run tp_mlp --mesh " in first.stdout
    assert "at 2.5 a device and hour" in first.stdout
    for name in ("plans.png", "plans.svg", "plans.json"):
        assert (predicted["out"] / name).stat().st_size > 500


def test_a_resumed_sweep_records_nothing_again(predicted: Mapping[str, Any]) -> None:
    assert predicted["again"].exit_code == 0, predicted["again"].output
    record = json.loads(predicted["again"].stdout)
    assert record["plans"] and record["plans"][0]["step_s"] > 0
    assert predicted["after"] == predicted["kept"]
    # A page begins with what it is for.
    page = (predicted["out"] / "page.html").read_text()
    assert page.index('class="verdict"') < page.index(record["recommendation"]) < page.index("<svg")


def test_memory_that_no_plan_fits_is_one_sentence(predicted: Mapping[str, Any]) -> None:
    done = predicted["small"]
    assert done.exit_code == 2 and "no plan of tp_mlp" in done.output and "fits into 1.00 MB" in done.output


def test_meshes_of_a_pipeline_are_predicted_too(predicted: Mapping[str, Any]) -> None:
    assert predicted["staged"].exit_code == 0, predicted["staged"].output
