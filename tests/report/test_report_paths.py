"""Traces of steps, whose figures were chosen so that every answer can be worked out by hand (see trace_records)."""

import json
from pathlib import Path
from typing import Any

import pytest
import trace_records as golden
from trace_records import STEP, collective, record, run_file

from distbench.report import chosen, render_difference, render_paths, selected_trace
from distbench.report.trace_rows import PATH, Trace, busy_share, costs, doubts, lanes_of, left_of
from distbench.report.trace_timeline import timeline_figures
from distbench.spec.errors import UserError

OUT = Path("nowhere")
FORWARD_TP = ("forward", "tp", "all_gather", "tp")
FORWARD_FSDP = ("forward", "fsdp", "all_gather", "dp_shard")


def trace_of(tmp_path: Path, *args: Any, **more: Any) -> Trace:
    return selected_trace(run_file(tmp_path / "a.jsonl", record(*args, **more)))[0]


def by_path(trace: Trace) -> dict[Any, dict[Any, Any]]:
    return {tuple(row[key] for key in PATH): row for row in costs(trace, PATH).to_dict("records")}


def text_of(path: Path, form: str = "table") -> str:
    return render_paths((path,), OUT, form)[0]


def test_a_path_is_the_mean_over_ranks_and_the_median_over_steps(tmp_path: Path) -> None:
    result = by_path(trace_of(tmp_path))
    # Two all-gathers: 20 ms on ranks 0 to 2, 14 on rank 3; steps of 100 and 200 ms.
    fsdp = result[FORWARD_FSDP]
    assert (fsdp["count"], fsdp["payload_bytes"], fsdp["wire_bytes"]) == (2, 4000, 2000)
    assert fsdp["time_s"] == pytest.approx(0.0185)
    assert fsdp["share_of_step"] == pytest.approx((0.185 + 0.0925) / 2)
    # 20, 20, 8 and 20 ms.
    assert result[FORWARD_TP]["time_s"] == pytest.approx(0.017)
    assert [key[0] for key in result] == ["forward"] * 2 + ["backward"] * 3
    (whole,) = costs(trace_of(tmp_path), ()).to_dict("records")
    assert (whole["count"], whole["payload_bytes"]) == (6, 18016)
    assert whole["time_s"] == pytest.approx(0.0435)


def test_who_waited_is_matched_by_step_group_and_place_in_it(tmp_path: Path) -> None:
    trace = trace_of(tmp_path)
    result = by_path(trace)
    # Rank 1 waits 6 of 74 ms for rank 3 over dp_shard; rank 3 waits 12 of 68 ms for rank 2 over tp, and nobody else
    # does, though ranks 0 and 1 take as long.
    assert result[FORWARD_FSDP]["straggler_share"] == pytest.approx(6 / 74)
    assert result[FORWARD_TP]["straggler_share"] == pytest.approx(12 / 68)
    waited = trace.rows[trace.rows["straggler_s"] > 1e-9]
    assert set(zip(waited["rank"], waited["mesh_dim"], strict=True)) == {(1, "dp_shard"), (3, "tp")}
    assert sorted(waited["straggler_s"]) == pytest.approx([0.006, 0.006, 0.012, 0.012])


def test_steps_are_not_mixed_up_when_one_of_them_is_slow(tmp_path: Path) -> None:
    slow = record()
    at = {name: place for place, name in enumerate(slow["columns"])}
    for row in slow["rows"]:
        if row[at["step"]] == 1:
            row[at["completed_s"]] += 1.0
    result = by_path(selected_trace(run_file(tmp_path / "a.jsonl", slow))[0])
    # The later step is a second longer on all ranks: nobody waits for anybody because of that.
    assert result[FORWARD_FSDP]["straggler_share"] == pytest.approx(2 * 6 / (74 + 8074))
    assert result[FORWARD_TP]["time_s"] == pytest.approx(0.017 + 0.5)


def test_a_rank_that_told_of_nothing_is_noticed_and_counts_as_none(tmp_path: Path) -> None:
    quiet = record()
    rank = quiet["columns"].index("rank")
    quiet["rows"] = [row for row in quiet["rows"] if row[rank] != 0]
    trace = selected_trace(run_file(tmp_path / "a.jsonl", quiet))[0]
    result = by_path(trace)
    assert trace.ranks == (0, 1, 2, 3)
    assert result[FORWARD_FSDP]["count"] == 1.5
    assert result[FORWARD_FSDP]["time_s"] == pytest.approx((0.02 + 0.02 + 0.014) / 4)
    # How long its partners waited is not known, and what they spent counts for no share of waiting: left are rank 1's
    # and 3's 20 and 14 ms over dp_shard, rank 2's and 3's 8 and 20 over tp.
    lonely = trace.rows[trace.rows["group"].isin(["0,1", "0,2"])]
    assert len(lonely) == 12 and lonely["straggler_s"].isna().all()
    assert result[FORWARD_FSDP]["straggler_share"] == pytest.approx(6 / 34)
    assert result[FORWARD_TP]["straggler_share"] == pytest.approx(12 / 28)
    message = " ".join(doubts(trace))
    assert "rank 0 recorded no collective" in message and "12 of 24 collectives are missing on some ranks" in message
    quiet["phases"]["rows"] = [row for row in quiet["phases"]["rows"] if row[0] != 0]
    assert selected_trace(run_file(tmp_path / "a.jsonl", quiet))[0].ranks == (0, 1, 2, 3)


def test_one_slow_step_of_three_does_not_move_the_median(tmp_path: Path) -> None:
    slow = record(rows=golden.rows_of(steps=3))
    at = {name: place for place, name in enumerate(slow["columns"])}
    for row in slow["rows"]:
        row[at["completed_s"]] += float(row[at["step"]] == 1)
    trace = selected_trace(run_file(tmp_path / "a.jsonl", slow))[0]
    assert by_path(trace)[FORWARD_TP]["time_s"] == pytest.approx(0.017)


def test_ranks_that_ran_different_steps_are_told(tmp_path: Path) -> None:
    mixed = record()
    kind = mixed["columns"].index("kind")
    mixed["rows"][0][kind] = "broadcast"
    trace = selected_trace(run_file(tmp_path / "a.jsonl", mixed))[0]
    assert doubts(trace_of(tmp_path)) == []
    assert "1 of 24 collectives have another kind on another rank" in " ".join(doubts(trace))


def test_a_step_without_a_path_counts_as_none_of_it(tmp_path: Path) -> None:
    uneven = record()
    phase, step = uneven["columns"].index("phase"), uneven["columns"].index("step")
    uneven["rows"] = [row for row in uneven["rows"] if not (row[phase] == "backward" and row[step] == 1)]
    result = by_path(selected_trace(run_file(tmp_path / "a.jsonl", uneven))[0])
    assert result["backward", "fsdp", "reduce_scatter", "dp_shard"]["count"] == 0.5
    assert result["backward", "fsdp", "reduce_scatter", "dp_shard"]["time_s"] == pytest.approx(0.001)


@pytest.mark.long
def test_exposed_share_where_the_backend_can_overlap(tmp_path: Path) -> None:
    half = tuple({**one, "exposed_s": max(one["each_s"]) / 2} for one in STEP if one["mesh_dim"] == "tp")
    trace = trace_of(tmp_path, half, exposed_reason=None)
    assert by_path(trace)["backward", "tp", "reduce_scatter", "tp"]["exposed_share"] == pytest.approx(0.5)
    assert by_path(trace)[FORWARD_TP]["exposed_share"] == pytest.approx(40 / 68)
    assert "n/a" not in text_of(trace.run.path)
    text = text_of(run_file(tmp_path / "a.jsonl", record()))
    assert "n/a" in text and f"exposed share unknown: {golden.REASON}" in text


@pytest.mark.long
def test_the_text_says_where_time_goes_and_how_far_to_trust_it(tmp_path: Path) -> None:
    text = text_of(run_file(tmp_path / "a.jsonl", record()))
    flat = " ".join(text.split())
    assert max(map(len, text.splitlines())) <= 120
    # 18 of 174 ms of collectives are waiting; 43.5 of 100 ms and of 200 are in some collective.
    assert "takes 150 ms on 4 ranks; a collective is in progress in 33 % of a rank's step; ranks wait" in flat
    assert "at the same time" not in flat
    assert "tp all_gather tp 1 1.95 KiB 1000 B 17.0 ms 13 % 18 % n/a" in flat
    order = ("forward 3", "fsdp all_gather", "tp all_gather", "backward 3", "tp reduce_scatter", "whole step 6")
    assert [flat.count(words) for words in order[:2]] == [1, 1]
    assert sorted(order, key=flat.index) == list(order)
    assert "layers.*.attention 2 5.86 KiB 22.0 ms 16 % 14 % forward tp all_gather +1" in flat
    assert "S(1)->R implicit tp all_gather 1 1.95 KiB 17.0 ms layers.*.attention" in flat
    assert "P(sum)->S(1) explicit tp reduce_scatter 1 3.91 KiB 5.00 ms layers.*.attention" in flat
    assert "the owner is known for 40 of 48 collectives (83 %)" in flat
    assert "1.05x the CPU time of an untraced step (median of 3 interleaved rounds, 1.04 to 1.08)" in flat
    assert "dispatch mode, a second method, recorded the same kind, group and bytes for all 24 collectives" in flat
    assert "3 MiB measured (torch's allocator), 2 MiB predicted" in flat
    assert "reduce_scatter runs as all_reduce on gloo" in flat


def test_collectives_at_the_same_time_are_not_time_twice(tmp_path: Path) -> None:
    twice = (*STEP, collective("forward", "tp", "all_gather", "tp", 2000, "layers.0.attention", 30, 20, 20, 8, 20))
    trace = trace_of(tmp_path, twice)
    # The 17 ms of the second all-gather lie within the first one's.
    assert busy_share(trace) == pytest.approx((0.435 + 0.2175) / 2)
    flat = " ".join(text_of(trace.run.path).split())
    assert "in progress in 33 % of a rank's step" in flat and "some collectives overlap" in flat
    assert by_path(trace)[FORWARD_TP]["time_s"] == pytest.approx(0.034)


def test_what_is_doubtful_stands_beside_the_table(tmp_path: Path) -> None:
    odd = record(
        overhead={},
        agreement={
            "method": "dispatch mode",
            "num_rows": 24,
            "differences": [f"row {row} differs" for row in range(7)],
        },
        memory={"measured_peak_bytes": 1024, "predicted_peak_bytes": None, "reason": "MemTracker does not know views"},
    )
    flat = " ".join(text_of(run_file(tmp_path / "a.jsonl", odd)).split())
    assert "the tracing overhead was not measured" in flat
    assert (
        "warning: dispatch mode, a second method, differs in the same step: row 0 differs" in flat
        and "... 2 more differences" in flat
    )
    assert "1 KiB measured, not predicted (MemTracker does not know views" in flat


def test_only_the_ten_most_expensive_owners_are_shown(tmp_path: Path) -> None:
    many = tuple(
        collective("forward", "tp", "all_gather", "tp", 8, f"part{at:02}", at, at + 1, at + 1, at + 1, at + 1)
        for at in range(12)
    )
    text = text_of(run_file(tmp_path / "a.jsonl", record(many)))
    assert "the 10 most expensive of 12 owners" in text
    assert [f"part{at:02}" in text for at in range(12)] == [False, False, *[True] * 10]
    assert text.index("part11") < text.index("part10") < text.index("part02")


@pytest.mark.parametrize("with_phases", [True, False])
@pytest.mark.long
def test_a_trace_without_times_still_counts(tmp_path: Path, with_phases: bool) -> None:
    blank = record(steps_s=[])
    for name in ("issued_s", "completed_s"):
        for row in blank["rows"]:
            row[blank["columns"].index(name)] = None
    blank["phases"]["rows"] = [[*row[:3], None, None] for row in blank["phases"]["rows"] if with_phases]
    blank["agreement"]["method"] = None
    path = run_file(tmp_path / "a.jsonl", blank)
    flat = " ".join(text_of(path).split())
    assert "tp all_gather tp 1 1.95 KiB 1000 B - - - n/a" in flat
    assert "second method" not in flat and "None" not in flat
    render_difference(path, path, "table")
    assert list(timeline_figures(chosen((path,), OUT).traces)) == []
    with pytest.raises(UserError, match="has no times"):
        render_paths((path,), OUT, "table", chrome=tmp_path / "trace.json")


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ({"error": "rank 2 raised RuntimeError: no"}, "rank 2 raised RuntimeError: no"),
        ({"columns": ["rank"], "rows": []}, "has no backend_op, completed_s, dtype"),
        ({"phases": {"columns": [], "rows": []}}, "has no end_s, phase, rank, start_s, step"),
    ],
)
@pytest.mark.long
def test_a_trace_that_failed_is_one_sentence(tmp_path: Path, broken: dict[str, Any], message: str) -> None:
    path = run_file(
        tmp_path / "a.jsonl", record(case_id=f"{golden.ID}/x=1", **broken), record(case_id=f"{golden.ID}/x=2")
    )
    text = " ".join(text_of(path).split())
    assert f"{golden.ID}/x=1 has no trace: " in text and message in text and "case step/i64[4,8]/toy/x=2" in text
    only = run_file(tmp_path / "b.jsonl", record(**broken))
    with pytest.raises(UserError, match=r"no trace of a step.*--trace-paths"):
        render_paths((only,), OUT, "table")


def test_a_step_that_communicates_nothing_is_no_error(tmp_path: Path) -> None:
    path = run_file(tmp_path / "a.jsonl", record(()))
    assert "has no communication" in text_of(path)
    assert json.loads(text_of(path, "json")) == []
    assert render_difference(path, path, "table")


def test_csv_and_json_give_every_row_with_what_is_derived(tmp_path: Path) -> None:
    path = run_file(tmp_path / "a.jsonl", record())
    rows = json.loads(text_of(path, "json"))
    assert len(rows) == 4 * 2 * 6 == len(text_of(path, "csv").splitlines()) - 1
    (row,) = (row for row in rows if (row["rank"], row["step"], row["mesh_dim"], row["seq"]) == (3, 0, "tp", 0))
    assert (row["duration_s"], row["straggler_s"], row["rank_step_s"]) == pytest.approx((0.02, 0.012, 0.1))
    assert (row["path_owner"], row["owner"], row["case_id"]) == ("layers.*.attention", "layers.0.attention", golden.ID)
    assert "| of step | straggler | exposed |" in text_of(path, "markdown")


def test_rows_are_summed_by_any_columns(tmp_path: Path) -> None:
    path = run_file(tmp_path / "a.jsonl", record())
    rows = json.loads(render_paths((path,), OUT, "json", by=("mesh_dim", "kind"))[0])
    result = {(row["mesh_dim"], row["kind"]): row for row in rows}
    assert {key: row["count"] for key, row in result.items()} == {
        ("dp_shard", "all_gather"): 2, ("tp", "all_gather"): 1, ("tp", "reduce_scatter"): 1,
        ("dp_shard", "reduce_scatter"): 1, ("dp_shard", "all_reduce"): 1,
    }  # fmt: skip
    ranks = json.loads(render_paths((path,), OUT, "json", by=("rank",))[0])
    # Rank 2 is in collectives for 10 + 10 + 8 + 5 + 2 + 1 ms.
    assert {row["rank"]: (row["count"], round(row["time_s"], 6)) for row in ranks}[2] == (6, 0.036)
    flat = " ".join(render_paths((path,), OUT, "table", by=("owner", "explicit"))[0].split())
    assert "toy by owner, explicit" in flat and "layers.0.attention False 1 1.95 KiB 1000 B 17.0 ms" in flat


@pytest.mark.long
def test_a_part_of_the_cases_id_chooses(tmp_path: Path) -> None:
    names = ("a=1", "a=1,b=2", "a=2")
    path = run_file(tmp_path / "a.jsonl", *(record(case_id=f"{golden.ID}/{name}") for name in names))
    assert [len(chosen((Path(f"{path}{part}"),), OUT).traces) for part in ("", "::a=1", "::b=2")] == [3, 2, 1]
    # The whole end of an id wins over others that merely hold it.
    assert selected_trace(Path(f"{path}::a=1"))[0].case_id == f"{golden.ID}/a=1"
    with pytest.raises(UserError, match=r"has 3 traces.*a=1, .*a=2"):
        selected_trace(path)
    with pytest.raises(UserError, match=r"no traced case id of .* contains 'c=3'"):
        selected_trace(Path(f"{path}::c=3"))
    with pytest.raises(UserError, match="one trace, not 2"):
        render_paths((Path(f"{path}::a=1"),), OUT, "table", chrome=tmp_path / "trace.json")


def test_what_is_left_of_a_stretch_and_lanes_without_overlap() -> None:
    assert left_of((0, 10), [(6, 8), (2, 4), (3, 5)]) == [(0, 2), (5, 6), (8, 10)]
    assert left_of((0, 10), [(-1, 11)]) == [] and left_of((0, 10), []) == [(0, 10)]
    assert left_of((5, 6), [(0, 1), (8, 9)]) == [(5, 6)]
    assert lanes_of([(0, 4), (4, 5), (1, 2), (1, 6)]) == [0, 0, 1, 2]
