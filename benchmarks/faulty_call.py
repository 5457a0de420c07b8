"""A command under a fault, as data, and what became of it: how it ended, what it said, what it kept and left."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.chaos_faults import TOKEN, pids_with

ROOT = Path(__file__).resolve().parent.parent
WRONG = ("traceback", "hang", "orphan", "lost case", "unreadable", "exit code", "no sentence", "too long", "raw")
GRAVE = WRONG[:5]
MAX_LINES, MAX_CHARACTERS = 12, 1500  # of what a command says on standard error
END_S = 10  # how long what it started may take to end after it
POLL_S = 0.05
CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]|^::(?!error|warning|notice)", re.MULTILINE)
# distbench as a shell function; everything else is the fault's.
SHELL = 'distbench() { "$PYTHON" -m distbench "$@"; }\nexport GOLD PYTHON\n'


@dataclass(frozen=True)
class FaultyCall:
    """One fault.

    Args:
        command: a bash script, in a folder of its own; `distbench` is the command under test, $GOLD has run files.
        says: what must stand somewhere in what it printed, a regular expression; empty where nothing need.
        code: the exit code, or those that are right.
        files: name to content, put into the folder before.
        timeout_s: after which it hangs.
        num_ok: cases that must stand as ok in the run files below the folder, at least; None where none is measured.
    """

    name: str
    command: str
    says: str
    code: int | tuple[int, ...] = 2
    files: Mapping[str, str | bytes] = field(default_factory=dict)
    timeout_s: float = 60.0
    num_ok: int | None = None


@dataclass(frozen=True)
class Outcome:
    """What became of it: how often each of WRONG was seen, the exit code, and what was printed."""

    wrong: dict[str, int]
    exit_code: int
    said: str
    seconds: float


def tried(fault: FaultyCall, folder: Path) -> Outcome:
    """Run the command in that empty folder."""
    for name, content in fault.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content)
    token = f"{os.getpid()}-{time.monotonic_ns()}"
    out, err = folder.parent / "stdout", folder.parent / "stderr"
    began = time.monotonic()
    exit_code = _run(fault, folder, token, out, err)
    seconds = time.monotonic() - began
    wrong = Counter[str]()
    if exit_code is None:
        wrong["hang"], exit_code = 1, 1
    else:
        while pids_with(token) and time.monotonic() < began + seconds + END_S:
            time.sleep(POLL_S)
        wrong["orphan"] = len(pids_with(token))
    for pid in pids_with(token):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    printed, message = (path.read_text(errors="surrogateescape") for path in (out, err))
    wrong += judge(fault, exit_code, printed, message)
    if fault.num_ok is not None:
        wrong += _kept(fault.num_ok, folder)
    return Outcome(dict(+wrong), exit_code, message or printed, seconds)


def judge(fault: FaultyCall, exit_code: int, printed: str, message: str) -> Counter[str]:
    """What of WRONG shows in the exit code, standard output and standard error."""
    wrong = Counter[str]()
    lines = [line for line in message.splitlines() if line.strip()]
    wrong["traceback"] = int("Traceback (most recent call last)" in message + printed)
    wrong["exit code"] = int(exit_code not in (fault.code if isinstance(fault.code, tuple) else (fault.code,)))
    # Lines are wrapped by click.
    wrong["no sentence"] = int(not re.search(fault.says, " ".join((message + printed).split())))
    wrong["too long"] = int(len(lines) > MAX_LINES or any(len(line) > MAX_CHARACTERS for line in lines))
    wrong["raw"] = int(bool(CONTROL.search(message + printed)))
    return +wrong


def _run(fault: FaultyCall, folder: Path, token: str, out: Path, err: Path) -> int | None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("RANK", "WORLD_SIZE"))}
    environment |= {TOKEN: token, "PYTHONPATH": str(ROOT), "PYTHON": sys.executable}
    environment["GOLD"] = str(ROOT / "tests" / "golden")
    with out.open("wb") as printed, err.open("wb") as errors:
        process = subprocess.Popen(
            ["bash", "-c", SHELL + fault.command],
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=errors,
            cwd=folder,
            env=environment,
            start_new_session=True,
        )
        try:
            return process.wait(fault.timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return None


def _kept(num_ok: int, folder: Path) -> Counter[str]:
    """Whether the run files hold as many ok cases as must be there, and `report` reads each."""
    files = [path for path in folder.rglob("*.jsonl") if "logs" not in path.relative_to(folder).parts]
    statuses = [record.get("status") for path in files for record in _cases(path)]
    read = [sys.executable, "-m", "distbench", "report"]
    bad = [path for path in files if subprocess.run([*read, str(path)], capture_output=True, cwd=ROOT).returncode]
    return Counter({"lost case": max(num_ok - statuses.count("ok"), 0), "unreadable": len(bad)})


def _cases(path: Path) -> list[dict[str, str]]:
    records = []
    for line in path.read_text(errors="replace").splitlines():
        with suppress(ValueError):
            records.append(json.loads(line))
    return [record for record in records if record.get("type") == "case"]
