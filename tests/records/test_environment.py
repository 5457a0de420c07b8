"""What others do to this host's CPUs meanwhile, told from what this process and its children do."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
from processes import Children

from distbench.records.machine import CpuUse

BURN = "import time; end = time.process_time() + 1.0\nwhile time.process_time() < end: pass"


def test_own_children_are_not_foreign_and_others_are(children: Children) -> None:
    before = CpuUse.now()
    if before is None:
        pytest.skip("no /proc/stat here")
    children.python("-c", BURN, check=True)
    after = CpuUse.now()
    assert after is not None and after.own_s - before.own_s >= 0.9
    # So is one that still runs, as ranks do that wait for their next job.
    started = children.start(sys.executable, "-c", BURN + "\nprint(flush=True)\ntime.sleep(30)", stdout=subprocess.PIPE)
    assert started.stdout is not None and started.stdout.readline()
    now = CpuUse.now()
    started.kill()
    started.communicate()
    assert now is not None and now.own_s - after.own_s >= 0.9


def test_what_a_process_of_somebody_else_burns_is_foreign(children: Children) -> None:
    """An orphan's parent is none of ours."""
    before = CpuUse.now()
    if before is None:
        pytest.skip("no /proc/stat here")
    in_background = f"{sys.executable} -c '{BURN}' >/dev/null & echo $!"
    pid = int(children.run("bash", "-c", in_background, check=True).stdout)
    while Path(f"/proc/{pid}").exists():
        time.sleep(0.05)
    now = CpuUse.now()
    assert now is not None and now.own_s - before.own_s < 0.5 and now.busy_s - before.busy_s >= 0.9


def test_the_share_is_of_all_cpus_and_of_what_is_not_our_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    # 10 s of 4 CPUs are 40; 30 of them busy, 20 of these our own.
    assert CpuUse(110.0, 530.0, 25.0).foreign_since(CpuUse(100.0, 500.0, 5.0)) == 0.25
    assert CpuUse(110.0, 510.0, 25.0).foreign_since(CpuUse(100.0, 500.0, 5.0)) == 0.0
    assert CpuUse(100.0, 500.0, 5.0).foreign_since(CpuUse(100.0, 500.0, 5.0)) is None
