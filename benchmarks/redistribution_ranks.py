"""The ranks of bench_redistribution: calibrate, then every planner on the same pairs, turn and turn about."""

import json
import math
import os
import random
import sys
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from distbench.cases.calibration import calibration_cases, square_of
from distbench.cases.redistribution import Experiment, planned_pair
from distbench.planning.cost_profile import Profile, Sample, fit_line
from distbench.ranks.context import RankContext
from distbench.ranks.device import HostClock, calm_scheduler
from distbench.ranks.measure import Meter, RankGroup
from distbench.redistribute.expected_shards import Pair
from distbench.spec import Calibration, Job, Scenario, Settings, parse_mesh, placement_pairs
from distbench.statistics.intervals import median
from distbench.torch_private import Unsupported
from distbench.worker.rank_session import connected_ranks

PLANNERS = ("greedy", "min_cost", "calibrated", "calibrated+native", "direct")
CALIBRATED_SIZES = (65536, 524288, 4194304, 16777216)
# Size to (pairs, turns); none of these sizes is calibrated.
SWEEPS = {262144: (10, 3), 2097152: (10, 3), 8388608: (32, 4), 33554432: (6, 2)}
SAMPLES_A_TURN, CALIBRATION_SAMPLES, SEED = 3, 7, 20260101


def meter_of(context: RankContext, count: int) -> Meter:
    """A meter that takes `count` samples after one iteration of warm-up."""
    settings = Settings(warmup_iterations=1, min_samples=count, max_samples=count, max_case_s=0.0)
    return Meter(RankGroup(context.control, context.device), HostClock(), settings, shared_clock=True)


def calibrated(context: RankContext, sizes_bytes: tuple[int, ...] = CALIBRATED_SIZES) -> Profile:
    """The profile of this mesh, fitted to medians, by distbench's own calibration cases."""
    meter, measured = meter_of(context, CALIBRATION_SAMPLES), defaultdict(list)
    # Groups of other meshes are not what is asked here.
    of_this_mesh = replace(context, hosts=())
    for case_spec in calibration_cases(Scenario(calibrations=(Calibration(sizes_bytes),)), of_this_mesh):
        with case_spec.open() as opened_case:
            estimate_s = meter.warm_up(opened_case.call)
            samples = meter.measure(opened_case.call, (), estimate_s).samples_s
        fields, params = opened_case.fields, case_spec.case.params
        key = params["op"], params["mesh_dim"], fields["group_size"]
        counters = fields["counters"]
        sample = Sample(fields["payload_bytes"], counters["num_copies"], median(samples), counters["num_messages"])
        measured[key].append(sample)
    mesh = dict(zip(context.mesh_dims, context.mesh_shape, strict=True))
    lines = tuple(fit_line(*key, samples) for key, samples in measured.items())
    return Profile("bench", context.backend, torch.__version__, mesh, lines)


def pairs_of(mesh_ndim: int, count: int, size_bytes: int) -> list[tuple[Any, Any]]:
    """A sample of the ordered pairs in which ranks must communicate, each equally likely, the same on every rank."""
    pairs = [pair for pair in placement_pairs(mesh_ndim) if not is_local(*pair)]
    return random.Random(f"{SEED}/{mesh_ndim}/{size_bytes}").sample(pairs, count)


def is_local(source: tuple[str, ...], target: tuple[str, ...]) -> bool:
    """Whether every planner moves it without a collective: only replicas are cut, in order."""
    return all(before in (after, "R") for before, after in zip(source, target, strict=True))


def compare(source: tuple[str, ...], target: tuple[str, ...], size_bytes: int, turns: int, context: RankContext) -> Any:
    """Each planner's path, prediction and samples on one pair; planners with the same path share their samples."""
    pair = Pair.of("".join(source), "".join(target), square_of(size_bytes, 4, context.mesh.size()))
    meter, order = meter_of(context, SAMPLES_A_TURN), random.Random(SEED)
    planners: dict[str, Any] = {}
    samples: dict[str, list[float]] = defaultdict(list)
    for _ in range(turns):
        seen = set()
        for name in order.sample(PLANNERS, len(PLANNERS)):
            planner, _, native = name.partition("+")
            experiment = Experiment(pair, planner, "f32", bool(native), lambda: context)
            try:
                with planned_pair(experiment, context) as planned:
                    key = f"{planned.path} as {'+'.join(planned.executed_as)}"
                    planners[name] = {"key": key, "predicted_s": planned.predicted_s}
                    if key not in seen:
                        estimate_s = meter.warm_up(lambda _, run=planned.call: run())
                        timed = meter.measure(lambda _, run=planned.call: run(), (), estimate_s)
                        samples[key] += timed.samples_s
                    seen.add(key)
            except Unsupported:
                continue
    return {"source": source, "target": target, "size_bytes": size_bytes, "planners": planners, "samples": samples}


def main(mesh_text: str, out: Path, asked: Mapping[str, Any]) -> None:
    """Calibrate and compare; rank 0 writes the rows. `asked`: other `sweeps` and `sizes_bytes` to calibrate."""
    sweeps, sizes_bytes = dict(asked.get("sweeps", SWEEPS)), tuple(asked.get("sizes_bytes", CALIBRATED_SIZES))
    mesh = parse_mesh(mesh_text)
    assert math.prod(mesh.values()) == int(os.environ["WORLD_SIZE"])
    job = Job("", "", "", __file__, [], [], mesh, "cpu", Settings(), "", "", 60.0, 0.0)
    calm_scheduler("cpu")
    with connected_ranks(job) as ranks:
        context = replace(ranks.context, profile=calibrated(ranks.context, sizes_bytes))
        rows = [
            compare(*pair, size_bytes, turns, context)
            for size_bytes, (count, turns) in sweeps.items()
            for pair in pairs_of(len(mesh), count, size_bytes)
        ]
        if context.rank == 0:
            assert context.profile is not None
            context.profile.save(out.with_suffix(".profile.json"))
            out.write_text(json.dumps(rows))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3]) if len(sys.argv) > 3 else {})
