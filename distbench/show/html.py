"""The report as one self-contained HTML page, figures as SVG in the page's colours."""

import base64
import hashlib
import html
import io
import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from distbench.show import plots as style
from distbench.show.blocks import Block, Heading, Lines, clean_lines
from distbench.show.plots import Spot, placed_spots, zoom_range
from distbench.spec.printable_text import clean, cut

if TYPE_CHECKING:
    from markupsafe import Markup
    from matplotlib.figure import Figure


# Colour of a plot to the page's variable, which also has a dark value. Other colours are unchanged.
VARIABLES = {
    color.lower(): f"var(--{name})"
    for color, name in {
        **{style.BLUE: "blue", style.SKY: "sky", style.GREEN: "green", style.ORANGE: "orange", style.RED: "red"},
        **{style.PURPLE: "purple", style.BLACK: "ink", style.GREY: "grey", style.LIGHT: "light", style.GRID: "grid"},
        **{style.NOTE: "soft", style.WAITING: "light", "#ffffff": "paper"},
    }.items()
}
DOT_RADIUS = 6.0
MIN_BAR = 0.1  # points, because a browser does not draw a bar of width 0
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ufffe\uffff]")
_PATHS = re.compile(r'\b(?:d|x|y|transform|points)="[^"]*"')


def svg_of(figure: "Figure", prefix: str) -> str:
    """The figure with hover texts as SVG. Ids begin with `prefix`, so that ids of several figures on a page differ."""
    import matplotlib as mpl

    buffer = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None}, transparent=True)
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    for unneeded in (r"<metadata>.*?</metadata>", r"<!--.*?-->", r"<style .*?</style>"):
        text = re.sub(unneeded, "", text, flags=re.DOTALL)
    text = re.sub(r'(\bid="|url\(#|xlink:href="#)', rf"\1{prefix}", text)
    text = re.sub(r"(?<=: )#[0-9a-f]{6}\b", lambda color: VARIABLES.get(color[0], color[0]), text)
    # The page's font, because a reader may not have matplotlib's font.
    text = re.sub(r"'DejaVu Sans'[^;\"]*", "var(--font)", text)
    # Digits beyond a hundredth of a point would be a third of the file.
    text = _PATHS.sub(lambda match: re.sub(r"(\.\d\d)\d+", r"\1", match[0]), text)
    text = re.sub(r"\s*\n\s*", " ", text)
    width, height = figure.get_size_inches() * 72
    opening = f'<svg class="plot" role="img" aria-label="{html.escape(clean(figure.get_suptitle() or "figure"))}"'
    opening += f' viewBox="0 0 {width:.1f} {height:.1f}" style="--width:{width:.0f}px"'
    opening += f' data-zoom="{" ".join(f"{end:.6g}" for end in zoom)}">' if (zoom := zoom_range(figure)) else ">"
    body = text[text.index(">", text.index("<svg")) + 1 : text.rindex("</svg>")]
    return _UNPRINTABLE.sub(
        " ", f'{opening}{body}<g class="spots">{"".join(map(_spot, placed_spots(figure)))}</g></svg>'
    )


def _spot(spot: Spot) -> str:
    text = "\n".join(map(clean, cut(spot.text).split("\n")))
    title = f"<title>{html.escape(text)}</title>"
    if not spot.width and not spot.height:
        return f'<circle class="spot" cx="{spot.x:.1f}" cy="{spot.y:.1f}" r="{DOT_RADIUS:g}">{title}</circle>'
    size = f'width="{max(spot.width, MIN_BAR):.2f}" height="{max(spot.height, MIN_BAR):.1f}"'
    return f'<rect class="spot" x="{spot.x:.2f}" y="{spot.y:.1f}" {size}>{title}</rect>'


TEMPLATES = Path(__file__).parent / "templates"
# The page's two scripts, before the first and after the last element, each from one or several files.
SCRIPTS = (("early",), ("common", "tables", "picker", "trends", "plots", "page"))
# CSS classes of words in tables.
GOOD, BAD, FAINT = "good", "bad", "faint"
LOOKS = {
    **dict.fromkeys(("ok", "faster", "complete"), GOOD),
    **dict.fromkeys(("slower", "wrong", "raised", "aborted", "timeout", "interrupted", "failed"), BAD),
    **dict.fromkeys(("-", "within noise", "same path", "too few passes", "skipped", "unsupported", "baseline"), FAINT),
}
# Separators at which a text that is too long for a column may be broken.
_BREAK_AFTER = re.compile(r"(->|[,/=])(?=[^\s])")
LONG_LINE = 28
MAX_ID = 80
OWN_IDS = ("entries", "contents", "fold", "theme", "tip")  # of the page's controls


class Verdict(Lines):
    """Prominent lines with the page's result."""


@dataclass(frozen=True)
class SectionHeading(Heading):
    """A heading with a short text on failures in the section, which the table of contents also shows."""

    mark: str = ""


@dataclass(frozen=True)
class Picture:
    """A figure on a page, which is drawn with the page."""

    figure: "Figure"


@dataclass(frozen=True)
class Tiles:
    """Numbers at the top of a page, each with a word and a style: GOOD, BAD, FAINT or ""."""

    tiles: tuple[tuple[str, str, str], ...]  # (number, word, style)


@dataclass(frozen=True)
class Picker:
    """A comparison of two items, which the reader selects.

    Args:
        items: names to choose from, such as variants.
        rows: names of the times of each item.
        medians_s: median per item and row in seconds, None if missing.
        pairs: (item, reference item) to ratio of times, interval and verdict.
        otherwise: the sentence for a pair without a comparison.
    """

    title: str
    items: tuple[str, ...]
    rows: tuple[str, ...]
    medians_s: tuple[tuple[float | None, ...], ...]
    pairs: dict[tuple[int, int], tuple[float, float, float, str]]
    otherwise: str

    @property
    def data(self) -> str:
        """The input of the page's script as JSON, with four significant digits."""

        def brief(number: float | None) -> float | None:
            return float(f"{number:.4g}") if number is not None and math.isfinite(number) else None

        pairs = {
            f"{item},{other}": [*map(brief, numbers), verdict]
            for (item, other), (*numbers, verdict) in self.pairs.items()
        }
        medians = [[*map(brief, of_item)] for of_item in self.medians_s]
        texts = {"items": [*map(clean, self.items)], "rows": [*map(clean, self.rows)], "otherwise": self.otherwise}
        return json.dumps({**texts, "medians": medians, "pairs": pairs}, separators=(",", ":"))


@dataclass(frozen=True)
class Download:
    """A file in the page, with a sentence on its use."""

    name: str
    content: bytes
    media_type: str
    use: str

    @property
    def address(self) -> str:
        """The file as a `data:` URL, which can be saved without network or script."""
        return f"data:{self.media_type};base64,{base64.b64encode(self.content).decode()}"


@dataclass(frozen=True)
class Trends:
    """Plots of series over launches, which the page's script draws.

    Args:
        data: JSON for the script `trends.js`, from `report/site.py`.
    """

    title: str
    data: str


PageBlock = Block | Picture | Tiles | Picker | Download | Trends


@dataclass
class PageSection:
    """One section of the page, with (number, block) for each block."""

    title: str
    mark: str = ""
    blocks: list[tuple[int, PageBlock]] = field(default_factory=list)
    id: str = ""


def page_of(title: str, blocks: Sequence[PageBlock], pages: Mapping[str, str] | None = None) -> str:
    """The whole page as HTML. `title` is the title of the browser's tab.

    The first heading of level 1 is the page's heading. Every other heading of level 1 or 2 begins a section.

    Args:
        pages: addresses of other pages, to which cells with these texts are links.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    sections, heading = _sections(title, blocks)
    unused = {"trends"} if not any(isinstance(block, Trends) for block in blocks) else set[str]()
    scripts = [
        "".join((TEMPLATES / f"{name}.js").read_text(encoding="utf-8") for name in names if name not in unused)
        for names in SCRIPTS
    ]
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    environment.filters |= {"clean": clean, "clean_lines": clean_lines}
    environment.filters |= {"column_name": _column_name, "breakable": _breakable}
    environment.globals |= {"cell_look": _cell_look, "line_look": _line_look, "severity": _severity}
    environment.globals["picture"] = lambda block, number: Markup(svg_of(block.figure, f"f{number}-"))
    # The page's security policy allows only these scripts.
    digests = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    return environment.get_template("page.html").render(
        title=title,
        heading=heading,
        sections=sections,
        # Titles of sections in the first and last section are links.
        links={section.title: f"#{section.id}" for section in sections[1:]},
        pages=pages or {},
        style=Markup(environment.get_template("page.css").render()),
        scripts=[*map(Markup, scripts)],
        hashes=Markup(" ".join(f"'sha256-{digest}'" for digest in digests)),
    )


def _sections(title: str, blocks: Sequence[PageBlock]) -> tuple[list[PageSection], str]:
    first = next((block for block in blocks if isinstance(block, Heading) and block.level == 1), None)
    sections = [PageSection("Summary")]
    for number, block in enumerate(blocks):
        if block is first:
            continue
        if isinstance(block, Heading) and block.level <= 2:
            mark = clean(block.mark) if isinstance(block, SectionHeading) else ""
            sections.append(PageSection(clean(block.text), mark))
        elif not isinstance(block, Lines) or block.texts:
            sections[-1].blocks.append((number, block))
    sections = sections if sections[0].blocks else sections[1:]
    taken = {*OWN_IDS}
    for section in sections:
        # The id is the same on every page with this section, so that links remain valid.
        section.id = name = re.sub(r"\W+", "-", section.title.lower()).strip("-")[:MAX_ID] or "section"
        for number in itertools.count(2):
            if section.id not in taken:
                break
            section.id = f"{name}-{number}"
        taken.add(section.id)
    return sections, first.text if first else title


def _column_name(heading: str) -> str:
    # Join words that were split for a narrow column.
    return clean_lines(heading.removeprefix("<").replace("-\n", "")).replace("\n", " ")


def _severity(texts: Sequence[str]) -> str:
    """The severity before the first colon in lower case, such as `pass`, or "" without a severity."""
    word = texts[0].partition(":")[0] if texts else ""
    return word.lower() if word in ("PASS", "FAIL", "INCONCLUSIVE", "UNKNOWN") else ""


def _line_look(text: str) -> str:
    """CSS classes of a sentence. A sentence that begins with a space continues the previous sentence."""
    look = BAD if text.strip().startswith("NOT ") else FAINT if text.strip().startswith("warning") else ""
    return f"{'more' * text.startswith(' ')} {look}".strip()


def _is_long(cell: str, is_left: bool) -> bool:
    return is_left and max(map(len, cell.split("\n"))) > LONG_LINE


def _cell_look(cell: str, is_left: bool) -> str:
    looks = ("left" * is_left, LOOKS.get(cell.strip(), ""), "long" * _is_long(cell, is_left))
    return " ".join(filter(None, looks))


def _breakable(cell: str, is_left: bool) -> "Markup | str":
    """A cell's text, with possible line breaks after separators if the text is long."""
    from markupsafe import Markup, escape

    if not _is_long(cell, is_left):
        return cell
    # Spans prevent a break in an arrow after the dash.
    span = Markup("<span>{}</span><wbr>")
    parts = enumerate(_BREAK_AFTER.split(cell))
    return Markup("").join(span.format(part) if at % 2 else escape(part) for at, part in parts)
