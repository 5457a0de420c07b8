"""distbench: the cost of a parallelism plan on this hardware, and the cost of each of its parts.

From Python: `distbench.run("tp_mlp", quick=True)`, `distbench.load("results")` and `distbench.compare(a, b)` run the
commands of these names (docs/python.md). In training code `with distbench.calibrated_planning("profile.json"): ...`
makes DTensor plan by a measured profile, and `distbench.DirectRedistribution` moves a tensor in one exchange.
"""

from typing import TYPE_CHECKING

from distbench.spec import import_on_demand
from distbench.version import __version__ as __version__

if TYPE_CHECKING:
    from distbench.cli.python_api import ComparedRuns, Report, Runs, compare, load, run
    from distbench.communication_assertions import SeenCommunication, communication
    from distbench.loop_watch import Watch, watch
    from distbench.planning.cost_profile import load_profile
    from distbench.redistribute.direct import DirectRedistribution
    from distbench.spec.errors import UserError
    from distbench.spec.scenario import wrap
    from distbench.torch_private.calibrated_planner import calibrated_planning
    from distbench.torch_private.planners import native_all_to_all

__all__ = [
    "ComparedRuns",
    "DirectRedistribution",
    "Report",
    "Runs",
    "SeenCommunication",
    "UserError",
    "Watch",
    "calibrated_planning",
    "communication",
    "compare",
    "load",
    "load_profile",
    "native_all_to_all",
    "run",
    "watch",
    "wrap",
]

# The command line and training code do not import each other's modules.
import_on_demand(
    __name__,
    {
        "cli.python_api": ("ComparedRuns", "Report", "Runs", "compare", "load", "run"),
        "communication_assertions": ("SeenCommunication", "communication"),
        "loop_watch": ("Watch", "watch"),
        "planning.cost_profile": ("load_profile",),
        "spec.errors": ("UserError",),
        "spec.scenario": ("wrap",),
        "redistribute.direct": ("DirectRedistribution",),
        "torch_private.calibrated_planner": ("calibrated_planning",),
        "torch_private.planners": ("native_all_to_all",),
    },
)
