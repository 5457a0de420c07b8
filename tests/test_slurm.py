"""`distbench run --launcher slurm` on a real Slurm of two nodes."""

import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import DATA, run_files
from processes import Ranks

from benchmarks.slurm_cluster import SlurmCluster, slurm_cluster, why_not
from distbench.runs.run_file import read_run

# The command itself takes signals as it does for a user; its ranks are forked.
AS_FORKED = "import runpy, sys; sys.executable = sys.argv.pop(1); runpy.run_module('distbench', run_name='__main__')"


@pytest.fixture(scope="module")
def cluster(ranks: Ranks) -> Iterator[SlurmCluster]:
    if why := why_not():
        pytest.skip(why)
    # Sockets have short paths only.
    folder = Path(tempfile.mkdtemp(prefix="slurm"))
    try:
        with slurm_cluster(folder) as made:
            yield made
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def words(out: Path, scenario: str, *options: object) -> tuple[object, ...]:
    return "run", scenario, "--mesh", "tp=2", "--nodes", "2", "--launcher", "slurm", "--out", out, *options


def test_a_run_on_two_nodes_is_submitted_followed_and_one_run(
    ranks: Ranks, cluster: SlurmCluster, tmp_path: Path
) -> None:
    done = ranks.cli(*words(tmp_path, str(DATA / "tiny.py"), "--quick"), **cluster.variables)
    assert done.returncode == 0, done.stderr
    (file,) = run_files(tmp_path)
    run = read_run(file)
    assert [record["status"] for record in run.cases] == ["ok"] and run.footer is not None
    job_id = run.header["environment"]["variables"]["SLURM_JOB_ID"]
    assert f"Slurm job {job_id}" in done.stderr and "tiny: 1 ok ->" in done.stderr
    (script,) = (tmp_path / "slurm").glob("*.sbatch")
    assert "#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=1\n" in script.read_text()
    # One folder of logs for the run, in which each rank has its own.
    (folder,) = (tmp_path / "logs").iterdir()
    assert folder.name == f"slurm-{job_id}.0-tiny" and {one.name for one in folder.iterdir()} == {"rank0", "rank1"}


def test_ctrl_c_cancels_the_job_and_keeps_what_was_measured(
    ranks: Ranks, cluster: SlurmCluster, tmp_path: Path
) -> None:
    command = words(tmp_path, "collectives", "--budget", "200")
    following = ranks.start(
        sys.executable,
        "-c",
        AS_FORKED,
        ranks.forked_python,
        *command,
        variables=cluster.variables,
        stderr=subprocess.PIPE,
    )
    until = time.monotonic() + 60
    while not (files := run_files(tmp_path)) or not read_run(files[0]).cases:
        assert time.monotonic() < until and following.poll() is None
        time.sleep(0.2)
    kept = {record["case"]["id"] for record in read_run(files[0]).cases if record["status"] == "ok"}
    following.send_signal(signal.SIGINT)
    said = following.communicate(timeout=60)[1]
    assert following.returncode == 130 and "is cancelled; what it measured is in" in said
    while cluster.ask("squeue", "-h"):
        assert time.monotonic() < until + 60
        time.sleep(0.2)
    assert kept <= {record["case"]["id"] for record in read_run(files[0]).cases if record["status"] == "ok"}


def test_a_partition_that_is_not_there_is_one_sentence(ranks: Ranks, cluster: SlurmCluster, tmp_path: Path) -> None:
    done = ranks.cli(*words(tmp_path, "tp_mlp", "--launcher-args", "--partition=none"), **cluster.variables)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "invalid partition" in done.stderr
    assert "--launcher-args" in done.stderr
