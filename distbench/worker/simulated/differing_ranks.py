"""Which ranks may run another step than rank 0: with smaller shards, none, or another part of the sequence."""

from collections.abc import Iterable, Iterator, Sequence

import torch

from distbench.simulate.recording import Touched
from distbench.spec.parallel import ULYSSES
from distbench.worker.plans.parallelize import shards_sequence
from distbench.worker.plans.training_step import TrainingStep
from distbench.worker.rank.rank_context import RankContext
from distbench.worker.torch_internals import is_strided_shard

Cut = tuple[tuple[int, ...], int]  # ranks along a mesh dim, and the length of what they share out


def differing_ranks(step: TrainingStep, inputs: torch.Tensor, context: RankContext) -> tuple[int, ...]:
    """Of each mesh dim along which ranks differ from rank 0, the last rank: it has least, or of causal work most.

    Args:
        inputs: of the global batch, (batch, sequence, ...).
    """
    lengths: dict[tuple[int, ...], set[int]] = {}
    for ranks, length in (*_cuts_of_parameters(step), *_cuts_of_sequence(step, inputs, context)):
        lengths.setdefault(ranks, set()).add(length)
    found = {rank for ranks, of_ranks in lengths.items() for rank in differing_along(ranks, of_ranks)[-1:]}
    return tuple(sorted({*found, *busier_ranks(step, context)}))


def busier_ranks(step: TrainingStep, context: RankContext) -> tuple[int, ...]:
    """Ranks that have more to do than rank 0, which has no smaller shard than any other."""
    plan = step.plan.cp
    if plan is None or plan.rotate == ULYSSES or not shards_sequence(plan, context) or plan.balances:
        return ()
    # Causal attention: the first rank sees one block of keys, the last one all of them.
    return (_ranks_along(context.mesh.mesh, context.mesh_dims.index(plan.mesh_dim))[-1],)


def differing_along(ranks: tuple[int, ...], lengths: Iterable[int]) -> list[int]:
    """The first of the ranks for each other set of shard sizes than the first rank's, as torch.chunk gives them.

    >>> differing_along((0, 1, 2, 3), {10})
    [3]
    """
    seen: dict[tuple[int, ...], int] = {}
    for place, rank in enumerate(ranks):
        chunks = ((length, -(-length // len(ranks))) for length in sorted(lengths))
        seen.setdefault(tuple(min(max(length - place * chunk, 0), chunk) for length, chunk in chunks), rank)
    return [rank for rank in seen.values() if rank != ranks[0]]


def _cuts_of_parameters(step: TrainingStep) -> Iterator[Cut]:
    for parameter in step.model.parameters():
        placements, mesh = getattr(parameter, "placements", ()), getattr(parameter, "device_mesh", None)
        # In the order in which they share a tensor dim out: TP's shards are cut by FSDP2, whose mesh dim is the outer.
        order = sorted(range(len(placements)), key=lambda mesh_dim: is_strided_shard(placements[mesh_dim]))
        left = list(parameter.shape)
        for mesh_dim in order:
            tensor_dim = getattr(placements[mesh_dim], "dim", None)
            if mesh is not None and tensor_dim is not None:
                yield _ranks_along(mesh.mesh, mesh_dim), left[tensor_dim]
                left[tensor_dim] = -(-left[tensor_dim] // mesh.size(mesh_dim))


def _cuts_of_sequence(step: TrainingStep, inputs: torch.Tensor, context: RankContext) -> Iterator[Cut]:
    """Sequence parallel modules share the sequence out over the ranks of TP."""
    dims = [name for name in step.plan.tp_dims if context.size(name) > 1]
    if step.plan.tp and inputs.ndim > 1 and len(dims) == 1:
        yield _ranks_along(context.mesh.mesh, context.mesh_dims.index(dims[0])), inputs.shape[1]


def _ranks_along(mesh: torch.Tensor, mesh_dim: int) -> tuple[int, ...]:
    """The global ranks along one mesh dim, the others' first."""
    return tuple(mesh.movedim(mesh_dim, -1).reshape(-1, mesh.shape[mesh_dim])[0].tolist())


def nested_ranks(ranks: Sequence[int]) -> Touched:
    """Ranks, counted from the lowest, as loops (count, stride), outermost first; [(1, rank), ...] where they are none.

    Groups along a mesh dim are alike on all ranks but for where they begin.
    """
    lowest = min(ranks)
    ordered = [rank - lowest for rank in sorted(ranks)]
    loops: list[tuple[int, int]] = []
    left = ordered
    while len(left) > 1:
        stride = left[1] - left[0]
        count = next((at for at in range(1, len(left)) if left[at] != left[0] + at * stride), len(left))
        if len(left) % count:
            return [(1, rank) for rank in ordered]
        loops.insert(0, (count, stride))
        left = left[::count]
    again = [0]
    for count, stride in loops:
        again = [base + at * stride for base in again for at in range(count)]
    return loops if again == ordered else [(1, rank) for rank in ordered]
