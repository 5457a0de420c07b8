"""The hosts of `bench preflight` open, close and leave nothing; the other labs are in test_two_hosts and test_slurm."""

import subprocess
import tempfile
from pathlib import Path

import pytest
from processes import Children

from benchmarks.cpu_limit import NoCpuLimit
from benchmarks.links_lab import HOSTS, NUM_RANKS, PREFIX, Faults, address, links_lab
from benchmarks.two_host_lab import NoNamespaces

LOOK = "import os, socket; print(socket.gethostname(), *os.sched_getaffinity(0)); os.system('ip -o -4 addr show eth')"


def test_the_lab_of_links_opens_with_each_rank_in_its_own_surroundings(children: Children) -> None:
    try:
        # Sockets have short paths only.
        faults = Faults(computes=(1,), cable=(2,), link=(3, 4), lossy=(5,), flaps=(6,), has_neighbour=True)
        with tempfile.TemporaryDirectory(prefix="links") as folder, links_lab(Path(folder)) as lab, lab.faults(faults):
            for rank in (0, NUM_RANKS - 1):
                done = subprocess.run(lab.python(rank, "-c", LOOK), capture_output=True, text=True, timeout=60)
                assert done.returncode == 0, done.stderr
                host, _ = done.stdout.split(maxsplit=1)
                assert host == HOSTS[rank // (NUM_RANKS // 2)] and f" {address(rank)}/24 " in done.stdout
    except (NoNamespaces, NoCpuLimit) as reason:
        pytest.skip(str(reason))
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    assert PREFIX not in left
