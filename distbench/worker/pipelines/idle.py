"""How long each rank of a pipeline works on no stage: it waits for others, or sends and receives."""

import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from distbench.compare.medians import median
from distbench.worker.pipelines.pipeline import Pipeline
from distbench.worker.rank.rank_context import RankContext

NUM_STEPS = 3


def idle_counters(pipeline: Pipeline, run: Callable[[], object], context: RankContext) -> dict[str, Any]:
    """The counters of a step's row about that, of NUM_STEPS untimed steps; all ranks do this together.

    `idle_shares`: of each rank, the share of forward and backward in which it runs no forward, loss, backward or
    reduction of gradients of a stage, the median over steps. Ranks begin together, and forward and backward last as
    long as on the rank that they last longest on. `idle_share`: their mean. `least_idle_share`: where all stages take
    as long (`PipelinePlan.least_bubble`), None where the schedule has no such figure.
    """
    taken: list[tuple[float, float]] = []
    for _ in range(NUM_STEPS):
        with pipeline.observed() as working:
            dist.barrier(context.control)
            begun_s = time.monotonic()
            run()
            length_s = time.monotonic() - begun_s
        # The loss is computed within no other span; nothing else runs within another one.
        taken.append((length_s, sum(span.ended_s - span.begun_s for span in working)))
    of_ranks = context.gather(taken)
    longest_s = [max(length_s for length_s, _ in of_step) for of_step in zip(*of_ranks, strict=True)]
    shares = [
        median([max(1 - busy_s / whole_s, 0.0) for (_, busy_s), whole_s in zip(one, longest_s, strict=True)])
        for one in of_ranks
    ]
    return {
        "idle_shares": shares,
        "idle_share": sum(shares) / len(shares),
        "least_idle_share": pipeline.facts["least_idle_share"],
    }
