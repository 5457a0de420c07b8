"""`run -k`, `--label`, `--dry-run` and `--resume`, and `list NAME`: what a user sees, and what the run file keeps."""

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import DATA, run_files
from processes import Children, Ranks
from test_relaunch import job_in, rows_in

from distbench.cli.run import estimated_time
from distbench.launch import run_job
from distbench.launch.display import Display
from distbench.launch.run_job import JobRecord
from distbench.records.run_file import SCHEMA_VERSION, append, read_run
from distbench.spec import Job, UserError, find
from distbench.spec.job import digest_of

MISDEEDS = f"{DATA / 'misdeeds.py'}::misdeeds"
IDS = [f"step/f32[4,2,8]/misdeeds/case={number}" for number in range(1, 6)]
FEW = ("--quick", "--passes", "1", "--budget", "0.5")


@pytest.fixture(scope="module")
def chosen(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """One launch of two scenarios, of the first of which nothing is chosen."""
    folder = tmp_path_factory.mktemp("chosen")
    done = ranks.run_here(
        *("run", str(DATA / "tiny.py"), MISDEEDS, "-k", "case=2 or case=4", "--label", "before", *FEW),
        *("--results", str(folder)),
    )
    assert done.exit_code == 0, done.stderr
    return folder, done.stderr


def test_only_chosen_cases_run_and_the_header_says_by_which_words(chosen: tuple[Path, str]) -> None:
    (file,) = run_files(chosen[0])
    run = read_run(file)
    assert [record["case"]["params"]["variant"] for record in run.cases] == ["case=2", "case=4"]
    assert run.header["job"]["chosen"] == "case=2 or case=4" and run.about.label == "before"
    assert "tiny: no case matches" in chosen[1]
    assert run.footer is not None and run.footer["num_not_run"] == 0


def test_a_report_takes_the_runs_of_a_label_and_says_it(chosen: tuple[Path, str], ranks: Ranks) -> None:
    shown = ranks.run_here("report", "--label", "before", "--results", str(chosen[0]))
    assert shown.exit_code == 0 and "label before" in shown.stdout
    other = ranks.run_here("report", "--label", "after", "--results", str(chosen[0]))
    assert other.exit_code == 2 and other.stderr.startswith(
        "distbench: no run has the label 'after' of --label; available"
    )


def test_a_choice_of_nothing_is_one_sentence_with_a_few_ids(ranks: Ranks, tmp_path: Path) -> None:
    done = ranks.run_here("run", str(DATA / "tiny.py"), "-k", "step", *FEW, "--quiet", "--results", str(tmp_path))
    assert done.exit_code == 2 and run_files(tmp_path) == []
    assert done.stderr.splitlines() == [
        "distbench: -k 'step' matches 0 of 1 case, such as collective/f32[1024]/all_gather/tp; "
        "`run --dry-run` lists all"
    ]


def test_an_expression_that_is_none_is_refused_before_anything_starts(tmp_path: Path, ranks: Ranks) -> None:
    done = ranks.run_here("run", "tp_mlp", "-k", "(a", "--results", str(tmp_path))
    assert done.exit_code == 2 and "a parenthesis is not closed" in done.stderr


def test_a_dry_run_lists_the_cases_and_takes_the_time_from_the_run_before(
    chosen: tuple[Path, str], children: Children
) -> None:
    words = ("run", DATA / "tiny.py", MISDEEDS, *FEW, "--dry-run", "--results", chosen[0])
    before = run_files(chosen[0])
    message = children.cli(*words, "-k", "case").stdout.splitlines()
    (run,) = map(read_run, before)
    wall_s = (run.footer or {})["wall_s"] * 5 / 2
    assert message[0].startswith(f"misdeeds on dp_shard=2 (2 ranks, cpu): 5 cases, about {wall_s:.0f} s (as on 20")
    assert [line.strip().rpartition("/")[2] for line in message[1:6]] == [f"case={number}" for number in range(1, 6)]
    assert run_files(chosen[0]) == before and len(message) == 6
    other = children.cli("run", DATA / "tiny.py", "--dry-run", "--results", chosen[0]).stdout
    assert "tiny on tp=2 (2 ranks, cpu): 1 case, no earlier run with these settings: 5 s timed" in other
    (record,) = json.loads(children.cli("run", DATA / "tiny.py", "--dry-run", "--json", "--results", chosen[0]).stdout)
    assert record["scenario"] == "tiny" and len(record["cases"]) == 1


def test_list_tells_one_scenario_in_full(chosen: tuple[Path, str], children: Children) -> None:
    message = children.cli("list", "cp_attention", MISDEEDS, "--results", chosen[0], "--width", "80").stdout
    assert "rotate         = allgather, alltoall, ulysses" in message and "dim       = 512" in message
    assert "with --quick  dim=128, sequence=512" in message and "no finished run of this machine" in message
    assert " s for 2 cases on dp_shard=2, of which at most 0.5 s timed" in message and '"before")' in message
    assert find("cp_attention")[0].summary.split(",")[0] in message
    assert all(len(line) <= 80 for line in message.splitlines() if "/" not in line)


def test_an_interrupted_run_goes_on_with_the_cases_that_have_no_row(
    chosen: tuple[Path, str], ranks: Ranks, tmp_path: Path
) -> None:
    """As after Ctrl-C in the middle of the second case."""
    (file,) = run_files(chosen[0])
    header, first, second, _ = (json.loads(line) for line in file.read_text().splitlines())
    header["job"]["chosen"] = ""
    cut = {**second, "status": "aborted", "error": "interrupted", "samples_s": []}
    footer = {"type": "footer", "status": "interrupted", "num_not_run": 3}
    broken = tmp_path / "moved.jsonl"
    append(broken, header, first, cut, footer)
    done = ranks.run_here("run", "--resume", str(broken))
    assert done.exit_code == 0, done.stderr
    run = read_run(broken)
    assert [record["case"]["params"]["variant"] for record in run.cases] == [
        f"case={number}" for number in (2, 1, 3, 4, 5)
    ]
    assert run.cases[0] == read_run(file).cases[0] and run.warnings == []
    assert run.footer is not None and run.footer["status"] == "complete"
    assert run.footer["num_by_status"] == {"ok": 5} and run.footer["num_not_run"] == 0
    again = ranks.run_here("run", "--resume", str(broken))
    assert again.exit_code == 2 and "no case is left to run, because each of its 5 cases has a row" in again.stderr
    for words, message in ((["tp_mlp"], "rejects tp_mlp"), (["--mesh", "tp=2"], "rejects --mesh")):
        assert message in ranks.run_here("run", *words, "--resume", str(broken)).stderr


FACTS = {"machine": "m", "git_commit": "c", "num_cpus": 1}


def interrupted(folder: Path, monkeypatch: pytest.MonkeyPatch, **environment: Any) -> Path:
    scenario = folder / "s.py"
    scenario.write_text("")
    record = job_in(folder).to_record() | {"file": str(scenario), "file_digest": digest_of(scenario)}
    record.pop("environment")
    header = {"type": "run", "schema_version": SCHEMA_VERSION, "job": record, "environment": {**FACTS, **environment}}
    append(folder / "run.jsonl", header, *rows_in(1, "a"))
    monkeypatch.setattr(run_job, "host_facts", lambda: dict(FACTS))
    monkeypatch.setattr(run_job, "installed_torch", lambda: "2.13.0")
    return folder / "run.jsonl"


def test_what_is_left_of_a_run_counts_the_rows_that_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = run_job.job_left_of(interrupted(tmp_path, monkeypatch, torch="2.13.0+cpu"))
    assert (job.done_ids, job.passes_done, job.log_dir) == (["a"], {"a": 1}, str(tmp_path / "logs" / "resume1"))
    assert JobRecord(job, None, Display()).num_by_status == {"ok": 1}


def test_a_complete_run_of_one_case_is_said_to_be_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = interrupted(tmp_path, monkeypatch, torch="2.13.0")
    append(file, {"type": "footer", "status": "complete"})
    with pytest.raises(UserError, match="no case is left to run, because its one case has a row"):
        run_job.job_left_of(file)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"torch": "2.12.0"}, "torch was 2.12.0, and is now 2.13.0"),
        ({"torch": "2.13.0", "git_commit": "b"}, "the commit was b, and is now c"),
        ({"torch": "2.13.0", "machine": "other"}, "the machine was other, and is now m"),
    ],
)
def test_a_run_made_otherwise_is_not_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environment: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        run_job.job_left_of(interrupted(tmp_path, monkeypatch, **environment))


def test_a_scenario_that_was_edited_or_is_gone_is_not_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = interrupted(tmp_path, monkeypatch, torch="2.13.0")
    (tmp_path / "s.py").write_text("x = 1")
    with pytest.raises(UserError, match="the scenario file was "):
        run_job.job_left_of(file)
    (tmp_path / "s.py").unlink()
    with pytest.raises(UserError, match="and is now gone"):
        run_job.job_left_of(file)


def test_old_run_files_are_refused_with_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_job, "host_facts", lambda: dict(FACTS))
    old = tmp_path / "old.jsonl"
    append(old, {"type": "run", "schema_version": 1, "job": {"scenario": "s"}})
    with pytest.raises(UserError, match="measure again"):
        run_job.job_left_of(old)


def test_without_an_earlier_run_the_budget_is_what_is_known(tmp_path: Path) -> None:
    job: Job = job_in(tmp_path)
    seconds, words = estimated_time(job, 3, tmp_path)
    assert seconds is None and "15 s timed" in words  # 3 cases of 5 s at most
    assert "180 s timed" in estimated_time(job, 1000, tmp_path)[1]
