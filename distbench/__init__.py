"""distbench: what a parallelism plan costs on this hardware, and which part of it costs that.

From Python: `distbench.run("tp_mlp", quick=True)`, `distbench.load("results")` and `distbench.compare(a, b)` do what
the commands do (docs/python.md). In training code: `with distbench.calibrated_planning("profile.json"): ...` lets
DTensor plan by a measured profile.
"""

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from distbench.version import __version__ as __version__

if TYPE_CHECKING:
    from distbench.api import ComparedRuns, Report, Runs, compare, load, run
    from distbench.spec.errors import UserError
    from distbench.worker.torch_internals.calibrated import calibrated_planning

__all__ = ["ComparedRuns", "Report", "Runs", "UserError", "calibrated_planning", "compare", "load", "run"]


def __getattr__(name: str) -> Any:
    """What is imported when it is asked for: neither the command line nor training code pays for the other."""
    if name == "calibrated_planning":
        from distbench.worker.torch_internals.calibrated import calibrated_planning

        return calibrated_planning
    if name == "UserError":
        from distbench.spec.errors import UserError

        return UserError
    if name in __all__:
        from distbench import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class _Package(ModuleType):
    """`distbench.compare` is the function, also once the room of that name was imported, which stays importable."""

    @property
    def compare(self) -> Any:
        """The function of the API."""
        return __getattr__("compare")

    @compare.setter
    def compare(self, room: ModuleType) -> None:
        """Importing a room puts it here."""


sys.modules[__name__].__class__ = _Package
