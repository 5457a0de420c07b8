"""The page of `distbench history` from series made here: levels, and changes named by their commit."""

from itertools import pairwise

import pytest

from distbench.judge.history import MAX_CASES, MAX_STEADY, Level, Point, Series, commit_text, text
from distbench.show.terminal import show_notes

HASH = "0123456789abcdef"


def series(case_id: str, seconds: list[float], changed_at: int | None = None) -> Series:
    points = [Point(86_400.0 * (1 + day), HASH[day:] + HASH, day == 2, time_s) for day, time_s in enumerate(seconds)]
    cuts = [0, *([changed_at] if changed_at else []), len(seconds)]
    levels = [Level(start, stop, seconds[start]) for start, stop in pairwise(cuts)]
    return Series("scenario", case_id, tuple(points), tuple(levels))


@pytest.mark.parametrize(
    ("point", "message"),
    [
        (Point(1.0, HASH, False, 1.0), "01234567"),
        (Point(1.0, HASH, True, 1.0), "01234567+"),
        (Point(1.0, None, False, 1.0), "-"),
    ],
)
def test_a_commit_is_told_in_eight_letters_and_whether_files_differed(point: Point, message: str) -> None:
    assert commit_text(point) == message


@pytest.fixture(autouse=True)
def folded_notes() -> None:
    """Notes are folded, whatever an earlier command of this process was given."""
    show_notes(False)


def test_a_level_has_its_first_launch_commit_count_time_and_change() -> None:
    page = text([series("a", [1e-3, 1e-3, 1.5e-3, 1.5e-3, 1.5e-3], changed_at=2), series("b", [1.0])], ["a note"])
    assert "\nFAIL: 1 of 2 cases changed. Largest change: a: 1.5x slower than before since 1970-01-04 00:00 " in page
    assert "\n1 note: -v shows it\n" in page
    first, second = (
        line.split() for line in page.splitlines() if line.lstrip().startswith("1970-01-0") and " ms" in line
    )
    assert first == ["1970-01-02", "00:00", "01234567", "2", "1.00", "ms"]
    assert second == ["1970-01-04", "00:00", "23456789+", "3", "1.50", "ms", "+50", "%"]


def test_a_launch_without_a_date_has_a_dash_and_many_cases_are_cut_with_a_word() -> None:
    undated = Series("scenario", "a", (Point(0.0, None, False, 1.0),), (Level(0, 1, 1.0),))
    page = text([undated] * (MAX_STEADY + 3), [])
    rows = [line.split() for line in page.splitlines() if " 1.00 s" in line or " 1.00  s" in line]
    assert len(rows) == MAX_STEADY and "... 3 more cases" in page
    assert rows[0][-2:] == ["-", "-"]
    changed = text([series(f"c{number}", [1.0, 2.0], 1) for number in range(MAX_CASES + 2)], [])
    assert changed.count("scenario: c") == MAX_CASES and "... 2 more cases" in changed
