"""`distbench check --all` of transformers' and torchtitan's recipes: seconds per row, rows without a reason, and memory
marked `~` relative to recordings of all layers.
"""

import json
import math
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

from benchmarks.claims import Claim, Row
from benchmarks.kept import kept
from distbench.spec import UserError
from distbench.spec.discovery import find
from distbench.spec.recipes import INSTALLS, recipe_configs
from distbench.worker.rank_session import declared, load_scenario
from distbench.worker.recipe_memory import ALL, Recipe

IS_LONG = True
MOST_S = 60.0
CLAIMS = (
    Claim(
        "`distbench check --all`, hf and torchtitan: rows neither built nor rejected with a reason; slowest row",
        "{:.0f}, {:.0f}; {:.0f} s, {:.0f} s of CPU time",
        "0; 60 s",
        ("*without a reason", "*CPU time of the slowest*"),
    ),
    Claim(
        "memory marked `~` by `check --all`, relative to a recording of all layers: largest error; plans",
        "{:.1%}; {:.0f}",
        "1 %",
        ("memory marked ~: largest error", "memory marked ~: plans"),
    ),
)


def main() -> list[Row]:
    """Rows (name, measured, allowed); prints a line per recipe."""
    table: list[Row] = []
    errors: list[float] = []
    for source in INSTALLS:
        try:
            recipe_configs(source)
        except UserError as error:
            print(f"left out: {error}")
            continue
        rows = kept(f"recipes-{source}", partial(rows_of, source), "scenarios")
        print(f"{source:44} {'verdict':13} {'s':>6} {'CPU s':>6}")
        for row in rows:
            print(f"{row['recipe']:44} {row['verdict']:13} {row['seconds']:6.0f} {row.get('process_s', 0.0):6.0f}")
            if row["reason"]:
                print(f"    {row['reason']}")
        errors += kept(f"recipes-{source}-memory", partial(errors_of, source, rows), "scenarios")
        without = sum(row["verdict"] in ("rejected", "plan invalid") and not row["reason"] for row in rows)
        table += [
            (f"{source}: recipes", float(len(rows)), -1.0),
            # Without a module that a source needs, all its recipes are rejected with a reason.
            (f"{source}: built", float(sum(row["verdict"] != "rejected" for row in rows)), -len(rows) / 2),
            (f"{source}: rejected without a reason", float(without), 0.0),
            (f"{source}: CPU time of the slowest row, s", max(row.get("process_s", 0.0) for row in rows), MOST_S),
            (f"{source}: wall time of the slowest row, s", max(row["seconds"] for row in rows), math.inf),
        ]
    table.append(("memory marked ~: largest error", max(errors, default=0.0), 0.01))
    table.append(("memory marked ~: plans", float(len(errors)), -1.0))
    return table


def errors_of(source: str, rows: Sequence[dict[str, Any]]) -> list[float]:
    """The relative errors of memory from few layers, of the rows' plans and their nearest plans that fit."""
    (entry,) = find(source)
    function = load_scenario(entry.file, entry.name)
    errors = []
    for row in rows:
        for plan in (row, row.get("nearest") or {}):
            if plan.get("depth") in (None, "", ALL):
                continue
            variant = {"config": row["recipe"]}
            recipe = Recipe(function, variant, entry.mesh, declared(function, variant))
            errors.append(abs(plan["peak_bytes"] / recipe.whole_peak_bytes(plan["mesh"], plan["set"]) - 1))
            print(f"{row['recipe']:44} {plan['mesh']} {plan['set']}: {errors[-1]:.2%} from all layers'")
    return errors


def rows_of(source: str) -> list[dict[str, Any]]:
    """The rows of one source, as `--json` prints them."""
    command = [sys.executable, "-m", "distbench", "check", "--all", source, "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode not in (0, 1):
        raise RuntimeError(f"{' '.join(command)} ended with exit code {done.returncode}")
    return [json.loads(line) for line in done.stdout.splitlines()]


if __name__ == "__main__":
    for row in main():
        print(row)
