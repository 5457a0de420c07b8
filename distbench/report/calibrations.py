"""Calibrations: the profile of a run of scenario `calibrate`, as lines, table, plots and page."""

import statistics
from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise
from typing import TYPE_CHECKING

import numpy as np

from distbench.planning.cost_profile import (
    DIRECT,
    LOCAL_OPS,
    Line,
    Profile,
    Sample,
)
from distbench.planning.profile_fit import MeasuredSteps, measured_in, profile_of
from distbench.records.run_file import Run
from distbench.report.section_protocol import Figures, ReportedRun, Section
from distbench.show import plots as style
from distbench.show.blocks import Block, Lines, Table, TableColumns, table_of
from distbench.show.plots import Spot, hover
from distbench.show.terminal import text_of
from distbench.show.units import NOTHING, bandwidth_text, brief_time_text, percent_text, size_text, time_text
from distbench.spec.errors import UserError
from distbench.spec.mesh import brief_shape, format_mesh, level_of
from distbench.spec.printable_text import count_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# A cost profile as a table.

GB = 1e9
COLUMNS: TableColumns = (
    ("<op", lambda line: line.op),
    ("<mesh dim", lambda line: line.mesh_dim),
    ("<hosts", lambda line: brief_shape(line.hosts) or NOTHING),
    ("base", lambda line: time_text(line.base_s) if line.base_s else NOTHING),
    ("GB/s", lambda line: _rate_text(line.per_byte_s)),
    ("copied", lambda line: _rate_text(line.per_copied_byte_s)),
    ("knee", lambda line: NOTHING if line.knee_bytes is None else size_text(line.knee_bytes)),
    ("beyond", lambda line: NOTHING if line.knee_bytes is None else _rate_text(line.per_byte_beyond_s)),
    ("fit error", lambda line: percent_text(line.error)),
    ("worst", lambda line: percent_text(line.worst_error) if line.samples else NOTHING),
    ("held out", lambda line: NOTHING if line.held_out_error is None else percent_text(line.held_out_error)),
    ("samples", lambda line: str(len(line.samples))),
)


def profile_text(profile: Profile) -> str:
    """The profile as a table."""
    return text_of([_profile_table(profile)])


def _profile_table(profile: Profile) -> Table:
    """One row per line, grouped by mesh dim."""
    title = f"{profile.machine}, {profile.backend}, torch {profile.torch}, mesh {format_mesh(profile.mesh)}"
    shapes = dict.fromkeys(shape for line in profile.lines if (shape := line.hosts))
    # A mesh dim of a profile from files may have groups of several sizes.
    has_hosts = len({*profile.hosts}) > 1 or len(shapes) > len({line.mesh_dim for line in profile.lines if line.hosts})
    levels = "; ".join(f"{brief_shape(shape)}: {level_of(shape)}" for shape in shapes)
    notes = [
        *([f"hosts: ranks of a group per host; {levels}"] if has_hosts else []),
        "time = base + payload / (GB/s) + payload x num_copies / (copied GB/s), and above the knee at the rate beyond",
        *(
            f"direct: plus {brief_time_text(line.per_message_s)} per message of the busiest rank"
            for line in profile.lines
            if line.per_message_s
        ),
        "payload: the full gathered or scattered buffer; for direct, bytes that the busiest rank sends or receives",
        "errors: |predicted / measured - 1|, median and worst over fitted sizes, median over held-out sizes",
    ]
    neighbours = enumerate(pairwise(profile.lines), start=1)
    breaks = [number for number, (line, following) in neighbours if line.mesh_dim != following.mesh_dim]
    columns = [column for column in COLUMNS if has_hosts or column[0] != "<hosts"]
    return table_of(title, columns, profile.lines, notes, breaks, ("samples", "copied", "knee", "beyond", "worst"))


def _rate_text(per_byte_s: float) -> str:
    return bandwidth_text(1 / per_byte_s / GB).strip() if per_byte_s else NOTHING


# Measured points on the fitted lines.

TITLES = {"all_to_all": "all_to_all in DTensor", "all_to_all_native": "all_to_all, native", DIRECT: "direct"}
NUM_CURVE = 61
PER_ROW, PANEL_WIDTH, PANEL_HEIGHT, LEAST_WIDTH = 4, 3.3, 3.0, 7.5


def calibration_figures(profile: Profile, measured: Sequence[MeasuredSteps]) -> "Iterator[tuple[str, Figure]]":
    """(name, figure) per mesh dim, with measured points and the profile's lines, one panel per op."""
    for mesh_dim in dict.fromkeys(steps.mesh_dim for steps in measured):
        yield f"calibration-{mesh_dim}", _figure(profile, [steps for steps in measured if steps.mesh_dim == mesh_dim])


def _figure(profile: Profile, measured: Sequence[MeasuredSteps]) -> "Figure":
    margin = max(LEAST_WIDTH - PANEL_WIDTH * min(len(measured), PER_ROW), 0)
    figure, axes = style.panels(len(measured), PER_ROW, (PANEL_WIDTH, PANEL_HEIGHT), (margin, 1.2))
    for panel, steps in zip(axes, measured, strict=True):
        line = profile.line(steps.op, steps.mesh_dim, steps.group_size)
        assert line is not None
        _panel(panel, line, steps)
    for panel in axes[::PER_ROW]:
        panel.set_ylabel("time")
    where = "the whole mesh" if measured[0].op == DIRECT else f"mesh dim {measured[0].mesh_dim}"
    style.title(figure, f"Cost of a step over {where}, groups of {count_text(measured[0].group_size, 'rank')}")
    style.caption(
        figure, "lines are fitted to filled points and tested on hollow points (off by: median error of hollow points)"
    )
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
            of_kind = [sample for sample in points if _kind(sample) == kind]
            places = [sample.payload_bytes for sample in of_kind], [sample.seconds for sample in of_kind]
            axes.plot(*places, "o", color=color, markerfacecolor=face, markersize=5, linestyle="none")
            for sample in of_kind:
                fitted = brief_time_text(line.seconds(sample.payload_bytes, *kind))
                text = f"{size_text(sample.payload_bytes)}: {brief_time_text(sample.seconds)}\nfitted line: {fitted}"
                hover(axes, [Spot(sample.payload_bytes, sample.seconds, text)])
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


def _kind(sample: Sample) -> tuple[float, float]:
    """The rounded number of copies, and the number of messages, which are the same for all samples of a curve."""
    return round(sample.num_copies, 1), sample.num_messages


def _headline(reported: ReportedRun) -> Iterator[str]:
    """The costs of collectives per mesh dim, and the errors of the lines."""
    profile = _profile_of(reported.run)
    if isinstance(profile, str):
        yield profile
    if not isinstance(profile, Profile):
        return
    lines = [line for line in profile.lines if line.op not in LOCAL_OPS]
    for mesh_dim, of_dim in groupby(lines, key=lambda line: line.mesh_dim):
        dim_lines = list(of_dim)
        ranks, costs = count_text(dim_lines[0].group_size, "rank"), ", ".join(map(_cost_text, dim_lines))
        yield f"{mesh_dim} ({ranks}), latency + bandwidth: {costs}"
    if lines:
        worst = max(lines, key=lambda line: line.expected_error)
        usual = percent_text(statistics.median(line.expected_error for line in lines))
        most = f"at worst {percent_text(worst.expected_error)}, {worst.op} over {worst.mesh_dim}"
        sizes_text = "held-out sizes" if worst.held_out_error is not None else "fitted sizes"
        yield f"median error {usual} on {sizes_text} ({count_text(len(lines), 'line')}; {most})"


def _tables(reported: ReportedRun, full: bool = True) -> list[Block]:
    profile = _profile_of(reported.run)
    if isinstance(profile, Profile):
        return [_profile_table(profile)]
    return [Lines((profile,))] if profile else []


def _figures(reported: ReportedRun) -> Figures:
    profile = _profile_of(reported.run)
    if isinstance(profile, Profile):
        yield from calibration_figures(profile, measured_in(reported.run))


def _profile_of(run: Run) -> Profile | str | None:
    """The profile, or the reason for a missing profile, or None if the run has no calibration."""
    if not any(case["case"].get("kind") == "calibrate" for case in run.cases):
        return None
    try:
        return profile_of(run)
    except (UserError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        # A run file may be from another program, or incomplete.
        return f"no profile: {error}"


def _cost_text(line: Line) -> str:
    """The base cost, the cost per message, and the rate for large payloads."""
    per_byte_s = line.per_byte_s if line.knee_bytes is None else line.per_byte_beyond_s
    parts = [brief_time_text(line.base_s)] if line.base_s > 0 else []
    parts += [f"{brief_time_text(line.per_message_s)} per message"] if line.per_message_s > 0 else []
    parts += [f"{_rate_text(per_byte_s)} GB/s"] if per_byte_s > 0 else []
    return f"{line.op} {' + '.join(parts) or 'no cost'}"


SECTION = Section(_headline, _tables, _figures)
