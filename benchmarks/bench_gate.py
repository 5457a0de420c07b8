"""Time and memory of `distbench gate` on 10,000 cases and 10 launches a side that took turns, 20 samples each.

Also two of its rates on made-up launches (benchmarks/gate_made_up.py), and its and history's rates on recorded ones, as
they are and with deviations as small as on a quiet machine (benchmarks/gate_series.py).

Run it with `python -m benchmarks gate`; it needs about 100 MB of disk in the temp folder.
"""

import json
import math
import random
import tempfile
from pathlib import Path

from benchmarks.bench_report import measure
from benchmarks.claims import Claim, Row
from benchmarks.gate_history import QUIET, figures
from benchmarks.gate_made_up import disturbed, steady_among_noisy
from benchmarks.gate_series import recorded_here, shrunk
from distbench.judge.gate_self_test import WITH_SPOILED, rates

NUM_CASES, NUM_LAUNCHES, NUM_SAMPLES = 10_000, 10, 20
MAX_WALL_S = 20.0
MAX_RSS_GB = 2.0
MIN_FOUND, MAX_FALSE = 0.9, 0.05
NUM_TRIALS = 1000
IS_LONG = True
NUM_PAIRS, NUM_COMPARISONS, SEED = 10, 200, 20260101
SPREADS = {"busy": None, "quiet": QUIET, "medium": 3 * QUIET}  # of a launch's p10; None: as recorded
MAX_HEADED_PASS, LEAST_POWER, LEAST_PLACED = 0.02, 0.85, 0.7
ENVIRONMENT = {"machine": "box", "device": "cpu", "backend": "gloo", "world_size": 4, "num_cpus": 4}

CLAIMS = (
    Claim("`distbench gate` on 10,000 cases x 10 launches per side", "{:.1f} s, {:.2f} GB", "20 s, 2 GB", ("gate,*",)),
    Claim(
        "detection with 5 pairs of a 20 % slower case with 1 % spread among 29 cases with 20 % spread",
        "{:.1%}",
        "at least 90 %",
        ("one case*",),
    ),
    Claim(
        "false alarms with 10 pairs if every second pair is disturbed by 10 %",
        "{:.1%}",
        "at most 5 %",
        ("disturbed*",),
    ),
    Claim(
        "wrong headline PASS with 10 pairs if one case of 30 is 20 % slower (worst of three spreads, 200 comparisons "
        "of recorded launches each)",
        "{most:.1%}",
        "at most 2 %",
        ("*headed PASS",),
    ),
    Claim(
        "power for +20 % in one case if one launch of 20 is three times slower, relative to no such launch (quiet, "
        "medium spread)",
        "{:.0%}, {:.0%}",
        "at least 85 %",
        ("quiet, power*", "medium, power*"),
    ),
    Claim(
        "false verdicts if one launch of 20 is three times slower", "{most:.1%}", "at most 5 %", ("*false verdicts",)
    ),
    Claim(
        "false alarms of `distbench history` in windows of 20 launches (busy; quiet machine)",
        "{:.1%}; {:.1%}",
        "at most 5 %",
        ("history, busy*", "history, quiet*, unchanged*"),
    ),
    Claim(
        "changes of one case by 20 % that `distbench history` locates within one launch (20 launches, quiet machine)",
        "{:.0%}",
        "at least 70 %",
        ("history, quiet machine, +20 % of one case*",),
    ),
)


def main() -> list[Row]:
    """Rows (name, measured, allowed): wall time in seconds, peak resident memory in GB (1e9 bytes), shares."""
    with tempfile.TemporaryDirectory() as folder:
        sides = [Path(folder) / name for name in ("base", "new")]
        draw = random.Random(0)
        for number, side in enumerate(sides):
            side.mkdir()
            for index in range(NUM_LAUNCHES):
                write_launch(side / f"{index:02}.jsonl", f"{side.name}-{index}", 1.0 + 2 * index + number, draw)
        wall_s, rss_gb = measure(["gate", *map(str, sides)], Path(folder) / "output")
    size = f"{NUM_CASES} cases x {NUM_LAUNCHES} launches per side"
    return [
        (f"gate, {size}, wall_s", wall_s, MAX_WALL_S),
        (f"gate, {size}, peak_rss_gb", rss_gb, MAX_RSS_GB),
        ("one case of 1 % spread, +20 %, among 29 of 20 %: 5 pairs, found", steady_among_noisy(NUM_TRIALS), -MIN_FOUND),
        ("disturbed every second pair, coin: 10 pairs, false alarm", disturbed(NUM_TRIALS, is_tossed=True), MAX_FALSE),
        *recorded_rates(),
        *history_rates(),
    ]


def recorded_rates() -> list[Row]:
    """The gate's rates on recorded launches, as they are and with smaller deviations."""
    rows: list[Row] = []
    for name, spread in SPREADS.items():
        series = recorded_here()
        series = shrunk(series, spread) if spread else series
        names = ("+20 %", f"none{WITH_SPOILED}", f"+20 %{WITH_SPOILED}")
        slower, false, spoiled = (rates(series, NUM_PAIRS, change, NUM_COMPARISONS, SEED) for change in names)
        rows += [
            (f"{name}, +20 % in one case, headed PASS", slower.headed_pass / NUM_COMPARISONS, MAX_HEADED_PASS),
            (f"{name}, +20 % in one case, found", slower.detected / NUM_COMPARISONS, math.inf),
            (f"{name}{WITH_SPOILED}, false verdicts", false.false_verdicts / NUM_COMPARISONS, MAX_FALSE),
        ]
        # At the recorded spread next to nothing is found, with and without such a launch.
        rows += [(f"{name}, power{WITH_SPOILED}", spoiled.detected / slower.detected, -LEAST_POWER)] if spread else []
    return rows


def history_rates() -> list[Row]:
    """History's rates on windows of the same launches."""
    allowed = {"any change": MAX_FALSE, "one case placed": -LEAST_PLACED}
    return [
        (name, share, next((bound for end, bound in allowed.items() if name.endswith(end)), math.inf))
        for name, share in figures(NUM_COMPARISONS).items()
    ]


def write_launch(path: Path, run_id: str, started_at: float, draw: random.Random) -> None:
    """A run file of NUM_CASES collectives; launches differ by 2 %, samples of one launch by 20 %."""
    job = {"scenario": "synthetic", "mesh": {"tp": 4}, "started_at": started_at, "device": "cpu", "variants": []}
    header = {"type": "run", "schema_version": 1, "run_id": run_id, "job": job, "environment": ENVIRONMENT}
    with path.open("w", encoding="utf-8") as file:
        file.write(json.dumps(header) + "\n")
        for number in range(NUM_CASES):
            level = draw.gauss(-7, 0.02)
            case = {"id": f"collective/f32[{number}]/all_gather/tp", "kind": "collective", "params": {}}
            samples_s = [draw.lognormvariate(level, 0.2) for _ in range(NUM_SAMPLES)]
            record = {"type": "case", "case": case, "status": "ok", "samples_s": samples_s}
            file.write(json.dumps(record, separators=(",", ":")) + "\n")
        file.write(json.dumps({"type": "footer", "status": "complete", "finished_at": started_at + 0.5}) + "\n")


if __name__ == "__main__":
    for name, measured, allowed in main():
        print(f"{name}: {measured:.2f} (allowed {allowed:g})")
