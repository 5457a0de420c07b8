"""Right models that come out `wrong`, and mistaken plans that do not: by the check that follows every timed step.

HF-like Llama (grouped queries), Qwen3 (norms of queries and keys), tied embeddings and a ViT whose keys have a bias
of their own, under tensor or context parallel and FSDP, on 4 gloo ranks: in f32, with FSDP's policy of bf16, in bf16.
"""

import json
import subprocess
import sys
import tempfile
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks.claims import Claim, Row

RANKS = 4
CLAIMS = (
    Claim(
        "correct models reported as `wrong` (Llama, Qwen3, tied, ViT; TP or CP with FSDP; fp32, bf16; 5 seeds each)",
        "{:.0f} of 95",
        "0",
        ("right models called wrong*",),
    ),
    Claim("incorrect plans not detected", "{total:.0f} of 73", "0", ("mistakes not called wrong*",)),
)


def main() -> list[Row]:
    """Rows (name, measured, allowed); prints what was seen of each model and mistake."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
        subprocess.run([*command, "-m", "benchmarks.right_ranks", str(out)], check=True, capture_output=True)
        rows = json.loads(out.read_text())
    print(f"{'':60} {'error':>8} {'allowed':>8} {'rounding':>8}  {'wrong':>5}   of the gradient nearest to its bound")
    for key, group in groupby(rows, key=lambda row: (row["what"], row["precision"])):
        print(line(", ".join(key), list(group)))
    right, mistaken = ([row for row in rows if row["is_right"] == is_right] for is_right in (True, False))
    table = [
        (f"right models called wrong, of {len(right)}", float(sum(row["wrong"] is not None for row in right)), 0.0),
        (
            "right models, largest error over what is allowed",
            max(row["grad_rel_error"] / row["tolerance"] for row in right),
            1.0,
        ),
    ]
    for precision in dict.fromkeys(row["precision"] for row in mistaken):
        of_it = [row for row in mistaken if row["precision"] == precision]
        missed = float(sum(row["wrong"] is None for row in of_it))
        table.append((f"mistakes not called wrong in {precision}, of {len(of_it)}", missed, 0.0))
    return table


def line(name: str, rows: list[dict[str, Any]]) -> str:
    """One model or mistake over its seeds: the one that is farthest off for what it may be."""
    worst = max(rows, key=lambda row: row["grad_rel_error"] / row["tolerance"])
    rounding = f"{worst['grad_rounding']:.1e}" if "grad_rounding" in worst else "-"
    num_wrong = f"{sum(row['wrong'] is not None for row in rows)}/{len(rows)}"
    figures = f"{worst['grad_rel_error']:8.1e} {worst['tolerance']:8.1e} {rounding:>8}  {num_wrong:>5}"
    return f"{name:60} {figures}   {worst['worst_grad']}"
