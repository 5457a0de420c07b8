"""`run links --fail-on-outlier` and `--against`: what is refused, what is said, and damaged run files."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner
from test_links import made_up

from distbench.cli.main import main
from distbench.cli.run import LinkOptions, links_code
from distbench.judge.links_text import judged, link_hosts_note, link_tables
from distbench.records.run_file import CaseLine, Run
from distbench.spec.json_decoder import is_of_type


def saved(run: Run, path: Path) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in (run.header, *(typed(one) for one in run.cases))))
    return path


def typed(case: dict[str, Any]) -> dict[str, Any]:
    """A case as its first line in a file has it."""
    return {
        "type": "case",
        **{name: value for name, value in case.items() if name != "ranks_by_pass"},
        "samples_s": [1.0],
    }


@pytest.mark.parametrize(
    ("scenario", "earlier", "message"),
    [
        (
            "links",
            made_up,
            "--against: the earlier run has 8 ranks, but this run has 4; give a run with the same ranks",
        ),
        ("tp_mlp", made_up, "which is not among the given scenarios; add links to the scenarios"),
        ("links", None, "has no links; give a run file of scenario links"),
    ],
)
def test_what_links_cannot_be_held_against_is_refused_before_measuring(
    tmp_path: Path, known_host: Any, scenario: str, earlier: Any, message: str
) -> None:
    run = made_up(1, {})
    file = saved(run if earlier else replace(run, cases=[]), tmp_path / "earlier.jsonl")
    words = ["run", scenario, "--quick", "--mesh", "dp_shard=2,tp=2", "--results", str(tmp_path / "out")]
    done = CliRunner().invoke(main, [*words, "--against", str(file)])
    assert done.exit_code == 2 and message in done.output and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("slow", "passes", "earlier", "code", "message"),
    [
        ({5: 2.0}, 16, None, 1, "FAIL: rank 5 (on b) is 2.02x slower "),
        ({}, 16, None, 0, ""),
        ({}, 3, None, 3, "UNKNOWN: 3 passes are too few"),
        ({5: 2.0}, 16, {5: 2.0}, 1, "FAIL: rank 5"),
        ({(2, 7): 3.0}, 16, {}, 1, "FAIL: since earlier.jsonl, link 2-7"),
    ],
)
def test_a_silent_check_before_a_job_says_what_is_slow_or_could_not_be_told(
    monkeypatch: pytest.MonkeyPatch, capsys: Any, slow: Any, passes: int, earlier: Any, code: int, message: str
) -> None:
    runs = {"now": made_up(1, slow, num_passes=passes), "earlier.jsonl": made_up(2, earlier or {})}
    runs["earlier.jsonl"] = replace(runs["earlier.jsonl"], path=Path("earlier.jsonl"))
    monkeypatch.setattr("distbench.records.run_file.read_run", lambda path: runs[path.name])
    monkeypatch.setattr(Path, "exists", lambda path: True)
    jobs: list[Any] = [SimpleNamespace(run_file="now")]
    requested = LinkOptions(fail_on_outlier=True, against=None if earlier is None else Path("earlier.jsonl"))
    assert links_code(jobs, requested, silent=True, form="table") == code
    err = capsys.readouterr().err
    assert message in err and bool(err) == bool(message)


def test_a_slow_rank_is_named_with_its_device() -> None:
    run = made_up(1, {5: 2.0})
    for case in run.cases:
        if case["case"]["params"]["op"] == "matmul":
            case["case"]["params"]["devices"] = [f"cuda:{rank % 4}" for rank in range(8)]
    result = judged(run)
    assert result and result.lines[0].startswith("FAIL: rank 5 (cuda:1 on b) is 2.02x slower ")


def test_an_earlier_run_of_other_hosts_is_said() -> None:
    now, then = made_up(1, {}), made_up(2, {}, [*["a"] * 4, *["c"] * 4])
    assert list(link_hosts_note(now, made_up(3, {}))) == []
    (note,) = link_hosts_note(now, then)
    assert note.startswith("warning: the earlier run used hosts a, c, but this run uses hosts a, b")
    later, before = (
        replace(run, header={**run.header, "environment": {"device": "cuda", "nccl": nccl}})
        for run, nccl in ((now, "2.27.5"), (then, "2.21.5"))
    )
    (_, driven) = link_hosts_note(later, before)
    assert driven == "warning: nccl was 2.21.5 in the earlier run and is 2.27.5 now"


@pytest.mark.parametrize(
    "value", [None, "x", -1, [], [[]], [[0]], [["a", "b"]], [[0, 99]], [[-1, 1]], {}, 1e300, [None] * 8]
)
@pytest.mark.parametrize("name", ["pairs", "hosts", "devices", "ranks", "size_bytes", "level", "op"])
@pytest.mark.long
def test_a_case_that_is_damaged_is_left_out(name: str, value: Any) -> None:
    run = made_up(1, {})
    for case in run.cases[::3]:
        case["case"]["params"] = {**case["case"]["params"], name: value}
    run.cases[0]["case"] = {"id": "x", "kind": "links"}
    run.cases = [case for case in run.cases if is_of_type(case, CaseLine)]  # as its reader leaves lines out
    run.cases[1]["ranks_by_pass"] = [[], [1.0]]
    for judgement in (judged(run), judged(made_up(2, {}), run)):
        assert judgement is None or judgement.lines
    assert link_tables(run)
