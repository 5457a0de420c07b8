"""What a sweep says of the plans it has seen: order, refusals, costs, reasons, verdicts."""

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from sweep_plans import FACTS, measured, prediction, space

from distbench.search import sweep_result
from distbench.search.predicted import (
    Predictor,
    no_plan_fits,
    other_work,
    predict_around,
    require_fitting,
    take_in,
    with_memory,
)
from distbench.search.space import Candidate, Space, set_up
from distbench.search.sweep import is_here
from distbench.search.sweep_child import PlanCode
from distbench.search.sweep_result import (
    Limits,
    Prediction,
    SweepResult,
    SweepState,
    changes_of,
    judged,
    plan_of,
    result_of,
    undominated,
)
from distbench.search.sweep_text import (
    best_text,
    cost_a_billion,
    cost_a_step,
    memory_text,
    reasons,
    recommendation,
    record_of,
    why,
)
from distbench.search.sweep_text import blocks_of as sweep_blocks
from distbench.show.terminal import text_of
from distbench.simulate.error_bars import Bar, DifferenceErrors
from distbench.simulate.hardware_file import HostFigures, load_hardware
from distbench.spec import UserError


def test_plans_are_ranked_by_time_and_those_that_do_not_fit_come_last() -> None:
    a, b, c = (Candidate((("dp_shard", size),)) for size in (1, 2, 4))
    state = SweepState(space())
    other = replace(prediction(0.1, candidate=c), num_parameters=11)
    outcomes: list[tuple[Candidate, Any]] = [
        (a, prediction(2.0, candidate=a)),
        (b, prediction(1.0, fits=False, candidate=b)),
        (c, other),
    ]
    take_in(state, outcomes)
    assert [one.candidate for one in state.ranked_predictions] == [a, b]
    assert state.left_out[c] == "its model has 11 parameters, but the plan as written has 10"


def ranked_of(plans: list[Prediction], **limits: Any) -> list[Prediction]:
    return SweepState(space(), predictions={one.candidate: one for one in plans}, **limits).ranked_predictions


def test_objective_and_slowest_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error of ratios decides ties (0.05: within 6.6 %); the smallest plan is recommended among allowed ones."""
    rows = [(1.0, 8e9), (1.05, 6e9), (1.09, 5e9), (2.0, 1e9)]
    bar = Bar(0.9, 1.1, 3, 3, "")
    plans = [
        replace(prediction(step_s, size, candidate=Candidate((("tp", number + 2),))), step_bar=bar)
        for number, (step_s, size) in enumerate(rows)
    ]
    monkeypatch.setattr(sweep_result, "difference_errors", lambda: DifferenceErrors(0.05, 0.05, 9, 3))
    assert [one.step_s for one in ranked_of(plans)] == [1.05, 1.0, 1.09, 2.0]
    assert [one.step_s for one in ranked_of(plans, objective="memory")] == [2.0, 1.0, 1.05, 1.09]
    assert ranked_of(plans, objective="memory", max_step_s=1.2)[0].step_s == 1.09
    assert ranked_of(plans, max_step_s=1.02)[0].step_s == 1.0
    state = SweepState(space(), predictions={one.candidate: one for one in plans}, max_step_s=0.5)
    with pytest.raises(UserError, match=r"at most 500 ms per step; the fastest that fits .* takes 1"):
        require_fitting(cast(Any, SimpleNamespace(entry=SimpleNamespace(name="m"))), state, load_hardware("h100"))
    small = with_memory(load_hardware("h100"), 80e9, 20e9)
    assert small.usable_bytes == 60e9
    with pytest.raises(UserError, match=r"--headroom .* is the whole memory"):
        with_memory(load_hardware("h100"), 80e9, 80e9)


def test_of_plans_too_near_to_tell_the_one_with_the_least_memory_is_recommended() -> None:
    rows = [(1.0, 8e9), (1.004, 6.01e9), (1.009, 6e9), (1.02, 2e9)]
    plans = [
        prediction(step_s, size, candidate=Candidate((("tp", number + 2),)))
        for number, (step_s, size) in enumerate(rows)
    ]
    ranked = ranked_of(plans)
    # 6.01 and 6 GB are as good as the same: of the two the faster one.
    assert [one.step_s for one in ranked] == [1.004, 1.0, 1.009, 1.02]
    plans[1] = replace(plans[1], fits=False)
    assert ranked_of(plans)[0].step_s == 1.009
    plans[2] = replace(plans[2], fits=False)
    assert ranked_of(plans)[0].step_s == 1.0
    result = SweepResult("mine", [plan_of(one) for one in ranked], "predicted", 1, "tokens", (), "")
    assert why(result)[0] == "Tie: tp=2 (-0.4 % time, 1.85 GiB more memory). Measure both"


def test_what_leaves_no_reserve_is_shown_as_not_recommended() -> None:
    plans = [plan_of(prediction(1.0)), plan_of(prediction(0.5, 77 * (1 << 30), fits=False, takes_reserve=True))]
    assert memory_text(plans[1]) == "77 GiB (reserve)" and record_of(plans[1], 1, None)["takes_reserve"] is True
    result = SweepResult(
        "mine", plans, "predicted", 1, "tokens", (), "", capacity_bytes=79 << 30, reserve_bytes=4 << 30
    )
    assert "of 79 GiB (4 GiB kept free)" in recommendation(result)
    assert "(reserve): not recommended, leaves less than the reserve of 4 GiB" in text_of(sweep_blocks(result))


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
    result = SweepResult("mine", [tight], "predicted", 1, "tokens", (), "", capacity_bytes=38 * (1 << 30))
    assert "peak 43 GiB, which fits into 38 GiB only because the allocator frees its cache" in recommendation(result)
    assert "(tight): fits only because" in text_of(sweep_blocks(result))


def test_a_mesh_that_the_plan_as_written_cannot_take_says_why() -> None:
    for mesh, message in (
        ({"pp": 2}, "the plan does not use mesh dim 'pp' of --mesh; use dp_shard, tp"),
        ({"dp_shard": 3}, "a batch of 4 cannot be split over mesh dp_shard=3,tp=1; give another --mesh"),
    ):
        setup = set_up("llama_2d", (), None, mesh, True)
        with pytest.raises(UserError, match=message):
            setup.as_written(setup.space({**FACTS, "mesh_dims": ["dp_shard", "tp"]}))


def test_a_plan_without_a_next_one_says_why() -> None:
    result = SweepResult("mine", [plan_of(prediction(1.0))], "predicted", 1, "tokens", (), "")
    assert why(result) == ["No other plan was tried."]
    beside = replace(result, plans=[*result.plans, plan_of(prediction(2.0, fits=False))])
    assert why(beside) == ["No other tried plan fits."]
    # Few a second are shown with their digits.
    slow = replace(result, plans=[plan_of(prediction(1e4))], world=4)
    assert "0.00250 tokens/s/device" in recommendation(slow)


def test_around_a_plan_says_how_many_neighbours_were_not_tried() -> None:
    class Known:
        def outcomes(self, candidates: Sequence[Candidate]) -> list[tuple[Candidate, Prediction]]:
            return [(one, prediction(1.0, candidate=one)) for one in candidates]

    setup = set_up("llama_2d", (), 4, None, True)
    tried = setup.space(FACTS)
    state = SweepState(tried, setup.as_written(tried))
    assert state.written is not None
    predict_around(state, state.written, cast(Predictor, Known()), Limits(3, 60.0))
    assert len(state.predictions) == 3 < state.num_legal and state.stopped == "the limit --plans 3 was reached"
    notes = result_of(setup, state, load_hardware("h100"), {}, None).notes
    assert any("the plan as written, and plans that differ by one change" in note for note in notes)


def test_changes_are_compared_with_the_plan_as_written() -> None:
    written = space().meshes[0]
    changed = written.with_choice("plan.reshard_after_forward", False)
    moved = Candidate((("dp_shard", 2), ("tp", 2)))
    plans = [
        plan_of(prediction(1.0, 2e9, candidate=written)),
        plan_of(prediction(0.9, 3e9, candidate=changed)),
        plan_of(prediction(0.5, 9e9, fits=False, candidate=moved)),
    ]
    changes = changes_of(plans, written, {changed: PlanCode([], [], ["plan = replace(plan)"])})
    assert [(one.code, round(one.time_share, 3), one.memory_bytes) for one in changes] == [
        (["plan = replace(plan)"], -0.1, 1e9),
        (["mesh = {'dp_shard': 2, 'tp': 2}"], -0.5, 7e9),
    ]


def test_a_hardware_file_is_of_this_machine_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTBENCH_MACHINE", "this-one")
    setup = set_up("llama_2d", (), 4, None, True)
    figures = HostFigures(4, {}, {}, {})
    assert is_here(setup, replace(load_hardware("h100"), name="this-one", host=figures))
    assert not is_here(setup, replace(load_hardware("h100"), name="another", host=figures))
    assert not is_here(setup, replace(load_hardware("h100"), name="this-one"))


def test_memory_that_no_plan_fits_names_the_nearest() -> None:
    h100 = load_hardware("h100")
    message = str(no_plan_fits("llama3_70b", 8, prediction(1.0, 100e9), with_memory(h100, 80e9)))
    assert message.startswith(
        "no tried plan of llama3_70b on 8 devices fits into 80.0 GB (of which 4.34 GB are reserved for "
        "the context, NCCL's buffers and workspaces); the nearest plan (dp_shard=4)"
    )
    assert "needs 100 GB; give --memory 107GB or more" in message
    # Rounded up: 20.4 GB would not be enough of 20.04 GB and what is lost to blocks that are too small.
    host = replace(h100, host=HostFigures(4, {}, {}, {}))
    small = with_memory(host, 8e9)
    assert "give --memory 21GB or more" in str(no_plan_fits("llama3_70b", 1, prediction(1.0, 20.04e9), small))
    assert "llama3_70b on 1 device fits" in str(no_plan_fits("llama3_70b", 1, prediction(1.0, 20e9), small))
    stopped = "it was interrupted; continue with --reuse"
    small = str(no_plan_fits("tp_mlp", 2, prediction(1.0, 7e6), with_memory(host, 1e6), stopped))
    assert "fits into 1.00 MB (it was interrupted; continue with --reuse); the nearest" in small
    assert "give --memory 8MB or more" in small


def test_what_computes_something_else_is_no_plan_to_compare() -> None:
    first = prediction(1.0)
    assert not other_work(first, replace(first, step_s=2.0))
    assert "has 50 tokens" in other_work(first, replace(first, num_tokens=50))


def test_the_last_round_has_verdicts_against_its_fastest() -> None:
    passes = [[1.0 + 0.001 * number for number in range(10)], [1.5 + 0.001 * number for number in range(10)]]
    result = judged([measured(1.0), measured(1.5, ("plan.prefetch", 2))], passes)
    assert [plan.verdict for plan in result] == ["recommended", "slower"]
    assert result[1].measured is not None and result[1].measured[0] == pytest.approx(1.5, rel=0.01)


def test_changes_around_a_plan_are_single_ones_also_where_two_were_measured_together() -> None:
    one, policy = ("plan.prefetch", 2), ("plan.mixed_precision", "bf16")
    plans = [replace(measured(2.0), verdict="recommended"), measured(1.0, one), measured(1.5, policy, one)]
    where = Space({"dp_shard": 4}, ["dp_shard"], 4, FACTS, {})
    written = plans[0].candidate
    state = SweepState(where, written, measured={plan.candidate: plan for plan in plans}, final=plans[:1])
    result = result_of(set_up("llama_2d", (), 4, None, True), state, None, {}, None)
    assert [change.plan.candidate.choices for change in result.changes] == [(one,)]
    # A faster one that is not recommended was measured in another round.
    assert "without a verdict: times of an earlier, shorter round" in text_of(sweep_blocks(result))
    assert "without a verdict" not in text_of(sweep_blocks(replace(result, plans=plans[:1])))


def test_a_recommendation_that_the_last_round_did_not_check_says_so() -> None:
    plan = measured(2.0)
    where, setup = Space({"dp_shard": 4}, ["dp_shard"], 4, FACTS, {}), set_up("llama_2d", (), 4, None, True)
    unchecked = SweepState(where, measured={plan.candidate: plan})
    for state, says_so in ((unchecked, True), (replace(unchecked, final=[plan]), False)):
        result = result_of(setup, state, None, {}, None)
        assert any("is unchecked" in note for note in result.notes) is says_so


def test_ties_and_the_probability_of_the_best_follow_from_published_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ratios of two FSDP plans have an error of 4 %, so 3 % is a tie and 20 % is not."""
    monkeypatch.setattr(sweep_result, "difference_errors", lambda: DifferenceErrors(0.04, 0.1, 10, 4))
    bar = Bar(0.9, 1.2, 10, 4, "h100")
    plans = [
        plan_of(replace(prediction(step_s, candidate=Candidate((("dp_shard", number + 2),))), step_bar=bar))
        for number, step_s in enumerate((1.0, 1.03, 1.2))
    ]
    result = SweepResult("mine", plans, "predicted", 1, "tokens", (), "")
    assert [result.is_tie(plan) for plan in plans[1:]] == [True, False]
    assert why(result)[0] == "Tie: dp_shard=3 (+3.0 % time). Measure both"
    # Two normal errors of 0.04 / sqrt(2) each: 3 % is 0.74 deviations, of which the normal distribution has 0.77.
    assert result.best_probability == pytest.approx(0.77, abs=0.03)
    assert "1.00 s per step (900 ms to 1.20 s)" in recommendation(result)
    record = record_of(plans[0], 1, None)
    assert record["step_range_s"] == pytest.approx([0.9, 1.2]) and record["memory_range_bytes"] is None
    assert best_text(result)[0].endswith("; ties: 1 plan")
