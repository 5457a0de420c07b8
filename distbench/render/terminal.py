"""Blocks as text for a terminal or a file: no line longer than the screen, one line a row, no word broken."""

import io
import re
from collections.abc import Sequence

from distbench.render.blocks import Block, Code, Heading, Lines, Table, markdown_of
from distbench.render.columns import GAP, Fitted, fitted
from distbench.render.screen import cells, first_cells, width_here
from distbench.spec.printable import clean

INDENT, PROSE_INDENT = "  ", "    "
# Stands for a space at the end of a cell, which rich would drop: it lines numbers up at their points.
_KEPT = "\ue000"
# What stays on one line: a word with the % or unit of measurement after it, and an interval.
_WORD = re.compile(r"(?:\[[-+.\d]+, [-+.\d]+\]|[^ ]|(?<=\d) (?=(?:%|[num]?s|[KMGT]?i?B(?:/s)?)(?!\w)))+ *| +")
# Where a word longer than a line is broken: after a separator, but not inside an arrow or a number.
_PIECE = re.compile(r"(?:[^ ,/>=_.-]|-(?=>)|\.(?=\d))*(?:[ ,/>=_]|-(?!>)|\.(?!\d))?")


def text_of(blocks: Sequence[Block], width: int | None = None) -> str:
    """As plain text, no line longer than `width` characters; None for what the screen has."""
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
    if isinstance(block, Lines):
        return "\n".join(_paragraph(text, width) for text in block.texts)
    if isinstance(block, Code):
        # A line to paste is never cut; all are indented or none, as their own indents have a meaning.
        lines = [clean(line) for line in block.lines]
        indent = PROSE_INDENT * (max(map(cells, lines), default=0) <= width - len(PROSE_INDENT))
        return "\n".join(indent + line for line in lines)
    return "\n".join(table_lines(block, width))


def _paragraph(text: str, width: int) -> str:
    """One paragraph; what it begins with, all its lines are indented by."""
    own = text[: len(text) - len(text.lstrip(" "))]
    return "\n".join(own + line for line in wrap(clean(text).strip(), width - len(own), INDENT))


def table_lines(table: Table, width: int) -> list[str]:
    """Title, what is said once for all rows, headings, one line a row, notes."""
    found = fitted(table, width)
    above = [*wrap(clean(table.title), width), *(_paragraph(text, width) for text in found.above)]
    below = [_paragraph(text, width) for text in (*found.below, *table.notes)]
    return [*above, *(_grid(table, found, width) if table.rows else []), *below]


def _grid(table: Table, found: Fitted, width: int) -> list[str]:
    """The headings, a rule and the rows, as rich lays them out; blank lines and prose between the rows."""
    from rich.box import Box
    from rich.console import Console
    from rich.table import Table as Grid
    from rich.text import Text

    # The rule below the headings alone; rich wants eight lines of four.
    box = Box("    \n    \n -- \n    \n    \n    \n    \n    \n", ascii=True)
    grid = Grid(box=box, show_edge=False, pad_edge=False, padding=(0, GAP - 1, 0, 0), header_style="")
    for column in found.columns:
        justify = "left" if column.is_text else "right"
        header = Text("\n".join(column.heading), justify=justify)  # type: ignore[arg-type]
        grid.add_column(header, width=column.width, vertical="bottom", justify=justify)  # type: ignore[arg-type]
    for row in zip(*(column.cells for column in found.columns), strict=True):
        grid.add_row(*(Text(cell.rstrip(" ") + _KEPT * (len(cell) - len(cell.rstrip(" ")))) for cell in row))
    file = io.StringIO()
    Console(file=file, width=width + GAP, color_system=None, legacy_windows=False).print(grid)
    lines = file.getvalue().replace(_KEPT, " ").rstrip("\n").split("\n")
    num_above = len(lines) - len(table.rows)
    placed = lines[:num_above]
    for index, line in enumerate(lines[num_above:]):
        placed += [""] if index in table.breaks else []
        placed.append(line)
        if found.prose and found.prose[index]:
            placed += [PROSE_INDENT + part for part in wrap(found.prose[index], width - len(PROSE_INDENT))]
    return placed


def wrap(text: str, width: int, indent: str = "") -> list[str]:
    """Lines of at most `width` characters, broken at spaces; a word that is longer than a line at a separator.

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
