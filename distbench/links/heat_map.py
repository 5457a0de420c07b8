"""A picture of the links: how much longer than its like each pair takes, rank by rank and host by host."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np

from distbench.links.effects import HOST, RANK
from distbench.links.link_measurements import BANDWIDTH, LATENCY, LinkRun, link_run_of
from distbench.links.link_text import MAX_MATRIX, SLOW_IN, name_of, pair_values, slow_pairs
from distbench.links.outliers import LinkVerdict, verdict_of
from distbench.render import plot_style as style
from distbench.render.hover import Spot, hover
from distbench.render.units import brief_time_text, decimals_for
from distbench.runs.run_file import Run
from distbench.spec.printable import count_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Of seconds or GB/s: what a unit is called, and how many of it there are.
UNITS = {BANDWIDTH: (("GB/s", 1.0), ("MB/s", 1e3)), LATENCY: (("ms", 1e3), ("\u00b5s", 1e6))}
WHAT = {BANDWIDTH: "Large messages: algbw each way", LATENCY: "Small messages: time each way"}
# Times as long as its like: where colour begins, and where it is full.
PALEST, DARKEST = 1.0, 3.0
PALE = 0.4  # how opaque the colour of what is not named is
MAX_HOSTS = 16  # whose names fit beside an axis


def link_figures(run: Run) -> "Iterator[tuple[str, Figure]]":
    """(name, figure) of a run's links; nothing where it measured none."""
    links = link_run_of(run)
    if links is None:
        return
    shown = [quantity for quantity in (BANDWIDTH, LATENCY) if pair_values(links, quantity)]
    if not shown:
        return
    verdict = verdict_of(links)
    side = min(2.6 + 0.46 * len(links.hosts), 9.0)
    figure, axes = style.new_figure(len(shown), 1.6 + side * len(shown), side + 1.5, share=False)
    for panel, quantity in zip(axes, shown, strict=True):
        image = _panel(panel, links, verdict, quantity)
    bar = figure.colorbar(image, ax=axes, shrink=0.7, pad=0.02, extend="max")
    ticks = (1, 1.5, 2, 3)
    bar.set_ticks(np.log(ticks).tolist(), labels=[f"{tick:g}x" for tick in ticks])
    bar.set_label("time over that of its like")
    bar.outline.set_visible(False)  # type: ignore[operator]
    style.title(figure, f"{run.scenario}: {verdict.why_not or _found(verdict, links)}")
    style.caption(
        figure,
        (
            f"numbers: medians of {count_text(verdict.num_passes, 'pass', 'passes')}; framed: surely "
            "slower than its like; pale: may be chance"
        ),
    )
    yield "links", figure


def _found(verdict: LinkVerdict, links: LinkRun) -> str:
    """`slow: rank 5 (on b), 2.0 times as long in large messages`; of several, the names."""
    slow = verdict.outliers
    if not slow:
        return "no rank or link stands out"
    if len(slow) == 1:
        return f"slow: {name_of(slow[0], links)}, {slow[0].slowdown:.2g} times as long in {SLOW_IN[slow[0].quantity]}"
    return f"slow: {', '.join(dict.fromkeys(name_of(one, links) for one in slow))}"


def _panel(axes: "Axes", links: LinkRun, verdict: LinkVerdict, quantity: str) -> Any:
    from matplotlib.colors import LinearSegmentedColormap

    count, pairs = len(links.hosts), pair_values(links, quantity)
    slow = LinearSegmentedColormap.from_list("slow", ["#FFFFFF", style.ORANGE, style.RED])
    colors = slow.with_extremes(bad=style.GRID)
    ratios = _square({pair: np.log(ratio) for pair, ratio in _ratios(links, quantity).items()}, count)
    # What may be chance is there to see, but not the first thing that is seen.
    opaque = np.where(_is_named(verdict, quantity, count) | np.isnan(ratios), 1.0, PALE)
    image = axes.imshow(
        ratios, cmap=colors, vmin=np.log(PALEST), vmax=np.log(DARKEST), aspect="equal", alpha=opaque.tolist()
    )
    _frames(axes, links, verdict, quantity)
    # The unit in which the middle pair is no fraction.
    middle = float(np.median(list(pairs.values())))
    unit, scale = next(((name, by) for name, by in UNITS[quantity] if middle * by >= 1), UNITS[quantity][-1])
    axes.set_title(f"{WHAT[quantity]} ({unit})", fontweight="normal", pad=24 if len(set(links.hosts)) > 1 else 6)
    if count <= MAX_MATRIX:
        for (row, column), value in np.ndenumerate(_square(pairs, count) * scale):
            if np.isfinite(value):
                text = f"{value:,.{decimals_for(value)}f}"
                axes.text(column, row, text, ha="center", va="center", fontsize=7.5)
    hover(axes, [_spot(links, pair, value, quantity) for pair, value in pairs.items()])
    _name_ranks(axes, links.hosts)
    return image


def _ratios(links: LinkRun, quantity: str) -> dict[tuple[int, int], float]:
    """Each pair's median time over that of the middle one of its like."""
    found: dict[tuple[int, int], float] = {}
    for alike in links.alike:
        if alike.quantity == quantity:
            medians = np.median(alike.times_s, axis=0)
            found.update(zip(((a, b) for a, b in alike.members), medians / np.median(medians), strict=True))
    return found


def _square(pairs: dict[tuple[int, int], float], count: int) -> "np.ndarray[tuple[int, ...], np.dtype[np.float64]]":
    """Values by row and column, each pair's in both of its places."""
    values = np.full((count, count), np.nan)
    for (first, second), value in pairs.items():
        values[first, second] = values[second, first] = value
    return values


def _is_named(verdict: LinkVerdict, quantity: str, count: int) -> "np.ndarray[tuple[int, ...], np.dtype[np.bool_]]":
    """Where a pair is that is named itself, or through one of its ranks."""
    found = np.zeros((count, count), dtype=bool)
    for one in verdict.outliers:
        if one.kind == RANK and one.quantity == quantity:
            found[list(one.ranks), :] = found[:, list(one.ranks)] = True
        if one.kind == HOST and one.quantity == quantity:
            found[np.ix_(one.ranks, one.ranks)] = True
    for first, second in slow_pairs(verdict, quantity):
        found[first, second] = found[second, first] = True
    return found


def _frames(axes: "Axes", links: LinkRun, verdict: LinkVerdict, quantity: str) -> None:
    """Round the row and the column of a slow rank, round the two places of a slow link; lines between hosts."""
    from matplotlib.patches import Rectangle

    count, places = len(links.hosts), []
    for one in verdict.outliers:
        if one.kind == RANK and one.quantity == quantity:
            places += [(-0.5, one.ranks[0] - 0.5, count, 1), (one.ranks[0] - 0.5, -0.5, 1, count)]
    for first, second in slow_pairs(verdict, quantity):
        places += [(first - 0.5, second - 0.5, 1, 1), (second - 0.5, first - 0.5, 1, 1)]
    for left, top, width, height in places:
        frame = Rectangle((left, top), width, height, fill=False, edgecolor=style.BLACK, linewidth=2.2, clip_on=False)
        frame.set_zorder(3)
        axes.add_patch(frame)
    for edge in [at for at in range(1, count) if links.hosts[at] != links.hosts[at - 1]]:
        axes.axhline(edge - 0.5, color=style.GREY, linewidth=1)
        axes.axvline(edge - 0.5, color=style.GREY, linewidth=1)


def _name_ranks(axes: "Axes", hosts: Sequence[str]) -> None:
    """Ranks at the ticks of both axes, and the hosts beside them where they fit."""
    step = max(len(hosts) // MAX_MATRIX, 1)
    ticks = range(0, len(hosts), step)
    spans = [(name, [rank for rank, _ in ranks]) for name, ranks in groupby(enumerate(hosts), key=lambda one: one[1])]
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_ticks(ticks, labels=list(map(str, ticks)))
        axis.set_tick_params(length=0)
        axis.set_label_text("rank")
    if 1 < len(spans) <= MAX_HOSTS:
        for name, ranks in spans:
            at, host = (ranks[0] + ranks[-1]) / 2, f"host {name}"
            axes.text(at, 1.01, host, transform=axes.get_xaxis_transform(), ha="center", va="bottom")
            axes.text(1.01, at, host, transform=axes.get_yaxis_transform(), ha="left", va="center", rotation=270)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _spot(links: LinkRun, pair: tuple[int, int], value: float, quantity: str) -> Spot:
    text = f"{value:.3g} GB/s" if quantity == BANDWIDTH else brief_time_text(value)
    hosts = " and ".join(dict.fromkeys(links.hosts[rank] for rank in pair))
    return Spot(pair[1], pair[0], f"ranks {pair[0]} and {pair[1]} ({hosts})\n{text}")
