"""`python -m benchmarks.chaos --runs N --seed S`: a launch, a fault at a random moment, and what became of the launch.

By hand and nightly: a run takes about half a minute. After each it is looked whether every row that stood in the run
file before the fault still does, whether `report` reads the file, whether a process of the launch still runs, and how
the command ended. Where namespaces or mounts cannot be made, the faults that need them are left out, and that is said.
Each run is kept in build/chaos/ as it ends: `--resume` goes on with the newest series of that seed and prints the table
of the whole.
"""

import argparse
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from benchmarks.chaos_faults import FAULTS, TOKEN, Fault, Launch, TooLate
from benchmarks.chaos_record import Run, append, last_file, new_file, read, table

SCENARIOS = (
    ("collectives", "--mesh", "tp=2"),
    ("tp_mlp", "--mesh", "tp=2"),
    ("cp_attention", "--mesh", "cp=2"),
    ("tp_mlp", "--mesh", "tp=2", "--trace-paths"),
    ("collectives", "tp_mlp", "tp_attention", "--mesh", "tp=2"),  # which share a launch
)
TIMEOUT_S = 20  # of a launch; longer than ranks take to import torch on a loaded machine
HANG_S = 240  # a command that has not ended by then hangs: two launches that are given up, and what they import
END_S = 10  # how long what it started may take to end after it
MAX_START_S = 8
MAX_ROWS = 12
POLL_S = 0.02


def judge(
    fault: Fault, before: list[str], after: list[str], exit_code: int, message: str, late: bool, num_scenarios: int = 1
) -> Counter[str]:
    """What of WRONG a launch shows by itself.

    Args:
        before: rows in the run file before the fault; `after`: when the command had ended.
        said: what the command wrote to standard error: one sentence for each scenario that failed.
        late: the fault came when the command had ended already.
    """
    kept = set(after)
    wrong = Counter({"lost rows": sum(row not in kept for row in before), "tracebacks": "Traceback" in message})
    if late or fault.may_succeed:
        return +wrong
    lines = [line for line in message.splitlines() if line.startswith("distbench:")]
    sentences = [line for line in lines if not line.startswith("distbench: error: of ")]  # which were not measured
    wrong["exit code 0"] = int(exit_code == 0)
    if fault.names:
        named = sum(bool(re.search(fault.names, sentence)) for sentence in sentences)
        wrong["no sentence"] = int(not 1 <= len(sentences) <= num_scenarios or named != len(sentences))
    return +wrong


@contextmanager
def _folder(fault: Fault) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="distbench-chaos-") as name:
        if fault.needs != "mount":
            yield Path(name)
            return
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", name], check=True)
        try:
            yield Path(name)
        finally:
            subprocess.run(["umount", "--lazy", name], check=True)


def _can(what: str) -> bool:
    """Whether this user may make mounts or network namespaces here."""
    tried = {
        "mount": 'd=$(mktemp -d) && mount -t tmpfs tmpfs "$d" && umount "$d" && rmdir "$d"',
        "net": "unshare --net ip link set lo up && command -v nsenter",
    }
    return not what or subprocess.run(["sh", "-c", tried[what]], capture_output=True, check=False).returncode == 0


def _start(fault: Fault, scenario: tuple[str, ...], out: Path, token: str, stderr: Path) -> Launch:
    command = [sys.executable, "-m", "distbench", "run", *scenario, "--quick", "--timeout", str(TIMEOUT_S)]
    command += ["--results", str(out / "results")]
    if fault.needs == "net":
        command = ["unshare", "--net", "sh", "-c", 'ip link set lo up; exec "$@"', "sh", *command]
    environment = {**os.environ, TOKEN: token}
    with stderr.open("w") as file:
        quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL}
        process = subprocess.Popen(command, **quiet, stderr=file, env=environment, start_new_session=True, text=True)
    return Launch(process, out, token)


def _wait_for_moment(launch: Launch, draw: random.Random) -> None:
    """Until some time after the start, or after some number of rows; ranks must be there, if only just."""
    rows = draw.randrange(MAX_ROWS) if draw.random() < 0.75 else None
    deadline = time.monotonic() + draw.uniform(0, MAX_START_S)
    while not launch.is_over():
        reached = len(launch.rows()) >= rows if rows is not None else time.monotonic() > deadline
        if reached and launch.ranks:
            break
        time.sleep(POLL_S)
    time.sleep(draw.uniform(0, 0.5))


def run_one(number: int, fault: Fault, draw: random.Random) -> Run:
    """One launch with one fault."""
    scenario = draw.choice(SCENARIOS)
    random.seed(draw.random())
    token = f"{os.getpid()}-{draw.randrange(1 << 30)}"
    with _folder(fault) as out, tempfile.TemporaryDirectory() as apart:
        said_file = Path(apart) / "stderr"
        launch = _start(fault, scenario, out, token, said_file)
        try:
            _wait_for_moment(launch, draw)
            before, late = launch.rows(), launch.is_over()
            try:
                if not late:
                    fault.does(launch)
            except TooLate:
                late = True
            wrong = Counter[str]()
            try:
                exit_code = launch.process.wait(HANG_S)
            except subprocess.TimeoutExpired:
                wrong["hangs"], exit_code = 1, 1
            deadline = time.monotonic() + END_S
            while launch.pids and time.monotonic() < deadline:
                time.sleep(POLL_S)
            wrong["orphans"] = len(launch.pids) if not wrong["hangs"] else 0
        finally:
            for pid in launch.pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            launch.process.wait()
        message = said_file.read_text(errors="replace")
        num_scenarios = sum(not word.startswith("--") and "=" not in word for word in scenario)
        wrong += judge(fault, before, launch.rows(), exit_code, message, late, num_scenarios)
        wrong["unreadable"] = sum(not _is_read(path) for path in launch.run_files)
    last = " | ".join(line for line in message.splitlines() if line.startswith("distbench:"))
    return Run(number, fault.name, " ".join(scenario), len(before), late, dict(+wrong), exit_code, last[:2000])


def _is_read(run_file: Path) -> bool:
    command = [sys.executable, "-m", "distbench", "report", str(run_file)]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def main() -> int:
    """Run and print a line a fault; 0 where nothing of WRONG was seen in the series."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chaos", description=__doc__)
    parser.add_argument("--runs", type=int, default=200, help="how many the series has in all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", action="store_true", help="go on with the newest series of this seed")
    requested = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    file = (last_file(requested.seed) if requested.resume else None) or new_file(requested.seed)
    runs = read(file) if file.exists() else []
    done = {run.number for run in runs}
    possible = [fault for fault in FAULTS if _can(fault.needs)]
    for fault in FAULTS:
        if fault not in possible:
            print(f"left out, as this user may not make what it needs: {fault.name}", flush=True)
    try:
        for number in sorted({*range(requested.runs)} - done):
            # In turn, so that few runs try each; each run draws by itself, so that a series can go on anywhere.
            run = run_one(number, possible[number % len(possible)], random.Random(f"{requested.seed} {number}"))
            append(file, run)
            runs.append(run)
            print(run.line(), flush=True)
    except KeyboardInterrupt:
        print(f"\ninterrupted; continue with --runs {requested.runs} --seed {requested.seed} --resume")
    print(
        f"\n{table(runs)}\n{len(runs)} of {requested.runs} runs, seed {requested.seed}, {len(SCENARIOS)} scenarios: "
        f"{file}"
    )
    return int(any(run.wrong for run in runs))


if __name__ == "__main__":
    sys.exit(main())
