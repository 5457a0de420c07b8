"""Launches that took turns are seen in their start and end times."""

from collections.abc import Sequence

import pytest

from distbench.judge.paired_launches import Pairing, Span, pairing_of


@pytest.mark.parametrize(
    ("order", "interleaved", "num_pairs", "num_left_out"),
    [
        ("ABABABABAB", True, 5, 0),
        ("ABBAABBAAB", True, 5, 0),
        ("ABBAABBAABA", True, 5, 1),
        ("AABABABABAB", True, 5, 1),  # one launch of B was lost
        ("AAAAABBBBB", False, 0, 0),
        ("BBBBBAAAAA", False, 0, 0),
        ("AAAABBBBAAAABBBB", False, 0, 0),
        ("AB", False, 0, 0),
        ("BAABABBABA", True, 5, 0),  # by a coin
    ],
)
def test_launches_that_took_turns_are_seen_in_their_start_times(
    order: str, interleaved: bool, num_pairs: int, num_left_out: int
) -> None:
    times = {side: [100.0 + 10 * place for place, name in enumerate(order) if name == side] for side in "AB"}
    pairing = pairing_at(times["A"], times["B"], lasting_s=9.0)
    assert pairing.interleaved == interleaved
    if interleaved:
        assert (len(pairing.baseline), pairing.num_left_out) == (num_pairs, num_left_out)
        gaps = [
            abs(times["A"][one] - times["B"][other])
            for one, other in zip(pairing.baseline, pairing.candidate, strict=True)
        ]
        assert set(gaps) == {10.0}
    else:
        assert pairing.baseline == tuple(range(order.count("A")))


def pairing_at(baseline: Sequence[float], candidate: Sequence[float], lasting_s: float) -> Pairing:
    """Of launches that began at these seconds and lasted so long."""
    sides = (("base", baseline), ("new", candidate))
    return pairing_of(*([Span(f"{name}-{at:g}", at, at + lasting_s) for at in starts] for name, starts in sides))


def test_unknown_times_are_no_turns_and_one_killed_launch_is_left_out() -> None:
    assert "have no recorded start" in pairing_of(*[[Span("x", 0.0, 0.0)] * 2] * 2).refusal
    no_end = [[Span("x", start, 0.0) for start in starts] for starts in ((1.0, 3.0, 5.0), (2.0, 4.0, 6.0))]
    assert "have no recorded start" in pairing_of(*no_end).refusal
    base, new = ([Span("x", start + 100.0 * pair, start + 100.0 * pair + 40) for pair in range(5)] for start in (1, 50))
    killed = Span("killed", 445.0, 0.0)
    pairing = pairing_of(base, [*new, killed])
    assert (pairing.refusal, len(pairing.baseline), pairing.num_left_out) == ("", 5, 1)


HOUR = 3600.0


@pytest.mark.parametrize(
    ("gap_s", "lasting_s", "refusal"),
    [
        (10 * 60 - 1, 20.0, ""),
        (10 * 60 + 1, 20.0, "at least 10 min passed between launches of the two sides"),
        (12 * HOUR, HOUR, "at least 720 min passed between"),
        (3 * HOUR - 1, HOUR, ""),
    ],
)
def test_a_pair_lies_close_together(gap_s: float, lasting_s: float, refusal: str) -> None:
    """A at 03:00 and B at 15:00 of each day took no turns: ten minutes, or three times the launch, may lie between."""
    base = [1.0 + 48 * HOUR * day for day in range(6)]
    pairing = pairing_at(base, [start + lasting_s + gap_s for start in base], lasting_s)
    assert pairing.interleaved == (not refusal) and refusal in pairing.refusal


def test_launches_that_ran_at_the_same_time_are_no_pair_and_both_are_named() -> None:
    base = [1.0 + 100 * pair for pair in range(5)]
    pairing = pairing_at(base, [start + 50 for start in base], lasting_s=52.0)
    assert pairing.is_disturbed
    assert pairing.refusal == "launches base-1 and new-51 ran at the same time and disturb each other"
    # A second of overlap may be the clock's; the same start never is.
    assert pairing_at(base, [start + 50 for start in base], lasting_s=50.9).interleaved
    assert pairing_at(base, base, lasting_s=0.0).is_disturbed
    # It need not be a pair's own partner that disturbs it.
    longest = [Span("long", 1.0, 350.0), *(Span("x", start, start + 9) for start in (400.0, 500.0))]
    assert pairing_of(longest, [Span("y", start, start + 9) for start in (390.0, 410.0, 200.0)]).is_disturbed
