"""Fitting lines to measured collectives, and the profile file."""

import json
import random
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from distbench.planning.cheapest_path import Problem, cheapest_route
from distbench.planning.cost_profile import (
    Line,
    Profile,
    Sample,
    fit_line,
    load_profile,
    measured_cost,
    nonnegative_least_squares,
    relative_error,
)
from distbench.planning.placement_states import parse_state
from distbench.spec.errors import UserError

HEAD = '"profile_version": 1, "machine": "m", "backend": "gloo", "torch": "2", "mesh": {"tp": 2}'
NEGATIVE = '{"op": "x", "mesh_dim": "tp", "group_size": 2, "base_s": -1, "per_byte_s": 0}'
SIZES = [4.0**n for n in range(5, 13)]


def samples(seconds_of: object, copies: tuple[int, ...] = (0,), noise: float = 0.0) -> list[Sample]:
    rng = random.Random(0)
    assert callable(seconds_of)
    return [Sample(size, n, seconds_of(size, n) * (1 + noise * rng.uniform(-1, 1))) for size in SIZES for n in copies]


def test_a_straight_line_is_found_without_a_knee() -> None:
    line = fit_line("all_gather", "tp", 4, samples(lambda size, n: 2e-5 + 3e-9 * size))
    assert [line.base_s, line.per_byte_s] == pytest.approx([2e-5, 3e-9])
    assert line.knee_bytes is None
    assert line.error < 1e-9


def test_copies_have_their_own_slope() -> None:
    line = fit_line("all_to_all", "tp", 4, samples(lambda size, n: 2e-5 + (3e-9 + 1e-9 * n) * size, copies=(0, 1, 2)))
    assert line.per_copied_byte_s == pytest.approx(1e-9)
    assert line.seconds(1e6, 2) == pytest.approx(2e-5 + 5e-3)


def test_messages_have_their_own_price() -> None:
    measured = [Sample(size, 0, 2e-5 + 3e-9 * size + 4e-5 * number, number) for size in SIZES for number in (1, 2, 7)]
    line = fit_line("direct", "tp", 8, measured)
    assert [line.base_s, line.per_byte_s, line.per_message_s] == pytest.approx([2e-5, 3e-9, 4e-5])
    assert line.seconds(1e6, 0, 3) == pytest.approx(2e-5 + 3e-3 + 12e-5)


def test_a_profile_of_before_messages_is_still_read(tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    line = (
        '"op": "direct", "mesh_dim": "tp", "group_size": 2, "base_s": 1e-5, "per_byte_s": 1e-9, "samples": [[1, 0, 1]]'
    )
    file.write_text(f'{{{HEAD}, "lines": [{{{line}}}]}}')
    (result,) = load_profile(file).lines
    assert (result.per_message_s, result.seconds(1e3, 1, 7)) == (0.0, pytest.approx(1.1e-5))


def test_a_bend_is_fitted_where_it_halves_the_error_and_stays_monotone() -> None:
    def bent(size: float, n: int) -> float:
        return 1e-5 + 1e-9 * min(size, 65536) + 8e-9 * max(size - 65536, 0)

    line = fit_line("all_reduce", "dp", 2, samples(bent, noise=0.02))
    assert line.knee_bytes == 65536
    assert line.per_byte_beyond_s == pytest.approx(8e-9, rel=0.05)
    predicted = [line.seconds(size) for size in np.geomspace(1, 1e9, 200)]
    assert predicted == sorted(predicted)


def test_noise_does_not_invent_a_bend() -> None:
    assert fit_line("all_reduce", "dp", 2, samples(lambda size, n: 1e-4 + 1e-9 * size, noise=0.05)).knee_bytes is None


def test_parameters_never_turn_negative() -> None:
    # Falling times: the best line of all would have a negative slope.
    line = fit_line("all_gather", "tp", 4, samples(lambda size, n: 1e-3 / (1 + size / 1e6)))
    assert min(line.base_s, line.per_byte_s, line.per_byte_beyond_s, line.per_copied_byte_s) >= 0


def test_small_and_large_sizes_count_alike() -> None:
    # 3 % off everywhere: an absolute fit would give up the small sizes.
    fitted = samples(lambda size, n: 5e-5 + 2e-9 * size, noise=0.03)
    line = fit_line("all_gather", "tp", 4, fitted)
    assert abs(line.seconds(SIZES[0]) / (5e-5 + 2e-9 * SIZES[0]) - 1) < 0.03
    assert line.error < 0.03


@pytest.mark.parametrize("seed", range(30))
def test_least_squares_meets_the_optimality_conditions(seed: int) -> None:
    # Karush, Kuhn and Tucker: no gradient along positive entries, none that a zero entry could follow upwards.
    rng = np.random.default_rng(seed)
    columns, values = rng.normal(size=(12, 4)), rng.normal(size=12)
    solution, miss = nonnegative_least_squares(columns, values)
    gradient = columns.T @ (columns @ solution - values)
    assert (solution >= 0).all()
    assert np.abs(gradient[solution > 0]).max(initial=0) < 1e-9
    assert (gradient[solution == 0] > -1e-9).all()
    assert miss == pytest.approx(np.linalg.norm(columns @ solution - values))


def test_held_out_sizes_judge_the_line() -> None:
    truth = samples(lambda size, n: 1e-5 + 1e-9 * size)
    outside = [Sample(5e7, 0, 2 * (1e-5 + 0.05))]
    line = fit_line("all_gather", "tp", 4, truth, held_out=outside)
    assert line.held_out_error == pytest.approx(0.5)
    assert relative_error(line, truth) < 1e-9


def test_one_size_is_too_few() -> None:
    with pytest.raises(ValueError, match="two sizes"):
        fit_line("all_gather", "tp", 4, [Sample(10.0, 0, 1.0)])


def profile() -> Profile:
    lines = []
    for op in ("all_gather", "all_to_all", "all_reduce", "reduce_scatter"):
        for name, size in (("dp", 2), ("tp", 4)):
            lines.append(fit_line(op, name, size, samples(lambda size, n: 1e-5 + 1e-9 * size)))
    return Profile("here", "gloo", "2.13.0", {"dp": 2, "tp": 4}, tuple(lines))


def test_a_profile_survives_its_file(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    profile().save(path)
    assert load_profile(path) == profile()
    assert load_profile(path).digest() == profile().digest()
    assert json.loads(path.read_text())["mesh"] == {"dp": 2, "tp": 4}


def test_the_digest_follows_the_costs_and_not_the_story() -> None:
    changed = replace(
        profile(), lines=(msgspec.structs.replace(profile().lines[0], base_s=1.1e-5), *profile().lines[1:])
    )
    assert changed.digest() != profile().digest()
    assert replace(profile(), source="another story").digest() == profile().digest()


def test_a_hand_written_profile_needs_only_the_costs(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    line = {"op": "all_gather", "mesh_dim": "tp", "group_size": 8, "base_s": 1e-5, "per_byte_s": 1e-11, "error": 0.3}
    head = {"profile_version": 1, "machine": "H100", "backend": "nccl", "torch": "2.13", "mesh": {"tp": 8}}
    path.write_text(json.dumps({**head, "source": "a data sheet", "lines": [line]}))
    read = load_profile(path).line("all_gather", "tp", 8)
    assert read is not None and [read.seconds(1e9), read.expected_error] == pytest.approx([0.01001, 0.3])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot be read"),
        ("3", "it is 3, not an object"),
        ("{" + HEAD.partition('{"tp"')[0] + '3, "lines": []}', "mesh is 3, not an object"),
        ('{"profile_version": 99}', "newer"),
        (f'{{{HEAD}, "lines": [{{"op": "x"}}]}}', "lines.0..mesh_dim is missing"),
        (f'{{{HEAD}, "lines": [{NEGATIVE}]}}', "lines.0..base_s is -1, not seconds from 0 up to a day"),
    ],
)
def test_a_profile_that_cannot_be_used_is_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text(text)
    with pytest.raises(UserError, match=message):
        load_profile(tmp_path / "p.json")


def test_what_was_not_measured_is_refused_and_one_rank_costs_nothing() -> None:
    assert profile().line("broadcast", "tp", 4) is None
    with pytest.raises(UserError, match="all_gather over dp of 8 ranks"):
        measured_cost(profile(), {"dp": 8})
    assert measured_cost(profile(), {"pp": 1}).seconds("all_gather", 0, 1e9, 0) == 0.0


def test_the_route_is_the_sum_of_the_lines() -> None:
    given = replace(profile(), lines=tuple(Line(x.op, x.mesh_dim, x.group_size, 1e-5, 1e-9) for x in profile().lines))
    # (100, 30) f32 on 2 x 4, S(0) over tp gathered: 25 rows of 30 from each of 4 ranks, 12,000 bytes.
    route = cheapest_route(
        Problem((2, 4), (100, 30), 4), measured_cost(given, given.mesh), parse_state("RS(0)", 2), parse_state("RR", 2)
    )
    assert route.seconds == pytest.approx(1e-5 + 12_000e-9)
    assert (route.sent_bytes, route.num_collectives, route.peak_bytes) == (9_000, 1, 15_000)


def test_a_zero_fill_that_was_not_measured_is_no_cheaper_than_a_partition() -> None:
    """A profile made with torch before 2.14: for nothing, a cut and a zero-fill would replace the partition."""
    local = (Line("cut", "tp", 4, 1e-6, 1e-10), Line("partition", "tp", 4, 1e-6, 2e-10, error=0.2))
    old = replace(profile(), lines=(*profile().lines, *local))
    model, problem = measured_cost(old, old.mesh), Problem((2, 4), (96, 32), 4)
    source, target = parse_state("RR", 2), parse_state("RP(sum)", 2)
    route = cheapest_route(problem, model, source, target, zero_fill=True)
    assert len(route.states) == 2 and route.seconds == pytest.approx(1e-6 + 96 * 32 * 4 * 2e-10)
    filled = cheapest_route(problem, model, parse_state("RS(0)", 2), target, zero_fill=True)
    assert len(filled.states) == 2 and filled.seconds == pytest.approx(route.seconds)
    new = replace(old, lines=(*old.lines, Line("zero_fill", "tp", 4, 5e-6, 1e-9)))
    own = cheapest_route(problem, measured_cost(new, new.mesh), parse_state("RS(0)", 2), target, zero_fill=True)
    assert own.seconds == pytest.approx(5e-6 + 96 * 32 * 4 * 1e-9)
