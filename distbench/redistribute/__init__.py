"""A library that plans and executes redistributions of sharded tensors: plain tensors, DTensors, spmd_types.

`plan(source, target, shape, mesh)` returns a `Plan`, and `execute(local_tensor, plan)` the shard of the target layout.
The import needs torch, numpy and msgspec, without the commands. `VERSION` is the version of this interface.
"""

from distbench.planning.redistribution_plans import Plan
from distbench.redistribute.execution import Pending, execute
from distbench.redistribute.library import plan

VERSION = 1

__all__ = ["VERSION", "Pending", "Plan", "execute", "plan"]
