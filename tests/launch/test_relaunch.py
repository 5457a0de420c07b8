"""When ranks are started again, and when not: launches that never happen, told by a stand-in for them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from processes import Children

from distbench.launch import JobOutcome, RankProcesses, launch, run_job
from distbench.launch.display import Display
from distbench.launch.rendezvous import Joined
from distbench.launch.run_job import JobRecord, left_of
from distbench.launch.watch_ranks import Attempt, Cause, attempt
from distbench.processes.signals import Stop
from distbench.records.run_file import SCHEMA_VERSION, Case, CaseResult, append, read_run
from distbench.spec import Job, Settings

CASES = ("a", "b", "c", "d", "e")
Misdeed = Callable[[str], tuple[str, Cause] | None]


def job_in(folder: Path, **settings: Any) -> Job:
    return Job(
        run_id="run",
        invocation_id="now",
        scenario="s",
        file="s.py",
        variants=[{}],
        axes=[],
        mesh={"tp": 2},
        device="cpu",
        settings=Settings(**settings),
        run_file=str(folder / "run.jsonl"),
        log_dir=str(folder / "logs"),
        timeout_s=1.0,
        started_at=0.0,
        environment={"num_cpus": 1},
    )


class Ranks:
    """Stands in for `attempt`: writes a row for each case that is not done, until one misbehaves."""

    def __init__(self, misdeed: Misdeed) -> None:
        self.misdeed, self.jobs = misdeed, []

    def __call__(self, job: Job, ranks: object, watcher: Any, stop: Stop) -> Attempt:
        self.jobs.append(job)
        assert json.loads((Path(job.log_dir) / "job.json").read_text())["done_ids"] == job.done_ids
        seen = Attempt()
        if broken := self.misdeed("set-up"):
            seen.status, seen.cause = broken
            return seen
        run_file = Path(job.run_file)
        if not job.done_ids:
            append(run_file, {"type": "run", "schema_version": SCHEMA_VERSION})
        seen.note({"event": "plan", "num_cases": len(CASES)})
        for name in CASES:
            if name in job.done_ids:
                continue
            seen.note({"event": "case", "id": name, "kind": "step", "params": {}})
            if broken := self.misdeed(name):
                seen.status, seen.cause = broken
                return seen
            append(run_file, CaseResult(Case(name, "step"), "ok").to_record())
            seen.note({"event": "done", "id": name, "status": "ok"})
        return seen


@pytest.fixture
def launched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[JobOutcome, Ranks, list[Any]]]:
    def run(misdeed: Misdeed, joined: Joined | None = None, **settings: Any) -> tuple[JobOutcome, Ranks, list[Any]]:
        ranks = Ranks(misdeed)
        monkeypatch.setattr(run_job, "attempt", ranks)
        outcome = launch(job_in(tmp_path, **settings), joined, Display())
        run_file = tmp_path / "run.jsonl"
        rows = [(r["case"]["id"], r["status"]) for r in read_run(run_file).cases] if run_file.exists() else []
        return outcome, ranks, rows

    return run


def killing(*names: str) -> Misdeed:
    return lambda name: ("failed", Cause("killed", f"rank 1 died in {name}")) if name in names else None


def footer_in(folder: Path) -> dict[str, Any]:
    footer = read_run(folder / "run.jsonl").footer
    assert footer is not None
    return footer


def test_each_launch_goes_on_after_the_case_that_broke_the_last_one(launched: Any, tmp_path: Path) -> None:
    outcome, ranks, rows = launched(killing("a", "c"))
    assert rows == [("a", "aborted"), ("b", "ok"), ("c", "aborted"), ("d", "ok"), ("e", "ok")]
    assert [job.done_ids for job in ranks.jobs] == [[], ["a"], ["a", "b", "c"]]
    folders = [Path(job.log_dir).relative_to(tmp_path) for job in ranks.jobs]
    assert folders == [Path("logs"), Path("logs/relaunch1"), Path("logs/relaunch2")]
    assert (outcome.status, outcome.exit_code) == ("complete", 1)
    assert footer_in(tmp_path)["num_relaunches"] == 2 and footer_in(tmp_path)["num_not_run"] == 0
    assert "rank 1 died in a" in outcome.message and "rank 1 died in c" in outcome.message
    assert footer_in(tmp_path)["message"].startswith("2 cases broke the launch (all cases have a row")


def test_a_case_that_breaks_a_later_pass_is_aborted_and_the_others_go_on_with_the_next(tmp_path: Path) -> None:
    job, run_file = job_in(tmp_path), tmp_path / "run.jsonl"
    append(run_file, {"type": "run", "schema_version": SCHEMA_VERSION}, *rows_in(2, "a", "b"))
    record = JobRecord(job, None, Display())
    ended = Attempt(status="failed", cause=Cause("killed", "rank 1 died"), num_cases=2)
    ended.num_by_status.update(ok=2)
    ended.running, ended.pass_number = Case("b", "step"), 2
    record.add(ended)
    assert record.num_by_status == {"ok": 1, "aborted": 1} and record.goes_on()
    left = left_of(job)
    assert (left.done_ids, left.ended_ids, left.passes_done) == (["a", "b"], ["b"], {"a": 2, "b": 2})
    assert [case["status"] for case in read_run(run_file).cases] == ["ok", "aborted"]


def rows_in(num_passes: int, *names: str) -> list[dict[str, Any]]:
    rows = [CaseResult(Case(name, "step"), "ok", samples_s=[1.0]).to_record() for name in names]
    own = {"samples_s": [1.0], "phases_s": {}}
    return rows + [
        {"type": "pass", "case_id": name, "number": number, **own} for number in range(1, num_passes) for name in names
    ]


def test_relaunches_are_capped_and_the_rest_is_counted_as_not_run(launched: Any, tmp_path: Path) -> None:
    outcome, ranks, rows = launched(killing(*CASES), max_relaunches=2)
    assert rows == [("a", "aborted"), ("b", "aborted"), ("c", "aborted")] and len(ranks.jobs) == 3
    assert (outcome.status, outcome.exit_code) == ("failed", 1)
    assert footer_in(tmp_path)["num_not_run"] == 2 and footer_in(tmp_path)["num_relaunches"] == 2
    assert "2 cases not run after 2 relaunches" in outcome.message


def test_a_hang_is_a_timeout_and_a_rank_that_raised_alone_has_raised(launched: Any) -> None:
    broken = {"b": ("timeout", Cause("hung", "no progress")), "d": ("failed", Cause("raised", "rank 1 raised X", 1))}
    outcome, _, rows = launched(broken.get)
    assert rows == [("a", "ok"), ("b", "timeout"), ("c", "ok"), ("d", "raised"), ("e", "ok")]
    assert outcome.num_by_status == {"ok": 3, "timeout": 1, "raised": 1}


@pytest.mark.parametrize(
    ("misdeed", "rows", "exit_code"),
    [
        ({"c": ("interrupted", Cause("", "interrupted"))}, [("a", "ok"), ("b", "ok"), ("c", "aborted")], 130),
        ({"c": ("failed", Cause("user", "mend it"))}, [("a", "ok"), ("b", "ok")], 2),
        ({"c": ("failed", Cause("storage", "disk full"))}, [("a", "ok"), ("b", "ok")], 2),
        ({"set-up": ("failed", Cause("killed", "rank 0 died"))}, [], 1),
        ({"set-up": ("timeout", Cause("hung", "set-up made no progress"))}, [], 1),
    ],
)
def test_ranks_are_not_started_again_after_what_no_case_did(
    launched: Any, misdeed: dict[str, Any], rows: list[Any], exit_code: int
) -> None:
    outcome, ranks, result = launched(misdeed.get)
    assert len(ranks.jobs) == 1 and result == rows and outcome.exit_code == exit_code


def test_a_relaunch_that_dies_in_set_up_is_not_retried(launched: Any, tmp_path: Path) -> None:
    calls = iter([None, None, ("failed", Cause("killed", "rank 1 died")), ("failed", Cause("killed", "no port"))])
    outcome, ranks, rows = launched(lambda name: next(calls))
    assert rows == [("a", "ok"), ("b", "aborted")] and len(ranks.jobs) == 2
    assert (outcome.status, outcome.exit_code) == ("failed", 1) and footer_in(tmp_path)["num_not_run"] == 3
    assert "no port" in outcome.message and "rank 1 died" in outcome.message


def test_ranks_that_somebody_else_started_are_not_started_again(launched: Any) -> None:
    outcome, ranks, rows = launched(killing("b"), joined=Joined(0, 2, {}))
    assert rows == [("a", "ok"), ("b", "aborted")] and len(ranks.jobs) == 1
    assert "3 cases not run, because distbench does not restart ranks of another launcher" in outcome.message


def test_a_case_whose_row_was_written_before_the_rank_died_gets_no_second_row(launched: Any, tmp_path: Path) -> None:
    def misdeed(name: str) -> tuple[str, Cause] | None:
        if name != "b":
            return None
        append(tmp_path / "run.jsonl", CaseResult(Case("b", "step"), "wrong").to_record())
        return "failed", Cause("killed", "rank 0 died")

    outcome, ranks, rows = launched(misdeed)
    assert rows == [("a", "ok"), ("b", "wrong"), ("c", "ok"), ("d", "ok"), ("e", "ok")]
    assert len(ranks.jobs) == 2 and outcome.num_by_status == {"ok": 4, "wrong": 1}


EVENTS = [{"event": "plan", "num_cases": 2}, {"event": "case", "id": "a", "kind": "step", "params": {}}]


@pytest.mark.parametrize(
    ("events", "status"), [([], "failed"), (EVENTS, "failed"), ([*EVENTS, {"event": "end"}], "complete")]
)
def test_an_exit_code_of_0_counts_only_where_the_ranks_said_that_they_were_done(
    children: Children, tmp_path: Path, events: list[dict[str, Any]], status: str
) -> None:
    """As after sys.exit(0) in a scenario: a process that ends well and has told so much."""
    job = job_in(tmp_path)
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "progress.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    with RankProcesses([job], Joined(0, 1, {}), ("-c", "pass")) as ranks:
        seen = attempt(job, ranks, Display(), Stop())
    assert seen.status == status and ("before its work was done" in seen.cause.message) == (status == "failed")
    assert seen.lost_case == (Case("a", "step", {}) if status == "failed" and events else None)
