"""How a report leaves: text, Markdown, CSV or JSON on standard output; a page and plots in files."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from distbench.render.blocks import Block, Lines, shown
from distbench.render.data_text import data_text
from distbench.render.html import page_of
from distbench.render.plot_style import styled
from distbench.report.contents import Contents
from distbench.report.sections import page_blocks
from distbench.spec.errors import UserError

if TYPE_CHECKING:
    import pandas as pd

DATA_FORMS = ("csv", "json")
FORMS = ("table", "markdown", *DATA_FORMS)


class Rendered(NamedTuple):
    """What to print, and sentences on what was left out or written, for standard error."""

    text: str
    warnings: list[str]


def rendered(
    form: str,
    data: Callable[[], "pd.DataFrame"],
    blocks: Callable[[], Sequence[Block]],
    warnings: Sequence[str],
    plots: Sequence[Path] = (),
    messages: Sequence[str] = (),
) -> Rendered:
    """A report in one of FORMS: `data` for DATA_FORMS, `blocks` for the others.

    Args:
        warnings: sentences about what was left out.
        plots: files that were drawn.
        messages: sentences about other files.
    """
    if form in DATA_FORMS:
        # Standard output is data here.
        named = [f"plot written: {path}" for path in plots]
        return Rendered(data_text(data(), form), [*warnings, *named, *messages])
    # The folder apart from the names: a whole path may be longer than a line.
    names = (f"plots written to {plots[0].parent}:", *(f"  {path.name}" for path in plots)) if plots else ()
    return Rendered(shown([*blocks(), Lines(names)], form), [*warnings, *messages])


def write_page(page: Path, contents: Contents) -> str:
    """Write the page; a sentence that says so.

    Raises:
        UserError: it cannot be written.
    """
    with styled():
        blocks, title = page_blocks(contents)
        text = page_of(title, blocks)
    try:
        page.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--page {page} cannot be written ({error.strerror}); give another file") from error
    return f"page written: {page}"
