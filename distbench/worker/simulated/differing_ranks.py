"""Which ranks may run another step than rank 0: with smaller shards, none, or another part of the sequence."""

from collections.abc import Iterable, Iterator

import torch

from distbench.worker.plans.training_step import TrainingStep, shards_sequence
from distbench.worker.rank.rank_context import RankContext

MAX_DIFFERING = 15  # recorded beside rank 0; each costs what rank 0 does
Cut = tuple[tuple[int, ...], int]  # ranks along a mesh dim, and the length of what they share out


def differing_ranks(step: TrainingStep, inputs: torch.Tensor, context: RankContext) -> tuple[int, ...]:
    """One rank of each kind that differs from rank 0 along one mesh dim, and the last rank of all where two do.

    Args:
        inputs: of the global batch, (batch, sequence, ...).
    """
    lengths: dict[tuple[int, ...], set[int]] = {}
    for ranks, length in (*_cuts_of_parameters(step), *_cuts_of_sequence(step, inputs, context)):
        lengths.setdefault(ranks, set()).add(length)
    found = [differing_along(ranks, of_ranks) for ranks, of_ranks in lengths.items()]
    plan = step.plan.cp
    if plan is not None and shards_sequence(plan, context) and not plan.load_balance:
        # Causal attention: the first rank sees one block of keys, the last one all of them.
        found.append([_ranks_along(context.mesh.mesh, context.mesh_dims.index(plan.mesh_dim))[-1]])
    along = sorted({rank for ranks in found for rank in ranks})
    if sum(map(bool, found)) > 1:
        along.append(context.mesh.size() - 1)
    return tuple(dict.fromkeys(along))[-MAX_DIFFERING:]


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
        for mesh_dim, placement in enumerate(placements):
            tensor_dim = getattr(placement, "dim", None)
            if mesh is None or tensor_dim is None:
                continue
            # What the other mesh dims leave of this tensor dim on the first rank.
            length = parameter.shape[tensor_dim]
            for other, its in enumerate(placements):
                if other != mesh_dim and getattr(its, "dim", None) == tensor_dim:
                    length = -(-length // mesh.size(other))
            yield _ranks_along(mesh.mesh, mesh_dim), length


def _cuts_of_sequence(step: TrainingStep, inputs: torch.Tensor, context: RankContext) -> Iterator[Cut]:
    """Sequence parallel modules share the sequence out over the ranks of TP."""
    if step.plan.tp and inputs.ndim > 1 and context.size(step.plan.tp_dim) > 1:
        yield _ranks_along(context.mesh.mesh, context.mesh_dims.index(step.plan.tp_dim)), inputs.shape[1]


def _ranks_along(mesh: torch.Tensor, mesh_dim: int) -> tuple[int, ...]:
    """The global ranks along one mesh dim, the others' first."""
    return tuple(mesh.movedim(mesh_dim, -1).reshape(-1, mesh.shape[mesh_dim])[0].tolist())
