"""Training steps of shipped scenarios under `calibrated_planning` against without, in one launch, taking turns.

4 gloo ranks, a profile calibrated in the same launch, warm steps at the scenarios' `--quick` sizes, where planning
weighs most. Each side's operators choose their shardings anew in every turn. Beside each ratio stands torch's default
against itself, once more in every turn: nothing can be seen to be closer than that.
"""

import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.claims import Claim, Row

SIDES = ("default", "ours", "default again")
TP, FSDP_AND_TP = "tp=4", "dp_shard=2,tp=2"
SMALL_MODEL = {"dim": 64, "hidden": 128, "sequence": 32}
# Name: scenario, mesh, its parameters.
STEPS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama_2d": ("llama_2d", FSDP_AND_TP, {"dim": 128, "hidden": 512, "num_layers": 2, "sequence": 64}),
    "tp_mlp": ("tp_mlp", TP, {"dim": 256, "hidden": 1024, "sequence": 128, "sequence_parallel": True}),
    "tp_styles": ("tp_styles", TP, {**SMALL_MODEL, "style": "sequence_dtensor"}),
}
AT_MOST = 1.05
CLAIMS = (
    Claim(
        "time of a training step with `calibrated_planning` relative to without, interleaved, 95 % interval: "
        + ", ".join(STEPS),
        "; ".join(["{:.2f} [{:.2f}, {:.2f}]"] * len(STEPS)),
        f"interval's end at most {AT_MOST}",
        tuple(f"{name}: ours*" for name in STEPS),
    ),
)
IS_LONG = True


def main() -> list[Row]:
    """(name, measured, allowed): ratios with both ends of their intervals; the upper end is what is promised."""
    rows: list[Row] = []
    for mesh in dict.fromkeys(mesh for _, mesh, _ in STEPS.values()):
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "turns.json"
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
            subprocess.run(
                [*command, "-m", "benchmarks.training_step_ranks", mesh, str(out)], check=True, capture_output=True
            )
            for name, turns in json.loads(out.read_text()).items():
                print(f"  {name}: plans of one turn: {turns['plans']}", flush=True)
                rows += ratio_of(f"{name}: ours", turns["ours"], turns["default"], AT_MOST)
                rows += ratio_of(f"{name}: default again", turns["default again"], turns["default"], math.inf)
    return rows


def ratio_of(name: str, these: Sequence[float], those: Sequence[float], at_most: float) -> Iterator[Row]:
    """Geometric mean of the ratios of turns, and its 95 % interval: Student's t on the logarithms."""
    import numpy as np
    from scipy import stats

    logs = np.log(np.array(these) / np.array(those))
    half = float(stats.t.ppf(0.975, len(logs) - 1) * stats.sem(logs))
    for what, value in (("", 0.0), (", from", -half), (", to", half)):
        yield f"{name} / default{what}", float(np.exp(logs.mean() + value)), at_most if what == ", to" else math.inf


if __name__ == "__main__":
    for row in main():
        print(row)
