"""What a prediction costs: an 8B plan from few layers, and a sweep of fifty.

`python -m benchmarks.bench_sweep_cost`. CPU seconds of the process that records a step with 2 and with 4 layers, its
imports and replaying both included; and seconds of the command that sweeps 50 plans of Llama 3 8B on 64 devices. About
4 minutes on two quiet cores.
"""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.bench_simulation import RecordedSteps, all_recorded
from benchmarks.claims import Claim, Row
from distbench.simulate.hardware_file import load_hardware
from distbench.simulate.replay import Simulation

MOST_FEW_S, MOST_SWEEP_S, NUM_PLANS = 8.0, 300.0, 50
IS_LONG = True
CLAIMS = (
    Claim(
        "prediction of a plan of Llama 3 8B from 2 and 4 layers: CPU time; search of 50 plans: time",
        "{:.1f} s; {:.0f} s",
        "at most 8 s; at most 300 s on 2 cores",
        ("few layers*", "sweep*"),
    ),
)


def main() -> list[Row]:
    """Rows for the benchmark table."""
    with tempfile.TemporaryDirectory() as folder:
        step = RecordedSteps("llama3_8b", "dp_shard=8", ("num_layers=2,4",), ())
        cpu_s, _, recordings = all_recorded(step, Path(folder))
        began = time.process_time()
        for recording in recordings:
            simulation = Simulation(recording, load_hardware("h100"))
            print(f"  {simulation.timed.step_s:.3f} s, {simulation.memory.reserved_bytes:,} bytes", file=sys.stderr)
        cpu_s += time.process_time() - began
        sweep_s = _sweep_s(Path(folder) / "sweep")
    return [("few layers: CPU seconds", cpu_s, MOST_FEW_S), (f"sweep of {NUM_PLANS}: seconds", sweep_s, MOST_SWEEP_S)]


def _sweep_s(out: Path) -> float:
    command = [sys.executable, "-m", "distbench", "tune", "llama3_8b", "--world", "64", "--hardware", "h100"]
    limits = ["--plans", str(NUM_PLANS), "--max-time", "30min", "--results", str(out), "--quiet"]
    began = time.monotonic()
    subprocess.run([*command, *limits], check=True, stdout=subprocess.DEVNULL)
    return time.monotonic() - began


if __name__ == "__main__":
    for name, value, allowed in main():
        print(f"{name}: {value:g} (allowed {allowed:g})")
