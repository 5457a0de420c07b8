"""`./run.sh gpu-tests`: the tests that need accelerators, and one file that says what passed, for a bug report."""

import datetime
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
REPORT = ROOT / "build" / "gpu-tests.md"
MARKED = "gpu or multi_gpu"
MAX_LINES = 40  # of what a failed test says
Row = tuple[str, str, float, str]


@dataclass
class Outcomes:
    """A plugin of pytest: each test's outcome, seconds, and what a failed or skipped one says.

    Args:
        on_row: called with the rows after each test: the file is there too where a device brings all down.
    """

    on_row: Callable[[list[Row]], object]
    rows: list[Row] = field(default_factory=list)

    def pytest_runtest_logreport(self, report: Any) -> None:
        """A test's call, or what kept it from being called."""
        if report.when == "call" or report.outcome != "passed":
            message = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
            self.rows.append((report.nodeid, report.outcome, report.duration, message))
            self.on_row(self.rows)


def text_of(rows: Sequence[Row], machine: str, when: str) -> str:
    """The report, in Markdown: the machine as `distbench doctor` has it, a row a test, and what failed ones say."""
    counts = ", ".join(
        f"{sum(row[1] == outcome for row in rows)} {outcome}" for outcome in ("passed", "failed", "skipped")
    )
    lines = ["# GPU tests of distbench", "", f"{when}: {counts}", "", "```", *machine.splitlines(), "```", ""]
    lines += ["| test | outcome | s | |", "|---|---|---|---|"]
    for name, outcome, seconds, message in rows:
        why = message.replace("|", "\\|") if outcome == "skipped" else ""
        lines.append(f"| {name} | {outcome} | {seconds:.1f} | {why} |")
    for name, outcome, _, message in rows:
        if outcome == "failed":
            lines += ["", f"## {name}", "", "```", *message.splitlines()[-MAX_LINES:], "```"]
    return "\n".join([*lines, ""])


def main(arguments: Sequence[str]) -> int:
    """pytest's exit code; 2 where no test ran."""
    doctor = [sys.executable, "-m", "distbench", "doctor", "--verbose"]
    environment = {**os.environ, "COLUMNS": "120"}
    message = subprocess.run(doctor, capture_output=True, text=True, check=False, cwd=ROOT, env=environment)
    when = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    REPORT.parent.mkdir(exist_ok=True)

    def write(rows: Sequence[Row]) -> None:
        REPORT.write_text(text_of(rows, message.stdout or message.stderr, when), encoding="utf-8")

    outcomes = Outcomes(write)
    write([])
    sys.path.insert(0, str(ROOT))  # before tests/, which has a folder `benchmarks` too
    code = int(pytest.main([str(ROOT / "tests"), "-m", MARKED, *arguments], plugins=[outcomes]))
    print(f"what passed is in {REPORT}; attach it to your report")
    is_complete = code in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)  # else pytest printed the reason
    if is_complete and not any(outcome != "skipped" for _, outcome, _, _ in outcomes.rows):
        print("no test ran: there is no accelerator that this torch can use; see distbench doctor", file=sys.stderr)
        return code or 2
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
