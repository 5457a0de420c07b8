"""Input of `distbench redistribute`: the tensor, mesh and prices, pairs of layouts, and torch's paths for them."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from distbench.planning.cheapest_path import Problem
from distbench.planning.cost_profile import (
    COLLECTIVES,
    MeasuredCost,
    MeshCost,
    Profile,
    TorchCost,
    load_profile,
    measured_cost,
)
from distbench.planning.placement_states import NotHandled, State, parse_state
from distbench.planning.redistribution_plans import Setting
from distbench.processes import ask_child
from distbench.records.run_file import DTYPE_BYTES
from distbench.spec.devices import device_of, known_device
from distbench.spec.errors import UserError
from distbench.spec.mesh import MESH_DIMS, check_num_ranks, format_mesh, mesh_dim_size, parse_mesh
from distbench.spec.placements import TORCH_PLANNERS, format_placements
from distbench.spec.printable_text import count_text, cut

PLACEMENTS = "write R, S(tensor dim), S(tensor dim)[position] or P(sum), one per mesh dim"
MAX_DIGITS = 4000  # Python does not parse longer numbers


def setting_of(
    shape: str, dtype: str, mesh: str, profile_path: Path | None = None, devices_per_host: int | None = None
) -> Setting:
    """Read a tensor, a mesh and a cost model.

    Args:
        shape: shape of the full tensor, such as `4096,4096`.
        dtype: `f64`, `f32`, `bf16` or `f16`.
        mesh: `2x4`, or `dp_shard=2,tp=4`.
        profile_path: profile file, or None for torch's own constants.
        devices_per_host: devices per host that torch assumes; None means 8 with a profile of NCCL, else 1 as on CPU.

    Raises:
        UserError: an argument cannot be parsed, or the profile does not cover the mesh.
    """
    parts = [part.strip() for part in shape.split(",")]
    if not all(part.isascii() and part.isdigit() and len(part) <= MAX_DIGITS and int(part) > 0 for part in parts):
        raise UserError(f"shape {cut(shape)!r} is not a list of sizes above 0; write for example --shape 4096,4096")
    if dtype not in DTYPE_BYTES:
        raise UserError(f"dtype {dtype!r} is unknown; use {', '.join(DTYPE_BYTES)}")
    profile = load_profile(profile_path) if profile_path else None
    mesh_sizes = _mesh(mesh, profile)
    try:
        problem = Problem(tuple(mesh_sizes.values()), tuple(map(int, parts)), DTYPE_BYTES[dtype])
    except NotHandled as reason:
        raise UserError(f"{reason}; give a smaller --shape") from reason
    profile = profile.on(mesh_sizes) if profile else None
    devices = devices_per_host or known_device(device_of(profile.backend if profile else "")).per_host
    model: MeshCost = _measured(profile, mesh_sizes, mesh) if profile else TorchCost(problem.mesh_shape, devices)
    return Setting(problem, mesh_sizes, dtype, devices, model, profile, profile_path)


def prices_text(setting: Setting) -> str:
    """Describe the source of the prices."""
    if setting.profile is None:
        return f"torch's own constants ({count_text(setting.devices_per_host, 'device')} per host), unmeasured"
    return f"profile {setting.profile_path} ({setting.profile.machine})"


def _mesh(text: str, profile: Profile | None) -> dict[str, int]:
    if "=" in text:
        return parse_mesh(text)
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", text):
        raise UserError(f"mesh {text!r} is not valid; write --mesh 2x4 or --mesh dp_shard=2,tp=4")
    sizes = [mesh_dim_size(size, text) for size in text.split("x")]
    if len(sizes) > len(MESH_DIMS):
        raise UserError(f"mesh {cut(text)!r} has {len(sizes)} mesh dims; give at most {len(MESH_DIMS)}")
    unnamed = {f"m{number}": size for number, size in enumerate(sizes)}
    check_num_ranks(unnamed)
    if profile and len(profile.mesh) == len(sizes):
        mesh_sizes = dict(zip(profile.mesh, sizes, strict=True))
        if not _uncovered(profile.on(mesh_sizes), mesh_sizes):
            return mesh_sizes
    return unnamed


def _measured(profile: Profile, mesh_sizes: Mapping[str, int], text: str) -> MeasuredCost:
    if missing := _uncovered(profile, mesh_sizes):
        measured_dims = sorted({(line.mesh_dim, line.group_size) for line in profile.lines if line.op == "all_gather"})
        covered = ", ".join(f"{name} of {size}" for name, size in measured_dims)
        raise UserError(
            f"the profile has prices for mesh dims {covered}, but not for {missing} of mesh {text}; use a measured "
            f"mesh such as --mesh {format_mesh(profile.mesh)}, or measure yours with distbench calibrate"
        )
    return measured_cost(profile, mesh_sizes)


def _uncovered(profile: Profile, mesh_sizes: Mapping[str, int]) -> str | None:
    needed = [(op, name, size) for name, size in mesh_sizes.items() for op in COLLECTIVES if size > 1]
    return next((f"{op} over {name} of {size}" for op, name, size in needed if not profile.line(op, name, size)), None)


def pair_of(source: str, target: str, setting: Setting) -> tuple[State, State]:
    """Parse two layouts in torch's notation, e.g. `S(0)[1]S(0)[0]`.

    As in `DTensor.redistribute`, a mesh dim of the target may have the source's Partial, or P(sum) if the mesh dim
    shards the source (with torch 2.14 or newer, see `zero_filled`).

    Raises:
        UserError: a layout cannot be parsed, or does not fit the tensor or mesh.
    """
    states = _state(source, setting), _state(target, setting)
    for mesh_dim in dict(set(states[1].partials) - set(states[0].partials)).keys() - zero_filled(*states):
        before, after = (state.placements()[mesh_dim] for state in states)
        raise UserError(
            f"{source} -> {target} converts {format_placements([before])} to {format_placements([after])}, but "
            "DTensor.redistribute makes Partial only from S(dim), as P(sum); write R or S(dim) instead"
        )
    return states


def zero_filled(source: State, target: State) -> set[int]:
    """Return the mesh dims whose shards become P(sum)."""
    sharded = {mesh_dim for order in source.orders for mesh_dim in order}
    return {mesh_dim for mesh_dim, reduce_op in target.partials if reduce_op == "sum" and mesh_dim in sharded}


def _state(text: str, setting: Setting) -> State:
    try:
        state = parse_state("".join(text.split()), setting.tensor_ndim)
    except ValueError as error:
        raise UserError(f"{error}" if "write" in str(error) else f"{error}; {PLACEMENTS}") from error
    except NotHandled as reason:
        raise UserError(f"{reason} of {text!r} is unknown; use sum, avg, min, max or product") from reason
    if state.mesh_ndim != len(setting.mesh):
        raise UserError(
            f"{text!r} has {state.mesh_ndim} placements, but mesh {format_mesh(setting.mesh)} has {len(setting.mesh)} "
            f"mesh dims; {PLACEMENTS}"
        )
    if len(ops := {op for _, op in state.partials}) > 1 and ops != {"sum", "avg"}:
        raise UserError(
            f"{text!r} mixes the reduce ops {', '.join(sorted(ops))}, which DTensor rejects; use one reduce op"
        )
    return state


def every_pair(setting: Setting) -> Iterator[tuple[State, State]]:
    """Yield all ordered pairs of different layouts in default shard order, from R, S and P(sum) to R and S."""
    shards = ["R", *(f"S({tensor_dim})" for tensor_dim in range(setting.tensor_ndim))]
    targets = ["".join(choice) for choice in product(shards, repeat=len(setting.mesh))]
    sources = ["".join(choice) for choice in product([*shards, "P(sum)"], repeat=len(setting.mesh))]
    for source, target in product(sources, targets):
        if source != target:
            yield parse_state(source, setting.tensor_ndim), parse_state(target, setting.tensor_ndim)


@dataclass(frozen=True)
class TorchPath:
    """One planner's answer for one pair: its path in torch's own notation, or None and the reason."""

    path: str | None
    reason: str = ""


BUDGET_S, START_S = 20.0, 120.0


@dataclass(frozen=True)
class TorchAnswers:
    """torch's version, one answer per planner and pair, and why torch converts no shard to a partial (None if it does).

    Version and reason are None if the query of torch failed.
    """

    torch: str | None
    paths: dict[str, tuple[TorchPath, ...]]
    no_zero_fill: str | None = None


def ask_torch(setting: Setting, pairs: Sequence[tuple[State, State]], budget_s: float = BUDGET_S) -> TorchAnswers:
    """Return each pair's path by torch's own planners; after `budget_s` seconds of planning, further pairs get no path.

    Never raises: the answers include errors of torch.
    """
    request = {
        "mesh_shape": setting.problem.mesh_shape,
        "shape": setting.problem.shape,
        "dtype": setting.dtype,
        "devices_per_host": setting.devices_per_host,
        "pairs": [[str(source), str(target)] for source, target in pairs],
        "budget_s": budget_s,
    }
    try:
        failure = "the query of torch failed: {why}"
        record: dict[str, Any] = ask_child("plan_paths", given=request, timeout_s=budget_s + START_S, failure=failure)
    except UserError as error:
        record = {"unsupported": str(error)}
    if reason := record.get("unsupported"):
        return TorchAnswers(None, dict.fromkeys(TORCH_PLANNERS, (TorchPath(None, reason),) * len(pairs)))
    timed_out = {"error": "not planned: the time limit was reached"}
    paths = {
        name: tuple(
            TorchPath((answer or timed_out).get("path"), (answer or timed_out).get("error", "")) for answer in answers
        )
        for name, answers in record["paths"].items()
    }
    return TorchAnswers(record["torch"], paths, record["no_zero_fill"])
