"""Files of Flight Recorder and NCCL Inspector: their formats, and what is refused."""

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from distbench.cli.main import main

START_NS = 1_795_487_459_921_841_545  # above 1e18, as on any date since 2001


def flight_record(rank: int, late: int, *, timed: bool = True, num_ranks: int = 4, count: int = 60) -> dict[str, Any]:
    """A dump of NCCL as torch 2.13 writes it: all-reduces of one group, in which rank `late` waits least."""
    entries = []
    for number in range(count):
        arrived_ns = START_NS + number * 10_000_000 + (2_000_000 if rank == late else 1000 * ((7 * number + rank) % 5))
        entry = {
            "record_id": number,
            "pg_id": 0,
            "process_group": ("0", "default_pg"),
            "collective_seq_id": number + 1,
            "p2p_seq_id": 0,
            "op_id": number,
            "profiling_name": "nccl:all_reduce",
            "time_created_ns": arrived_ns,
            "input_sizes": [[10]],
            "state": "completed",
            "is_p2p": False,
        }
        if timed:
            entry["duration_ms"] = (START_NS + number * 10_000_000 + 3_000_000 - arrived_ns) / 1e6
        entries.append(entry)
    entries.append({**entries[-1], "collective_seq_id": 0, "is_p2p": True})
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": str(list(range(num_ranks)))}}
    return {"version": "2.10", "pg_config": config, "entries": entries}


def inspector_lines(rank: int, late: int, version: str, groups: int = 1) -> list[dict[str, Any]]:
    """Lines of NCCL Inspector: a communicator of 8 ranks on 2 hosts, and one per host."""
    host = f"node{rank // 4}"
    metadata = {"inspector_output_format_version": version, "hostname": host, "pid": 100 + rank % 4}
    lines: list[dict[str, Any]] = []
    for name, size, place in (("0xa", 8, rank), (f"0xb{rank // 4}", 4, rank % 4)):
        header = {
            "id": name,
            "comm_name": "unknown" if size == 8 else f"TP {rank // 4}",
            "rank": place,
            "n_ranks": size,
        }
        perfs = [
            {
                "coll": kind,
                "coll_sn": number,
                "coll_exec_time_us": 900 + (7 * number + 3 * rank) % 11 - 500 * (rank == late and size == 4),
            }
            for number in range(40)
            for kind in ("AllReduce", "Broadcast")
        ]
        if version == "v4.3":
            lines.append({"header": header, "metadata": metadata, "dump_stats": {"coll_records": len(perfs)}})
            lines += [{"coll_perf": perf} for perf in perfs]
        else:
            lines += [{"header": header, "metadata": metadata, "coll_perf": perf} for perf in perfs]
    return lines


def watched(*arguments: object) -> tuple[int, str]:
    done = CliRunner().invoke(main, ["watch", *map(str, arguments)])
    return done.exit_code, done.output


@pytest.mark.parametrize("form", ["pickle", "json"])
def test_flight_recorder_with_durations_is_judged_across_hosts(tmp_path: Path, form: str) -> None:
    for rank in range(4):
        dump = flight_record(rank, late=2)
        text = pickle.dumps(dump, 2) if form == "pickle" else json.dumps(dump).encode()
        (tmp_path / f"nccl_trace_rank_{rank}{'.json' if form == 'json' else ''}").write_bytes(text)
    exit_code, output = watched(tmp_path)
    assert exit_code == 1, output
    assert output.startswith(
        "FAIL: rank 2 arrives last in group default_pg 0-3 in 20 of 20 parts of the files, 2.00 ms "
    )
    assert "per collective after the median of the other ranks.\nNext: check the host of rank 2 (" in output


def test_flight_recorder_without_a_late_rank_passes_and_without_durations_is_unknown(tmp_path: Path) -> None:
    for rank in range(4):
        (tmp_path / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(flight_record(rank, late=-1), 2))
    assert watched(tmp_path)[0] == 0
    for rank in range(4):
        (tmp_path / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(flight_record(rank, late=2, timed=False), 2))
    exit_code, output = watched(tmp_path, "--ranks-per-host", 4)
    assert exit_code == 3 and "have no durations on the device; set TORCH_NCCL_ENABLE_TIMING=1" in output
    (tmp_path / "nccl_trace_rank_3").unlink()
    exit_code, output = watched(tmp_path)
    assert exit_code == 3 and "group default_pg 0-2: only 3 of its 4 ranks have a file" in output


@pytest.mark.parametrize("version", ["v4.0", "v4.3"])
def test_inspector_names_the_rank_by_the_communicator_of_all_processes(tmp_path: Path, version: str) -> None:
    for rank in range(8):
        lines = inspector_lines(rank, 5, version)
        (tmp_path / f"node{rank // 4}-pid{100 + rank % 4}.log").write_text("\n".join(map(json.dumps, lines)) + "\n")
    exit_code, output = watched(tmp_path, "--json")
    assert exit_code == 1, output
    (late,) = json.loads(output)["late"]
    assert (late["rank"], late["host"], late["group"]) == ("rank 5", "node1", "TP 1")
    assert late["late_s"] == pytest.approx(500e-6, abs=10e-6)


class Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, ("made_by_a_pickle",)


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("dump_0", pickle.dumps({"entries": [Evil()]}), "it refers to posix.mkdir"),
        ("dump_0", b"\x00\xff junk", "is not a file of Flight Recorder"),
        ("dump_0", b"", "is not a file of Flight Recorder"),
        ("dump_0", b'{"entries": [1]}', "a value of an entry is missing or wrong"),
        ("dump_0", b'{"a": 1}', "it has no entries"),
        ("dump", pickle.dumps({"entries": []}), "its name does not end with the rank; rename the file"),
        ("a.log", b'{"coll_perf": {"coll": "AllReduce"}}', "a value of a line is missing or wrong"),
        ("a.log", b'{"coll_perf": ', "is not valid JSON"),
    ],
)
def test_a_file_of_another_kind_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: bytes, why: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_bytes(content)
    exit_code, output = watched(name)
    assert exit_code == 2 and why in output and output.count("\n") == 1
    assert not Path("made_by_a_pickle").exists()


def test_two_files_of_a_rank_two_kinds_and_an_empty_folder_are_refused(tmp_path: Path) -> None:
    assert "the folder has no file" in watched(tmp_path)[1]
    for name in ("a_0", "b_0"):
        (tmp_path / name).write_bytes(pickle.dumps(flight_record(0, 0), 2))
    assert "are both files of rank 0; give one file per rank" in watched(tmp_path)[1]
    (tmp_path / "b_0").write_text(json.dumps(inspector_lines(0, 0, "v4.0")[0]))
    assert "give files of one tool" in watched(tmp_path)[1]
    (tmp_path / "b_0").write_bytes(b"")
    nan = json.dumps(flight_record(0, 0)).replace('"duration_ms": 1', '"duration_ms": NaN, "x": 1', 1)
    (tmp_path / "b_0").write_text(nan)
    assert watched(tmp_path / "b_0")[0] == 2
