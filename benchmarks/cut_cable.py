"""Two hosts whose cable is cut in the middle of a launch, or before it: which host is named, and after how long.

Each is started as `distbench run --nodes 2 --launcher torchrun`.

`python -m benchmarks.cut_cable`: about two minutes, most of it waiting. Needs root and iproute2.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.two_host_lab import HOSTS, NoNamespaces, cable, ip, two_hosts

PORT, RANKS_PER_HOST, MIN_ROWS = 29561, 2, 4
START_S, NAMED_S = 120, 60
FIRST, OTHER = HOSTS
SAID = {"in the middle": "responds to host", "before": "does not respond"}


def main() -> None:
    """Cut the cable both times, and print what each host said."""
    for when, wanted in SAID.items():
        print(f"cut {when}:", flush=True)
        with tempfile.TemporaryDirectory(prefix="cut") as folder, two_hosts():
            for line in tried(Path(folder), when == "before", wanted):
                print(f"  {line}", flush=True)


def tried(folder: Path, is_before: bool, wanted: str) -> Iterator[str]:
    """One launch: how long it took until a host said so, and what they said."""
    if is_before:
        cut()
    logs = {host: folder / f"{host}.txt" for host in HOSTS}
    processes = [started(host, folder, log) for host, log in logs.items()]
    try:
        if not is_before:
            wait_for(lambda: num_rows(folder) >= MIN_ROWS, START_S)
            cut()
        began = time.monotonic()
        wait_for(lambda: any(wanted in log.read_text() for log in logs.values()), NAMED_S)
        yield f"after {time.monotonic() - began:.0f} s"
        time.sleep(5)
    finally:
        for process in processes:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    for host, log in logs.items():
        message = [line for line in log.read_text().splitlines() if "distbench:" in line]
        yield from (f"{host}: {line}" for line in dict.fromkeys(message))


def started(host: str, folder: Path, log: Path) -> "subprocess.Popen[bytes]":
    """One host's part."""
    where = f"--node-rank {list(HOSTS).index(host)} --master-addr {HOSTS[FIRST]} --master-port {PORT}"
    words = ["collectives", "--budget", "300", "--mesh", f"tp={len(HOSTS) * RANKS_PER_HOST}", "--results", str(folder)]
    words += ["--nodes", "2", "--launcher", "torchrun", "--launcher-args", where]
    name = f'hostname {host}; exec "$@"'
    command = ["ip", "netns", "exec", host, "unshare", "--uts", "sh", "-c", name, "sh"]
    with log.open("wb") as output:
        return subprocess.Popen(
            [*command, sys.executable, "-m", "distbench", "run", *words],
            env={**os.environ, "GLOO_SOCKET_IFNAME": cable(host)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )


def cut() -> None:
    """Take the cable out."""
    ip("-n", OTHER, "link", "set", cable(OTHER), "down")


def num_rows(folder: Path) -> int:
    """Lines of the run file."""
    return sum(file.read_text().count("\n") for file in folder.glob("*/*.jsonl"))


def wait_for(condition: Callable[[], bool], seconds: float) -> None:
    """Return when it holds, or when that much time is over."""
    until = time.monotonic() + seconds
    while not condition() and time.monotonic() < until:
        time.sleep(0.2)


if __name__ == "__main__":
    try:
        main()
    except NoNamespaces as reason:
        sys.exit(f"cut_cable {reason}")
