"""Faults of our own, through the real command line: bad values of every option, files of the wrong kind, scenario
files that go wrong in every way, surroundings that fail.

No command may end with a traceback, hang, leave a process behind or lose a case that was finished; each says what is
wrong in a line or few, and ends with the right exit code.

Run it with `./run.sh bench faults`, or `python -m benchmarks.bench_faults PART...` for the faults with such names.
"""

import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from benchmarks import faulty_files, faulty_options, faulty_scenarios, faulty_surroundings
from benchmarks.claims import Claim, Row
from benchmarks.faulty_call import GRAVE, WRONG, FaultyCall, Outcome, tried

IS_LONG = True
CLAIMS = (
    Claim(
        "injected faults: tracebacks, hangs, orphans, lost cases; wrong messages",
        "{:.0f}, {:.0f}, {:.0f}, {:.0f}; {:.0f} of {:.0f}",
        "0, 0, 0, 0; 0",
        (*(f"faults: {what}" for what in GRAVE[:4]), "faults: said wrongly", "faults"),
    ),
)
MODULES = (faulty_options, faulty_files, faulty_scenarios, faulty_surroundings)
FAULTS = tuple(fault for module in MODULES for fault in module.FAULTS)


def main(parts: Sequence[str] = ()) -> list[Row]:
    """Rows (name, measured, allowed): how many faults, and how many of them were met by each of WRONG."""
    faults = [fault for fault in FAULTS if not parts or any(part in fault.name for part in parts)]
    outcomes = []
    for number, fault in enumerate(faults, start=1):
        with tempfile.TemporaryDirectory(prefix="distbench-faults-", ignore_cleanup_errors=True) as name:
            (Path(name) / "here").mkdir()
            outcome = tried(fault, Path(name) / "here")
        outcomes.append(outcome)
        print(line(number, fault, outcome), flush=True)
    return rows_of(outcomes)


def line(number: int, fault: FaultyCall, outcome: Outcome) -> str:
    """For who watches: a fault, what was wrong about how it was met, and what was said last."""
    what = ", ".join(f"{count} {name}" for name, count in outcome.wrong.items()) or "fine"
    last = [line for line in outcome.said.splitlines() if line.strip()][-1:] or [""]
    head = f"{number:3} {fault.name[:60]:<60} {outcome.exit_code:4} {outcome.seconds:5.1f} s"
    return f"{head}  {what}: {ascii(last[0])[:200]}"


def rows_of(outcomes: Sequence[Outcome]) -> list[Row]:
    """Faults in which each of WRONG was seen; "said wrongly": none of the grave ones, but another."""
    seen = Counter(what for outcome in outcomes for what in outcome.wrong)
    slight = sum(bool(outcome.wrong) and not set(outcome.wrong) & set(GRAVE) for outcome in outcomes)
    rows = [(f"faults: {what}", float(seen[what]), 0.0) for what in WRONG]
    return [("faults", float(len(outcomes)), -100.0), *rows, ("faults: said wrongly", float(slight), 0.0)]


if __name__ == "__main__":
    began = time.monotonic()
    for row in main(sys.argv[1:]):
        print(row)
    print(f"{time.monotonic() - began:.0f} s")
