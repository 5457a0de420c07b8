"""Whether `check` and a step on real ranks agree, on every shipped plan and on plans of others, right and wrong.

What `check` passes must run on 4 gloo ranks; what it refuses must raise there, or come out wrong, when a step is run
unchecked (`run` asks `check` first). A plan of which a part would do nothing is refused as well, and counted apart.
"""

import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.agree_plans import WITHOUT_EFFECT
from benchmarks.claims import Claim, Row

RANKS, LEAST_PLANS = 4, 60
CLAIMS = (
    Claim(
        "plans with different results of `check` and a step on real ranks; rejected for an unused part",
        "{0:.0f} of {2:.0f}; {1:.0f}",
        "0 of at least 60",
        ("disagreements", "refused*", "plans"),
    ),
)


def main() -> list[Row]:
    """Rows (name, measured, allowed); prints one line a plan."""
    rows = [{**message, **did, "said_why": message["why"]} for message, did in zip(*compared_plans(), strict=True)]
    for row in rows:
        why = f"  {row['said_why'] or row['why']}"[:110]
        print(f"{row['name'][:52]:52} check {row['said']:8} ranks {row['did']:7} {'' if agree(row) else '<<<'}{why}")
    return [
        ("disagreements", float(sum(not agree(row) for row in rows)), 0.0),
        ("refused for a part without effect", float(sum(row["name"] in WITHOUT_EFFECT for row in rows)), math.inf),
        ("plans", float(len(rows)), -float(LEAST_PLANS)),
    ]


def agree(row: dict[str, Any]) -> bool:
    """Whether check and ranks agree; a plan that passes and comes out wrong is the numerical check's, not `check`'s."""
    allowed = {"passes": ("runs", "wrong"), "refuses": ("raises", "wrong"), "skips": ("skips",)}
    return row["did"] in allowed[row["said"]] or (row["said"] == "refuses" and row["name"] in WITHOUT_EFFECT)


def compared_plans() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """What check said and what ranks did, plan by plan."""
    with tempfile.TemporaryDirectory() as folder:
        message, did = Path(folder) / "said.json", Path(folder) / "did.json"
        module = ["-m", "benchmarks.agree_ranks"]
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
        for command in ([*module, "checked", str(message)], [*torchrun, *module, "ran", str(did)]):
            done = subprocess.run([sys.executable, *command], capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"{command[-2]} failed: {done.stderr[-2000:]}")
        return json.loads(message.read_text()), json.loads(did.read_text())
