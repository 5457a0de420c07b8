"""Simulated steps against published ones, and simulated collectives against signatures.

`python -m benchmarks.bench_simulation`. Published are torchtitan's runs of Llama 3.1 8B on H100 (96 GB, 500 W; its
benchmarks/llama3_h100_202412_torchtitan.md), which nobody here made. Memory: nothing is fitted. Time: one figure of the
hardware file, the matmul rate, is fitted to the first row; the others are predictions. RMSNorm is written out, as
torch's was then. CPU seconds and memory are those of recording, in a process of its own.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from benchmarks.claims import Claim, Row
from distbench.launch import Request, jobs_of
from distbench.signature import counted, load
from distbench.simulate.hardware.hardware_file import load_hardware
from distbench.simulate.record_steps import record_steps
from distbench.simulate.recording_file import load_recording
from distbench.simulate.simulation import Simulation
from distbench.spec import parse_mesh

ROOT = Path(__file__).parent.parent
GIB = 1 << 30
MACHINE = "h100_96gb"
# Where a CPU's signature has an all-gather for DTensor's all-to-all, or nothing communicates, there is nothing to hold.
WITHOUT_STEPS = {"collectives", "redistribute"}
CPU_ONLY_PATHS = {"shard_params"}


class Published(NamedTuple):
    """A published run; memory is max_reserved in GiB, None where the run is not comparable in it."""

    name: str
    mesh: str
    choices: tuple[str, ...]
    tokens_per_s: float
    reserved_gib: float | None


OLD = ("norm=written_out",)
RUNS = (
    Published("8B, FSDP 8, eager", "dp_shard=8", OLD, 5762, 82.4),
    Published("8B, FSDP 8, compile", "dp_shard=8", (*OLD, "compiled=True"), 6667, None),
    Published("8B, FSDP 128, eager", "dp_shard=128", (*OLD, "batch=256"), 5605, 67.0),
    Published("8B, FSDP 128, compile", "dp_shard=128", (*OLD, "batch=256", "compiled=True"), 6514, None),
    Published("8B, FSDP 8 x TP 8, compile", "dp_shard=8,tp=8", (*OLD, "compiled=True"), 4378, None),
)
CLAIMS = (
    Claim(
        "reserved memory of a simulated step, nothing fitted, against torchtitan's published eager runs: error on 8 "
        "GPUs, on 128",
        "{:.1%}, {:.1%}",
        "at most 2 %",
        ("reserved*",),
    ),
    Claim(
        "tokens/s of a simulated step, one rate fitted to one row, against four more published bf16 rows: largest "
        "error",
        "{most:.1%}",
        "at most 5 %",
        ("tokens/s*",),
    ),
    Claim(
        "simulated collectives (kind, mesh dim, bytes, owner) that differ from the shipped scenarios' signatures",
        "{:.0f}",
        "0",
        ("collectives*",),
    ),
    Claim(
        "recording a step of Llama 3 8B, 32 layers: CPU seconds, memory",
        "{:.0f} s, {:.0f} MB",
        "at most 30 s, 500 MB",
        ("cost*",),
    ),
)
IS_LONG = True


def main() -> list[Row]:
    """Rows for the benchmark table; each published run beside its simulation goes to stderr."""
    rows: list[Row] = [("collectives that differ", float(collectives_that_differ()), 0.0)]
    with tempfile.TemporaryDirectory() as folder:
        for number, run in enumerate(RUNS):
            cpu_s, peak_mb, simulation = simulated(run, Path(folder))
            speed, reserved = simulation.tokens_per_s, simulation.memory.reserved_bytes / GIB
            memory = "" if run.reserved_gib is None else f", published {run.reserved_gib} GiB"
            print(
                f"  {run.name}: {speed:,.0f} tokens/s a GPU, published {run.tokens_per_s:,.0f} "
                f"({speed / run.tokens_per_s - 1:+.1%}); {reserved:.2f} GiB reserved{memory}, "
                f"{simulation.memory.live_bytes / GIB:.2f} alive; recorded in {cpu_s:.1f} s of CPU, {peak_mb:.0f} MB",
                file=sys.stderr,
                flush=True,
            )
            if run.reserved_gib is not None:
                rows.append((f"reserved, {run.name}", abs(reserved / run.reserved_gib - 1), 0.02))
            if number:
                rows.append((f"tokens/s, {run.name}", abs(speed / run.tokens_per_s - 1), 0.05))
            else:
                rows += [("cost: CPU seconds", cpu_s, 30.0), ("cost: memory, MB", peak_mb, 500.0)]
    return rows


def simulated(run: Published, folder: Path) -> tuple[float, float, Simulation]:
    """CPU seconds and peak MB of the process that recorded it, and its simulation."""
    command = [sys.executable, "-m", "distbench.worker.children.recordings", str(folder)]
    (job,) = jobs_of(Request(("llama3_8b",), run.choices, parse_mesh(run.mesh), "cpu", shapes_only=True), None)
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
    ((answer,),) = json.loads(child.stdout.read().splitlines()[-1])
    child.stdout.close()
    _, _, used = os.wait4(child.pid, 0)
    simulation = Simulation(load_recording(Path(answer["file"])), load_hardware(MACHINE))
    return used.ru_utime + used.ru_stime, used.ru_maxrss * 1024 / 1e6, simulation


def collectives_that_differ() -> int:
    """Over every variant of every shipped scenario that has a signature of steps."""
    names = sorted(path.stem for path in (ROOT / "signatures").glob("*.signature"))
    names = [name for name in names if name not in WITHOUT_STEPS | CPU_ONLY_PATHS]
    jobs = jobs_of(Request(tuple(names), device="cpu", quick=True, full_mesh=True), None)
    differing = compared = 0
    for name, (found, left_out) in zip([job.scenario for job in jobs], record_steps(jobs), strict=True):
        cases = load(ROOT / "signatures" / f"{name}.signature").cases
        theirs = {case.rpartition(name)[2].removeprefix("/"): paths for case, paths in cases.items()}
        for recording in found:
            ours = counted([one._asdict() for one in recording.collectives])
            other = theirs[recording.head.variant]
            differing += sum(ours.get(path, 0) != other.get(path, 0) for path in {*ours, *other})
            compared += len(other)
        for label, reason in left_out.items():
            print(f"  left out: {label}: {reason}", file=sys.stderr)
    print(f"  {compared} paths of {len(names)} scenarios compared", file=sys.stderr)
    return differing if compared else 1


if __name__ == "__main__":
    for name, measured, allowed in main():
        print(f"{name}: {measured:g} (allowed {allowed:g})")
