"""`./run.sh gpu-day`: all measurements that a project without GPUs wants from one GPU, in one report of 25 minutes.

The stages are existing commands. The report is written after each stage, so a crash or a time limit loses no section.
`--rehearse` runs the same stages with quick sizes on the CPU.
"""

import argparse
import json
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import gpu_tests
from gpu_tests import MAX_LINES, ROOT

from distbench.processes import last_words, start_supervised, stop_supervised
from distbench.records.machine import accelerator_here
from distbench.simulate.allocator import MemoryUse, replay_memory
from distbench.simulate.recording import Allocated, Event, Freed
from distbench.spec.errors import UserError

REPORT = ROOT / "build" / "gpu-day.md"
FOLDER = ROOT / "build" / "gpu-day"  # outputs of the commands, runs, and the calibrated files
LIMIT_S = 25 * 60.0
DISTBENCH = (sys.executable, "-m", "distbench")
HISTORY = ROOT / "tests" / "data" / "cuda_memory_history.py"
GIB = 2**30

# Four layers at their real sizes, with AdamW, reserve at most 60 GB by `simulate`. Five lengths, each with and without
# checkpointing.
LLAMA = ("llama3_8b", "--mesh", "dp_replicate=1,dp_shard=1,cp=1", "--set", "num_layers=4", "--set", "batch=1")
STEPS = (*LLAMA, "--set", "sequence=1024,2048,4096,6144,8192", "--set", "checkpoint=none,selective")
PROFILED = (*LLAMA, "--set", "sequence=4096")
# Two ranks, because a hardware file of CPUs cannot be calibrated with one.
QUICK = ("llama_2d", "--quick", "--mesh", "dp_shard=2,tp=1")
QUICK_STEPS = (*QUICK, "--set", "hidden=256,512,1024,2048,4096", "--set", "batch=2,4")

Outputs = Mapping[str, str]  # standard output of each finished stage, by title


class Skipped(Exception):
    """The reason why a stage does not apply to this machine."""


class Done(NamedTuple):
    """The end of a command: its exit code (None after its time limit) and its outputs."""

    code: int | None
    out: str
    err: str


@dataclass(frozen=True)
class Stage:
    """A command and its section of the report.

    Args:
        command: returns the words of the command; raises `Skipped`, or UserError if it cannot be run.
        section: returns the lines of the section, from the outputs of this stage and the stages before.
        Default: the end of the output.
    """

    title: str
    limit_s: float
    command: Callable[[], Sequence[str]]
    section: Callable[[Outputs], list[str]] | None = None


@dataclass
class Day:
    """Results of the stages so far: rows of the summary, sections, and lines above the rows."""

    rows: list[tuple[str, str, float]] = field(default_factory=list)
    sections: list[str] = field(default_factory=list)
    outputs: dict[str, str] = field(default_factory=dict)

    def text(self, heading: str, wall_s: float) -> str:
        """Return the report in Markdown."""
        passed = sum(result == "passed" for _, result, _ in self.rows)
        lines = [f"# GPU day of distbench{heading}", "", f"{passed} of {len(self.rows)} stages passed, {wall_s:.0f} s."]
        lines += [summary(pairs_in(self.outputs)), "", "| stage | result | s |", "|---|---|---|"]
        lines += [f"| {title} | {_cell(result)} | {seconds:.0f} |" for title, result, seconds in self.rows]
        return "\n".join([*lines, *self.sections, ""])

    @property
    def has_failed(self) -> bool:
        return any(result.startswith("failed") for _, result, _ in self.rows)


def run_command(words: Sequence[str], limit_s: float, log: Path) -> Done:
    """Run a command for at most `limit_s` seconds. Its outputs are also in LOG.out and LOG.err."""
    log.parent.mkdir(parents=True, exist_ok=True)
    out, err = log.with_suffix(".out"), log.with_suffix(".err")
    with out.open("w") as standard_output, err.open("w") as standard_error:
        process = start_supervised(
            words, stdin=subprocess.DEVNULL, stdout=standard_output, stderr=standard_error, cwd=ROOT
        )
        try:
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            stop_supervised(process)
    return Done(code, *(file.read_text(errors="replace") for file in (out, err)))


def run_stages(stages: Sequence[Stage], write: Callable[[Day], object]) -> Day:
    """Run all stages, call `write` after each one, and return the results."""
    day = Day()
    for number, stage in enumerate(stages, 1):
        print(f"gpu-day: stage {number} of {len(stages)}, at most {stage.limit_s:.0f} s: {stage.title}", flush=True)
        begun = time.monotonic()
        done, lines = Done(0, "", ""), []
        try:
            done = run_command(stage.command(), stage.limit_s, FOLDER / re.sub(r"\W+", "-", stage.title.lower()))
            day.outputs[stage.title] = done.out
            result = _result(done, stage.limit_s)
        except Skipped as reason:
            result = f"skipped: {reason}"
        except (OSError, UserError) as error:
            result = f"failed: {error}"
        try:
            if stage.section and not result.startswith("skipped"):
                lines = stage.section(day.outputs)
        except Exception as error:  # an incomplete output must not end the day
            result = f"failed: {type(error).__name__}: {error}" if result == "passed" else result
        if not (lines and result == "passed"):
            lines += fenced(done.out if stage.section is None else "") + fenced(done.err)
        seconds = time.monotonic() - begun
        day.rows.append((stage.title, result, seconds))
        day.sections += ["", f"## {stage.title}", "", f"{result}, {seconds:.0f} s", *lines]
        print(f"gpu-day: {result}, {seconds:.0f} s", flush=True)
        write(day)
    return day


def _result(done: Done, limit_s: float) -> str:
    if done.code is None:
        return f"failed: over its limit of {limit_s:.0f} s"
    return f"failed: {last_words(done.err.splitlines()) or f'exit code {done.code}'}" if done.code else "passed"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def fenced(text: str) -> list[str]:
    """Return the last lines of an output as a block; no lines for an empty output."""
    return ["", "```", *text.rstrip().splitlines()[-MAX_LINES:], "```"] if text.strip() else []


class Pair(NamedTuple):
    """A measured variant and the simulated one: rows of `report --format json` and `simulate --format json`."""

    variant: str
    measured: dict[str, Any]
    simulated: dict[str, Any]

    @property
    def ratio(self) -> float:
        return self.simulated["step_s"] / self.measured["median_s"]

    @property
    def is_within(self) -> bool | None:
        """Whether the measured time is within the simulated range; None without a range."""
        limits = self.simulated["step_range_s"]
        return limits and limits[0] <= self.measured["median_s"] <= limits[1]


SIMULATED, COMPARED = "Simulated steps", "Measured and simulated side by side"


def pairs_in(outputs: Outputs) -> list[Pair]:
    """Return the variants that were both measured and simulated; of several simulated ranks, the slowest."""
    if not {SIMULATED, COMPARED} <= outputs.keys():
        return []
    try:
        measured, simulated = (json.loads(outputs[title]) for title in (COMPARED, SIMULATED))
    except ValueError:  # a command ended before its output was complete
        return []
    of_variants = {row["variant"]: row for row in sorted(simulated, key=lambda row: row["step_s"])}
    return [
        Pair(row["variant"], row, of_variants[row["variant"]])
        for row in measured
        if row["status"] == "ok" and row["variant"] in of_variants
    ]


def summary(pairs: Sequence[Pair]) -> str:
    """Return the median error of the simulated times, and how many measured times are within the printed range."""
    if not pairs:
        return "No variant was both measured and simulated."
    error = statistics.median(abs(pair.ratio - 1) for pair in pairs)
    text = f"Simulated step times: median error {error:.0%} over {len(pairs)} variants; "
    within = [pair.is_within for pair in pairs if pair.is_within is not None]
    if not within:
        return f"{text}this hardware file has no error range."
    share = sum(within) / len(within)
    return f"{text}{sum(within)} of {len(within)} measured times ({share:.0%}) are within the simulated range."


def comparison(outputs: Outputs) -> list[str]:
    """Return the tables of times and of peaks of memory.

    Raises:
        ValueError: no variant was both measured and simulated.
    """
    pairs = pairs_in(outputs)
    if not pairs:
        raise ValueError("no variant was both measured and simulated")
    lines = ["", summary(pairs), ""]
    lines += ["| variant | measured ms | simulated ms | range ms | simulated / measured | within range |"]
    lines += ["|---|---|---|---|---|---|"]
    for pair in pairs:
        limits = pair.simulated["step_range_s"]
        cells = "-".join(f"{seconds * 1e3:.1f}" for seconds in limits or ())
        within = {None: "-", True: "yes", False: "no"}[pair.is_within]
        lines.append(
            f"| {pair.variant} | {pair.measured['median_s'] * 1e3:.1f} | {pair.simulated['step_s'] * 1e3:.1f} | "
            f"{cells or '-'} | {pair.ratio:.2f} | {within} |"
        )
    lines += ["", "Peaks of memory in GiB: measured, by the allocator replay, and replay / measured."]
    lines += ["Reserved memory is not measured on the CPU.", ""]
    lines += ["| variant | allocated | replay | ratio | reserved | replay | ratio |", "|---|---|---|---|---|---|---|"]
    for pair in pairs:
        memory = pair.simulated["memory"]
        allocated = _peaks(pair.measured["peak_bytes"], memory["peak_allocated_bytes"])
        reserved = _peaks(pair.measured["peak_reserved_bytes"], memory["peak_reserved_bytes"])
        lines.append(f"| {pair.variant} | {allocated} | {reserved} |")
    return lines


def _peaks(measured: float | None, replayed: float) -> str:
    """Three cells: GiB measured, GiB of the replay, and their ratio."""
    cells = [f"{measured / GIB:.3f}", f"{replayed / measured:.3f}"] if measured else ["-", "-"]
    return f"{cells[0]} | {replayed / GIB:.3f} | {cells[1]}"


def replayed(history: Mapping[str, Any]) -> MemoryUse:
    """Replay the events of a memory history of `tests/data/cuda_memory_history.py`."""
    events: list[Event] = [
        Allocated(number, size, stream, "other", "") if size else Freed(number)
        for number, size, stream in history["events"]
    ]
    return replay_memory(events)


def history_section(output: str) -> list[str]:
    """Return the peaks of a recorded history and of its replay."""
    history = json.loads(output.splitlines()[-1])
    used = replayed(history)
    return [
        "",
        "| peak of three steps | measured GiB | replay GiB | replay / measured |",
        "|---|---|---|---|",
        f"| requested | {_peaks(history['max_requested_bytes'], used.live_bytes)} |",
        f"| reserved | {_peaks(history['max_reserved_bytes'], used.reserved_bytes)} |",
    ]


def tests_section(_: Outputs) -> list[str]:
    """Return the counts and rows that `gpu_tests.py` has written so far."""
    text = gpu_tests.REPORT.read_text()
    counts, (_, head, rest) = text.splitlines()[2], text.partition("| test |")
    return ["", counts, "", *f"{head}{rest}".replace("\n## ", "\n### ").splitlines()]


def stages_of(device: str, num_devices: int, hardware: str | None) -> list[Stage]:
    """Return the stages for a type of device; the CPU rehearses them. Their limits sum to at most LIMIT_S."""
    rehearses = device == "cpu"
    on_device = ("--device", device)
    calibrated, runs = FOLDER / "hardware.json", str(FOLDER / "results")
    measure = (*on_device, "--check", "none", "--results", runs, "--budget", "5s" if rehearses else "60s")
    steps = QUICK_STEPS if rehearses else STEPS

    def calibrate() -> Sequence[str]:
        command = (*DISTBENCH, "calibrate", *on_device, "--results", runs)
        if rehearses:
            return (*command, "--quick", "--mesh", "tp=2", "--only", "hardware", "--hardware-out", str(calibrated))
        base = ("--base", hardware) if hardware else ()
        mesh = ("--mesh", f"tp={num_devices}")
        only = ("--only", "hardware") if num_devices == 1 else ("-o", str(FOLDER / "profile.json"))
        return (*command, *mesh, *only, *base, "--hardware-out", str(calibrated))

    def simulate() -> Sequence[str]:
        if not calibrated.is_file() and hardware is None:
            raise Skipped("the calibration wrote no hardware file; give --hardware NAME|FILE")
        chosen = str(calibrated) if calibrated.is_file() else str(hardware)
        words = ("--hardware", chosen, "--results", str(FOLDER / "simulated"), "--format", "json")
        return (*DISTBENCH, "simulate", *steps, *words)

    def record_history() -> Sequence[str]:
        if device != "cuda":
            raise Skipped(f"torch records no history of the allocator on {device}; the tables above have the peaks")
        return (sys.executable, str(HISTORY))

    def simulated_section(outputs: Outputs) -> list[str]:
        rows = json.loads(outputs[SIMULATED])
        return ["", f"{len(rows)} steps, hardware {rows[0]['hardware']}"]

    history = "Memory history and allocator replay"
    gpu_test_words = ("-m", "not gpu and not multi_gpu", "-k", "report_says_what_passed") if rehearses else ()
    trace = (*DISTBENCH, "trace", *(QUICK if rehearses else PROFILED), *measure, "--label", "profiled")
    doctor = (*DISTBENCH, "doctor", "--verbose", "--width", "120")
    report = (*DISTBENCH, "report", "@steps", "--format", "json", "--results", runs)
    phases = (*DISTBENCH, "report", "@profiled", "--full", "--results", runs)
    run = (*DISTBENCH, "run", *steps, *measure, "--label", "steps")
    tests = (sys.executable, str(ROOT / "tests" / "gpu_tests.py"), *gpu_test_words)
    return [
        Stage("Doctor", 60, lambda: doctor),
        Stage("GPU tests", 390, lambda: tests, tests_section),
        Stage("Calibration", 240, calibrate),
        Stage("Measured steps", 300, lambda: run),
        Stage(SIMULATED, 180, simulate, simulated_section),
        Stage(COMPARED, 30, lambda: report, comparison),
        Stage(history, 60, record_history, lambda outputs: history_section(outputs[history])),
        Stage("Profiled step: communication", 150, lambda: trace),
        # One GPU has no communication, and the table of paths then has no phases.
        Stage("Profiled step by phase", 30, lambda: phases),
    ]


def main(arguments: Sequence[str]) -> int:
    """Return 0 if no stage failed, 1 if one failed, 2 without an accelerator."""
    parser = argparse.ArgumentParser(prog="run.sh gpu-day", description=__doc__.splitlines()[0])
    parser.add_argument("--rehearse", action="store_true", help="run the stages with quick sizes on the CPU")
    default = "the shipped file of the device; rehearsal: the calibrated file"
    parser.add_argument("--hardware", metavar="NAME|FILE", help=f"simulate this machine [{default}]")
    options = parser.parse_args(arguments)
    device, num_devices = ("cpu", 0) if options.rehearse else accelerator_here()
    if not (options.rehearse or num_devices):
        print("error: no accelerator that torch can use; see distbench doctor, or add --rehearse", file=sys.stderr)
        return 2
    shutil.rmtree(FOLDER, ignore_errors=True)
    gpu_tests.REPORT.unlink(missing_ok=True)
    REPORT.parent.mkdir(exist_ok=True)
    begun = time.monotonic()
    heading = ", rehearsed on the CPU" if options.rehearse else ""

    def write(day: Day) -> None:
        REPORT.write_text(day.text(heading, time.monotonic() - begun), encoding="utf-8")

    day = run_stages(stages_of(device, num_devices, options.hardware), write)
    print("\n".join(["", *day.text(heading, time.monotonic() - begun).splitlines()[2:4], f"report: {REPORT}"]))
    return 1 if day.has_failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
