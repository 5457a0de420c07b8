"""Eight ranks on two hosts that are network namespaces with shaped links: what is slow is named, what is not is not.

Each rank has a namespace, a virtual cable to one bridge, and that cable's rate; ranks 0 to 3 call themselves host a,
the others b. In a run nothing is slowed, a rank has half of a CPU, or a rank's cable has half of the rate.

`./run.sh bench links`: 60 launches of about a minute; `python -m benchmarks.bench_links KIND COUNT` for some of one
kind. Needs root, iproute2 and util-linux.
"""

import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from benchmarks.claims import Claim, Row
from distbench.links import LinkVerdict, link_run_of, verdict_of
from distbench.runs.find import run_files_in
from distbench.runs.run_file import read_run

IS_LONG = True
NUM_RANKS, NUM_LAUNCHES, SEED = 8, 20, 1
KINDS = ("nothing", "a rank", "a link")
BRIDGE, PREFIX = "dblinks", "dbl"
# Megabits a second: little enough that two cores are not what limits the links.
RATE = 400
DUTY_S = 0.02  # a rank that has half of a CPU is stopped for every other such time
CLAIMS = (
    Claim(
        "8 ranks, two hosts: a rank at half speed named rightly, a link at half rate named rightly; anything named"
        " where nothing is slowed",
        "{:.0f} %, {:.0f} %; {:.0f} % of {:.0f} launches each",
        "95 %, 95 %; 5 %",
        ("links: a rank named", "links: a link named", "links: anything named", "links: launches"),
    ),
    Claim("`links` on 8 ranks", "{:.0f} s", "60 s", ("links: seconds",)),
)


def main(kinds: Sequence[str] = KINDS, num_launches: int = NUM_LAUNCHES) -> list[Row]:
    """Rows (name, measured, allowed)."""
    drawn, right, seconds = random.Random(SEED), Counter[str](), []
    with cables() as addresses:
        for number in range(num_launches):
            for kind in kinds:
                slow = drawn.randrange(NUM_RANKS)
                began = time.monotonic()
                verdict = launched(kind, slow, addresses)
                seconds.append(time.monotonic() - began)
                named = sorted((one.kind, one.ranks, one.quantity, round(one.slowdown, 2)) for one in verdict.outliers)
                right[kind] += is_right(kind, slow, verdict)
                print(f"{number + 1:3d} {kind} ({slow}), {seconds[-1]:.0f} s: {named or 'nothing named'}", flush=True)
    share = {kind: 100 * right[kind] / num_launches for kind in kinds}
    return [
        ("links: launches", float(num_launches), -float(NUM_LAUNCHES)),
        ("links: a rank named", share.get("a rank", 0.0), -95.0),
        ("links: a link named", share.get("a link", 0.0), -95.0),
        ("links: anything named", 100 - share.get("nothing", 100.0), 5.0),
        ("links: seconds", sorted(seconds)[len(seconds) // 2], 60.0),
    ]


def is_right(kind: str, slow: int, verdict: LinkVerdict) -> bool:
    """Whether what is slow was named, in what it is slow in, and no other rank or link."""
    named = {(one.kind, one.ranks) for one in verdict.outliers}
    quantities = {one.quantity for one in verdict.outliers}
    if kind == "nothing":
        return not named
    return named == {("rank", (slow,))} and ("compute" if kind == "a rank" else "bandwidth") in quantities


@contextmanager
def cables() -> Iterator[list[str]]:
    """A namespace and an address for each rank, joined by a bridge."""
    names = [f"{PREFIX}{rank}" for rank in range(NUM_RANKS)]
    try:
        ip("link", "add", BRIDGE, "type", "bridge")
        ip("link", "set", BRIDGE, "up")
        for rank, name in enumerate(names):
            ip("netns", "add", name)
            ip("link", "add", f"{name}h", "type", "veth", "peer", "name", "eth", "netns", name)
            ip("link", "set", f"{name}h", "master", BRIDGE, "up")
            ip("-n", name, "addr", "add", f"10.78.0.{rank + 1}/24", "dev", "eth")
            for device in ("eth", "lo"):
                ip("-n", name, "link", "set", device, "up")
        yield [f"10.78.0.{rank + 1}" for rank in range(NUM_RANKS)]
    finally:
        for name in names:
            with suppress(subprocess.CalledProcessError):
                ip("netns", "delete", name)
        with suppress(subprocess.CalledProcessError):
            ip("link", "delete", BRIDGE)


def ip(*words: str) -> None:
    """One command of iproute2."""
    subprocess.run(["ip", *words], check=True, capture_output=True)


def shape(rank: int, rate: int) -> None:
    """Both ends of a rank's cable at that rate (Mbit/s): a token bucket each way."""
    for where in ([], ["-n", f"{PREFIX}{rank}"]):
        device = "eth" if where else f"{PREFIX}{rank}h"
        words = ["qdisc", "replace", "dev", device, "root", "tbf", "rate", f"{rate}mbit", "burst", "128kb"]
        subprocess.run(["tc", *where, *words, "latency", "200ms"], check=True, capture_output=True)


def launched(kind: str, slow: int, addresses: Sequence[str]) -> LinkVerdict:
    """One run of scenario links on eight ranks, of which one may be slow."""
    for rank in range(NUM_RANKS):
        shape(rank, RATE // 2 if kind == "a link" and rank == slow else RATE)
    folder = Path(tempfile.mkdtemp(prefix="links"))
    processes = [start(rank, addresses, folder) for rank in range(NUM_RANKS)]
    slowed = None
    try:
        if kind == "a rank":
            slowed = subprocess.Popen([sys.executable, "-c", HALVED, str(folder), str(slow), str(DUTY_S)])
        for process in processes:
            process.wait(300)
        (file,) = run_files_in(folder)
        links = link_run_of(read_run(file))
        assert links is not None and len(set(links.hosts)) == 2, links
        return verdict_of(links)
    finally:
        for process in [*processes, *([slowed] if slowed else [])]:
            process.kill()
            process.wait()
        shutil.rmtree(folder, ignore_errors=True)


def start(rank: int, addresses: Sequence[str], folder: Path) -> "subprocess.Popen[bytes]":
    """One rank in its namespace; the host's name is its own in a namespace of names."""
    host = "a" if rank < NUM_RANKS // 2 else "b"
    words = [sys.executable, "-m", "distbench", "run", "links", "--mesh", f"tp={NUM_RANKS}", "--out", str(folder)]
    command = f"hostname {host} && exec {' '.join(words)}"
    variables = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank % (NUM_RANKS // 2)),
        "WORLD_SIZE": str(NUM_RANKS),
        "LOCAL_WORLD_SIZE": str(NUM_RANKS // 2),
        "MASTER_ADDR": addresses[0],
        "MASTER_PORT": "29571",
        "GLOO_SOCKET_IFNAME": "eth",
        "DISTBENCH_MACHINE": "lab",
    }
    return subprocess.Popen(
        ["ip", "netns", "exec", f"{PREFIX}{rank}", "unshare", "--uts", "sh", "-c", command],
        env={**os.environ, **variables},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL if rank else None,
    )


# Stops a rank's worker for every other stretch of time, as a limit of half of a CPU does.
HALVED = """
import os, pathlib, signal, sys, time
folder, rank, duty = pathlib.Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
pid = 0
while not pid:
    for path in folder.rglob(f"rank{rank}.pid"):
        text = path.read_text()
        pid = int(text) if text else 0
    time.sleep(0.1)
while True:
    os.kill(pid, signal.SIGSTOP)
    time.sleep(duty)
    os.kill(pid, signal.SIGCONT)
    time.sleep(duty)
"""

if __name__ == "__main__":
    print(json.dumps(main((sys.argv[1],), int(sys.argv[2])), indent=1))
