"""Ranks and hosts that were given different things are refused before anything is measured, and named.

Each would wait for collectives that the others never issue, or measure something else than they do.
"""

import hashlib
import json
import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from distbench.spec import Job, UserError

Gather = Callable[[Any], list[Any]]
MAX_NAMED = 8
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class GivenToRank:
    """What one rank was given.

    Args:
        host: its host's name.
        boot: what tells the host's running kernel from any other; "" where it has no such thing.
        torch: its version.
        asked: what decides which collectives it issues, by what that is called.
        imported: digests of the user's own files that the scenario has imported.
    """

    host: str
    boot: str
    torch: str
    asked: dict[str, str]
    imported: dict[str, str]


def require_alike(job: Job, gather: Gather) -> tuple[str, ...]:
    """Each rank's host, in rank order, where all ranks were given the same.

    Args:
        job: this rank's.
        gather: gives every rank's value, in rank order.

    Raises:
        UserError: they were not, in one sentence that names what differs, and the ranks and hosts.
    """
    own = GivenToRank(os.uname().nodename, boot_id(), torch.__version__, _asked(job), _imported(Path(job.file)))
    told: list[GivenToRank] = gather(own)
    hosts = tuple(one.host for one in told)
    require_own_names(told)
    versions = [one.torch for one in told]
    if others := [rank for rank, version in enumerate(versions) if version != versions[0]]:
        theirs = ", ".join(sorted({versions[rank] for rank in others}))
        what = f"torch of {named(others, hosts)} is {theirs}, of {named([0], hosts)} {versions[0]}"
        raise UserError(f"{what}; install the same on all hosts")
    require_same([one.asked for one in told], hosts)
    require_same([one.imported for one in told], hosts)
    if len(set(hosts)) > 1:
        require_same([{"distbench's own code": code} for code in gather(_digest_of_package())], hosts)
    return hosts


def require_same(given: Sequence[Mapping[str, str]], hosts: Sequence[str]) -> None:
    """Refuse ranks whose values differ; what only some ranks have is not compared.

    Args:
        given: each rank's values; the keys name in the message what differs.
        hosts: each rank's host.
    """
    for what, wanted in given[0].items():
        if ranks := [rank for rank, theirs in enumerate(given) if theirs.get(what, wanted) != wanted]:
            first = named([0], hosts).replace("rank 0", "rank 0's", 1)
            differs = f"{what} of {named(ranks, hosts)} differs from {first}"
            raise UserError(f"{differs}; give all ranks the same command and files")


def named(ranks: Collection[int], hosts: Sequence[str]) -> str:
    """`rank 3`, or where there are several hosts `ranks 4, 5 (host b)`."""
    shown, more = sorted(ranks)[:MAX_NAMED], len(ranks) - MAX_NAMED
    text = ("ranks " if len(ranks) > 1 else "rank ") + ", ".join(map(str, shown))
    text += f" and {more} more" if more > 0 else ""
    if len(set(hosts)) == 1:
        return text
    theirs = list(dict.fromkeys(hosts[rank] for rank in sorted(ranks)))
    rest = f" and {len(theirs) - MAX_NAMED} more" if len(theirs) > MAX_NAMED else ""
    return f"{text} ({'hosts' if len(theirs) > 1 else 'host'} {', '.join(theirs[:MAX_NAMED])}{rest})"


def require_own_names(told: Sequence[GivenToRank]) -> None:
    """Refuse hosts of one name: their clocks would be taken for one, and links between them for links within a host."""
    known: dict[str, int] = {}
    for rank, one in enumerate(told):
        first = known.setdefault(one.host, rank)
        if one.boot != told[first].boot:
            what = f"ranks {first} and {rank} are on different hosts that are both called {one.host}"
            raise UserError(f"{what}; give each host a name of its own (hostname)")


def boot_id() -> str:
    """Of this host's kernel, drawn when it started; "" where the system has none."""
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return ""


def require_own_devices(own: str | None, gather: Callable[[Any], list[Any]]) -> None:
    """Refuse ranks that share a device: NCCL does too, later and in other words. `own` names it on this host, None
    where nobody knows."""
    ranks: dict[tuple[str, str], int] = {}
    for rank, (host, device) in enumerate(gather((os.uname().nodename, own))):
        if device is None:
            continue
        if (other := ranks.setdefault((host, device), rank)) != rank:
            what = f"ranks {other} and {rank} have the same device of {host}"
            raise UserError(f"{what}; start as many ranks a host as it has devices, or show each rank another one")


def _asked(job: Job) -> dict[str, str]:
    """What decides which collectives a rank issues; under another launcher each rank has its own job and files."""
    asked = (job.scenario, job.variants, job.mesh, job.device, job.settings.__dict__, job.trace_paths, job.chosen)
    return {
        "the scenario file": digest(Path(job.file).read_bytes()),
        "the profile": digest(Path(job.profile).read_bytes()) if job.profile else "",
        "what to run": json.dumps(asked, default=repr),
    }


def _imported(file: Path) -> dict[str, str]:
    """The files of the user's own that the scenario has imported: those in its folder, or below."""
    found = {}
    for module in list(sys.modules.values()):
        path = Path(getattr(module, "__file__", None) or "/")
        if path.is_relative_to(file.parent) and path != file and "site-packages" not in path.parts and path.is_file():
            what = f"{path.relative_to(file.parent)}, which the scenario file imports,"
            found[what] = digest(path.read_bytes())
    return found


def _digest_of_package() -> str:
    """Of all of this package's files, wherever it is installed."""
    folder = Path(__file__).parents[2]
    files = sorted(path.relative_to(folder) for path in folder.rglob("*.py"))
    return digest("".join(f"{file} {digest((folder / file).read_bytes())}\n" for file in files))


def digest(content: str | bytes) -> str:
    """SHA-256, in hexadecimal digits."""
    return hashlib.sha256(content.encode() if isinstance(content, str) else content).hexdigest()
