"""Context parallel between nodes: simulated, and published by the same team as the rows that simulation is fitted to.

`python -m benchmarks.bench_context_parallel`. torchtitan's Llama 3.1 405B on 512 H100 (FSDP, TP 8, PP 8 and CP 1 to
8, in float8, compiled, 1F1B; benchmarks/llama3_h100_202412_torchtitan.md, table 6). What a layer takes is simulated,
as 4 layers less 2. Published is a step, which is m + p - 1 times a stage for m micro-batches on p stages, and a stage
has an eighth of the layers. m is not published and taken as 8, a sequence of the local batch each; what else is in it
(embedding, output, optimizer, FSDP's all-gathers) is taken as nothing. AsyncTP, which the published rows have, is not
simulated. Nothing is fitted to them.
"""

import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from benchmarks.bench_simulation import COMPILED, FULL, MACHINE, RecordedSteps, recorded
from benchmarks.claims import Claim, Row
from distbench.simulate.compile_float8 import in_float8
from distbench.simulate.hardware_file import load_hardware
from distbench.simulate.simulation import Simulation

# Context parallel ranks to tokens/s a GPU.
PUBLISHED = {1: 76, 2: 47, 4: 31, 8: 16}
FEW = (2, 4)
LENGTH = 32768
NUM_GPUS, NUM_STAGES, NUM_MICROBATCHES, NUM_LAYERS = 512, 8, 8, 126
ALLOWED = 0.15
CLAIMS = (
    Claim(
        "largest error, without fit, of a simulated layer of Llama 3.1 405B under CP 1, 2, 4 and 8 (torchtitan's "
        "published steps on 512 GPUs)",
        "{most:.1%}",
        "at most 15 %",
    ),
)


def main() -> list[Row]:
    """Rows for the benchmark table; the times go to stderr."""
    rows: list[Row] = []
    for size in PUBLISHED:
        layer_s, published_s = _layer_s(size), _published_s(size)
        error = published_s / layer_s - 1
        times = f"{layer_s * 1000:.0f} ms a layer (published {published_s * 1000:.0f} ms"
        print(f"  CP {size}: {times}, tokens/s {error:+.1%})", file=sys.stderr)
        rows.append((f"405B, CP {size}", abs(error), ALLOWED))
    return rows


def _published_s(size: int) -> float:
    """Seconds of a published step by the layers that one rank's turns last, forward and backward of each."""
    # All 8 ranks of FSDP x CP together have 8 sequences of LENGTH tokens a rank, whatever CP is.
    tokens = NUM_MICROBATCHES * LENGTH * 8 / NUM_GPUS
    turns = NUM_MICROBATCHES + NUM_STAGES - 1
    return tokens / PUBLISHED[size] / (turns * NUM_LAYERS / NUM_STAGES)


def _layer_s(size: int) -> float:
    """Seconds of a layer, forward and backward, a sequence of LENGTH tokens a rank."""
    steps = []
    for count in FEW:
        choices = (f"batch={8 // size}", f"sequence={LENGTH * size}", f"num_layers={count}", FULL, COMPILED)
        step = RecordedSteps("llama3_405b", f"dp_shard={8 // size},cp={size},tp=8", choices, ())
        with tempfile.TemporaryDirectory() as folder:
            _, _, recording = recorded(step, Path(folder))
        layers = tuple(f"layers.{number}" for number in range(count))
        compiled = replace(recording, head=replace(recording.head, compiled=layers))
        steps.append(Simulation(in_float8(compiled, layers), load_hardware(MACHINE)).timed.step_s)
    return (steps[1] - steps[0]) / (FEW[1] - FEW[0])


if __name__ == "__main__":
    for name, measured, allowed in main():
        print(f"{name}: {measured:g} (allowed {allowed:g})")
