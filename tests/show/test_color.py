"""Colour of severities and verdicts: where it is, and where it must not be."""

import io
import re
from pathlib import Path

import pytest
from click.testing import CliRunner
from gate_runs import taking_turns

from distbench.cli.main import main
from distbench.show.color import choose_color, colored, uses_color

ESCAPE = re.compile("\x1b\\[[0-9;]*m")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("FAIL: 2 regression", ["FAIL"]),
        ("  UNKNOWN: x\ndistbench: warning: y", ["UNKNOWN", "warning"]),
        ("regression    case  1.2 ms\ninconclusive (regression?)  case\ncase  1.2  slower", None),
        ("FAILED: x\nthe PASS: y\npassing  case\na slower case", []),
    ],
)
def test_severities_and_verdict_cells_are_coloured_and_nothing_else(text: str, words: list[str] | None) -> None:
    painted = re.findall("\x1b\\[3[123]m(?:\x1b\\[1m)?(\\w+)\x1b\\[0m", colored(text))
    assert painted == (["regression", "inconclusive", "slower"] if words is None else words)
    assert ESCAPE.sub("", colored(text)) == text


def test_auto_is_a_terminal_unless_the_environment_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert uses_color(Terminal()) and not uses_color(io.StringIO()) and not uses_color(None)
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert uses_color(io.StringIO())
    monkeypatch.setenv("NO_COLOR", "1")
    assert not uses_color(Terminal())


@pytest.mark.long
def test_color_goes_before_or_after_the_command_and_never_into_data(tmp_path: Path) -> None:
    sides = [str(side) for side in taking_turns(tmp_path, 1e-3, 1.2e-3)]
    try:
        for words in (["--color", "always", "gate", *sides], ["gate", *sides, "--color", "always"]):
            assert "\x1b[31m\x1b[1mFAIL\x1b[0m: 1 regression" in CliRunner().invoke(main, words, color=True).output
            for form in ("json", "junit", "markdown", "github"):
                assert "\x1b" not in CliRunner().invoke(main, [*words, "--format", form], color=True).output
        assert "\x1b" not in CliRunner().invoke(main, ["gate", *sides], color=True).output
    finally:
        choose_color("auto")
