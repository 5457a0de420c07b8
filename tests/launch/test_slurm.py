"""docs/clusters.md and kubernetes.md are executed, on a real Slurm of two nodes; and what goes wrong there.

Each of its commands runs as it stands, with a tiny scenario on two CPU ranks in place of a model on sixteen GPUs.
"""

import importlib.util
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from conftest import DATA, ROOT, run_files
from processes import PATIENCE_S, Ranks

from benchmarks.slurm_cluster import SlurmCluster, slurm_cluster, why_not
from distbench.launch.nodes import NodeLaunch, torchrun_lines
from distbench.launch.slurm import slurm_script
from distbench.records.run_file import read_run

# The command itself takes signals as it does for a user; its ranks are forked.
AS_FORKED = "import runpy, sys; sys.executable = sys.argv.pop(1); runpy.run_module('distbench', run_name='__main__')"
PAGE = "".join((ROOT / "docs" / name).read_text() for name in ("clusters.md", "kubernetes.md"))
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
COMMANDS = [text.splitlines() for kind, text in BLOCKS if kind == "bash"]
ALONE, TORCHRUN, SUBMITTED, ALLOCATED, TORCHX, KUBERNETES = COMMANDS
SHOWN_TORCHRUN, SHOWN_SCRIPT = (text for kind, text in BLOCKS if not kind)
POD = (ROOT / "docs" / "examples" / "kubernetes.yaml").read_text()
SMALLER = (
    ("tp_mlp", "llama_2d"),
    ("llama_2d", f"{DATA / 'tiny.py'} --budget 0.2 --quiet"),
    (r"dp_shard=\d,tp=4", "tp=2"),
    ("--ntasks-per-node 8", "--ntasks-per-node 1"),
    (r" --gpus\S* 8", ""),
    ("partition=gpu", "partition=all"),
    (r"HOST\b", "127.0.0.1"),
    (" --pty", ""),
)


RESULTS = re.compile(r" --(out|results) /results")


def smaller(line: str, out: Path | None = None) -> str:
    """A command of the page for this machine."""
    for pattern, text in SMALLER:
        line = re.sub(pattern, text, line)
    return RESULTS.sub("", line.removesuffix(" &")) + (f" --results {out}" if out else "")


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def statuses(out: Path) -> list[str]:
    return [record["status"] for file in run_files(out) for record in read_run(file).cases]


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


@pytest.fixture(scope="module")
def path(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> str:
    """PATH with the commands of the page, forked."""
    folder = tmp_path_factory.mktemp("bin")
    for name, module in {"distbench": "-m distbench", "torchrun": "-m torch.distributed.run", "python": ""}.items():
        (folder / name).write_text(f'#!/bin/sh\nexec {ranks.forked_python} {module} "$@"\n')
        (folder / name).chmod(0o755)
    return os.pathsep.join([str(folder), os.environ["PATH"], str(Path(sys.executable).parent)])


def at_once(ranks: Ranks, lines: list[str], **variables: str) -> list[tuple[int, str]]:
    """Exit code and output of commands that run at the same time."""
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    started = [ranks.start("bash", "-c", line, variables=variables, **streams) for line in lines]
    message = [process.communicate(timeout=120)[0] for process in started]
    return [(process.returncode, text) for process, text in zip(started, message, strict=True)]


def test_no_command_of_the_page_is_left_out() -> None:
    assert len(BLOCKS) == len(COMMANDS) + 2
    lines = [line for lines in COMMANDS for line in lines]
    held = [*ALONE, *TORCHRUN, *SUBMITTED, *ALLOCATED, *TORCHX, *KUBERNETES]
    assert held == lines and all(" run " in line for line in lines) and len(lines) == 10


def asked(device: str, *extra: str) -> NodeLaunch:
    words = tuple(shlex.split(SUBMITTED[0].partition(" run ")[2].partition(" --nodes")[0]))
    return NodeLaunch(words, 2, 8, device, Path("results"), "distbench-llama_2d", extra)


def test_what_print_shows_stands_on_the_page() -> None:
    extra = shlex.split(SUBMITTED[0])[-1].split()
    python = NodeLaunch(("x",), 1, 1, "cpu", Path(), "").command[0]
    assert slurm_script(asked("cuda", *extra)).replace(python, "python") == SHOWN_SCRIPT
    assert torchrun_lines(asked("cuda")).replace(python, "python") == SHOWN_TORCHRUN.rstrip("\n")


def test_the_kubernetes_job_is_what_torchrun_would_be_told() -> None:
    service, job = yaml.safe_load_all(POD)
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert service["metadata"]["name"] == pod["subdomain"] == service["spec"]["selector"]["job-name"] == "distbench"
    assert job["metadata"]["name"] == "distbench" and spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"] == 2 and container["resources"]["limits"] == {"nvidia.com/gpu": 8}
    assert {one["name"] for one in container["volumeMounts"]} == {one["name"] for one in pod["volumes"]}
    (line,) = container["args"]
    ours = RESULTS.sub("", line.removeprefix("exec ").strip()).replace("$JOB_COMPLETION_INDEX", "0")
    shown = next(text for text in SHOWN_TORCHRUN.splitlines() if "--node-rank=0" in text)
    assert ours.replace("distbench-0.distbench", "$HOST").split() == shown.split()


def test_torchrun_on_two_hosts_and_one_host_alone(ranks: Ranks, path: str, tmp_path: Path) -> None:
    """At once."""
    first = f"127.0.0.1 --master-port {free_port()}"
    launches = [smaller(line, tmp_path / "two").replace("127.0.0.1", first) for line in TORCHRUN]
    launches += [smaller(line, tmp_path / f"{number}") for number, line in enumerate(ALONE)]
    ended = at_once(ranks, launches, PATH=path)
    assert [code for code, _ in ended] == [0] * 4, ended
    assert [statuses(tmp_path / name) for name in ("two", "0", "1")] == [["ok"]] * 3


@pytest.mark.long
def test_torchx_runs_it_on_this_machine(ranks: Ranks, path: str, tmp_path: Path) -> None:
    if not importlib.util.find_spec("torchx"):
        pytest.skip("torchx is not installed: pip install 'distbench[torchx]'")
    from torchx.components.dist import ddp
    from torchx.specs.builders import materialize_appdef

    ((code, message),) = at_once(ranks, [smaller(TORCHX[0], tmp_path) + " --mesh tp=2"], PATH=path)
    assert code == 0 and statuses(tmp_path) == ["ok"], message
    # Kubernetes: as far as its component takes the words.
    shown = ranks.run("bash", "-c", f"{KUBERNETES[0]} --device cpu --dry-run", variables={"PATH": path})
    words = shlex.split(shown.stdout)
    at = words.index("dist.ddp")
    assert words[:at] == [
        *("torchx", "run", "--wait", "--log", "--workspace"),
        "",
        "-s",
        "kubernetes",
        "-cfg",
        "queue=default",
    ]
    (role,) = materialize_appdef(ddp, words[at + 1 :]).roles
    assert (role.num_replicas, role.image, role.resource.gpu) == (2, "REGISTRY/distbench:1", 8)
    assert [(one.src, one.dst_path) for one in role.mounts] == [("results", "/results")]
    assert role.args[1].endswith("-m distbench run llama_2d --results /results --device cpu")


def test_a_run_on_two_nodes_is_submitted_followed_and_one_run(
    ranks: Ranks, cluster: SlurmCluster, path: str, tmp_path: Path
) -> None:
    line = smaller(SUBMITTED[0], tmp_path).replace("--quiet", "--quick")
    ((code, message),) = at_once(ranks, [line], PATH=path, **cluster.variables)
    assert code == 0, message
    (file,) = run_files(tmp_path)
    run = read_run(file)
    assert [record["status"] for record in run.cases] == ["ok"] and run.footer is not None
    job_id = run.header["environment"]["variables"]["SLURM_JOB_ID"]
    assert f"Slurm job {job_id}" in message and "tiny: 1 ok ->" in message
    (script,) = (tmp_path / "slurm").glob("*.sbatch")
    assert "#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=1\n" in script.read_text()
    # One folder of logs for the run, in which each rank has its own.
    (folder,) = (tmp_path / "logs").iterdir()
    assert folder.name == f"slurm-{job_id}.0-tiny" and {one.name for one in folder.iterdir()} == {"rank0", "rank1"}


def test_within_an_allocation_by_srun_and_interactively(
    ranks: Ranks, cluster: SlurmCluster, path: str, tmp_path: Path
) -> None:
    """At once: Slurm's names of nodes are no one's here, and each launch meets at a port of its own."""
    lines = [smaller(line, tmp_path / f"{number}") for number, line in enumerate(ALLOCATED)]
    ended = at_once(ranks, lines, PATH=path, **cluster.variables)
    assert [code for code, _ in ended] == [0, 0, 0], ended
    assert [statuses(tmp_path / f"{number}") for number in range(3)] == [["ok"]] * 3
    sizes = [read_run(run_files(tmp_path / f"{number}")[0]).header["environment"]["world_size"] for number in range(3)]
    assert sizes == [2, 2, 2], "one task starts the scenario's own ranks"


def words(out: Path, scenario: str, *options: object) -> tuple[object, ...]:
    return "run", scenario, "--mesh", "tp=2", "--nodes", "2", "--launcher", "slurm", "--results", out, *options


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
    until = time.monotonic() + PATIENCE_S
    while not (files := run_files(tmp_path)) or not read_run(files[0]).cases:
        assert time.monotonic() < until and following.poll() is None
        time.sleep(0.2)
    kept = {record["case"]["id"] for record in read_run(files[0]).cases if record["status"] == "ok"}
    following.send_signal(signal.SIGINT)
    message = following.communicate(timeout=PATIENCE_S)[1]
    assert following.returncode == 130 and "is cancelled; finished cases are in" in message
    while cluster.ask("squeue", "-h"):
        assert time.monotonic() < until + 60
        time.sleep(0.2)
    assert kept <= {record["case"]["id"] for record in read_run(files[0]).cases if record["status"] == "ok"}


def test_what_slurm_or_a_node_cannot_do_is_one_sentence(
    ranks: Ranks, cluster: SlurmCluster, path: str, tmp_path: Path
) -> None:
    commands = {
        "invalid partition": words(tmp_path, "tp_mlp", "--launcher-args", "--partition=none"),
        "(PartitionNodeLimit): the partition has fewer nodes": (*words(tmp_path, "tiny.py"), "--nodes", 4),
        "give a --results folder that this host and all nodes share": words(cluster.private / "results", "tiny.py"),
    }
    lines = [shlex.join(["distbench", *map(str, command)]) for command in commands.values()]
    lines[1] = lines[1].replace("tp=2 --nodes 2", "tp=4")
    lines = [line.replace("tiny.py", str(DATA / "tiny.py")) for line in lines]
    # RFC 2606 keeps this name from being anybody's.
    step = f"srun --nodes 2 --ntasks-per-node 1 distbench run {DATA / 'tiny.py'} --mesh tp=2 --results {tmp_path}"
    lines.insert(0, f"MASTER_ADDR=no-such-host.invalid {step}")
    (code, message), *ended = at_once(
        ranks, lines if cluster.has_private else lines[:3], PATH=path, **cluster.variables
    )
    assert (
        code == 2
        and "MASTER_ADDR=no-such-host.invalid does not resolve on this host" in message
        and "Traceback" not in message
    )
    for (code, message), sentence in zip(ended, commands, strict=False):
        assert code in (1, 2) and sentence in message.splitlines()[-1] and "Traceback" not in message
    assert "--launcher-args" in ended[0][1]
    assert not cluster.ask("squeue", "-h", "--states", "PENDING,RUNNING")
