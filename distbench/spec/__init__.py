"""What to run, as plain data. Imports no torch: a scenario is found by reading its source.

Names are imported when they are asked for: `distbench list` needs no plan, and a rank that has one no list.
"""

from typing import TYPE_CHECKING

from distbench.spec.lazy_imports import import_when_asked

if TYPE_CHECKING:
    from distbench.spec.discovery import Entry, find, list_entries
    from distbench.spec.errors import UserError
    from distbench.spec.job import Job, Settings
    from distbench.spec.mesh import fit_mesh, format_mesh, parse_mesh
    from distbench.spec.plan import (
        CompilePlan,
        CpPlan,
        DdpPlan,
        FsdpPlan,
        LargestDim,
        ParallelPlan,
        PipelinePlan,
        ShardParam,
    )
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

import_when_asked(
    __name__,
    {
        "discovery": ("Entry", "find", "list_entries"),
        "errors": ("UserError",),
        "job": ("Job", "Settings"),
        "mesh": ("fit_mesh", "format_mesh", "parse_mesh"),
        "plan": (
            "CompilePlan",
            "CpPlan",
            "DdpPlan",
            "FsdpPlan",
            "LargestDim",
            "ParallelPlan",
            "PipelinePlan",
            "ShardParam",
        ),
        "scenario": (
            *("Calibration", "Collectives", "DTensorOperator", "Laboratory", "Links", "Redistributions", "Scenario"),
            *("placement_pairs", "scenario"),
        ),
    },
)
