"""Error bars, against values by hand and against rows made up with a known spread."""

import math
import random

import pytest

from distbench.simulate.error_bars import (
    DifferenceErrors,
    Residual,
    Traits,
    best_probability,
    coverage,
    difference_errors,
    is_tie,
    memory_bar,
    time_bar,
)

TRAITS = Traits("h100", "FSDP", "bf16", "eager")


def row(source: str, log_error: float, hardware: str = "h100", plan: str = "FSDP", **other: object) -> Residual:
    values = {"name": "a row", "split": "held-out", "model": "a model", "dtype": "bf16", "mode": "eager", **other}
    return Residual(source=source, log_error=log_error, hardware=hardware, plan=plan, **values)  # type: ignore[arg-type]


def test_bar_by_hand() -> None:
    """Three sources, mean 0.05, deviation 0.1: Student's t with 2 degrees of freedom is 2.920 at 90 %."""
    bar = time_bar(TRAITS, [row("a", -0.05), row("b", 0.05), row("c", 0.15)])
    assert bar is not None
    half = 2.920 * 0.1 * math.sqrt(1 + 1 / 3)
    assert bar.low == pytest.approx(math.exp(-0.05 - half))
    assert bar.high == pytest.approx(math.exp(-0.05 + half))
    assert (bar.num_rows, bar.num_sources) == (3, 3)


def test_sources_count_and_not_rows() -> None:
    rows = [row("a", -0.05), row("b", 0.05), row("c", 0.15)]
    more = [*rows, *(row("c", 0.15) for _ in range(50))]
    one, other = time_bar(TRAITS, rows), time_bar(TRAITS, more)
    assert one is not None and other is not None
    assert one[:2] == pytest.approx(other[:2])


def test_a_class_of_few_sources_is_widened() -> None:
    here = [row("a", 0.01), row("b", 0.02)]
    elsewhere = [row("c", 0.3, "a100"), row("d", -0.3, "a100")]
    bar = time_bar(TRAITS, [*here, *elsewhere])
    assert bar is not None and bar.num_sources == 4 and bar.of == "bf16, eager"
    assert time_bar(TRAITS, here) is None
    assert memory_bar(TRAITS, [*here, *elsewhere]) is None


def test_coverage_of_made_up_sources() -> None:
    """Sources with a common error of 8 % and rows with 3 % more: about nine in ten rows are within their bars."""
    draw = random.Random(1)
    inside = count = 0
    for _ in range(40):
        rows = []
        for source in range(10):
            common = draw.gauss(0.05, 0.08)
            rows += [row(str(source), common + draw.gauss(0, 0.03)) for _ in range(draw.choice([1, 3, 8]))]
        within, of = coverage(rows)
        inside, count = inside + within, count + of
    assert 0.86 < inside / count < 0.95


def test_ratios_share_their_source() -> None:
    rows = [row(name, common + own, model="m") for name, common in zip("abc", (0.5, 0.0, -0.5), strict=True)
            for own in (0.0, 0.04)]  # fmt: skip
    errors = difference_errors(rows)
    assert errors is not None
    assert errors.same_kind == pytest.approx(0.04) and errors.num_pairs == 3
    assert errors.other_kind > 0.5  # no source has two kinds of plans
    assert difference_errors(rows[:4]) is None


def test_probability_of_the_best() -> None:
    errors = DifferenceErrors(0.04, 0.1, 10, 4)
    assert best_probability([(1.0, "FSDP"), (1.0, "FSDP")], errors) == pytest.approx(0.5, abs=0.04)
    # One deviation apart: the normal distribution at 1 is 0.841.
    assert best_probability([(1.0, "FSDP"), (math.exp(0.04), "FSDP")], errors) == pytest.approx(0.841, abs=0.03)
    assert best_probability([(1.0, "FSDP"), (math.exp(0.1), "FSDP x TP")], errors) == pytest.approx(0.841, abs=0.03)
    assert best_probability([(1.0, "FSDP"), (2.0, "FSDP")], errors) == 1.0


def test_ties() -> None:
    errors = DifferenceErrors(0.04, 0.1, 10, 4)
    assert is_tie((1.0, "FSDP"), (1.05, "FSDP"), errors)
    assert not is_tie((1.0, "FSDP"), (1.06, "FSDP"), errors)
    assert is_tie((1.0, "FSDP"), (1.12, "FSDP x TP"), errors)
