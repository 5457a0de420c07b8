"""Tables, sentences and code for ways and loads of a collective, from made-up runs with known times."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from distbench.records.dataframe import frame_of
from distbench.records.run_file import AGAIN, read_run
from distbench.report.collectives import SECTION, WAYS, code_of, ways_of
from distbench.report.section_protocol import ReportedRun
from distbench.show.blocks import Table

PASSES = 10
SIZES = [1024, 4096, 16384, 65536]
HEADER = {"type": "run", "schema_version": 2, "run_id": "a", "job": {"scenario": "mine", "mesh": {"tp": 4}}}
# A fixed and a proportional part: 1 GB/s and 1 us; half of both, plus 20 us, are equal at 38,000 bytes.
TIMES: Mapping[str, Callable[[int], float]] = {
    "plain": lambda size: 1e-6 + size * 1e-9,
    "other": lambda size: 20.5e-6 + size * 0.5e-9,
    f"plain {AGAIN}": lambda size: 1e-6 + size * 1e-9,
}


def reported(folder: Path, cases: list[tuple[str, dict[str, Any], dict[str, Any], float]]) -> ReportedRun:
    """A run of collectives: (id, params, further fields of the row, seconds), in 10 passes that drift by 1 % each."""
    lines: list[dict[str, Any]] = [HEADER]
    further = []
    for place, (name, params, fields, seconds) in enumerate(cases):
        samples = [seconds * (1 + 0.01 * number + 0.001 * ((number * 7 + place * 3) % 5)) for number in range(PASSES)]
        case = {"id": name, "kind": "collective", "params": params}
        row = {"payload_bytes": params["size_bytes"], "group_size": 4, "mesh_dim": "tp", "backend": "gloo"}
        lines.append({"type": "case", "case": case, "status": "ok", "samples_s": samples[:1], **row, **fields})
        further += [
            {"type": "pass", "case_id": name, "number": number, "samples_s": [samples[number]], "phases_s": {}}
            for number in range(1, PASSES)
        ]
    path = folder / "mine.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in [*lines, *further, {"type": "footer"}]))
    run = read_run(path)
    assert not run.warnings, run.warnings
    return ReportedRun(run, frame_of([run]))


def ways_run(folder: Path, times: Mapping[str, Callable[[int], float]] = TIMES, op: str = "all_reduce") -> ReportedRun:
    params = {"op": op, "dtype": "f32", "mesh_dim": "tp"}
    return reported(
        folder,
        [
            (f"collective/f32[{size}]/{op}/tp/{way}", {**params, "size_bytes": size, "variant": way}, {}, seconds(size))
            for size in SIZES
            for way, seconds in times.items()
        ],
    )


def test_the_crossing_is_between_the_sizes_with_verdicts(tmp_path: Path) -> None:
    run = ways_run(tmp_path)
    (sentence,) = WAYS.headline(run)
    assert "faster than plain from 64 KiB on" in sentence and "between 16 KiB and 64 KiB" in sentence
    (ways,) = ways_of(run.frame)
    (crossing,) = ways.crossings("other")
    # Exactly 39,000 bytes; lines between logarithms of two sizes are not exact.
    assert crossing.size == pytest.approx(39000, rel=0.1)
    assert {row["verdict"] for row in ways.of_way(f"plain {AGAIN}")} == {"within noise"}
    assert not list(SECTION.tables(run, True)) and not list(SECTION.headline(run))


def test_the_table_as_code_runs(tmp_path: Path) -> None:
    (ways,) = ways_of(ways_run(tmp_path).frame)
    names: dict[str, Any] = {}
    exec("\n".join(code_of(ways, [ways])), names)
    assert names["ALL_REDUCE_WAYS"] == {0: "plain", 65536: "other"}
    assert [names["all_reduce_way"](size) for size in (0, 65535, 65536, 10**9)] == ["plain", "plain", "other", "other"]


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"op": "broadcast"}, ("all_reduce", "broadcast")),
        ({"dtype": "bf16"}, ("all_reduce_f32", "all_reduce_bf16")),
        ({"mesh_dim": "ep"}, ("all_reduce_tp", "all_reduce_ep")),
        ({"dtype": "bf16", "mesh_dim": "ep"}, ("all_reduce_f32_tp", "all_reduce_bf16_ep")),
    ],
)
def test_tables_as_code_have_different_names(tmp_path: Path, changes: dict[str, Any], names: tuple[str, str]) -> None:
    (ways,) = ways_of(ways_run(tmp_path).frame)
    both = [ways, replace(ways, **changes)]
    defined: dict[str, Any] = {}
    for one in both:
        exec("\n".join(code_of(one, both)), defined)
    assert {f"{name}_way" for name in names} < {*defined} and {f"{name}_WAYS".upper() for name in names} < {*defined}


@pytest.mark.parametrize(
    ("time_of", "ending"),
    [
        (lambda size: 0.5e-6 + size * 0.5e-9, "at 4 of 4 sizes; no crossing"),
        (
            lambda size: TIMES["plain"](size) / (2 if size < 20000 else 1),
            "at 3 of 4 sizes, other sizes have no verdict; no crossing",
        ),
    ],
)
def test_only_sizes_without_a_verdict_are_mentioned(
    tmp_path: Path, time_of: Callable[[int], float], ending: str
) -> None:
    (sentence,) = WAYS.headline(ways_run(tmp_path, {**TIMES, "other": time_of}))
    assert sentence.endswith(f"other: faster than plain {ending}")


def test_equal_ways_have_no_crossing_and_one_entry(tmp_path: Path) -> None:
    run = ways_run(tmp_path, dict.fromkeys(TIMES, TIMES["plain"]))
    assert [*WAYS.headline(run)] == [
        "all_reduce, f32, over tp (4 ranks): other: no difference from plain found at 4 sizes; no crossing"
    ]
    (ways,) = ways_of(run.frame)
    assert code_of(ways, [ways])[1].startswith("ALL_REDUCE_WAYS = {0: 'plain'}")
    assert {one.verdict for one in WAYS.compared(run)} == {"within noise"}


def test_one_pass_is_too_few_to_say_that_ways_do_not_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "PASSES", 1)
    assert [*WAYS.headline(ways_run(tmp_path))] == [
        "all_reduce, f32, over tp (4 ranks): other: too few passes for a verdict"
    ]


def test_a_control_with_a_verdict_is_a_warning(tmp_path: Path) -> None:
    run = ways_run(tmp_path, {**TIMES, f"plain {AGAIN}": lambda size: 2 * TIMES["plain"](size)})
    assert any(
        "warning: the control (plain measured again) is slower than plain" in line for line in WAYS.headline(run)
    )


def test_loads_have_rows_imbalance_and_stragglers_per_exchange(tmp_path: Path) -> None:
    """Under W1, 3 of 4 ranks end after half of the slowest rank's time: stragglers cost 3/4 x 1/2."""
    params = {"op": "all_to_all_v", "dtype": "f32", "mesh_dim": "tp", "size_bytes": 4096}
    counters = {"rows_sent": [16] * 4, "rows_received": [16] * 4, "max_over_mean": 1.0, "num_exchanges": 2}
    uneven = {**counters, "rows_received": [52, 4, 4, 4], "max_over_mean": 3.25}
    ranks, slow = {"rank_median_s": [1e-3] * 4}, {"rank_median_s": [2e-3, 1e-3, 1e-3, 1e-3]}
    run = reported(
        tmp_path,
        [
            ("u", {**params, "variant": "uniform"}, {"counters": counters, **ranks, "payload_bytes": 8192}, 1e-3),
            ("w", {**params, "variant": "W1"}, {"counters": uneven, **slow, "payload_bytes": 8192}, 2e-3),
        ],
    )
    (table,) = (block for block in WAYS.tables(run, True) if isinstance(block, Table))
    cells = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
    assert [row["received"] for row in cells] == ["8 each", "26/2/2/2"]
    assert [row["max/mean"] for row in cells] == ["1.00", "3.25"]
    assert [row["straggler"] for row in cells] == ["0 %", "38 %"]
    assert [row["size"] for row in cells] == ["4 KiB"] * 2
    # nccl-tests: busbw of an all-to-all of n ranks is (n - 1)/n of S/t.
    (first, _) = ways_of(run.frame)[0].rows
    assert first["busbw_gb_per_s"] == pytest.approx(0.75 * 8192 / (2 * first["median_s"]) / 1e9)
    assert first["median_s"] == pytest.approx(0.5e-3 * 1.046, rel=0.002)
    assert first["straggler_share"] == 0 and math.isfinite(first["max_over_mean"])
    (sentence,) = WAYS.headline(run)
    assert "W1: 2x slower than uniform" in sentence
