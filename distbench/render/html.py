"""The report as one HTML page that needs nothing else: styles, script and figures within. Blocks in, text out."""

import base64
import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from distbench.render.blocks import Block, Code, Heading, Lines, Table, clean_lines
from distbench.render.page_svg import svg_of
from distbench.spec.printable import clean

if TYPE_CHECKING:
    from jinja2 import Template
    from markupsafe import Markup
    from matplotlib.figure import Figure

TEMPLATES = Path(__file__).parent / "templates"
# Words that a table's reader looks for first, and how they are set.
GOOD, BAD, FAINT = "good", "bad", "faint"
LOOKS = {
    **dict.fromkeys(("ok", "faster", "complete"), GOOD),
    **dict.fromkeys(("slower", "wrong", "raised", "aborted", "timeout", "interrupted", "failed"), BAD),
    **dict.fromkeys(("-", "within noise", "same path", "too few passes", "skipped", "unsupported", "baseline"), FAINT),
}
# Where a text too long for its column may go on in the next line.
_BREAK_AFTER = re.compile(r"(->|[,/=])(?=[^\s])")
LONG_LINE = 28


class Verdict(Lines):
    """Lines that stand out: what the page is for."""


@dataclass(frozen=True)
class SectionHeading(Heading):
    """A heading with what is not well below it, in a word or two: it stands in the contents too."""

    mark: str = ""


@dataclass(frozen=True)
class Picture:
    """A figure on a page, drawn when the page is written."""

    figure: "Figure"


PageBlock = Block | Picture


@dataclass
class PageSection:
    """What stands under one entry of the contents; `shown` are parts as the template takes them."""

    id: str
    title: str
    mark: str = ""
    shown: list[dict[str, Any]] = field(default_factory=list)


def page_of(title: str, blocks: Sequence[PageBlock]) -> str:
    """The whole page; `title` is for the browser's tab.

    The first heading of level 1 is the page's own, every further one of level 1 or 2 begins a section, all others
    stand within it.
    """
    sections, heading = _sections(title, blocks)
    _link(sections)
    scripts = [(TEMPLATES / name).read_text(encoding="utf-8") for name in ("early.js", "page.js")]
    return _template("page.html").render(
        title=clean(title),
        heading=heading,
        sections=sections,
        style=_raw(_template("page.css").render()),
        scripts=[*map(_raw, scripts)],
        hashes=_raw(" ".join(map(_hash, scripts))),
    )


def _sections(title: str, blocks: Sequence[PageBlock]) -> tuple[list[PageSection], str]:
    first = next((block for block in blocks if isinstance(block, Heading) and block.level == 1), None)
    sections = [PageSection("s0", "Summary")]
    for number, block in enumerate(blocks):
        if block is first:
            continue
        if isinstance(block, Heading) and block.level <= 2:
            mark = clean(block.mark) if isinstance(block, SectionHeading) else ""
            sections.append(PageSection(f"s{number}", clean(block.text), mark))
        else:
            sections[-1].shown += _shown(block, number)
    heading = clean(first.text if first else title)
    return [one for one in sections if one.shown or one.id != "s0"], heading


def _link(sections: Sequence[PageSection]) -> None:
    """In the first and in the last section a section's title leads there, as a cell and where a sentence begins so."""
    ids = {section.title: section.id for section in sections[1:]}
    for block in (block for section in (*sections[:1], *sections[-1:]) for block in section.shown):
        for row in block.get("rows", ()):
            row["cells"] = [cell._replace(link=ids.get(str(cell.text))) for cell in row["cells"]]
        if "texts" in block:
            block["texts"] = [text._replace(link=ids.get(text.text.partition(" (")[0])) for text in block["texts"]]


def _shown(block: PageBlock, number: int) -> Iterator[dict[str, Any]]:
    """A block as the template takes it: its kind, and its parts."""
    if isinstance(block, Picture):
        yield {"kind": "picture", "svg": _raw(svg_of(block.figure, f"f{number}-"))}
    elif isinstance(block, Heading):
        yield {"kind": "heading", "text": clean(block.text)}
    elif isinstance(block, Code):
        yield {"kind": "code", "text": "\n".join(map(clean, block.lines))}
    elif isinstance(block, Lines):
        if block.texts:
            kind = "verdict" if isinstance(block, Verdict) else "lines"
            yield {"kind": kind, "texts": [*map(_paragraph, block.texts)]}
    else:
        yield _table(block)


def _table(table: Table) -> dict[str, Any]:
    lefts = [heading.startswith("<") for heading in table.columns]
    # A word that was cut for a narrow column is whole again.
    headings = [clean_lines(name.removeprefix("<").replace("-\n", "")).replace("\n", " ") for name in table.columns]
    rows = [
        {"breaks": index in table.breaks, "cells": [*map(_cell, row, lefts)]}
        for index, row in enumerate([*table.rows, *table.beyond])
    ]
    return {
        "kind": "table",
        "title": clean(table.title),
        "columns": list(zip(headings, lefts, strict=True)),
        "rows": rows,
        "together": table.together,
        "notes": [clean(note) for note in table.notes[bool(table.beyond) :]],
    }


class PageText(NamedTuple):
    """A cell or a sentence: its text, its classes, and the section that it (a sentence: its first words) leads to."""

    text: "str | Markup"
    look: str
    link: str | None = None


def _paragraph(text: str) -> PageText:
    """A sentence; one that begins with a space says more of the one before it."""
    text = clean(text)
    said = text.strip()
    look = BAD if said.startswith("NOT ") else FAINT if said.startswith("caution") else ""
    return PageText(said, f"{'more' * text.startswith(' ')} {look}".strip())


def _cell(cell: str, is_left: bool) -> PageText:
    text, left = clean_lines(cell), "left" * is_left
    look = f"{left} {LOOKS.get(text.strip(), '')}".strip()
    if not is_left or max(map(len, text.split("\n"))) <= LONG_LINE:
        return PageText(text, look)
    # An arrow would be broken after its dash.
    from markupsafe import Markup, escape

    whole = Markup("<span>{}</span><wbr>")
    parts = enumerate(_BREAK_AFTER.split(text))
    return PageText(
        Markup("").join(whole.format(part) if at % 2 else escape(part) for at, part in parts), f"{look} long"
    )


@cache
def _template(name: str) -> "Template":
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(name)


def _raw(text: str) -> "Markup":
    from markupsafe import Markup

    return Markup(text)


def _hash(script: str) -> str:
    """What the page's security policy calls this script, and lets nobody else's run."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
