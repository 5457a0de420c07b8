"""Error bars of predictions, from residuals of published steps that nothing was fitted to.

A residual is the logarithm of simulated over published. Rows of one source have common causes, so sources count, not
rows: every source has the same weight, and the t distribution has one degree of freedom less than sources. An interval
is for one further row of a further source, with probability 90 %.
"""

import functools
import itertools
import math
import random
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from msgspec import Struct

from distbench.simulate.hardware_file import AT, Hardware
from distbench.simulate.published import FOLDER, plan_kinds
from distbench.spec.json_decoder import Format, read_record

RESIDUALS = FOLDER / "residuals.json"
FORMAT = Format("file of residuals", "distbench simulate --against published --save FILE writes it")
MIN_SOURCES = 3  # of a class; classes with fewer are widened
LEVEL = 0.9
# Two-sided 90 % quantiles of the t distribution by degrees of freedom; later ones use the last.
T_QUANTILES = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812, 1.796, 1.782, 1.771, 1.761, 1.753)
TIE_Z = 1.2816  # the faster plan is faster with a probability of less than 90 %
DRAWS = 2000


class Residual(Struct, frozen=True):
    """One simulated row of the record.

    Args:
        model: scenario, sizes and machine: rows of one source with equal ones differ in their plan only.
        hardware, plan, dtype, mode: the row's class.
        log_error: of the step time; positive is simulated too slow.
        memory_log_error: of reserved memory, where published.
    """

    name: str
    source: str
    split: str
    model: str
    hardware: str
    plan: str
    dtype: str
    mode: str
    log_error: float
    memory_log_error: float | None = None
    stated_cause: str = ""


class ResidualFile(Struct, frozen=True):
    """Residuals of all simulated rows, and the commit whose models they are of."""

    commit: str
    rows: list[Residual]


class Traits(NamedTuple):
    """The class of a prediction."""

    hardware: str
    plan: str
    dtype: str
    mode: str


class Bar(NamedTuple):
    """An interval of published over simulated.

    Args:
        low, high: factors on the simulated figure.
        of: the class whose rows it is from, in words.
    """

    low: float
    high: float
    num_rows: int
    num_sources: int
    of: str


TimedKind = tuple[float, str]
"""A plan's step time and its kinds of parallelism."""

# From the narrowest class to all rows.
CLASSES: Sequence[tuple[str, ...]] = (
    ("hardware", "plan", "dtype", "mode"),
    ("hardware", "dtype", "mode"),
    ("hardware",),
    ("dtype", "mode"),
    (),
)


@functools.cache
def held_out(path: Path = RESIDUALS) -> tuple[Residual, ...]:
    """Return the residuals of held-out rows that error bars use; () if the file is missing."""
    return bar_rows(read_record(path, ResidualFile, FORMAT).rows) if path.is_file() else ()


def bar_rows(rows: Sequence[Residual]) -> tuple[Residual, ...]:
    """Return held-out rows with the simulated machine and step, as far as the source states."""
    return tuple(row for row in rows if row.split == "held-out" and not row.stated_cause)


def machine_of(name: str) -> str:
    """Return a hardware file's name without its software."""
    return name.partition(AT)[0]


def traits_of(hardware: Hardware, mesh: Mapping[str, int], is_float8: bool, is_compiled: bool) -> Traits:
    """Return the class of a prediction."""
    return Traits(
        machine_of(hardware.name),
        plan_kinds(mesh),
        "float8" if is_float8 else "bf16",
        "compile" if is_compiled else "eager",
    )


def bar_range(value: float, bar: Bar | None) -> list[float] | None:
    """Return both ends of a figure's error bar."""
    return None if bar is None else [value * bar.low, value * bar.high]


def _time_error(row: Residual) -> float | None:
    return row.log_error


def _memory_error(row: Residual) -> float | None:
    return row.memory_log_error


def time_bar(traits: Traits, rows: Sequence[Residual] | None = None) -> Bar | None:
    """Return the error bar of a step time; None without enough held-out rows."""
    return _bar(traits, held_out() if rows is None else rows, _time_error)


def memory_bar(traits: Traits, rows: Sequence[Residual] | None = None) -> Bar | None:
    """Return the error bar of reserved memory; None without enough held-out rows."""
    return _bar(traits, held_out() if rows is None else rows, _memory_error)


def has_class(hardware: Hardware, rows: Sequence[Residual] | None = None) -> bool:
    """Return whether any held-out row is of this machine."""
    return any(row.hardware == machine_of(hardware.name) for row in (held_out() if rows is None else rows))


def no_class_text(hardware: Hardware) -> str:
    """Return the sentence on a machine without rows in the record."""
    return (
        f"the record has no held-out row of hardware file {hardware.name}, so error bars are from other machines; "
        "add rows with simulate --against, or measure one step"
    )


def _bar(traits: Traits, rows: Sequence[Residual], error: Callable[[Residual], float | None]) -> Bar | None:
    for names in CLASSES:
        wanted = [getattr(traits, name) for name in names]
        by_source: dict[str, list[float]] = defaultdict(list)
        for row in rows:
            value = error(row)
            if value is not None and [getattr(row, name) for name in names] == wanted:
                by_source[row.source].append(value)
        if len(by_source) >= MIN_SOURCES:
            mean, deviation = _moments(list(by_source.values()))
            half = _quantile(len(by_source) - 1) * deviation * math.sqrt(1 + 1 / len(by_source))
            count = sum(map(len, by_source.values()))
            of = ", ".join(wanted) or "all machines"
            return Bar(math.exp(-mean - half), math.exp(-mean + half), count, len(by_source), of)
    return None


def _moments(sources: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Return mean and standard deviation of one row of a random source."""
    mean = sum(sum(values) / len(values) for values in sources) / len(sources)
    spread = sum(sum((value - mean) ** 2 for value in values) / len(values) for values in sources)
    return mean, math.sqrt(spread / (len(sources) - 1))


def _quantile(freedom: int) -> float:
    return T_QUANTILES[min(freedom, len(T_QUANTILES)) - 1]


class DifferenceErrors(NamedTuple):
    """Standard deviations of the logarithm of a ratio of two plans' step times.

    Args:
        same_kind: of two plans with equal kinds of parallelism.
        other_kind: of two plans with other kinds; the error of two unrelated rows if no source has such a pair.
        num_pairs, num_sources: pairs that `same_kind` is from.
    """

    same_kind: float
    other_kind: float
    num_pairs: int
    num_sources: int


def difference_errors(rows: Sequence[Residual] | None = None) -> DifferenceErrors | None:
    """Return the errors of ratios of plans, from pairs of rows of one source, model and machine; None without enough
    sources.
    """
    return _difference_errors(held_out() if rows is None else tuple(rows))


@functools.cache
def _difference_errors(rows: tuple[Residual, ...]) -> DifferenceErrors | None:
    pairs = pairs_of(rows)
    same = _by_source([pair for pair in pairs if pair[0].plan == pair[1].plan])
    other = _by_source([pair for pair in pairs if pair[0].plan != pair[1].plan])
    by_source: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        by_source[row.source].append(row.log_error)
    if len(same) < MIN_SOURCES:
        return None
    same_kind = _root_mean_square(same)
    unrelated = math.sqrt(2) * _moments(list(by_source.values()))[1]
    other_kind = _root_mean_square(other) if len(other) >= MIN_SOURCES else unrelated
    return DifferenceErrors(same_kind, max(same_kind, other_kind), sum(map(len, same.values())), len(same))


def pairs_of(rows: Sequence[Residual]) -> list[tuple[Residual, Residual]]:
    """Return pairs of rows of one source, model and machine, which differ in their plan."""
    groups: dict[tuple[str, str], list[Residual]] = defaultdict(list)
    for row in rows:
        groups[row.source, row.model].append(row)
    return [pair for group in groups.values() for pair in itertools.combinations(group, 2)]


def _by_source(pairs: Sequence[tuple[Residual, Residual]]) -> dict[str, list[float]]:
    differences: dict[str, list[float]] = defaultdict(list)
    for row, other in pairs:
        differences[row.source].append(row.log_error - other.log_error)
    return differences


def _root_mean_square(by_source: Mapping[str, Sequence[float]]) -> float:
    squares = [sum(value**2 for value in values) / len(values) for values in by_source.values()]
    return math.sqrt(sum(squares) / len(squares))


def is_tie(plan: TimedKind, other: TimedKind, errors: DifferenceErrors) -> bool:
    """Return whether two plans, each its step time and its kinds of parallelism, are too close for an order."""
    error = errors.same_kind if plan[1] == other[1] else errors.other_kind
    return abs(math.log(plan[0] / other[0])) < TIE_Z * error


def best_probability(plans: Sequence[TimedKind], errors: DifferenceErrors) -> float:
    """Return the probability that the first plan is the fastest, of plans as for `is_tie`.

    Each plan has an error of its own, and plans of one kind have a common error; all are normal.
    """
    own = errors.same_kind / math.sqrt(2)
    common = math.sqrt(max(errors.other_kind**2 - errors.same_kind**2, 0.0) / 2)
    kinds = sorted({kind for _, kind in plans})
    draw = random.Random(0)
    wins = 0
    for _ in range(DRAWS):
        of_kind = {kind: draw.gauss(0, common) for kind in kinds}
        times = [math.log(step_s) + of_kind[kind] + draw.gauss(0, own) for step_s, kind in plans]
        wins += times[0] <= min(times)
    return wins / DRAWS


def coverage(rows: Sequence[Residual]) -> tuple[int, int]:
    """Return the number of rows whose step time is within the error bar from all other sources, and of all rows."""
    return _coverage(rows, _time_error)


def memory_coverage(rows: Sequence[Residual]) -> tuple[int, int]:
    """Return the number of rows with reserved memory within the error bar, and of all rows with published memory."""
    return _coverage(rows, _memory_error)


def _coverage(rows: Sequence[Residual], error: Callable[[Residual], float | None]) -> tuple[int, int]:
    inside = count = 0
    for row in rows:
        value = error(row)
        others = [other for other in rows if other.source != row.source]
        bar = _bar(Traits(row.hardware, row.plan, row.dtype, row.mode), others, error)
        if value is None or bar is None:
            continue
        count += 1
        inside += bar.low <= math.exp(-value) <= bar.high
    return inside, count
