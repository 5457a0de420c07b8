"""How often the timing gate is wrong about launches of unchanged code, quiet and beside a neighbour.

The launches stay in `build/gate_rates`, so that a benchmark broken off goes on where it was; both series take about
three quarters of an hour. `python -m benchmarks.gate_quality` shows more of the same launches.
"""

from pathlib import Path

from benchmarks import gate_record
from benchmarks.claims import Row
from distbench.judge.gate_self_test import rates, recorded
from distbench.records.results_folder import run_files_in

FOLDER = Path("build/gate_rates")
SERIES = {"quiet": 0, "neighbour": 1}  # processes that compute and rest beside it
LAUNCHES, COMPARISONS, SEED = 64, 400, 20260101
PAIRS, MAX_FALSE, LEAST_FOUND = (5, 10), 0.05, {"quiet": 0.95, "neighbour": 0.50}
IS_LONG = True


def main() -> list[Row]:
    """Rows (name, measured, allowed): shares of comparisons."""
    rows: list[Row] = []
    for name, neighbours in SERIES.items():
        folder = FOLDER / name
        missing = LAUNCHES - (len(run_files_in(folder)) if folder.is_dir() else 0)
        if missing > 0 and gate_record.main([str(folder), "--launches", str(missing), "--neighbours", str(neighbours)]):
            raise SystemExit(f"bench gate_rates: the launches in {folder} could not be recorded")
        series = recorded(folder)
        for pairs in PAIRS:
            none = rates(series, pairs, "none", series.num_starts(pairs), SEED)
            rows.append((f"{name}, {pairs} pairs, false alarms", none.false_jobs / none.num_comparisons, MAX_FALSE))
        slower = rates(series, max(PAIRS), "+20 %", COMPARISONS, SEED)
        result = slower.detected / slower.num_comparisons
        rows.append((f"{name}, {max(PAIRS)} pairs, +20 % found", result, -LEAST_FOUND[name]))
    return rows
