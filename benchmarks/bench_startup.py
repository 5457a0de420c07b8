"""`distbench --help` and `list` against a bare `import click`: whole processes, in turn, ratio of medians."""

import statistics
import subprocess
import sys
import time

from benchmarks.claims import Claim, Row

ROUNDS = 15
COMMANDS = {"--help": 1.5, "list": 2.0}  # to the allowed ratio

CLAIMS = (
    Claim(
        "time of `distbench --help`, of `distbench list` relative to `import click`",
        "{:.2f}x, {:.2f}x",
        "at most 1.5x, 2x",
    ),
)


def seconds(arguments: list[str]) -> float:
    """Wall time of one Python process."""
    start = time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def main() -> list[Row]:
    """Rows for the benchmark table."""
    for name in COMMANDS:
        seconds(["-m", "distbench", name])  # compiles what it imports, as an installation does
    taken: dict[str, list[float]] = {name: [] for name in ("click", *COMMANDS)}
    for _ in range(ROUNDS):
        taken["click"].append(seconds(["-c", "import click"]))
        for name in COMMANDS:
            taken[name].append(seconds(["-m", "distbench", name]))
    base = statistics.median(taken["click"])
    return [
        (f"distbench {name} / import click", statistics.median(taken[name]) / base, allowed)
        for name, allowed in COMMANDS.items()
    ]
