"""The README's table of promises: each benchmark says its own rows, and what of its measurements they show.

A benchmark is a module `bench_NAME.py` with `main()`, which returns measurements (name, measured, allowed), and, for
what the table shall say of it, `CLAIMS`. `IS_LONG` says that it takes more than about two minutes; `quick()` measures
a part, and has all that its own `CLAIMS` name.
"""

import datetime
import importlib
import math
import pkgutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from types import ModuleType

Row = tuple[str, float, float]
"""Name, measured, allowed: a ceiling, or with a minus sign before it a floor; infinity promises nothing."""

HEAD = "| guarantee | measured | wanted | date, commit | `./run.sh bench` |\n|---|---|---|---|---|"


@dataclass(frozen=True)
class Claim:
    """One row of the table.

    Args:
        promise: what is claimed, as Markdown.
        figure: a format string over the values of the measurements that `of` names, in their order; it may also name
            `least`, `most` and `total` of them.
        wanted: what it must be, as Markdown.
        of: patterns of names of measurements, as in a shell.
    """

    promise: str
    figure: str
    wanted: str
    of: tuple[str, ...] = ("*",)

    def measured(self, rows: Sequence[Row]) -> str:
        """The figure of these measurements.

        Raises:
            ValueError: a pattern names none of them.
        """
        values = []
        for pattern in self.of:
            result = [value for name, value, _ in rows if fnmatchcase(name, pattern)]
            if not result:
                raise ValueError(f"{self.promise}: no measurement is called {pattern}")
            values += result
        text = self.figure.format(*values, least=min(values), most=max(values), total=sum(values))
        return text.replace("%", " %")

    def line(self, measured: str, benchmark: str) -> str:
        """The row of the table."""
        return f"| {self.promise} | {measured} | {self.wanted} | {date_and_commit()} | `{benchmark}` |"


@cache
def date_and_commit() -> str:
    """Today, and the commit that is measured, with "-dirty" where files differ from it; "no commit" outside of git."""
    describe = ["git", "describe", "--always", "--dirty", "--abbrev=7", "--match="]
    described = subprocess.run(describe, capture_output=True, text=True, check=False, cwd=Path(__file__).parent)
    return f"{datetime.date.today()}, {described.stdout.strip() or 'no commit'}"


def names() -> list[str]:
    """Every benchmark, by the module's name without `bench_`."""
    modules = pkgutil.iter_modules([str(Path(__file__).parent)])
    return [module.name.removeprefix("bench_") for module in modules if module.name.startswith("bench_")]


def benchmark(name: str) -> ModuleType:
    """The module of that name."""
    return importlib.import_module(f"benchmarks.bench_{name}")


def claims_of(module: ModuleType) -> tuple[Claim, ...]:
    """Its rows of the table; none where it has nothing to say there."""
    return getattr(module, "CLAIMS", ())


def lines(name: str, rows: Sequence[Row] | None, why_not: str = "") -> Iterator[str]:
    """A benchmark's rows of the table; where nothing was measured, why it was not."""
    for claim in claims_of(benchmark(name)):
        yield claim.line(why_not if rows is None else claim.measured(rows), name)


def holds(row: Row) -> bool:
    """Whether a measurement is as promised."""
    _, measured, allowed = row
    return measured >= -allowed if math.copysign(1, allowed) < 0 else measured <= allowed


def detail(row: Row) -> str:
    """A measurement as a line of text, with what was promised."""
    name, measured, allowed = row
    bound = f"at least {-allowed:g}" if math.copysign(1, allowed) < 0 else f"at most {allowed:g}"
    message = "" if math.isinf(allowed) else f"  ({bound})"
    return f"  {'ok  ' if holds(row) else 'FAIL'} {name:<72} {measured:9.3f}{message}"
