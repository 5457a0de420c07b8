"""Tables and headings as data, and the two ways to write them: text of at most 100 columns, and GitHub Markdown."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import zip_longest
from typing import Any

from distbench.render.units import key_text
from distbench.spec.printable import clean, cut

MAX_WIDTH = 100
GAP = 2
MIN_COLUMN_WIDTH = 6
# What a line may not be broken within: it ends with a separator, but not between a number and its % or inside an arrow.
_PIECE = re.compile(r"(?:[^ ,/>=-]|-(?=>)| (?=%))*(?:[ ,/>=]|-(?!>))?")


@dataclass(frozen=True)
class Heading:
    """What a stretch of the report is about; level 1 is the report's own title."""

    text: str
    level: int = 2


@dataclass(frozen=True)
class Lines:
    """Sentences, one paragraph each."""

    texts: tuple[str, ...]


@dataclass(frozen=True)
class Table:
    """Rows under column headings, with notes below. A cell may hold several lines."""

    title: str
    columns: tuple[str, ...]  # one that starts with "<" is left-aligned, all others right-aligned
    rows: Sequence[tuple[str, ...]]
    notes: list[str] = field(default_factory=list)
    breaks: frozenset[int] = frozenset()  # indexes of the rows that a blank line goes before
    together: bool = False  # rows up to a break are one thing, led by its first row: whoever sorts moves it whole
    beyond: Sequence[tuple[str, ...]] = ()  # rows that a cap took away, of which the first note tells; a page has them


@dataclass(frozen=True)
class Code:
    """Lines to paste, kept as they are."""

    lines: tuple[str, ...]


Block = Heading | Lines | Table | Code


# A heading as `Table.columns` has it, and what a row's record says under it.
TableColumn = tuple[str, Callable[[Any], str]]
TableColumns = Sequence[TableColumn]


def table_of(
    title: str, columns: TableColumns, records: Iterable[Any], notes: Iterable[str] = (), breaks: Iterable[int] = ()
) -> Table:
    """One row a record, each cell by its column's function."""
    cells = [tuple(text(record) for _, text in columns) for record in records]
    return Table(title, tuple(heading for heading, _ in columns), cells, list(notes), frozenset(breaks))


def key_columns(keys: Iterable[str]) -> TableColumns:
    """One column a key that rows were grouped by."""
    return [(f"<{key}", partial(lambda key, row: key_text(row[key]), key)) for key in keys]


def changes_in(values: Sequence[object]) -> list[int]:
    """Indexes of the values that differ from the one before."""
    return [index for index in range(1, len(values)) if values[index] != values[index - 1]]


def capped(table: Table, cap: int, more: str = "more rows: --format csv") -> Table:
    """The table's first `cap` rows, with a note on how many were left out if there were more."""
    if len(table.rows) <= cap:
        return table
    notes = [f"... {len(table.rows) - cap} {more}", *table.notes]
    return replace(table, rows=table.rows[:cap], notes=notes, beyond=table.rows[cap:])


def shown(blocks: Sequence[Block], form: str) -> str:
    """As text where `form` is "table", else as Markdown."""
    return (text_of if form == "table" else markdown_of)(blocks)


def text_of(blocks: Sequence[Block]) -> str:
    """As plain text, no line longer than MAX_WIDTH characters."""
    lines = "\n\n".join(filter(None, map(_text_block, blocks))).split("\n")
    return "\n".join(line.rstrip() for line in lines)


def markdown_of(blocks: Sequence[Block]) -> str:
    """As GitHub Markdown; its lines may be of any length."""
    return "\n\n".join(filter(None, map(_markdown_block, blocks)))


def _text_block(block: Block) -> str:
    if isinstance(block, Heading):
        lines = wrap(clean(block.text), MAX_WIDTH)
        return "\n".join([*lines, ("=" if block.level == 1 else "-") * max(map(len, lines))])
    if isinstance(block, Lines):
        return "\n".join(_paragraph(text) for text in block.texts)
    if isinstance(block, Code):
        return "\n".join(f"    {clean(line)}"[:MAX_WIDTH] for line in block.lines)
    return "\n".join([*wrap(clean(block.title), MAX_WIDTH), *_table_lines(block), *map(_paragraph, block.notes)])


def _paragraph(text: str) -> str:
    return "\n".join(wrap(clean(text), MAX_WIDTH, indent="  "))


def _table_lines(table: Table) -> list[str]:
    headings = tuple(clean_lines(heading.removeprefix("<")) for heading in table.columns)
    lefts = [heading.startswith("<") for heading in table.columns]
    rows = [tuple(clean_lines(cell) for cell in row) for row in table.rows]
    widths = fit(headings, rows)
    lines = _row_lines(headings, widths, lefts)
    lines.append((" " * GAP).join("-" * width for width in widths))
    for index, row in enumerate(rows):
        if index in table.breaks:
            lines.append("")
        lines += _row_lines(row, widths, lefts)
    return lines


def fit(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[int]:
    """Column widths that keep a row within MAX_WIDTH: the widest column gives way first, down to MIN_COLUMN_WIDTH."""
    columns = list(zip(headings, *rows, strict=True))
    widths = [max(len(line) for cell in column for line in cell.split("\n")) for column in columns]
    room = MAX_WIDTH - GAP * (len(widths) - 1)
    while sum(widths) > room and max(widths) > MIN_COLUMN_WIDTH:
        widest = widths.index(max(widths))
        others = sorted(widths)[-2] if len(widths) > 1 else MIN_COLUMN_WIDTH
        widths[widest] = max(others - 1, widths[widest] - (sum(widths) - room), MIN_COLUMN_WIDTH)
    return widths


def _row_lines(cells: Sequence[str], widths: Sequence[int], lefts: Sequence[bool]) -> list[str]:
    wrapped = [
        [piece for line in cell.split("\n") for piece in wrap(line, width)]
        for cell, width in zip(cells, widths, strict=True)
    ]
    lines = []
    for texts in zip_longest(*wrapped, fillvalue=""):
        padded = [
            text.ljust(width) if left else text.rjust(width)
            for text, width, left in zip(texts, widths, lefts, strict=True)
        ]
        lines.append((" " * GAP).join(padded)[:MAX_WIDTH])
    return lines


def wrap(text: str, width: int, indent: str = "") -> list[str]:
    """Lines of at most `width` characters, broken after a space, comma, slash, dash, = or arrow where there is one.

    Lines after the first begin with `indent`.
    """
    if len(text) <= width:
        return [text]
    lines, line = [], ""
    for piece in _PIECE.findall(text):
        rest = piece
        while len(line + rest.rstrip()) > width:
            if line.strip():
                lines.append(line.rstrip())
            else:
                room = width - len(line)
                lines.append(line + rest[:room])
                rest = rest[room:]
            line = indent
        line += rest
    return [*lines, line.rstrip()] if line.strip() else lines


def clean_lines(cell: str) -> str:
    """The same of each of its lines."""
    return "\n".join(clean(line) for line in cut(cell).split("\n"))


def shorten(text: str, width: int) -> str:
    """At most `width` characters, the end cut away."""
    text = clean(text)
    return text if len(text) <= width else text[: width - 4].rstrip() + " ..."


def _markdown_block(block: Block) -> str:
    if isinstance(block, Heading):
        return "#" * block.level + " " + markdown_text(block.text)
    if isinstance(block, Lines):
        return "\n".join(f"- {markdown_text(text)}" for text in block.texts)
    if isinstance(block, Code):
        return fenced(map(clean, block.lines), "python")
    # A word that was cut for a narrow column is whole again.
    headings = [markdown_text(heading.removeprefix("<").replace("-\n", "")) for heading in block.columns]
    rules = [":---" if heading.startswith("<") else "---:" for heading in block.columns]
    rows = [headings, rules, *([markdown_text(cell) for cell in row] for row in block.rows)]
    table = "\n".join("| " + " | ".join(row) + " |" for row in rows)
    notes = "\n".join(f"- {markdown_text(note)}" for note in block.notes)
    return "\n\n".join(filter(None, (f"**{markdown_text(block.title)}**", table, notes)))


def markdown_text(text: str) -> str:
    """One line of GitHub Markdown that shows as it stands: no table, code, element or link begins in it."""
    text = re.sub(r"([|*`<\\])", r"\\\1", clean(text.replace("\n", " ")).strip())
    return text.replace("](", "]\\(")


def code_span(text: str) -> str:
    """One line of code within a line of Markdown."""
    return "`" + clean(text.replace("\n", " ")).replace("`", "'") + "`"


def fenced(lines: Iterable[str], language: str = "") -> str:
    """Lines of code in Markdown, within a fence that none of them can end."""
    kept = list(lines)
    longest = max((len(run) for line in kept for run in re.findall("`+", line)), default=0)
    fence = "`" * max(longest + 1, 3)
    return "\n".join([f"{fence}{language}", *kept, fence])
