"""The redistribution laboratory: suites of pairs on the mesh that is used, by every planner that can move them."""

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from torch.distributed.device_mesh import init_device_mesh

from distbench.costmodel.profile import Profile
from distbench.runs.run_file import DTYPE_BYTES, Case
from distbench.spec import Laboratory, Scenario, UserError
from distbench.spec.planner_names import PLANNERS
from distbench.spec.scenario import LABORATORY_SUITES
from distbench.worker.cases.laboratory_moves import Experiment, open_backward, open_forward
from distbench.worker.cases.laboratory_pairs import Pair, groups_of, sample
from distbench.worker.rank.dtypes import TORCH_DTYPES, shape_text
from distbench.worker.rank.opened_case import CaseSpec
from distbench.worker.rank.rank_context import RankContext
from distbench.worker.torch_internals import flatten_mesh

# Suites that are about speed too run at every size, the others at the first.
AT_EVERY_SIZE = ("pairs", "backward")


def laboratory_cases(scenario: Scenario, context: RankContext) -> Iterator[CaseSpec]:
    """One case for each pair and planner; the planners of a pair run next to each other, in random order.

    Raises:
        UserError: a suite, planner or dtype that is unknown, or calibrated without a profile.
    """
    order = random.Random(context.seed)
    for lab in scenario.laboratories:
        _check(lab, context.profile)
        where = LazyMesh(context, flattened=lab.suite == "flattened")
        for pair in pairs_of(lab, context.mesh_shape, context.seed):
            planners = planners_for(lab, pair, context.profile)
            order.shuffle(planners)
            for name in planners:
                yield _case_spec(lab, pair, name, where)


class LazyMesh:
    """The mesh of a suite's cases: this rank's own, or the same on a mesh that has a flattened one beside it.

    The flattened mesh has groups of its own and is made when its first case opens, so that no other case ever sees one.

    Args:
        context: this rank's context.
        flattened: whether a flattened mesh shall exist.
    """

    def __init__(self, context: RankContext, flattened: bool) -> None:
        self._context, self._flattened, self._made = context, flattened, not flattened

    @property
    def flattened_dims(self) -> list[str] | None:
        """Mesh dims of the flattened mesh; None where there is none."""
        return list(self._context.mesh_dims) if self._flattened else None

    @property
    def mesh_shape(self) -> tuple[int, ...]:
        """Ranks along each mesh dim."""
        return self._context.mesh_shape

    def context(self) -> RankContext:
        """The context, its mesh made where it is not yet; a collective act of all ranks."""
        if not self._made:
            old = self._context
            mesh = init_device_mesh(old.device.type, old.mesh_shape, mesh_dim_names=old.mesh_dims)
            flatten_mesh(mesh, old.mesh_dims)
            self._context, self._made = replace(old, mesh=mesh), True
        return self._context


def pairs_of(lab: Laboratory, mesh_shape: tuple[int, ...], seed: int) -> list[Pair]:
    """The pairs of a suite at all of its sizes; the same choice at each size and on each rank."""
    sizes = lab.sizes_bytes if lab.suite in AT_EVERY_SIZE else lab.sizes_bytes[:1]
    found: list[Pair] = []
    for size_bytes in sizes:
        groups = groups_of(lab.suite, mesh_shape, size_bytes // DTYPE_BYTES[lab.dtype])
        found += sample(groups, lab.max_pairs, mesh_shape, f"{seed}/{lab.suite}")
    return found


def planners_for(lab: Laboratory, pair: Pair, profile: Profile | None) -> list[str]:
    """The planners that can move a pair: those asked for, or all.

    calibrated needs a profile; direct adds nothing up and has no backward; neither knows a strided shard beyond shard
    orders. Those torch plans greedily whatever is asked for, and they may kill ranks: once is enough.
    """
    decodable = pair.source.state is not None
    able = {
        "min_cost": decodable,
        "calibrated": profile is not None and decodable,
        "direct": decodable and lab.suite != "backward" and not (pair.source.has_partial or pair.target.has_partial),
    }
    return [name for name in lab.planners or PLANNERS if able.get(name, True)]


def _check(lab: Laboratory, profile: Profile | None) -> None:
    if lab.suite not in LABORATORY_SUITES:
        raise UserError(f"suite {lab.suite!r} is unknown; use {', '.join(LABORATORY_SUITES)}")
    if lab.dtype not in TORCH_DTYPES:
        raise UserError(f"dtype {lab.dtype!r} is unknown; use {', '.join(TORCH_DTYPES)}")
    for name in lab.planners:
        if name not in PLANNERS:
            raise UserError(f"planner {name!r} is unknown; use {', '.join(PLANNERS)}")
        if name == "calibrated" and profile is None:
            raise UserError("planner calibrated plans by a profile; write one with distbench calibrate, give --profile")


def _case_spec(lab: Laboratory, pair: Pair, name: str, where: LazyMesh) -> CaseSpec:
    how = f"{name}+native" if lab.native_all_to_all else name
    backward = lab.suite == "backward"
    params: dict[str, Any] = {
        "suite": lab.suite,
        "source": str(pair.source),
        "target": str(pair.target),
        "direction": "backward" if backward else "forward",
        "planner": how,
        "native_all_to_all": lab.native_all_to_all,
        "dtype": lab.dtype,
        "shape": list(pair.shape),
        "mesh_shape": list(where.mesh_shape),
    }
    if where.flattened_dims:
        params["flattened"] = where.flattened_dims
    case_id = f"redistribute/{lab.dtype}{shape_text(pair.shape)}/{pair}/{lab.suite}/{how}"
    opened = open_backward if backward else open_forward
    experiment = Experiment(pair, name, lab.dtype, lab.native_all_to_all, where.context)
    return CaseSpec(Case(case_id, "redistribute", params), partial(opened, experiment))
