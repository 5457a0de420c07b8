"""Text from names, files and ranks, made safe to print: without control characters, CI commands or megabytes."""

import contextlib
import re
from collections.abc import Sequence
from typing import Any

MAX_TEXT = 20_000
# Control characters except line break and tab: C0, DEL, C1, text directions, line separators, surrogates,
# noncharacters.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")
# GitHub executes `::name::` at a line's start and `##[name]` anywhere, Azure `##vso[`, and TeamCity `##teamcity[`.
_AT_START = re.compile(r"^(\s*):(?=:)", re.MULTILINE)
# A spreadsheet evaluates a cell that begins with one of these characters as a formula.
_FORMULA = ("=", "+", "-", "@", "\t", "\r")
_ANYWHERE = re.compile(r"##(?=\w*\[)")


def count_text(number: float, word: str, plural: str = "") -> str:
    """Return `1 case`, `30 cases`, `16,384 ranks`; `plural` is for plurals other than word + "s", such as "passes"."""
    return f"{number:,} {word if number == 1 else plural or f'{word}s'}"


def listed(texts: Sequence[str], most: int, separator: str = ", ", rest: str = " and {} more") -> str:
    """Return the first `most` texts and the number of the others, as one text: `a, b and 3 more`."""
    return separator.join(texts[:most]) + (rest.format(len(texts) - most) if len(texts) > most else "")


def ranks_text(ranks: Sequence[int]) -> str:
    """Return `4-7` for consecutive ranks, `0,2,4,6` for other ranks."""
    if len(ranks) > 1 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}-{ranks[-1]}"
    return listed([str(rank) for rank in ranks], 8, ",", ",... ({} more)")


def capped_lines(lines: Sequence[str], most: int, rest: str = "... {} more") -> list[str]:
    """Return the first `most` lines, and one line with the number of omitted lines."""
    return [*lines[:most], *([rest.format(len(lines) - most)] if len(lines) > most else [])]


def clean(text: str) -> str:
    """Return a text as one line of about MAX_TEXT characters at most, without control characters."""
    text = cut(text)
    return text if text.isprintable() else "".join(char if char.isprintable() else " " for char in text)


def cut(text: str) -> str:
    """Shorten an overlong text to its beginning and the number of omitted characters."""
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]} ... ({len(text) - MAX_TEXT:,} more characters)"


def printable(text: str) -> str:
    """Return lines for a terminal or a log, without control characters and CI systems' commands."""
    text = _CONTROL.sub(" ", text)
    text = _AT_START.sub(r"\1: ", text) if "::" in text else text
    return _ANYWHERE.sub("# #", text) if "##" in text else text


def cell(value: Any) -> Any:
    """Return a value for a CSV file; an apostrophe precedes a text that a spreadsheet would evaluate as a formula."""
    if not isinstance(value, str) or not value.startswith(_FORMULA):
        return value
    with contextlib.suppress(ValueError):
        float(value)
        return value
    return f"'{value}"
