"""Scenarios and jobs as plain data. This package does not import torch: distbench discovers scenarios by parsing their
source.

Names are imported on first use, because no command needs all of them.
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
        Checkpoints,
        Collectives,
        DTensorOperator,
        Laboratory,
        Links,
        Redistributions,
        Scenario,
        placement_pairs,
        scenario,
        wrap,
    )

__all__ = [
    "Calibration",
    "Checkpoints",
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
__all__ += ["find", "fit_mesh", "format_mesh", "list_entries", "parse_mesh", "placement_pairs", "scenario", "wrap"]


def import_on_demand(package: str, names_of: Mapping[str, Iterable[str]]) -> None:
    """Import a package's names from its modules on first use.

    If a name is also the name of a module of the package, the name keeps its value after the module's import. The
    module remains importable.

    Args:
        package: the package's ``__name__``; the package calls this function during its import.
        names_of: name of a module in the package to the names to import from this module.
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
            # The import of a module adds the module to these names.
            if not (name in module_of and isinstance(value, ModuleType)):
                super().__setattr__(name, value)

    sys.modules[package].__class__ = Package


import_on_demand(
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
            *("Calibration", "Checkpoints", "Collectives", "DTensorOperator", "Laboratory", "Links"),
            *("Redistributions", "Scenario", "placement_pairs", "scenario", "wrap"),
        ),
    },
)
