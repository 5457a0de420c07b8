"""Slow ranks, hosts and links: named from made-up times whose truth is known, and measured for real."""

import itertools
import os
import socket
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from conftest import run_files
from processes import Ranks

from benchmarks.links_lab import Faults
from benchmarks.simulated_links import simulated
from distbench.cases.links import (
    ACROSS,
    SAME_PLACE,
    WITHIN,
    Product,
    compute_turns,
    link_rounds,
    segments_so_far,
    tournament,
)
from distbench.cli.main import main
from distbench.judge.links import RANK, LinkRun, link_run_of, rank_effects, relative_to, verdict_of
from distbench.judge.links_text import judged, link_figures, link_lines, link_tables, slow_in, verdict_on
from distbench.records.run_file import Run, read_run
from distbench.show import plots
from distbench.spec import Settings
from distbench.worker.pass_schedule import PassPlan

HOSTS = ["a"] * 4 + ["b"] * 4


@pytest.mark.parametrize("number", [1, 2, 3, 4, 7, 8, 13])
def test_in_a_tournament_each_meets_each_once_and_nobody_two_at_a_time(number: int) -> None:
    rounds = tournament(number)
    assert len(rounds) == {1: 0, 2: 1, 3: 3, 4: 3, 7: 7, 8: 7, 13: 13}[number]
    assert sorted(itertools.chain(*rounds)) == list(itertools.combinations(range(number), 2))
    for pairs in rounds:
        assert len(set(itertools.chain(*pairs))) == 2 * len(pairs)


def test_on_two_hosts_rounds_are_of_one_level_and_all_ranks_take_part() -> None:
    rounds = link_rounds(HOSTS)
    assert len(rounds) == 7
    assert sorted(pair for one in rounds for pair in one.pairs) == list(itertools.combinations(range(8), 2))
    for one in rounds:
        assert len(one.pairs) == 4
        crossing = {HOSTS[a] != HOSTS[b] for a, b in one.pairs}
        assert crossing == {one.level != WITHIN}
        assert (one.level == SAME_PLACE) == all(b - a == 4 for a, b in one.pairs)
    assert [one.level for one in rounds].count(ACROSS) == 3


@pytest.mark.parametrize("hosts", [["a", "a", "b"], ["a", "b", "c"], list("aabbcc"), list("aaabbb"), ["a"]])
def test_hosts_of_any_number_and_size_have_every_pair_once(hosts: list[str]) -> None:
    rounds = link_rounds(hosts)
    assert sorted(pair for one in rounds for pair in one.pairs) == list(itertools.combinations(range(len(hosts)), 2))
    assert all(one.pairs for one in rounds)


@pytest.mark.parametrize(
    ("hosts", "at_once", "turns"),
    [
        (HOSTS, 1, [(0, 4), (1, 5), (2, 6), (3, 7)]),
        (HOSTS, 3, [(0, 1, 4, 5), (2, 3, 6, 7)]),  # as many in each turn
        (HOSTS, 8, [tuple(range(8))]),
        (["a"] * 3, 2, [(0,), (1,), (2,)]),
        (["a", "a", "b"], 0, [(0, 2), (1,)]),
    ],
)
def test_of_each_host_as_many_ranks_compute_at_a_time_as_have_cpus(
    hosts: list[str], at_once: int, turns: list[tuple[int, ...]]
) -> None:
    assert compute_turns(hosts, dict.fromkeys(hosts, at_once)) == turns


def test_a_product_that_is_wrong_in_one_place_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    product = Product(16, torch.device("cpu"))
    assert product.difference() is None and product.nbytes == 3 * 16 * 16 * 4

    def wrong(count: int) -> None:
        Product.multiply(product, count)
        product._got[3, 5] += 1

    monkeypatch.setattr(product, "multiply", wrong)
    assert "1 of 16 elements are wrong; the first, at offset 3" in str(product.difference())


def test_a_burst_of_products_counts_as_one_product() -> None:
    run = made_up(1, {})
    links = link_run_of(run)
    for case in run.cases:
        case["counters"] = {"repeats": 10} if case["case"]["params"]["op"] == "matmul" else {}
    bursts = link_run_of(run)
    assert links is not None and bursts is not None
    ratios = {
        one.quantity: float((one.times_s / of_bursts.times_s).mean())
        for one, of_bursts in zip(links.groups, bursts.groups, strict=True)
    }
    assert ratios == pytest.approx({"latency": 1, "bandwidth": 1, "compute": 10})


@pytest.mark.parametrize("passes", [0, 4])
def test_a_case_that_takes_a_sample_a_turn_takes_no_more(passes: int) -> None:
    plan = PassPlan(replace(Settings(), passes=passes), 4, is_compared=True)
    assert plan.limits(1e-3).max_samples > 1
    of_one = plan.limits(1e-3, num_samples=1)
    assert (of_one.min_samples, of_one.max_samples) == (1, 1)


def test_the_picture_frames_what_is_named_and_colours_what_is_slow() -> None:
    run = made_up(3, {(2, 7): 3.0})
    with plots.styled():
        ((name, figure),) = link_figures(run)
    bandwidth = figure.axes[0]
    frames = [patch.get_xy() for patch in bandwidth.patches]
    assert name == "links" and sorted(frames) == [(1.5, 6.5), (6.5, 1.5)]
    shown = np.asarray(bandwidth.images[0].get_array())
    assert np.exp(shown[2, 7]) == pytest.approx(3, rel=0.2) and np.exp(np.nanmedian(shown)) == pytest.approx(1, rel=0.1)
    assert {text.get_text() for text in bandwidth.texts} >= {"host a", "host b"}


def made_up(
    seed: int, slow: dict[Any, float], hosts: list[str] = HOSTS, num_passes: int = 16, noise: float = 0.1
) -> Run:
    """A run whose times are 1 ms but for what is slow: ranks (in all they do), ("computes", rank), or pairs."""
    random, num_ranks = np.random.default_rng(seed), len(hosts)
    cases = []

    def add(case_id: str, params: dict[str, Any], truth: np.ndarray[Any, Any]) -> None:
        times = 1e-3 * truth * np.exp(random.normal(0, noise, (num_passes, num_ranks)))
        times *= np.exp(random.normal(0, 0.2, (num_passes, 1)))
        record = {"case": {"id": case_id, "kind": "links", "params": {**params, "hosts": hosts}}, "status": "ok"}
        cases.append({**record, "rank_median_s": times[0].tolist(), "ranks_by_pass": times.tolist()})

    for number, one in enumerate(link_rounds(hosts)):
        truth = np.ones(num_ranks)
        for pair in one.pairs:
            truth[list(pair)] = slow.get(pair, 1.0) * max(slow.get(rank, 1.0) for rank in pair)
        for size in (4, 1 << 20):
            params = {"op": "send_recv", "size_bytes": size, "level": one.level, "pairs": [list(p) for p in one.pairs]}
            add(f"links/{size}/{number}", params, truth)
    for rank in range(num_ranks):
        truth = np.full(num_ranks, 1e-3)
        truth[rank] = slow.get(rank, 1.0) * slow.get(("computes", rank), 1.0)
        add(f"links/matmul/{rank}", {"op": "matmul", "ranks": [rank]}, truth)
    header = {"type": "run", "schema_version": 2, "job": {"scenario": "links"}, "environment": {}}
    return Run(Path("made-up.jsonl"), header, cases, [], None)


def named(run: Run) -> set[tuple[str, tuple[int, ...], str]]:
    links = link_run_of(run)
    assert links is not None
    return {(one.kind, one.ranks, one.quantity) for one in verdict_of(links).outliers}


@pytest.mark.long
def test_of_what_is_alike_nothing_is_named_in_nineteen_of_twenty_runs() -> None:
    assert sum(bool(named(made_up(seed, {}))) for seed in range(60)) <= 3


def test_of_links_that_differ_by_their_kind_nothing_is_named() -> None:
    across = {(a, b): 5.0 for a in range(4) for b in range(4, 8)}
    assert sum(bool(named(made_up(seed, across))) for seed in range(40)) <= 2


@pytest.mark.parametrize("slow", [(2, 5), (1, 5), (1, 2)])
@pytest.mark.long
def test_two_ranks_on_cables_of_half_the_rate_are_named_and_no_link(slow: tuple[int, int]) -> None:
    """Half of the pairs of a level are slow then, and a pair of both is no slower than the others."""
    cables = {pair: 2.0 for pair in itertools.combinations(range(8), 2) if set(pair) & set(slow)}
    wanted = {("rank", (rank,), quantity) for rank in slow for quantity in ("latency", "bandwidth")}
    assert sum(named(made_up(seed, cables, num_passes=8, noise=0.2)) == wanted for seed in range(20)) >= 19


def test_the_effects_of_ranks_are_those_of_which_times_were_made() -> None:
    pairs = list(itertools.combinations(range(8), 2))
    levels = [int((a < 4) != (b < 4)) for a, b in pairs]
    truth = np.array([0, 0.7, 0, -0.1, 0, 0.2, 0.7, 0])
    logs = np.array([[truth[a] + truth[b] + 3 * level for (a, b), level in zip(pairs, levels, strict=True)]] * 2)
    logs[:, 5] += 2  # a slow link is not its ranks' fault
    result = rank_effects(logs, pairs, levels, range(8))
    assert (result - np.median(result, axis=1)[:, None])[0] == pytest.approx(truth - np.median(truth), abs=0.02)


@pytest.mark.long
def test_what_is_slow_is_named_and_nothing_else() -> None:
    rank = {("rank", (5,), quantity) for quantity in ("latency", "bandwidth", "compute")}
    link = {("link", (2, 7), quantity) for quantity in ("latency", "bandwidth")}
    computes = {("rank", (1,), "compute")}
    for slow, wanted in (({5: 2.0}, rank), ({(2, 7): 2.0}, link), ({("computes", 1): 2.0}, computes)):
        result = [named(made_up(seed, slow)) for seed in range(20)]
        assert sum(wanted >= one and bool(one) for one in result) >= 19
        assert sum(bool(one - wanted) for one in result) <= 1


@pytest.mark.parametrize("names", ["abcd", "ab"])
@pytest.mark.long
def test_a_host_all_of_whose_ranks_compute_slowly_is_named_in_their_stead(names: str) -> None:
    hosts = [name for name in names for _ in range(4)]
    slow = {("computes", rank): 2.0 for rank in range(4, 8)}
    result = [named(made_up(seed, slow, hosts)) for seed in range(20)]
    assert result.count({("host", (4, 5, 6, 7), "compute")}) >= 19


def test_a_host_one_of_whose_ranks_is_very_slow_is_not_named_in_its_stead() -> None:
    result = [named(made_up(seed, {11: 6.0}, list("aaaabbbbcccc"), 8)) for seed in range(10)]
    assert all({("rank", (11,), "compute")} <= one for one in result)
    assert not any(kind == "host" for one in result for kind, _, _ in one)


@pytest.mark.parametrize("names", ["abc", "ab"])
def test_a_host_all_of_whose_own_links_are_slow_is_named_and_none_of_them(names: str) -> None:
    hosts = [name for name in names for _ in range(4)]
    within = {(a, b): 2.0 for a in range(4) for b in range(a + 1, 4)}
    wanted = {("host", (0, 1, 2, 3), quantity) for quantity in ("latency", "bandwidth")}
    result = [named(made_up(seed, within, hosts)) for seed in range(10)]
    assert sum(one == wanted for one in result) >= 9
    first, *_ = link_lines(made_up(1, within, hosts))
    assert first.startswith("FAIL: host a is ") and "messages within it" in first


def since(run: Run, earlier: Run) -> set[tuple[str, tuple[int, ...], str]]:
    links, before = link_run_of(run), link_run_of(earlier)
    assert links is not None and before is not None
    return {(one.kind, one.ranks, one.quantity) for one in verdict_of(relative_to(links, before)).outliers}


def test_links_between_two_hosts_that_are_slower_than_before_are_named() -> None:
    """They have no like but themselves: each level held against its own median, nothing would be seen."""
    across = {(a, b): 2.0 for a in range(4) for b in range(4, 8)}
    wanted = {("hosts", tuple(range(8)), quantity) for quantity in ("latency", "bandwidth")}
    assert all(since(made_up(seed, across), made_up(seed + 50, {})) == wanted for seed in range(10))
    assert sum(bool(since(made_up(seed, across), made_up(seed + 50, across))) for seed in range(20)) <= 1
    lines = judged(made_up(1, across), made_up(2, {}))
    assert lines and lines.lines[0].startswith("FAIL: since made-up.jsonl, hosts a and b are 1.8")


def test_of_two_hosts_with_two_ranks_links_can_be_held_against_before_alone() -> None:
    slow, hosts = {(0, 3): 4.0}, list("aabb")
    assert named(made_up(1, slow, hosts)) == set()
    message = judged(made_up(1, slow, hosts))
    assert message and not message.is_conclusive, "a check before a job says so"
    assert "fewer than 4 links of a kind: 2 within a host, 2 across hosts, same local rank" in message.lines[0]
    assert since(made_up(1, slow, hosts), made_up(2, {}, hosts)) == {
        ("link", (0, 3), "latency"),
        ("link", (0, 3), "bandwidth"),
    }


def test_what_cannot_be_told_of_some_quantities_is_said() -> None:
    """Half of the ranks compute at half of the speed: they differ so much that nobody is unlike the others."""
    line, _ = link_lines(made_up(1, {("computes", rank): 2.0 for rank in range(4)}, ["a"] * 8))
    assert line.startswith("UNKNOWN: too noisy to exclude a rank or link that is 2x slower")
    assert "x slower in computing" in line


@pytest.mark.parametrize(("slow", "noise"), [({(2, 7): 2.0}, 0.5), ({("computes", 3): 2.0}, 0.8), ({6: 2.0}, 0.8)])
@pytest.mark.long
def test_a_pass_excludes_a_part_that_is_twice_as_slow(slow: dict[Any, float], noise: float) -> None:
    """95 % of the launches with such a part are no PASS, also where it cannot be named."""
    words = Counter(
        verdict.word for seed in range(100) if (verdict := judged(made_up(seed, slow, num_passes=8, noise=noise)))
    )
    assert words["PASS"] <= 8 and words["UNKNOWN"] >= 20


@pytest.mark.long
def test_a_noisy_machine_without_a_slow_part_passes() -> None:
    verdicts = [judged(made_up(seed, {}, num_passes=12, noise=0.25)) for seed in range(40)]
    assert sum(bool(verdict) and verdict.word == "PASS" for verdict in verdicts) >= 38


def test_what_cannot_be_told_is_said() -> None:
    assert "UNKNOWN: 3 passes are too few" in next(link_lines(made_up(1, {5: 2.0}, num_passes=3)))
    assert "2 ranks are too few" in next(link_lines(made_up(1, {}, ["a", "b"])))
    busy = judged(made_up(1, {}, noise=1.5))
    assert busy and busy.lines[0].startswith("UNKNOWN: too noisy to exclude") and not busy.is_conclusive
    line, command = link_lines(made_up(1, {}))
    assert line.startswith("PASS: no slow rank or link (86 checked): at most 1.2x slower in computing, 1.2x in ")
    assert command.startswith("Next: distbench report links --page ")
    first, second, _ = link_lines(made_up(1, {5: 2.0}))
    assert first.startswith(
        "FAIL: rank 5 (on b) is 2.02x slower than other ranks (95 % CI 1.98-2.07x) in small messages; "
    )
    assert second.startswith("All others: at most ")


def with_segments(again: dict[tuple[int, int], int], hosts: list[str] = HOSTS, lossy: str = "eth1") -> Run:
    """A run of which each rank sent 1000 segments per round, and both ranks of a pair retransmitted `again`."""
    run = made_up(1, {}, hosts)
    for case in run.cases:
        pairs = [tuple(pair) for pair in case["case"]["params"].get("pairs") or ()]
        of = {rank: again.get(pair, 0) for pair in pairs for rank in pair}
        segments = [{"eth0": [400, 0], lossy: [600, of.get(rank, 0)]} for rank in range(len(hosts))]
        case["counters"] = {"tcp_segments": segments} if pairs else {}
    return run


@pytest.mark.parametrize(
    ("lossy", "named"),
    [
        ([pair for pair in itertools.combinations(range(8), 2) if 5 in pair], "rank 5 (on b)"),
        ([(2, 7)], "link 2-7 (on a and b)"),
        ([pair for pair in itertools.combinations(range(8), 2) if pair[1] >= 4], "host b"),
        ([pair for pair in itertools.combinations(range(8), 2) if {1, 6} & {*pair}], "rank 1 (on a)"),
    ],
)
def test_a_rank_a_link_and_a_host_that_lose_packets_fail(lossy: list[tuple[int, int]], named: str) -> None:
    verdict = judged(with_segments(dict.fromkeys(lossy, 30)))
    assert verdict and verdict.is_slow
    sentences = verdict.lines[0].removeprefix("FAIL: ").split("; ")
    assert any(sentence.startswith(f"{named} loses ") and "on eth1" in sentence for sentence in sentences)
    assert len(sentences) == (2 if named.startswith("rank 1") else 1)


def test_one_lost_packet_is_no_lossy_link() -> None:
    """With segmentation offload one lost packet is up to 45 retransmitted segments: 11 by each rank at each size."""
    assert not any("packets" in line for line in link_lines(with_segments({(1, 4): 11})))
    assert any("link 1-4 (on a and b) loses" in line for line in link_lines(with_segments({(1, 4): 450})))


@pytest.mark.long
def test_a_host_with_one_slow_rank_is_not_named_as_slow_at_times() -> None:
    """Its mean is near the limit in some passes, though nearly all of its ranks are as fast as others."""
    faults = Faults(computes=(177,), cable=(367,))
    verdict = verdict_on(simulated(512, faults, np.random.default_rng([1, 512, 11, 4])))
    result = {(part.kind, part.ranks, slow_in(part)) for part in verdict.parts}
    assert result == {(RANK, (177,), "computing"), (RANK, (367,), "large messages")}


def test_segments_that_the_loopback_interface_retransmits_are_no_lost_packets() -> None:
    """A busy CPU acknowledges them late."""
    lines = [*link_lines(with_segments({(2, 3): 30}, lossy="lo"))]
    assert not any("packets" in line for line in lines) and any(line.startswith("PASS") for line in lines)


def test_a_network_in_which_most_ranks_lose_packets_has_warnings_only() -> None:
    warning, other, verdict, _ = link_lines(with_segments(dict.fromkeys(itertools.combinations(range(8), 2), 5)))
    share = "0.8 % of its packets (280 of 33,600 TCP segments retransmitted)"
    assert warning.startswith(f"warning: host a loses {share} on eth1. Run ") and "host b" in other
    assert verdict.startswith("PASS")


@pytest.mark.skipif(not hasattr(socket, "TCP_INFO"), reason="this system has no counts per connection")
def test_segments_are_counted_by_the_interface_of_each_connection() -> None:
    def sent_over_loopback() -> int:
        segments = segments_so_far()
        assert segments is not None
        return segments.get("lo", (0, 0))[0]

    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as sender:
        receiver, _ = server.accept()
        with receiver:
            before = sent_over_loopback()
            for _ in range(20):
                sender.sendall(b"x" * 1000)
                assert receiver.recv(1000, socket.MSG_WAITALL)
            assert sent_over_loopback() - before >= 20


def test_the_matrix_has_each_pair_and_a_mark_at_the_slow_one() -> None:
    bandwidths, _, ranking = link_tables(made_up(3, {(2, 7): 3.0}))
    assert any("link 2-7 (on a and b)" in row for row in ranking.rows)
    assert bandwidths.rows[2][8].endswith("!") and bandwidths.rows[7][3].endswith("!")
    assert sum(cell.endswith("!") for row in bandwidths.rows for cell in row) == 2
    assert all(row[number + 1] == "-" for number, row in enumerate(bandwidths.rows))


def test_links_are_measured_checked_and_read_again(ranks: Ranks, tmp_path: Path) -> None:
    done = ranks.run_here(
        *("run", "links", "--quick", "--passes", "4", "--mesh", "dp_shard=2,tp=2", "--set", "burst_s=0.02"),
        *("--set", "matmul_size=64"),  # so short that a burst has several on a machine that does much else
        *("--results", str(tmp_path)),
    )
    assert done.exit_code == 0, done.stderr
    (file,) = run_files(tmp_path)
    run = read_run(file)
    assert {case["status"] for case in run.cases} == {"ok"}
    # Three rounds of two sizes, two mesh dims, and each rank in one of the turns, of equal size.
    computing = [case for case in run.cases if case["case"]["params"]["op"] == "matmul"]
    assert len(run.cases) == 3 * 2 + 2 + len(computing)
    turns = [case["case"]["params"]["ranks"] for case in computing]
    assert sorted(itertools.chain(*turns)) == [0, 1, 2, 3] and len(set(map(len, turns))) == 1
    assert len(turns[0]) <= len(os.sched_getaffinity(0))
    assert all(case["counters"]["repeats"] > 1 for case in computing)
    links = link_run_of(run)
    assert isinstance(links, LinkRun) and len(links.hosts) == 4
    shapes = {(equal.quantity, equal.times_s.shape) for equal in links.groups}
    assert shapes == {("latency", (4, 6)), ("bandwidth", (4, 6)), ("all_reduce", (4, 2)), ("compute", (4, 4))}
    assert all((equal.times_s > 0).all() for equal in links.groups)
    counted = [case["counters"]["tcp_segments"] for case in run.cases if "tcp_segments" in case["counters"]]
    assert len(counted) == 6 and all(rank["lo"][0] > 0 for ranks in counted for rank in ranks)
    assert links.segments == {}  # no cable can lose packets of the loopback interface


def test_an_earlier_run_that_cannot_be_read_is_said_before_anything_is_measured(tmp_path: Path) -> None:
    words = [
        "run",
        "links",
        "--quick",
        "--against",
        str(tmp_path / "nowhere.jsonl"),
        "--results",
        str(tmp_path / "out"),
    ]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 2 and "nowhere.jsonl cannot be read" in done.output and not (tmp_path / "out").exists()
