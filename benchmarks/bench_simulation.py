"""Simulated steps against published ones, and simulated collectives against signatures.

`python -m benchmarks.bench_simulation`. Published are torchtitan's runs of Llama 3.1 on H100 (96 GB, 500 W), which
nobody here made: benchmarks/llama3_h100_202412_torchtitan.md, and of June 2025 the rows of FSDP and TP in bf16 (its
pull request 1299). Memory: nothing is fitted. Time: three figures of the hardware file are, the matmul rate to the
first row, how much slower attention is than on the published device of 700 W to the one at 32,768 tokens without
context parallel, what a ring of more than two devices of a node passes on to the last one (why so little is not
known); the other rows are predictions, those with such a ring are printed without it as well. RMSNorm is written out,
as torch's was then. What is compiled and in float8 is made of the same recording by rules. CPU seconds and memory are
those of recording, in a process of its own.

torchtitan's launch script has set expandable segments since October 2024 (its pull request 643, which says that the
launcher of their cluster did not yet). Which row was launched by which is not published: the table of context parallel,
on one node, is taken as the script's, the others as the cluster's. Each row's memory is printed both ways.
"""

import itertools
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from benchmarks.claims import Claim, Row
from benchmarks.simulated_collectives import collectives_that_differ
from distbench.launch import Request, jobs_of
from distbench.simulate.compile_float8 import in_float8
from distbench.simulate.hardware_file import load_hardware
from distbench.simulate.operator_costs import is_rotation
from distbench.simulate.recording import Recording, load_recordings
from distbench.simulate.simulation import Simulation
from distbench.spec import parse_mesh

ROOT = Path(__file__).parent.parent
GIB = 1 << 30
MACHINE = "h100_96gb"


class Published(NamedTuple):
    """A published run.

    Args:
        kind: "bf16", "float8" or "cp" (in float8): what its throughput is held against; the last also had expandable
            segments.
        reserved_gib: max_reserved; None where none is published.
        tokens_per_s: a GPU.
        fitted: the hardware file's figure that is fitted to it.
    """

    name: str
    kind: str
    is_compiled: bool
    tokens_per_s: float
    reserved_gib: float | None
    fitted: str = ""


class RecordedSteps(NamedTuple):
    """A step to record, and the published runs of it."""

    scenario: str
    mesh: str
    choices: tuple[str, ...]
    runs: tuple[Published, ...]


FULL, COMPILED = "checkpoint=full", "compiled=True"
ATTENTION, RING = "attention_flops", "ring_bytes_per_s"
STEPS = (
    RecordedSteps(
        "llama3_8b",
        "dp_shard=8",
        (),
        (
            Published("8B, FSDP 8, eager", "bf16", False, 5762, 82.4, "matmul_bf16_flops"),
            Published("8B, FSDP 8, compile", "bf16", True, 6667, 77.0),
            Published("8B, FSDP 8, compile, float8", "float8", True, 8532, 76.8),
        ),
    ),
    RecordedSteps(
        "llama3_8b",
        "dp_shard=128",
        ("batch=256",),
        (
            Published("8B, FSDP 128, eager", "bf16", False, 5605, 67.0),
            Published("8B, FSDP 128, compile", "bf16", True, 6514, 62.0),
            Published("8B, FSDP 128, compile, float8", "float8", True, 8380, 61.8),
        ),
    ),
    RecordedSteps(
        "llama3_8b",
        "dp_shard=8,tp=8",
        ("batch=96", COMPILED),
        (Published("8B, FSDP 8 x TP 8, compile", "bf16", True, 4378, None),),
    ),
    RecordedSteps(
        "llama3_70b",
        "dp_shard=32,tp=8",
        (COMPILED,),
        (
            Published("70B, FSDP 32 x TP 8, compile", "bf16", True, 597, None),
            Published("70B, FSDP 32 x TP 8, compile, float8", "float8", True, 829, 71.9),
        ),
    ),
    *(
        RecordedSteps(
            "llama3_8b",
            f"dp_shard={8 // cp},cp={cp}",
            (f"batch={8 // cp}", f"sequence={32768 * cp}", FULL, COMPILED),
            (Published(f"8B, FSDP {8 // cp} x CP {cp}, compile, float8", "cp", True, speed, memory, fitted),),
        )
        for cp, speed, memory, fitted in (
            (1, 3890, 83.9, ATTENTION),
            (2, 2540, 84.2, ""),
            (4, 1071, 84.0, ""),
            (8, 548, 84.5, RING),
        )
    ),
)
ALLOWED = {"bf16": 0.05, "cp": 0.15}
CLAIMS = (
    Claim(
        "error of simulated reserved memory, without fit, for torchtitan's published eager runs: on 8, on 128 GPUs",
        "{:.1%}, {:.1%}",
        "at most 2 %",
        ("reserved, eager*",),
    ),
    Claim(
        "the same for nine published runs with compile (seven in float8): largest error",
        "{most:.1%}",
        "at most 5 %",
        ("reserved, compile*",),
    ),
    Claim(
        "largest error of simulated tokens/s for five bf16 rows (matmul rate fitted to another bf16 row, attention "
        "rate to a float8 row)",
        "{most:.1%}",
        "at most 5 %",
        ("tokens/s, bf16*",),
    ),
    Claim(
        "the same for two float8 rows of context parallel (two more rates fitted to two other rows)",
        "{most:.1%}",
        "at most 15 %",
        ("tokens/s, cp*",),
    ),
    Claim(
        "pairs of rows over 5 % apart in the wrong simulated order",
        "{:.0f}",
        "0",
        ("order*",),
    ),
    Claim(
        "simulated collectives that differ from shipped scenarios' signatures",
        "{:.0f}",
        "0",
        ("collectives*",),
    ),
    Claim(
        "recording a step of Llama 3 8B, 32 layers: CPU seconds, memory",
        "{:.0f} s, {:.0f} MB",
        "at most 15 s, 450 MB",
        ("cost 8B*",),
    ),
    Claim(
        "recording a step of Llama 3 70B, 80 layers, FSDP 32 x TP 8: CPU seconds, memory",
        "{:.0f} s, {:.0f} MB",
        "at most 20 s, 450 MB",
        ("cost 70B*",),
    ),
)
IS_LONG = True


def main() -> list[Row]:
    """Rows for the benchmark table; each published run beside its simulation goes to stderr."""
    rows: list[Row] = []
    speeds: list[tuple[float, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        for step in STEPS:
            cpu_s, peak_mb, recording = recorded(step, Path(folder))
            print(f"  recorded in {cpu_s:.1f} s of CPU, {peak_mb:.0f} MB:", file=sys.stderr)
            for run in step.runs:
                simulation = simulated(recording, run)
                rows += _rows(run, simulation)
                speeds.append((run.tokens_per_s, simulation.tokens_per_s or 0.0))
            if step.runs[0].name == "8B, FSDP 8, eager" or step.scenario == "llama3_70b":
                which, most_s = ("8B", 15.0) if step.scenario == "llama3_8b" else ("70B", 20.0)
                rows += [(f"cost {which}: CPU seconds", cpu_s, most_s), (f"cost {which}: memory, MB", peak_mb, 450.0)]
    pairs = [pair for pair in itertools.combinations(speeds, 2) if abs(pair[0][0] / pair[1][0] - 1) > 0.05]
    wrong = sum((one[0] > other[0]) != (one[1] > other[1]) for one, other in pairs)
    print(f"  {wrong} of {len(pairs)} pairs in the other order", file=sys.stderr)
    rows.append(("order of pairs: the other way round", float(wrong), 0.0))
    # Last, as it imports torch here: children that record would be taken to have this process's memory.
    return [*rows, ("collectives that differ", float(collectives_that_differ()), 0.0)]


def _rows(run: Published, simulation: Simulation) -> list[Row]:
    speed, reserved = simulation.tokens_per_s or 0.0, simulation.memory.reserved_bytes / GIB
    off = speed / run.tokens_per_s - 1
    other = replace(simulation, expandable=not simulation.expandable).memory.reserved_bytes / GIB
    memory = f"; {other:.1f} {'without' if simulation.expandable else 'with'} expandable segments"
    rows: list[Row] = []
    if run.reserved_gib is not None:
        how = "compile" if run.is_compiled else "eager"
        error = reserved / run.reserved_gib - 1
        memory = f" (published {run.reserved_gib}, {error:+.1%}){memory}"
        rows.append((f"reserved, {how}, {run.name}", abs(error), 0.05 if run.is_compiled else 0.02))
    how = f"fitted: {run.fitted}" if run.fitted else f"{off:+.1%}"
    print(
        f"  {run.name}: {speed:,.0f} tokens/s a GPU (published {run.tokens_per_s:,.0f}, {how}"
        f"{_without_ring(run, simulation)}); {reserved:.1f} GiB reserved{memory}",
        file=sys.stderr,
        flush=True,
    )
    if run.kind in ALLOWED and not run.fitted:
        rows.append((f"tokens/s, {run.kind}, {run.name}", abs(off), ALLOWED[run.kind]))
    return rows


def _without_ring(run: Published, simulation: Simulation) -> str:
    """What a row with such a ring would be without the rate that is fitted to the last one."""
    if not any(is_rotation(one) and one.group_size > 2 for one in simulation.recording.collectives):
        return ""
    figures = {name: one for name, one in simulation.hardware.figures.items() if name != RING}
    speed = replace(simulation, hardware=replace(simulation.hardware, figures=figures)).tokens_per_s or 0.0
    return f"; without {RING} {speed:,.0f}, {speed / run.tokens_per_s - 1:+.1%}"


def simulated(recording: Recording, run: Published) -> Simulation:
    """The recorded step as the run had it: compiled, or in float8, layer by layer; the output never is."""
    layers = tuple(f"layers.{number}" for number in range(80))
    recording = replace(recording, head=replace(recording.head, compiled=layers if run.is_compiled else ()))
    in_8 = run.kind in ("float8", "cp")
    recording = in_float8(recording, layers) if in_8 else recording
    return Simulation(recording, load_hardware(MACHINE), expandable=run.kind == "cp")


def recorded(step: RecordedSteps, folder: Path) -> tuple[float, float, Recording]:
    """CPU seconds and peak MB of the process that recorded it, and the recording."""
    cpu_s, peak_mb, (recording,) = all_recorded(step, folder)
    return cpu_s, peak_mb, recording


def all_recorded(step: RecordedSteps, folder: Path) -> tuple[float, float, list[Recording]]:
    """The same of every variant where a choice has several values, all in one process."""
    command = [sys.executable, "-m", "distbench.worker.child", "recordings", str(folder)]
    choices = ("norm=written_out", *step.choices)
    (job,) = jobs_of(Request((step.scenario,), choices, parse_mesh(step.mesh), "cpu", shapes_only=True), None)
    child = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert child.stdin is not None and child.stdout is not None
    child.stdin.write(json.dumps([job.to_record()]).encode())
    child.stdin.close()
    (answers,) = json.loads(child.stdout.read().splitlines()[-1])
    child.stdout.close()
    _, _, used = os.wait4(child.pid, 0)
    result = [load_recordings(Path(answer["file"]))[0] for answer in answers]
    return used.ru_utime + used.ru_stime, used.ru_maxrss * 1024 / 1e6, result


if __name__ == "__main__":
    for name, measured, allowed in main():
        print(f"{name}: {measured:g} (allowed {allowed:g})")
