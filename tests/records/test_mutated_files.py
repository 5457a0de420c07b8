"""Damaged files of each kind: a sentence or a warning, no traceback, and no nonsense taken for measured.

A few of what `benchmarks/bench_mutated_files.py` tries by the thousand.
"""

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.bench_mutated_files import commands_for, faults_of, invoke
from benchmarks.mutations import KINDS, SUFFIXES, mutated
from distbench.launch.watch_ranks import cause_of
from distbench.records.progress_events import ProgressReader
from distbench.spec.errors import FAILURES, UserError
from distbench.spec.job import Job

FEW = settings(
    max_examples=12, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.mark.parametrize("kind", KINDS)
def test_the_files_that_are_damaged_are_valid(tmp_path: Path, kind: str) -> None:
    for number, text in enumerate(KINDS[kind]()):
        path = tmp_path / f"{number}{SUFFIXES.get(kind, '.json')}"
        path.write_text(text)
        done = invoke(commands_for(kind, path, tmp_path)[0])
        assert done.exit_code in (0, 1, 4) and not isinstance(done.exception, ValueError), done.output


@pytest.mark.parametrize("kind", KINDS)
@FEW
@given(draw=st.randoms(use_true_random=False))
@pytest.mark.long
def test_a_damaged_file_is_a_sentence_or_a_warning(tmp_path: Path, kind: str, draw: object) -> None:
    change = mutated(kind, draw)  # type: ignore[arg-type]
    assert list(faults_of(kind, change, tmp_path, draw.random(), False)) == []  # type: ignore[attr-defined]


@pytest.mark.parametrize("value", ["9" * 400, '{"a":' * 200 + "1" + "}" * 200])
def test_a_recording_with_an_impossible_parameter_is_rejected(tmp_path: Path, value: str) -> None:
    path = tmp_path / "recording.jsonl"
    head, *events = KINDS["recording"]()[1].splitlines()
    params = json.dumps({**json.loads(head)["params"], "size": "VALUE"}).replace('"VALUE"', value)
    head = json.dumps({**json.loads(head), "params": "PARAMS"}).replace('"PARAMS"', params)
    path.write_text("\n".join([head, *events, ""]))
    done = invoke(["simulate", "--recording", str(path), "--results", str(tmp_path)])
    assert done.exit_code == 2 and "line 1" in done.output, done.output


def test_nonsense_is_told_from_what_may_be_measured() -> None:
    """The oracle itself: what it calls nonsense, and what it does not."""
    import random

    result = [mutated("run", random.Random(number)) for number in range(300)]
    assert 30 < sum(one.is_nonsense for one in result) < 200


@pytest.mark.parametrize("text", ["", '{"rank": 0, "kind"', "[]", '{"rank": "x", "kind": 3}', "\x00"])
def test_a_failure_file_that_is_damaged_is_passed_over(tmp_path: Path, text: str) -> None:
    (tmp_path / "failure-rank0.json").write_text(text)
    assert cause_of(tmp_path, 1).message.startswith("the launcher ended with exit code 1")
    whole = {"rank": 1, "kind": "raised", "message": "ValueError: no", "at": 5.0}
    (tmp_path / "failure-rank1.json").write_text(json.dumps(whole))
    assert cause_of(tmp_path, 1).message.startswith("rank 1 raised ValueError: no")
    for kind in FAILURES:
        (tmp_path / "failure-rank1.json").write_text(json.dumps({**whole, "kind": kind}))
        assert cause_of(tmp_path, 1).kind == kind and cause_of(tmp_path, 1).rank == 1


def test_progress_that_was_cut_short_is_passed_over(tmp_path: Path) -> None:
    lines = ['{"event": "pl', "[]", '{"event": 3}', '{"event": "plan"}', '{"event": "case", "id": 3}']
    lines += [
        '{"event": "done", "id": "a", "status": "ok", "spent_s": {"timed": "x"}}',
        '{"event": "plan", "num_cases": 2}',
    ]
    (tmp_path / "progress.jsonl").write_text("\n".join(lines) + "\n")
    reader = ProgressReader(tmp_path / "progress.jsonl")
    assert list(reader.news()) == [{"event": "plan", "num_cases": 2}]
    reader.close()


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"settings": {}}', '{"settings": {"x": 1}}'])
def test_a_job_file_that_was_cut_short_is_a_sentence(tmp_path: Path, text: str) -> None:
    (tmp_path / "job.json").write_text(text)
    with pytest.raises(UserError, match=r"job file .* cannot be (used|read)"):
        Job.load(tmp_path / "job.json")


def test_a_signature_baseline_that_is_no_text_is_replaced(tmp_path: Path) -> None:
    good = KINDS["signature"]()[0]
    (tmp_path / "new.signature").write_text(good)
    (tmp_path / "old.signature").write_bytes(b"\xff\xfe\x00")
    sides = [str(tmp_path / "old.signature"), str(tmp_path / "new.signature")]
    assert invoke(["signature", "check", *sides]).exit_code == 2
    assert invoke(["signature", "update", *sides]).exit_code == 0
    assert (tmp_path / "old.signature").read_text() == good


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("scenario", "scenario\x1b", "line 'scenario'"),
        ("mesh ", "mesh tp=0,x", "line 'mesh'"),
        ("version 1", "version ²", "signature version"),
        ("] \n", "", "line 39"),
    ],
)
def test_a_signature_names_the_line_that_is_wrong(tmp_path: Path, old: str, new: str, message: str) -> None:
    text = KINDS["signature"]()[0]
    path = tmp_path / "x.signature"
    path.write_text(text.replace(old, new, 1) if old in text else text + text.split("\n", 4)[4])
    done = invoke(["signature", "check", str(path), str(path)])
    assert done.exit_code == 2 and message in done.output and str(path) in done.output
