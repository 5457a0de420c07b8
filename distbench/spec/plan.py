"""What a scenario declares: a model, how it is parallelised, and which paths to time on their own.

torch objects pass through untouched (hence `Any`): a scenario builds them, the worker uses them.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

COLLECTIVE_OPS = ("all_gather", "reduce_scatter", "all_to_all", "all_reduce", "broadcast")
# torch's two, and ours: the cheapest path under a profile, and one exchange without a path.
PLANNERS = ("greedy", "min_cost", "calibrated", "direct")
LABORATORY_SUITES = ("pairs", "partials", "shard_orders", "uneven", "flattened", "backward", "strided")
DTYPES = ("f32", "bf16", "f16", "f64")


@dataclass(frozen=True)
class FsdpPlan:
    """FSDP2: which modules `fully_shard` wraps, each on its own, before the root.

    Args:
        wrap: glob patterns over module names.
        mesh_dims: mesh dims whose ranks share the parameters' shards; several are flattened into one.
        reshard_after_forward: as `fully_shard` takes it: None, a bool, or an int group size.
        mixed_precision: a `MixedPrecisionPolicy`, or None for torch's default.
    """

    wrap: tuple[str, ...] = ()
    mesh_dims: tuple[str, ...] = ("dp_shard",)
    reshard_after_forward: bool | int | None = None
    mixed_precision: Any = None


@dataclass(frozen=True)
class CpPlan:
    """Context parallel: ring attention over one mesh dim.

    Args:
        mesh_dim: the mesh dim that shards the sequence.
        rotate: how K and V travel round the ring: "allgather" or "alltoall".
        load_balance: give each rank a head and a tail chunk of the sequence, so that causal work is even.
        seq_dim: tensor dim of inputs and targets that is the sequence.
    """

    mesh_dim: str = "cp"
    rotate: str = "allgather"
    load_balance: bool = True
    seq_dim: int = 1


@dataclass(frozen=True)
class ParallelPlan:
    """How the model is laid over the mesh: tensor parallel first, then context parallel, then FSDP.

    Args:
        tp: glob pattern over module names to torch `ParallelStyle`, or a callable `(model, mesh) -> model`.
        tp_dim: the mesh dim that the styles shard over.
        cp: context parallel, or None.
        fsdp: FSDP2, or None.
    """

    tp: Mapping[str, Any] | Callable[[Any, Any], Any] | None = None
    tp_dim: str = "tp"
    cp: CpPlan | None = None
    fsdp: FsdpPlan | None = None


@dataclass(frozen=True)
class Collectives:
    """Every op x size x dtype over every mesh dim, all groups of a mesh dim at once.

    Args:
        ops: names out of COLLECTIVE_OPS.
        sizes_bytes: S as nccl-tests has it: the full gathered or scattered buffer, or the per-rank buffer.
        dtypes: names out of DTYPES.
    """

    ops: tuple[str, ...] = COLLECTIVE_OPS
    sizes_bytes: tuple[int, ...] = (1024, 65536, 4194304)
    dtypes: tuple[str, ...] = ("f32",)


@dataclass(frozen=True)
class Redistributions:
    """DTensor redistributions of one global shape over the whole mesh, by each planner.

    Args:
        shape: the global tensor's shape.
        pairs: (source, target), each one placement a mesh dim: `("S(0)", "R")`.
        dtype: a name out of DTYPES.
        planners: names out of PLANNERS. None given: greedy and min_cost, and with a profile also calibrated, and direct
            for the pairs that it can move.
        native_all_to_all: on CPU, run DTensor's all-to-alls as such, and not as all-gathers as torch does there.
    """

    shape: tuple[int, ...]
    pairs: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]
    dtype: str = "f32"
    planners: tuple[str, ...] = ()
    native_all_to_all: bool = False


@dataclass(frozen=True)
class Laboratory:
    """One suite of redistributions over the whole mesh; which pairs follows from the mesh that is really used.

    Args:
        suite: a name out of LABORATORY_SUITES.
        sizes_bytes: of the global tensor, about; suites on awkward shapes use the first, or choose their own.
        max_pairs: pairs at most, at each size; above it a sample, pairs that differ by names only last. 0: all.
        dtype: a name out of DTYPES.
        planners: names out of PLANNERS. None given: all that can move the pair; calibrated only with a profile.
        native_all_to_all: on CPU, run DTensor's all-to-alls as such, and not as all-gathers as torch does there.
    """

    suite: str
    sizes_bytes: tuple[int, ...] = (262144, 8388608)
    max_pairs: int = 30
    dtype: str = "f32"
    planners: tuple[str, ...] = ()
    native_all_to_all: bool = False


@dataclass(frozen=True)
class Calibration:
    """Every step that DTensor's redistributions are made of, over every mesh dim, and the direct exchange.

    Args:
        sizes_bytes: of the global tensor; lines are fitted to these.
        held_out_bytes: of the global tensor; lines are judged by these.
        dtype: a name out of DTYPES.
    """

    sizes_bytes: tuple[int, ...]
    held_out_bytes: tuple[int, ...] = ()
    dtype: str = "f32"


@dataclass(frozen=True)
class Scenario:
    """What one variant of a scenario measures. Every part is optional.

    Args:
        build_model: makes the model; called under the meta device, so it must not read parameter values.
        make_batch: `(inputs, targets)` of the global batch on the CPU, batch first; the same on every rank.
        loss: `(output, targets) -> scalar`, a mean over the batch.
        optimizer: parameters to optimizer; None leaves the optimizer phase out.
        plan: how the model is parallelised.
        collectives: sweeps to time on their own.
        redistributions: sweeps to time on their own.
        laboratories: suites of redistributions whose values are checked and whose planners are compared.
        calibrations: sweeps that a cost profile is fitted to.
    """

    build_model: Callable[[], Any] | None = None
    make_batch: Callable[[], tuple[Any, Any]] | None = None
    loss: Callable[[Any, Any], Any] | None = None
    optimizer: Callable[[Any], Any] | None = None
    plan: ParallelPlan = field(default_factory=ParallelPlan)
    collectives: tuple[Collectives, ...] = ()
    redistributions: tuple[Redistributions, ...] = ()
    laboratories: tuple[Laboratory, ...] = ()
    calibrations: tuple[Calibration, ...] = ()


def placement_pairs(
    mesh_ndim: int,
    sources: Sequence[str] = ("R", "S(0)", "S(1)", "P(sum)"),
    targets: Sequence[str] = ("R", "S(0)", "S(1)"),
) -> tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]:
    """Every ordered (source, target) pair of placements on a mesh of `mesh_ndim` mesh dims, source != target."""
    return tuple(
        (source, target)
        for source in itertools.product(sources, repeat=mesh_ndim)
        for target in itertools.product(targets, repeat=mesh_ndim)
        if source != target
    )


def scenario(
    *,
    mesh: Mapping[str, int],
    axes: Mapping[str, tuple[Any, ...]] | None = None,
    quick: Mapping[str, Any] | None = None,
    tags: tuple[str, ...] = (),
) -> Callable[[Callable[..., Scenario]], Callable[..., Scenario]]:
    """Mark a function as a scenario. All arguments must be literals: they are read from the source, not run.

    Args:
        mesh: mesh dim name to size, the default mesh.
        axes: parameter name to the values it takes when the user sets none; all combinations run.
        quick: parameter name to the value it takes under --quick.
        tags: words to find it by; with "profile", a profile.json in the current folder is used without --profile.
    """

    def mark(function: Callable[..., Scenario]) -> Callable[..., Scenario]:
        return function

    return mark
