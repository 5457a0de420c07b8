"""Checks over the hosts of a launch: required agreement, notes on differences, and one folder for all logs.

Ranks with different inputs would wait for collectives that other ranks never issue, or measure different work. Such a
launch ends before the first measurement, with a message that names these ranks.
"""

import contextlib
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from distbench.ranks.device import device_facts
from distbench.spec import Job, UserError
from distbench.spec.devices import is_accelerator
from distbench.spec.job import JOB_FILE
from distbench.spec.printable_text import count_text, listed

Gather = Callable[[Any], list[Any]]
MAX_NAMED = 8
MAX_OFFSET_S = 2.0  # maximum offset of clocks; ranks leave a gather within milliseconds of each other
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class GivenToRank:
    """The inputs of one rank."""

    host: str  # name of the rank's host
    boot: str  # id of the host's running kernel; "" if the system has no id
    torch: str  # version of torch
    inputs: dict[str, str]  # inputs that determine the rank's collectives, by name in messages
    imported: dict[str, str]  # digests of the user's files that the scenario has imported


def require_same_job(job: Job, gather: Gather) -> tuple[str, ...]:
    """Check that all ranks have the same inputs; return each rank's host, in rank order.

    `gather` returns every rank's value, in rank order.

    Raises:
        UserError: inputs differ; the message contains the input, ranks and hosts.
    """
    boot = ""
    with contextlib.suppress(OSError):
        boot = BOOT_ID.read_text().strip()
    own_job = GivenToRank(os.uname().nodename, boot, torch.__version__, _request_of(job), _imported(Path(job.file)))
    jobs: list[GivenToRank] = gather(own_job)
    hosts = tuple(rank_job.host for rank_job in jobs)
    _require_own_names(jobs)
    if problem := _differing("torch", [rank_job.torch for rank_job in jobs], hosts):
        raise UserError(f"{problem}; install the same version on all hosts")
    require_same([rank_job.inputs for rank_job in jobs], hosts)
    require_same([rank_job.imported for rank_job in jobs], hosts)
    if len(set(hosts)) > 1:
        require_same([{"distbench's own code": code} for code in gather(_digest_of_package())], hosts)
    return hosts


def require_same(given: Sequence[Mapping[str, str]], hosts: Sequence[str]) -> None:
    """Raise UserError for ranks with different values. Names that a rank lacks are not compared for this rank.

    `given` contains each rank's values by name in the message, and `hosts` each rank's host.
    """
    for label, expected in given[0].items():
        if ranks := [rank for rank, theirs in enumerate(given) if theirs.get(label, expected) != expected]:
            first = named([0], hosts).replace("rank 0", "rank 0's", 1)
            differs = f"{label} of {named(ranks, hosts)} differs from {first}"
            raise UserError(f"{differs}; give all ranks the same command and files")


def named(ranks: Collection[int], hosts: Sequence[str]) -> str:
    """Return `rank 3`, or with several hosts `ranks 4, 5 (host b)`."""
    text = f"{'ranks' if len(ranks) > 1 else 'rank'} {listed([str(rank) for rank in sorted(ranks)], MAX_NAMED)}"
    if len(set(hosts)) == 1:
        return text
    theirs = list(dict.fromkeys(hosts[rank] for rank in sorted(ranks)))
    return f"{text} ({'hosts' if len(theirs) > 1 else 'host'} {listed(theirs, MAX_NAMED)})"


def _require_own_names(rank_jobs: Sequence[GivenToRank]) -> None:
    """Raise UserError for different hosts with one name, because clocks and links would be treated as on one host."""
    first_ranks: dict[str, int] = {}
    for rank, rank_job in enumerate(rank_jobs):
        first = first_ranks.setdefault(rank_job.host, rank)
        if rank_job.boot != rank_jobs[first].boot:
            problem = f"ranks {first} and {rank} are on different hosts with the same name {rank_job.host}"
            raise UserError(f"{problem}; give each host a different name (hostname)")


def require_own_devices(own_device: str | None, gather: Gather) -> None:
    """Raise UserError for ranks that share a device, before NCCL fails with another message.

    `own_device` identifies this rank's device on its host; None if unknown.
    """
    ranks: dict[tuple[str, str], int] = {}
    for rank, (host, device) in enumerate(gather((os.uname().nodename, own_device))):
        if device is None:
            continue
        if (other_rank := ranks.setdefault((host, device), rank)) != rank:
            problem = f"ranks {other_rank} and {rank} use the same device of {host}"
            raise UserError(
                f"{problem}; start one rank per device of each host, or make a different device visible to each rank"
            )


def _request_of(job: Job) -> dict[str, str]:
    """Return the inputs that determine a rank's collectives. Under another launcher, each rank has a separate job and
    files."""
    request = (job.scenario, job.variants, job.mesh, job.device, job.settings.__dict__, job.trace_paths, job.chosen)
    return {
        "the scenario file": digest(Path(job.file).read_bytes()),
        "the profile": digest(Path(job.profile).read_bytes()) if job.profile else "",
        "the selected cases": json.dumps(request, default=repr),
    }


def _imported(file: Path) -> dict[str, str]:
    """Return digests of the files in the scenario's folder and its subfolders that the scenario has imported."""
    digests = {}
    for module in list(sys.modules.values()):
        path = Path(getattr(module, "__file__", None) or "/")
        if path.is_relative_to(file.parent) and path != file and "site-packages" not in path.parts and path.is_file():
            label = f"{path.relative_to(file.parent)}, which the scenario file imports,"
            digests[label] = digest(path.read_bytes())
    return digests


def _digest_of_package() -> str:
    folder = Path(__file__).parents[1]
    files = sorted(path.relative_to(folder) for path in folder.rglob("*.py"))
    return digest("".join(f"{file} {digest((folder / file).read_bytes())}\n" for file in files))


def digest(content: str | bytes) -> str:
    """Return the SHA-256 in hexadecimal digits."""
    return hashlib.sha256(content.encode() if isinstance(content, str) else content).hexdigest()


class HostFacts(NamedTuple):
    """A rank's report on its host: clock in seconds since the epoch, and devices."""

    now_s: float
    device_name: str
    num_devices: int


def host_cautions(hosts: Sequence[str], device: torch.device, gather: Gather) -> list[str]:
    """Return sentences on different devices within a host, and on clocks and devices that differ from the first host's.

    `hosts` contains each rank's host, `device` is this rank's device, and `gather` returns every rank's value, in rank
    order.
    """
    if len(set(hosts)) == 1 and not is_accelerator(device.type):
        return []
    facts = device_facts(device)
    gather(None)
    all_facts = gather(HostFacts(time.time(), str(facts["device_name"] or ""), int(facts["num_devices"])))
    by_host = dict(reversed([*zip(hosts, all_facts, strict=True)]))
    cautions = mixed_devices(hosts, [rank_facts.device_name for rank_facts in all_facts])
    return [*cautions, *cautions_about({host: by_host[host] for host in dict.fromkeys(hosts)})]


def mixed_devices(hosts: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return sentences on hosts with different devices within the host; `names` contains the name of each rank's
    device."""
    sentences = []
    for host in dict.fromkeys(hosts):
        ranks: dict[str, list[int]] = {}
        for rank, name in enumerate(names):
            if hosts[rank] == host:
                ranks.setdefault(name, []).append(rank)
        if len(ranks) > 1:
            devices = ", ".join(f"{name or 'no device'} ({named(theirs, [host])})" for name, theirs in ranks.items())
            sentences.append(f"devices of host {host} differ: {devices}; its ranks wait for the slower device")
    return sentences


def cautions_about(facts_by_host: Mapping[str, HostFacts]) -> list[str]:
    """Return sentences on hosts with clocks or devices that differ from the first host, which has rank 0."""
    (first, first_facts), *other_hosts = facts_by_host.items()
    cautions = []
    for host, facts in other_hosts:
        ahead_s = facts.now_s - first_facts.now_s
        if abs(ahead_s) > MAX_OFFSET_S:
            span = f"{abs(ahead_s):.0f} s" if abs(ahead_s) < 60 else f"{abs(ahead_s) / 60:,.0f} min"
            way = f"{span} {'ahead of' if ahead_s > 0 else 'behind'} host {first}'s"
            cautions.append(
                f"the clock of host {host} is {way}; dates are from host {first}, and measured times are correct"
            )
        if facts.device_name != first_facts.device_name:
            device = facts.device_name or "no device"
            cautions.append(f"host {host} has {device}, but host {first} has {first_facts.device_name}")
        if facts.num_devices != first_facts.num_devices:
            devices = count_text(facts.num_devices, "device")
            count = f"ranks on host {host} have access to {devices}, on host {first} to {first_facts.num_devices}"
            cautions.append(f"{count}; ranks of different hosts wait for the slower host")
    return cautions


def require_same_device(store: dist.Store, rank: int, world_size: int, device: str) -> None:
    """Raise UserError on all ranks if their types of device differ, before they form process groups.

    The command on each host detects the host's accelerators. Without a working driver, a host would continue on CPUs,
    and its ranks would form other process groups than the waiting ranks.

    `store` is the job's store, which all ranks share before any process group exists; `device` is this rank's type of
    device.
    """
    store.set(f"device/{rank}", json.dumps([device, os.uname().nodename]))
    if (
        store.add("device/ranks", 1) == world_size
    ):  # only the last rank compares, to avoid reads of every rank's value by every rank
        encoded = store.multi_get([f"device/{other_rank}" for other_rank in range(world_size)])
        devices, hosts = zip(*map(json.loads, encoded), strict=True)
        store.set("device/differs", _differing("the device", devices, hosts))
    if problem := store.get("device/differs").decode():
        raise UserError(f"{problem}; set --device, or run `distbench doctor` on these hosts")


def _differing(what: str, by_rank: Sequence[str], hosts: Sequence[str]) -> str:
    """Return `WHAT of ranks 2, 3 (host b) is X, of rank 0 (host a) Y`; "" if all values are equal."""
    ranks = [rank for rank, value in enumerate(by_rank) if value != by_rank[0]]
    if not ranks:
        return ""
    theirs = ", ".join(sorted({by_rank[rank] for rank in ranks}))
    return f"{what} of {named(ranks, hosts)} is {theirs}, of {named([0], hosts)} {by_rank[0]}"


def join_logs(job: Job, hosts: Sequence[str], gather: Gather) -> list[str]:
    """Move this rank's folder next to rank 0's folder if this host can access it; return a sentence on hosts that
    cannot.

    A link remains at the old path, so that known paths are valid; the process that started the rank removes the link
    (`launch/watch_ranks.py`). `hosts` contains each rank's host, and `gather` returns every rank's value, in rank
    order.
    """
    rank_logs = gather((job.log_dir, job.run_id))
    if len({log_dir for log_dir, _ in rank_logs}) == 1:  # ranks that distbench launched
        return []
    first, run_id = Path(rank_logs[0][0]), rank_logs[0][1]
    is_seen = False  # another host may have a different folder with this name
    with contextlib.suppress(OSError, UnicodeDecodeError):
        is_seen = run_id in (first / JOB_FILE).read_text(encoding="utf-8")
    if is_seen:
        _move(Path(job.log_dir), first.parent / Path(job.log_dir).name)
    blind = list(dict.fromkeys(host for host, host_sees in zip(hosts, gather(is_seen), strict=True) if not host_sees))
    if not blind:
        return []
    who = f"host{'s' if len(blind) > 1 else ''} {', '.join(blind)} {'do' if len(blind) > 1 else 'does'}"
    problem = f"{who} not have access to {first.parent} of host {hosts[0]}"
    return [f"{problem}; the run file is on host {hosts[0]}, and the logs are on the host of each rank"]


def _move(folder: Path, target: Path) -> None:
    """Move the folder; after a failure, the folder remains."""
    if folder == target or target.exists():
        return
    with contextlib.suppress(OSError):
        folder.rename(target)
        try:
            folder.symlink_to(target, target_is_directory=True)
        except OSError:
            target.rename(folder)
