"""The ranks of bench_redistribution: calibrate, then every planner on the same pairs, turn and turn about."""

import json
import math
import os
import random
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.util import find_spec
from itertools import permutations
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from benchmarks.random_states import spmd_shardings
from distbench import redistribute
from distbench.cases.calibration import calibration_cases, square_of
from distbench.cases.redistribution import Experiment, planned_pair
from distbench.planning.cost_profile import DIRECT, Profile, Sample, fit_line
from distbench.ranks.context import RankContext
from distbench.ranks.device import HostClock, calm_scheduler
from distbench.ranks.measure import Meter, RankGroup
from distbench.redistribute.expected_shards import (
    Layout,
    Pair,
    dtensor_under,
    shard_under,
    tagged,
    torch_placements,
)
from distbench.spec import Calibration, Job, Scenario, Settings, parse_mesh, placement_pairs
from distbench.statistics.intervals import median
from distbench.torch_private import Unsupported
from distbench.worker.rank_session import connected_ranks

PLANNERS = ("greedy", "min_cost", "calibrated", "calibrated+native", "direct")
CALIBRATED_SIZES = (65536, 524288, 4194304, 16777216)
# Size to (pairs, turns); none of these sizes is calibrated.
SWEEPS = {262144: (10, 3), 2097152: (10, 3), 8388608: (32, 4), 33554432: (6, 2)}
# Backward's size to (pairs, turns); the gradients of these pairs must move too.
BACKWARD = {8388608: (16, 3)}
# Bytes, pairs and turns of the comparison with spmd_types' own calls.
SPMD = (8388608, 16, 8)
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


def pairs_of(mesh_ndim: int, count: int, size_bytes: int, backward: bool = False) -> list[tuple[Any, Any]]:
    """A sample of the ordered pairs in which ranks must communicate, each equally likely, the same on every rank."""
    pairs = [pair for pair in placement_pairs(mesh_ndim) if not is_local(*pair)]
    if backward:
        pairs = [(source, target) for source, target in pairs if not is_local(target, returned(source))]
    return random.Random(f"{SEED}/{mesh_ndim}/{size_bytes}").sample(pairs, count)


def returned(source: tuple[str, ...]) -> tuple[str, ...]:
    """The layout of a source's gradient."""
    return tuple("R" if "P" in placement else placement for placement in source)


def is_local(source: tuple[str, ...], target: tuple[str, ...]) -> bool:
    """Whether every planner moves it without a collective: only replicas are cut, in order."""
    return all(before in (after, "R") for before, after in zip(source, target, strict=True))


def compare(
    source: tuple[str, ...], target: tuple[str, ...], size_bytes: int, turns: int, context: RankContext, backward: bool
) -> Any:
    """Each planner's path, prediction and samples on one pair; planners with the same path share their samples.

    The pair of a backward is the gradient's: from the target to the source, whose Partials are replicas.
    """
    shape = square_of(size_bytes, 4, context.mesh.size())
    forward = Pair.of("".join(source), "".join(target), shape)
    pair = Pair.of("".join(target), "".join(returned(source)), shape) if backward else forward
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
                    facts = {"predicted_s": planned.predicted_s, "planning_s": planned.planning_s}
                    planners.setdefault(name, {"key": key, **facts, "path": planned.path})
                    if key not in seen:
                        run = planned.call if not backward else backward_of(forward, planner, experiment, context)
                        estimate_s = meter.warm_up(lambda _, run=run: run())
                        samples[key] += meter.measure(lambda _, run=run: run(), (), estimate_s).samples_s
                    seen.add(key)
            except Unsupported:
                continue
    texts = {"source": "".join(source), "target": "".join(target), "direction": "backward" if backward else "forward"}
    return {**texts, "shape": shape, "size_bytes": size_bytes, "planners": planners, "samples": samples}


def backward_of(forward: Pair, planner: str, experiment: Experiment, context: RankContext) -> Callable[[], Any]:
    """Autograd's call of a pair's backward, in the context of a planner: DTensor's, or the library's for `direct`."""
    source, gradient = (
        dtensor_under(experiment.full, layout, context) for layout in (forward.source, experiment.pair.source)
    )
    if planner == DIRECT:
        source, gradient = source.to_local(), gradient.to_local()
        states = forward.source.state, forward.target.state
        plan = redistribute.plan(*states, forward.shape, context.mesh, context.profile, planner=DIRECT)
        moved: Any = redistribute.execute(source.requires_grad_(), plan)
    else:
        moved = source.requires_grad_().redistribute(context.mesh, torch_placements(forward.target))
    return lambda: torch.autograd.grad(moved, source, gradient, retain_graph=True)


def compare_spmd(context: RankContext) -> list[dict[str, Any]]:
    """spmd_types' own calls and ours on pairs that it accepts: samples, and which of them give wrong values."""
    import spmd_types as spmd

    size_bytes, count, turns = SPMD
    shape = square_of(size_bytes, 4, context.mesh.size())
    full, names, rows = tagged(shape, torch.float32), list(context.mesh_dims), []
    meter, order = meter_of(context, SAMPLES_A_TURN), random.Random(SEED)
    pairs = list(permutations(spmd_shardings(names), 2))
    for source, target in order.sample(pairs, len(pairs)):
        plan = redistribute.plan(source, target, shape, context.mesh, context.profile)
        before, after = (Layout.of(str(state), 2) for state in (plan.source, plan.target))
        # DTensor's placements have no order of axes; spmd_types reads the local tensor only.
        x, placements = dtensor_under(full, before, context), torch_placements(after)

        def own(x: Any = x, ends: Any = (source, target)) -> Any:
            return spmd.spmd_redistribute(x, *ends)

        def ours(x: Any = x, plan: Any = plan, placements: Any = placements) -> Any:
            local: Any = redistribute.execute(x.to_local(), plan)
            return DTensor.from_local(local, context.mesh, placements, run_check=False)

        try:
            own_result = own()
        except (NotImplementedError, ValueError, RuntimeError):
            continue  # on all ranks
        ways = {"own": own, "ours": ours}
        expected, samples = shard_under(full, after, context), defaultdict(list)
        wrong = {
            name: context.mesh.size() > sum_over(torch.equal(result.to_local(), expected))
            for name, result in (("own", own_result), ("ours", ours()))
        }
        for _ in range(turns):
            for name in order.sample(list(ways), len(ways)):
                estimate_s = meter.warm_up(lambda _, run=ways[name]: run())
                samples[name] += meter.measure(lambda _, run=ways[name]: run(), (), estimate_s).samples_s
        ends = {"source": str(plan.source), "target": str(plan.target), "planner": plan.planner}
        rows.append({**ends, "wrong": wrong, "samples": samples})
        if len(rows) == count:
            break
    return rows


def sum_over(is_right: bool) -> int:
    """The number of ranks on which something is right."""
    total = torch.tensor(int(is_right))
    dist.all_reduce(total)
    return int(total)


def main(mesh_text: str, out: Path, requested: Mapping[str, Any]) -> None:
    """Calibrate and compare; rank 0 writes the rows. `asked`: other `sweeps`, `backward` and `sizes_bytes`."""
    sweeps, sizes_bytes = dict(requested.get("sweeps", SWEEPS)), tuple(requested.get("sizes_bytes", CALIBRATED_SIZES))
    mesh = parse_mesh(mesh_text)
    assert math.prod(mesh.values()) == int(os.environ["WORLD_SIZE"])
    job = Job("", "", "", __file__, [], [], mesh, "cpu", Settings(), "", "", 60.0, 0.0)
    calm_scheduler("cpu")
    with connected_ranks(job) as ranks:
        context = replace(ranks.context, profile=calibrated(ranks.context, sizes_bytes))
        rows = [
            compare(*pair, size_bytes, turns, context, backward)
            for backward, sizes in ((False, sweeps), (True, dict(requested.get("backward", BACKWARD))))
            for size_bytes, (count, turns) in sizes.items()
            for pair in pairs_of(len(mesh), count, size_bytes, backward)
        ]
        spmd_rows = compare_spmd(context) if find_spec("spmd_types") and "sweeps" not in requested else []
        if context.rank == 0:
            assert context.profile is not None
            context.profile.save(out.with_suffix(".profile.json"))
            out.with_suffix(".spmd.json").write_text(json.dumps(spmd_rows))
            out.write_text(json.dumps(rows))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3]) if len(sys.argv) > 3 else {})
