"""A given path, ours or another planner's, step by step under a cost model: what a table or a prediction is made of."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from distbench.costmodel.mesh_costs import MeshCost
from distbench.planning.direct_exchange import plan_exchange
from distbench.planning.graph import Graph, Move, legal_steps
from distbench.planning.pricing import Pricing, Problem, StepPrice
from distbench.planning.states import State


@dataclass(frozen=True)
class PricedStep:
    """One step of a path: from where to where, by what, at which price."""

    source: State
    target: State
    move: Move
    price: StepPrice


def priced_steps(problem: Problem, model: MeshCost, states: Sequence[State]) -> list[PricedStep]:
    """Every step of a path from its source to its target, priced on the rank that has most to do.

    Raises:
        ValueError: two neighbours are not one legal step apart.
    """
    # A graph of its own: `price` needs none of the shared numbers, and uneven prices are right for even shards too.
    graph = Graph(len(problem.mesh_shape), len(problem.shape), (), even=False)
    pricing = Pricing(graph, problem, model, None)
    steps = []
    for source, target in pairwise(states):
        ops = tuple(sorted({op for _, op in target.partials}))
        moves = [move for following, move in legal_steps(source, ops) if following == target]
        if not moves:
            raise ValueError(f"no single step leads from {source} to {target}")
        masks = [sum(1 << mesh_dim for mesh_dim in order) for order in source.orders]
        steps.append(PricedStep(source, target, moves[0], pricing.price(sum(masks), masks, moves[0])))
    return steps


def least_received_bytes(problem: Problem, source: State, target: State) -> int:
    """The receive lower bound: bytes of the target minus the source, on the rank that lacks most.

    Raises:
        NotHandled: one side has a partial.
    """
    return max(plan_exchange(source, target, problem.shape, problem.mesh_shape).received) * problem.itemsize
