"""Colours of severities and verdicts on a terminal, by `--color`, NO_COLOR and FORCE_COLOR."""

import os
import re
from typing import TextIO

import click

CHOICES = ("auto", "always", "never")
_WORDS = {
    "green": ("PASS", "OK", "Recommended", "pass", "improvement", "faster"),
    "red": ("FAIL", "error", "regression", "invalid", "missing", "incomparable", "slower"),
    "yellow": ("INCONCLUSIVE", "UNKNOWN", "warning", "inconclusive"),
}
_COLORS = {word: color for color, words in _WORDS.items() for word in words}
# A severity before a colon at the start of a line, or a verdict that fills a cell of a table.
_SEVERITY = r"(?:PASS|OK|Recommended|FAIL|INCONCLUSIVE|UNKNOWN|warning|error)(?=:)"
_VERDICT = (
    r"(?:regression|improvement|inconclusive|pass|invalid|missing|incomparable|slower|faster)(?= \(\w+\?\)|  | *$)"
)
_COLORED = re.compile(rf"^(?: *(?:distbench: )?){_SEVERITY}|(?:^|(?<=  )){_VERDICT}", re.MULTILINE)
_chosen = ["auto"]


def choose_color(choice: str) -> None:
    """Set the colour mode to one of CHOICES."""
    _chosen[:] = [choice]


def uses_color(stream: TextIO | None) -> bool:
    """Whether text for this stream is coloured. With "auto", this depends on the environment and on a terminal."""
    if _chosen[0] != "auto":
        return _chosen[0] == "always"
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return stream is not None and stream.isatty() and os.environ.get("TERM") != "dumb"


def colored(text: str) -> str:
    """Text with coloured severities, and coloured verdicts in tables."""

    def paint(match: re.Match[str]) -> str:
        before, _, word = match[0].rpartition(" ")
        return before + " " * bool(before) + click.style(word, fg=_COLORS[word], bold=word.isupper() or None)

    return _COLORED.sub(paint, text)
