"""Two hosts on one machine: network namespaces with names of their own, joined by one cable, shaped where asked."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

HOSTS = {"distbench-a": "10.77.0.1", "distbench-b": "10.77.0.2"}


class NoNamespaces(Exception):
    """This machine lacks iproute2, or the right to make network namespaces."""


def ip(*words: str, program: str = "ip") -> None:
    """One command of iproute2; NoNamespaces where it fails."""
    try:
        subprocess.run([program, *words], capture_output=True, check=True)
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        raise NoNamespaces("needs iproute2 and the right to make network namespaces") from error


@contextmanager
def two_hosts(megabits_per_s: int | None = None) -> Iterator[Mapping[str, str]]:
    """Two namespaces (name to address), joined by a virtual cable with a token bucket at both ends, if shaped."""
    first, second = HOSTS
    try:
        for name in HOSTS:
            ip("netns", "add", name)
        ip("link", "add", "veth-a", "netns", first, "type", "veth", "peer", "name", "veth-b", "netns", second)
        for name, address in HOSTS.items():
            ip("-n", name, "addr", "add", f"{address}/24", "dev", cable(name))
            for device in (cable(name), "lo"):
                ip("-n", name, "link", "set", device, "up")
            if megabits_per_s:
                bucket = ("rate", f"{megabits_per_s}mbit", "burst", "512kb", "latency", "200ms")
                ip("-n", name, "qdisc", "replace", "dev", cable(name), "root", "tbf", *bucket, program="tc")
        yield HOSTS
    finally:
        for name in HOSTS:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def lose(host: str) -> None:
    """Kill whatever runs on a host."""
    result = subprocess.run(["ip", "netns", "pids", host], capture_output=True, text=True, check=False).stdout
    for pid in map(int, result.split()):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def cable(host: str) -> str:
    """The host's network device."""
    return f"veth-{host[-1]}"


def torchrun_on(host: str, ranks_per_host: int, port: int, module: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """(command, variables) of the torchrun of one host, whose ranks run `python -m` these words."""
    name = f'hostname {host}; exec "$@"'
    command = ["ip", "netns", "exec", host, "unshare", "--uts", "sh", "-c", name, "sh"]
    command += [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--nproc-per-node={ranks_per_host}"]
    command += [f"--node-rank={list(HOSTS).index(host)}", f"--master-addr={HOSTS['distbench-a']}"]
    command += [f"--master-port={port}", "-m", *module]
    return command, {"GLOO_SOCKET_IFNAME": cable(host)}
