"""A figure as an <svg> element of a page: its colours are the page's, light or dark, and it answers to the pointer."""

import html
import io
import re
from typing import TYPE_CHECKING

from distbench.render import plot_style as style
from distbench.render.hover import PlacedSpot, placed_spots
from distbench.spec.printable import clean, cut

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Colour of a plot to the page's variable of that name, which has a dark value too; other colours stay.
COLORS = {
    style.BLUE: "blue",
    style.SKY: "sky",
    style.GREEN: "green",
    style.ORANGE: "orange",
    style.RED: "red",
    style.PURPLE: "purple",
    style.BLACK: "ink",
    style.GREY: "grey",
    style.LIGHT: "light",
    style.GRID: "grid",
    style.NOTE: "soft",
    style.WAITING: "light",
    "#ffffff": "paper",
}
VARIABLES = {color.lower(): f"var(--{name})" for color, name in COLORS.items()}
DOT_RADIUS = 6.0
# The narrowest bar that a pointer still finds, points.
MIN_BAR = 2.0
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ufffe\uffff]")
_PATHS = re.compile(r'\b(?:d|x|y|transform|points)="[^"]*"')


def svg_of(figure: "Figure", prefix: str) -> str:
    """The figure with its spots; ids begin with `prefix`, so that several can stand in one page."""
    import matplotlib as mpl

    written = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none"}):
        figure.savefig(written, format="svg", metadata={"Date": None}, transparent=True)
    text = written.getvalue()
    text = text[text.index("<svg") :]
    for unneeded in (r"<metadata>.*?</metadata>", r"<!--.*?-->", r"<style .*?</style>"):
        text = re.sub(unneeded, "", text, flags=re.DOTALL)
    text = re.sub(r'(\bid="|url\(#|xlink:href="#)', rf"\1{prefix}", text)
    text = re.sub(r"(?<=: )#[0-9a-f]{6}\b", lambda color: VARIABLES.get(color[0], color[0]), text)
    # The page's own font: nobody has to have ours.
    text = re.sub(r"'DejaVu Sans'[^;\"]*", "var(--font)", text)
    # A hundredth of a point is less than anybody sees, and a third of the file.
    text = _PATHS.sub(lambda found: re.sub(r"(\.\d\d)\d+", r"\1", found[0]), text)
    text = re.sub(r"\s*\n\s*", " ", text)
    width, height = figure.get_size_inches() * 72
    opening = f'<svg class="plot" role="img" aria-label="{_attribute(figure.get_suptitle() or "figure")}"'
    opening += f' viewBox="0 0 {width:.1f} {height:.1f}" style="--width:{width:.0f}px">'
    body = text[text.index(">", text.index("<svg")) + 1 : text.rindex("</svg>")]
    return _UNPRINTABLE.sub(" ", f"{opening}{body}<g>{''.join(map(_spot, placed_spots(figure)))}</g></svg>")


def _spot(spot: PlacedSpot) -> str:
    said = "\n".join(map(clean, cut(spot.text).split("\n")))
    title = f"<title>{html.escape(said)}</title>"
    if not spot.width and not spot.height:
        return f'<circle class="spot" cx="{spot.x:.1f}" cy="{spot.y:.1f}" r="{DOT_RADIUS:g}">{title}</circle>'
    size = f'width="{max(spot.width, MIN_BAR):.1f}" height="{max(spot.height, MIN_BAR):.1f}"'
    return f'<rect class="spot" x="{spot.x:.1f}" y="{spot.y:.1f}" {size}>{title}</rect>'


def _attribute(text: str) -> str:
    return html.escape(clean(text))
