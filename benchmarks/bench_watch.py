"""`distbench.watch`: time that it costs, and which ranks it names, on 4 gloo ranks in one launch.

Blocks of BLOCK steps run in random order: bare, watched (one sampled step per block), and bare again. The difference
of a watched and a bare block is the cost of one sampled step, of which there is one in 100 with `every=100`. Then loops
are watched in which one rank sleeps 20 ms before each step, and loops in which no rank sleeps.
"""

import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.claims import Claim, Row

SIDES = ("bare", "watched", "bare again")
BLOCK, TURNS, EVERY = 5, 100, 100
LATE_S, TRIAL_EVERY, TRIAL_STEPS, NUM_LATE, NUM_QUIET = 0.02, 10, 400, 10, 10
LOOPS = ("DDP", "FSDP2 x TP")
AT_MOST = 0.01
CLAIMS = (
    Claim(
        "CPU time of a loop with `distbench.watch(every=100)` relative to the bare loop, interleaved, with 95 % "
        f"interval: {', '.join(LOOPS)}",
        "; ".join(["{:+.2%} [{:+.2%}, {:+.2%}]"] * len(LOOPS)),
        "interval's end at most +1 %",
        tuple(f"{name}: watched, cpu*" for name in LOOPS),
    ),
    Claim(
        f"`distbench.watch(every={TRIAL_EVERY})` of {TRIAL_STEPS} steps of DDP: of {NUM_LATE} loops with a rank that "
        f"is 20 ms late, those that name this rank only; of {NUM_QUIET} loops without a late rank, those that name one",
        "{:.0f}; {:.0f}",
        f"{NUM_LATE}; at most 1",
        ("named", "false"),
    ),
)
IS_LONG = True


def main() -> list[Row]:
    """Rows (name, measured, allowed): shares of the bare time with both ends of their intervals; numbers of loops."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "watched.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
        subprocess.run([*command, "-m", "benchmarks.watch_ranks", str(out)], check=True, capture_output=True)
        result = json.loads(out.read_text())
    for name in LOOPS:
        for what, at_most in (("cpu", AT_MOST), ("wall", math.inf)):
            seconds = result[name][what]
            rows += shares(f"{name}: watched, {what}", seconds["watched"], seconds["bare"], at_most)
            rows += shares(f"{name}: bare again, {what}", seconds["bare again"], seconds["bare"], math.inf)
        rows.append((f"{name}: step_ms", 1e3 * sum(seconds["bare"]) / len(seconds["bare"]) / BLOCK, math.inf))
    trials = result["trials"]
    return [*rows, ("named", num_right(trials), -NUM_LATE), ("false", num_false(trials), 0.1 * NUM_QUIET)]


def shares(name: str, these: Sequence[float], those: Sequence[float], at_most: float) -> Iterator[Row]:
    """Mean difference of paired blocks over the time of EVERY bare steps, and its 95 % interval (Student's t)."""
    import numpy as np
    from scipy import stats

    whole = float(np.mean(those)) * EVERY / BLOCK
    differences = (np.array(these) - np.array(those)) / whole
    half = float(stats.t.ppf(0.975, len(differences) - 1) * stats.sem(differences))
    for what, value in (("", 0.0), (", from", -half), (", to", half)):
        yield f"{name}{what}", float(differences.mean()) + value, at_most if what == ", to" else math.inf


def num_right(trials: Sequence[Mapping[str, Any]]) -> int:
    """Loops that name the sleeper, in one group or more, and no other rank."""
    late = [trial for trial in trials if trial["sleeper"] >= 0]
    return sum({rank for rank, *_ in trial["late"]} == {f"rank {trial['sleeper']}"} for trial in late)


def num_false(trials: Sequence[Mapping[str, Any]]) -> int:
    """Loops without a sleeper that name a rank."""
    return sum(bool(trial["late"]) for trial in trials if trial["sleeper"] < 0)


if __name__ == "__main__":
    for row in main():
        print(row)
