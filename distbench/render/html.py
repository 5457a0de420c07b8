"""The report as one HTML page: no network, styles and figures within. Blocks and figures in, text out."""

import html
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from distbench.render.blocks import Block, Code, Heading, Lines, Table, clean_lines
from distbench.spec.printable import clean

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", sans-serif; color: #1c1c1c;
  background: #fff; max-width: 62rem; margin: 2.2rem auto 4rem; padding: 0 1.2rem; }
h1 { font-size: 1.65rem; line-height: 1.25; margin: 0 0 1rem; }
h2 { font-size: 1.2rem; margin: 2.8rem 0 .6rem; padding-top: 1rem; border-top: 1px solid #ddd; }
p { margin: .45rem 0; overflow-wrap: anywhere; }
.verdict { background: #f2f7fb; border-left: 5px solid #0072b2; padding: .7rem 1.1rem; margin: 1rem 0 1.6rem; }
.verdict p:first-child { font-size: 1.14rem; font-weight: 600; }
figure { margin: 1.7rem 0; }
figure svg { width: 100%; height: auto; display: block; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .86rem; font-variant-numeric: tabular-nums; }
.title { font-weight: 600; }
th { font-weight: 600; color: #555; vertical-align: bottom; border-bottom: 1.5px solid #888; }
th, td { text-align: right; padding: .24rem .95rem .24rem 0; white-space: pre-line; vertical-align: top; }
th.left, td.left { text-align: left; overflow-wrap: anywhere; }
tr.break td { border-top: 1px solid #ddd; }
tbody tr:hover { background: #f6f6f6; }
.note { color: #666; font-size: .84rem; margin: .15rem 0; }
pre { background: #f5f5f3; border: 1px solid #e2e2de; padding: .8rem 1rem; overflow-x: auto; font-size: .9rem; }
@media print { body { max-width: none; margin: 0; } }
"""


def page_of(title: str, blocks: Sequence["Block | Verdict | Picture"]) -> str:
    """The whole page; the title is for the browser's tab."""
    body = "\n".join(filter(None, (_html(block, number) for number, block in enumerate(blocks))))
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    return (
        f'<!doctype html>\n<html lang="en">\n<head>{head}\n<title>{_text(title)}</title>\n'
        f"<style>{STYLE}</style>\n</head>\n"
        f"<body>\n{body}\n</body>\n</html>\n"
    )


class Verdict(Lines):
    """Lines that stand out: what the page is for."""


@dataclass(frozen=True)
class Picture:
    """A figure on a page, drawn when the page is written."""

    figure: "Figure"


def _html(block: "Block | Picture", number: int) -> str:
    if isinstance(block, Picture):
        return f"<figure>{svg_of(block.figure, f'f{number}-')}</figure>"
    if isinstance(block, Heading):
        return f"<h{block.level}>{_text(block.text)}</h{block.level}>"
    if isinstance(block, Code):
        return "<pre><code>" + "\n".join(map(_text, block.lines)) + "</code></pre>"
    if isinstance(block, Lines):
        paragraphs = "\n".join(f"<p>{_text(text)}</p>" for text in block.texts)
        return f'<div class="verdict">{paragraphs}</div>' if isinstance(block, Verdict) else paragraphs
    return _table(block)


def _table(table: Table) -> str:
    lefts = [' class="left"' if heading.startswith("<") else "" for heading in table.columns]
    headings = "".join(
        f"<th{left}>{html.escape(clean_lines(heading.removeprefix('<')))}</th>"
        for heading, left in zip(table.columns, lefts, strict=True)
    )
    rows = []
    for index, row in enumerate(table.rows):
        cells = "".join(
            f"<td{left}>{html.escape(clean_lines(cell))}</td>" for cell, left in zip(row, lefts, strict=True)
        )
        rows.append(f"<tr{' class=break' if index in table.breaks else ''}>{cells}</tr>")
    notes = "".join(f'<p class="note">{_text(note)}</p>' for note in table.notes)
    return (
        f'<figure><p class="title">{_text(table.title)}</p><div class="scroll"><table>'
        f"<thead><tr>{headings}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>{notes}</figure>"
    )


def _text(text: str) -> str:
    return html.escape(clean(text))


def svg_of(figure: "Figure", prefix: str) -> str:
    """The figure as an <svg> element that can stand in a page: text as outlines, ids that begin with `prefix`."""
    import matplotlib as mpl

    written = io.StringIO()
    # The reader may have none of our fonts: outlines keep labels where they were put.
    with mpl.rc_context({"svg.fonttype": "path"}):
        figure.savefig(written, format="svg", metadata={"Date": None})
    text = written.getvalue()
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", text[text.index("<svg") :], flags=re.DOTALL)
    svg = re.sub(r'(\bid="|url\(#|xlink:href="#)', rf"\1{prefix}", svg)
    label = _text(figure.get_suptitle() or "figure")
    return svg.replace("<svg", f'<svg role="img" aria-label="{label}"', 1)
