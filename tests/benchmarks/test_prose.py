"""The prose linter: it finds the phrases, skips code, names the line, and fails on any."""

from pathlib import Path

import pytest

from benchmarks import prose
from benchmarks.prose import comments_of_source, findings_of_text, prose_of_page, strings_of_source


@pytest.mark.parametrize(
    ("rule", "text", "phrase", "plain"),
    [
        ("W1", "it shows what takes 19 % longer", "what takes", None),
        ("W1", "what is compared takes turns", "what is", None),
        ("W2", "2.19 s a step", "s a step", "s per step"),
        ("W2", "one rank a GPU", "one rank a GPU", "one rank per GPU"),
        ("W2", "peak memory a device", "memory a device", "memory per device"),
        ("W2", "five times a second", "times a second", "times per second"),
        ("W3", "the table says so", "says", None),
        ("W3", "a rank that was told its device", "told", None),
        ("W3", "the message names the module", "message names the", None),
        ("W1", "a slowdown of 19 % would have been found", "would have been found", None),
        ("W3", "nothing answers there", "nothing answers", None),
        ("W4", "MASTER_PORT is no port", "is no port", None),
        ("W4", "the files are none", "are none", None),
        ("W5", "drawn anew", "anew", None),
        ("W5", "the port cannot be had", "cannot be had", None),
        ("W5", "losses are held against one device", "held against", None),
        ("W5", "the next call goes on", "goes on", None),
        ("W5", "it shall end", "shall", None),
        ("W6", "nobody has run it", "nobody", None),
        ("W7", "no other room imports it", "room", None),
        ("W7", "every knob", "knob", None),
        ("W8", "it fails, since the disk is full", ", since", None),
        ("W8", "FOLDER holds files, and so may FILE", "so may", None),
        ("W8", "the commit after the one of the syntax error", "the one of", None),
        ("W8", "the output stays sharded", "stays", None),
    ],
)
def test_a_phrase_is_found_with_its_plain_form(rule: str, text: str, phrase: str, plain: str | None) -> None:
    result = [words[1:] for words in findings_of_text(text) if words[1] == rule]
    assert [words[:2] for words in result] == [(rule, phrase)]
    assert plain in (None, result[0][2])


@pytest.mark.parametrize(
    "text",
    [
        "What is a mesh?",
        "2.19 s per step",
        "there is no python3 here",
        "The wall time is no longer than 3 s.",
        "besides, we understand the walls time",
        "Variants run in a new random order in each pass.",
        "a stand-in for a link",
        "returns None where the value is None",
        "1 as a case",
        "seconds, since the epoch",
        "to time a step, which times a call",
        "Time a step. Times a case.",
    ],
)
def test_plain_sentences_are_not_found(text: str) -> None:
    assert [words for words in findings_of_text(text) if words[2] != "walls"] == []


def test_code_and_links_of_a_page_are_skipped_and_lines_stay() -> None:
    page = "# Ranks\n\n```\nit says so\n```\n\nThe `says` of [one](says.md#told) is\nnone.\n\n| ms | a step |\n"
    text = prose_of_page(page)
    assert len(text) == len(page)
    assert [(text.count("\n", 0, at) + 1, phrase) for at, _, phrase, _ in findings_of_text(text)] == [(7, "is none")]


def test_strings_and_docstrings_of_a_source_are_read_and_identifiers_are_not() -> None:
    source = (
        'def f(x):\n    """Return x.\n\n    It says so.\n    """\n    return f"{x} s a step", "says", "a" "nobody is"\n'
    )
    strings = list(strings_of_source(source))
    assert strings == [(2, "Return x.\n\n    It says so.\n    "), (6, "{} s a step"), (6, "anobody is")]


def test_findings_have_the_line_of_a_docstring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prose, "ROOT", tmp_path)
    path = tmp_path / "a.py"
    path.write_text('def f():\n    """Return x.\n\n    It says\n    so, anew.\n    """\n')
    assert [(each.line, each.phrase) for each in prose.findings_in(path)] == [(4, "says"), (5, "anew")]


def test_comments_of_a_source_are_read_with_their_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "# It says\n# so, `anew`.\nx = 1  # nobody\n# has run it\n"
    assert list(comments_of_source(source)) == [
        (1, " It says\n so, \x00\x00\x00\x00\x00\x00."),
        (3, " nobody"),
        (4, " has run it"),
    ]
    monkeypatch.setattr(prose, "ROOT", tmp_path)
    (tmp_path / "a.py").write_text(source)
    assert [(each.line, each.phrase) for each in prose.findings_in(tmp_path / "a.py")] == [(1, "says"), (3, "nobody")]


def test_the_command_lists_findings_and_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(prose, "ROOT", tmp_path)
    (tmp_path / "README.md").write_text("It continues.\n")
    assert prose.main([]) == 0
    (tmp_path / "CONTRIBUTING.md").write_text("It goes on.\n")
    assert prose.main([]) == 1
    assert 'CONTRIBUTING.md:1: W5 "goes on"; write: continue' in capsys.readouterr().out
    assert prose.main([str(tmp_path / "README.md")]) == 0
    assert capsys.readouterr().out == "prose: 0 findings\n"
