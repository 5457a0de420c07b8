"""The result of a preflight: expected rates, the states of hosts, JSON, OpenMetrics and lists."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner
from test_links import HOSTS, made_up, with_segments

from distbench.cases.links import link_rounds
from distbench.cli.main import main
from distbench.cli.run import LinkOptions, links_code
from distbench.judge.links import link_run_of
from distbench.judge.links_text import judged
from distbench.judge.preflight import BETWEEN, WITHIN, ExpectedRates, Preflight, level_rates
from distbench.records.run_file import Run


def preflight_of(run: Run, expected: ExpectedRates | None = None, earlier: Run | None = None) -> Preflight:
    verdicts = [judged(run), *([judged(run, earlier)] if earlier else [])]
    links = link_run_of(run)
    assert links is not None and all(verdicts)
    levels = level_rates(links, expected)
    return Preflight("run.jsonl", [one for one in verdicts if one], levels, expected.name if expected else "")


# Made-up links send 1 MiB in 1 ms: 1.05 GB/s.
@pytest.mark.parametrize(
    ("slow", "states", "verdict"),
    [
        ({}, {"a": "good", "b": "good"}, "PASS"),
        ({5: 2.0}, {"a": "good", "b": "bad"}, "FAIL"),
        ({(0, 2): 3.0}, {"a": "bad", "b": "good"}, "FAIL"),
        ({(2, 7): 3.0}, {"a": "unknown", "b": "unknown"}, "FAIL"),
        ({(2, 7): 3.0, 5: 2.0}, {"a": "unknown", "b": "bad"}, "FAIL"),
    ],
)
def test_a_host_is_bad_if_a_cause_is_on_it_alone(slow: Any, states: dict[str, str], verdict: str) -> None:
    preflight = preflight_of(made_up(1, slow))
    assert preflight.hosts() == states and preflight.verdict == verdict
    files = dict(preflight.files())
    for state in ("good", "bad"):
        assert files[f"{state}_hosts"].split() == [host for host in states if states[host] == state]
    record = json.loads(files["preflight.json"])
    assert record["hosts"] == states and record["exit_code"] == {"PASS": 0, "FAIL": 1}[verdict]
    assert record["num_links"] == record["num_links_measured"] == 28


def test_hosts_of_a_check_that_is_not_conclusive_are_in_no_list() -> None:
    preflight = preflight_of(made_up(1, {}, noise=1.5))
    files = dict(preflight.files())
    assert preflight.verdict == "UNKNOWN" and not files["good_hosts"] and not files["bad_hosts"]
    assert 'distbench_preflight_host{host="b",state="unknown"} 1' in files["preflight.prom"]
    assert "distbench_preflight_exit_code 3" in files["preflight.prom"]


def test_the_states_of_hosts_are_read_by_prometheus() -> None:
    parser = pytest.importorskip("prometheus_client.openmetrics.parser", reason="prometheus_client is not installed")
    text = dict(preflight_of(made_up(1, {5: 2.0})).files())["preflight.prom"]
    samples = [sample for family in parser.text_string_to_metric_families(text) for sample in family.samples]
    states = {(one.labels["host"], one.labels["state"]): one.value for one in samples if one.labels}
    assert {state for state, value in states.items() if value} == {("a", "good"), ("b", "bad")} and len(states) == 6


def test_a_cause_has_ranks_hosts_and_rates() -> None:
    rank, *_ = (one for one in preflight_of(made_up(1, {5: 2.0})).causes() if one["slow_in"] == "large messages")
    assert (rank["kind"], rank["ranks"], rank["hosts"]) == ("rank", [5], ["b"])
    assert rank["others_gb_per_s"] / rank["gb_per_s"] == pytest.approx(2, rel=0.2)
    (lossy,) = preflight_of(with_segments({(2, 7): 30})).causes()
    assert (lossy["kind"], lossy["slow_in"], lossy["ranks"], lossy["retransmitted"]) == ("link", "packets", [2, 7], 120)
    since = preflight_of(made_up(1, {(2, 7): 3.0}), earlier=made_up(2, {})).causes()
    assert [one["is_change"] for one in since] == [False, False, True, True]


def test_rates_below_those_of_the_hardware_fail_even_if_all_links_are_alike() -> None:
    across = {(a, b): 5.0 for a in range(4) for b in range(4, 8)}
    run = made_up(1, across)
    of_level = {WITHIN: (1e-5, 1.2e9), BETWEEN: (2e-5, 0.9e9)}
    preflight = preflight_of(run, ExpectedRates("mine", of_level))
    within, between = preflight.rate_lines()
    assert within.startswith("PASS: all 12 links within a host reach 0.892 to 1.16 GB/s each way") and within.endswith(
        "; mine expects 1.19 GB/s."
    )
    assert between.startswith("FAIL: all 16 links between hosts reach 0.1") and "; mine expects 0.885 GB/s" in between
    assert between.endswith(", of which 70 % is required.")
    assert preflight.verdict == "FAIL" and preflight.hosts() == {"a": "unknown", "b": "unknown"}
    assert preflight_of(run, ExpectedRates("slow", {WITHIN: (0, 1e9), BETWEEN: (0, 2e8)})).verdict == "PASS"


def test_files_and_json_have_the_verdict(monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path) -> None:
    run = made_up(1, {5: 2.0})
    monkeypatch.setattr("distbench.records.run_file.read_run", lambda path: run)
    jobs: list[Any] = [SimpleNamespace(run_file=str(tmp_path))]
    requested = LinkOptions(fail_on_outlier=True, expect="h100", verdict_out=tmp_path)
    assert links_code(jobs, requested, silent=False, form="json") == 1
    out, err = capsys.readouterr()
    record = json.loads(out)
    assert record == json.loads((tmp_path / "preflight.json").read_text()) and record["hardware"] == "h100"
    assert "FAIL: all 12 links within a host reach" in err and err.count("FAIL: all 16 links between hosts reach") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "bad_hosts",
        "good_hosts",
        "preflight.json",
        "preflight.prom",
    ]


@pytest.mark.parametrize("has_links", [True, False])
def test_a_failed_launch_is_a_fail_without_good_hosts(
    monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path, has_links: bool
) -> None:
    run = made_up(1, {})
    monkeypatch.setattr(
        "distbench.records.run_file.read_run", lambda path: run if has_links else replace(run, cases=[])
    )
    jobs: list[Any] = [SimpleNamespace(run_file=str(tmp_path))]
    requested = LinkOptions(fail_on_outlier=True, verdict_out=tmp_path)
    assert links_code(jobs, requested, True, "json", "host b no longer responds") == 1
    record = json.loads(capsys.readouterr().out)
    assert (record["verdict"], record["exit_code"]) == ("FAIL", 1)
    assert record["lines"][0] == "FAIL: host b no longer responds" and record["hosts"] == (
        {"a": "unknown", "b": "unknown"} if has_links else {}
    )
    assert not has_links or not (tmp_path / "good_hosts").read_text()


def test_lists_of_an_earlier_preflight_are_removed(tmp_path: Path) -> None:
    (tmp_path / "good_hosts").write_text("b\n")
    words = ["preflight", "--quick", "--verdict-out", str(tmp_path), "--against", str(tmp_path / "nowhere.jsonl")]
    assert CliRunner().invoke(main, words).exit_code == 2 and not (tmp_path / "good_hosts").exists()


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--expect", "h1000"], "--expect 'h1000' is unknown (nearest: h100"),
        (["--expect", "nowhere.json"], "nowhere.json cannot be read"),
        (["--verdict-out", "/dev/null/x"], "--verdict-out /dev/null/x cannot be created: Not a directory"),
    ],
)
def test_what_a_preflight_cannot_use_is_said_before_measuring(tmp_path: Path, words: list[str], why: str) -> None:
    done = CliRunner().invoke(main, ["preflight", "--quick", "--results", str(tmp_path / "out"), *words])
    assert done.exit_code == 2 and why in done.output and not (tmp_path / "out").exists()


@pytest.mark.parametrize("num_hosts", [16, 64, 7])
def test_many_ranks_meet_ranks_of_a_few_hosts_only(num_hosts: int) -> None:
    hosts = [f"n{rank // 8}" for rank in range(8 * num_hosts)]
    rounds = link_rounds(hosts)
    pairs = {pair for one in rounds for pair in one.pairs}
    assert len(rounds) <= 64 and len(pairs) == sum(len(one.pairs) for one in rounds)
    met: dict[int, set[str]] = {rank: set() for rank in range(len(hosts))}
    for a, b in pairs:
        met[a].add(hosts[b])
        met[b].add(hosts[a])
    # Its own host, and at least the binary logarithm of their number.
    assert min(map(len, met.values())) >= 1 + num_hosts.bit_length() - 1
    assert len(link_rounds(hosts, len(hosts))) == len(hosts) - (num_hosts % 2 == 0 or len(hosts) % 2 == 0)


def test_links_that_were_not_measured_are_counted() -> None:
    run = made_up(1, {}, HOSTS)
    run.cases = [case for case in run.cases if case["case"]["params"].get("level") != "across hosts"]
    verdict = judged(run)
    warning = "warning: 12 of 28 links were not measured (each rank met 4 or more others). Measure all with"
    assert verdict and verdict.lines[-1] == f"{warning} --set max_rounds=8"
