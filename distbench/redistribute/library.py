"""The planner of the library: `plan`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from distbench.planning.cheapest_path import Problem
from distbench.planning.cost_profile import DIRECT, MeshCost, Profile, TorchCost, load_profile, measured_cost
from distbench.planning.placement_states import NotHandled, State
from distbench.planning.redistribution_plans import Plan, Setting, plan_redistribution, require_max_bytes
from distbench.redistribute.execution import GRADIENT, bound, key_of, unchecked
from distbench.redistribute.layouts import layout_of
from distbench.spec.errors import UserError
from distbench.spec.placements import OUR_PLANNERS


def plan(
    source: Any,
    target: Any,
    shape: Sequence[int],
    mesh: Any,
    profile: Profile | Path | str | None = None,
    *,
    dtype: torch.dtype | None = None,
    planner: str | None = None,
    max_bytes: int | None = None,
) -> Plan:
    """Plan a redistribution once, to `execute` it any number of times; every rank makes the same plan.

    Plan outside of compiled code. A plan has `steps`, `sent_bytes`, `seconds` (predicted), `error` (expected, relative)
    and `peak_bytes` (local tensors before and after a step). Ranks do not communicate to plan.

    Args:
        source: the layout now: text such as "S(0)R", torch's placements, a DTensor or its spec, or spmd_types'
            PartitionSpec, SpmdType or TensorSharding.
        target: the layout wanted, in any of these forms.
        shape: of the full tensor.
        mesh: the DeviceMesh; or its sizes, by name or in order, for a plan that is not executed.
        profile: measured prices, or their file (`distbench calibrate`); without them torch's constants.
        dtype: of the tensor, for predicted bytes and time; by default a given DTensor's, else the default dtype.
        planner: "calibrated" (a path of collectives) or "direct" (one exchange); the faster by prediction by default.
        max_bytes: limit on `peak_bytes`.

    Raises:
        UserError: an argument is not valid, or no plan exists, with the reason.
    """
    if planner not in (None, *OUR_PLANNERS):
        raise UserError(f"planner {planner!r} is unknown; use {' or '.join(OUR_PLANNERS)}")
    if torch.compiler.is_compiling():
        raise UserError("a plan cannot be made in compiled code; plan before, and only execute in compiled code")
    require_max_bytes(max_bytes)
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise UserError(f"dtype {dtype!r} is not a torch.dtype; write for example torch.bfloat16")
    if not isinstance(profile, (Profile, Path, str, type(None))):
        raise UserError(f"profile {profile!r} is not valid; give a profile's file, or distbench.load_profile(file)")
    device_mesh = mesh if hasattr(mesh, "get_group") else None
    loaded = load_profile(Path(profile)) if isinstance(profile, (Path, str)) else profile
    sizes, tensor_shape = _sizes(mesh, loaded), _shape(shape)
    for layout in (source, target):
        _require_same_tensor(layout, tensor_shape, device_mesh)
    (before, gradient_after), (after, gradient_before) = (
        layout_of(layout, len(tensor_shape), sizes, device_mesh) for layout in (source, target)
    )
    ranks: list[int] = []
    if device_mesh is not None:
        with unchecked():
            mesh_ranks: Any = device_mesh.mesh.tolist()
        _require_ascending(np.array(mesh_ranks))
        ranks = np.ravel(mesh_ranks).tolist()
    itemsize = (dtype or _dtype_of(source, target)).itemsize
    try:
        problem = Problem(tuple(sizes.values()), tensor_shape, itemsize)
    except NotHandled as reason:
        raise UserError(f"{reason}; give smaller sizes, as plain numbers") from reason
    if loaded is not None:
        loaded = loaded.on(sizes).natively()
    # torch's own assumption: one device per host on a CPU, else eight.
    devices_per_host = 1 if getattr(device_mesh, "device_type", "cpu") == "cpu" else 8
    model: MeshCost = measured_cost(loaded, sizes) if loaded else TorchCost(problem.mesh_shape, devices_per_host)
    setting = Setting(problem, sizes, "", devices_per_host, model, loaded)
    if device_mesh is not None and device_mesh.ndim > 1 and device_mesh.size() != torch.distributed.get_world_size():
        # An exchange needs a process group of exactly the mesh's ranks.
        if planner == DIRECT:
            raise UserError("planner direct needs a mesh of one mesh dim or of all ranks; use calibrated")
        planner = "calibrated"
    if before == after:
        planner = "calibrated"  # An exchange makes no Partial, and here is nothing to exchange.

    def between(start: State, end: State, planner: str | None) -> Plan:
        try:
            return plan_redistribution(setting, start, end, planner, max_bytes)
        except NotHandled as reason:
            raise UserError(f"{start} -> {end} has no plan: {reason}") from reason

    forward = between(before, after, planner)
    if device_mesh is None:
        return forward
    # The gradient of a gradient has its tensor's layout under spmd_types only.
    again = (before, after) if type(source).__module__.startswith("spmd_types") else (gradient_after, gradient_before)

    def backward() -> Plan:
        # An exchange makes no Partial.
        by = "calibrated" if gradient_after.partials else forward.planner
        return bound(between(gradient_before, gradient_after, by), mesh, ranks, key + GRADIENT, twice)

    def twice() -> Plan:
        by = "calibrated" if again[1].partials else forward.planner
        return bound(between(*again, by), mesh, ranks, key + 2 * GRADIENT, backward)

    key = key_of(forward, mesh, ranks, (gradient_before, gradient_after, *again))
    return bound(forward, mesh, ranks, key, backward)


def _sizes(mesh: Any, profile: Profile | None) -> dict[str, int]:
    """Return the names and sizes of the mesh dims; a mesh without names has the profile's, if the sizes are equal."""
    given = [*mesh.values()] if isinstance(mesh, Mapping) else getattr(mesh, "shape", mesh)
    sizes = tuple(given) if isinstance(given, Sequence) else ()
    if not sizes or not all(type(size) is int and size > 0 for size in sizes):
        raise UserError(f"mesh {mesh!r} is not valid; give a DeviceMesh or its sizes, such as (2, 4)")
    names = tuple(map(str, mesh)) if isinstance(mesh, Mapping) else getattr(mesh, "mesh_dim_names", None)
    if names is None and profile and tuple(profile.mesh.values()) == sizes:
        names = tuple(profile.mesh)
    return dict(zip(names or [f"m{number}" for number in range(len(sizes))], sizes, strict=True))


def _shape(given: Any) -> tuple[int, ...]:
    # A traced shape has symbolic sizes, which `Problem` rejects.
    is_valid = isinstance(given, Sequence) and all(
        isinstance(size, torch.SymInt) or (type(size) is int and size >= 0) for size in given
    )
    if is_valid:
        return tuple(given)
    raise UserError(f"shape {given!r} is not valid; give the sizes of the full tensor, such as (4096, 4096)")


def _require_same_tensor(layout: Any, shape: tuple[int, ...], mesh: Any) -> None:
    """Raise UserError if a layout is a DTensor or its spec, of another shape or mesh."""
    if not hasattr(layout, "placements") or isinstance(layout, State):
        return
    own_mesh = getattr(layout, "device_mesh", None)
    if tuple(layout.shape) != shape:
        raise UserError(f"the DTensor has shape {tuple(layout.shape)}, but shape is {shape}; give the DTensor's shape")
    if mesh is not None and own_mesh is not None and own_mesh != mesh:
        raise UserError(f"the DTensor is on {own_mesh}, but the plan is for {mesh}; give the DTensor's device_mesh")


def _dtype_of(*layouts: Any) -> torch.dtype:
    """Return the dtype of the first DTensor, or of its spec; the default dtype without one."""
    for layout in layouts:
        dtype = getattr(getattr(layout, "tensor_meta", layout), "dtype", None)
        if isinstance(dtype, torch.dtype):
            return dtype
    return torch.get_default_dtype()


def _require_ascending(ranks: NDArray[np.int64]) -> None:
    for mesh_dim in range(ranks.ndim):
        if bool((np.diff(ranks, axis=mesh_dim) <= 0).any()):
            raise UserError(
                f"the ranks {ranks.tolist()} of the mesh do not ascend along mesh dim {mesh_dim}; the library needs "
                "ascending ranks, as torch sorts the ranks of a group by default"
            )
