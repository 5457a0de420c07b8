"""Two hosts, each a network namespace with its own torchrun, joined by a virtual cable: one run, one file.

One launch has two jobs: the first ends well, and in the middle of the second a host is lost.
"""

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from conftest import DATA, run_files
from processes import Ranks

from benchmarks.two_host_lab import HOSTS, NoNamespaces, lose, torchrun_on, two_hosts
from distbench.records.run_file import Run, read_run

FIRST, LOST = HOSTS
TIMEOUT_S = 120
MIN_ROWS = 12


class Launch(NamedTuple):
    """What the first host's torchrun printed, its exit code, the run files of both jobs, and the results folder."""

    output: str
    exit_code: int
    whole: Run
    cut: Run
    out: Path


@pytest.fixture(scope="module")
def launch(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launch]:
    out = tmp_path_factory.mktemp("two-hosts")
    words = ["distbench", "run", f"{DATA / 'tiny.py'}", "calibrate", "--quick", "--mesh", "tp=2", "--results", f"{out}"]
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    processes = {}
    try:
        with two_hosts() as hosts:
            for host in hosts:
                command, variables = torchrun_on(host, 1, 29555, words)
                processes[host] = ranks.start(*command, variables=variables, **output)
            wait_for_rows(out, processes[FIRST])
            lose(LOST)
            printed = processes[FIRST].communicate(timeout=TIMEOUT_S)[0]
            processes[LOST].communicate(timeout=TIMEOUT_S)
    except NoNamespaces as reason:
        pytest.skip(str(reason))
    finally:
        for process in processes.values():
            process.kill()
    runs = {run.header["job"]["scenario"]: run for run in map(read_run, run_files(out))}
    yield Launch(printed, processes[FIRST].returncode, runs["tiny"], runs["calibrate"], out)


def wait_for_rows(out: Path, process: "subprocess.Popen[str]") -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while process.poll() is None and time.monotonic() < deadline:
        files = list(out.rglob("*calibrate*.jsonl"))
        if files and files[0].read_text().count("\n") > MIN_ROWS:
            return
        time.sleep(0.05)
    raise AssertionError(process.communicate(timeout=TIMEOUT_S)[0])


@pytest.mark.long
def test_two_torchruns_on_two_hosts_make_one_run(launch: Launch) -> None:
    run = launch.whole
    assert [record["status"] for record in run.cases] == ["ok"]
    environment = run.header["environment"]
    assert (environment["world_size"], environment["hosts"]) == (2, [FIRST, LOST])
    assert environment["variables"]["GLOO_SOCKET_IFNAME"] == "veth-a"


@pytest.mark.long
def test_the_logs_of_both_hosts_are_in_one_folder_a_run(launch: Launch) -> None:
    """Each host's torchrun has a name of its own for the launch; rank 1's logs were moved, and none is left behind."""
    first = Path(launch.whole.header["job"]["log_dir"])
    names = [{path.name for path in (first.parent / rank).iterdir()} for rank in ("rank0", "rank1")]
    assert {"job.json", "rank0.log"} <= names[0] and {"job.json", "rank1.log"} <= names[1]
    folders = [path for path in (launch.out / "logs").iterdir() if path.name.endswith("-tiny")]
    assert folders == [first.parent] and not any(path.is_symlink() for path in first.parent.iterdir())


@pytest.mark.long
def test_a_host_lost_in_the_middle_is_named_and_finished_cases_are_kept(launch: Launch) -> None:
    assert launch.exit_code != 0 and launch.cut.footer is not None
    kept = [record for record in launch.cut.cases if record["status"] == "ok"]
    broken = [record for record in launch.cut.cases if record["status"] != "ok"]
    message = f"host {LOST} is lost: its rank 1 no longer responds"
    assert len(kept) >= MIN_ROWS and message in launch.output
    footer = launch.cut.footer["message"]
    if broken:
        (record,) = broken
        assert record["status"] == "aborted" and message in record["error"] and "1 case broke the launch" in footer
    else:  # The host was lost after the row of a case and before the start of the next case.
        assert message in footer
