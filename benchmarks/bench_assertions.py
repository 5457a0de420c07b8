"""`distbench.communication`: seeded changes of a plan against a stored file, reruns without a change, and the cost.

Each process has its own hash seed. The cost is the CPU time of a step in the block over the same step outside, in
turns with a second series outside of the block as a control.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.claims import Claim, Row

ROOT = Path(__file__).parent.parent
NUM_PROCESSES, NUM_RERUNS, NUM_ROUNDS = 10, 20, 30
MAX_RATIO = 1.2
# A seeded change of tests/test_communication_assertions.py to the module that its message must have.
NAMED = {
    "down not parallel": "layers.*.down",
    "logits sharded": "lm_head",
    "no gradient sync": "layers.*",
    "one layer left out": "layers.*.down",
    "inputs sharded": "lm_head",
    "no tp": "layers.*.down",
    "bf16": "layers.*",
    "reduce in bf16": "layers.*",
    "kept unsharded": "layers.*",
    "no wrap": "layers.*",
    "no fsdp": "(root)",
    "clipped": "(step)",
}

CLAIMS = (
    Claim(
        f"communication assertions: {len(NAMED)} seeded changes of a plan detected, detected with the right module; "
        f"false alarms in {NUM_PROCESSES * NUM_RERUNS} reruns",
        "{:.0f}, {:.0f}; {:.0f}",
        f"{len(NAMED)}, {len(NAMED)}; 0",
        ("changes detected", "changes with the module", "false alarms"),
    ),
    Claim(
        "CPU time of a step inside the block of `distbench.communication` relative to a step outside; control",
        "{:.2f}x; {:.2f}x",
        f"at most {MAX_RATIO}x",
        ("cost", "control"),
    ),
)

CHILD = """
import sys
sys.path[:0] = [{root!r}, {tests!r}]
from benchmarks import bench_assertions
bench_assertions.{call}
"""


def main() -> list[Row]:
    """Rows (name, measured, allowed): counts and ratios."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.signature"
        called(f"rerun({str(file)!r}, 1)", 0)
        alarms = sum(int(called(f"rerun({str(file)!r}, {NUM_RERUNS})", seed)) for seed in range(NUM_PROCESSES))
        messages = dict(line.split("\t") for line in called(f"changes({str(file)!r})", 1).splitlines())
    named = [change for change, message in messages.items() if f" {NAMED[change]}, " in message]
    cost, control = map(float, called("costs()", 0).split())
    return [
        ("changes detected", len(messages), -len(NAMED)),
        ("changes with the module", len(named), -len(NAMED)),
        ("false alarms", alarms, 0),
        ("cost", cost, MAX_RATIO),
        ("control", control, float("inf")),
    ]


def called(call: str, hash_seed: int) -> str:
    """What a function of this module prints in a new process."""
    program = CHILD.format(root=str(ROOT), tests=str(ROOT / "tests"), call=call)
    environment = {**os.environ, "PYTHONHASHSEED": str(hash_seed)}
    command = [sys.executable, "-W", "ignore", "-c", program]
    return subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout


def rerun(file: str, count: int) -> None:
    """Print how many of so many models and steps differ from the file, which the first one writes."""
    from test_communication_assertions import parallel, step_of

    import distbench
    from distbench.torch_private import fake_ranks

    alarms = 0
    with fake_ranks({"dp_shard": 2, "tp": 2}) as mesh:
        for _ in range(count):
            model = parallel(mesh)
            with distbench.communication(model) as seen:
                step_of(model)()
            if not Path(file).exists():
                seen.write(file)
            try:
                seen.matches(file)
            except AssertionError as error:
                alarms += 1
                print(error, file=sys.stderr)
    print(alarms)


def changes(file: str) -> None:
    """Print a line per detected change: its name, and the message."""
    from test_communication_assertions import parallel, step_of

    import distbench
    from distbench.torch_private import fake_ranks

    with fake_ranks({"dp_shard": 2, "tp": 2}) as mesh:
        for change in NAMED:
            model = parallel(mesh, change)
            with distbench.communication(model, mesh=mesh) as seen:
                step_of(model, clip=float(change == "clipped"))()
            try:
                seen.matches(file)
            except AssertionError as error:
                print(change, " ".join(str(error).split()), sep="\t")


def costs() -> None:
    """Print the ratio of CPU times in the block, and that of two series outside: medians over the rounds."""
    import torch
    from test_communication_assertions import Block
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    import distbench
    from distbench.torch_private import fake_ranks

    torch.set_num_threads(1)
    with fake_ranks({"dp_shard": 2, "tp": 2}) as mesh:
        model = torch.nn.Sequential(*(Block(256) for _ in range(4)))
        for block in model:
            parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
            fully_shard(block, mesh=mesh["dp_shard"])
        fully_shard(model, mesh=mesh["dp_shard"])
        batch = torch.ones(1024, 256)

        def step() -> float:
            begun = time.process_time()
            model(batch).square().mean().backward()
            return time.process_time() - begun

        def step_in_block() -> float:
            begun = time.process_time()
            with distbench.communication(model):
                step()
            return time.process_time() - begun

        rounds = [(step(), step_in_block(), step()) for _ in range(NUM_ROUNDS)][2:]
    plain, inside, again = (statistics.median(times) for times in zip(*rounds, strict=True))
    print(f"{1e3 * plain:.1f} ms per step", file=sys.stderr)
    print(inside / plain, again / plain)


if __name__ == "__main__":
    for name, measured, allowed in main():
        print(f"{name}: {measured:.3f} (allowed {allowed:g})")
