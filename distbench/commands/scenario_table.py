"""The scenarios as `distbench list` shows them."""

import textwrap
from collections.abc import Sequence

from distbench.render.screen import width_here
from distbench.spec import Entry, format_mesh
from distbench.spec.printable import clean

INDENT = "    "


def scenario_table(entries: Sequence[Entry]) -> str:
    """For each scenario its name, mesh and tags in columns, and below what it measures.

    Laid out here, not by rich: to import that takes longer than all else that `list` does.
    """
    rows = [tuple(map(clean, (one.name, format_mesh(one.mesh), ", ".join(one.tags)))) for one in entries]
    widths = [max(map(len, column), default=0) for column in zip(*rows, strict=True)]
    width, lines = width_here(), []
    for entry, row in zip(entries, rows, strict=True):
        cells = [cell.ljust(most) for cell, most in zip(row, widths, strict=True)]
        while len("  ".join(cells).rstrip()) > width and len(cells) > 1:
            cells.pop()
        lines.append("  ".join(cells).rstrip())
        wrapper = textwrap.TextWrapper(width, INDENT, INDENT, break_on_hyphens=False)
        lines += wrapper.wrap(clean(entry.summary))
    return "\n".join(lines)
