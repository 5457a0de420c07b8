"""Our planners against torch's on 8 gloo ranks, chosen by prediction alone, and how far the predictions are off.

All run in the same processes, turn and turn about, on pairs sampled with a fixed seed. Ours is what `choice.choose`
takes by the profile: the calibrated path, the same with native all-to-alls, the direct exchange, or torch's own path
where none of these is predicted clearly faster.
"""

import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

from benchmarks.claims import Claim, Row
from distbench.planning.redistribution_plans import choose

MESHES = {"2x4": ("dp_shard=2,tp=4", 0.42), "2x2x2": ("dp_replicate=2,dp_shard=2,tp=2", 0.35)}
PLANNERS = ("greedy", "min_cost", "calibrated", "calibrated+native", "direct")
HEADLINE_BYTES, WORST_FROM_BYTES = 8388608, 1048576
FROM_PARTIAL = 0.55
WORST, MEDIAN_ERROR, RANKED, APART = 1.10, 0.20, -0.95, 1.35
# A folder (it must exist) that keeps what was measured, for whoever wants more than these rows.
KEEP = os.environ.get("DISTBENCH_BENCH_KEEP")

CLAIMS = (
    Claim(
        "time of the planner chosen by prediction relative to greedy's (8 MB, 8 ranks): 2x4, 2x2x2",
        "{:.2f}, {:.2f}",
        "at most 0.42, 0.35",
        ("*: ours / greedy, *",),
    ),
    Claim("the same, pairs from Partial only", "{:.2f}, {:.2f}", f"at most {FROM_PARTIAL}", ("*: *from Partial",)),
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
            rows += rows_of(name, json.loads(out.read_text()), target)
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
    headline = [pair for pair in pairs if pair["size_bytes"] == HEADLINE_BYTES]
    plain = [pair for pair in headline if "P(sum)" not in pair["source"]]
    partial = [pair for pair in headline if pair not in plain]
    yield f"{name}: ours / greedy, 8 MB, {len(headline)} pairs", against_greedy(headline, None), target
    yield f"{name}: the same, {len(plain)} pairs without Partial", against_greedy(plain, None), math.inf
    yield f"{name}: the same, {len(partial)} pairs from Partial", against_greedy(partial, None), FROM_PARTIAL
    for planner in ("min_cost", "calibrated", "calibrated+native"):
        yield f"{name}: {planner} / greedy, 8 MB", against_greedy(headline, planner), math.inf
    yield f"{name}: direct / greedy, 8 MB, without Partial", against_greedy(plain, "direct"), math.inf
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
    """Geometric mean of a planner's time over greedy's; None is ours."""
    ratios = [pair["measured_s"][planner or pair["ours"]] / pair["measured_s"]["greedy"] for pair in pairs]
    return geometric_mean(ratios)


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
