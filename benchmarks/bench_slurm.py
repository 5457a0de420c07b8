"""Killed ranks, tasks and node daemons under a real Slurm: what is lost, and what is left behind.

`./run.sh bench slurm`: half a minute a kill; needs Slurm and root. What each kill did is kept in
build/slurm-kills.jsonl: the same command goes on after the last of them, and begins anew where all are there.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

from benchmarks.claims import Claim, Row
from benchmarks.slurm_cluster import NODES, SlurmCluster, slurm_cluster, why_not
from distbench.records.results_folder import run_files_in
from distbench.records.run_file import read_run
from distbench.spec import UserError

IS_LONG = True
NUM_KILLS, SEED = 20, 1
WRONG = ("lost rows", "orphans", "hangs", "tracebacks", "unreadable")
CLAIMS = (
    Claim(
        "Slurm, two nodes, a random rank or daemon killed: lost finished cases, orphans, hangs, tracebacks",
        "{:.0f}, {:.0f}, {:.0f}, {:.0f} in {:.0f} kills",
        "0, 0, 0, 0",
        (*(f"slurm: {name}" for name in WRONG[:4]), "slurm: kills"),
    ),
)
VICTIMS = ("a rank's worker", "a task", "a node's daemon", "a step's daemon")
HANG_S, ORPHAN_S, POLL_S = 180, 20, 0.1
MAX_ROWS = 8
KEPT = Path("build") / "slurm-kills.jsonl"


def main() -> list[Row]:
    """Rows: how many kills, and what was wrong in all of them together."""
    if why := why_not():
        sys.exit(f"bench slurm {why}")
    kills = kept()
    folder = Path(tempfile.mkdtemp(prefix="slurm"))
    try:
        with slurm_cluster(folder) as cluster:
            for number in range(len(kills), NUM_KILLS):
                what, seen = one_run(cluster, folder / f"out{number}", random.Random(f"{SEED} {number}"))
                kills.append(seen)
                print(f"{number + 1:3d}  {what}: {', '.join(f'{name} {count}' for name, count in seen.items())}")
                sys.stdout.flush()
                with KEPT.open("a") as file:
                    file.write(json.dumps(seen) + "\n")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    counts = sum(kills, Counter[str]())
    finished = ("slurm: cases finished before", float(counts["finished before"]), -1.0)
    wrong = [(f"slurm: {name}", float(counts[name]), 0.0) for name in WRONG]
    return [("slurm: kills", float(NUM_KILLS), -float(NUM_KILLS)), finished, *wrong]


def kept() -> list[Counter[str]]:
    """What was seen of the kills of a series that was interrupted."""
    KEPT.parent.mkdir(exist_ok=True)
    whole = KEPT.read_text() if KEPT.exists() else ""
    lines = whole[: whole.rfind("\n") + 1].splitlines()
    if len(lines) >= NUM_KILLS:
        lines = []
    KEPT.write_text("".join(f"{line}\n" for line in lines))
    return [Counter(json.loads(line)) for line in lines]


def one_run(cluster: SlurmCluster, out: Path, random_state: random.Random) -> tuple[str, Counter[str]]:
    """One launch and one kill: who was killed, and what was wrong."""
    command = (sys.executable, "-m", "distbench", "run", "collectives", "--budget", "60", "--results", out)
    where = ("--mesh", "tp=4", "--nodes", "2", "--launcher", "slurm", "--timeout", "30")
    process = subprocess.Popen(
        [str(word) for word in (*command, *where)],
        env={**os.environ, **cluster.variables},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    wanted, before = random_state.randint(0, MAX_ROWS), list[str]()
    until = time.monotonic() + HANG_S
    while process.poll() is None and time.monotonic() < until:
        before = rows_of(out)
        if len(before) >= wanted and pids_of(out, "rank*.pid"):
            break
        time.sleep(POLL_S)
    victim = random_state.choice(VICTIMS)
    node = random_state.choice(NODES)
    before = rows_of(out)
    kill(victim, node, cluster, out, random_state)
    wrong = Counter({"finished before": len(before)})
    try:
        message = process.communicate(timeout=HANG_S)[0]
    except subprocess.TimeoutExpired:
        process.kill()
        message = process.communicate()[0]
        wrong["hangs"] += 1
    wrong["tracebacks"] += "Traceback" in message
    wrong["lost rows"] += len(set(before) - set(rows_of(out)))
    for file in run_files_in(out):
        try:
            read_run(file)
        except UserError:
            wrong["unreadable"] += 1
    wrong["orphans"] += len(orphans(out))
    recover(victim, node, cluster)
    wrong[f"exit code {process.returncode}"] = 1
    return f"{victim} after {len(before)} cases", +wrong


def rows_of(out: Path) -> list[str]:
    """The finished cases in the run file."""
    rows = []
    for file in run_files_in(out) if out.is_dir() else []:
        rows += [line for line in file.read_text().split("\n")[:-1] if line.startswith('{"type":"case"')]
    return rows


def pids_of(out: Path, pattern: str) -> list[int]:
    """Of the ranks' workers."""
    result = []
    for path in out.glob(f"logs/*/rank*/{pattern}"):
        with suppress(ValueError):
            result.append(int(path.read_text()))
    return result


def kill(victim: str, node: str, cluster: SlurmCluster, out: Path, random_state: random.Random) -> None:
    """Kill it as the kernel does."""
    if victim == "a node's daemon":
        cluster.kill_node(node)
        return
    pids = pids_of(out, "rank*.pid")
    if not pids:
        return
    pid = random_state.choice(pids)
    ancestors = {"a rank's worker": 0, "a task": 1, "a step's daemon": 2}[victim]
    for _ in range(ancestors):
        pid = parent_of(pid)
    if pid > 1:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def parent_of(pid: int) -> int:
    """0 where the process is gone."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def orphans(out: Path) -> list[int]:
    """Processes of the launch that still run, once they had time to end."""
    until = time.monotonic() + ORPHAN_S
    while True:
        result = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with suppress(OSError):
                words = path.read_bytes()
                if str(out).encode() in words and b"slurmstepd" not in words and path.parent.name != str(os.getpid()):
                    result.append(int(path.parent.name))
        if not result or time.monotonic() > until:
            return result
        time.sleep(0.5)


def recover(victim: str, node: str, cluster: SlurmCluster) -> None:
    """A free cluster for the next run."""
    if victim == "a node's daemon":
        cluster.start_node(node)
    cluster.ask("scancel", "--user=root")
    until = time.monotonic() + 60
    while time.monotonic() < until:
        try:
            cluster.await_nodes()
            return
        except TimeoutError:
            for name in NODES:
                cluster.ask("scontrol", "update", f"nodename={name}", "state=resume")
