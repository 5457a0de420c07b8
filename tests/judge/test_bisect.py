"""`distbench ab --bisect`: the search, its worktrees and refusals; a stand-in for the launched command."""

import json
import math
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from gate_runs import CASE, case, records
from processes import Children, Ranks
from test_ab import STAND_IN, git

from distbench.cli.main import main
from distbench.judge import bisect, gate_text
from distbench.judge.ab import LaunchFailed, Pair, Side, Terms, looks_of
from distbench.judge.bisect import Commit, Search, search
from distbench.records.launches import Launch, Value
from distbench.records.run_file import Header
from distbench.statistics.verdicts import Options

COMMITS = [Commit(f"{number:08x}" + 32 * "0", f"Change {number}") for number in range(33)]
LAUNCH_S = 10.0


def history(
    factor_of: Callable[[int], float], broken: tuple[int, ...] = (), lacking: tuple[int, ...] = ()
) -> Callable[[int, int], Pair]:
    """A function that "launches" commits: 1 s times the commit's factor, with 2 % noise."""
    draw, started = np.random.default_rng(1), iter(range(10_000))

    def launched(number: int) -> Launch:
        if number in broken:
            raise LaunchFailed(Side(COMMITS[number].name, "x", Path()), "no such scenario")
        time_s, start = factor_of(number) * math.exp(0.02 * draw.standard_normal()), 1.0 + next(started)
        cases = {} if number in lacking else {CASE: Value("ok", 10, time_s, time_s)}
        return Launch(f"{start}", "", "train", start, start + 0.5, "", Header().facts, None, True, cases)

    def launch(number: int, pair: int) -> Pair:
        names = ["good", COMMITS[number].name]
        return Pair([launched(0)], [launched(number)], dict.fromkeys(names, LAUNCH_S))

    return launch


def searched(factor_of: Callable[[int], float], budget_s: float = 1e6, **more: tuple[int, ...]) -> Search:
    options = Options()
    terms = Terms(20, budget_s, looks_of(20, options), 1, len(COMMITS) - 1)
    return search(COMMITS, history(factor_of, **more), options, terms, lambda line: None)


@pytest.mark.parametrize("first", [1, 2, 16, 31, 32])
def test_the_first_slower_commit_is_named_with_its_certainty_and_launches(first: int) -> None:
    state = searched(lambda number: 1.2 if number >= first else 1.0)
    finding, command = bisect.answer(state)
    assert finding.startswith(f"FAIL: first slower commit: {COMMITS[first].name} 'Change {first}'. {CASE}: ")
    assert "x slower than 00000000 (95 % CI 1." in finding and bisect.exit_code(state, strict=False) == 1
    certainty = int(finding.rpartition("certainty ")[2].partition(" %")[0])
    assert certainty >= 95 and f"{2 * len(state.pairs)} launches, " in finding
    assert command == f"Next: git show {COMMITS[first].name}"
    share, low, high = state.slowdown(first)
    assert low < 0.2 < high and share == pytest.approx(0.2, abs=0.03)
    fewest, most = Terms(20, 1.0, (7, 11, 16, 20), 1, 32).num_launches
    assert fewest <= 2 * len(state.pairs) <= most


def test_equal_commits_are_not_searched() -> None:
    state = searched(lambda number: 1.0)
    assert state.case is None and bisect.exit_code(state, strict=True) == 0
    assert len(state.pairs) == state.settled.num_pairs
    for form in bisect.FORMS:
        assert bisect.render(form, state, strict=False) == gate_text.FORMS[form](state.settled.gated, False)


def test_of_two_slower_commits_the_first_is_named() -> None:
    state = searched(lambda number: 1.44 if number >= 20 else 1.2 if number >= 9 else 1.0)
    assert state.answer[:2] == (9, 9)


def test_commits_that_cannot_be_launched_or_lack_the_case_are_skipped_and_the_range_has_them() -> None:
    state = searched(lambda number: 1.2 if number >= 16 else 1.0, broken=(14, 15), lacking=(16,))
    assert state.answer[:2] == (14, 17) and {*state.skipped} <= {14, 15, 16}
    finding, command = bisect.answer(state)
    assert "one of 4, 0000000e to 00000011" in finding and finding.endswith("could not be measured")
    assert command == "Next: git log 0000000d..00000011"
    assert "no such scenario" in bisect.text(state)


@pytest.mark.parametrize("broken", [0, 32])
def test_a_good_or_bad_commit_that_cannot_be_launched_ends_it(broken: int) -> None:
    with pytest.raises(LaunchFailed, match="no such scenario"):
        searched(lambda number: 1.0, broken=(broken,))


def test_an_end_of_the_time_leaves_a_range_and_the_command_that_continues() -> None:
    state = searched(lambda number: 1.2 if number >= 9 else 1.0, budget_s=18 * LAUNCH_S)
    first, last, _ = state.answer
    assert first <= 9 <= last and first < last
    finding, command = bisect.answer(state)
    assert "Another pair would take longer than --max-time 180" in finding
    assert command.startswith(f"Next: distbench ab --bisect {COMMITS[first - 1].name} {COMMITS[last].name} -- ")


def test_a_slowdown_of_the_first_pairs_only_names_no_commit() -> None:
    launched: list[int] = []

    def factor(number: int) -> float:
        launched.append(number)
        return 1.2 if number and len(launched) <= 14 else 1.0

    state = searched(factor)
    finding, _ = bisect.answer(state)
    assert finding.startswith("INCONCLUSIVE: 00000020 was slower in the first 7 pairs only.")
    assert [bisect.exit_code(state, strict) for strict in (False, True)] == [0, 3]


def test_an_interruption_leaves_the_command_that_continues() -> None:
    pairs = history(lambda number: 1.2 if number >= 9 else 1.0)
    message: list[str] = []

    def launch(number: int, pair: int) -> Pair:
        if pair > 10:
            raise KeyboardInterrupt
        return pairs(number, pair)

    terms = Terms(20, 1e6, looks_of(20, Options()), 1, 32)
    with pytest.raises(KeyboardInterrupt):
        search(COMMITS, launch, Options(), terms, message.append)
    assert message[-1].startswith("continue: distbench ab --bisect 0000000")


def test_the_formats_have_the_answer() -> None:
    state = searched(lambda number: 1.2 if number >= 9 else 1.0)
    record = json.loads(bisect.json_text(state))
    assert record["first_slower"] == [COMMITS[9].sha] and record["certainty"] >= 0.95
    assert record["num_launches"] == 2 * len(state.pairs) and math.isclose(sum(record["chances"]), 1)
    assert bisect.annotations(state).startswith("::error title=distbench ab --bisect::FAIL: first slower commit")
    assert "<failure" in bisect.junit_text(state)
    assert json.loads(bisect.badge_text(state))["message"].startswith("FAIL: first slower commit: 00000009 ")
    assert bisect.markdown(state).startswith("# bisect: FAIL: first slower commit")


# With git, and a stand-in for the launched command.


@pytest.fixture
def line_of_commits(children: Children, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Eight commits after `good`: from the sixth on 1.3 s instead of 1 s; the fifth is broken."""
    folder = tmp_path / "repository"
    package = folder / "distbench"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(STAND_IN)
    (folder / "lines.json").write_text(json.dumps(records("", 1.0, {CASE: case([1.0])})))
    git(tmp_path, "init", "-q", "-b", "main", str(folder))
    for number in range(9):
        (folder / "time_s").write_text("1.3" if number >= 6 else "fast" if number == 5 else "1.0")
        git(folder, "add", "-A")
        git(folder, "commit", "-qm", f"Change {number}", "--allow-empty")
        git(folder, "tag", f"v{number}")
    monkeypatch.chdir(folder)
    return folder


def run_bisect(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(main, ["ab", "--bisect", *arguments])
    return done.exit_code, done.output


def test_the_range_of_a_broken_commit_is_found_and_the_repository_stays_as_it_was(
    line_of_commits: Path, tmp_path: Path
) -> None:
    (line_of_commits / "time_s").write_text("9")  # a change of the working tree, which nothing reads or undoes
    before = git(line_of_commits, "status", "--porcelain"), git(line_of_commits, "rev-parse", "HEAD")
    code, output = run_bisect("v0", "v8", "--results", str(tmp_path / "out"), "--width", "200", "--", "x")
    names = [git(line_of_commits, "rev-parse", "--short=8", f"v{number}") for number in (5, 6)]
    assert code == 1 and f"FAIL: first slower commit: one of 2, {names[0]} to {names[1]}" in output, output
    assert f"{names[0]} skipped: ValueError: could not convert string to float: 'fast'" in output
    assert f"8 commits after {git(line_of_commits, 'rev-parse', '--short=8', 'v0')} 'Change 0', up to " in output
    assert before == (git(line_of_commits, "status", "--porcelain"), git(line_of_commits, "rev-parse", "HEAD"))
    assert git(line_of_commits, "worktree", "list").count("\n") == 0
    assert {"good", names[1]} <= {path.name for path in (tmp_path / "out").iterdir()}


def test_merged_branches_are_one_commit(line_of_commits: Path, tmp_path: Path) -> None:
    git(line_of_commits, "checkout", "-qb", "topic", "v4")
    for text in ("one", "two"):
        (line_of_commits / text).touch()
        git(line_of_commits, "add", "-A")
        git(line_of_commits, "commit", "-qm", text)
    git(line_of_commits, "checkout", "-q", "main")
    git(line_of_commits, "merge", "-q", "--no-ff", "-m", "Merge topic", "topic")
    code, output = run_bisect("v6", "main", "--dry-run", "--", "x")
    assert code == 0 and output.startswith("3 commits after ") and output.splitlines()[0].endswith("'Merge topic'")
    assert "cost: usually 18 to 40 launches, unknown time; at most 30 min (--max-time)." in output
    code, output = run_bisect("topic", "main", "--dry-run", "--", "x")
    assert code == 2 and "topic is not on the line of first parents of main; give" in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("v0", "v0", "--", "x"), "v0 and v0 are the same commit; give an older GOOD, or a newer BAD"),
        (("v3", "v1", "--", "x"), "v1 is older than v3; give the good commit first"),
        (("v0", ".", "--", "x"), "--bisect needs two commits, and . is the working tree; commit the changes"),
        (("nowhere", "v1", "--", "x"), "'nowhere' is not a revision"),
        (("v0", "v1", "--env-b", "A=1", "--", "x"), "--env-b cannot be combined with --bisect"),
        (("v0", "v1", "--", "x", "--results", "y"), "--results is not allowed after --"),
        (("v4", "v5", "--", "x"), "could not convert string to float"),
    ],
)
def test_what_cannot_work_is_a_sentence(line_of_commits: Path, arguments: tuple[str, ...], message: str) -> None:
    code, output = run_bisect(*arguments)
    assert code == 2 and message in " ".join(output.split()) and "Traceback" not in output


def test_unrelated_histories_are_a_sentence(line_of_commits: Path) -> None:
    git(line_of_commits, "checkout", "-q", "--orphan", "other")
    git(line_of_commits, "commit", "-qm", "Another start")
    code, output = run_bisect("other", "v8", "--", "x")
    assert code == 2 and "other is not on the line of first parents of v8; give another GOOD" in output


BENCH = """
    import time

    import torch
    from pause import PAUSE_S
    from torch import nn

    from distbench.spec import DdpPlan, ParallelPlan, Scenario, scenario


    class Layer(nn.Linear):
        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            time.sleep(PAUSE_S)
            return super().forward(batch)


    @scenario(mesh={"dp_replicate": 2})
    def train() -> Scenario:
        return Scenario(
            build_model=lambda: Layer(64, 64),
            make_batch=lambda: (torch.ones(8, 64), torch.zeros(8, 64)),
            loss=nn.functional.mse_loss,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
            plan=ParallelPlan(ddp=DdpPlan()),
        )
"""


@pytest.mark.long
def test_a_sleep_in_a_real_scenario_is_found(ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On two gloo ranks: the second of three commits after the good one sleeps three times as long."""
    git(tmp_path, "init", "-q", ".")
    (tmp_path / "bench.py").write_text(textwrap.dedent(BENCH))
    for number, pause_s in enumerate((0.1, 0.1, 0.3, 0.3)):
        (tmp_path / "pause.py").write_text(f"PAUSE_S = {pause_s}  # {number}\n")
        git(tmp_path, "add", "-A")
        git(tmp_path, "commit", "-qm", f"Change {number}")
    monkeypatch.chdir(tmp_path)
    limits = ("--pairs", "5", "--results", str(tmp_path / "out"), "--width", "200")
    with ranks.forked():
        code, output = run_bisect("HEAD~3", "HEAD", *limits, "--", "bench.py", "--quick", "--budget", "1")
    assert code == 1 and "FAIL: first slower commit: " in output and "'Change 2'. step/" in output, output


@pytest.mark.parametrize(("differences", "unconfirmed"), [({1: [0.2]}, 1), ({1: [0.2, 0.2]}, None)])
def test_a_commit_is_named_after_two_pairs(differences: Any, unconfirmed: int | None) -> None:
    """A disturbance of one pair named a wrong commit with a certainty of 99 %."""
    commits: Any = [None] * 4
    settled: Any = None
    chances = np.array([0.99, 0.005, 0.005, 0.0])
    assert Search(commits, settled, 0.95, chances=chances, differences=differences).unconfirmed == unconfirmed
