"""The prose linter: it finds the phrases, skips code, names the line, and its budget only falls."""

import json
from pathlib import Path

import pytest

from benchmarks import prose
from benchmarks.prose import Finding, findings_of_text, lowered, over_budget, prose_of_page, strings_of_source


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
    ],
)
def test_a_phrase_is_found_with_its_plain_form(rule: str, text: str, phrase: str, plain: str | None) -> None:
    found = [words[1:] for words in findings_of_text(text) if words[1] == rule]
    assert [words[:2] for words in found] == [(rule, phrase)]
    assert plain in (None, found[0][2])


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


def test_a_budget_falls_and_never_rises() -> None:
    findings = [Finding("docs/a.md", 1, "W3", "says", "prints")] * 3
    assert over_budget(findings, {"docs": 3}) == {}
    assert over_budget(findings, {"docs": 2}) == over_budget(findings, {"docs": 2, "README.md": 5}) == {"docs": 3}
    assert over_budget([Finding("distbench/new/a.py", 1, "W3", "says", "prints")], {}) == {"distbench/new": 1}
    assert lowered(findings, {"docs": 9, "README.md": 4}) == {"docs": 3}
    assert lowered(findings, {"docs": 2}) == {"docs": 2}


def test_the_command_lists_findings_of_paths_and_checks_the_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(prose, "ROOT", tmp_path)
    monkeypatch.setattr(prose, "BUDGET", tmp_path / "budget.json")
    (tmp_path / "README.md").write_text("It goes on.\n")
    (tmp_path / "budget.json").write_text('{"README.md": 2}')
    assert prose.main([]) == 0
    assert prose.main([str(tmp_path / "README.md")]) == 1
    assert 'README.md:1: W5 "goes on"; write: continue' in capsys.readouterr().out
    assert prose.main(["--update"]) == 0
    assert json.loads((tmp_path / "budget.json").read_text()) == {"README.md": 1}
    (tmp_path / "README.md").write_text("It goes on, anew.\n")
    assert prose.main([]) == 1
    assert "FAIL: README.md has 2 findings, at most 1" in capsys.readouterr().out
