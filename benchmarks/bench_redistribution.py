"""Our planners against torch's on 8 gloo ranks, chosen by prediction alone, and how far the predictions are off.

All run in the same processes, turn and turn about, on pairs sampled with a fixed seed. Ours is what `choice.choose`
takes by the profile: the calibrated path, the same with native all-to-alls, the direct exchange, or torch's own path
where none of these is predicted clearly faster. With DISTBENCH_BENCH_KEEP, `planners.csv` there has every pair.
"""

import csv
import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

from benchmarks.claims import Claim, Row
from distbench.planning.cheapest_path import Problem
from distbench.planning.cost_profile import COLLECTIVES, NATIVE_ALL_TO_ALL, Profile, TorchCost, load_profile
from distbench.planning.placement_states import parse_state
from distbench.planning.redistribution_plans import Setting, choose, plan_of_path, plan_redistribution

MESHES = {"2x4": ("dp_shard=2,tp=4", 0.31), "2x2x2": ("dp_replicate=2,dp_shard=2,tp=2", 0.22)}
MESH_OF_NDIM = {2: (2, 4), 3: (2, 2, 2)}
PLANNERS = ("greedy", "min_cost", "calibrated", "calibrated+native", "direct")
HEADLINE_BYTES, WORST_FROM_BYTES = 8388608, 1048576
FROM_PARTIAL, BACKWARD, SPMD = 0.38, 0.40, 1.05
WORST, MEDIAN_ERROR, RANKED, APART = 1.10, 0.20, -0.95, 1.35
# A folder (it must exist) that keeps what was measured, for whoever wants more than these rows.
KEEP = os.environ.get("DISTBENCH_BENCH_KEEP")

CLAIMS = (
    Claim(
        "time of the planner chosen by prediction relative to greedy's (8 MB, 8 ranks): 2x4, 2x2x2",
        "{:.2f}, {:.2f}",
        "at most 0.31, 0.22",
        ("*: ours / greedy, *",),
    ),
    Claim("the same, pairs from Partial only", "{:.2f}, {:.2f}", f"at most {FROM_PARTIAL}", ("*: *from Partial",)),
    Claim("the same, backward, 16 pairs", "{:.2f}, {:.2f}", f"at most {BACKWARD:.2f}", ("*: backward, ours*",)),
    Claim(
        "the same, worst pair of 1 MB and above, relative to torch's better planner",
        "{most:.2f}",
        "at most 1.10",
        ("*: worst ours*",),
    ),
    Claim(
        "median error of the predicted time of a plan: 2x4, 2x2x2",
        "{:.0%}, {:.0%}",
        "at most 20 %",
        ("*: median |predicted*",),
    ),
    Claim(
        "plan pairs predicted over 35 % apart in the right order",
        "{:.0%}, {:.0%}",
        "at least 95 %",
        ("*: ranked right*",),
    ),
)
CLAIMS += (
    Claim(
        "8 MB, 8 ranks: time of the library relative to spmd_types' own calls, pairs that it moves rightly",
        "{:.2f}, {:.2f}",
        f"at most {SPMD:.2f}",
        ("*: spmd_types, library*",),
    ),
)
IS_LONG = True


def main() -> list[Row]:
    """(name, measured, allowed) for each mesh."""
    rows: list[Row] = []
    for name, (mesh, target) in MESHES.items():
        with tempfile.TemporaryDirectory() as folder:
            out = Path(KEEP or folder) / f"redistribution-{name}.json"
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=8"]
            subprocess.run(
                [*command, "-m", "benchmarks.redistribution_ranks", mesh, str(out)], check=True, capture_output=True
            )
            pairs = json.loads(out.read_text())
            rows += rows_of(name, pairs, target)
            profile = load_profile(out.with_suffix(".profile.json"))
            rows += collective_rows(name, profile)
            rows += spmd_rows(name, json.loads(out.with_suffix(".spmd.json").read_text()))
            if KEEP:
                write_table(Path(KEEP) / "planners.csv", name, pairs)
    return rows


def rows_of(name: str, pairs: list[dict[str, Any]], target: float) -> Iterator[Row]:
    """The promises of one mesh.

    Args:
        name: of the mesh.
        pairs: what the ranks wrote.
        target: geometric mean of ours against greedy that is promised.
    """
    for pair in pairs:
        times = {key: median(samples) for key, samples in pair["samples"].items()}
        pair["measured_s"] = {planner: times[facts["key"]] for planner, facts in pair["planners"].items()}
        pair["ours"] = chosen(pair)
    backward = [pair for pair in pairs if pair["direction"] == "backward"]
    pairs = [pair for pair in pairs if pair not in backward]
    headline = [pair for pair in pairs if pair["size_bytes"] == HEADLINE_BYTES]
    plain = [pair for pair in headline if "P(sum)" not in pair["source"]]
    partial = [pair for pair in headline if pair not in plain]
    yield f"{name}: ours / greedy, 8 MB, {len(headline)} pairs", against_greedy(headline, None), target
    yield f"{name}: the same, {len(plain)} pairs without Partial", against_greedy(plain, None), math.inf
    yield f"{name}: the same, {len(partial)} pairs from Partial", against_greedy(partial, None), FROM_PARTIAL
    for planner in ("min_cost", "calibrated", "calibrated+native"):
        yield f"{name}: {planner} / greedy, 8 MB", against_greedy(headline, planner), math.inf
    yield f"{name}: direct / greedy, 8 MB, without Partial", against_greedy(plain, "direct"), math.inf
    yield f"{name}: backward, ours / greedy, 8 MB, {len(backward)} pairs", against_greedy(backward, None), BACKWARD
    for planner in PLANNERS[1:]:
        yield f"{name}: backward, {planner} / greedy, 8 MB", against_greedy(backward, planner), math.inf
    for size_bytes in sorted({pair["size_bytes"] for pair in pairs}):
        same = [pair for pair in pairs if pair["size_bytes"] == size_bytes]
        for planner in PLANNERS[1:]:
            yield f"{name}: {planner} / greedy, {size_bytes} bytes", against_greedy(same, planner), math.inf
        yield f"{name}: chosen / greedy, {size_bytes} bytes", against_greedy(same, None), math.inf
    for planner in PLANNERS:
        planned = [pair["planners"][planner] for pair in headline if planner in pair["planners"]]
        for number, when in enumerate(("first", "again")):
            taken = median(facts["planning_s"][number] for facts in planned)
            yield f"{name}: planning, {planner}, {when}, CPU us", taken * 1e6, math.inf
    for planner in ("min_cost", "calibrated", "direct"):
        ratios = [peak(pair, planner) / peak(pair, "greedy") for pair in headline if planner in pair["planners"]]
        yield f"{name}: peak of local tensors, {planner} / greedy, 8 MB", geometric_mean(ratios), math.inf
    large = [pair for pair in pairs if pair["size_bytes"] >= WORST_FROM_BYTES]
    yield f"{name}: worst ours / better of torch's, 1 MB and above", max(map(against_better, large)), WORST
    yield f"{name}: share of those over {WORST:g}", share(against_better(pair) > WORST for pair in large), math.inf
    errors = [abs(predicted / measured - 1) for pair in pairs for predicted, measured in plans_of(pair)]
    yield f"{name}: median |predicted / measured - 1|, {len(errors)} plans", median(errors), MEDIAN_ERROR
    ranked = [right for pair in pairs for right in rankings(pair)]
    yield f"{name}: ranked right of {len(ranked)} plan pairs 35 % apart", share(ranked), RANKED


def chosen(pair: dict[str, Any]) -> str:
    """Ours, by prediction alone."""
    planners = pair["planners"]
    return choose({name: planners[name]["predicted_s"] for name in PLANNERS if name in planners})


def against_greedy(pairs: list[dict[str, Any]], planner: str | None) -> float:
    """Geometric mean of a planner's time over greedy's, of the pairs that it moves; None is ours."""
    ratios = [
        pair["measured_s"][planner or pair["ours"]] / pair["measured_s"]["greedy"]
        for pair in pairs
        if planner is None or planner in pair["measured_s"]
    ]
    return geometric_mean(ratios) if ratios else math.nan


def setting_of(mesh: tuple[int, ...], shape: list[int]) -> Setting:
    """A tensor of f32 on a mesh, with torch's constants."""
    names = {f"m{number}": size for number, size in enumerate(mesh)}
    return Setting(Problem(mesh, tuple(shape), 4), names, "f32", 1, TorchCost(mesh, 1))


def peak(pair: dict[str, Any], planner: str) -> int:
    """Bytes of the local tensors before and after a planner's largest step."""
    mesh = MESH_OF_NDIM[len(parse_state(pair["source"], 2).placements())]
    setting = setting_of(mesh, pair["shape"])
    if planner == "direct":
        ends = parse_state(pair["source"], 2), parse_state(pair["target"], 2)
        return plan_redistribution(setting, *ends, planner).peak_bytes
    path = pair["planners"][planner]["path"]
    return plan_of_path(setting, planner, path, tuple(parse_state(one, 2) for one in path.split("->"))).peak_bytes


def collective_rows(name: str, profile: Profile) -> Iterator[Row]:
    """Each collective of 8 MB: measured microseconds, and how many times torch's model's."""
    mesh = tuple(profile.mesh.values())
    model = TorchCost(mesh, 1)
    for number, mesh_dim in enumerate(profile.mesh):
        for op in (*COLLECTIVES, NATIVE_ALL_TO_ALL):
            line = profile.line(op, mesh_dim, mesh[number])
            if line is not None:
                seconds = line.seconds(HEADLINE_BYTES)
                torchs = model.seconds(op.removesuffix("_native"), number, HEADLINE_BYTES, 0)
                yield f"{name}: {op} over {mesh_dim} of {mesh[number]}, 8 MB, us", seconds * 1e6, math.inf
                yield f"{name}: the same, measured / torch's model", seconds / torchs, math.inf


def spmd_rows(name: str, pairs: list[dict[str, Any]]) -> Iterator[Row]:
    """The library against spmd_types' own calls, on pairs that it accepts and moves rightly."""
    if not pairs:
        yield f"{name}: spmd_types, library / its own calls, not installed", math.nan, math.inf
        return
    yield f"{name}: spmd_types, wrong values by the library", sum(pair["wrong"]["ours"] for pair in pairs), 0.0
    yield f"{name}: spmd_types, wrong values by its own calls", sum(pair["wrong"]["own"] for pair in pairs), math.inf
    right = [pair for pair in pairs if not pair["wrong"]["own"]]
    times = [{way: median(samples) for way, samples in pair["samples"].items()} for pair in right]
    ratios = [taken["ours"] / taken["own"] for taken in times]
    yield f"{name}: spmd_types, library / its own calls, {len(right)} pairs", geometric_mean(ratios), SPMD
    yield f"{name}: spmd_types, the slowest of these", max(ratios), math.inf


def write_table(path: Path, name: str, pairs: list[dict[str, Any]]) -> None:
    """Append each planner's row of each pair: median, prediction and planning time, in microseconds."""
    is_new = not path.exists()
    with path.open("a", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        if is_new:
            head = "torch mesh direction bytes source target planner path median_us predicted_us first_plan_us again_us"
            table.writerow(head.split())
        for pair in pairs:
            for planner, facts in pair["planners"].items():
                times = (pair["measured_s"][planner], facts["predicted_s"], *facts["planning_s"])
                where = torch_version(), name, pair["direction"], pair["size_bytes"], pair["source"], pair["target"]
                row = ["" if seconds is None else f"{seconds * 1e6:.1f}" for seconds in times]
                table.writerow([*where, planner, facts["path"], *row])


def torch_version() -> str:
    """Version of torch, without importing it."""
    return metadata.version("torch").partition("+")[0]


def against_better(pair: dict[str, Any]) -> float:
    """Ours over the better of greedy and min_cost."""
    measured: dict[str, float] = pair["measured_s"]
    return measured[pair["ours"]] / min(measured["greedy"], measured["min_cost"])


def plans_of(pair: dict[str, Any]) -> list[tuple[float, float]]:
    """(predicted, measured) seconds of each distinct plan of a pair; plans without a prediction are left out."""
    facts = {facts["key"]: (facts["predicted_s"], pair["measured_s"][name]) for name, facts in pair["planners"].items()}
    return [times for times in facts.values() if times[0]]


def rankings(pair: dict[str, Any]) -> Iterator[bool]:
    """Whether each two plans that are predicted far apart were measured in that order."""
    for first, second in itertools.combinations(sorted(plans_of(pair)), 2):
        if second[0] > APART * first[0]:
            yield first[1] < second[1]


def share(flags: Iterable[bool]) -> float:
    """Share of flags that are set; nan for none."""
    known = list(flags)
    return sum(known) / len(known) if known else math.nan


if __name__ == "__main__":
    for row in main():
        print(row)
