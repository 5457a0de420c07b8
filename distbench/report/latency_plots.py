"""Percentiles of forward passes, drawn: one line a variant, a mark a percentile that its samples know."""

import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING

from distbench.render import plot_style as style
from distbench.render.hover import Spot, hover
from distbench.render.units import brief_time_text, known
from distbench.report.latencies import PERCENTS, forward_rows, num_slower, percentile_s
from distbench.runs.frame import Row

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LABEL_WIDTH, MAX_ROWS = 40, 24
MARKS = dict(zip(PERCENTS, (("D", style.BLUE), ("o", style.SKY), ("s", style.ORANGE)), strict=True))


def latency_figures(name: str, frame: "pd.DataFrame") -> "Iterator[tuple[str, Figure]]":
    """The latency of each variant's forward pass; nothing where there are none."""
    rows = forward_rows(frame)[:MAX_ROWS]
    if not rows:
        return
    figure, (axes,) = style.new_figure(1, 9, 1.7 + 0.55 * len(rows))
    largest = max(percentile_s(row, percent) for row in rows for percent in PERCENTS if _is_known(row, percent))
    scale, unit = (1.0, "s") if largest >= 1 else (1e-3, "ms")
    for percent, (marker, color) in MARKS.items():
        told = [(at, row) for at, row in enumerate(rows) if _is_known(row, percent)]
        if told:
            seconds = [percentile_s(row, percent) / scale for _, row in told]
            axes.scatter(
                seconds, [at for at, _ in told], marker=marker, color=color, s=46, label=f"p{percent}", zorder=3
            )
            hover(axes, [Spot(x, at, _said(row, percent)) for x, (at, row) in zip(seconds, told, strict=True)])
    _spans(axes, rows, scale)
    axes.set_xlim(0, largest / scale * 1.12)
    style.name_bars(axes, [textwrap.fill(str(row["variant"]).replace(",", ", "), LABEL_WIDTH) for row in rows])
    axes.set_xlabel(f"latency of a forward pass ({unit})")
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, borderaxespad=0.2, handlelength=1, columnspacing=1.4)
    style.title(figure, f"{name}: latency of a forward pass")
    style.caption(
        figure, "of all samples, each on its slowest rank; a percentile that they are too few for is left out"
    )
    yield "latency", figure


def _is_known(row: Row, percent: int) -> bool:
    return known(percentile_s(row, percent))


def _spans(axes: "Axes", rows: list[Row], scale: float) -> None:
    """A line from each variant's first percentile to its last one."""
    for at, row in enumerate(rows):
        told = [percentile_s(row, percent) / scale for percent in PERCENTS if _is_known(row, percent)]
        if told:
            axes.plot([told[0], told[-1]], [at, at], color=style.LIGHT, linewidth=3, zorder=1)


def _said(row: Row, percent: int) -> str:
    of = f"{num_slower(row, percent)} of {row['num_samples']:.0f} samples were slower"
    return f"{row['variant']}\np{percent}: {brief_time_text(percentile_s(row, percent))}\n{of}"
