"""`distbench --help` and `list` against a bare `import click`: whole processes, in turn, ratio of medians."""

import statistics
import subprocess
import sys
import time

from benchmarks.claims import Claim, Row

ROUNDS = 15
COMMANDS = {"--help": ["-m", "distbench", "--help"], "list": ["-m", "distbench", "list"]}

CLAIMS = (
    Claim("time of `distbench --help`, of `distbench list` relative to `import click`", "{:.2f}x, {:.2f}x", "under 3x"),
)


def seconds(arguments: list[str]) -> float:
    """Wall time of one Python process."""
    start = time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def main() -> list[Row]:
    """Rows for the benchmark table."""
    for arguments in COMMANDS.values():
        seconds(arguments)  # compiles what it imports, as an installation does
    taken: dict[str, list[float]] = {name: [] for name in ("click", *COMMANDS)}
    for _ in range(ROUNDS):
        taken["click"].append(seconds(["-c", "import click"]))
        for name, arguments in COMMANDS.items():
            taken[name].append(seconds(arguments))
    base = statistics.median(taken["click"])
    return [(f"distbench {name} / import click", statistics.median(taken[name]) / base, 3.0) for name in COMMANDS]
