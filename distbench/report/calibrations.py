"""Calibrations: the profile that a run of scenario `calibrate` gives, and its points on the lines."""

from collections.abc import Iterable

from distbench.costmodel.calibration_plots import calibration_figures
from distbench.costmodel.calibration_run import measured_in, profile_of
from distbench.costmodel.profile_text import profile_table
from distbench.render.blocks import Lines
from distbench.render.html import PageBlock, Picture
from distbench.runs.run_file import Run
from distbench.spec.errors import UserError


def calibration_blocks(run: Run) -> Iterable[PageBlock]:
    """Figures and a table of one run's calibration; nothing where there is none."""
    if not any(case["case"].get("kind") == "calibrate" for case in run.cases):
        return []
    try:
        profile = profile_of(run)
        pictures = [Picture(figure) for _, figure in calibration_figures(profile, measured_in(run))]
    except (UserError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        # A run file may be anybody's, or one that was cut short.
        return [Lines((f"no profile: {error}",))]
    return [*pictures, profile_table(profile)]
