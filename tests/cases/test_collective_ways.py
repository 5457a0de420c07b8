"""Ways of collectives and uneven all-to-alls on 3 ranks: every result is checked, and wrong ones are named."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import DATA
from processes import Children, Ranks

from distbench.cases.collective import WAYS
from distbench.launch import Request, jobs_of
from distbench.records.dataframe import frame_of, records_of
from distbench.records.run_file import read_run

WRONG = {
    "wrong_shape": "the result has shape (749,), expected (750,)",
    "wrong_values": "1 of 750 elements are wrong; the first, at offset 3,",
    "wrong_dtype": "the result has dtype torch.float64, expected torch.float32",
    "wrong_type": "way 'wrong_type' returned int; return the result, or None with the result in `output`",
}


@pytest.fixture(scope="module")
def rows(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ways")
    (job,) = jobs_of(Request(targets=(f"{DATA / 'ways.py'}::ways",), device="cpu", out=folder, timeout_s=60), None)
    settings = replace(job.settings, warmup_iterations=1, min_samples=1, max_samples=2, budget_s=0.5, passes=2)
    outcome = ranks.launch(replace(job, settings=settings))
    run = read_run(Path(job.run_file))
    assert outcome.status == "complete" and run.footer["num_relaunches"] == 0, outcome
    frame = frame_of([run])
    return {row["id"].removeprefix("collective/"): row for row in records_of(frame)}


def test_all_ways_and_loads_are_right_and_wrong_ones_are_named(rows: dict[str, dict[str, Any]]) -> None:
    bad = {name.rpartition("/")[2]: row for name, row in rows.items() if row["status"] != "ok"}
    assert {name: row["status"] for name, row in bad.items()} == {**dict.fromkeys(WRONG, "wrong"), "nccl2": "skipped"}
    for name, message in WRONG.items():
        assert message in bad[name]["error"], name
    assert "needs an accelerator, but this run is on cpu" in bad["nccl2"]["error"]
    for op, ways in WAYS.items():
        assert {f"f32[1500]/{op}/tp/{way}" for way in ("plain", *ways)} <= set(rows)
    # The first way of each size and dtype again; of all_to_all_v the first load.
    assert sum(name.endswith("(baseline again)") for name in rows) == 2 * len(WAYS) + 1 + 1


def test_bandwidths_follow_nccl_tests(rows: dict[str, dict[str, Any]]) -> None:
    """scatter, gather: (n - 1)/n of the root's buffer; sendrecv: 1; alltoallv: (n - 1)/n of a rank's mean buffer."""
    for op, factor in {"scatter": 2 / 3, "gather": 2 / 3, "send_recv": 1.0}.items():
        row = rows[f"f32[1500]/{op}/tp"]
        assert row["payload_bytes"] == 6000
        assert row["busbw_gb_per_s"] == pytest.approx(factor * 6000 / row["median_s"] / 1e9)
    row = rows["f32[1500]/all_to_all_v/tp/matrix"]
    # 11 rows of 3 ranks: 18000 bytes of f32 are 409 numbers per row. Rank 1 sends and receives most, 7 and 3 rows.
    assert (row["payload_bytes"], row["wire_bytes"]) == (round(11 / 3 * 409 * 4), 7 * 409 * 4)
    assert (row["rows_sent"], row["rows_received"]) == ("3x7x1", "5x3x3")
    assert row["max_over_mean"] == pytest.approx(7 / (11 / 3))
    assert row["busbw_gb_per_s"] == pytest.approx(2 / 3 * row["payload_bytes"] / row["median_s"] / 1e9)
    assert 0 <= row["straggler_share"] < 1


def test_a_small_size_has_fewer_rows_than_choices(rows: dict[str, dict[str, Any]]) -> None:
    row = rows["f32[300]/all_to_all_v/tp/uniform"]
    assert (row["payload_bytes"], row["rows_sent"]) == (1200, "300x300x300")


def test_a_recording_has_an_exchange_per_module(rows: dict[str, dict[str, Any]]) -> None:
    row = rows["f32[1500]/all_to_all_v/tp/routing.json"]
    # 40 choices per rank and layer: 6, 2 and 4 of 12, then 2, 2 and 8 of 12; both times 3 ranks.
    assert row["num_exchanges"] == 2
    assert sum(map(int, row["rows_received"].split("x"))) == 240
    assert row["max_over_mean"] == pytest.approx((6 / 12 + 8 / 12) * 3 / 2, rel=0.05)


@pytest.mark.long
def test_ranks_with_loads_of_other_sizes_agree_on_what_stays_open(children: Children, tmp_path: Path) -> None:
    """At this size all cases are small on three of four ranks only."""
    loads = ("--set", "load=uniform,W1", "--set", "size=33554432")
    done = children.cli(
        "run", "expert_exchange", "--quick", *loads, "--timeout", "60s", "--results", tmp_path, timeout=240
    )
    assert done.returncode == 0, done.stderr
    (file,) = tmp_path.rglob("*-expert_exchange-*.jsonl")
    assert read_run(file).footer["num_relaunches"] == 0
