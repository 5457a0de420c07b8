"""Names hold anything: on a terminal, in a CI system's log, in Markdown, HTML and XML they show and do nothing."""

import io
import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner, Result
from page_reader import SeenPage

from distbench.cli.main import main
from distbench.launch.display import Plain
from distbench.show.blocks import Code, Heading, Lines, Table, code_span, markdown_of, markdown_text
from distbench.show.ci_formats import CiOutcome, annotation, junit_xml
from distbench.show.html import page_of
from distbench.show.terminal import text_of
from distbench.spec.printable_text import MAX_TEXT, clean, count_text, printable

GOLDEN = Path(__file__).parents[1] / "golden"
EVIL = "step/\x1b]0;owned\x07\x9b31m/a\n::error title=x::y\r##[error]z/|`b`<script>[x](http://x)\u202e\ufffe"
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\ufffe]")
COMMAND = re.compile(r"^\s*::|##\w*\[", re.MULTILINE)


def test_lines_keep_what_shows_and_lose_what_a_terminal_or_ci_obeys() -> None:
    assert printable("\x1b[31mred\x07\tä 日本\U0001f600\n") == " [31mred \tä 日本\U0001f600\n"
    assert printable("a::b\n ::error::x\n::set-output name=a::b") == "a::b\n : :error::x\n: :set-output name=a::b"
    assert printable("##[group]a ##vso[task] ## heading #[a]") == "# #[group]a # #vso[task] ## heading #[a]"
    assert printable("over\rwritten\u2028next\u202etxt") == "over written next txt"


def test_one_of_a_kind_is_counted_in_the_singular() -> None:
    assert [count_text(number, "rank") for number in (0, 1, 16_384)] == ["0 ranks", "1 rank", "16,384 ranks"]
    assert [count_text(number, "pass", "passes") for number in (1, 3)] == ["1 pass", "3 passes"]


def test_a_text_of_megabytes_is_cut() -> None:
    assert clean("x" * 3_000_000) == "x" * MAX_TEXT + f" ... ({3_000_000 - MAX_TEXT:,} more characters)"
    for shown in (text_of([Lines(("y" * 3_000_000,))]), markdown_of([Table("t", ("<a",), [("y" * 3_000_000,)])])):
        assert len(shown) < 2 * MAX_TEXT


def blocks(name: str) -> list[Heading | Lines | Table | Code]:
    return [Heading(name), Lines((name,)), Table(name, (f"<{name}", "b"), [(name, "1")], [name]), Code((name,))]


def test_blocks_are_clean_as_text_markdown_and_html() -> None:
    for shown in (text_of(blocks(EVIL)), markdown_of(blocks(EVIL)), page_of(EVIL, blocks(EVIL))):
        assert not CONTROL.search(shown)
    # A line that was wrapped may begin with any word; the command that prints it sees to that.
    assert not COMMAND.search(printable(text_of(blocks(EVIL))))
    assert len(SeenPage(page_of(EVIL, blocks(EVIL))).scripts) == len(SeenPage(page_of("", [])).scripts)
    assert "<script" not in markdown_of(blocks(EVIL)[:3]).replace("\\<", "")


def test_markdown_shows_names_as_they_stand() -> None:
    assert markdown_text("a|b`c`<d>\\*") == "a\\|b\\`c\\`\\<d>\\\\\\*"
    assert markdown_text("[x](http://x)") == "[x]\\(http://x)"
    assert code_span("a`b\nc") == "`a'b c`"
    fence = markdown_of([Code(("```", "rm -rf"))]).split("\n")
    assert fence[0] == "````python" and fence[-1] == "````"


def test_ci_forms_hold_no_second_command_and_are_whole_xml() -> None:
    line = annotation("error", EVIL, EVIL)
    assert line.count("\n") == 0 and not CONTROL.search(line) and line.startswith("::error title=")
    root = ElementTree.fromstring(junit_xml([CiOutcome(EVIL, EVIL, EVIL, "failure")]))
    assert not CONTROL.search("".join(str(value) for one in root.iter() for value in (*one.attrib.values(), one.text)))


def named(path: Path, name: str) -> Path:
    """A golden run file whose scenario, machine, one case's id and its error are that name."""
    records = [json.loads(line) for line in (GOLDEN / "steps.jsonl").read_text().splitlines()]
    records[0]["job"]["scenario"] = records[0]["environment"]["machine"] = name
    records[1]["case"]["id"] = records[1]["case"]["params"]["variant"] = name
    records[2].update(status="raised", error=name * 3)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def invoke(*words: object) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words])


@pytest.mark.parametrize(
    "command",
    [
        "report FILE", "report FILE --format markdown", "report FILE --format csv", "report FILE --group-by variant",
        "gate GOOD FILE", "gate FILE GOOD --format markdown", "gate FILE GOOD --format json", "history --results FILE",
        "export pytest-benchmark FILE", "history nothing --results FILE",
    ],
)  # fmt: skip
@pytest.mark.long
def test_no_command_prints_what_a_name_would_have_done(tmp_path: Path, command: str) -> None:
    file = named(tmp_path / "evil.jsonl", EVIL)
    done = invoke(*command.replace("FILE", str(file)).replace("GOOD", str(GOLDEN / "steps.jsonl")).split())
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    assert not CONTROL.search(done.output) and not COMMAND.search(done.output), done.output


def test_progress_lines_are_clean() -> None:
    stream = io.StringIO()
    Plain("toy", stream).event({"event": "done", "id": EVIL, "status": "raised"})
    assert not CONTROL.search(stream.getvalue()) and not COMMAND.search(stream.getvalue())


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("plan R S(0) --shape 8 --mesh 99999x99999", "mesh part '99999x99999' has an invalid size; give a"),
        ("plan R S(0) --shape 8 --mesh 999x999", "998,001 ranks; give a mesh of at most 65,536"),
        ("plan R S(0) --shape 8 --mesh 2x2x2x2x2x2x2x2x2", "9 mesh dims; give at most 6"),
        (f"redistribute R S(0) --shape {'9' * 9000} --mesh 2", "is not a list of sizes above 0"),
        ("check tp_mlp --mesh tp=999999999999", "'tp=999999999999' has an invalid size"),
        ("check tp_mlp --mesh tp=0", "'tp=0' has an invalid size; give a whole number from 1 to 65536"),
        ("check tp_mlp --mesh tp=٤", "is not NAME=SIZE"),
        ("run tp_mlp --passes 99999999999999999999", "not in the range 0<=x<=99999"),
        ("run tp_mlp --timeout 1e300", "'1e300' is not a duration"),
        ("run tp_mlp --pipelined 99999999999", "not in the range"),
        ("gate a b --min-launches 99999999999", "not in the range"),
        ("ab a b --pairs 99999999999 -- x", "not in the range"),
    ],
)
def test_numbers_of_the_command_line_have_bounds(command: str, message: str) -> None:
    done = invoke(*command.split())
    assert done.exit_code == 2 and message in done.output and "Traceback" not in done.output
