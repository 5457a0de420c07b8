"""Blocks as text for a terminal or a file, with columns and lines that fit the width."""

import contextlib
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TextIO

from distbench.show.blocks import Block, Code, Heading, Lines, Notes, Table, clean_lines, markdown_of
from distbench.spec.printable_text import clean, count_text, cut

MIN_WIDTH, MAX_WIDTH = 60, 200
PIPED_WIDTH = 120  # a file is independent of the terminal
_requested: list[int] = []  # `--width`
_shows_notes = [False]  # `--verbose`


def cells(text: str) -> int:
    """The number of terminal columns of a text. Chinese characters and emoji count twice."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def first_cells(text: str, width: int) -> str:
    """Return the longest beginning of the text with at most `width` columns of a terminal."""
    end = min(len(text), max(width, 0))
    while cells(text[:end]) > width:
        end -= 1
    return text[:end]


def ask_width(width: int | None) -> None:
    """Set the width, or None for the screen's width."""
    _requested[:] = [] if width is None else [width]


def show_notes(all_notes: bool) -> None:
    """Set whether text shows all notes (--verbose) or only their number."""
    _shows_notes[:] = [all_notes]


def shows_notes() -> bool:
    """Whether all notes are shown (--verbose)."""
    return _shows_notes[0]


def width_here() -> int:
    """Characters per line: the value of `--width`, else the terminal's width (60 to 200), else 120."""
    return width_of(sys.stdout) or (_requested[0] if _requested else PIPED_WIDTH)


def width_of(stream: TextIO | None) -> int | None:
    """Characters per line of a terminal as in `width_here`, or None if the stream is not a terminal."""
    if stream is None or not stream.isatty():
        return None
    if _requested:
        return _requested[0]
    columns = 0
    try:
        columns = int(os.environ.get("COLUMNS", ""))
    except ValueError:
        with contextlib.suppress(OSError, ValueError):
            columns = os.get_terminal_size(stream.fileno()).columns
    return min(max(columns or PIPED_WIDTH, MIN_WIDTH), MAX_WIDTH)


# The columns of a table that fit a screen. First, common parts of cells move above the table, then optional columns are
# left out.

GAP = 2
LEAST_TEXT = 10  # minimum characters of a narrowed column of texts
# Separators of a variant or of a case's id, except in a shape such as `f32[8,8]`.
_SEPARATOR = re.compile(r"([/,])(?![^\[(]*[\])])")
_REMARK = re.compile(r"(.*?)( \([^()]*\))?", re.DOTALL)
# "95 %" is one word.
_HEADING_WORD = re.compile(r"\d+ %|\S+")


@dataclass(frozen=True)
class ScreenColumn:
    """One column. Heading and cells may have several lines."""

    heading: str
    cells: tuple[str, ...]
    is_text: bool  # left-aligned, and wrapped if too wide

    @property
    def name(self) -> str:
        """The heading on one line."""
        return self.heading.replace("\n", " ")

    @cached_property
    def width(self) -> int:
        """Characters of the widest line."""
        return max((cells(line) for text in (self.heading, *self.cells) for line in text.split("\n")), default=0)


@dataclass(frozen=True)
class Fitted:
    """A table's fitted columns, sentences above and below the table, and prose below each row, if any."""

    columns: list[ScreenColumn]
    above: list[str]
    below: list[str]
    prose: tuple[str, ...] = ()


def fitted(table: Table, width: int) -> Fitted:
    """Fit the table's columns into `width` characters. Texts are not cut, and numbers are not broken over lines."""
    rows = [[clean(cut(text).replace("\n", " ")) for text in row] for row in table.rows]
    columns = [
        ScreenColumn(clean_lines(heading.removeprefix("<")), tuple(row[at] for row in rows), heading.startswith("<"))
        for at, heading in enumerate(table.columns)
    ]
    above: list[str] = []
    prose: tuple[str, ...] = ()
    if _total(columns) > width:
        columns = [_narrow_heading(column) for column in columns]
    if _total(columns) > width and table.prose:
        prose = next(column.cells for column in columns if column.name == table.prose)
        columns = [column for column in columns if column.name != table.prose]
    for shorten, sentence in ((without_shared, "every {}: {}"), (without_names, "{} is {}")):
        if _total(columns) > width:
            columns, sentences = _fold_shared_cells(columns, shorten, sentence)
            above += sentences
    full_width, left_out = _total(columns), []
    for name in table.optional:
        if _total(columns) > width and any(column.name == name for column in columns):
            left_out.append(name)
            columns = [column for column in columns if column.name != name]
    columns = _narrowed(columns, width)
    while _total(columns) > width and len(columns) > 1:
        left_out.append(columns.pop().name)
    how = f"they need {full_width} characters"
    if full_width <= MAX_WIDTH:
        how = f"--width {-(-full_width // 10) * 10} shows them"
    below = [f"columns left out: {', '.join(left_out)}; {how}"] if left_out else []
    return Fitted(columns, above, below, prose)


def _total(columns: Sequence[ScreenColumn]) -> int:
    return sum(column.width for column in columns) + GAP * (len(columns) - 1)


def _narrow_heading(column: ScreenColumn) -> ScreenColumn:
    """The column with the heading broken at spaces if the cells are narrower. The last line of the heading is filled
    first."""
    words = _HEADING_WORD.findall(column.name)
    width = max(len(line) for text in (*column.cells, *words, "") for line in text.split("\n"))
    lines = [""]
    for word in reversed(words):
        longer = f"{word} {lines[0]}".strip()
        lines = [longer, *lines[1:]] if len(longer) <= width or not lines[0] else [word, *lines]
    return replace(column, heading="\n".join(lines))


def _fold_shared_cells(
    columns: Sequence[ScreenColumn],
    shorten: Callable[[Sequence[str]], tuple[Sequence[str], list[str]]],
    sentence: str,
) -> tuple[list[ScreenColumn], list[str]]:
    """Columns without the parts of texts that `shorten` removes, and a sentence per column on the removed parts."""
    shorter, above = [], []
    for column in columns:
        cells, removed = shorten(column.cells) if column.is_text else (column.cells, [])
        shorter.append(replace(column, cells=tuple(cells)))
        if removed:
            above.append(sentence.format(column.name, ", ".join(removed)))
    return shorter, above


def without_names(texts: Sequence[str]) -> tuple[Sequence[str], list[str]]:
    """Texts such as `a=1,b=2` as `1,2`, and the names `a`, `b`, if all texts have the same names."""
    split = [
        ([part.partition("=") for part in _SEPARATOR.split(body)[::2]], remark)
        for body, remark in map(_without_remark, texts)
    ]
    names = [name for name, _, _ in split[0][0]] if split else []
    # A sentence may have "=" in it, as an error's message does.
    has_values = all(mark and value and " " not in name for parts, _ in split for name, mark, value in parts)
    if not has_values or any([name for name, _, _ in parts] != names for parts, _ in split):
        return texts, []
    return [",".join(value for _, _, value in parts) + remark for parts, remark in split], names


def without_shared(texts: Sequence[str]) -> tuple[Sequence[str], list[str]]:
    """Texts such as `a=1,b=2` or `step/f32[8]/x` without the parts that all texts have, and these parts.

    Each text retains at least one part, in addition to a remark in brackets at the end.
    """
    if len(set(texts)) < 2:
        return texts, []
    split = [(_SEPARATOR.split(body), remark) for body, remark in map(_without_remark, texts)]
    common = set.intersection(*(set(pieces[::2]) for pieces, _ in split))
    shared = [part for part in dict.fromkeys(split[0][0][::2]) if part in common]
    if shared and any(set(pieces[::2]) <= common for pieces, _ in split):
        shared.pop()
    if not shared:
        return texts, []
    shorter = []
    for pieces, remark in split:
        # Parts are at even places, and separators before parts at odd places.
        kept = [(mark, part) for mark, part in zip(["", *pieces[1::2]], pieces[::2], strict=True) if part not in shared]
        shorter.append("".join(mark * bool(index) + part for index, (mark, part) in enumerate(kept)) + remark)
    return shorter, shared


def _without_remark(text: str) -> tuple[str, str]:
    match = _REMARK.fullmatch(text)
    return (match[1], match[2] or "") if match else (text, "")


def _narrowed(columns: Sequence[ScreenColumn], width: int) -> list[ScreenColumn]:
    """Columns with the widest texts wrapped, as far as needed for `width`."""
    widths = {index: column.width for index, column in enumerate(columns) if column.is_text}
    for _ in range(_total(columns) - width):
        widest = max(widths, key=lambda index: widths[index], default=None)
        if widest is None or widths[widest] <= LEAST_TEXT:
            break
        widths[widest] -= 1
    narrowed = list(columns)
    for index, room in widths.items():
        if room < columns[index].width:
            texts = tuple("\n".join(wrap(cell, room, INDENT)) for cell in columns[index].cells)
            narrowed[index] = _narrow_heading(replace(columns[index], cells=texts))
    return narrowed


INDENT, PROSE_INDENT = "  ", "    "
# Text that is not broken: a word, a number with its % or unit, and an interval.
_WORD = re.compile(r"(?:\[[-+.\d]+, [-+.\d]+\]|[^ ]|(?<=\d) (?=(?:%|[num]?s|[KMGT]?i?B(?:/s)?)(?!\w)))+ *| +")
# Pieces of a word that is longer than a line, broken after separators, except in arrows and numbers.
_PIECE = re.compile(r"(?:[^ ,/>=_.-]|-(?=>)|\.(?=\d))*(?:[ ,/>=_]|-(?!>)|\.(?!\d))?")


def text_of(blocks: Sequence[Block], width: int | None = None) -> str:
    """Blocks as plain text, with at most `width` characters per line. The default is the screen's width."""
    width = width or width_here()
    lines = "\n\n".join(filter(None, (_text_block(block, width) for block in blocks))).split("\n")
    return "\n".join(line.rstrip() for line in lines)


def shown(blocks: Sequence[Block], form: str) -> str:
    """The blocks as form "table" or "markdown"."""
    return text_of(blocks) if form == "table" else markdown_of(blocks)


def _text_block(block: Block, width: int) -> str:
    if isinstance(block, Heading):
        lines = wrap(clean(block.text), width)
        return "\n".join([*lines, ("=" if block.level == 1 else "-") * max(map(cells, lines))])
    if isinstance(block, Notes) and block.texts and not shows_notes():
        return _count_of(block.texts)
    if isinstance(block, Lines):
        return "\n".join(_paragraph(text, width) for text in block.texts)
    if isinstance(block, Code):
        # Lines to paste are never cut. All lines or no line is indented, because indents have a meaning in code.
        lines = [clean(line) for line in block.lines]
        indent = PROSE_INDENT * (max(map(cells, lines), default=0) <= width - len(PROSE_INDENT))
        return "\n".join(indent + line for line in lines)
    return "\n".join(table_lines(block, width))


def _count_of(notes: Sequence[str]) -> str:
    """A text such as `2 warnings, 1 note: -v shows them`."""
    num_warnings = sum(note.startswith("warning: ") for note in notes)
    counts = ((num_warnings, "warning"), (len(notes) - num_warnings, "note"))
    texts = [count_text(count, word) for count, word in counts if count]
    return f"{', '.join(texts)}: -v shows {'it' if len(notes) == 1 else 'them'}"


def _paragraph(text: str, width: int) -> str:
    """One paragraph, with the indent of the first line in all lines."""
    leading = text[: len(text) - len(text.lstrip(" "))]
    return "\n".join(leading + line for line in wrap(clean(text).strip(), width - len(leading), INDENT))


def table_lines(table: Table, width: int) -> list[str]:
    """The lines of a table: title, sentences on all rows, headings, rows, notes."""
    fit = fitted(table, width)
    lines = [*wrap(clean(table.title), width), *(_paragraph(text, width) for text in fit.above)]
    if table.rows:
        headings = [column.heading for column in fit.columns]
        lines += [*_row(fit.columns, headings, at_bottom=True), "-" * _total(fit.columns)]
    for index, cells_of_row in enumerate(zip(*(column.cells for column in fit.columns), strict=True)):
        lines += [""] if index in table.breaks else []
        lines += _row(fit.columns, cells_of_row)
        if fit.prose and fit.prose[index]:
            lines += [PROSE_INDENT + part for part in wrap(fit.prose[index], width - len(PROSE_INDENT))]
    return [*lines, *(_paragraph(text, width) for text in (*fit.below, *table.notes))]


def _row(columns: Sequence[ScreenColumn], texts: Sequence[str], at_bottom: bool = False) -> list[str]:
    """The lines of a row. Shorter texts begin at the top, or end at the bottom with `at_bottom`."""
    parts = [text.split("\n") for text in texts]
    height = max(map(len, parts))
    parts = [[""] * (height - len(part)) + part if at_bottom else part + [""] * (height - len(part)) for part in parts]
    return [(" " * GAP).join(map(_aligned, line, columns)) for line in zip(*parts, strict=True)]


def _aligned(text: str, column: ScreenColumn) -> str:
    room = " " * (column.width - cells(text))
    return text + room if column.is_text else room + text


def wrap(text: str, width: int, indent: str = "") -> list[str]:
    """Lines of at most `width` characters, broken at spaces. A word that is longer than a line is broken at a
    separator.

    Lines after the first begin with `indent`.
    """
    if cells(text) <= width:
        return [text]
    lines, line = [], ""
    for word in _WORD.findall(text):
        pieces = [word] if cells(word.rstrip()) <= width - len(indent) else _PIECE.findall(word)
        for piece in pieces:
            rest = piece
            while cells(line + rest.rstrip()) > width:
                if line.strip():
                    lines.append(line.rstrip())
                else:
                    first = first_cells(rest, width - cells(line)) or rest[:1]
                    lines.append(line + first)
                    rest = rest[len(first) :]
                line = indent
            line += rest
    return [*lines, line.rstrip()] if line.strip() else lines
