"""Two hosts, each a network namespace with its own torchrun, joined by a virtual cable: one run, one file."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import DATA, run_files
from processes import Ranks

from distbench.runs.run_file import read_run

HOSTS = {"distbench-a": "10.77.0.1", "distbench-b": "10.77.0.2"}


def ip(*arguments: str) -> bool:
    try:
        return subprocess.run(["ip", *arguments], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


@pytest.fixture
def hosts(ranks: Ranks) -> Iterator[dict[str, str]]:
    first, second = HOSTS
    made = ip("netns", "add", first) and ip("netns", "add", second)
    made = made and ip(
        "link", "add", "veth-a", "netns", first, "type", "veth", "peer", "name", "veth-b", "netns", second
    )
    for name, address in HOSTS.items():
        device = f"veth-{name[-1]}"
        made = made and ip("-n", name, "addr", "add", f"{address}/24", "dev", device)
        made = made and ip("-n", name, "link", "set", device, "up") and ip("-n", name, "link", "set", "lo", "up")
    try:
        if not made:
            pytest.skip("needs iproute2 and the right to make network namespaces")
        yield HOSTS
    finally:
        for name in HOSTS:
            ip("netns", "delete", name)


def test_two_torchruns_on_two_hosts_make_one_run(ranks: Ranks, hosts: dict[str, str], tmp_path: Path) -> None:
    def torchrun(number: int, name: str) -> subprocess.Popen[str]:
        command = ["ip", "netns", "exec", name, sys.executable, "-m", "torch.distributed.run"]
        command += ["--nnodes=2", "--nproc-per-node=1", f"--node-rank={number}"]
        command += [f"--master-addr={hosts['distbench-a']}", "--master-port=29555", "-m", "distbench"]
        command += ["run", str(DATA / "tiny.py"), "--quick", "--mesh", "tp=2", "--out", str(tmp_path)]
        variables = {"GLOO_SOCKET_IFNAME": f"veth-{name[-1]}"}
        return ranks.start(*command, variables=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)

    processes = [torchrun(number, name) for number, name in enumerate(hosts)]
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    (file,) = run_files(tmp_path)
    run = read_run(file)
    assert [record["status"] for record in run.cases] == ["ok"]
    assert run.header["environment"]["world_size"] == 2
    assert run.header["environment"]["variables"]["GLOO_SOCKET_IFNAME"] == "veth-a"
