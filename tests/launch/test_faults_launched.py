"""Faults round real launches: what the command says, how it ends, what it keeps, and that nothing runs on."""

import json
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import DATA, run_files
from processes import PATIENCE_S, Children, Ranks
from test_failures import MISDEEDS, assert_gone, mounted, start, wait_for_case_3

from distbench.records.run_file import read_run

TINY = str(DATA / "tiny.py")


@pytest.mark.parametrize("command", [f"run {TINY} --results loop", f"run {TINY} --results loop/below --log-dir loop"])
def test_a_loop_of_links_as_results_folder_is_refused(children: Children, tmp_path: Path, command: str) -> None:
    (tmp_path / "loop").symlink_to("loop")
    done = children.cli(*command.split(), cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "loop" in done.stderr


@pytest.mark.parametrize("redirected", ["2>/dev/full", "2>&-"])
@pytest.mark.parametrize("command", ["gate nothing.jsonl nothing.jsonl", "report nothing.jsonl"])
def test_the_exit_code_counts_where_standard_error_takes_nothing(
    children: Children, tmp_path: Path, command: str, redirected: str
) -> None:
    script = f"{sys.executable} -m distbench {command} {redirected}"
    assert children.run("bash", "-c", script, cwd=tmp_path).returncode == 2


def test_a_run_goes_on_where_standard_error_is_full_and_says_why_a_case_is_wrong(ranks: Ranks, tmp_path: Path) -> None:
    """A loss that is not a number: the reason stands where the command ends, and not in the report alone."""
    words = f"-m distbench run {MISDEEDS} --quick --passes 1 --set case=3 --results {tmp_path}"
    done = ranks.run("bash", "-c", f"{ranks.forked_python} {words} 2>/dev/full")
    assert done.returncode == 0 and len(run_files(tmp_path)) == 1
    done = ranks.run(ranks.forked_python, *words.split(), "--set", "misdeed=nan")
    message = [line for line in done.stderr.splitlines() if line.startswith("distbench:")]
    assert done.returncode == 1 and len(message) == 1 and "case=3 is wrong (rank 0: the loss " in message[0]


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_joined_rank_whose_partners_never_come_ends_by_its_timeout(ranks: Ranks, tmp_path: Path, rank: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    variables = {"RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    began = time.monotonic()
    done = ranks.cli("run", TINY, "--timeout", "4", "--results", tmp_path, **variables)
    assert done.returncode == 1 and time.monotonic() - began < PATIENCE_S
    assert f"rank {rank} waited 4 s at 127.0.0.1:{port} for the other ranks" in done.stderr


def test_a_master_port_that_is_taken_is_a_sentence(ranks: Ranks, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        variables = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        done = ranks.cli("run", TINY, "--mesh", "tp=1", "--results", tmp_path, **variables)
    assert done.returncode == 2 and f"ranks cannot meet at 127.0.0.1:{port}: port {port} of" in done.stderr


def test_a_disk_that_fills_up_with_the_logs_keeps_its_cases_and_a_footer(ranks: Ranks, tmp_path: Path) -> None:
    folder = tmp_path / "small"
    if not mounted(folder, "size=40k"):
        pytest.skip("needs the right to mount a small tmpfs")
    try:
        done = ranks.cli("run", "collectives", "--quick", "--mesh", "tp=2", "--results", folder)
        message = [line for line in done.stderr.splitlines() if line.startswith("distbench:")]
        assert done.returncode == 2 and len(message) == 1, done.stderr
        assert "cannot be written: No space left on device" in message[0]
        (file,) = run_files(folder)
        run = read_run(file)
        assert run.footer is not None and run.footer["num_by_status"] == {"ok": len(run.cases)} and run.cases
        assert run.warnings == []
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_results_that_are_deleted_in_the_middle_end_the_run_with_a_sentence(ranks: Ranks, tmp_path: Path) -> None:
    process = start(ranks, tmp_path / "out", python=ranks.forked_python)
    wait_for_case_3(tmp_path)
    pids = [int(path.read_text()) for path in tmp_path.rglob("rank*.pid")]
    shutil.rmtree(tmp_path / "out")
    _, stderr = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 2, stderr
    assert "cannot be written: No such file or directory" in stderr and "Traceback" not in stderr
    assert_gone(pids)


def test_a_run_file_that_is_moved_away_is_not_begun_anew_without_a_header(ranks: Ranks, tmp_path: Path) -> None:
    process = start(ranks, tmp_path, python=ranks.forked_python)
    wait_for_case_3(tmp_path)
    (file,) = run_files(tmp_path)
    file.rename(tmp_path / "kept")
    _, stderr = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 2 and f"{file} was moved or deleted" in stderr and not file.exists()
    assert [json.loads(line)["type"] for line in (tmp_path / "kept").read_text().splitlines()] == [
        "run",
        "case",
        "case",
    ]
