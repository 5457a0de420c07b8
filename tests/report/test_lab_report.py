"""The laboratory's findings on run files made up as data; every expected number is worked out by hand."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from lab_rows import HEADER, MIB, Row, broken, moved, write

from distbench.records.dataframe import frame_of
from distbench.records.results_folder import collect
from distbench.report.planner_study import (
    BETTER_OF_TORCH,
    CHOSEN,
    MAX_EXACT_SIZES,
    Study,
    Tally,
    is_laboratory,
    laboratory_rows,
    pattern_of,
    planner_table_of,
    proof_lines,
    size_classes,
    studies_of,
)

NOWHERE = Path("nowhere")
A, B, C, LOCAL = "S(0)R->RS(0)", "S(1)R->RS(1)", "P(sum)R->RR", "RR->RS(0)"


def four_pairs() -> list[Row]:
    """A: greedy 4 ms, min_cost and calibrated 2, direct 1. B: min_cost errs. C: one path. LOCAL: nobody speaks."""
    bound = MIB // 4
    return [
        moved(A, "greedy", 4, "a", predicted_ms=5, sent=MIB, bound=bound),
        moved(A, "min_cost", 2, "b", predicted_ms=3, sent=MIB // 2, bound=bound),
        moved(A, "calibrated", 2, "b", predicted_ms=3, sent=MIB // 2, bound=bound),
        moved(A, "direct", 1, "a-[direct]", predicted_ms=1.5, sent=bound, bound=bound),
        moved(B, "greedy", 1, "c", predicted_ms=1.2, sent=bound, bound=bound),
        moved(B, "min_cost", 4, "d", predicted_ms=1.1, sent=2 * MIB, bound=bound),
        moved(B, "calibrated", 1, "c", predicted_ms=1.2, sent=bound, bound=bound),
        moved(B, "direct", 2, "c-[direct]", predicted_ms=3, sent=bound, bound=bound),
        *(moved(C, planner, 8, "e", predicted_ms=8) for planner in ("greedy", "min_cost", "calibrated")),
        *(moved(LOCAL, p, 0.1, "l", num_collectives=0, bound=0) for p in ("greedy", "min_cost", "calibrated")),
        moved(LOCAL, "direct", 0.01, "l-[local]", num_collectives=0, bound=0, predicted_ms=0),
    ]


def study_in(folder: Path, rows: list[Row], *more: list[Row]) -> Study:
    for number, of_file in enumerate((rows, *more)):
        write(folder / f"run{number}.jsonl", of_file)
    runs, _ = collect((folder,), NOWHERE)
    frame = frame_of(runs)
    cuts = [0]
    for run in runs:
        cuts.append(cuts[-1] + len(run.cases))
    (study,) = studies_of(runs, [frame.iloc[start:stop] for start, stop in pairwise(cuts)])
    return study


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Study:
    return study_in(tmp_path_factory.mktemp("lab"), four_pairs())


def matchup(study: Study, planner: str, baseline: str = "greedy") -> Tally:
    result = study.against(planner, baseline)
    assert result is not None
    return result


@pytest.mark.parametrize(
    ("planner", "counts", "mean"),
    [
        # (pairs that communicate, not as greedy, faster, slower, much slower), mean of A, B and C's ratios
        ("min_cost", (3, 2, 1, 1, 1), (0.5 * 4 * 1) ** (1 / 3)),
        ("calibrated", (3, 1, 1, 0, 0), (0.5 * 1 * 1) ** (1 / 3)),
        ("direct", (2, 2, 1, 1, 1), (0.25 * 2) ** (1 / 2)),
    ],
)
def test_against_greedy(study: Study, planner: str, counts: tuple[int, ...], mean: float) -> None:
    assert matchup(study, planner)[:5] == counts
    assert matchup(study, planner).mean[0] == pytest.approx(mean)


@pytest.mark.parametrize(
    ("planner", "counts", "mean"),
    [
        # torch's better one is min_cost on A, greedy on B and, as fast, on C; nobody is held against itself.
        ("greedy", (1, 1, 0, 1, 1), 2),
        ("min_cost", (2, 1, 0, 1, 1), 4 ** (1 / 2)),
        ("calibrated", (3, 0, 0, 0, 0), 1.0),
        ("direct", (2, 2, 1, 1, 1), 1.0),
    ],
)
def test_against_the_better_of_torchs_two(study: Study, planner: str, counts: tuple[int, ...], mean: float) -> None:
    assert matchup(study, planner, BETTER_OF_TORCH)[:5] == counts
    assert matchup(study, planner, BETTER_OF_TORCH).mean[0] == pytest.approx(mean)


@pytest.mark.parametrize(
    ("name", "num_pairs", "mean", "worst", "share_near"),
    [
        # The best are direct's 1 ms on A, greedy's 1 ms on B, 8 ms on C. Predictions choose direct, min_cost, greedy.
        ("greedy", 3, 4 ** (1 / 3), 4, 2 / 3),
        ("min_cost", 3, (2 * 4) ** (1 / 3), 4, 1 / 3),
        ("calibrated", 3, 2 ** (1 / 3), 2, 2 / 3),
        ("direct", 2, 2 ** (1 / 2), 2, 1 / 2),
        (CHOSEN, 3, 4 ** (1 / 3), 4, 2 / 3),
    ],
)
def test_regret(study: Study, name: str, num_pairs: int, mean: float, worst: float, share_near: float) -> None:
    result = study.regrets[name]
    assert result.num_pairs == num_pairs
    assert (result.mean, result.worst, result.share_near) == pytest.approx((mean, worst, share_near))


def test_choosing_by_prediction_over_greedy(study: Study) -> None:
    assert study.chosen_ratio[0] == pytest.approx((0.25 * 4 * 1) ** (1 / 3))


def test_torchs_own_path_is_left_for_a_clear_predicted_gain_only(tmp_path: Path) -> None:
    """A: calibrated is predicted 5 % faster than greedy, and takes twice as long; B: 20 % faster, and is."""
    rows = [moved(A, "greedy", 1, "a", predicted_ms=1), moved(A, "min_cost", 1, "a", predicted_ms=1)]
    rows += [moved(A, "calibrated", 2, "b", predicted_ms=0.95)]
    rows += [moved(B, "greedy", 1, "a", predicted_ms=1), moved(B, "min_cost", 1, "a", predicted_ms=1)]
    rows += [moved(B, "calibrated", 0.8, "b", predicted_ms=0.8)]
    assert study_in(tmp_path, rows).chosen_ratio[0] == pytest.approx((1 * 0.8) ** 0.5)


def test_how_often_another_path_is_planned(study: Study) -> None:
    result = {place[:2]: (d.num_differing, d.num_pairs) for place, d in study.differences.items() if place[2] == ""}
    assert result == {
        ("min_cost", "greedy"): (2, 4),
        ("calibrated", "greedy"): (1, 4),
        ("calibrated", "min_cost"): (1, 4),
    }


def test_prediction_errors_and_ranking(study: Study) -> None:
    result = {planner: error for (planner, size), error in study.errors.items() if size == ""}
    # greedy |5/4-1|, |1.2-1|, 0; min_cost |3/2-1|, |1.1/4-1|, 0; direct |1.5-1|, |3/2-1|. LOCAL needs nobody to speak.
    assert {name: error.error for name, error in result.items()} == pytest.approx(
        {"greedy": 0.2, "min_cost": 0.5, "calibrated": 0.2, "direct": 0.5}
    )
    assert result["greedy"].bias == pytest.approx(1.2)
    assert result["direct"].num_pairs == 2
    # A: a, b, direct, all three apart, all right. B: c before direct right, d before direct wrong, c and d not apart.
    assert study.ranking == (5, 4)


def test_bytes_over_the_bound_and_the_most_striking_pair(study: Study) -> None:
    assert study.sent_over_bound == pytest.approx({"greedy": 2, "min_cost": 4, "calibrated": 2**0.5, "direct": 1})
    (pair,) = study.largest_gains
    assert study.table.pairs.iloc[pair.pair]["source"] == "S(0)R"
    assert (pair.planner, pair.ratio[0]) == ("direct", pytest.approx(0.25))


def test_greedy_measured_again_is_a_proof_and_no_planner(tmp_path: Path) -> None:
    """Of two pairs that greedy moves twice, one differs by 30 % in each pass: it alone is called different."""
    rows = []
    for number, pair in enumerate((A, B)):
        again = moved(pair, "greedy", 4 if number else 5.2, "a")
        again["case"]["id"] += " (baseline again)"
        rows += [again, moved(pair, "greedy", 4, "a"), moved(pair, "min_cost", 4, "b")]
    rows.append(moved(A, "calibrated", 4, "c"))
    result = study_in(tmp_path, rows)
    ratios = result.ratios["min_cost", "greedy"]
    assert (ratios.num_controls, ratios.num_false) == (2, 1)
    assert proof_lines([ratios]) == ["control: 1 of 2 comparisons of a path with itself differ"]
    assert result.table.planners == ("greedy", "min_cost", "calibrated") and result.table.times[
        0
    ].tolist() == pytest.approx([4e-3, 4e-3], rel=0.01)
    assert sum(result.outcomes["greedy"].values()) == 2


def test_same_path_run_as_another_collective_is_no_control(tmp_path: Path) -> None:
    rows = [moved(A, "greedy", 4, "a"), moved(A, "min_cost", 4, "a"), moved(A, "greedy+native", 2, "a")]
    rows[2]["backend_op"] = "all_to_all"
    result = study_in(tmp_path, rows)
    assert matchup(result, "greedy+native")[1:4] == (1, 1, 0)
    assert matchup(result, "min_cost")[1:4] == (0, 0, 0)


def test_pairs_that_run_the_same_path_prove_the_table(tmp_path: Path) -> None:
    """20 of them differ by chance alone, one by 10 % in each pass: only that one is called different, and is told."""
    same = [
        moved(B, planner, 1.1 if planner == "min_cost" and not number else 1, "c", suite=f"s{number}")
        for number in range(21)
        for planner in ("greedy", "min_cost")
    ]
    judged = [moved(A, "greedy", 4, "a"), moved(A, "min_cost", 3, "b"), moved(A, "calibrated", 1, "x")]
    result = study_in(tmp_path, [*judged, *same])
    ratios = result.ratios["min_cost", "greedy"]
    assert (ratios.num_controls, ratios.num_false) == (21, 1)
    assert matchup(result, "min_cost")[1:4] == (1, 1, 0)
    assert proof_lines([ratios]) == ["control: 1 of 21 comparisons of a path with itself differ"]


def test_of_one_pass_nothing_is_called_faster(tmp_path: Path) -> None:
    rows = [moved(A, "greedy", 4, "a"), moved(A, "min_cost", 2, "b"), moved(A, "calibrated", 4, "a")]
    for record in rows:
        record["samples_s"] *= 2  # which `write` leaves in one piece
    result = study_in(tmp_path, rows)
    assert matchup(result, "min_cost")[:5] == (1, 1, 0, 0, 0) and matchup(result, "min_cost").mean[0] == pytest.approx(
        0.5
    )
    assert "fewer than 8 passes give no verdicts" in " ".join(result.ratios["min_cost", "greedy"].sentences)
    assert not result.largest_gains


def test_times_of_different_runs_are_not_compared(tmp_path: Path) -> None:
    natives = [moved(A, f"{planner}+native", 0.01, "a") for planner in ("greedy", "min_cost", "calibrated")]
    result = study_in(tmp_path, four_pairs(), natives)
    assert result.against("greedy+native") is None
    assert result.regrets["direct"].mean == pytest.approx(2**0.5)


def test_a_run_that_is_all_native_is_judged_by_its_own_greedy(tmp_path: Path) -> None:
    rows = [moved(A, "greedy+native", 4, "a"), moved(A, "min_cost+native", 2, "b"), moved(A, "direct+native", 1, "x")]
    result = study_in(tmp_path, rows)
    assert result.is_native
    assert (matchup(result, "min_cost").mean[0], matchup(result, "direct").mean[0]) == pytest.approx((0.5, 0.25))


def test_large_pairs_are_in_focus_where_there_are_enough(tmp_path: Path) -> None:
    def pair(number: int, shape: tuple[int, int], ratio: float) -> list[Row]:
        greedy = moved(A, "greedy", 1, "a", suite=f"s{number}", shape=shape)
        return [greedy, moved(A, "calibrated", ratio, "b", suite=f"s{number}", shape=shape)]

    small = [record for number in range(50) for record in pair(number, (64, 64), 2.0)]
    large = [record for number in range(20) for record in pair(number, (512, 512), 0.5)]
    result = study_in(tmp_path, [*small, *large])
    assert matchup(result, "calibrated").mean[0] == pytest.approx(0.5)
    by_size = {
        place[3]: tally.mean[0] for place, tally in result.tallies.items() if place[2] and place[0] == "calibrated"
    }
    assert by_size == pytest.approx({"16 KiB": 2.0, "1 MiB": 0.5})


def failing() -> list[Row]:
    """Three flattened pairs that greedy gets wrong, one Partial it cannot reach, one case that killed its launch."""
    flat: dict[str, Any] = {"suite": "flattened", "mesh_shape": [2, 2], "flattened": ["dp_shard", "tp"]}
    rows = []
    for shape in ((9, 3), (5, 3), (7, 3)):
        rows.append(broken("S(0)S(0)->RR", "greedy", "wrong", "rank 0: element 9 is 0, it must be 9", shape, **flat))
        rows += [broken("S(0)S(0)->RR", planner, "ok", None, shape, **flat) for planner in ("calibrated", "direct")]
    partial: dict[str, Any] = {"suite": "partials", "mesh_shape": [2, 2]}
    rows.append(broken("S(0)R->P(sum)R", "greedy", "raised", "not supported yet", (8, 8), **partial))
    rows.append(broken("S(0)R->P(sum)R", "calibrated", "ok", None, (8, 8), **partial))
    rows.append(broken("_S(0,3)R->RR", "min_cost", "aborted", "signal 6", (12, 4), suite="strided"))
    return rows


def test_failures_are_grouped_by_cause_with_the_smallest_and_with_what_ours_did(tmp_path: Path) -> None:
    result = study_in(tmp_path, [*four_pairs(), *failing()])
    wrong, raised, aborted = result.failures
    assert (wrong.status, wrong.planner, wrong.suite, wrong.num_cases) == ("wrong", "greedy", "flattened", 3)
    assert wrong.pattern == "nested shards, uneven, a flattened mesh exists"
    assert wrong.example["shape"] == "5x3"
    assert wrong.ours == {"calibrated": {"ok": 3}, "direct": {"ok": 3}}
    assert (raised.status, raised.pattern, raised.ours) == ("raised", "Shard to Partial", {"calibrated": {"ok": 1}})
    assert (aborted.status, aborted.pattern, aborted.ours) == ("aborted", "strided shards", {})
    assert result.outcomes["greedy"] == {"ok": 4, "wrong": 3, "raised": 1}


@pytest.mark.parametrize(
    ("source", "target", "more", "pattern"),
    [
        ("S(0)R", "RS(1)", {}, "plain layouts"),
        ("S(0)S(1)", "S(1)S(0)", {"shape": "5x8"}, "uneven"),
        ("S(0)[1]S(0)[0]", "RR", {}, "explicit shard order, nested shards"),
        ("P(max)S(0)", "RR", {}, "from Partial max"),
        ("RR", "P(sum)R", {}, "to Partial"),
        ("S(0)R", "RR", {"direction": "backward"}, "backward"),
        ("_S(0, 2)S(0)", "RR", {}, "strided shards, nested shards"),
    ],
)
def test_what_a_pair_has_that_is_special(source: str, target: str, more: Row, pattern: str) -> None:
    plain = {"shape": "8x8", "mesh_shape": "2x2", "flattened": "", "direction": "forward"}
    assert pattern_of({"source": source, "target": target, **plain, **more}) == pattern


def test_which_runs_are_a_laboratorys(tmp_path: Path) -> None:
    def frame(rows: list[Row]) -> Any:
        return frame_of(collect((write(tmp_path / "one.jsonl", rows),), NOWHERE)[0])

    two = [moved(A, "greedy", 1, "a"), moved(A, "min_cost", 1, "a")]
    assert not is_laboratory(frame(two))
    assert is_laboratory(frame([*two, moved(A, "direct", 1, "b")]))
    assert is_laboratory(frame([moved(A, "greedy", 1, "a", suite="pairs")]))


def test_the_mesh_is_the_rows_own_else_the_runs(tmp_path: Path) -> None:
    rows = [moved(A, "greedy", 1, "a", mesh_shape=[4]), moved(A, "greedy", 1, "a")]
    rows[0]["case"]["id"] += "/on 4"
    frame = frame_of(collect((write(tmp_path / "one.jsonl", rows),), NOWHERE)[0])
    assert laboratory_rows(frame)["mesh_shape"].tolist() == ["4", "2x2"]
    assert [mesh for mesh, _, _ in planner_table_of(laboratory_rows(frame)).groups()] == ["2x2", "4"]


def test_many_sizes_become_classes() -> None:
    import numpy as np

    assert size_classes(np.array([16384.0, 1 << 20])) == ["16 KiB", "1 MiB"]
    many = np.array([60.0, 4096.0, 70000.0, 2e6, 3e6, 2e7, 3e7])
    assert len(many) > MAX_EXACT_SIZES
    assert size_classes(many) == [
        "under 4 KiB", "4 to 64 KiB", "64 KiB to 1 MiB", "1 to 16 MiB", "1 to 16 MiB",
        "16 MiB and more", "16 MiB and more",
    ]  # fmt: skip


def test_machines_are_told_apart(tmp_path: Path) -> None:
    other = json.loads(json.dumps(HEADER))
    other["environment"]["machine"] = "box-2"
    write(tmp_path / "a.jsonl", four_pairs())
    write(tmp_path / "b.jsonl", four_pairs(), other)
    runs, _ = collect((tmp_path,), NOWHERE)
    frame = frame_of(runs)
    half = len(frame) // 2
    assert [study.machine for study in studies_of(runs, [frame[:half], frame[half:]])] == ["box-1", "box-2"]


def test_odd_rows_crash_nothing(tmp_path: Path) -> None:
    rows = [
        {"type": "case", "case": {"id": "x", "kind": "redistribute", "params": {"suite": "pairs"}}, "status": "ok",
         "samples_s": [1.0]},
        {"type": "case", "case": {"id": "y", "kind": "redistribute", "params": {"suite": "pairs"}}, "status": "wrong"},
        {"type": "case", "case": {"id": "z", "kind": "redistribute", "params": {"suite": "odd", "shape": []}},
         "status": "timeout", "samples_s": [], "counters": None},
    ]  # fmt: skip
    result = study_in(tmp_path, rows)
    assert sum(failure.num_cases for failure in result.failures) == 2


def test_an_unknown_path_is_not_taken_for_the_same_one(tmp_path: Path) -> None:
    rows = [moved(A, "greedy", 4, "a"), moved(A, "min_cost", 2, "a"), moved(A, "direct", 4, "b")]
    for record in rows[:2]:
        record["counters"]["path"] = None
    assert matchup(study_in(tmp_path, rows), "min_cost")[1:4] == (1, 1, 0)
