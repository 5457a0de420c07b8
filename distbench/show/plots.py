"""The style of plots (colours for colour-blind readers, units on axes), hover texts, and saving without a screen."""

import contextlib
import io
import math
import os
import re
import textwrap
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from distbench.show.units import brief_time_text, size_text
from distbench.spec.file_io import write_whole, writing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray


# Okabe and Ito's palette, which is distinguishable with all common colour deficiencies.
BLUE, SKY, GREEN, ORANGE = "#0072B2", "#56B4E9", "#009E73", "#E69F00"
RED, PURPLE, BLACK = "#D55E00", "#CC79A7", "#000000"
GREY, LIGHT = "#8C8C8C", "#D0D0D0"
GRID, NOTE, WAITING = "#E6E6E6", "#606060", "#DDDDDD"
CYCLE = (BLUE, RED, GREEN, PURPLE, ORANGE, SKY, BLACK)
SETTINGS: Any = {
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": GREY,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "legend.frameon": False,
    # Text is stored as text, including $ in names, and the same data has the same file.
    "text.parse_math": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "distbench",
}
DPI = 150
LABEL_LINE, LABEL_WIDTH = 0.0425, 34  # share of the axes' height per line; characters


def new_figure(
    num_panels: int, width: float, height: float, share: bool = True, num_rows: int = 1
) -> "tuple[Figure, list[Axes]]":
    """A figure with rows of panels with a common y axis, on the file-only Agg canvas, with sizes in inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(num_rows, num_panels, squeeze=False, sharey=share)
    return figure, list(axes.flat)


def panels(
    number: int, per_row: int, panel: tuple[float, float], more: tuple[float, float], share: bool = True
) -> "tuple[Figure, list[Axes]]":
    """A figure with `per_row` panels side by side, with (width, height) of a panel and of the margin in inches."""
    num_columns, num_rows = min(number, per_row), -(-number // per_row)
    width, height = more[0] + panel[0] * num_columns, more[1] + panel[1] * num_rows
    figure, axes = new_figure(num_columns, width, height, share, num_rows)
    for unused in axes[number:]:
        unused.set_axis_off()
    return figure, axes[:number]


@contextlib.contextmanager
def styled() -> Iterator[None]:
    """Apply distbench's style to figures that are created and saved inside."""
    # Only files are drawn. The import of matplotlib would fail for an unknown value of this variable.
    os.environ["MPLBACKEND"] = "agg"
    import matplotlib as mpl

    with mpl.rc_context(SETTINGS), warnings.catch_warnings():
        # A name may have any character. A character that is missing in the font is a box, without a warning.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font", category=UserWarning)
        yield


def save(figure: "Figure", folder: Path, name: str) -> list[Path]:
    """Write name.png and name.svg, and return the paths."""
    paths = [folder / f"{name}.png", folder / f"{name}.svg"]
    for path in paths:
        save_figure(figure, path)
    return paths


def save_figure(figure: "Figure", path: Path) -> None:
    """Write a figure atomically as .png or .svg. The same figure has the same file. Raise OSError if the file cannot be
    written."""
    buffer, form = io.BytesIO(), path.suffix[1:]
    metadata: dict[str, Any] = {"Software": None} if form == "png" else {"Date": None}
    figure.savefig(buffer, format=form, dpi=DPI, metadata=metadata)
    write_whole(path, buffer.getvalue())


def draw(figures: "Iterable[tuple[str, Figure]]", folder: Path) -> list[Path]:
    """Save every figure under its name in distbench's style, and return the files."""
    with writing(f"plots folder {folder}", "folder"), styled():
        folder.mkdir(parents=True, exist_ok=True)
        names = ((re.sub(r"[^A-Za-z0-9._-]+", "-", name), figure) for name, figure in figures)
        return [path for name, figure in names for path in save(figure, folder, name)]


def title(figure: "Figure", text: str) -> None:
    """Set a figure's title, above all panels."""
    figure.suptitle(text, x=0.01, ha="left", fontweight="bold")


def caption(figure: "Figure", text: str) -> None:
    """Add a small line below a figure."""
    figure.supxlabel(text, x=0.01, ha="left", fontsize=8.5, color=NOTE)


def label_axis(axis: Any, text: Callable[[float], str]) -> None:
    """Set labels of major ticks by a function of the tick's value, and no labels of minor ticks."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    axis.set_major_formatter(FuncFormatter(lambda value, _: text(value)))
    axis.set_minor_formatter(NullFormatter())


def size_ticks(axes: "Axes", sizes: Sequence[float]) -> None:
    """Set a log-2 x axis of bytes, with at most seven ticks, such as 1 KiB, 16 KiB, 256 KiB."""
    low, high = math.log2(min(sizes)), math.log2(max(sizes))
    step = max(2 * math.ceil((high - low) / 12), 2)
    first = math.ceil(low / 2) * 2
    ticks = [2.0**power for power in range(first, math.floor(high) + 1, step)] or [min(sizes)]
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [size_text(tick) for tick in ticks])
    axes.set_xticks([], minor=True)


def _time_axis(axis: Any, low: float, high: float, max_ticks: int = 8) -> None:
    """Set a log axis of seconds with ticks at 1, 2 and 5, or with fewer ticks to keep at most `max_ticks`."""
    from matplotlib.ticker import FixedLocator, NullLocator

    axis.axes.set(**{f"{axis.axis_name}scale": "log"})
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in ((1, 2, 5), (1, 3), (1,)):
        ticks = [factor * 10.0**power for power in powers for factor in factors if low <= factor * 10.0**power <= high]
        if len(ticks) <= max_ticks:
            break
    axis.set_major_locator(FixedLocator(ticks))
    axis.set_minor_locator(NullLocator())
    label_axis(axis, time_tick)


def square_time_axes(axes: "Axes", low: float, high: float, max_ticks: int = 8) -> None:
    """Make both axes logarithmic from `low` to `high` seconds, with the same ticks."""
    for axis in (axes.xaxis, axes.yaxis):
        _time_axis(axis, low, high, max_ticks)
    axes.set_xlim(low, high)
    axes.set_ylim(low, high)


def time_tick(seconds: float) -> str:
    """A short text for a tick, such as `100 us`, `5 ms` or `0.5 s`."""
    text = brief_time_text(seconds)
    number, _, unit = text.partition(" ")
    return f"{float(number):g} {unit}" if unit else text


def label_ends(axes: "Axes", ends: Mapping[str, float], colors: Mapping[str, str]) -> None:
    """Add each line's name at the right edge, near the line's end, without overlaps.

    The y axis must be logarithmic, with limits. `ends` are the y of each line's last point.
    """
    low, high = axes.get_ylim()
    places = spread([math.log10(value) for value in ends.values()], [math.log10(high / low) * 0.055] * len(ends))
    for name, place in zip(ends, places, strict=True):
        axes.annotate(
            name, (1.02, 10**place), xycoords=("axes fraction", "data"), color=colors.get(name, BLACK), va="center",
            annotation_clip=False,
        )  # fmt: skip


FAR = 2.0


def reach(values: "Sequence[float] | NDArray[np.float64]") -> float:
    """Return the end of an axis from 0, which is the largest value, or FAR times the upper quartile if that is less. A
    plot marks larger values at the edge, so that other values remain readable."""
    return min(float(np.max(values)), FAR * float(np.quantile(values, 0.75)))


def name_end(axes: "Axes", end: tuple[float, float], text: str, is_beyond: bool = False) -> None:
    """Add a text right of the end of a bar or interval, with an arrow if the value is beyond the axis."""
    if is_beyond:
        axes.scatter(*end, marker=">", s=60, color=BLACK, zorder=3, clip_on=False)
    axes.annotate(text, end, xytext=(9 if is_beyond else 6, 0), textcoords="offset points", va="center")


def label_points(axes: "Axes", points: Mapping[str, tuple[float, float]]) -> None:
    """Add names of points in a column right of the axes, with a line from each point to its name. Limits must be
    set."""
    to_fraction = axes.transData + axes.transAxes.inverted()
    heights = [float(to_fraction.transform(point)[1]) for point in points.values()]
    texts = [textwrap.fill(re.sub(",(?! )", ", ", text), LABEL_WIDTH) for text in points]
    sizes = [LABEL_LINE * (1.5 + text.count("\n")) for text in texts]
    for text, point, height in zip(texts, points.values(), spread(heights, sizes), strict=True):
        axes.annotate(
            text, point, (1.03, height), "data", "axes fraction",
            {"arrowstyle": "-", "color": GREY, "linewidth": 0.5, "shrinkB": 4}, annotation_clip=False, fontsize=8.5,
            va="center",
        )  # fmt: skip


def name_bars(axes: "Axes", names: Sequence[str]) -> None:
    """Add names of horizontal bars on the left, first bar on top, and a grid."""
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=True, axis="x")


def spread(values: Sequence[float], sizes: Sequence[float]) -> list[float]:
    """Return values in the same order, moved as little as possible so that labels of these sizes do not overlap."""
    from scipy.optimize import isotonic_regression

    order = np.argsort(values, kind="stable")
    ordered = np.asarray(sizes)[order]
    offsets = np.cumsum(ordered) - ordered / 2
    placed = np.empty(len(values))
    placed[order] = isotonic_regression(np.asarray(values)[order] - offsets).x + offsets
    return placed.tolist()


# Hover texts of figures, which are only for pages.
_SPOTS: "WeakKeyDictionary[Axes, list[Spot]]" = WeakKeyDictionary()


class Spot(NamedTuple):
    """A point, or a bar from its lower left corner, with places and sizes in data coordinates of the axes."""

    x: float
    y: float
    text: str  # may have several lines
    width: float = 0.0
    height: float = 0.0


def hover(axes: "Axes", spots: Iterable[Spot]) -> None:
    """Add hover texts to the axes."""
    _SPOTS.setdefault(axes, []).extend(spots)


_ZOOMED: "WeakKeyDictionary[Figure, Axes]" = WeakKeyDictionary()


def zoomable(figure: "Figure", axes: "Axes") -> None:
    """Make the x axis of a figure zoomable on a page. All panels have the limits of `axes`."""
    _ZOOMED[figure] = axes


def zoom_range(figure: "Figure") -> tuple[float, float, float, float] | None:
    """Begin and end of the zoomable axis, in points from the figure's left edge, and the values at both ends."""
    axes = _ZOOMED.get(figure)
    if axes is None:
        return None
    width, (low, high) = figure.get_size_inches()[0] * 72, axes.get_xlim()
    place = axes.get_position()
    return place.x0 * width, place.x1 * width, low, high


def placed_spots(figure: "Figure") -> Iterator[Spot]:
    """Yield every spot of a drawn figure with a finite place, in points (1/72 inch) from the upper left corner, in the
    order of axes."""
    to_figure, (width, height) = figure.transFigure.inverted(), figure.get_size_inches() * 72
    for axes in figure.axes:
        to_points = axes.transData + to_figure
        for spot in _SPOTS.get(axes, ()):
            corners = [(spot.x, spot.y), (spot.x + spot.width, spot.y + spot.height)]
            with np.errstate(divide="ignore", invalid="ignore"):
                across, up = to_points.transform(corners).T
            if np.isfinite([*across, *up]).all():
                left, bottom = float(across.min()) * width, float(up.min()) * height
                size = float(np.ptp(across)) * width, float(np.ptp(up)) * height
                yield Spot(left, height - bottom - size[1], spot.text, *size)
