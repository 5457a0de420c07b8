"""Run files of many days for tests of `distbench site`."""

import math
import random
from pathlib import Path
from typing import Any

from gate_runs import case, records, write

SIZES = [2**power for power in range(6, 20)]
IDS = [f"collective/f32[{size}]/all_gather/tp" for size in SIZES]
SLOWER, RECOVERED, FASTER = IDS[:3]
FACTORS = {SLOWER: [(18, 24, 1.4)], RECOVERED: [(8, 16, 1.5)], FASTER: [(12, 24, 0.7)]}


def write_runs(folder: Path, machine: str = "box-1", count: int = 24, factors: Any = FACTORS) -> Path:
    """A launch per day and commit; one case became slower, one recovered, one became faster."""
    draw = random.Random(machine)
    for index in range(count):
        cases = {}
        for name in IDS:
            change = math.prod(factor for first, stop, factor in factors.get(name, ()) if first <= index < stop)
            cases[name] = case([1e-3 * change * math.exp(draw.gauss(0, 0.01))] * 3)
        about = {"machine": machine, "git_commit": f"{index:02x}" * 20, "torch": f"2.{12 + index // 12}.0"}
        write(
            folder / machine / f"{index:02}.jsonl",
            records(f"{machine}-{index}", 1.8e9 + 86_400 * index, cases, **about),
        )
    return folder
