"""Changes to a plan that any scenario takes, as parameters of its variants: `--set plan.microbatches=2`.

A scenario's own parameters are its function's; names that begin with `plan.` are never given to it: what they say is
done to the plan that it returns, or to the mesh that this variant runs on.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from distbench.spec.errors import UserError, nearest
from distbench.spec.mesh import Mesh, check_mesh_dims, mesh_dim_size, mesh_size
from distbench.spec.plan import ROTATIONS
from distbench.spec.printable_text import count_text

PREFIX = "plan."
MESH = "plan.mesh"
_MESH_PART = re.compile(r"([a-z_]+?)(\d+)")


@dataclass(frozen=True)
class Knob:
    """One thing about a plan that can be changed.

    Args:
        values: all that it may be, or () for any of the type of `example`.
        needs: the part of a plan without which there is nothing to change: "fsdp", "cp" or "".
    """

    example: Any
    values: tuple[Any, ...] = ()
    needs: str = ""


KNOBS: Mapping[str, Knob] = {
    MESH: Knob("dp_shard2xtp2"),
    "plan.reshard_after_forward": Knob(True, (True, False), "fsdp"),
    "plan.checkpoint": Knob("full", ("none", "full")),
    "plan.microbatches": Knob(2),
    "plan.sync_each_microbatch": Knob(True, (True, False), "fsdp"),
    "plan.rotate": Knob("alltoall", ROTATIONS, "cp"),
    "plan.load_balance": Knob(True, (True, False), "cp"),
    "plan.mixed_precision": Knob("bf16", ("none", "bf16"), "fsdp"),
    "plan.prefetch": Knob(2, needs="fsdp"),
    "plan.compile": Knob("inductor", ("none", "eager", "aot_eager", "inductor")),
}


def is_knob(name: str) -> bool:
    """Whether a name of --set is a change to the plan; UserError where it looks like one and is none."""
    if name.startswith(PREFIX) and name not in KNOBS:
        raise UserError(f"--set {name}: no such change to a plan ({nearest(name, KNOBS)})")
    return name in KNOBS


def check_knob(name: str, value: Any) -> None:
    """Refuse a value that a knob cannot have."""
    knob = KNOBS[name]
    if name == MESH:
        parse_brief_mesh(value)
    elif knob.values and value not in knob.values:
        raise UserError(f"--set {name}={value} is unknown; use {', '.join(map(str, knob.values))}")
    elif not knob.values and not 0 < value < 1 << 16:
        raise UserError(f"--set {name}={value} cannot be used; give a whole number from 1")


def split_variant(variant: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(what the scenario's function is given, what is changed in its plan), of a variant."""
    knobs = {name: value for name, value in variant.items() if name in KNOBS}
    return {name: value for name, value in variant.items() if name not in knobs}, knobs


def brief_mesh(mesh: Mapping[str, int]) -> str:
    """`{"dp_shard": 2, "tp": 2}` to `dp_shard2xtp2`; mesh dims of one rank are left out, unless there are no others."""
    kept = {name: size for name, size in mesh.items() if size > 1} or mesh
    return "x".join(f"{name}{size}" for name, size in kept.items())


def parse_brief_mesh(text: str) -> Mesh:
    """What `brief_mesh` wrote; UserError for anything else."""
    mesh: Mesh = {}
    for part in str(text).split("x"):
        match = _MESH_PART.fullmatch(part)
        if match is None or match[1] in mesh:
            raise UserError(f"--set {MESH}={text} is no mesh; write for example {MESH}=dp_shard2xtp2")
        mesh[match[1]] = mesh_dim_size(match[2], part)
    check_mesh_dims(mesh)
    return mesh


def mesh_of(variant: Mapping[str, Any], mesh: Mapping[str, int]) -> Mesh:
    """The mesh that a variant runs on: `mesh`, or its own of as many ranks, with 1 for what it leaves out of `mesh`.

    Raises:
        UserError: its own has another number of ranks.
    """
    if MESH not in variant:
        return dict(mesh)
    own_mesh = parse_brief_mesh(variant[MESH])
    if mesh_size(own_mesh) != mesh_size(mesh):
        ranks = count_text(mesh_size(own_mesh), "rank")
        problem = f"--set {MESH}={variant[MESH]} has {ranks}, and the launch {mesh_size(mesh)}"
        raise UserError(f"{problem}; give meshes of as many, or --mesh")
    return {**dict.fromkeys(mesh, 1), **own_mesh}
