"""What is drawn and written of traced steps, and one step against another."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import trace_records as golden
from click.testing import CliRunner, Result
from conftest import ROOT
from trace_records import STEP, collective, record, run_file

from distbench.cli.main import main
from distbench.report import render, render_difference, render_paths, selected_trace
from distbench.report.trace_rows import Trace
from distbench.report.trace_tables import cautions, difference, difference_text, names_of, path_changes, step_change
from distbench.report.trace_timeline import chrome_events, lanes, median_step, waiting_and_own
from distbench.spec.errors import UserError

OUT = Path("nowhere")
FSDP4 = {"dp_shard": 4}
WITHOUT_TP = tuple(one for one in STEP if one["mesh_dim"] != "tp")
SAMPLES = (0.098, 0.099, 0.1, 0.1, 0.101, 0.102, 0.1)


def trace(path: Path, collectives: Any = STEP, **more: Any) -> Trace:
    return selected_trace(run_file(path, record(collectives), **more))[0]


def slices(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event for event in events if event["ph"] == "X"]


def test_a_trace_file_keeps_to_the_formats_rules(tmp_path: Path) -> None:
    """By the rules of "Trace Event Format"; Perfetto itself does not run here."""
    twice = (*STEP, collective("forward", "tp", "all_gather", "tp", 2000, "late", 40, 20, 20, 20, 20))
    path = tmp_path / "trace.json"
    render_paths((run_file(tmp_path / "a.jsonl", record(twice)),), OUT, "table", chrome=path)
    events = json.loads(path.read_text())
    assert isinstance(events, list)
    names: dict[Any, Any] = {}
    for event in events:
        assert {"name", "ph", "pid", "tid", "ts"} <= set(event) and event["ph"] in ("X", "M")
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int)
        if event["name"] in ("process_name", "thread_name"):
            names[event["name"], event["pid"], event["tid"]] = event["args"]["name"]
    stacks = defaultdict(list)
    for event in slices(events):
        assert event["ts"] >= 0 and event["dur"] >= 0
        assert ("thread_name", event["pid"], event["tid"]) in names
        stacks[event["pid"], event["tid"]].append((round(event["ts"] * 1e3), round((event["ts"] + event["dur"]) * 1e3)))
    for result in stacks.values():
        for start, end in result:
            for other_start, other_end in result:
                assert end <= other_start or other_end <= start or (start <= other_start and other_end <= end) or (
                    other_start <= start and end <= other_end
                )  # fmt: skip
    assert [names["process_name", rank, at] for rank, at in ((0, 0), (3, 0))] == ["rank 0", "rank 3"]
    # tp has two threads, for two of its all-gathers are under way at once.
    assert {name for (what, rank, _), name in names.items() if what == "thread_name" and rank == 0} == {
        "steps and phases", "dp_shard", "tp", "tp, concurrent",
    }  # fmt: skip


def test_every_collective_is_in_the_trace_file_with_its_times_and_owner(tmp_path: Path) -> None:
    events = slices(chrome_events(trace(tmp_path / "a.jsonl")))
    assert len(events) == 4 * 2 * (1 + 3 + 6)
    result = [event for event in events if event["name"] == "all_gather" and event["args"]["mesh_dim"] == "tp"]
    (one,) = (event for event in result if event["pid"] == 2 and event["ts"] < 100_000)
    # Rank 2 begins at 42 ms and takes 8; the second step comes after the first one's 100 ms and a pause of 1.
    assert (one["ts"], one["dur"]) == (42_000, 8_000)
    assert (
        one["args"] | {"owner": "layers.0.attention", "payload_bytes": 2000, "redistribution": "S(1)->R"} == one["args"]
    )
    assert one["args"]["explicit"] is False
    assert min(event["ts"] for event in result if event["ts"] > 100_000) == 101_000 + 30_000
    assert next(event for event in result if event["pid"] == 3)["args"]["waiting_us"] == 12_000


def test_the_timeline_has_a_lane_a_mesh_dim_and_shows_the_median_step(tmp_path: Path) -> None:
    result = trace(tmp_path / "a.jsonl")
    assert lanes(result) == ["compute", "dp_shard", "tp"]
    assert median_step(result) == 0
    rows = result.rows[(result.rows["step"] == 0) & (result.rows["rank"] == 3) & (result.rows["kind"] == "all_gather")]
    waiting, own = waiting_and_own(rows)
    # Rank 3 comes late over dp_shard and waits for nobody; over tp it waits for rank 2 from 30 to 42 ms.
    assert waiting == [(0.006, 0.006), (0.01, 0.01), pytest.approx((0.03, 0.042))]
    assert own == [(0.006, 0.01), (0.01, 0.02), pytest.approx((0.042, 0.05))]
    three = record(steps_s=[0.3, 0.2, 0.1])
    three["phases"]["rows"] += [[rank, 2, "forward", 0.0, 0.1] for rank in range(4)]
    assert median_step(selected_trace(run_file(tmp_path / "a.jsonl", three))[0]) == 1


@pytest.mark.long
def test_timelines_are_drawn_and_stand_on_the_page(tmp_path: Path) -> None:
    path = run_file(tmp_path / "a.jsonl", record())
    text, _ = render_paths((path,), OUT, "table", plots=tmp_path / "plots", page=tmp_path / "page.html")
    assert sorted(file.name for file in (tmp_path / "plots").iterdir()) == ["timeline-toy.png", "timeline-toy.svg"]
    assert "timeline-toy.png" in text
    drawing = (tmp_path / "plots" / "timeline-toy.svg").read_text()
    for message in ("rank 3", "dp_shard", "compute: backward", "reduce_scatter", "waiting for the group", "100 ms"):
        assert message in drawing
    page = (tmp_path / "page.html").read_text()
    assert "toy: communication by path" in page and page.count("<svg") == 2
    assert f"distbench report --paths {path}" in render((path,), OUT, "table", None, (), full=True).text.replace(
        "\n ", ""
    )


@pytest.mark.long
def test_a_page_of_a_part_shows_its_traces_alone(tmp_path: Path) -> None:
    ids = [f"{golden.ID}/x={number}" for number in (1, 2)]
    path, page = run_file(tmp_path / "a.jsonl", *(record(case_id=one) for one in ids)), tmp_path / "page.html"
    for part, shown in (("::x=2", ["x=2"]), ("", ["x=1", "x=2"])):
        render_paths((Path(f"{path}{part}"),), OUT, "table", page=page)
        text = page.read_text()
        assert [one for one in ("x=1", "x=2") if f"{one}: communication by path" in text] == shown
        assert ("Summary" in text) == (not part)


def test_a_plan_against_another_as_one_sentence(tmp_path: Path) -> None:
    one = trace(tmp_path / "a.jsonl")
    other = trace(tmp_path / "b.jsonl", WITHOUT_TP, mesh=FSDP4, samples_s=(0.01, 0.079, *[0.08] * 4, 0.9))
    message = difference_text(one, other)
    assert message.startswith(
        "TP2xFSDP2 compared with FSDP4: +1 tp all_gather of 1.95 KiB, +1 tp reduce_scatter of 3.91 KiB, step +25 % ("
    )
    assert difference_text(other, one).startswith(
        "FSDP4 compared with TP2xFSDP2: -1 tp all_gather of 1.95 KiB, -1 tp reduce_scatter of 3.91 KiB, step -20 % ("
    )
    assert path_changes(one, other) == [
        "forward, tp: +1 tp all_gather of 1.95 KiB, +17.0 ms",
        "backward, tp: +1 tp reduce_scatter of 3.91 KiB, +5.00 ms",
    ]


def test_paths_are_matched_and_what_is_on_one_side_counts_as_none_on_the_other(tmp_path: Path) -> None:
    bigger = ({**STEP[0], "payload_bytes": 5096}, *STEP[1:-1], STEP[4])
    one, other = trace(tmp_path / "a.jsonl", bigger), trace(tmp_path / "b.jsonl")
    rows = {tuple(row[key] for key in ("phase", "source", "kind", "mesh_dim")): row
            for row in difference(one, other).to_dict("records")}  # fmt: skip
    gathers = rows["forward", "fsdp", "all_gather", "dp_shard"]
    assert (gathers["payload_bytes_a"], gathers["payload_bytes_b"], gathers["payload_bytes_more"]) == (8096, 4000, 4096)
    scatters = rows["backward", "fsdp", "reduce_scatter", "dp_shard"]
    assert (scatters["count_a"], scatters["count_b"]) == (2, 1)
    gone = rows["backward", "autograd", "all_reduce", "dp_shard"]
    assert (gone["count_a"], gone["count_b"], gone["time_s_more"]) == (0, 1, pytest.approx(-0.001))
    assert path_changes(one, other) == [
        "forward, fsdp: 2 dp_shard all_gather of 7.91 KiB in total instead of 3.91 KiB",
        "backward, fsdp: +1 dp_shard reduce_scatter (+7.81 KiB), +2.00 ms",
        "backward, autograd: -1 dp_shard all_reduce of 16 B, -1.00 ms",
    ]
    assert (
        difference_text(one, other)
        .split(": ", 1)[1]
        .startswith(
            "+1 dp_shard reduce_scatter (+7.81 KiB), 2 dp_shard all_gather of 7.91 KiB in total instead of 3.91 KiB, "
            "-1 dp_shard all_reduce of 16 B, step +0 %"
        )
    )
    assert json.loads(render_difference(one.run.path, other.run.path, "json")[0])[0]["phase"] == "forward"


def test_the_steps_change_is_of_timed_samples_and_never_of_traced_steps(tmp_path: Path) -> None:
    one = trace(tmp_path / "a.jsonl")
    assert step_change(one, one).ratio == 1 and "step +0 % (too few passes: no verdict)" in difference_text(one, one)
    assert "the same communication" in difference_text(one, one)
    none = trace(tmp_path / "b.jsonl", samples_s=[])
    assert step_change(one, none) is None and "step: not compared" in difference_text(one, none)


def test_one_launch_a_side_has_no_verdict_and_no_interval(tmp_path: Path) -> None:
    """However steady the samples of each: what differs between launches is in neither."""
    one, other = (trace(tmp_path / name, samples_s=[level] * 40) for name, level in (("a", 0.1), ("b", 0.2)))
    assert "step -50 % (one launch per side: no verdict)" in difference_text(one, other)


def test_two_steps_of_one_launch_are_compared_by_the_passes_that_both_have(tmp_path: Path) -> None:
    """0.2 s against 0.1 s in each of nine passes, all of which take part of the machine's own ups and downs."""
    levels = [1 + 0.3 * (number % 3) for number in range(9)]
    sides = [trace(tmp_path / "a.jsonl") for _ in range(2)]
    for number, (side, seconds) in enumerate(zip(sides, (0.2, 0.1), strict=True)):
        case = side.case or {}
        case["samples_s"] = [
            seconds * level * (1 + 0.001 * ((place * 7 + number) % 5)) for place, level in enumerate(levels)
        ]
        case["passes"] = [(place, 1) for place in range(9)]
    change = step_change(*sides)
    assert change is not None and change.verdict == "slower"
    assert 1.98 < change.low < 2 < change.high < 2.02 and "step +100 % [" in difference_text(*sides)


def test_names_tell_two_sides_apart(tmp_path: Path) -> None:
    def named(name: str, part: str, **more: Any) -> Trace:
        return selected_trace(run_file(tmp_path / name, record(case_id=f"{golden.ID}{part}"), **more))[0]

    plain, three = named("a", ""), named("b", "", mesh={"dp_replicate": 2, "dp_shard": 1, "cp": 2, "tp": 2})
    assert names_of(plain, three) == ("TP2xFSDP2", "TP2xCP2xDP2")
    assert names_of(named("a", "/x=1"), named("b", "/x=2")) == ("x=1", "x=2")
    assert names_of(plain, named("b", "", scenario="other")) == ("toy", "other")
    assert names_of(plain, named("c", ""))[1].endswith("of c")
    assert "4 ranks" not in " ".join(cautions(plain, three))


def test_different_work_is_cautioned_about(tmp_path: Path) -> None:
    one = trace(tmp_path / "a.jsonl")
    text = (tmp_path / "a.jsonl").read_text().replace('"shape":[4,8]', '"shape":[4,16]').replace("box-1", "box-2")
    (tmp_path / "b.jsonl").write_text(text)
    message = " ".join(cautions(one, selected_trace(tmp_path / "b.jsonl")[0]))
    assert "inputs of a step are 4x8 in A and 4x16 in B" in message and "box-1 and box-2" in message
    assert cautions(one, one) == []
    again = (tmp_path / "a.jsonl").read_text().replace('"run_id":"r"', '"run_id":"r2"')
    (tmp_path / "c.jsonl").write_text(again)
    [text] = cautions(one, selected_trace(tmp_path / "c.jsonl")[0])
    assert text.startswith("warning: one launch per side")


@pytest.mark.long
def test_the_command(tmp_path: Path) -> None:
    path = run_file(tmp_path / "a.jsonl", record())
    steps = str(ROOT / "tests" / "golden" / "steps.jsonl")

    def report(*arguments: str) -> Result:
        return CliRunner().invoke(main, ["report", *arguments])

    done = report("--diff", str(path), str(path), "--format", "markdown")
    assert done.exit_code == 0 and "**by path, per rank and step**" in done.stdout
    for arguments, message in (
        (("--paths", "--diff", str(path), str(path)), "--paths cannot be combined with --diff"),
        (("--paths", "--reproducers", "out"), "--reproducers cannot be combined with --paths"),
        (("--paths", str(path), "--group-by", "ownr"), "nearest: owner"),
        (("--chrome", "trace.json"), "add --paths"),
        (("--paths", str(path), "--chrome", f"{path}/x"), "cannot be written"),
        (("--paths", str(path), "--plots", f"{path}/x"), "cannot be written"),
        (("--paths", str(tmp_path / "none.jsonl")), "does not exist"),
        (("--paths", steps), "run SCENARIO --trace-paths"),
        (("--diff", str(path), steps), "run SCENARIO --trace-paths"),
    ):
        done = report(*arguments)
        assert done.exit_code == 2 and message in done.stderr, (arguments, done.output)


def test_several_traces_need_a_choice_for_a_trace_file(tmp_path: Path) -> None:
    path = run_file(tmp_path / "a.jsonl", *(record(case_id=f"{golden.ID}/x={at}") for at in (1, 2)))
    with pytest.raises(UserError, match="one trace, not 2"):
        render_paths((path,), OUT, "table", chrome=tmp_path / "trace.json")
    _, message = render_paths((Path(f"{path}::x=2"),), OUT, "table", chrome=tmp_path / "trace.json")
    assert "trace.json" in message[0]
