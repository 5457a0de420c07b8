"""From measured steps to a profile: lines that are known beforehand, the table, the plots, and one real calibration."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import run_files
from processes import Ranks

from distbench.planning.cheapest_path import Problem, priced_steps
from distbench.planning.cost_profile import (
    DIRECT,
    NATIVE_ALL_TO_ALL,
    Sample,
    TorchCost,
    fit_line,
    load_profile,
)
from distbench.planning.direct_exchange import plan_exchange
from distbench.planning.placement_states import parse_state
from distbench.planning.profile_fit import measured_in, profile_of
from distbench.records.run_file import Run, read_run
from distbench.report import render
from distbench.report.calibrations import calibration_figures, profile_text
from distbench.show.plots import draw
from distbench.spec import Settings
from distbench.spec.errors import UserError

SIZES = [4096 * 4**n for n in range(7)]


def case(op: str, mesh_dim: str, size: int, num_copies: int, seconds: float, held_out: bool) -> dict[str, Any]:
    params = {"op": op, "mesh_dim": mesh_dim, "held_out": held_out}
    return {
        "case": {"id": f"{op}{mesh_dim}{size}{num_copies}", "kind": "calibrate", "params": params},
        "status": "ok",
        "payload_bytes": size,
        "group_size": 2,
        "counters": {"num_copies": num_copies},
        # The median of the samples is `seconds`.
        "samples_s": [seconds, seconds * 9, seconds / 9],
    }


def run_of(cases: list[dict[str, Any]]) -> Run:
    environment = {"machine": "m", "backend": "gloo", "torch": "2.13"}
    job = {"mesh": {"dp_shard": 2, "tp": 2}}
    return Run(Path("x.jsonl"), {"run_id": "r", "environment": environment, "job": job}, cases, None, [])


def known_run() -> Run:
    """all_gather over tp: 20 us, 2 GB/s, and 1 GB/s more slowly where it copies; over dp_shard ten times the base."""
    cases = []
    for mesh_dim, base_s in (("tp", 2e-5), ("dp_shard", 2e-4)):
        for size in (*SIZES, 8192, 131072):
            for copies in (0, 1):
                seconds = base_s + size * (0.5e-9 + copies * 1e-9)
                cases.append(case("all_gather", mesh_dim, size, copies, seconds, size not in SIZES))
    return run_of(cases)


def test_the_lines_that_made_the_run_are_found() -> None:
    profile = profile_of(known_run())
    assert [line.mesh_dim for line in profile.lines] == ["dp_shard", "tp"]
    line = profile.line("all_gather", "tp", 2)
    assert line is not None
    assert [line.base_s, line.per_byte_s, line.per_copied_byte_s] == pytest.approx([2e-5, 0.5e-9, 1e-9])
    assert line.held_out_error == pytest.approx(0, abs=1e-6) and len(line.samples) == 14


def test_a_fit_of_noisy_samples_is_right_in_the_middle() -> None:
    """Times that scatter upwards, as contended ones do: half of them must be dearer than predicted, half cheaper."""
    rng = random.Random(3)
    samples = [Sample(size, 0, (1e-4 + size * 1e-9) * rng.lognormvariate(0, 0.5)) for size in SIZES * 9]
    line = fit_line("all_gather", "tp", 2, samples)
    dearer = sum(sample.seconds > line.seconds(sample.payload_bytes) for sample in samples)
    assert abs(dearer / len(samples) - 0.5) < 0.02


def test_the_table_fits_a_file_and_tells_the_rates() -> None:
    text = profile_text(profile_of(known_run()))
    assert max(map(len, text.splitlines())) <= 120
    row = next(line.split() for line in text.splitlines() if " tp " in line)
    # 0.5 ns a byte are 2 GB/s.
    assert row[:7] == ["all_gather", "tp", "20.0", "us", "2.00", "1.00", "-"]


def test_the_summary_of_a_calibration_tells_its_lines_and_its_report_has_their_table(tmp_path: Path) -> None:
    """20 us and 0.5 ns a byte over tp, ten times the base over dp_shard; local steps are no collectives."""
    local = [case("cut", "tp", size, 0, 1e-6 + size * 1e-10, False) for size in SIZES]
    path = tmp_path / "calibrate.jsonl"
    header = {"type": "run", "schema_version": 1, "run_id": "r"}
    job = {"scenario": "calibrate", "mesh": {"dp_shard": 2, "tp": 2}, "started_at": 1.0}
    environment = {"machine": "m", "backend": "gloo", "torch": "2.13"}
    records = [header | {"job": job, "environment": environment}]
    records += [{"type": "case", **one} for one in [*known_run().cases, *local]]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    shown = render((path,), tmp_path, "table", None, ()).text
    result = [line.strip() for line in shown.splitlines() if line.startswith("  ") and "+" in line]
    assert result == [
        "dp_shard (2 ranks), latency + bandwidth: all_gather 200 us + 2.00 GB/s",
        "tp (2 ranks), latency + bandwidth: all_gather 20.0 us + 2.00 GB/s",
    ]
    assert "median error 0 % on held-out sizes (2 lines; at worst 0 %, all_gather over" in shown
    assert "base  GB/s" in render((path,), tmp_path, "table", None, (), full=True).text
    path.write_text("".join(json.dumps(record) + "\n" for record in records[:2]))
    assert "no profile: " in render((path,), tmp_path, "table", None, ()).text


@pytest.mark.long
def test_points_and_lines_are_drawn_by_mesh_dim(tmp_path: Path) -> None:
    run = known_run()
    written = draw(calibration_figures(profile_of(run), measured_in(run)), tmp_path / "plots")
    names = [f"calibration-{dim}.{form}" for dim in ("dp_shard", "tp") for form in ("png", "svg")]
    assert [path.name for path in written] == names
    assert "all_gather" in (tmp_path / "plots" / "calibration-tp.svg").read_text()


@pytest.mark.parametrize(
    ("cases", "message"), [([], "no calibration"), ([case("cut", "tp", 8, 0, 1.0, False)], "measure more sizes")]
)
def test_a_run_without_enough_steps_is_one_sentence(cases: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(UserError, match=message):
        profile_of(run_of(cases))


@pytest.mark.long
def test_one_calibration_from_the_command_line(ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # What is read here is that every step was timed and fitted, not how well.
    few = Settings(warmup_iterations=1, min_samples=6, max_samples=20, budget_s=0.5)
    monkeypatch.setattr(Settings, "quick", lambda: few)
    output, plots = tmp_path / "profile.json", tmp_path / "plots"
    mesh = ("--mesh", "dp_shard=1,tp=2", "--device", "cpu")
    files = ("--results", str(tmp_path), "-o", str(output), "--plots", str(plots))
    done = ranks.run_here("calibrate", "--quick", *mesh, *files)
    assert done.exit_code == 0, done.stderr
    profile = load_profile(output)
    steps = {"all_gather", "all_reduce", "reduce_scatter", "all_to_all", NATIVE_ALL_TO_ALL, "cut", "partition"}
    if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 14):
        steps.add("zero_fill")
    assert {(line.op, line.mesh_dim) for line in profile.lines} == {
        *((op, "tp") for op in steps),
        (DIRECT, "dp_shardxtp"),
    }
    assert all(line.held_out_error is not None and line.seconds(2**20) > 0 for line in profile.lines)
    assert (profile.backend, dict(profile.mesh)) == ("gloo", {"dp_shard": 1, "tp": 2})
    assert "all_to_all_native" in done.stdout and len(list(plots.iterdir())) == 4
    (file,) = run_files(tmp_path)
    for record in read_run(file).cases:
        assert record["status"] == "ok"
        check_payload(record)


def check_payload(record: dict[str, Any]) -> None:
    """A step's payload and copies are those that the planner will ask its price for."""
    params = record["case"]["params"]
    problem = Problem((1, 2), tuple(params["shape"]), 4)
    ends = [parse_state(params[side], 2) for side in ("source", "target")]
    if params["op"] == DIRECT:
        exchange = plan_exchange(*ends, problem.shape, problem.mesh_shape)
        assert record["payload_bytes"] == 4 * max(exchange.received[0], exchange.received[1])
        return
    (step,) = priced_steps(problem, TorchCost((1, 2), 1), ends)
    requested = (step.move.op, step.price.payload_bytes, step.move.num_copies)
    op = params["op"].removesuffix("_native")
    assert (op, record["payload_bytes"], record["counters"]["num_copies"]) == requested, json.dumps(params)
