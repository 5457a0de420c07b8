"""Context parallel between nodes: simulated, and published by the same team as the rows that simulation misses.

`python -m benchmarks.bench_context_parallel`. torchtitan's Llama 3.1 405B on 512 H100 (FSDP, TP 8, PP 8 and CP 1 to 8,
in float8, compiled; benchmarks/llama3_h100_202412_torchtitan.md, table 6). Pipelines are not simulated, so each row is
held against CP 1's: a stage of eight has layers and little else, and its bubble is the same share of every row. A
layer's time is that of 4 layers less that of 2. AsyncTP, which the published rows have, is not simulated.
"""

import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from benchmarks.bench_simulation import COMPILED, FULL, MACHINE, Recorded, recorded
from benchmarks.claims import Claim, Row
from distbench.simulate.float8 import in_float8
from distbench.simulate.hardware.hardware_file import load_hardware
from distbench.simulate.simulation import Simulation

# Context parallel ranks to tokens/s a GPU.
PUBLISHED = {1: 76, 2: 47, 4: 31, 8: 16}
FEW = (2, 4)
LENGTH = 32768
ALLOWED = 0.15
CLAIMS = (
    Claim(
        "tokens/s of Llama 3.1 405B under CP 2, 4 and 8 as a share of CP 1's, a layer simulated, against torchtitan's "
        "published runs on 512 GPUs: largest error",
        "{most:.1%}",
        "at most 15 %",
    ),
)


def main() -> list[Row]:
    """Rows for the benchmark table; the shares go to stderr."""
    layer_s = {size: _layer_s(size) for size in PUBLISHED}
    rows: list[Row] = []
    for size in list(PUBLISHED)[1:]:
        share, published = layer_s[1] / layer_s[size], PUBLISHED[size] / PUBLISHED[1]
        error = share / published - 1
        print(f"  CP {size}: {share:.3f} of CP 1's (published {published:.3f}, {error:+.1%})", file=sys.stderr)
        rows.append((f"405B, CP {size}", abs(error), ALLOWED))
    return rows


def _layer_s(size: int) -> float:
    """Seconds of a layer, forward and backward, a sequence of LENGTH tokens a rank."""
    steps = []
    for count in FEW:
        choices = (f"batch={8 // size}", f"sequence={LENGTH * size}", f"num_layers={count}", FULL, COMPILED)
        step = Recorded("llama3_405b", f"dp_shard={8 // size},cp={size},tp=8", choices, ())
        with tempfile.TemporaryDirectory() as folder:
            _, _, recording = recorded(step, Path(folder))
        layers = tuple(f"layers.{number}" for number in range(count))
        compiled = replace(recording, head=replace(recording.head, compiled=layers))
        steps.append(Simulation(in_float8(compiled, layers), load_hardware(MACHINE)).timed.step_s)
    return (steps[1] - steps[0]) / (FEW[1] - FEW[0])


if __name__ == "__main__":
    for name, measured, allowed in main():
        print(f"{name}: {measured:g} (allowed {allowed:g})")
