"""What a plot says where a reader points at it: texts beside an axes' points and bars, shown on a page alone."""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# A figure's own files (PNG, SVG) have no use for them, and matplotlib's artists no place.
_SPOTS: "WeakKeyDictionary[Axes, list[Spot]]" = WeakKeyDictionary()
POINTS_PER_INCH = 72


class Spot(NamedTuple):
    """A point, or a bar from its lower left corner: places and sizes are the axes' own data."""

    x: float
    y: float
    text: str  # may hold several lines
    width: float = 0.0
    height: float = 0.0


class PlacedSpot(NamedTuple):
    """A spot on the drawn figure, in points (1/72 inch) from its upper left corner; a point has no size."""

    x: float
    y: float
    text: str
    width: float
    height: float


def hover(axes: "Axes", spots: Iterable[Spot]) -> None:
    """Say these texts where the axes' data are pointed at."""
    _SPOTS.setdefault(axes, []).extend(spots)


def placed_spots(figure: "Figure") -> Iterator[PlacedSpot]:
    """Every spot of a figure that was drawn, in the order of its axes; what lies at no finite place is left out."""
    for axes in figure.axes:
        spots = _SPOTS.get(axes, ())
        to_points = axes.transData + figure.transFigure.inverted()
        width, height = figure.get_size_inches() * POINTS_PER_INCH
        for spot in spots:
            corners = [(spot.x, spot.y), (spot.x + spot.width, spot.y + spot.height)]
            with np.errstate(divide="ignore", invalid="ignore"):
                across, up = to_points.transform(corners).T
            if np.isfinite([*across, *up]).all():
                left, bottom = float(across.min()) * width, float(up.min()) * height
                size = float(np.ptp(across)) * width, float(np.ptp(up)) * height
                yield PlacedSpot(left, height - bottom - size[1], spot.text, *size)
