"""The ranks of bench_training_step: steps of shipped scenarios with and without `calibrated_planning`, taking turns."""

import contextlib
import json
import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from benchmarks.bench_training_step import SIDES, STEPS
from benchmarks.redistribution_ranks import calibrated, meter_of
from distbench.plans.training_step import TrainingStep
from distbench.ranks.context import RankContext
from distbench.ranks.device import calm_scheduler
from distbench.spec import Job, Settings, parse_mesh
from distbench.statistics.intervals import median
from distbench.torch_private import calibrated_planning
from distbench.worker.rank_session import connected_ranks, load_scenario

SCENARIOS = Path(__file__).parents[1] / "scenarios"
# Short turns, so that all sides see the same weather.
TURNS, SAMPLES, WARM_UP, SEED = 24, 5, 2, 20261122
CALIBRATED_SIZES = (16384, 131072, 1048576)


def compare(name: str, parameters: dict[str, Any], context: RankContext) -> dict[str, Any]:
    """Median seconds of a step for each side and turn, and how many plans were ours."""
    step = TrainingStep(load_scenario(SCENARIOS / f"{name}.py", name)(**parameters), context)
    meter, rng = meter_of(context, SAMPLES), random.Random(SEED)
    result: dict[str, Any] = {side: [] for side in SIDES}
    assert context.profile is not None
    for _ in range(TURNS):
        for side in rng.sample(SIDES, len(SIDES)):
            # DTensor keeps what operators chose by the other side's prices.
            _clear_sharding_prop_cache()
            ours = calibrated_planning(context.profile) if side == "ours" else contextlib.nullcontext()
            with ours as counts:
                estimate_s = meter.warm_up(step, WARM_UP)
                result[side].append(median(meter.measure(step, step.phases, estimate_s).samples_s))
            if counts is not None:
                result["plans"] = {"ours": counts.ours, "left to torch": counts.left_to_torch}
    return result


def main(mesh_text: str, out: Path) -> None:
    """Calibrate, then every step of this mesh; rank 0 writes the turns."""
    mesh = parse_mesh(mesh_text)
    job = Job("", "", "", __file__, [], [], mesh, "cpu", Settings(), "", "", 60.0, 0.0)
    calm_scheduler("cpu")
    with connected_ranks(job) as ranks:
        context = replace(ranks.context, profile=calibrated(ranks.context, CALIBRATED_SIZES))
        rows = {
            what: compare(name, parameters, context)
            for what, (name, on, parameters) in STEPS.items()
            if on == mesh_text
        }
        if context.rank == 0:
            out.write_text(json.dumps(rows))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
