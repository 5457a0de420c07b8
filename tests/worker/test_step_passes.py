"""Steps in passes: from the lines of a run file to the verdicts of its table."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distbench.ranks.case_protocol import CaseSpec
from distbench.records.run_file import Case, read_run
from distbench.report import render
from distbench.spec import Settings
from distbench.worker.pass_schedule import MAX_PASSES, CaseProgress, PassPlan, groups_of
from distbench.worker.rank_session import with_baselines_again

VARIANTS = {"a=1": 0.100, "a=2": 0.050, "a=3": 0.100, "b=1": 0.300, "b=2": 0.400}


def step(variant: str, samples_s: list[float], **fields: Any) -> dict[str, Any]:
    params = {"scenario": "mine", "variant": variant, "batch_size": 8, "computes": variant[0]}
    case = {"id": f"step/{variant}", "kind": "step", "params": params}
    return {"type": "case", "case": case, "status": "ok", "samples_s": samples_s, "phases_s": {}, **fields}


def run_file(folder: Path, num_passes: int, footer: bool = True) -> Path:
    rng = np.random.default_rng(0)
    lines: list[dict[str, Any]] = [{"type": "run", "schema_version": 2, "job": {"scenario": "mine"}}]
    samples = {
        name: (seconds * np.exp(rng.normal(0, 0.03, (num_passes, 3)))).tolist() for name, seconds in VARIANTS.items()
    }
    lines += [step(name, passes[0]) for name, passes in samples.items()]
    for number in range(1, num_passes):
        for name, passes in samples.items():
            own = {"samples_s": passes[number], "phases_s": {}, "stop_reason": "passes"}
            lines.append({"type": "pass", "case_id": f"step/{name}", "number": number, **own})
    lines += [{"type": "footer", "status": "complete"}] if footer else []
    path = folder / "run.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def rows_of(text: str) -> dict[str, str]:
    return {name: next(line for line in text.splitlines() if line.startswith(name)) for name in VARIANTS}


def test_each_variant_is_held_against_the_first_that_computes_the_same(tmp_path: Path) -> None:
    text = render((run_file(tmp_path, 10),), tmp_path, "table", None, (), full=True).text
    rows = rows_of(text)
    assert rows["a=1"].endswith("baseline") and rows["b=1"].endswith("baseline")
    assert rows["a=2"].endswith("faster") and rows["b=2"].endswith("slower")
    assert rows["a=3"].endswith("within noise")
    assert "would be detected four times in five" in text


def test_below_8_passes_the_table_says_what_it_takes(tmp_path: Path) -> None:
    text = render((run_file(tmp_path, 7),), tmp_path, "table", None, (), full=True).text
    assert "0 slower, 0 faster" in text and rows_of(text)["a=2"].endswith("too few passes")
    assert "use --passes 8 or a larger --budget" in text


def test_a_launch_that_was_stopped_keeps_the_passes_it_has(tmp_path: Path) -> None:
    path = run_file(tmp_path, 9, footer=False)
    whole = path.read_text().splitlines(keepends=True)
    path.write_text("".join(whole[:-2]) + whole[-2][:20])
    run = read_run(path)
    assert [len(case["passes"]) for case in run.cases] == [9, 9, 9, 8, 8]
    assert [len(case["samples_s"]) for case in run.cases] == [27, 27, 27, 24, 24]
    assert rows_of(render((path,), tmp_path, "table", None, (), full=True).text)["a=2"].endswith("faster")


def test_a_case_that_failed_in_a_later_pass_has_failed(tmp_path: Path) -> None:
    path = run_file(tmp_path, 3)
    with path.open("a") as file:
        file.write('{"type": "pass", "case_id": "step/a=2", "number": 3, "status": "raised", "error": "why"}\n')
    assert [case["status"] for case in read_run(path).cases] == ["ok", "raised", "ok", "ok", "ok"]


@pytest.mark.parametrize("number", [10**15, -1, 0, "1", None])
def test_a_pass_of_no_such_number_is_left_out_with_a_warning(tmp_path: Path, number: Any) -> None:
    path = run_file(tmp_path, 3)
    line = {"type": "pass", "case_id": "step/a=1", "number": number, "samples_s": [1.0], "phases_s": {}}
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")
    run = read_run(path)
    assert len(run.warnings) == 1 and [len(case["passes"]) for case in run.cases] == [3] * 5


def test_a_case_without_samples_of_its_own_takes_those_of_its_passes(tmp_path: Path) -> None:
    path = run_file(tmp_path, 3)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    del lines[1]["samples_s"], lines[1]["phases_s"]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert len(read_run(path).cases[0]["samples_s"]) == 6


def test_arrays_of_passes_stay_out_of_csv_and_json(tmp_path: Path) -> None:
    path = run_file(tmp_path, 3)
    for form in ("csv", "json"):
        assert "pass_medians" not in render((path,), tmp_path, form, None, ()).text


def plan(num_cases: int = 8, **settings: Any) -> PassPlan:
    return PassPlan(Settings(**settings), num_cases, is_compared=True)


@pytest.mark.parametrize(
    ("estimate_s", "pass_s", "passes"),
    [
        (0.01, 1.0, 40),  # 8 cases of 5 s each
        (0.5, 9.0, 8),  # four would fit, eight are needed
        (5.0, 50.0, 3),  # not even with some more: what cannot be compared takes no more than that
        (0.0001, 0.1, MAX_PASSES),
    ],
)
def test_the_budget_says_how_many_passes(estimate_s: float, pass_s: float, passes: int) -> None:
    result = plan()
    result.set_number(pass_s)
    assert result.num_passes == passes
    limits = result.limits(estimate_s)
    assert limits.min_samples == limits.max_samples >= 1
    assert limits.max_samples * estimate_s <= max(5.0 / 8, estimate_s)


def test_an_untimed_iteration_is_not_most_of_a_turn_unless_samples_are_long() -> None:
    quick = plan(num_cases=500, max_case_s=0.01)
    samples = {
        estimate_s: (quick.limits(estimate_s).max_samples, quick.limits(estimate_s, True).max_samples)
        for estimate_s in (0.01, 0.1, 1.0)
    }
    assert samples == {0.01: (2, 3), 0.1: (2, 2), 1.0: (1, 1)}


def test_passes_end_when_every_case_is_precise_and_never_before_the_eighth() -> None:
    result = plan()
    result.set_number(1.0)
    steady, noisy = [0.1] * 20, [0.1, 0.2] * 10
    assert result.goes_on(7, [steady[:7]] * 8)
    assert not result.goes_on(8, [steady[:8]] * 8)
    assert result.goes_on(20, [*[steady] * 7, noisy]) and not result.goes_on(64, [noisy] * 8)


def test_the_order_is_drawn_anew_in_each_pass_and_is_every_ranks() -> None:
    orders = [plan().order(number, 8) for number in range(5)]
    assert orders == [plan().order(number, 8) for number in range(5)]
    assert len({tuple(order) for order in orders}) == 5 and all(sorted(order) == list(range(8)) for order in orders)
    assert plan(seed=2).order(1, 8) != orders[1]


def test_the_order_of_passes_differs_between_launches() -> None:
    # One order for all launches has one case of a pair in the first place of most passes, of every launch.
    launches = [PassPlan(Settings(), 2, True, "call/bench", run_id=f"run-{number}") for number in range(200)]
    first = [sum(plan.order(number, 2)[0] == 0 for number in range(8)) for plan in launches]
    assert np.mean(first) == pytest.approx(4, abs=0.5) and np.std(first) == pytest.approx(2**0.5, abs=0.3)


def test_cases_that_are_compared_take_equal_turns_whatever_the_first_estimates() -> None:
    for settings in ({}, {"passes": 24}, {"iterations_per_sample": 10}):
        result = PassPlan(Settings(**settings), 3, is_compared="passes" not in settings)  # type: ignore[arg-type]
        turns = [CaseProgress(index, one) for index, one in enumerate(specs("x-a", "x-b", "x-c", "y-a", "-b"))]
        for turn, estimate_s in zip(turns, (0.0004, 0.004, 0.0009, 1e-5, 1e-5), strict=True):
            turn.estimate_s = turn.shortest_s = turn.longest_s = estimate_s
            turn.limits = result.limits(estimate_s)
        result.share_limits(turns)
        assert len({turn.limits for turn in turns[:3]}) == 1
        assert len({turn.longest_s for turn in turns[:3]}) == 1
        assert len({turn.needs_touch(True, True) for turn in turns[:3]}) == 1
        assert turns[3].longest_s == 1e-5, "another group has turns of its own"


def test_a_pass_of_short_cases_gets_longer_by_what_their_shared_turns_take_more() -> None:
    result = plan(num_cases=2)
    turns = [CaseProgress(index, one) for index, one in enumerate(specs("x-a", "x-b"))]
    for turn in turns:
        turn.estimate_s, turn.limits = 0.001, result.limits(0.001)
    assert result.share_limits(turns) == pytest.approx(2 * (20 - 5) * 0.001)
    assert result.share_limits(turns) == 0.0


def test_what_nobody_compares_is_measured_in_one_go() -> None:
    alone = PassPlan(Settings(), 8, is_compared=False)
    assert alone.num_passes == 1 and alone.order(0, 3) == [0, 1, 2] and not alone.goes_on(1, [])
    assert alone.limits(0.01).max_samples == Settings().max_samples
    fixed = PassPlan(Settings(passes=4), 8, is_compared=True)
    fixed.set_number(100.0)
    assert fixed.goes_on(3, []) and not fixed.goes_on(4, [])


def specs(*names: str) -> list[CaseSpec]:
    """Cases named group and letter, "-a" for one of no group."""
    return [CaseSpec(Case(name, "redistribute"), open=lambda: None, group=name.partition("-")[0]) for name in names]  # type: ignore[arg-type,return-value]


def ids(result: list[tuple[PassPlan, list[CaseSpec]]]) -> list[list[str]]:
    return [[one.case.id for one in group] for _, group in result]


def test_what_is_compared_takes_turns_with_its_like_and_with_nothing_else() -> None:
    result = groups_of(specs("x-a", "x-b", "-c", "y-a", "y-b", "y-c", "z-alone"), Settings())
    assert ids(result) == [["x-a", "x-b"], ["-c", "z-alone"], ["y-a", "y-b", "y-c"]]
    assert [plan.is_automatic for plan, _ in result] == [True, False, True]
    assert [plan.num_passes for plan, _ in result] == [8, 1, 8]
    orders = [[plan.order(number, 2) for number in range(20)] for plan, group in (result[0], result[2])]
    assert orders[0] != orders[1], "each group has an order of its own"


def test_passes_that_were_asked_for_go_through_the_whole_launch() -> None:
    ((plan, group),) = groups_of(specs("x-a", "x-b", "y-a"), Settings(passes=3))
    assert len(group) == 3 and plan.num_passes == 3 and not plan.is_automatic


def test_after_a_relaunch_finished_groups_are_left_out() -> None:
    cases = specs("x-a", "x-b", "y-a", "y-b", "z-a", "z-b")
    assert ids(groups_of(cases, Settings(), {"x-a", "x-b", "y-a"})) == [["y-a", "y-b"], ["z-a", "z-b"]]
    assert len(groups_of(cases, Settings(), set())) == 3


def test_short_cases_have_eight_turns_whatever_the_budget() -> None:
    result = plan()
    result.set_number(1000.0, stretch=float("inf"))
    assert result.num_passes == 8


def test_the_table_has_measured_and_predicted_memory_and_where_the_peak_lies(tmp_path: Path) -> None:
    of_cpu = {
        "peak_bytes": 3 << 20,
        "predicted_peak_bytes": 2 << 20,
        "peak_phase": "backward",
        "peak_owner": "layers.1",
    }
    no_prediction = {
        "peak_bytes": 1 << 20,
        "peak_phase": "forward",
        "peak_owner": "",
        "memory_reason": "it is compiled",
    }
    of_cuda = {"peak_bytes": 5 << 20, "peak_reserved_bytes": 8 << 20, "peak_phase": "optimizer"}
    old = {"peak_growth_bytes": 7 << 20}
    for many, wanted, absent in (
        ([of_cpu, no_prediction], ["3 MiB", "2 MiB", "layers.1", "the model", "it is compiled"], ["reserved"]),
        ([of_cuda], ["5 MiB", "8 MiB", "reserved", "optimizer"], ["predicted are"]),
        ([old], ["only the growth of resident memory"], ["7 MiB"]),
    ):
        path = tmp_path / "run.jsonl"
        cases = [step(f"v={number}", [0.1], counters=counters) for number, counters in enumerate(many)]
        lines = [{"type": "run", "schema_version": 2, "job": {"scenario": "mine"}}, *cases]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        text = render((path,), tmp_path, "table", None, (), full=True).text
        assert all(word in text for word in wanted) and not any(word in text for word in absent), text


def test_greedy_is_measured_again_on_every_eighth_pair_that_planners_are_compared_on() -> None:
    pairs = [
        CaseSpec(Case(f"{pair}/{name}", "redistribute", {"planner": name}), open=lambda: None, group=str(pair))  # type: ignore[arg-type,return-value]
        for pair in range(17)
        for name in ("min_cost", "greedy")
    ]
    alone = [CaseSpec(Case("x/greedy", "redistribute", {"planner": "greedy"}), open=lambda: None, group="x")]  # type: ignore[arg-type,return-value]
    again = with_baselines_again([*pairs, *alone], seed=1)[35:]
    assert len(again) == 3 and all(one.case.id == f"{one.group}/greedy (baseline again)" for one in again)
    assert with_baselines_again(pairs, seed=1)[34:] == again and with_baselines_again(pairs, seed=2)[34:] != again
    assert with_baselines_again(alone, seed=1) == alone
