"""Record launches of unchanged code for benchmarks/gate_quality.py, on a quiet machine or beside restless neighbours.

    python -m benchmarks.gate_record runs/quiet
    python -m benchmarks.gate_record runs/loaded --neighbours 2
    python -m benchmarks.gate_record runs/single -- collectives --quick     (launches of one pass)

A neighbour is a process that computes for a while and rests for a while, both of random length (exponential, mean
0.5 s): on a shared runner others come and go like that. What is launched, unless told otherwise, is `collectives
--quick`, 30 cases, each spread over the launch in passes.
"""

import argparse
import multiprocessing
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from distbench.judge.ab import launch_unchanged
from distbench.spec import UserError

MEAN_S = 0.5
LAUNCHED = ("collectives", "--quick", "--passes", "24", "--budget", "12")


def restless(seed: int) -> None:
    """Compute and rest in turn until stopped."""
    draw, matrix = random.Random(seed), np.ones((200, 200))
    while True:
        until = time.monotonic() + draw.expovariate(1 / MEAN_S)
        while time.monotonic() < until:
            matrix @ matrix
        time.sleep(draw.expovariate(1 / MEAN_S))


def main(arguments: Sequence[str]) -> int:
    """Record; 0, or 2 where a launch could not work."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("launched", nargs="*", metavar="-- SCENARIO...", help="what distbench run is given")
    parser.add_argument("--launches", type=int, default=64)
    parser.add_argument("--neighbours", type=int, default=0)
    given = parser.parse_intermixed_args(arguments)
    processes = [
        multiprocessing.Process(target=restless, args=(seed,), daemon=True) for seed in range(given.neighbours)
    ]
    for process in processes:
        process.start()
    try:
        print(
            launch_unchanged(
                given.launched or LAUNCHED, given.launches, given.folder, lambda line: print(line, file=sys.stderr)
            )
        )
    except UserError as error:
        print(f"gate_record: {error}", file=sys.stderr)
        return 2
    finally:
        for process in processes:
            process.terminate()
            process.join()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
