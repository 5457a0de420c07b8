"""Front ends of the library: layouts as text, torch's placements, DTensors and spmd_types' types, to states."""

import contextlib
import re
import sys
from collections.abc import Mapping, Sequence
from itertools import permutations
from math import prod
from typing import Any

from distbench.planning.placement_states import NotHandled, State, parse_state, state_of
from distbench.spec.errors import UserError
from distbench.spec.placements import Placement

ALLOWED = "use R, S(tensor dim) or P(sum), one per mesh dim"


def layout_of(given: Any, tensor_ndim: int, sizes: Mapping[str, int], mesh: Any) -> tuple[State, State]:
    """Return (the state of a layout, the state of its gradient).

    The gradient of a Partial is replicated, and any other gradient has the layout of its tensor, as in DTensor. Under
    spmd_types the gradient of R is Partial.

    Args:
        given: text such as "S(0)R", torch's placements, a DTensor or its spec, or a PartitionSpec, SpmdType or
            TensorSharding of spmd_types.
        sizes: mesh dim names to ranks, outermost first.
        mesh: the DeviceMesh, if any.

    Raises:
        UserError: the layout is unknown, or does not fit the tensor or mesh.
    """
    try:
        state, gradient = _states_of(given, tensor_ndim, sizes, mesh)
    except NotHandled as reason:
        raise UserError(f"{reason} of layout {given!r} is unknown; {ALLOWED}") from reason
    except ValueError as error:
        raise UserError(str(error) if "write" in str(error) else f"{error}; {ALLOWED}") from error
    if state.mesh_ndim != len(sizes):
        raise UserError(f"layout {given!r} has {state.mesh_ndim} placements, but the mesh has {len(sizes)} mesh dims")
    if len(ops := {op for _, op in state.partials}) > 1 and ops != {"sum", "avg"}:
        raise UserError(f"layout {given!r} mixes the reduce ops {', '.join(sorted(ops))}; use one reduce op")
    return state, gradient


def _states_of(given: Any, tensor_ndim: int, sizes: Mapping[str, int], mesh: Any) -> tuple[State, State]:
    spmd = sys.modules.get("spmd_types")
    if spmd and isinstance(given, spmd.SpmdType):
        return _of_spmd_types(given.local_type, given.partition_spec, tensor_ndim, sizes, mesh)
    if spmd and isinstance(given, spmd.PartitionSpec):
        return _of_spmd_types({}, given, tensor_ndim, sizes, mesh)
    if spmd and isinstance(given, spmd.TensorSharding):
        # A sharding at the border to DTensor, whose gradients are replicated.
        return _of_spmd_types(dict.fromkeys(sizes, spmd.I), given, tensor_ndim, sizes, mesh)
    if isinstance(given, State):
        state = given
    elif isinstance(given, str):
        state = _of_text(given, tensor_ndim)
    elif isinstance(given, Sequence) and given and all(isinstance(part, str) for part in given):
        state = _of_text("".join(given), tensor_ndim)
    else:
        listed = getattr(given, "placements", given)
        if not isinstance(listed, Sequence):
            raise ValueError(f"layout {given!r} is unknown; give a list of placements, such as [Shard(0)], or a text")
        placements = [_placement(placement, tensor_ndim) for placement in listed]
        # Only the spec of a DTensor has a shard order.
        for entry in getattr(given, "shard_order", None) or ():
            for turn, mesh_dim in enumerate(entry.mesh_dims):
                placements[mesh_dim] = Placement(entry.tensor_dim, turn)
        state = state_of(_in_shard_order(placements, tuple(sizes.values())), tensor_ndim)
    return state, State(state.mesh_ndim, state.orders)


def _of_text(text: str, tensor_ndim: int) -> State:
    """Parse a text, in which a negative tensor dim counts from the last."""
    counted = re.sub(r"S\(-(\d+)\)", lambda match: f"S({tensor_ndim - int(match[1])})", "".join(text.split()))
    return parse_state(counted, tensor_ndim)


def _placement(given: Any, tensor_ndim: int) -> Placement:
    """Convert one of torch's placements."""
    name = type(given).__name__
    if name == "Replicate":
        return Placement()
    if name == "Partial":
        return Placement(reduce_op=str(given.reduce_op))
    if name in ("Shard", "_StridedShard"):
        tensor_dim = given.dim + tensor_ndim if given.dim < 0 else given.dim
        if not 0 <= tensor_dim < tensor_ndim:
            raise ValueError(f"placement {given!r} shards a tensor dim that a {tensor_ndim}-D tensor lacks")
        return Placement(tensor_dim, split_factor=getattr(given, "split_factor", None))
    raise ValueError(f"placement {given!r} is unknown")


def _in_shard_order(placements: Sequence[Placement], mesh_shape: Sequence[int]) -> list[Placement]:
    """Return the placements with shard orders in place of strided shards, whose split factor is the number of ranks of
    the later mesh dims that shard the same tensor dim before it.
    """
    ordered = list(placements)
    for tensor_dim in {placement.tensor_dim for placement in placements if placement.split_factor is not None}:
        mesh_dims = [mesh_dim for mesh_dim, placement in enumerate(placements) if placement.tensor_dim == tensor_dim]
        factors = [placements[mesh_dim].split_factor or 1 for mesh_dim in mesh_dims]
        for order in permutations(mesh_dims):
            before = {
                mesh_dim: [other for other in order[:turn] if other > mesh_dim] for turn, mesh_dim in enumerate(order)
            }
            if [prod(mesh_shape[other] for other in before[mesh_dim]) for mesh_dim in mesh_dims] == factors:
                break
        else:
            split = ", ".join(map(str, factors))
            raise ValueError(
                f"strided shards of tensor dim {tensor_dim} with split factors {split} are in no shard order of this "
                "mesh, which the library needs; move them with DTensor.redistribute"
            )
        for turn, mesh_dim in enumerate(order):
            ordered[mesh_dim] = Placement(tensor_dim, turn)
    return ordered


def _of_spmd_types(
    local_type: Mapping[Any, Any], spec: Any, tensor_ndim: int, sizes: Mapping[str, int], mesh: Any
) -> tuple[State, State]:
    """Return the states of spmd_types' types; mesh axes without a type are R."""
    names = tuple(sizes)
    orders: list[list[int]] = [[] for _ in range(tensor_ndim)]
    partials, partial_gradients = [], []
    kinds = {_mesh_dim(axis, names, mesh): kind for axis, kind in local_type.items()}
    for tensor_dim, entry in enumerate(spec or ()):
        for axis in entry if isinstance(entry, tuple) else () if entry is None else (entry,):
            if tensor_dim >= tensor_ndim:
                raise ValueError(f"{spec!r} has more entries than tensor dims ({tensor_ndim})")
            mesh_dim = _mesh_dim(axis, names, mesh)
            if any(mesh_dim in order for order in orders):
                raise ValueError(f"{spec!r} names axis {names[mesh_dim]} twice")
            orders[tensor_dim].append(mesh_dim)
    sharded = {mesh_dim for order in orders for mesh_dim in order}
    for mesh_dim, name in enumerate(names):
        kind = repr(kinds.get(mesh_dim, "R")).strip("'")
        if kind.startswith("S("):
            shard = kinds[mesh_dim].dim
            if not -tensor_ndim <= shard < tensor_ndim:
                raise ValueError(f"type {kind} over {name} shards a tensor dim that a {tensor_ndim}-D tensor lacks")
            orders[shard].append(mesh_dim)
        elif mesh_dim in sharded and kind in "VR":
            continue
        elif kind == "V":
            raise ValueError(f"type V over {name} has no tensor dim; write S(tensor dim) or a PartitionSpec")
        elif kind == "P":
            partials.append((mesh_dim, "sum"))
        elif kind == "R":
            partial_gradients.append((mesh_dim, "sum"))
    shards = tuple(map(tuple, orders))
    return State(len(names), shards, tuple(partials)), State(len(names), shards, tuple(partial_gradients))


def _mesh_dim(axis: Any, names: Sequence[str], mesh: Any) -> int:
    """Return the mesh dim of an axis of spmd_types: a name, a process group or a MeshAxis."""
    if isinstance(axis, str):
        if axis not in names:
            raise UserError(f"axis {axis!r} is not a mesh dim; use {', '.join(names)}")
        return names.index(axis)
    if mesh is not None:
        of = sys.modules["spmd_types"].normalize_axis
        with contextlib.suppress(TypeError, ValueError):  # of an object of another kind
            for mesh_dim in range(len(names)):
                if of(mesh.get_group(mesh_dim)) == of(axis):
                    return mesh_dim
    raise UserError(f"axis {axis!r} is not a mesh dim; use {', '.join(names)}, or give the DeviceMesh of the axis")
