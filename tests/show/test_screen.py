"""Tables on screens of every width: no line too long, nothing lost, no number broken."""

import io
import json
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from conftest import ROOT
from rich.cells import cell_len
from trace_records import record, run_file

from distbench.records.dataframe import frame_of
from distbench.records.results_folder import collect
from distbench.report import summary_of
from distbench.report.sections import Contents, report_blocks, summary
from distbench.report.trace_rows import traces_of
from distbench.report.trace_tables import comparison_blocks, trace_blocks
from distbench.show.blocks import Block, Code, Lines, Table
from distbench.show.terminal import (
    ask_width,
    fitted,
    table_lines,
    text_of,
    width_here,
    without_names,
    without_shared,
    wrap,
)

GOLDEN = ROOT / "tests" / "golden"
WIDTHS = (60, 80, 120, 160)


@pytest.fixture(autouse=True)
def no_width_asked() -> Iterator[None]:
    yield
    ask_width(None)


@cache
def golden(*names: str) -> Contents:
    runs, _ = collect(tuple(GOLDEN / f"{name}.jsonl" for name in names), Path())
    return Contents.of(runs, frame_of(runs))


@pytest.fixture(scope="module", params=["full", "own", "paths", "diff"])
def blocks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Block]:
    """Every table of some golden run: `full`, `own` (a scenario's own), `paths` or `diff`."""
    name, folder = request.param, tmp_path_factory.mktemp("blocks")
    if name in ("full", "own"):
        return report_blocks(golden("collectives", "steps", "redistributions", "laboratory"), name == "full")
    paths = [run_file(folder / f"{one}.jsonl", record()) for one in "ab"]
    one, other = (traces_of(collect((path,), Path())[0])[0][0] for path in paths)
    return trace_blocks(one) if name == "paths" else comparison_blocks(one, other)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.long
def test_golden_tables_fit_every_screen(blocks: list[Block], width: int) -> None:
    blocks = [block for block in blocks if not isinstance(block, Code)]
    tables = [block for block in blocks if isinstance(block, Table)]
    assert tables
    assert max(map(len, text_of(blocks, width).splitlines())) <= width
    for table in tables:
        check_table(table, width)


def check_table(table: Table, width: int) -> None:
    """Nothing of a column that is shown is lost, and numbers are never broken."""
    kept = fitted(table, width)
    whole = {tuple("".join(cell.split()) for cell in cells) for cells in zip(*table.rows, strict=True)}
    for column in kept.columns:
        if not column.is_text:
            assert not any("\n" in cell for cell in column.cells), "a number is never broken"
        if not kept.above and table.rows:
            assert tuple("".join(cell.split()) for cell in column.cells) in whole, (column, table.title)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.long
def test_the_summary_of_golden_runs_fits_every_screen(width: int) -> None:
    contents = golden("collectives", "steps", "redistributions", "laboratory")
    text = text_of(summary(contents, "distbench report"), width)
    assert max(map(len, text.splitlines())) <= width
    flat = " ".join(text.split())
    assert "NOT OK: collective/f32[256]/all_gather/tp is wrong: rank 1: element 3 is 0, it must be 6" in flat
    assert "all_reduce 1.26" in flat and "NOT COMPLETE: interrupted" in flat and "use direct" in flat
    last = "\n".join(text.splitlines()[-10:])
    assert "\nNext: distbench run --resume" in last and "\nFAIL: 82 cases in 4 scenarios: " in last
    assert " ".join(text.split()).endswith(
        "compared with the baseline: 0 slower, 0 faster, 7 undecided (too few passes)"
    )


def test_names_that_do_not_fit_go_on_in_the_next_line() -> None:
    """Nothing of them is lost; Chinese characters and emoji take two places."""
    for word in ("some_very_long_name_of_a_parameter", "序列_並列_🚀_序列_並列_🚀"):
        names = [f"{word}.{end}" for end in ("a1", "a2", "a1 (baseline again)")]
        lines = table_lines(
            Table("t", ("<variant", "step", "rate"), [(name, "1.23 ms", "2.34 ms") for name in names]), 40
        )
        assert all(cell_len(line) <= 40 for line in lines)
        starts = [index for index, line in enumerate(lines) if "1.23 ms" in line]
        shown = [
            "".join("".join(line.partition("1.23 ms")[0].split()) for line in lines[start:end])
            for start, end in zip(starts, [*starts[1:], None], strict=True)
        ]
        assert shown == ["".join(name.split()) for name in names]


@pytest.mark.long
def test_a_summary_has_what_failed_first_then_verdicts() -> None:
    text = summary_of([GOLDEN / f"{name}.jsonl" for name in ("laboratory", "steps")], "distbench report")
    assert text.index("toy (tp=4") < text.index("redistribute_lab (")
    assert "4 ok, 1 raised" in text and "NOT OK: step/f32[10,100]/toy/a=5 is raised" in text


def test_a_traced_run_names_its_largest_exposed_path(tmp_path: Path) -> None:
    path = run_file(tmp_path / "a.jsonl", record())
    text = " ".join(summary_of([path], "distbench report").split())
    assert (
        text.count("Largest communication: FSDP all_gather (dp_shard) in forward, 18.5 ms of 150 ms per step of toy")
        == 1
    )
    assert "--paths shows communication)" in text


def test_columns_go_by_declared_importance_and_are_named() -> None:
    columns = ("<variant", "one", "two", "three")
    table = Table("t", columns, [("a" * 20, "1" * 20, "2" * 20, "3" * 20)], optional=("two", "three"))
    assert [column.name for column in fitted(table, 90).columns] == ["variant", "one", "two", "three"]
    narrow = fitted(table, 70)
    assert [column.name for column in narrow.columns] == ["variant", "one", "three"]
    assert narrow.below == ["columns left out: two; --width 90 shows them"]
    assert fitted(table, 60).columns[-1].name == "one"


def test_text_is_broken_last_and_at_a_word() -> None:
    table = Table("t", ("<path", "time"), [("layers feed_forward attention output more of it and yet more", "1 ms")])
    (path, time) = fitted(table, 40).columns
    assert path.cells == ("layers feed_forward attention\n  output more of it and yet more",) and time.cells == (
        "1 ms",
    )


@pytest.mark.parametrize(
    ("texts", "shorter", "shared"),
    [
        (["a=1,b=2,c=3", "a=1,b=4,c=3"], ["b=2", "b=4"], ["a=1", "c=3"]),
        (["step/f32[8,8]/x", "step/f32[8,8]/y"], ["x", "y"], ["step", "f32[8,8]"]),
        (["a=1,b=2", "a=1,b=2 (baseline again)", "a=1,b=3"], ["b=2", "b=2 (baseline again)", "b=3"], ["a=1"]),
        (["a=1", "a=1,b=2"], ["a=1", "a=1,b=2"], []),
        (["x", "y"], ["x", "y"], []),
        (["x", "x"], ["x", "x"], []),
    ],
)
def test_what_all_rows_share_is_said_once(texts: list[str], shorter: list[str], shared: list[str]) -> None:
    assert (list(without_shared(texts)[0]), without_shared(texts)[1]) == (shorter, shared)


@pytest.mark.parametrize(
    ("texts", "shorter", "names"),
    [
        (["a=1,b=x", "a=2,b=y (baseline again)"], ["1,x", "2,y (baseline again)"], ["a", "b"]),
        (["a=1", "b=2"], ["a=1", "b=2"], []),
        (["a=1,b=2", "a=1"], ["a=1,b=2", "a=1"], []),
        (["plain", "a=1"], ["plain", "a=1"], []),
        (["failed: gpipe with microbatches=4: no"] * 2, ["failed: gpipe with microbatches=4: no"] * 2, []),
        ([], [], []),
    ],
)
def test_names_of_axes_that_all_variants_have_are_said_once(
    texts: list[str], shorter: list[str], names: list[str]
) -> None:
    assert (list(without_names(texts)[0]), without_names(texts)[1]) == (shorter, names)
    if names:
        table = Table("t", ("<variant", "step"), [(text, "1.23 ms") for text in texts])
        wide = max(map(len, texts)) + 10
        assert table_lines(table, wide)[3].startswith(texts[0])
        lines = table_lines(table, wide - 2)
        assert lines[1] == "variant is a, b" and lines[4].startswith(shorter[0] + " ")


def test_a_heading_is_not_broken_between_a_number_and_its_percent_sign() -> None:
    table = Table("t", ("<case", "95 % interval"), [("a" * 30, "[1, 2]")])
    assert [line.strip() for line in table_lines(table, 40)[1:3]] == [
        "95 %",
        "case                            interval",
    ]


def test_prose_goes_below_its_row_where_it_does_not_fit_beside_it() -> None:
    table = Table("t", ("<status", "<why"), [("wrong", "a sentence " * 8)], prose="why")
    assert len(table_lines(table, 120)) == 4
    lines = table_lines(table, 60)
    assert lines[3].strip() == "wrong" and all(line.startswith("    ") for line in lines[4:])


def test_numbers_keep_their_points_in_a_column() -> None:
    rows = [("1.26  ",), ("0.839 ",), ("12.6   ",)]
    assert [line.index(".") for line in table_lines(Table("t", ("GB/s",), rows), 80)[3:]] == [2, 2, 2]


@pytest.mark.parametrize(
    ("text", "width", "lines"),
    [
        ("found in 12 % of 30", 14, ["found in 12 %", "of 30"]),
        ("it takes 641 us here", 12, ["it takes", "641 us here"]),
        ("mean is 1.57 [1.02, 1.90] here", 20, ["mean is 1.57", "[1.02, 1.90] here"]),
        ("see results/host/run.jsonl", 14, ["see results/", "host/run.jsonl"]),
        ("a well-known path", 8, ["a well-", "known", "path"]),
        ("torch.nn.functional.mse_loss()", 16, ["torch.nn.", "functional.mse_", "loss()"]),
        ("1.25/1.25", 6, ["1.25/", "1.25"]),
    ],
)
def test_sentences_break_at_spaces_and_long_words_at_separators(text: str, width: int, lines: list[str]) -> None:
    assert wrap(text, width) == lines


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_width_is_that_of_the_terminal_within_bounds_and_fixed_in_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "90")
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert width_here() == 120
    monkeypatch.setattr(sys, "stdout", Terminal())
    result = {columns: width(monkeypatch, columns) for columns in ("40", "90", "400")}
    assert result == {"40": 60, "90": 90, "400": 200}
    ask_width(77)
    assert width_here() == 77


def width(monkeypatch: pytest.MonkeyPatch, columns: str) -> int:
    monkeypatch.setenv("COLUMNS", columns)
    return width_here()


def test_code_to_paste_is_never_cut() -> None:
    line = "x = " + "a" * 90
    assert text_of([Code(("def f():", "    pass", line)), Lines(("end",))], 60).startswith(
        f"def f():\n    pass\n{line}"
    )
    assert text_of([Code(("def f():", "    pass"))], 60) == "    def f():\n        pass"


def test_a_label_is_told(tmp_path: Path) -> None:
    lines = (GOLDEN / "steps.jsonl").read_text().splitlines()
    header = json.loads(lines[0])
    header["job"]["label"] = "before the change"
    path = tmp_path / "labelled.jsonl"
    path.write_text("\n".join([json.dumps(header), *lines[1:]]) + "\n")
    assert "label before the change" in summary_of([path], "distbench report")
