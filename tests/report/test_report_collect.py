"""Which run files a report is about."""

import json
import shutil
from pathlib import Path

import pytest

import distbench
from distbench.records.results_folder import collect, run_files_in
from distbench.report import selected_trace
from distbench.spec.errors import UserError

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
NOWHERE = Path("nowhere")


def put(folder: Path, name: str, invocation_id: str, started_at: float, version: int = 1) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    job = {"scenario": name, "started_at": started_at}
    header = {"type": "run", "schema_version": version, "invocation_id": invocation_id, "job": job}
    path = folder / f"{name}.jsonl"
    path.write_text(json.dumps(header) + "\n" + json.dumps({"type": "footer", "status": "complete"}) + "\n")
    return path


def names(named: tuple[Path, ...], out: Path) -> list[str]:
    return [run.path.stem for run in collect(named, out)[0]]


def test_the_latest_invocation_with_all_its_scenarios_oldest_first(tmp_path: Path) -> None:
    put(tmp_path / "box", "old", "inv-1", 100.0)
    put(tmp_path / "box", "b", "inv-2", 200.0)
    put(tmp_path / "box", "a", "inv-2", 201.0)
    assert names((), tmp_path) == ["b", "a"]


def test_a_broken_file_is_a_warning_and_not_the_end(tmp_path: Path) -> None:
    put(tmp_path, "good", "inv-1", 100.0)
    (tmp_path / "zz-broken.jsonl").write_text("\x00 nonsense\n")
    (tmp_path / "zz-empty.jsonl").write_text("")
    put(tmp_path, "newer", "inv-1", 101.0, version=99)
    runs, warnings = collect((), tmp_path)
    assert [run.path.stem for run in runs] == ["good"]
    assert {word for word in ("broken", "empty", "newer") if any(word in warning for warning in warnings)} == {
        "broken", "empty", "newer",
    }  # fmt: skip


def test_logs_progress_files_and_recordings_are_no_run_files(tmp_path: Path) -> None:
    kept = put(tmp_path / "logs" / "box", "kept", "inv-1", 1.0)
    put(tmp_path / "logs" / "box" / "logs" / "r", "left", "inv-1", 1.0)
    put(tmp_path / "logs" / "box", "progress", "inv-1", 1.0)
    put(tmp_path / "logs" / "sweep" / "tp_mlp-4" / "recordings", "left", "inv-1", 1.0)
    assert run_files_in(tmp_path / "logs") == [kept]


def test_a_folder_is_read_recursively_and_a_file_only_once(tmp_path: Path) -> None:
    path = put(tmp_path / "a" / "b", "one", "inv-1", 1.0)
    put(tmp_path / "a", "two", "inv-2", 2.0)
    assert names((tmp_path, path), NOWHERE) == ["one", "two"]


def test_a_newer_schema_given_by_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="update distbench"):
        collect((put(tmp_path, "newer", "inv-1", 1.0, version=99),), NOWHERE)


@pytest.mark.parametrize("content", ["", "not json\n", '{"type":"footer"}\n'])
def test_a_named_file_that_is_no_run_file_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "other.jsonl"
    path.write_text(content)
    with pytest.raises(UserError, match="not a distbench run file"):
        collect((path,), NOWHERE)


def test_nothing_found_says_what_to_do(tmp_path: Path) -> None:
    for out in (tmp_path, NOWHERE):
        with pytest.raises(UserError, match="distbench run"):
            collect((), out)
    with pytest.raises(UserError, match="does not exist"):
        collect((tmp_path / "none.jsonl",), NOWHERE)
    with pytest.raises(UserError, match="no readable run file"):
        collect((tmp_path,), NOWHERE)


def test_the_latest_run_alone_and_unreadable_is_said_so(tmp_path: Path) -> None:
    put(tmp_path, "newer", "inv-1", 101.0, version=99)
    with pytest.raises(UserError, match="update distbench"):
        collect((), tmp_path)


def test_runs_of_golden_files_keep_their_warnings(tmp_path: Path) -> None:
    shutil.copy(GOLDEN / "redistributions.jsonl", tmp_path)
    runs, warnings = collect((tmp_path,), NOWHERE)
    assert len(runs[0].cases) == 10
    assert len(warnings) == 3


def test_a_broken_link_is_a_file_and_no_name_of_a_scenario(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("loop").symlink_to("loop")
    with pytest.raises(UserError, match="loop"):
        collect((Path("loop"),), NOWHERE)
    with pytest.raises(UserError, match="no run file under"):
        collect((Path("tp_mlp"),), Path("results"))


def test_where_no_scenario_is_meant_a_bare_name_that_is_no_path_is_refused_and_nothing_is_searched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    put(tmp_path, "one", "inv-1", 1.0)
    searched: list[Path] = []
    monkeypatch.setattr("distbench.records.results_folder.run_files_in", lambda folder: searched.append(folder) or [])
    for ask in (
        lambda: collect((Path("s"),), None),
        lambda: distbench.load("s"),
        lambda: distbench.compare("s", "t"),
        lambda: selected_trace(Path("s")),
    ):
        with pytest.raises(UserError, match=r"^run s does not exist; give a run file"):
            ask()
    assert searched == []
