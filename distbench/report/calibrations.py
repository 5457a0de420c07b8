"""Calibrations: the profile that a run of scenario `calibrate` gives, in lines, as a table and on a page."""

import statistics
from collections.abc import Iterable, Iterator
from itertools import groupby

from distbench.costmodel.calibration_plots import calibration_figures
from distbench.costmodel.calibration_run import measured_in, profile_of
from distbench.costmodel.lines import LOCAL_OPS, Line
from distbench.costmodel.profile import Profile
from distbench.costmodel.profile_text import profile_table
from distbench.render.blocks import Lines, Table
from distbench.render.html import PageBlock, Picture
from distbench.render.units import bandwidth_text, brief_time_text, percent_text
from distbench.runs.run_file import Run
from distbench.spec.errors import UserError
from distbench.spec.printable import count_text

GB = 1e9


def calibration_lines(run: Run) -> Iterator[str]:
    """For each mesh dim what its collectives cost, and how far off the lines are; nothing where there is none."""
    profile = _profile_of(run)
    if not isinstance(profile, Profile):
        yield from [profile] if profile else []
        return
    lines = [line for line in profile.lines if line.op not in LOCAL_OPS]
    for mesh_dim, of_dim in groupby(lines, key=lambda line: line.mesh_dim):
        own = list(of_dim)
        yield (
            f"{mesh_dim} ({count_text(own[0].group_size, 'rank')}), latency + bandwidth: "
            f"{', '.join(map(_cost_text, own))}"
        )
    if lines:
        worst = max(lines, key=lambda line: line.expected_error)
        usual = percent_text(statistics.median(line.expected_error for line in lines))
        most = f"at worst {percent_text(worst.expected_error)}, {worst.op} over {worst.mesh_dim}"
        judged = "sizes held out" if worst.held_out_error is not None else "their own sizes"
        yield f"off by {usual} on {judged} (median of {count_text(len(lines), 'line')}; {most})"


def calibration_tables(run: Run) -> list[Table]:
    """The lines of one run's calibration; nothing where there is none."""
    profile = _profile_of(run)
    return [profile_table(profile)] if isinstance(profile, Profile) else []


def calibration_blocks(run: Run) -> Iterable[PageBlock]:
    """Figures and a table of one run's calibration; nothing where there is none."""
    profile = _profile_of(run)
    if not isinstance(profile, Profile):
        return [Lines((profile,))] if profile else []
    return [
        *(Picture(figure) for _, figure in calibration_figures(profile, measured_in(run))),
        *calibration_tables(run),
    ]


def _profile_of(run: Run) -> Profile | str | None:
    """The profile, or why there is none; None where the run is no calibration."""
    if not any(case["case"].get("kind") == "calibrate" for case in run.cases):
        return None
    try:
        return profile_of(run)
    except (UserError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        # A run file may be anybody's, or one that was cut short.
        return f"no profile: {error}"


def _cost_text(line: Line) -> str:
    """Of an empty one, or of each of its messages, and the rate at which large ones go on."""
    per_byte_s = line.per_byte_s if line.knee_bytes is None else line.per_byte_beyond_s
    parts = [brief_time_text(line.base_s)] if line.base_s > 0 else []
    parts += [f"{brief_time_text(line.per_message_s)} a message"] if line.per_message_s > 0 else []
    parts += [f"{bandwidth_text(1 / per_byte_s / GB).strip()} GB/s"] if per_byte_s > 0 else []
    return f"{line.op} {' + '.join(parts) or 'no cost'}"
