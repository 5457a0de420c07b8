"""Right optimizers that come out `wrong`, mistaken ones that do not, and what their check costs.

Each right optimizer runs under five plans (TP with FSDP, FSDP, HSDP, TP, DDP), each with a seed of its own, and each
mistaken one under the plans in which it is a mistake, on 4 gloo ranks. The cost is measured on llama_2d and fsdp_stack.
"""

import json
import subprocess
import sys
import tempfile
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks.claims import Claim, Row
from benchmarks.kept import kept

RANKS, IS_LONG = 4, True
DECLARED = ("right_optimizers", "optimizer_mistakes", "optimizer_ranks")
# More than the step of one device's gradients costs would double the check.
MOST_COST = 1.0
CLAIMS = (
    Claim(
        "correct optimizers reported as `wrong` (26 optimizers and step functions, 5 plans and seeds)",
        "{:.0f} of 125",
        "0",
        ("right optimizers called wrong*",),
    ),
    Claim("incorrect optimizers not detected (29 mistakes, up to 3 plans)", "{:.0f} of 85", "0", ("mistakes not*",)),
    Claim(
        "time of the parameter check relative to the gradient check",
        "{least:.2f} to {most:.2f}",
        "at most 1",
        ("parameter check over*",),
    ),
)


def main() -> list[Row]:
    """Rows (name, measured, allowed); prints what was seen of each optimizer."""
    rows, costs = kept("right_optimizers", on_ranks, *(f"benchmarks/{name}.py" for name in DECLARED))
    print(f"{'':42} {'error':>8} {'allowed':>8}  {'wrong':>5} {'cause':>5}   parameter nearest to its bound")
    for (is_right, what), group in groupby(sorted(rows, key=order), key=order):
        print(line(("" if is_right == 0 else "mistake: ") + what, list(group)))
    right = [row for row in rows if row["is_right"] and not row["is_refused"]]
    mistaken = [row for row in rows if not row["is_right"]]
    refused = sorted({row["what"] for row in rows if row["is_refused"]})
    print(f"torch refuses under a plan: {', '.join(refused)}")
    return [
        (f"right optimizers called wrong, of {len(right)}", count(row["wrong"] is not None for row in right), 0.0),
        (f"right optimizers not compared, of {len(right)}", count("optimizer_check" in row for row in right), 0.0),
        ("right optimizers, largest error over what is allowed", max(map(excess, right)), 1.0),
        (f"mistakes not called wrong, of {len(mistaken)}", count(row["wrong"] is None for row in mistaken), 0.0),
        (
            "mistakes without their cause",
            count(row["cause"] not in (row["wrong"] or "") for row in mistaken),
            float("inf"),
        ),
        *((f"parameter check over gradient check, {name}", cost, MOST_COST) for name, cost in costs.items()),
    ]


def on_ranks() -> Any:
    """The rows of the ranks, and the cost of the check by scenario."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
        subprocess.run([*command, "-m", "benchmarks.optimizer_ranks", str(out)], check=True, capture_output=True)
        return json.loads(out.read_text())


def count(flags: Any) -> float:
    """How many are true."""
    return float(sum(flags))


def order(row: dict[str, Any]) -> tuple[bool, str]:
    """Right ones first."""
    return not row["is_right"], row["what"]


def excess(row: dict[str, Any]) -> float:
    """The error over what is allowed."""
    return float(row["param_rel_error"] / (row["param_tolerance"] or 1.0))


def line(name: str, rows: list[dict[str, Any]]) -> str:
    """One optimizer over its plans: the one that is nearest to its bound."""
    compared = [row for row in rows if "param_rel_error" in row]
    num_wrong, num_named = (
        f"{int(count(flags))}/{len(rows)}"
        for flags in (
            (row["wrong"] is not None and not row["is_refused"] for row in rows),
            (bool(row["cause"]) and row["cause"] in (row["wrong"] or "") for row in rows),
        )
    )
    if not compared:
        return f"{name:42} {'-':>8} {'-':>8}  {num_wrong:>5} {num_named:>5}"
    worst = max(compared, key=excess)
    figures = f"{worst['param_rel_error']:8.1e} {worst['param_tolerance']:8.1e}  {num_wrong:>5} {num_named:>5}"
    return f"{name:42} {figures}   {worst['worst_param']}"


if __name__ == "__main__":
    for row in main():
        print(row)
