"""Files that were damaged: 2,000 mutations of valid files of each kind, through the commands that read them.

No command may end with a traceback, and what is surely no measurement (text, NaN, a negative time or one over a day
where a number was) must be refused, or left out with a warning.

Run it with `python benchmarks/bench_mutated_files.py`; `... KIND COUNT SEED` for one kind, other counts and seeds.
"""

import json
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import click
from click.testing import CliRunner, Result

from benchmarks.claims import Claim, Row
from benchmarks.mutations import GOLDEN, KINDS, SUFFIXES, Mutated, mutated

IS_LONG = True
CLAIMS = (
    Claim(
        "damaged files (2,000 mutations of each of 6 kinds): tracebacks; accepted invalid values",
        "{:.0f}; {:.0f}",
        "0; 0",
        ("all kinds together: traceback", "all kinds together: nonsense"),
    ),
)
COUNT, SEED = 2000, 1
PRICE = "price"
DRAWN_EVERY = 50  # drawing takes a hundred times as long as reading
# What a command says of what it did not take; "raised": a case whose times are none.
SAID = ("left out", '"raised"')
FORMS = ("pytest-benchmark", "customSmallerIsBetter")


def main(kinds: Sequence[str] = tuple(KINDS), count: int = COUNT, seed: int = SEED) -> list[Row]:
    """Rows (name, measured, allowed) for each kind of file: tracebacks, and nonsense that was taken for measured.

    Their sums over the kinds follow.
    """
    rows: list[Row] = []
    for kind in kinds:
        result = list(faults(kind, count, seed))
        for what in ("traceback", "nonsense"):
            faulty = [where for name, where in result if name == what]
            for where in faulty[:5]:
                print(f"  {kind}: {what}: {where}", file=sys.stderr)
            rows.append((f"{kind} files, {count} mutations: {what}", float(len(faulty)), 0.0))
    for what in ("traceback", "nonsense"):
        total = sum(measured for name, measured, _ in rows if name.endswith(what))
        rows.append((f"all kinds together: {what}", total, 0.0))
    return rows


def faults(kind: str, count: int, seed: int = SEED) -> Iterator[tuple[str, str]]:
    """("traceback" or "nonsense", where) of each mutation that a command did not survive or did not see."""
    with tempfile.TemporaryDirectory() as folder:
        for number in range(count):
            draw = random.Random(f"{kind} {seed} {number}")
            change = mutated(kind, draw)
            for what, where in faults_of(kind, change, Path(folder), draw.random(), number % DRAWN_EVERY == 0):
                yield what, f"mutation {number}, {change.what}: {where}"


def faults_of(kind: str, change: Mutated, folder: Path, where: float, is_drawn: bool) -> Iterator[tuple[str, str]]:
    """The faults of one mutated file; `where`, within [0, 1), chooses some of its commands."""
    path = folder / f"mutated{SUFFIXES.get(kind, '.json')}"
    path.write_bytes(change.data)
    commands = commands_for(kind, path, folder)
    first, *others = commands
    chosen = {int(where * len(others)), int(where * 7919) % len(others)} if others else set()
    drawn = drawing(kind, path, folder) if is_drawn else []
    for command in [first, *(others[index] for index in chosen), *drawn]:
        done = invoke(command)
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            yield "traceback", f"{' '.join(command)}: {done.exception!r}"[:400]
        elif command is first and change.is_nonsense and done.exit_code == 0 and not any(map(done.output.count, SAID)):
            yield "nonsense", " ".join(command)


def invoke(command: Sequence[str]) -> Result:
    """One command in this process."""
    return CliRunner().invoke(_cli(), list(command))


@cache
def _cli() -> click.Group:
    from distbench.cli.main import Commands
    from distbench.cli.main import main as cli

    # `plan` asks a child process that imports torch; what it does with a profile before is what is tried here. In a
    # group of its own: the product's has no such command.
    price = click.Command(PRICE, params=[click.Argument(["profile"])], callback=_price)
    return Commands(commands={**cli.commands, PRICE: price}, context_settings=cli.context_settings)


def _price(profile: str) -> None:
    """What plans need of a profile: its text, its digest, and a time for each of its lines."""
    from distbench.planning.cost_profile import load_profile, measured_cost
    from distbench.report.calibrations import profile_text
    from distbench.spec.file_io import DAY_S

    read = load_profile(Path(profile))
    click.echo(profile_text(read) + read.digest() + read.natively().digest())
    for line in read.lines:
        if not 0 <= line.seconds(1e6, 1) <= 2 * DAY_S + 2e6:
            click.echo("an absurd price")
    measured_cost(read, read.mesh)


def commands_for(kind: str, path: Path, folder: Path) -> list[list[str]]:
    """What reads such a file; the first one says whether it was taken."""
    file, good = str(path), str(GOLDEN / "collectives.jsonl")
    sides = [["gate", good, file], ["gate", file, good, "--format", "json", "--allow-different", "machine"]]
    sides += [
        ["gate", file, good, "--format", "github"],
        ["history", "--results", file],
        ["baseline", "save", file, "--results", str(folder)],
    ]
    exports = [["export", form, file] for form in FORMS]
    if kind in ("run", "trace"):
        reports = [["report", file, "--format", form] for form in ("json", "table", "markdown", "csv")]
        if kind == "run":
            return [*reports, *sides, *exports, ["report", file, "--group-by", "kind,status"]]
        paths = [["report", "--paths", file, "--format", form] for form in ("json", "table", "csv")]
        more = [["report", "--paths", file, "--chrome", str(folder / "c.json")], ["report", "--diff", file, file]]
        return [*paths, *more, ["report", "--paths", file, "--group-by", "kind"], *reports]
    if kind == "baseline":
        return [["baseline", "show", file], *sides, *exports]
    if kind == "nccl-tests":
        return [["export", "run", file], *sides, *exports]
    if kind == "profile":
        return [[PRICE, file]]
    if kind == "recording":
        return [
            ["simulate", "--recording", file, "--results", str(folder), *given] for given in ((), ("--format", "json"))
        ]
    other = folder / "good.signature"
    other.write_text(KINDS["signature"]()[0])
    compared = [["signature", "check", file, str(other), "--format", form] for form in ("table", "markdown", "junit")]
    return [
        *compared,
        ["signature", "check", str(other), file, "--format", "json"],
        ["signature", "check", file, file],
    ]


def drawing(kind: str, path: Path, folder: Path) -> list[list[str]]:
    """The same for what draws."""
    if kind == "run":
        return [["report", str(path), "--page", str(folder / "p.html"), "--plots", str(folder / "plots")]]
    if kind == "trace":
        return [["report", "--paths", str(path), "--plots", str(folder / "plots"), "--page", str(folder / "p.html")]]
    return [["history", "--results", str(path), "--plots", str(folder / "plots")]] if kind == "baseline" else []


if __name__ == "__main__":
    kind, count, seed = [*sys.argv[1:], *("all", str(COUNT), str(SEED))[len(sys.argv) - 1 :]]
    for row in main(tuple(KINDS) if kind == "all" else (kind,), int(count), int(seed)):
        print(json.dumps(row))
