"""What a calibration measured, drawn as points on the lines that were fitted."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from distbench.costmodel.calibration_run import MeasuredSteps
from distbench.costmodel.lines import DIRECT, Line, Sample
from distbench.costmodel.profile import Profile
from distbench.render import plot_style as style
from distbench.render.hover import Spot, hover
from distbench.render.units import brief_time_text, percent_text, size_text
from distbench.spec.errors import UserError
from distbench.spec.printable import count_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TITLES = {"all_to_all": "all_to_all as DTensor runs it", "all_to_all_native": "all_to_all, native", DIRECT: "direct"}
NUM_CURVE = 61
NUM_COLUMNS, PANEL_WIDTH, PANEL_HEIGHT = 4, 3.3, 3.0


def draw(profile: Profile, measured: Sequence[MeasuredSteps], folder: Path) -> list[Path]:
    """Measured points on the profile's lines, one figure a mesh dim, one panel an op; the files written.

    Raises:
        UserError: the folder cannot be written.
    """
    written = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with style.styled():
            for name, figure in calibration_figures(profile, measured):
                written += style.save(figure, folder, name)
    except OSError as error:
        raise UserError(f"plots cannot be written to {folder}: {error.strerror}; give another --plots") from error
    return written


def calibration_figures(profile: Profile, measured: Sequence[MeasuredSteps]) -> "Iterator[tuple[str, Figure]]":
    """(name, figure) of each mesh dim: measured points on the profile's lines, one panel an op."""
    for mesh_dim in dict.fromkeys(one.mesh_dim for one in measured):
        yield f"calibration-{mesh_dim}", _figure(profile, [one for one in measured if one.mesh_dim == mesh_dim])


def _figure(profile: Profile, measured: Sequence[MeasuredSteps]) -> "Figure":
    num_columns = min(len(measured), NUM_COLUMNS)
    num_rows = -(-len(measured) // num_columns)
    size = (max(PANEL_WIDTH * num_columns, 7.5), PANEL_HEIGHT * num_rows + 1.2)
    figure, axes = style.new_figure(num_columns, *size, num_rows=num_rows)
    for panel, one in zip(axes, measured, strict=False):
        line = profile.line(one.op, one.mesh_dim, one.group_size)
        assert line is not None
        _panel(panel, line, one)
    for panel in axes[len(measured) :]:
        panel.set_visible(False)
    for panel in axes[::num_columns]:
        panel.set_ylabel("time")
    where = "the whole mesh" if measured[0].op == DIRECT else f"mesh dim {measured[0].mesh_dim}"
    text = f"What a step costs over {where}, groups of {count_text(measured[0].group_size, 'rank')}"
    figure.suptitle(text, x=0.01, ha="left", fontweight="bold")
    caption = "lines are fitted to the filled points and judged by the hollow ones (off by: median of the latter)"
    figure.supxlabel(caption, x=0.01, ha="left", fontsize=9, color=style.GREY)
    return figure


def _panel(axes: "Axes", line: Line, measured: MeasuredSteps) -> None:
    samples = [*measured.fitted, *measured.held_out]
    sizes = sorted(sample.payload_bytes for sample in samples)
    kinds = sorted({_kind(sample) for sample in samples})
    for kind, color in zip(kinds, style.CYCLE * 2, strict=False):
        number, messages = kind
        label = f"copied {number:g} x" if number else "contiguous"
        label += f", {count_text(messages, 'message')}" if messages else ""
        curve = np.geomspace(sizes[0], sizes[-1], NUM_CURVE)
        axes.plot(curve, [line.seconds(size, *kind) for size in curve], color=color, linewidth=1.6, label=label)
        for points, face in ((measured.fitted, color), (measured.held_out, "white")):
            here = [sample for sample in points if _kind(sample) == kind]
            places = [sample.payload_bytes for sample in here], [sample.seconds for sample in here]
            axes.plot(*places, "o", color=color, markerfacecolor=face, markersize=5, linestyle="none")
            hover(axes, [_spot(one, line) for one in here])
    axes.set_yscale("log")
    axes.grid(visible=True, axis="y")
    style.size_ticks(axes, sizes)
    axes.tick_params(axis="x", labelsize=8)
    style.label_axis(axes.yaxis, style.time_tick)
    axes.tick_params(labelleft=True)
    axes.set_xlabel("payload")
    axes.set_title(f"{TITLES.get(line.op, line.op)}\noff by {percent_text(line.expected_error)}", fontsize=10)
    if len(kinds) > 1:
        axes.legend(fontsize=8, loc="upper left", handlelength=1.2, borderaxespad=0.1)


def _spot(sample: Sample, line: Line) -> Spot:
    fitted = brief_time_text(line.seconds(sample.payload_bytes, *_kind(sample)))
    text = f"{size_text(sample.payload_bytes)}: {brief_time_text(sample.seconds)}\nthe line says {fitted}"
    return Spot(sample.payload_bytes, sample.seconds, text)


def _kind(sample: Sample) -> tuple[float, int]:
    """What samples of a curve have in common: copies, about, and messages."""
    return round(sample.num_copies, 1), sample.num_messages
