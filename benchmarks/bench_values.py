"""Everything our planners and executor produce, on 8 gloo ranks, against shards cut without DTensor: none is wrong."""

import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.claims import Claim, Row

RANKS, CASES = 8, 12000
ANY_ORDER = "ranks in any order"
TORCHS = ("greedy", "min_cost")

CLAIMS = (
    Claim(
        "wrong values in 12,000 generated redistributions by our planners",
        "{total:.0f}",
        "0",
        ("wrong *",),
    ),
    Claim(
        "the same by torch's planners, 1,050 each, torch 2.13.0: greedy, min_cost",
        "{:.0f}, {:.0f}",
        "no limit",
        ("by torch: *",),
    ),
    Claim(
        "the same, 2,050 calibrated plans on meshes with ranks in any order: wrong; rejected",
        "{:.0f}; {:.0f}",
        "0; no limit",
        (f"{ANY_ORDER}: wrong*", f"{ANY_ORDER}: refused*"),
    ),
)
IS_LONG = True


def main() -> list[Row]:
    """Rows for the benchmark table: wrong values for each way; none is allowed."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "values.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
        subprocess.run(
            [*command, "-m", "benchmarks.values_ranks", str(CASES), str(out)], check=True, capture_output=True
        )
        result = json.loads(out.read_text())
    for text in result["wrong"]:
        print(f"wrong: {text}", file=sys.stderr)
    num_any_order = result["num_checked"].pop(ANY_ORDER)
    torchs = [(name, result["num_checked"].pop(name)) for name in TORCHS]
    rows = [
        (f"wrong values of {name}, {count} cases", float(result["num_wrong"].get(name, 0)), 0.0)
        for name, count in sorted(result["num_checked"].items())
    ]
    rows += [
        (f"by torch: wrong or raised by {name}, {count} cases", float(result["num_wrong"].get(name, 0)), math.inf)
        for name, count in torchs
    ]
    rows.append(
        (f"{ANY_ORDER}: wrong values, {num_any_order} cases", float(result["num_wrong"].get(ANY_ORDER, 0)), 0.0)
    )
    rows.append((f"{ANY_ORDER}: refused", float(result["num_refused"]), math.inf))
    rows.append(("plans of these that were left to torch", float(result["num_left_to_torch"]), 0.0))
    return [
        *rows,
        ("cases left unchecked, of 10,000", float(max(10_000 - sum(result["num_checked"].values()), 0)), 0.0),
    ]
