"""Redistributions between two hosts with a slow link, chosen by prediction alone, against torch's two planners.

The hosts are network namespaces with four ranks each, joined by a cable that is shaped to about a tenth of what ranks
of one host reach. The ranks calibrate there and then try every planner on sampled pairs, turn and turn about.
"""

import json
import math
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

from benchmarks.bench_redistribution import KEEP, chosen, plans_of, rankings, share
from benchmarks.claims import Claim, Row
from benchmarks.two_host_lab import torchrun_on, two_hosts
from distbench.planning.cost_profile import Profile, load_profile

MESH, RANKS_PER_HOST, PORT = "dp_shard=2,tp=4", 4, 29557
MEGABITS_PER_S = int(os.environ.get("DISTBENCH_LAB_MBIT", "800"))
# Size to (pairs, turns).
SWEEPS = {8388608: (24, 2)}
SIZES_BYTES = (65536, 1048576, 8388608)
AGAINST_GREEDY, AGAINST_MIN_COST = 0.60, 0.70
TIMEOUT_S = 400
IS_LONG = True
CLAIMS = (
    Claim(
        "two hosts of 4 ranks, 8 MB on 2x4: time of the planner chosen by prediction relative to greedy's, min_cost's; "
        "rate of the link relative to the rate within a host",
        "{:.2f}, {:.2f}; {:.0%}",
        "at most 0.60, 0.70; about 10 %",
        ("two hosts: ours / *", "two hosts: link*"),
    ),
)


def main() -> list[Row]:
    """(name, measured, allowed)."""
    with tempfile.TemporaryDirectory() as folder, two_hosts(MEGABITS_PER_S) as hosts:
        out = Path(KEEP or folder) / "two-hosts.json"
        requested = json.dumps({"sweeps": list(SWEEPS.items()), "backward": [], "sizes_bytes": SIZES_BYTES})
        module = ("benchmarks.redistribution_ranks", MESH, str(out), requested)
        processes = []
        for host in hosts:
            command, variables = torchrun_on(host, RANKS_PER_HOST, PORT, module)
            processes.append(subprocess.Popen(command, env={**os.environ, **variables}))
        try:
            codes = [process.wait(TIMEOUT_S) for process in processes]
        finally:
            for process in processes:
                process.terminate()
        if any(codes):
            raise RuntimeError(f"the ranks ended with exit codes {codes}")
        share = link_share(load_profile(out.with_suffix(".profile.json")))
        return [*rows_of(json.loads(out.read_text())), ("two hosts: link / within a host", share, math.inf)]


def link_share(profile: Profile) -> float:
    """Bytes a second that a host's ranks receive over the link, of those that they receive from each other."""
    rates = []
    for mesh_dim, size in profile.mesh.items():
        line = profile.line("all_gather", mesh_dim, size)
        assert line is not None
        rates.append((size - 1) / size / line.per_byte_s)
    return rates[0] / rates[1]


def rows_of(pairs: list[dict[str, Any]]) -> Iterator[Row]:
    """The promises, from what the ranks wrote."""
    for pair in pairs:
        times = {key: median(samples) for key, samples in pair["samples"].items()}
        pair["measured_s"] = {planner: times[facts["key"]] for planner, facts in pair["planners"].items()}
        pair["ours"] = chosen(pair)
    yield f"two hosts: ours / greedy, 8 MB, {len(pairs)} pairs", _against("greedy", pairs), AGAINST_GREEDY
    yield f"two hosts: ours / min_cost, 8 MB, {len(pairs)} pairs", _against("min_cost", pairs), AGAINST_MIN_COST
    for planner in ("calibrated", "calibrated+native"):
        ratios = [pair["measured_s"][planner] / pair["measured_s"]["greedy"] for pair in pairs]
        yield f"two hosts: {planner} / greedy", geometric_mean(ratios), math.inf
    best = [min(pair["measured_s"].values()) / pair["measured_s"]["greedy"] for pair in pairs]
    yield "two hosts: best measured / greedy", geometric_mean(best), math.inf
    errors = [abs(predicted / measured - 1) for pair in pairs for predicted, measured in plans_of(pair)]
    yield f"two hosts: median |predicted / measured - 1|, {len(errors)} plans", median(errors), math.inf
    ranked = [right for pair in pairs for right in rankings(pair)]
    yield f"two hosts: ranked right of {len(ranked)} plan pairs 35 % apart", share(ranked), math.inf


def _against(planner: str, pairs: list[dict[str, Any]]) -> float:
    return geometric_mean([pair["measured_s"][pair["ours"]] / pair["measured_s"][planner] for pair in pairs])


if __name__ == "__main__":
    for row in main():
        print(row)
