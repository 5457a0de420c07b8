"""From a run of scenario `calibrate` to a cost profile, its table and its plots."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from distbench.compare.medians import median
from distbench.costmodel.profile import DIRECT, LOCAL_OPS, Line, Profile, Sample, fit_line
from distbench.render import plot_style as style
from distbench.render.blocks import Table, text_of
from distbench.render.units import NOTHING, bandwidth_text, percent_text, size_text, time_text
from distbench.runs.run_file import Run
from distbench.spec.errors import UserError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GB = 1e9
TITLES = {"all_to_all": "all_to_all as DTensor runs it", "all_to_all_native": "all_to_all, native", DIRECT: "direct"}
NUM_CURVE = 60
NUM_COLUMNS, PANEL_WIDTH, PANEL_HEIGHT = 4, 3.3, 3.0


@dataclass
class MeasuredSteps:
    """What was measured of one op over one mesh dim.

    Args:
        op: as a line's.
        mesh_dim: as a line's.
        group_size: ranks in each group.
        fitted: samples that the line is fitted to.
        held_out: samples that it is judged by.
    """

    op: str
    mesh_dim: str
    group_size: int
    fitted: list[Sample] = field(default_factory=list)
    held_out: list[Sample] = field(default_factory=list)


def measured_in(run: Run) -> list[MeasuredSteps]:
    """What a run of scenario `calibrate` measured, a sample the median of a case; in order of mesh dims, then ops.

    Raises:
        UserError: the run holds no calibration.
    """
    found: dict[tuple[str, str], MeasuredSteps] = {}
    for record in run.cases:
        params = record["case"].get("params", {})
        if record["case"].get("kind") != "calibrate" or record["status"] != "ok":
            continue
        key = (params["mesh_dim"], params["op"])
        measured = found.setdefault(key, MeasuredSteps(params["op"], params["mesh_dim"], record["group_size"]))
        sample = Sample(record["payload_bytes"], record["counters"]["num_copies"], median(record["samples_s"]))
        (measured.held_out if params["held_out"] else measured.fitted).append(sample)
    if not found:
        raise UserError(f"{run.path} holds no calibration; write one with distbench calibrate")
    mesh_dims = list(run.header["job"]["mesh"])
    return sorted(found.values(), key=lambda one: (_rank(one.mesh_dim, mesh_dims), one.op in LOCAL_OPS, one.op))


def _rank(mesh_dim: str, mesh_dims: Sequence[str]) -> int:
    return mesh_dims.index(mesh_dim) if mesh_dim in mesh_dims else len(mesh_dims)


def profile_of(run: Run) -> Profile:
    """The profile that a run of scenario `calibrate` gives.

    Raises:
        UserError: the run holds no calibration, or too few sizes of an op for a line.
    """
    environment, job = run.header["environment"], run.header["job"]
    try:
        lines = tuple(
            fit_line(one.op, one.mesh_dim, one.group_size, one.fitted, one.held_out) for one in measured_in(run)
        )
    except ValueError as error:
        raise UserError(f"{run.path} cannot be fitted: {error}; measure more sizes") from error
    return Profile(
        machine=str(environment["machine"]),
        backend=str(environment["backend"]),
        torch=str(environment["torch"]),
        mesh=dict(job["mesh"]),
        lines=lines,
        source=f"measured by distbench calibrate, run {run.header['run_id']}",
    )


def profile_text(profile: Profile) -> str:
    """The profile as a table of at most 100 columns."""
    mesh = ",".join(f"{name}={size}" for name, size in profile.mesh.items())
    columns = ("<op", "<mesh dim", "base", "GB/s", "copied", "knee", "beyond", "fit error", "held out", "samples")
    title = f"{profile.machine}, {profile.backend}, torch {profile.torch}, mesh {mesh}"
    notes = [
        "time = base + payload / (GB/s) + payload x num_copies / (copied GB/s), beyond the knee at the rate beyond",
        "payload: the full gathered or scattered buffer; of direct, what the busiest rank sends or receives",
        "errors: median of |predicted / measured - 1|, over the sizes fitted and over those held out",
    ]
    breaks = frozenset(
        number
        for number, line in enumerate(profile.lines)
        if number and line.mesh_dim != profile.lines[number - 1].mesh_dim
    )
    return text_of([Table(title, columns, [_row(line) for line in profile.lines], notes, breaks)])


def _row(line: Line) -> tuple[str, ...]:
    return (
        line.op,
        line.mesh_dim,
        time_text(line.base_s),
        _rate_text(line.per_byte_s),
        _rate_text(line.per_copied_byte_s),
        NOTHING if line.knee_bytes is None else size_text(line.knee_bytes),
        NOTHING if line.knee_bytes is None else _rate_text(line.per_byte_beyond_s),
        percent_text(line.error),
        NOTHING if line.held_out_error is None else percent_text(line.held_out_error),
        str(len(line.samples)),
    )


def _rate_text(per_byte_s: float) -> str:
    return bandwidth_text(1 / per_byte_s / GB).strip() if per_byte_s else NOTHING


def draw(profile: Profile, measured: Sequence[MeasuredSteps], folder: Path) -> list[Path]:
    """Measured points on fitted lines, one figure a mesh dim, one panel an op; the files written.

    Args:
        profile: fitted to what was measured.
        measured: see `measured_in`.
        folder: made if it is not there.

    Raises:
        UserError: the folder cannot be written.
    """
    written = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with style.styled():
            for mesh_dim in dict.fromkeys(one.mesh_dim for one in measured):
                figure = _figure(profile, [one for one in measured if one.mesh_dim == mesh_dim])
                written += style.save(figure, folder, f"calibration-{mesh_dim}")
    except OSError as error:
        raise UserError(f"plots cannot be written to {folder}: {error.strerror}; give another --plots") from error
    return written


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
    first = measured[0]
    where = "the whole mesh" if first.op == DIRECT else f"mesh dim {first.mesh_dim}"
    text = f"What a step costs over {where}, groups of {first.group_size} ranks"
    figure.suptitle(text, x=0.01, ha="left", fontweight="bold")
    caption = "lines are fitted to the filled points and judged by the hollow ones (off by: median of the latter)"
    figure.supxlabel(caption, x=0.01, ha="left", fontsize=9, color=style.GREY)
    return figure


def _panel(axes: "Axes", line: Line, measured: MeasuredSteps) -> None:
    samples = [*measured.fitted, *measured.held_out]
    sizes = sorted(sample.payload_bytes for sample in samples)
    copies = sorted({round(sample.num_copies, 1) for sample in samples})
    for number, color in zip(copies, style.CYCLE * 2, strict=False):
        label = f"copied {number:g} x" if number else "contiguous"
        curve = [sizes[0] * (sizes[-1] / sizes[0]) ** (part / NUM_CURVE) for part in range(NUM_CURVE + 1)]
        axes.plot(curve, [line.seconds(size, number) for size in curve], color=color, linewidth=1.6, label=label)
        for points, face in ((measured.fitted, color), (measured.held_out, "white")):
            here = [sample for sample in points if round(sample.num_copies, 1) == number]
            places = [sample.payload_bytes for sample in here], [sample.seconds for sample in here]
            axes.plot(*places, "o", color=color, markerfacecolor=face, markersize=5, linestyle="none")
    axes.set_yscale("log")
    axes.grid(visible=True, axis="y")
    style.size_ticks(axes, sizes)
    axes.tick_params(axis="x", labelsize=8)
    style.label_axis(axes.yaxis, style.time_tick)
    axes.tick_params(labelleft=True)
    axes.set_xlabel("payload")
    error = line.error if line.held_out_error is None else line.held_out_error
    axes.set_title(f"{TITLES.get(line.op, line.op)}\noff by {percent_text(error)}", fontsize=10)
    if len(copies) > 1:
        axes.legend(fontsize=8, loc="upper left", handlelength=1.2, borderaxespad=0.1)
