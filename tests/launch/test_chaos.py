"""The chaos test itself: that it sees what goes wrong, and keeps each run."""

from pathlib import Path

import pytest

from benchmarks import chaos_record
from benchmarks.chaos import judge
from benchmarks.chaos_faults import FAULTS
from benchmarks.chaos_record import Run


def judged(name: str, message: str, exit_code: int = 1, after: tuple[str, ...] = ("a", "b")) -> dict[str, int]:
    fault = next(fault for fault in FAULTS if fault.name == name)
    return dict(judge(fault, ["a", "b"], [*after], exit_code, message, late=False))


def test_the_chaos_test_sees_what_goes_wrong() -> None:
    assert judged("SIGKILL of a rank", "distbench: x: rank 1 was killed by SIGKILL\n") == {}
    assert judged("SIGKILL of a rank", "distbench: x: rank 1 raised\n", 0, ("b",)) == {
        "lost rows": 1,
        "exit code 0": 1,
        "no sentence": 1,
    }
    assert judged("SIGKILL of the command", "", -9) == {}
    assert judged("disk full", "Traceback (most recent call last):\n") == {"tracebacks": 1, "no sentence": 1}


def test_each_run_is_kept_and_half_a_line_of_an_interrupted_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chaos_record, "FOLDER", tmp_path)
    assert chaos_record.last_file(3) is None
    file = chaos_record.new_file(3)
    runs = [Run(n, "SIGKILL of a rank", "toy", 4, n == 1, {"orphans": n} if n else {}, 1, "killed") for n in range(3)]
    for run in runs[:2]:
        chaos_record.append(file, run)
    with file.open("a") as half:
        half.write('{"number": 2, "fau')
    assert chaos_record.last_file(3) == file and chaos_record.last_file(4) is None
    assert chaos_record.read(file) == runs[:2]
    chaos_record.append(file, runs[2])
    assert chaos_record.read(file) == runs
    rows = [line.split() for line in chaos_record.table(runs).splitlines()]
    assert rows[1][-9:] == ["3", "1", "0", "3", "0", "0", "0", "0", "0"] and rows[2][1:] == rows[1][-9:]
