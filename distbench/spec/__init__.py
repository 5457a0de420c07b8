"""What to run, as plain data. Imports no torch: a scenario is found by reading its source.

Names are imported when they are asked for: `distbench list` needs no plan, and a rank that has one no list.
"""

import importlib
import sys
from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

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


def import_when_asked(package: str, names_of: Mapping[str, Iterable[str]]) -> None:
    """Have a package's names imported from its modules when they are asked for, and kept.

    A name that a module of the package has too stays what was taken, also once that module was imported; the module
    itself stays importable.

    Args:
        package: its ``__name__``; called while it is being imported.
        names_of: module, by its name below the package, to what is taken from it.
    """
    module_of = {name: module for module, names in names_of.items() for name in names}

    class Package(ModuleType):
        def __getattr__(self, name: str) -> Any:
            if name not in module_of:
                raise AttributeError(f"module {package!r} has no attribute {name!r}")
            exported = getattr(importlib.import_module(f"{package}.{module_of[name]}"), name)
            setattr(self, name, exported)
            return exported

        def __setattr__(self, name: str, value: Any) -> None:
            # Importing a module puts it here.
            if not (name in module_of and isinstance(value, ModuleType)):
                super().__setattr__(name, value)

    sys.modules[package].__class__ = Package


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
