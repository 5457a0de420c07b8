"""distbench: what a parallelism plan costs on this hardware, and which part of it costs that.

In training code: `with distbench.calibrated_planning("profile.json"): ...` lets DTensor plan by a measured profile.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distbench.worker.torch_internals.calibrated import calibrated_planning as calibrated_planning

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """`calibrated_planning`, imported when it is asked for: the command line must not load torch."""
    if name == "calibrated_planning":
        from distbench.worker.torch_internals.calibrated import calibrated_planning

        return calibrated_planning
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
