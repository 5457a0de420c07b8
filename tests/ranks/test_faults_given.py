"""What a user gives and no command can take: options, profiles, scenario files. Each is one sentence that says why."""

import codecs
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result
from conftest import ROOT

from distbench.cases.collective import collective_cases
from distbench.cli.main import main
from distbench.launch.watch_ranks import cause_of
from distbench.planning.cost_profile import load_profile
from distbench.ranks.failure import MAX_MESSAGE, one_line
from distbench.records.run_file import read_run
from distbench.show.plots import styled
from distbench.spec import Collectives, Scenario, UserError, find
from distbench.worker.rank_session import load_scenario

GOLDEN = ROOT / "tests" / "golden"
LINE = {"op": "all_gather", "mesh_dim": "tp", "group_size": 2, "base_s": 1e-5, "per_byte_s": 1e-9}
PROFILE = {"profile_version": 1, "machine": "m", "backend": "gloo", "torch": "2.13.0", "mesh": {"tp": 2}}
HEADER = "from distbench.spec import scenario\n@scenario(mesh={'tp': 2})\ndef x(): ...\n"


def invoke(*words: str) -> Result:
    return CliRunner().invoke(main, words)


@pytest.mark.parametrize("command", ["run tp_mlp", "check tp_mlp", "signature tp_mlp", "calibrate"])
def test_an_empty_mesh_is_not_taken_for_none(command: str) -> None:
    """As `--mesh "$MESH"` gives it where nobody has set the variable."""
    done = invoke(*command.split(), "--mesh", "")
    assert done.exit_code == 2 and "mesh part '' is not NAME=SIZE" in done.output


def test_a_sequence_that_does_not_divide_is_refused_before_anything_starts(forked_children: None) -> None:
    done = invoke("check", "cp_attention", "--mesh", "cp=4", "--set", "sequence=30", "--set", "rotate=allgather")
    message = "a sequence of 30 cannot be split into 8 chunks over mesh dim 'cp' of size 4; use a multiple of 8"
    assert done.exit_code == 2 and message in done.output


@pytest.mark.parametrize(
    ("head", "line", "message"),
    [
        ({"backend": ["gloo"]}, {}, "backend is a list of 1, not text"),
        ({}, {"base_s": "NaN"}, "lines.0..base_s is 'NaN'"),
        ({}, {"base_s": -1.0}, "lines.0..base_s is -1.0"),
        ({}, {"knee_bytes": "64k"}, "lines.0..knee_bytes is '64k'"),
        ({}, {"error": "small"}, "lines.0..error is 'small'"),
        ({}, {"held_out_error": {"of": 0.1}}, "lines.0..held_out_error is an object of 1"),
        ({"mesh": {"tp": "two"}}, {}, "mesh"),
        ({"lines": {"a": 1}}, {}, "lines is an object of 1, not a list"),
    ],
)
def test_a_profile_with_fields_of_wrong_types_is_refused(
    tmp_path: Path, head: dict[str, object], line: dict[str, object], message: str
) -> None:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({**PROFILE, "lines": [{**LINE, **line}], **head}))
    with pytest.raises(UserError, match=message) as caught:
        load_profile(path)
    assert str(path) in str(caught.value)


def test_nan_in_a_profile_is_no_number(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({**PROFILE, "lines": [{**LINE, "base_s": float("nan")}]}))
    with pytest.raises(UserError, match="NaN is not a JSON number"):
        load_profile(path)


def test_the_mark_that_editors_on_windows_put_before_a_text_is_passed_over(tmp_path: Path) -> None:
    run, profile, source = (tmp_path / name for name in ("run.jsonl", "profile.json", "x.py"))
    run.write_bytes(codecs.BOM_UTF8 + (GOLDEN / "steps.jsonl").read_bytes().replace(b"\n", b"\r\n"))
    profile.write_bytes(codecs.BOM_UTF8 + json.dumps({**PROFILE, "lines": [LINE]}).encode())
    source.write_bytes(codecs.BOM_UTF8 + HEADER.encode())
    assert len(read_run(run).cases) == len(read_run(GOLDEN / "steps.jsonl").cases)
    assert load_profile(profile).backend == "gloo" and [entry.name for entry in find(str(source))] == ["x"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (bytes(100), "line 1 is not valid Python: source code string cannot contain null bytes"),
        (b"# -*- coding: latin-1 -*-\n# \xe9\n", "byte 28 is not valid UTF-8"),
        (b"(" * 9999, "x.py.*(line 1 is not valid Python|cannot be read)"),
        (None, "bytes, but the limit is 16,777,216"),
    ],
)
def test_a_file_that_cannot_be_a_scenarios_is_refused(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "x.py"
    path.write_bytes(content or b"")
    if content is None:
        os.truncate(path, 1 << 40)
    with pytest.raises(UserError, match=message):
        find(str(path))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("raise KeyboardInterrupt", "cannot be imported: KeyboardInterrupt"),
        ("raise SystemExit(0)", "cannot be imported: SystemExit: 0"),
        ("import torchh", "No module named 'torchh'"),
        (HEADER + "del x", "declares 'x', but the imported module lacks x"),
    ],
)
def test_a_file_that_fails_as_it_is_imported_is_named(tmp_path: Path, source: str, message: str) -> None:
    (tmp_path / "x.py").write_text(source)
    with pytest.raises(UserError, match=message):
        load_scenario(tmp_path / "x.py", "x")


@pytest.mark.parametrize("size", [1.5, True, "8"])
def test_a_size_that_is_no_whole_number_is_refused_where_it_is_declared(size: Any) -> None:
    with pytest.raises(TypeError, match=r"sizes_bytes is .*; give a tuple of whole numbers"):
        Collectives(ops=("all_gather",), sizes_bytes=(size,))


@pytest.mark.parametrize("size", [0, -8])
def test_a_size_that_no_buffer_has_is_refused(size: Any) -> None:
    scenario = Scenario(collectives=(Collectives(ops=("all_gather",), sizes_bytes=(size,)),))
    context: Any = SimpleNamespace(mesh_dims=("tp",))
    with pytest.raises(UserError, match="use whole numbers, 1 or more"):
        next(collective_cases(scenario, context))


@pytest.mark.parametrize(
    ("op", "ways", "own", "message"),
    [
        ("all_reduce", ("plain",), "plain", "own_ways has 'plain', which is a built-in way of all_reduce; use another"),
        ("all_reduce", ("plain", "rs_ag"), "rs_ag", "own_ways has 'rs_ag', which is a built-in way of all_reduce"),
        ("all_reduce", ("plain",), "halves", "own_ways has 'halves', but ways does not; add 'halves' to ways"),
        ("all_reduce", (), "halves", "own_ways has 'halves', but ways does not"),
        (
            "all_to_all_v",
            ("plain", "nonsense"),
            None,
            "way 'nonsense' of all_to_all_v is not valid; use only 'plain', without own_ways",
        ),
        ("all_to_all_v", (), "halves", "way 'halves' of all_to_all_v is not valid"),
        (
            "all_to_all_v",
            ("plain",),
            "plain",
            "way 'plain' of all_to_all_v is not valid; use only 'plain', without own_ways",
        ),
    ],
)
def test_a_way_without_effect_is_refused(op: str, ways: tuple[str, ...], own: str | None, message: str) -> None:
    own_ways = {own: lambda output, input, group: None} if own else {}
    scenario = Scenario(collectives=(Collectives(ops=(op,), ways=ways, own_ways=own_ways),))
    context: Any = SimpleNamespace(mesh_dims=("tp",), size={"tp": 2}.__getitem__)
    with pytest.raises(UserError, match=message):
        [*collective_cases(scenario, context)]


def test_an_empty_matrix_is_refused() -> None:
    scenario = Scenario(collectives=(Collectives(ops=("all_to_all_v",), matrix=[]),))
    context: Any = SimpleNamespace(mesh_dims=("tp",), size={"tp": 2}.__getitem__)
    with pytest.raises(UserError, match="matrix is not square: it has 0 rows"):
        next(collective_cases(scenario, context))


@pytest.mark.parametrize(("sizes", "measured"), [((2, 1, 2), {"a", "c"}), ((1, 1, 1), {"a", "b", "c"})])
def test_a_mesh_dim_of_one_rank_is_measured_only_if_no_other_has_more(
    sizes: tuple[int, ...], measured: set[str]
) -> None:
    scenario = Scenario(collectives=(Collectives(ops=("all_gather",), sizes_bytes=(64,)),))
    size_of = dict(zip("abc", sizes, strict=True))
    context: Any = SimpleNamespace(mesh_dims=tuple(size_of), size=size_of.__getitem__)
    assert {spec.case.params["mesh_dim"] for spec in collective_cases(scenario, context)} == measured


class Odd(Exception):
    def __str__(self) -> str:
        raise ValueError("no")


def test_errors_are_a_line_whatever_their_text_is() -> None:
    assert one_line(KeyError("a")) == "KeyError: 'a'" and one_line(ValueError()) == "ValueError"
    long = one_line(ValueError("y" * 3_000_000))
    assert len(long) < MAX_MESSAGE + 100 and long.endswith("... (3,000,000 characters)")
    assert one_line(ValueError("a\udcffb\nc")) == "ValueError: a\\udcffb"
    assert one_line(Odd()) == "Odd: the message cannot be shown, because formatting raises ValueError"


def test_what_ended_the_launcher_before_any_rank_ran_is_quoted(tmp_path: Path) -> None:
    log = tmp_path / "launch.log"
    log.write_text('Traceback (most recent call last):\n  File "x", line 1\nValueError: \nno torch here\nSee x\n')
    message = cause_of(tmp_path, 1).message
    assert message == f"the launcher ended with exit code 1 (ValueError: no torch here); see {log}"
    log.write_text("nothing of use\n")
    assert cause_of(tmp_path, 1).message == f"the launcher ended with exit code 1; see {log}"


def test_a_backend_of_matplotlib_that_does_not_exist_keeps_nobody_from_drawing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPLBACKEND", "none")
    with styled():
        assert os.environ["MPLBACKEND"] == "agg"
