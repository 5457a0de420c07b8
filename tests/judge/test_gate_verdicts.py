"""Every verdict of the gate, from run files whose times are known; and what may never be called a pass."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gate_runs import CASE, OTHER, case, launches, records, steady, taking_turns, write, write_side

from distbench.cli.options import share_of, tolerances_of
from distbench.judge.gate import CaseVerdict, Gated, gate
from distbench.judge.paired_launches import Pairing, difference_between
from distbench.records.baselines import read_side
from distbench.records.launches import tenth_percentile
from distbench.spec.errors import UserError
from distbench.statistics.significance import Flipped, LogDifference, flip_tests, outlying_pairs
from distbench.statistics.verdicts import METRICS, Options

FAMILY = "statistics.significance"


def compare(base: Path, new: Path, options: Options | None = None) -> Gated:
    return gate(launches(base), launches(new), options or Options())


def only(gated: Gated) -> CaseVerdict:
    assert len(gated.cases) == 1
    return gated.cases[0]


@pytest.mark.parametrize(
    ("after", "verdict", "exit_code"),
    [(1.2e-3, "regression", 1), (0.8e-3, "improvement", 0), (1.0e-3, "pass", 0), (1.02e-3, "pass", 0)],
)
def test_launches_that_took_turns(tmp_path: Path, after: float, verdict: str, exit_code: int) -> None:
    gated = compare(*taking_turns(tmp_path, 1e-3, after))
    result = only(gated)
    assert (result.verdict, gated.exit_code(), result.paired) == (verdict, exit_code, True)
    assert result.metrics[0].change == pytest.approx(after / 1e-3 - 1)
    low, high = result.metrics[0].low, result.metrics[0].high
    assert low is not None and high is not None and low < result.change < high
    assert result.metrics[0].num_launches == 10


def test_a_slowdown_below_the_tolerance_that_is_certain_is_still_a_pass(tmp_path: Path) -> None:
    base, new = taking_turns(tmp_path, 1e-3, 1.05e-3)
    assert only(compare(base, new, Options(tolerances=dict.fromkeys(METRICS, 0.1)))).verdict == "pass"
    # Certainly slower, but by exactly the tolerance: neither more than it nor surely less.
    assert only(compare(base, new)).verdict == "inconclusive"


def test_the_floor_in_microseconds_excuses_small_differences(tmp_path: Path) -> None:
    base, new = taking_turns(tmp_path, 10e-6, 13e-6)
    assert only(compare(base, new)).verdict == "regression"
    assert only(compare(base, new, Options(floor_s=5e-6))).verdict == "pass"


def test_a_tail_is_found_by_the_mean_though_most_samples_are_unchanged(tmp_path: Path) -> None:
    def tailed(index: int) -> list[float]:
        calm = steady(1e-3, index, 18)
        return [*calm, 3 * calm[0], 3 * calm[0]]

    base = write_side(tmp_path / "base", lambda index: {CASE: case(steady(1e-3, index, 20))})
    new = write_side(tmp_path / "new", lambda index: {CASE: case(tailed(index + 3))}, start=1050.0)
    result = only(compare(base, new))
    assert (result.verdict, result.metrics[0].metric, result.metrics[1].verdict) == ("regression", "mean", "pass")
    assert result.metrics[0].change == pytest.approx(0.2)


@pytest.mark.parametrize("count", [1, 2, 10, 11, 57])
def test_the_tenth_percentile_is_numpys(count: int) -> None:
    samples = np.random.default_rng(count).lognormal(size=count)
    assert tenth_percentile(samples.tolist()) == pytest.approx(np.quantile(samples, 0.1))


def test_below_the_minimum_of_launches_there_is_no_verdict(tmp_path: Path) -> None:
    gated = compare(*taking_turns(tmp_path, 1e-3, 2e-3, count=4))
    result = only(gated)
    assert (result.verdict, result.metrics[0].num_more) == ("inconclusive", 1)
    assert result.metrics[0].change == pytest.approx(1.0, abs=0.1)
    assert gated.exit_code() == 4, "what could not have failed may not pass"
    base, new = tmp_path / "base", tmp_path / "new"
    # Four pairs have 16 choices of signs: at 5 % none of them is rare enough, at 10 % the rarest is.
    assert only(compare(base, new, Options(min_launches=4))).verdict == "inconclusive"
    assert only(compare(base, new, Options(min_launches=4, alpha=0.1))).verdict == "regression"
    surer = only(compare(*taking_turns(tmp_path / "more", 1e-3, 2e-3, count=6), Options(alpha=0.01)))
    assert surer.reason == "6 pairs; a verdict needs at least 8"


def test_another_occasion_only_warns_unless_the_machine_is_dedicated(tmp_path: Path) -> None:
    base = write_side(tmp_path / "base", lambda index: {CASE: case(steady(1e-3, index))})
    new = write_side(tmp_path / "new", lambda index: {CASE: case(steady(1.5e-3, index))}, start=90_000.0)
    warned = compare(base, new)
    assert (only(warned).verdict, only(warned).suspected, warned.exit_code()) == ("inconclusive", "regression", 0)
    assert warned.exit_code(strict=True) == 3
    failed = compare(base, new, Options(dedicated=True))
    assert (only(failed).verdict, failed.exit_code(), only(failed).paired) == ("regression", 1, False)


def test_launches_that_ran_at_the_same_time_prove_nothing(tmp_path: Path) -> None:
    for place in range(20):
        side, time_s = (("base", 1e-3), ("new", 1.5e-3))[place % 2]
        start, one = 1000.0 + 50 * place, {CASE: case(steady(time_s, place // 2))}
        lines = records(f"{side}-{place}", start, one, finished_at=start + (80 if place == 2 else 40))
        write(tmp_path / side / f"{place}.jsonl", lines)
    for options in (Options(), Options(dedicated=True)):
        gated = compare(tmp_path / "base", tmp_path / "new", options)
        assert (only(gated).verdict, only(gated).suspected) == ("inconclusive", "regression")
        message = "launches base-2 and new-3 ran at the same time and disturb each other"
        assert (
            only(gated).reason == f"slower, but {message}; run the launches one after the other"
            and message in gated.designs[0]
        )


def test_scenarios_of_one_command_are_one_launch_when_they_are_paired(tmp_path: Path) -> None:
    """Two scenarios of 20 minutes each: between the two launches of one lie 20 minutes of the other."""
    for place in range(12):
        side = ("base", "new")[place % 2]
        for part, scenario in enumerate(("first", "second")):
            start = 1000.0 + 2500 * place + 1200 * part
            times = {"finished_at": start + 1200, "invocation_id": f"{side}-{place}", "scenario": scenario}
            lines = records(f"{place}-{scenario}", start, {CASE: case(steady(1e-3, place // 2))}, **times)
            write(tmp_path / side / f"{place}-{scenario}.jsonl", lines)
    gated = compare(tmp_path / "base", tmp_path / "new")
    assert [(one.verdict, one.paired, one.metrics[0].num_launches) for one in gated.cases] == [("pass", True, 6)] * 2


@pytest.mark.parametrize(("count", "improved"), [(5, False), (6, True)])
def test_improvements_and_regressions_share_the_five_percent(tmp_path: Path, count: int, improved: bool) -> None:
    """A regression may take one choice of signs in 32, an improvement the rest of 5 %: less than one in 32."""
    base, faster = taking_turns(tmp_path / "faster", 1e-3, 0.5e-3, count)
    assert only(compare(base, faster)).verdict == ("improvement" if improved else "pass")
    base, slower = taking_turns(tmp_path / "slower", 1e-3, 2e-3, count)
    result = only(compare(base, slower))
    assert result.verdict == "regression" and result.metrics[0].p == pytest.approx(2**-count / 0.625)


def test_foreign_load_on_one_side_makes_everything_inconclusive(tmp_path: Path) -> None:
    base, new = taking_turns(tmp_path, 1e-3, 1.5e-3, load_at_start=[3.6, 1.0, 1.0])
    result = only(compare(base, new))
    assert (result.verdict, result.suspected) == ("inconclusive", "regression")
    assert "10 % of the CPUs in the baseline, 90 % in the candidate" in result.reason
    quiet = tmp_path / "as-loaded"
    write_side(quiet, lambda index: {CASE: case(steady(1e-3, index))}, start=1020.0, load_at_start=[3.5, 1.0, 1.0])
    assert only(compare(quiet, new)).verdict == "regression"


def test_what_was_measured_of_foreign_load_is_believed_before_the_load_average(tmp_path: Path) -> None:
    base, new = taking_turns(tmp_path, 1e-3, 1.5e-3, load_at_start=[3.6, 1.0, 1.0], foreign_cpu=0.1)
    assert only(compare(base, new)).verdict == "regression"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("machine", "box-2"),
        ("device", "cuda"),
        ("backend", "nccl"),
        ("backend_class", "ProcessGroupNCCL2"),
        ("mesh", {"tp": 2}),
        ("world_size", 2),
        ("num_threads", 8),
        ("scheduler", "other"),
        ("scheduler", None),
        ("pipelined", 10),
        ("passes", 8),
    ],
)
def test_a_field_that_differs_is_named_and_forbids_the_comparison(tmp_path: Path, field: str, value: object) -> None:
    base, new = taking_turns(tmp_path, 1e-3, 1e-3, **{field: value})
    gated = compare(base, new)
    assert (only(gated).verdict, gated.exit_code()) == ("incomparable", 4)
    fact = "backend" if field == "backend_class" else field
    assert only(gated).reason.startswith(f"{fact}: ")
    allowed = compare(base, new, Options(allowed=(fact,)))
    assert only(allowed).verdict == "pass"
    assert len(allowed.stamps) == 1 and f"{fact}: " in allowed.stamps[0]


def test_another_dtype_is_incomparable_and_another_torch_is_only_shown(tmp_path: Path) -> None:
    base = write_side(tmp_path / "base", lambda index: {CASE: case(steady(1e-3, index))})
    bf16 = CASE.replace("f32", "bf16")
    new = write_side(tmp_path / "new", lambda index: {bf16: case(steady(1e-3, index))}, start=1050.0, torch="2.12.0")
    gated = compare(base, new)
    assert {one.case_id: one.verdict for one in gated.cases} == {CASE: "incomparable", bf16: "new"}
    assert gated.cases[0].reason == "dtype: f32 in the baseline, bf16 in the candidate"
    assert gated.shown == ["collectives: torch: 2.13.0 in the baseline, 2.12.0 in the candidate"]


def test_two_meshes_of_one_scenario_are_compared_each_with_its_own(tmp_path: Path) -> None:
    base, new = tmp_path / "base", tmp_path / "new"
    for name, size, factor in (("small", 2, 1.0), ("large", 8, 1.5)):
        for folder, start, after in ((base, 1000.0, 1.0), (new, 1050.0, factor)):
            for index in range(6):
                one = {CASE: case(steady(1e-3 * after, index))}
                lines = records(f"{folder.name}-{name}{index}", start + 100 * index, one, mesh={"tp": size})
                write(folder / f"{name}{index}.jsonl", lines)
    gated = compare(base, new)
    assert {one.scenario: one.verdict for one in gated.cases} == {
        "collectives (mesh tp=8)": "regression",
        "collectives (mesh tp=2)": "pass",
    }


def test_launches_of_other_parameters_are_paired_with_their_like(tmp_path: Path) -> None:
    """A greedy, A direct, B greedy, B direct, ...: neighbours in time hold other cases than each other."""
    for place in range(24):
        side, planner = ("base", "new")[place // 2 % 2], ("greedy", "direct")[place % 2]
        one = {f"redistribute/f32[8]/S(0)->R/{planner}": case(steady(1e-3, place // 4))}
        lines = records(f"{side}-{place}", 1000.0 + 10 * place, one, variants=[{"planners": planner}])
        write(tmp_path / side / f"{place:02}.jsonl", lines)
    gated = compare(tmp_path / "base", tmp_path / "new")
    assert [(one.verdict, one.paired, one.metrics[0].num_launches) for one in gated.cases] == [("pass", True, 6)] * 2


@pytest.mark.parametrize("status", ["wrong", "raised", "timeout", "aborted"])
@pytest.mark.parametrize("failing", [(0,), range(10)])
def test_a_case_that_fails_in_any_launch_never_passes(tmp_path: Path, status: str, failing: object) -> None:
    def cases(index: int) -> dict[str, dict[str, object]]:
        bad = index in failing  # type: ignore[operator]
        return {CASE: case(status=status, error="it broke") if bad else case(steady(1e-3, index)), OTHER: fine(index)}

    def fine(index: int) -> dict[str, object]:
        return case(steady(1e-3, index))

    base = write_side(tmp_path / "base", lambda index: {CASE: fine(index), OTHER: fine(index)})
    new = write_side(tmp_path / "new", cases, start=1050.0)
    gated = compare(base, new)
    assert [one.verdict for one in gated.cases] == ["invalid", "pass"]
    assert gated.exit_code() == 4
    assert status in gated.cases[0].reason and "it broke" in gated.cases[0].reason
    back = compare(new, base)
    expected = "new" if len(failing) == 10 else "invalid"  # type: ignore[arg-type]
    assert back.cases[0].verdict == expected


def test_missing_skipped_and_new_cases(tmp_path: Path) -> None:
    def both(index: int) -> dict[str, dict[str, object]]:
        return {CASE: case(steady(1e-3, index)), OTHER: case(steady(1e-3, index))}

    base = write_side(tmp_path / "base", both)
    for name, cases in {
        "gone": lambda index: {CASE: case(steady(1e-3, index))},
        "skipped": lambda index: {CASE: case(steady(1e-3, index)), OTHER: case(status="unsupported")},
        "once": lambda index: both(index) if index else {CASE: case(steady(1e-3, index))},
    }.items():
        new = write_side(tmp_path / name, cases, start=1050.0)
        gated = compare(base, new)
        assert {one.case_id: one.verdict for one in gated.cases} == {OTHER: "missing", CASE: "pass"}, name
        assert gated.exit_code() == 4
    back = compare(tmp_path / "gone", base)
    assert {one.case_id: one.verdict for one in back.cases} == {OTHER: "new", CASE: "pass"}
    assert back.exit_code() == 0


def test_a_candidate_launch_that_died_before_its_cases_is_missing_them(tmp_path: Path) -> None:
    base, new = taking_turns(tmp_path, 1e-3, 1e-3)
    write(new / "dead.jsonl", records("dead", 1975.0, {}, complete=False))
    gated = compare(base, new)
    assert (only(gated).verdict, gated.exit_code()) == ("missing", 4)
    assert gated.warnings[0] == "1 of 11 candidate launches did not finish"


def test_a_side_that_ran_second_in_every_pair_is_warned_about(tmp_path: Path) -> None:
    base, new = taking_turns(tmp_path, 1e-3, 1e-3)
    for sides, side in (((base, new), "candidate"), ((new, base), "baseline")):
        [message] = compare(*sides).warnings
        assert f"the {side} ran second in all 10 pairs" in message
    # One pair the other way round: the baseline's last launch right after the candidate's.
    write_side(base, lambda index: {CASE: case(steady(1e-3, 9))}, 10)
    write(base / "base-09.jsonl", records("base-09", 1990.0, {CASE: case(steady(1e-3, 9))}))
    assert compare(base, new).warnings == []


def test_other_processes_on_both_sides_are_reported(tmp_path: Path) -> None:
    base = write_side(tmp_path / "base", lambda index: {CASE: case(steady(1e-3, index))}, foreign_cpu=0.75)
    new = write_side(tmp_path / "new", lambda index: {CASE: case(steady(1e-3, index))}, start=1050.0, foreign_cpu=0.7)
    gated = compare(base, new)
    assert only(gated).verdict == "pass" and len(gated.warnings) == 2
    assert "75 % of the CPUs during the baseline and 70 % during the candidate" in gated.warnings[0]


def test_more_than_a_quarter_of_the_cpus_busier_is_inconclusive_however_launches_scatter(tmp_path: Path) -> None:
    """Baseline 0, candidate 0, .9, 0, .9, 0: docs/ci.md promises no verdict there, and FAIL was answered."""
    base, new = tmp_path / "base", tmp_path / "new"
    for index in range(5):
        for side, start, time_s, load in ((base, 1000.0, 1e-3, 0.0), (new, 1050.0, 2e-3, 0.9 * (index % 2))):
            lines = records(f"{side.name}-{index}", start + 100 * index, {CASE: case([time_s] * 5)}, foreign_cpu=load)
            write(side / f"{index}.jsonl", lines)
    gated = compare(base, new)
    assert (only(gated).verdict, only(gated).suspected, gated.exit_code()) == ("inconclusive", "regression", 0)
    assert "0 % of the CPUs in the baseline, 36 % in the candidate" in only(gated).reason


@pytest.mark.parametrize("cases", [{}, {CASE: case(status="skipped")}, {CASE: case([])}])
def test_nothing_measured_is_never_a_pass(tmp_path: Path, cases: dict[str, dict[str, object]]) -> None:
    base = write_side(tmp_path / "base", lambda index: cases)
    new = write_side(tmp_path / "new", lambda index: cases, start=1050.0)
    for left, right in ((base, new), (base, tmp_path / "nothing")):
        gated = compare(left, right)
        assert gated.exit_code() == 4 and not gated.counts.get("pass")


@pytest.mark.parametrize(("paired", "many"), [(True, 1500), (False, 1000)])
@pytest.mark.long
def test_what_is_rare_for_one_case_is_not_among_thousands(tmp_path: Path, paired: bool, many: int) -> None:
    draw = np.random.default_rng(2)
    slow = 0.15 + 0.085 * np.array([0.0, 1.3, -1.1, 0.6, -1.4, 0.9, -0.3])
    start = 1050.0 if paired else 90_000.0
    verdicts = {}
    for num_cases in (0, many):

        def side(shift: np.ndarray, num_cases: int = num_cases) -> Callable[[int], dict[str, dict[str, object]]]:
            def cases(index: int) -> dict[str, dict[str, object]]:
                times = np.exp(0.06 * draw.standard_normal(num_cases)).tolist()
                others = {f"collective/f32[{number}]/x/tp": case([time] * 3) for number, time in enumerate(times)}
                return {CASE: case([math.exp(shift[index])] * 3), **others}

            return cases

        base = write_side(tmp_path / f"base{num_cases}", side(np.zeros(7)), 7)
        new = write_side(tmp_path / f"new{num_cases}", side(slow), 7, start)
        gated = compare(base, new, Options(dedicated=True))
        verdict = next(one.verdict for one in gated.cases if one.case_id == CASE)
        verdicts[num_cases] = verdict, gated.num_tests
    assert verdicts == {0: ("regression", 2), many: ("inconclusive", 2 * many + 2)}


def test_the_worst_stands_first(tmp_path: Path) -> None:
    factors = {f"collective/f32[{size}]/x/tp": factor for size, factor in ((1, 1.0), (2, 1.5), (4, 2.0), (8, 0.5))}
    base = write_side(tmp_path / "base", lambda i: {name: case(steady(1e-3, i)) for name in factors})
    new = write_side(
        tmp_path / "new", lambda i: {name: case(steady(1e-3 * f, i + 3)) for name, f in factors.items()}, start=1050.0
    )
    gated = compare(base, new)
    order = [(one.verdict, one.case_id.split("[")[1][0]) for one in gated.cases]
    assert order == [("regression", "4"), ("regression", "2"), ("improvement", "8"), ("pass", "1")]
    assert gated.headline() == "FAIL: 2 regression, 1 improvement, 1 pass"


def test_a_run_on_both_sides_is_refused(tmp_path: Path) -> None:
    base, _ = taking_turns(tmp_path, 1e-3, 1e-3)
    with pytest.raises(UserError, match="base-00 is in the baseline and in the candidate"):
        compare(base, base)


def test_reading_a_folder_leaves_out_what_is_no_run_and_says_so(tmp_path: Path) -> None:
    base, _ = taking_turns(tmp_path, 1e-3, 1e-3)
    (base / "broken.jsonl").write_text("{}\n")
    (base / "logs").mkdir()
    (base / "logs" / "other.jsonl").write_text("{}\n")
    warnings: list[str] = []
    assert len(read_side([base], "baseline", warnings)) == 10
    assert len(warnings) == 1 and "broken.jsonl" in warnings[0]
    with pytest.raises(UserError, match="does not exist"):
        read_side([tmp_path / "nowhere"], "candidate", warnings)


@pytest.mark.parametrize(("text", "share"), [("5%", 0.05), ("0.05", 0.05), ("7.5 %", 0.075), ("150%", 1.5), ("0", 0)])
def test_tolerances_are_fractions_or_percent(text: str, share: float) -> None:
    assert share_of(text) == pytest.approx(share)


@pytest.mark.parametrize("text", ["5", "-1%", "five", "", "nan"])
def test_a_tolerance_that_could_mean_either_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="write 5% or"):
        share_of(text)


def test_each_metric_may_have_its_own_tolerance() -> None:
    assert tolerances_of(["10%", "p10=0.03"]) == {"mean": 0.1, "p10": 0.03}
    with pytest.raises(UserError, match="nearest: mean"):
        tolerances_of(["meen=5%"])


def test_what_differs_everywhere_is_said_once(tmp_path: Path) -> None:
    for side, torch in (("base", "2.13.0"), ("new", "2.12.0")):
        for scenario in "abcde":
            lines = records(f"{side}-{scenario}", 1000.0, {CASE: case([1.0])}, scenario=scenario, torch=torch)
            write(tmp_path / side / f"{scenario}.jsonl", lines)
    gated = compare(tmp_path / "base", tmp_path / "new")
    assert gated.shown == ["a, b, c and 2 more: torch: 2.13.0 in the baseline, 2.12.0 in the candidate"]


def spoiled_turns(tmp_path: Path, spoiled: dict[str, int], count: int = 10) -> Gated:
    """Four cases, one of them 20 % slower; launches of `spoiled`, by side, are three times slower in all of them."""
    names = [f"collective/f32[{size}]/all_gather/tp" for size in (8, 16, 32, 64)]

    def cases(side: str) -> Callable[[int], dict[str, dict[str, object]]]:
        def of_launch(index: int) -> dict[str, dict[str, object]]:
            factor = 3.0 if spoiled.get(side) == index else 1.0
            slower = {names[0]: 1.2} if side == "new" else {}
            shift = 3 if side == "new" else 0
            return {
                name: case(steady(1e-3 * factor * slower.get(name, 1.0), index + shift + place))
                for place, name in enumerate(names)
            }

        return of_launch

    base = write_side(tmp_path / "base", cases("base"), count)
    return compare(base, write_side(tmp_path / "new", cases("new"), count, start=1050.0))


@pytest.mark.parametrize("side", ["base", "new"])
def test_one_launch_three_times_slower_in_all_cases_hides_no_slowdown_and_is_named(tmp_path: Path, side: str) -> None:
    gated = spoiled_turns(tmp_path, {side: 4})
    assert gated.counts == {"regression": 1, "pass": 3}
    assert gated.cases[0].metrics[0].num_launches == 9
    assert gated.cases[0].change == pytest.approx(0.2, abs=0.02)
    [message] = [sentence for sentence in gated.designs if "left out: " in sentence]
    times = float(message.split(" took ")[1].split("x")[0])
    assert (
        "new-04" in message
        and "base-04" in message
        and times == pytest.approx(3.0 if side == "new" else 1 / 3, abs=0.15)
    )


def test_launches_are_kept_where_several_are_far_apart_or_too_few_would_remain(tmp_path: Path) -> None:
    """A candidate that is sometimes slow stays undecided, and 5 pairs need all five for a verdict."""
    for number, (spoiled, count) in enumerate([({"new": 4, "base": 6}, 10), ({"new": 2}, 5), ({}, 10)]):
        gated = spoiled_turns(tmp_path / str(number), spoiled, count)
        assert {case.metrics[0].num_launches for case in gated.cases} == {count}
        assert not any("left out" in sentence for sentence in gated.designs)


def test_the_signs_of_differences_do_not_decide_which_pair_is_left_out() -> None:
    """So that flipping them stays exact (Westfall and Young): the same pair for every choice of signs."""
    draw = np.random.default_rng(1)
    differences = 0.1 * draw.standard_normal((2, 30, 10))
    differences[:, :, 7] += 1.1
    for signs in draw.choice([-1.0, 1.0], size=(50, 10)):
        outlying, _ = outlying_pairs([each * signs for each in differences], least=5)
        assert np.flatnonzero(outlying).tolist() == [7]


def swapped_sides(sides: Sequence[np.ndarray], pairing: Pairing) -> LogDifference:
    other = replace(pairing, baseline=pairing.candidate, candidate=pairing.baseline)
    return difference_between(sides[::-1], other)


def each_row_alone(blocks: Sequence[np.ndarray], min_pairs: int, alpha: float) -> list[Flipped]:
    flipped = []
    for block in blocks:
        rows = [flip_tests([row[None]], min_pairs, alpha)[0] for row in block]
        columns = (np.concatenate([getattr(row, name) for row in rows]) for name in ("slower", "faster", "error"))
        flipped.append(Flipped(*columns, rows[0].critical, np.concatenate([row.freedom for row in rows])))
    return flipped


def of_zero_width(self: LogDifference) -> tuple[np.ndarray, np.ndarray]:
    return self.estimate, self.estimate


@pytest.mark.parametrize(
    ("function", "mutant", "check", "arguments"),
    [
        ("judge.gate.difference_between", swapped_sides, test_launches_that_took_turns, (1.2e-3, "regression", 1)),
        (f"{FAMILY}.flip_tests", each_row_alone, test_what_is_rare_for_one_case_is_not_among_thousands, (True, 1500)),
        (f"{FAMILY}.holm", lambda p: p, test_what_is_rare_for_one_case_is_not_among_thousands, (False, 1000)),
        (f"{FAMILY}.LogDifference.interval", of_zero_width, test_launches_that_took_turns, (1.0e-3, "pass", 0)),
    ],
    ids=["swapped sides", "no correction for pairs", "no correction without pairs", "interval of zero width"],
)
@pytest.mark.long
def test_a_mistake_in_a_comparison_is_noticed(
    function: str,
    mutant: object,
    check: Callable[..., None],
    arguments: tuple[object, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Mutants of verdicts: a check above, which passes without the mistake, must fail with it."""
    monkeypatch.setattr(f"distbench.{function}", mutant)
    with pytest.raises(AssertionError):
        check(tmp_path, *arguments)
