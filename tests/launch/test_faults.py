"""Faults round a launch: full disks, folders that vanish, signals, clocks that jump, partners that never come."""

import contextlib
import errno
import os
import resource
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from test_relaunch import footer_in, job_in

from distbench.launch import launch, run_job
from distbench.launch import run_job as job_record
from distbench.launch.display import Display, Plain, display_for
from distbench.launch.rendezvous import joined_ranks
from distbench.launch.run_job import JobRecord
from distbench.launch.watch_ranks import Attempt, Cause, ask_for_stacks, cause_of, why_unwritable
from distbench.processes.signals import STOPPING, Stop, noted_stop, stopped_as_interrupt
from distbench.ranks.failure import report_failure
from distbench.records.progress_events import FILE_NAME, ProgressReader, ProgressWriter
from distbench.records.rank_logs import RankLog
from distbench.records.run_file import SCHEMA_VERSION, append
from distbench.spec import UserError, find
from distbench.spec.errors import StorageFailed
from distbench.spec.file_io import write_whole

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
HEADER = {"type": "run", "schema_version": SCHEMA_VERSION}
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGINT)


@contextlib.contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """What a file takes at most, as a disk that fills up: part of a record is written, then an OSError."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_an_append_that_the_disk_does_not_take_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    file, new = tmp_path / "run.jsonl", tmp_path / "new.jsonl"
    append(file, HEADER)
    before = file.read_bytes()
    with largest_file(len(before) + 100):
        with pytest.raises(OSError, match="File too large"):
            append(file, {"type": "case", "text": "x" * 300})
        with pytest.raises(OSError, match="File too large"):
            append(new, {"type": "run", "text": "x" * 300})
        append(file, {"type": "footer"})
    assert file.read_bytes() == before + b'{"type":"footer"}\n' and not new.exists()


def test_a_file_that_the_disk_does_not_take_is_what_it_was(tmp_path: Path) -> None:
    file, link = tmp_path / "profile.json", tmp_path / "link"
    file.write_text("old")
    file.chmod(0o640)
    link.symlink_to(file)
    with largest_file(100):
        for path in (file, link, tmp_path / "new"):
            with pytest.raises(OSError, match="File too large") as caught:
                write_whole(path, "x" * 300)
            assert caught.value.filename == str(path)
        assert file.read_text() == "old"
        write_whole(link, "new")
    assert file.read_text() == "new" and file.stat().st_mode & 0o777 == 0o640 and link.is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "profile.json"]
    write_whole(file, b"\xff")
    assert file.read_bytes() == b"\xff"
    write_whole(Path("/dev/null"), "x")
    with pytest.raises(OSError, match="No space left"):
        write_whole(Path("/dev/full"), "x")


def test_progress_that_cannot_be_written_is_a_fault_of_the_storage(tmp_path: Path) -> None:
    with pytest.raises(StorageFailed, match=r"gone/.* cannot be written: No such file"):
        ProgressWriter(tmp_path / "gone" / FILE_NAME)
    with pytest.raises(StorageFailed, match="/dev/full cannot be written: No space left"):
        ProgressWriter(Path("/dev/full")).tell("plan", num_cases=3)
    file = tmp_path / FILE_NAME
    with largest_file(10), pytest.raises(StorageFailed, match="No space left"):
        ProgressWriter(file).tell("plan", num_cases=3)
    assert file.stat().st_size == 10


def test_progress_is_read_on_when_its_file_is_deleted_and_half_a_line_is_left_out(tmp_path: Path) -> None:
    file = tmp_path / FILE_NAME
    reader, writer = ProgressReader(file), ProgressWriter(file)
    with contextlib.closing(reader), contextlib.closing(writer):
        writer.tell("plan", num_cases=3)
        assert [*reader.news()] == [{"event": "plan", "num_cases": 3}]
        with file.open("a") as other:
            other.write('{"event": "ca{"event": "case"}\n[1]\n')
        file.unlink()
        writer.tell("end")
        assert [*reader.news()] == [{"event": "end"}]


def test_a_rank_whose_log_folder_is_gone_fails_without_another_failure(tmp_path: Path) -> None:
    report_failure(tmp_path / "gone", 0, "raised", "why")


def test_another_thread_than_the_main_one_handles_no_signal() -> None:
    """`distbench.run` on a notebook's thread: Python lets the main thread alone set handlers."""
    before = [signal.getsignal(each) for each in STOPPING]

    def look() -> bool:
        with stopped_as_interrupt(), noted_stop() as stop:
            return stop.is_requested or before != [signal.getsignal(each) for each in STOPPING]

    with ThreadPoolExecutor() as pool:
        assert pool.submit(look).result() is False


def test_a_failure_file_is_whole_or_not_there(tmp_path: Path) -> None:
    """The parent read a rank that was killed while it wrote as a full disk."""
    with largest_file(20):
        report_failure(tmp_path, 0, "gone", "rank 1 has ended")
    assert list(tmp_path.iterdir()) == []
    report_failure(tmp_path, 0, "gone", "rank 1 has ended")
    assert cause_of(tmp_path, 1) == Cause("gone", "rank 1 has ended", 0)


def test_what_a_rank_prints_on_a_full_disk_is_lost_and_no_reason_to_fail() -> None:
    with Path("/dev/full").open("wb") as full, RankLog(full.fileno(), "w", closefd=False) as log:
        assert log.write(b"lost") == 4


def test_an_empty_pid_file_as_a_full_disk_leaves_it_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rank0.pid").touch()
    monkeypatch.setattr("distbench.launch.watch_ranks.STACKS_WAIT_S", 0.0)
    ask_for_stacks(tmp_path, os.getpid())


def test_a_folder_that_takes_no_more_is_named(tmp_path: Path) -> None:
    job = job_in(tmp_path)
    (tmp_path / "logs").mkdir()
    assert why_unwritable(job) == ""
    with largest_file(100):
        assert why_unwritable(job) == f"{tmp_path} cannot be written: File too large"
    (tmp_path / "logs").rmdir()
    assert why_unwritable(job).endswith("cannot be written: No such file or directory")
    assert [*tmp_path.iterdir()] == []


def test_the_footer_takes_the_room_of_the_progress_on_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_in(tmp_path)
    (tmp_path / "logs").mkdir()
    progress = tmp_path / "logs" / FILE_NAME
    progress.write_text("x" * 5000)
    append(tmp_path / "run.jsonl", HEADER)

    def with_little_room(path: Path, *records: Any) -> None:
        if progress.stat().st_size:
            raise FULL
        append(path, *records)

    monkeypatch.setattr(job_record, "append", with_little_room)
    JobRecord(job, None, Display()).close_run_file()
    assert footer_in(tmp_path)["type"] == "footer"


def test_a_clock_that_jumps_back_changes_no_duration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    append(tmp_path / "run.jsonl", HEADER)
    record, now = JobRecord(job_in(tmp_path), None, Display()), time.time()
    monkeypatch.setattr("time.time", lambda: now - 3600)
    record.close_run_file()
    footer = footer_in(tmp_path)
    assert 0 <= footer["wall_s"] < 60 and 0 <= footer["spent_s"]["other"] < 60


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": "1"}, "WORLD_SIZE is missing"),
        ({"WORLD_SIZE": "2"}, "RANK is missing"),
        ({"RANK": "5", "WORLD_SIZE": "2"}, "RANK=5 is not valid for WORLD_SIZE=2, which has ranks 0 to 1"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK=-1 is not valid"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "70000"}, "MASTER_PORT=70000 is not a valid port"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "http"}, "not numbers"),
        ({"SLURM_PROCID": "2", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2"}, "RANK=2 is not valid"),
    ],
)
def test_rank_variables_that_no_launcher_sets_are_refused(variables: dict[str, str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        joined_ranks(variables)


@pytest.fixture
def heeded() -> Iterator[None]:
    """Signals as a program in a terminal has them: a suite under nohup was started to ignore some."""
    before = {each: signal.getsignal(each) for each in STOPPING}
    for each in STOPPING:
        signal.signal(each, signal.default_int_handler if each == signal.SIGINT else signal.SIG_DFL)
    yield
    for each, handler in before.items():
        signal.signal(each, handler)


def test_a_signal_after_the_one_that_stopped_a_launch_is_ignored_while_the_command_ends(heeded: None) -> None:
    before = [signal.getsignal(each) for each in STOPPING]
    with stopped_as_interrupt():
        with noted_stop() as stop:
            signal.raise_signal(signal.SIGTERM)
        assert stop.is_requested
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGHUP)
    assert [signal.getsignal(each) for each in STOPPING] == before
    with pytest.raises(KeyboardInterrupt), stopped_as_interrupt():
        with noted_stop():
            pass
        signal.raise_signal(signal.SIGINT)


def test_noted_signals_interrupt_nothing_and_the_handlers_come_back() -> None:
    before = [signal.getsignal(each) for each in STOPPING]
    with noted_stop() as stop:
        assert not stop.is_requested
        for each in SIGNALS:
            signal.raise_signal(each)
        assert stop.is_requested
    assert [signal.getsignal(each) for each in STOPPING] == before


@pytest.mark.parametrize("first", STOPPING)
def test_only_the_first_signal_interrupts_however_deep_the_clean_up_is(heeded: None, first: signal.Signals) -> None:
    """A second one while the inner or the outer of two cleans up would leave things behind."""
    cleaned = []
    with pytest.raises(KeyboardInterrupt), stopped_as_interrupt():
        try:
            with stopped_as_interrupt():
                try:
                    signal.raise_signal(first)
                finally:
                    [signal.raise_signal(each) for each in SIGNALS]
                    cleaned.append("inner")
        finally:
            [signal.raise_signal(each) for each in SIGNALS]
            cleaned.append("outer")
    assert cleaned == ["inner", "outer"]


def stub(*ends: Any) -> Any:
    """Stands in for `attempt`: ends as told, or raises it, and has asked for an end where it says "asked"."""
    left = iter(ends)

    def attempt(job: Any, ranks: Any, display: Any, stop: Stop) -> Attempt:
        end = next(left)
        if isinstance(end, Exception):
            raise end
        stop.is_requested = end == "asked"
        append(Path(job.run_file), HEADER)
        return Attempt(num_cases=0, reached_end=True)

    return attempt


@pytest.mark.parametrize(
    ("end", "status", "exit_code", "message"),
    [
        (FULL, "failed", 2, "logs cannot be written: No space left on device"),
        (UserError("the ranks cannot be started"), "failed", 2, "the ranks cannot be started"),
        ("asked", "interrupted", 130, "interrupted after its last case"),
    ],
)
def test_what_ends_a_launch_between_its_ranks_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: Any, status: str, exit_code: int, message: str
) -> None:
    monkeypatch.setattr(run_job, "attempt", stub(end))
    outcome = launch(job_in(tmp_path), None, Display())
    assert (outcome.status, outcome.exit_code) == (status, exit_code) and message in outcome.message
    if end == "asked":
        assert footer_in(tmp_path)["status"] == "complete"


def test_a_signal_to_what_starts_ranks_or_is_one_is_named(tmp_path: Path) -> None:
    log = tmp_path / "launch.log"
    assert cause_of(tmp_path, -15) == Cause("killed", f"the launcher was killed by SIGTERM; see {log}")
    log = tmp_path / "launch-rank3.log"
    assert cause_of(tmp_path, -9, log) == Cause("killed", f"the rank was killed by SIGKILL; see {log}")


def test_progress_shown_to_nobody_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with Path("/dev/full").open("w", buffering=1) as full:
        Plain("demo", full).event({"event": "plan", "num_cases": 3})
        with contextlib.suppress(OSError):
            full.close()
    monkeypatch.setattr("sys.stderr", None)
    with display_for("demo", quiet=False) as shown:
        assert type(shown) is Display


def test_a_folder_given_as_a_scenario_is_named_as_one(tmp_path: Path) -> None:
    (tmp_path / "folder.py").mkdir()
    for target, message in (
        (tmp_path, "is a folder; give a .py file of this folder"),
        (tmp_path / "folder.py", "is not a file"),
    ):
        with pytest.raises(UserError, match=message):
            find(str(target))
