"""A simulated run is a run file: what reads it, what it says there, and what refuses it. Plain data, times by hand."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from click.testing import CliRunner, Result
from conftest import ROOT
from test_simulate_clock import HEAD, elementwise, gather, machine, matmul

from distbench.cli.main import main
from distbench.judge.communication_signature import of_run_file
from distbench.records.dataframe import frame_of
from distbench.records.run_file import Run, read_run
from distbench.report.trace_rows import Trace, traces_of
from distbench.report.trace_timeline import chrome_events
from distbench.simulate.recording import Allocated, EventRecorded, EventWaited, Recording, StepBegun
from distbench.simulate.simulated_run import write_simulated_run
from distbench.simulate.simulation import NOT_SIMULATED, Simulation
from distbench.spec import UserError

CASE = "step/f32[16,256]/mine"
CASE_HEAD = replace(HEAD, case_id=CASE, params={"shape": [16, 256], "computes": "01234567", "variant": ""})
SIZE = 6 * 10**9  # a gather of two ranks moves half: 3 s


def simulated(seconds: float = 2, rank: int = 0, **head: Any) -> Simulation:
    """Forward of `seconds`, a gather of 3 s of which backward waits for 1 s, backward of 1 s, the optimizer's 1 s."""
    events = (
        Allocated(1, 1 << 30, 0, "parameters", ""),
        Allocated(2, 2 << 30, 0, "activations", "layers.3.ffn"),
        StepBegun(2),
        gather(1, 3),
        EventRecorded(1, 1),
        matmul(0, seconds, "layers.0"),
        EventWaited(0, 1),
        matmul(0, 1)._replace(phase="backward"),
        elementwise(1, [], [])._replace(phase="optimizer"),
    )
    return Simulation(Recording(replace(CASE_HEAD, rank=rank, **head), list(events)), machine())


def written(out: Path, *simulations: Simulation) -> Path:
    environment = {"git_commit": "0123456789", "git_dirty": False}
    return write_simulated_run(simulations or (simulated(),), out, environment, 1.6e9, "mine")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return written(tmp_path)


@pytest.fixture
def run(path: Path) -> Run:
    return read_run(path)


def test_the_header_says_on_what_and_what_was_assumed(path: Path, run: Run) -> None:
    assert path.parent.name == "simulated-h100" and path.name.startswith("20200913T122640Z-01234567-mine-")
    assert run.is_simulated and not run.warnings and run.footer
    about = run.about
    assert (about.environment.machine, about.environment.device, about.environment.torch) == (
        *("simulated-h100", "simulated", "2.13.0"),
    )
    said = about.simulated
    assert said["hardware"]["figures"]["host_s"].keys() == {"value", "basis", "source"} and said["ranks"] == [0]
    assert "attention_half_length" in said["guess"] and "device_spread" in said["fitted"] and said["not_simulated"]
    assert said["extrapolated"]["ring_bytes_per_s"] == "peer_bytes_per_s"


def test_every_line_fits_the_schema(path: Path) -> None:
    schema = json.loads((ROOT / "docs" / "run_file.schema.json").read_text())
    check = jsonschema.Draft202012Validator(schema)
    for line in path.read_text().splitlines():
        check.validate(json.loads(line))


def test_a_row_is_predicted_and_has_no_sample(run: Run) -> None:
    (case,) = run.cases
    assert case["simulated"] is True and case["status"] == "ok" and case["samples_s"] == []
    row = frame_of([run]).iloc[0]
    # Computes from 0 to 2, 3 to 4 and 4 to 5; the gather's last second is waited for.
    assert (row["predicted_s"], row["compute_s"], row["exposed_s"]) == pytest.approx((5, 4, 1))
    assert row["median_s"] != row["median_s"] and row["ci_low_s"] != row["ci_low_s"] and row["simulated"] == "True"
    assert case["counters"]["predicted_phases_s"] == pytest.approx({"forward": 2, "backward": 2, "optimizer": 1})
    assert (row["peak_parameters_bytes"], row["peak_activations_bytes"]) == (1 << 30, 2 << 30)
    assert case["counters"]["alive"][0] == ["activations", "layers.*.ffn", 2 << 30]
    assert row["id"] == CASE and row["computes"] == "01234567" and row["num_tokens"] == 4096


def trace_of(run: Run) -> Trace:
    ((trace,), failed) = traces_of([run])
    assert not failed
    return trace


def test_its_trace_is_that_of_a_traced_step(run: Run) -> None:
    trace = trace_of(run)
    assert trace.is_simulated and trace.is_timed and trace.ranks == (0,)
    (row,) = trace.rows.to_dict("records")
    assert (row["issued_s"], row["completed_s"], row["exposed_s"]) == pytest.approx((0, 3, 1))
    assert (row["payload_bytes"], row["wire_bytes"], row["path_owner"]) == (SIZE, SIZE // 2, "layers.*")
    assert trace.computing is not None
    assert trace.computing[["start_s", "end_s"]].to_numpy().tolist() == [[0, 2], [3, 5]]
    events = chrome_events(trace)
    named = {event["args"]["name"] for event in events if event["name"] in ("process_name", "thread_name")}
    assert named == {"rank 0, simulated", "steps and phases", "compute", "dp_shard"}
    assert [event["dur"] for event in events if event["name"] == "compute"] == [2e6, 2e6]


def test_of_several_ranks_the_slowest_is_the_step(tmp_path: Path) -> None:
    run = read_run(written(tmp_path, simulated(2), simulated(4, rank=7)))
    counters = run.cases[0]["counters"]
    # Forward of 4 s hides the gather.
    assert counters["predicted_s"] == pytest.approx(6) and counters["slowest_rank"] == 7
    assert counters["exposed_s"] == pytest.approx(0)
    trace = trace_of(run)
    assert trace.ranks == (0, 7) and trace.record["steps_s"] == pytest.approx([6])
    assert trace.rows["straggler_s"].isna().all()  # two ranks of a group of two, and neither waits for the other


def ask(*arguments: object) -> Result:
    return CliRunner().invoke(main, [*map(str, arguments)])


def said(*arguments: object) -> str:
    done = ask(*arguments)
    assert done.exit_code == 0, done.output
    assert all(len(line) <= 120 for line in done.stdout.splitlines() if str(arguments[1]) not in line)
    return " ".join(done.output.split())


@pytest.mark.long
def test_report_says_that_it_was_simulated(path: Path, tmp_path: Path) -> None:
    assert (
        "simulated on h100 (9 guessed, 4 fitted, 3 extrapolated figures), not measured: a step 5.00 s, 3 GiB"
        in said("report", path)
    )
    full = said("report", path, "--full", "--page", tmp_path / "page.html")
    assert "simulated step time and memory" in full and "simulated, not measured: on h100, rank 0 of 8" in full
    assert "simulated: live memory at the peak of mine" in full and "NOT OK" not in full
    # All that a figure stands on, and in short where there is less room.
    assert "guessed figures of the hardware file: attention_backward_flops, " in full
    assert "figures missing in the hardware file and extrapolated: matmul_fp8_flops (" in full
    assert all(sentence in full for sentence in NOT_SIMULATED)
    page = (tmp_path / "page.html").read_text()
    assert "simulated step time and memory" in page and "communication by path, simulated" in page
    paths = said("report", "--paths", path)
    assert "a simulated step takes 5.00 s on rank 0 of 8" in paths and "not measured" in paths
    assert "traced step" not in paths and "second method" not in paths and "straggler time" not in paths
    assert "simulated" in ask("report", path, "--format", "csv").stdout


def test_report_says_what_fits_only_because_caches_are_given_back(path: Path) -> None:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[1]["counters"]["num_retries"] = 2
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    assert "(tight): fits only because the allocator frees its cache" in said("report", path, "--full")


@pytest.mark.long
def test_two_simulated_steps_are_told_apart_path_by_path(path: Path, tmp_path: Path) -> None:
    other = written(tmp_path / "b", simulated(4))
    text = said("report", "--diff", path, other)
    assert "step -17 % (predicted, not measured: no verdict)" in text
    assert "warning: A and B are simulated, with predicted times" in text
    assert "the same communication" in text
    assert "times: simulated steps" in text and "an untraced step" not in text
    for shown in (text, said("report", "--paths", path), said("compare", path, path)):
        assert "simulated with hardware file h100, 9 guessed, 4 fitted, 3 extrapolated figures" in shown


def test_steps_of_other_inputs_are_not_compared(path: Path, tmp_path: Path) -> None:
    other = written(tmp_path / "b", simulated(case_id="step/f32[32,256]/mine"))
    done = ask("compare", path, other)
    assert (
        done.exit_code == 2
        and "the first has step/f32[16,256]/mine, but the second has step/f32[32,256]/mine" in done.output
    )


def measured(tmp_path: Path, path: Path, seconds: float = 4) -> Path:
    """The same step with times, as ranks would have written it."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        line.pop("simulated", None)
    lines[0]["environment"]["machine"] = "box"
    lines[0]["run_id"] = "other"
    lines[1] |= {"samples_s": [seconds] * 5, "counters": {}}
    file = tmp_path / "measured.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)) + "\n")
    return file


def test_a_simulated_step_stands_beside_a_measured_one(path: Path, tmp_path: Path) -> None:
    other = measured(tmp_path, path)
    text = said("report", "--diff", f"{path}::mine", f"{other}::mine")
    assert "simulated on h100 compared with measured: the same communication, step +25 %" in text
    assert "warning: A is simulated, with predicted times" in text and "do not compare times" not in text
    compared = said("compare", other, path)
    assert "UNKNOWN: 1 case predicted, without intervals. Largest difference: " in compared
    assert "A is measured on box B is simulated on h100" in compared
    assert "predicted times, and medians where a side is measured" in compared
    frame = ask("compare", other, path, "--format", "csv").stdout.splitlines()
    assert ",predicted,a simulation predicts a time without an interval,predicted,1,4,5.0," in frame[1]


@pytest.mark.parametrize("command", [("gate",), ("export", "customSmallerIsBetter"), ("baseline", "save")])
def test_what_needs_measured_times_refuses_it(command: tuple[str, ...], path: Path, tmp_path: Path) -> None:
    sides = (path, measured(tmp_path, path)) if command == ("gate",) else (path,)
    done = ask(*command, *sides)
    assert done.exit_code == 2 and done.output.count("\n") == 1
    assert "is a simulated run without measured times; use distbench compare for predicted times" in done.output


def test_history_leaves_it_out_and_says_so(path: Path, tmp_path: Path) -> None:
    done = ask("history", "--results", tmp_path)
    assert done.exit_code == 2 and "has no run file (left out: " in done.output
    assert "is a simulated run" in done.output


def test_the_exact_gate_reads_it(path: Path, tmp_path: Path) -> None:
    signature = tmp_path / "mine.signature"
    signature.write_text(of_run_file(path).to_text())
    assert "1 x forward fsdp all_gather over dp_shard (2), bf16, 6000000000 B: layers.*" in signature.read_text()
    assert "PASS: 1 signature unchanged" in said("signature", "check", signature, path)
    assert "PASS: 1 signature unchanged" in said("signature", "check", measured(tmp_path, path), path)
    other = simulated()
    events = [
        event._replace(payload_bytes=512) if hasattr(event, "ranks") else event for event in other.recording.events
    ]
    changed = written(tmp_path / "b", replace(other, recording=replace(other.recording, events=events)))
    done = ask("signature", "check", signature, changed)
    assert done.exit_code == 1 and "1 all_gather over dp_shard (fsdp) of 5.59 GiB bf16 became 512 B bf16" in done.output


def test_the_exact_gate_needs_a_trace(path: Path, tmp_path: Path) -> None:
    lines = [line for line in path.read_text().splitlines() if '"type":"trace"' not in line]
    (tmp_path / "bare.jsonl").write_text("\n".join(lines) + "\n")
    done = ask("signature", "check", path, tmp_path / "bare.jsonl")
    assert done.exit_code == 2 and "has no trace of a step" in done.output


def test_a_step_of_days_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"the simulated step takes 1e\+05 s, more than a day"):
        written(tmp_path, simulated(1e5 - 2))


def test_a_results_folder_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = ask("simulate", "tp_mlp", "--results", tmp_path / "file")
    assert done.exit_code == 2 and "cannot be created" in done.output and done.output.count("\n") == 1
