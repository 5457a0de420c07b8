"""A picture of the links: each pair's bandwidth and latency, what is slow framed."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from distbench.links.link_measurements import BANDWIDTH, LATENCY, LinkRun, link_run_of
from distbench.links.link_text import MAX_MATRIX, name_of, pair_values, slow_pairs
from distbench.links.outliers import RANK, LinkVerdict, verdict_of
from distbench.render import plot_style as style
from distbench.render.hover import Spot, hover
from distbench.render.units import brief_time_text
from distbench.runs.run_file import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SHOWN = ((BANDWIDTH, "algbw each way (GB/s)"), (LATENCY, "time of a small message each way (\u00b5s)"))


def link_figures(run: Run) -> "Iterator[tuple[str, Figure]]":
    """(name, figure) of a run's links; nothing where it measured none."""
    links = link_run_of(run)
    if links is None:
        return
    shown = [(quantity, title) for quantity, title in SHOWN if pair_values(links, quantity)]
    if not shown:
        return
    verdict = verdict_of(links)
    side = min(2.4 + 0.42 * len(links.hosts), 9.0)
    figure, axes = style.new_figure(len(shown), 1.2 + side * len(shown), side, share=False)
    for panel, (quantity, title) in zip(axes, shown, strict=True):
        _panel(panel, links, verdict, quantity)
        panel.set_title(title, fontweight="normal")
    slow = [name_of(one, links) for one in verdict.outliers]
    found = f"slow: {', '.join(dict.fromkeys(slow))}" if slow else "nothing stands out"
    style.title(figure, f"{run.scenario}: {verdict.why_not or found}")
    style.caption(figure, f"medians of {verdict.num_passes} passes; framed: slower than its like; lines: hosts")
    yield "links", figure


def _panel(axes: "Axes", links: LinkRun, verdict: LinkVerdict, quantity: str) -> None:
    from matplotlib.patches import Rectangle

    count, pairs = len(links.hosts), pair_values(links, quantity)
    scale = 1.0 if quantity == BANDWIDTH else 1e6
    values = np.full((count, count), np.nan)
    for (first, second), value in pairs.items():
        values[first, second] = values[second, first] = value * scale
    # Dark is slow, in either quantity.
    axes.imshow(values, cmap="viridis" if quantity == BANDWIDTH else "viridis_r", aspect="equal")
    slow = slow_pairs(verdict, quantity)
    ranks = {one.ranks[0] for one in verdict.outliers if one.kind == RANK and one.quantity == quantity}
    framed = {(a, b) for a in range(count) for b in range(count) if a != b and {a, b} & ranks}
    framed |= {(a, b) for pair in slow for a, b in (pair, pair[::-1])}
    for row, column in framed:
        axes.add_patch(Rectangle((column - 0.5, row - 0.5), 1, 1, fill=False, edgecolor=style.RED, linewidth=1.6))
    for edge in [at for at in range(1, count) if links.hosts[at] != links.hosts[at - 1]]:
        axes.axhline(edge - 0.5, color="white", linewidth=2)
        axes.axvline(edge - 0.5, color="white", linewidth=2)
    if count <= MAX_MATRIX:
        _numbers(axes, values)
    hover(axes, [_spot(links, pair, value, quantity) for pair, value in pairs.items()])
    step = max(count // MAX_MATRIX, 1)
    axes.set_xticks(range(0, count, step))
    axes.set_yticks(range(0, count, step))
    axes.set_xlabel("rank")
    axes.set_ylabel("rank")


def _numbers(axes: "Axes", values: "np.ndarray[tuple[int, ...], np.dtype[np.float64]]") -> None:
    middle = np.nanmean([np.nanmin(values), np.nanmax(values)])
    dark_is_low = axes.images[0].get_cmap().name == "viridis"
    for (row, column), value in np.ndenumerate(values):
        if np.isfinite(value):
            is_dark = (value < middle) == dark_is_low
            axes.text(
                column,
                row,
                f"{value:.3g}",
                ha="center",
                va="center",
                fontsize=7.5,
                color="white" if is_dark else "black",
            )


def _spot(links: LinkRun, pair: tuple[int, int], value: float, quantity: str) -> Spot:
    text = f"{value:.3g} GB/s" if quantity == BANDWIDTH else brief_time_text(value)
    hosts = " and ".join(dict.fromkeys(links.hosts[rank] for rank in pair))
    return Spot(pair[1], pair[0], f"ranks {pair[0]} and {pair[1]} ({hosts})\n{text}")
