"""What to run, as plain data. This room knows nothing of torch: a scenario is found by reading its source."""

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
