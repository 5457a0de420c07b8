"""Tables and headings as data and as GitHub Markdown. `terminal.py` formats blocks as text."""

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from distbench.show.units import NOTHING, key_text
from distbench.spec.printable_text import clean, cut


@dataclass(frozen=True)
class Heading:
    """A heading of a report. Level 1 is the title of the report."""

    text: str
    level: int = 2


@dataclass(frozen=True)
class Lines:
    """Sentences, one paragraph each."""

    texts: tuple[str, ...]


class Notes(Lines):
    """Warnings and notes on a result. Without --verbose, text shows only their number."""


class Rows(Sequence[tuple[str, ...]]):
    """Rows, one per record, whose cells are formatted at the first access, because caps drop most rows of long
    tables."""

    def __init__(self, records: Sequence[Any], cells: Callable[[Any], tuple[str, ...]]) -> None:
        self._records, self._cells = records, cells

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, key: Any) -> Any:
        """Return one row's cells, or the rows of a slice without formatting."""
        if isinstance(key, slice):
            return Rows(self._records[key], self._cells)
        return self._cells(self._records[key])


@dataclass(frozen=True)
class Table:
    """Rows under column headings, with notes below.

    On a narrow screen, columns of `optional` are left out, least important first, and the text of the column `prose` is
    below each row. Both use headings without "<", on one line.
    """

    title: str
    columns: tuple[str, ...]  # headings that start with "<" are left-aligned, others right-aligned
    rows: Sequence[tuple[str, ...]]
    notes: list[str] = field(default_factory=list)
    breaks: frozenset[int] = frozenset()  # indexes of the rows below a blank line
    optional: tuple[str, ...] = ()
    prose: str = ""
    together: bool = False  # rows up to a break are one group, which sorting by the first row moves
    beyond: Sequence[tuple[str, ...]] = ()  # rows beyond a cap, which a page shows


@dataclass(frozen=True)
class Code:
    """Lines to paste, which are shown unchanged."""

    lines: tuple[str, ...]


Block = Heading | Lines | Table | Code


# A heading as in `Table.columns`, and a function from a record to the text of a cell.
TableColumn = tuple[str, Callable[[Any], str]]
TableColumns = Sequence[TableColumn]


def table_of(
    title: str,
    columns: TableColumns,
    records: Iterable[Any],
    notes: Iterable[str] = (),
    breaks: Iterable[int] = (),
    optional: tuple[str, ...] = (),
    where_known: Collection[str] = (),
) -> Table:
    """One row per record, with cells by the functions of columns. Columns of `where_known` without values are left
    out."""
    listed = list(records)
    kept = [
        (heading, text)
        for heading, text in columns
        if heading not in where_known or any(text(record) != NOTHING for record in listed)
    ]
    rows = Rows(listed, lambda record: tuple(text(record) for _, text in kept))
    return Table(title, tuple(heading for heading, _ in kept), rows, list(notes), frozenset(breaks), optional)


def key_columns(keys: Iterable[str]) -> TableColumns:
    """One column per key of a grouping."""
    return [(f"<{key}", partial(lambda key, row: key_text(row[key]), key)) for key in keys]


def changes_in(values: Sequence[object]) -> list[int]:
    """Indexes of values that differ from the previous value."""
    return [index for index in range(1, len(values)) if values[index] != values[index - 1]]


def capped(table: Table, cap: int, more: str = "more rows: --format csv") -> Table:
    """The table's first `cap` rows, with a note on the number of other rows."""
    if len(table.rows) <= cap:
        return table
    notes = [f"... {len(table.rows) - cap} {more}", *table.notes]
    return replace(table, rows=table.rows[:cap], notes=notes, beyond=table.rows[cap:])


def markdown_of(blocks: Sequence[Block]) -> str:
    """Blocks as GitHub Markdown, with lines of any length."""
    return "\n\n".join(filter(None, map(_markdown_block, blocks)))


def clean_lines(cell: str) -> str:
    """`clean` of each line."""
    return "\n".join(clean(line) for line in cut(cell).split("\n"))


def shorten(text: str, width: int) -> str:
    """The first `width` characters of a text."""
    text = clean(text)
    return text if len(text) <= width else text[: width - 4].rstrip() + " ..."


def _markdown_block(block: Block) -> str:
    if isinstance(block, Heading):
        return "#" * block.level + " " + markdown_text(block.text)
    if isinstance(block, Lines):
        return "\n".join(f"- {markdown_text(text)}" for text in block.texts)
    if isinstance(block, Code):
        return fenced(map(clean, block.lines), "python")
    # Join words that were split for a narrow column.
    headings = [markdown_text(heading.removeprefix("<").replace("-\n", "")) for heading in block.columns]
    rules = [":---" if heading.startswith("<") else "---:" for heading in block.columns]
    rows = [headings, rules, *([markdown_text(cell) for cell in row] for row in block.rows)]
    table = "\n".join("| " + " | ".join(row) + " |" for row in rows)
    notes = "\n".join(f"- {markdown_text(note)}" for note in block.notes)
    return "\n\n".join(filter(None, (f"**{markdown_text(block.title)}**", table, notes)))


def markdown_text(text: str) -> str:
    """A text as one line of GitHub Markdown, without table, code, element or link."""
    text = re.sub(r"([|*`<\\])", r"\\\1", clean(text.replace("\n", " ")).strip())
    return text.replace("](", "]\\(")


def code_span(text: str) -> str:
    """A text as a code span of Markdown."""
    return "`" + clean(text.replace("\n", " ")).replace("`", "'") + "`"


def fenced(lines: Iterable[str], language: str = "") -> str:
    """Lines as a code block of Markdown, with a longer fence than in any line."""
    all_lines = list(lines)
    longest = max((len(run) for line in all_lines for run in re.findall("`+", line)), default=0)
    fence = "`" * max(longest + 1, 3)
    return "\n".join([f"{fence}{language}", *all_lines, fence])
