"""The one reader: what is no file, too big, no JSON or nested without end is one sentence that names it."""

import json
import os
from pathlib import Path

import msgspec
import pytest

from distbench.records.baselines import read_side
from distbench.records.results_folder import collect
from distbench.records.run_file import read_run
from distbench.spec.errors import UserError
from distbench.spec.file_io import opened, parse_json, read_json, read_text
from distbench.spec.json_decoder import Count, Duration, Format, Time, decode, document

GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.mark.parametrize(("kind", "message"), [("fifo", "a pipe"), ("folder", "a folder"), ("device", "a device")])
def test_what_is_no_file_is_refused_before_it_is_opened(tmp_path: Path, kind: str, message: str) -> None:
    path = Path("/dev/zero") if kind == "device" else tmp_path / kind
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    for read in (read_run, lambda one: read_side([one], "run", []) if kind != "folder" else read_run(one)):
        with pytest.raises(UserError, match=f"{path} cannot be read: it is {message}; give a file"):
            read(path)


def test_a_file_that_is_too_big_is_refused_by_its_size(tmp_path: Path) -> None:
    path = tmp_path / "huge.jsonl"
    with path.open("wb") as file:
        file.truncate(1 << 40)  # a hole: no byte of it is on the disk
    with pytest.raises(UserError, match=r"the file has 1,099,511,627,776 bytes, but the limit is 1,073,741,824"):
        read_run(path)
    (tmp_path / "four").write_text("1234")
    with pytest.raises(UserError, match="the limit is 3"), opened(tmp_path / "four", "file", 3):
        pass


def test_no_file_a_link_to_itself_and_no_text_are_sentences(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "latin").write_bytes("é".encode("latin-1"))
    for name, message in (("none", "No such file"), ("loop", "symbolic links"), ("latin", "byte 0 is not valid UTF-8")):
        with pytest.raises(UserError, match=message):
            read_text(tmp_path / name, "file")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": NaN}', "NaN is not a JSON number"),
        ("[-Infinity]", "-Infinity is not a JSON number"),
        ("[1e400]", "a number too large for a float"),
        ("[" + "9" * 400 + "]", "whole number 999999999999999999... is above 1e.18"),
        ("[-" + "9" * 5000 + "]", "whole number -99999999999999999... is above 1e.18"),
        ("[" + "9" * 400 + ".5]", "a number too large for a float"),
        ("[" * 51 + "]" * 51, "deeper than 50 levels"),
        ("[" * 100_000 + "]" * 100_000, "deeper than 50 levels"),
        ('{"a":' * 200 + "1" + "}" * 200, "deeper than 50 levels"),
        ('"\\ud800"', "half a character"),
        ('{"a" 1}', "line 1, column 6 is not valid JSON"),
        ("", "line 1, column 1 is not valid JSON"),
    ],
)
def test_json_that_no_program_of_ours_writes_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        parse_json(text)
    assert len(str(caught.value)) < 200 and "\n" not in str(caught.value)


def test_ordinary_json_is_what_json_makes_of_it() -> None:
    value = {
        "t": [1e-9, 0.00012345678901234567, 1e16, -3.5e-300],
        "n": 10**17,
        "s": "\U0001f600 1e400",
        "x": [None, True],
    }
    assert parse_json(json.dumps(value)) == value
    assert parse_json("[" * 50 + "]" * 50) == json.loads("[" * 50 + "]" * 50)
    assert parse_json(json.dumps([[[n]] for n in range(200)])) == [[[n]] for n in range(200)]


def test_a_name_that_stands_in_an_object_twice_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('{"cases": {"c": 1, "c": 2}}')
    with pytest.raises(UserError, match="an object contains the name 'c' twice"):
        read_json(tmp_path / "x.json", "baseline")


class Nested(msgspec.Struct, forbid_unknown_fields=True):
    n: Count = 0


class Example(msgspec.Struct):
    need: str
    t: list[Time] | None = None
    n: Count | None = None
    p: dict[str, list[Duration]] | None = None
    inner: list[Nested] | None = None


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"t": [1.0, True]}, "t[1] is True, not a time above 0 s and up to a day"),
        ({"t": [1.0, 0]}, "t[1] is 0, not"),
        ({"t": [86401]}, "t[0] is 86401, not"),
        ({"t": ["\x1b[0m" * 100]}, "t[0] is '\\x1b[0m"),
        ({"t": 7}, "t is 7, not a list of a time"),
        ({"n": -1}, "n is -1, not a whole number >= 0"),
        ({"n": 2.5}, "n is 2.5, not"),
        ({"n": 10**40}, "n is 1000000000000"),
        ({"p": {"a": [0.0], "b": ["x"]}}, "p.b[0] is 'x', not seconds from 0 up to a day"),
        ({"inner": [{}, {"m": 1}]}, "inner[1].m is unknown (available: n)"),
        ({"inner": [{}, []]}, "inner[1] is a list of 0, not an object"),
        ({"need": None}, "need is missing or null"),
    ],
)
def test_the_first_wrong_field_is_named(value: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        decode({"need": "", **value}, Example)
    assert str(caught.value).startswith(message) and len(str(caught.value)) < 200
    with pytest.raises(ValueError, match=r"^of\.need is missing$"):
        decode({}, Example, "of")


def test_a_field_that_is_null_or_not_known_says_nothing() -> None:
    assert decode({"need": "", "t": None, "other": float("nan")}, Example) == Example("")


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"need": "", "version": 3}, "file X is newer than this distbench; update distbench"),
        ({"need": ""}, "file X cannot be used: version is missing or null; give another"),
        ({"version": 2}, "file X cannot be used: need is missing; give another"),
        ([], "file X cannot be used: it is a list of 0, not an object; give another"),
    ],
)
def test_a_document_that_cannot_be_used_is_one_sentence(record: object, message: str) -> None:
    with pytest.raises(UserError) as caught:
        document(record, Example, "file X", Format("file", "give another", "version", 2))
    assert str(caught.value) == message


def changed(tmp_path: Path, line: int, *steps: object) -> Path:
    """The golden steps with one value changed: the path to it, then the value."""
    records = [json.loads(one) for one in (GOLDEN / "steps.jsonl").read_text().splitlines()]
    *keys, last, value = steps
    holder = records[line - 1]
    for key in keys:
        holder = holder[key]
    holder[last] = value
    path = tmp_path / "odd.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        (("samples_s", 3, -1.0), "line 2: samples_s.3. is -1.0, not a time"),
        (("samples_s", 0, 90_000), "line 2: samples_s.0. is 90000"),
        (
            ("samples_s", 0, float("nan")),
            "line 2: not a complete record, truncated or corrupt .NaN is not a JSON number",
        ),
        (("phases_s", "forward", "soon"), "line 2: phases_s.forward is 'soon'"),
        (("group_size", 0), "line 2: group_size is 0, not a whole number above 0"),
        (("case", "id", 7), "line 2: case.id is 7, not a name"),
        (("case", "params", "num_tokens", -3), "line 2: case.params.num_tokens is -3"),
        (("counters", "peak_growth_bytes", "much"), "line 2: counters.peak_growth_bytes is 'much'"),
        (("status", "fine"), "line 2: status is 'fine', not one of ok, wrong"),
    ],
)
def test_a_wrong_field_costs_its_line_and_is_named(tmp_path: Path, steps: tuple[object, ...], message: str) -> None:
    good = read_run(GOLDEN / "steps.jsonl")
    run = read_run(changed(tmp_path, 2, *steps))
    assert len(run.cases) == len(good.cases) - 1
    with pytest.raises(AssertionError, match=f"^odd.jsonl, {message}.*; left out"):
        raise AssertionError(run.warnings[0])


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        (("job", "mesh", "tp", "four"), "job.mesh.tp is 'four'"),
        (("job", "started_at", 1e300), "job.started_at is 1e.300, not seconds since 1970"),
        (("environment", "num_cpus", True), "environment.num_cpus is True"),
        (("run_id", 3), "run_id is 3, not text"),
    ],
)
def test_a_wrong_header_refuses_the_file_and_a_folder_leaves_it_out(
    tmp_path: Path, steps: tuple[object, ...], message: str
) -> None:
    path = changed(tmp_path, 1, *steps)
    with pytest.raises(UserError, match=f"{path}, line 1: {message}"):
        read_run(path)
    (tmp_path / "good.jsonl").write_text((GOLDEN / "collectives.jsonl").read_text())
    runs, warnings = collect((tmp_path,), tmp_path)
    assert [run.path.name for run in runs] == ["good.jsonl"] and "left out" in warnings[0]


def test_a_wrong_field_of_the_footer_is_left_out_and_the_run_is_whole(tmp_path: Path) -> None:
    last = len((GOLDEN / "steps.jsonl").read_text().splitlines())
    run = read_run(changed(tmp_path, last, "wall_s", -3565.0))
    assert run.footer and run.footer["status"] == "complete" and "wall_s" not in run.footer
    assert f"line {last}: wall_s is -3565.0" in run.warnings[0]


def with_lines(tmp_path: Path, *more: dict[str, object], at: int = -1) -> Path:
    lines = (GOLDEN / "steps.jsonl").read_text().splitlines()
    lines[at:at] = [json.dumps(record) for record in more]
    path = tmp_path / "more.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_a_case_that_stands_twice_is_left_out_unless_it_broke_the_launch(tmp_path: Path) -> None:
    first = json.loads((GOLDEN / "steps.jsonl").read_text().splitlines()[1])
    run = read_run(with_lines(tmp_path, {**first, "samples_s": [9.0]}))
    assert [case["samples_s"][0] for case in run.cases if case["case"]["id"] == first["case"]["id"]] == first[
        "samples_s"
    ][:1]
    assert "line 2 already has " in run.warnings[0]
    broken = {"type": "case", "case": first["case"], "status": "aborted", "samples_s": [], "error": "killed"}
    run = read_run(with_lines(tmp_path, broken))
    assert not run.warnings and [case["status"] for case in run.cases].count("aborted") == 1


def test_a_pass_that_stands_twice_is_left_out(tmp_path: Path) -> None:
    case_id = json.loads((GOLDEN / "steps.jsonl").read_text().splitlines()[1])["case"]["id"]
    one = {"type": "pass", "case_id": case_id, "number": 1, "samples_s": [0.1], "phases_s": {}}
    run = read_run(with_lines(tmp_path, one, one))
    assert run.cases[0]["passes"] == [(0, 9), (1, 1)] and "pass 1 of case" in run.warnings[0]


def test_two_run_files_in_one_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "two.jsonl"
    path.write_text((GOLDEN / "steps.jsonl").read_text() * 2)
    with pytest.raises(UserError, match=r"two.jsonl, line 8: a second run header"):
        read_run(path)


def test_many_bad_lines_are_counted_and_not_listed(tmp_path: Path) -> None:
    path = with_lines(tmp_path, *({"type": "case"} for _ in range(500)))
    warnings = read_run(path).warnings
    assert len(warnings) == 21 and warnings[-1] == "more.jsonl: 480 more lines were left out for similar reasons"
