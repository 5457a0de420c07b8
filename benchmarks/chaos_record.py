"""What became of the launches of a chaos test: a line each in a file, written as it ends, and the table of them."""

import json
import os
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

FOLDER = Path("build") / "chaos"
WRONG = ("lost rows", "orphans", "tracebacks", "hangs", "unreadable", "exit code 0", "no sentence")


@dataclass(frozen=True)
class Run:
    """One launch: its number in the series, the fault, and how often each of WRONG was seen."""

    number: int
    fault: str
    scenario: str
    num_rows: int
    late: bool
    wrong: dict[str, int]
    exit_code: int
    said: str

    def line(self) -> str:
        """For who watches."""
        what = ", ".join(f"{count} {name}" for name, count in self.wrong.items()) or "fine"
        late = ", too late" if self.late else ""
        rows = f"{self.num_rows} rows{late}"
        message = self.said[:300]
        return (
            f"{self.number + 1}. {self.fault}, {self.scenario}, {rows}: {what}; exit code {self.exit_code}; {message}"
        )


def new_file(seed: int) -> Path:
    """Where a new series is kept."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    return FOLDER / f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-seed{seed}.jsonl"


def last_file(seed: int) -> Path | None:
    """The newest series of that seed; None where there is none."""
    return max(FOLDER.glob(f"*-seed{seed}.jsonl"), default=None)


def append(file: Path, run: Run) -> None:
    """Keep one more run, on the disk before this returns."""
    with file.open("a") as open_file:
        open_file.write(json.dumps(asdict(run)) + "\n")
        open_file.flush()
        os.fsync(open_file.fileno())


def read(file: Path) -> list[Run]:
    """The runs of a series; the half line of one that was interrupted is cut off."""
    whole = file.read_bytes()
    whole = whole[: whole.rfind(b"\n") + 1]
    os.truncate(file, len(whole))
    return [Run(**json.loads(line)) for line in whole.splitlines()]


def table(runs: Iterable[Run]) -> str:
    """Faults by what was seen, with a row of their sums."""
    rows: dict[str, list[Run]] = {}
    for run in runs:
        rows.setdefault(run.fault, []).append(run)
    rows["all"] = [run for of in rows.values() for run in of]
    lines = [f"{'fault':<38} {'runs':>5} {'too late':>9} " + " ".join(f"{name:>12}" for name in WRONG)]
    for name, of in rows.items():
        seen = sum((Counter(run.wrong) for run in of), Counter[str]())
        counts = " ".join(f"{seen[one]:>12}" for one in WRONG)
        lines.append(f"{name:<38} {len(of):>5} {sum(run.late for run in of):>9} {counts}")
    return "\n".join(lines)
