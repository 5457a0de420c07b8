"""What to run, as plain data. This room knows nothing of torch: a scenario is found by reading its source.

Names are imported when they are asked for: `distbench list` needs no plan, and a rank that has one no list.
"""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distbench.spec.discovery import Entry, find, list_entries
    from distbench.spec.errors import UserError
    from distbench.spec.job import Job, Settings
    from distbench.spec.mesh import fit_mesh, format_mesh, parse_mesh
    from distbench.spec.parallel import CompilePlan, CpPlan, DdpPlan, FsdpPlan, LargestDim, ParallelPlan, ShardParam
    from distbench.spec.pipeline_plan import PipelinePlan
    from distbench.spec.scenario import (
        Calibration,
        Collectives,
        DTensorOperator,
        Laboratory,
        Links,
        Redistributions,
        Scenario,
        placement_pairs,
        scenario,
    )

__all__ = [
    "Calibration",
    "Collectives",
    "CompilePlan",
    "CpPlan",
    "DTensorOperator",
    "DdpPlan",
    "Entry",
    "FsdpPlan",
    "Job",
    "Laboratory",
    "LargestDim",
    "Links",
]
__all__ += ["ParallelPlan", "PipelinePlan", "Redistributions", "Scenario", "Settings", "ShardParam", "UserError"]
__all__ += ["find", "fit_mesh", "format_mesh", "list_entries", "parse_mesh", "placement_pairs", "scenario"]

# File to what is taken from it; the rest of __all__ is in scenario.py.
_FILES = {
    "discovery": ("Entry", "find", "list_entries"),
    "errors": ("UserError",),
    "job": ("Job", "Settings"),
    "mesh": ("fit_mesh", "format_mesh", "parse_mesh"),
    "parallel": ("CompilePlan", "CpPlan", "DdpPlan", "FsdpPlan", "LargestDim", "ParallelPlan", "ShardParam"),
    "pipeline_plan": ("PipelinePlan",),
}
_FILE_OF = {name: file for file, names in _FILES.items() for name in names}


def __getattr__(name: str) -> Any:
    """The name from its file, which is imported now; kept, so that this is not asked again."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(f"{__name__}.{_FILE_OF.get(name, 'scenario')}"), name)
    if name != "scenario":
        globals()[name] = found
    return found


class _SpecRoom(ModuleType):
    """`distbench.spec.scenario` is the decorator, also once its file was imported, which stays importable."""

    @property
    def scenario(self) -> Any:
        """The decorator of the file of that name."""
        return __getattr__("scenario")

    @scenario.setter
    def scenario(self, file: ModuleType) -> None:
        """Importing the file puts it here."""


sys.modules[__name__].__class__ = _SpecRoom
