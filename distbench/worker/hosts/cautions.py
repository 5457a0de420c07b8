"""What differs between hosts and may be meant: said before anything is measured, and in the run file."""

import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from distbench.spec.devices import is_accelerator
from distbench.spec.printable import count_text
from distbench.worker.hosts.alike import Gather, named
from distbench.worker.rank.device import device_facts

MAX_OFFSET_S = 2.0  # of clocks; ranks leave a gather within milliseconds of each other
MINUTE_S = 60


class HostFacts(NamedTuple):
    """What a rank says of its host: seconds since the epoch, and its devices."""

    now_s: float
    device_name: str
    num_devices: int


def host_cautions(hosts: Sequence[str], device: torch.device, gather: Gather) -> list[str]:
    """Sentences about devices of a host that differ, and clocks and devices of hosts that differ from the first host's.

    Args:
        hosts: each rank's host, in rank order.
        device: this rank's.
        gather: gives every rank's value, in rank order.
    """
    if len(set(hosts)) == 1 and not is_accelerator(device.type):
        return []
    facts = device_facts(device)
    gather(None)
    told = gather(HostFacts(time.time(), str(facts["device_name"] or ""), int(facts["num_devices"])))
    by_host = dict(reversed([*zip(hosts, told, strict=True)]))
    own = mixed_devices(hosts, [one.device_name for one in told])
    return [*own, *cautions_about({host: by_host[host] for host in dict.fromkeys(hosts)})]


def mixed_devices(hosts: Sequence[str], names: Sequence[str]) -> list[str]:
    """Hosts whose own devices differ, as sentences; `names` has each rank's device."""
    found = []
    for host in dict.fromkeys(hosts):
        ranks: dict[str, list[int]] = {}
        for rank, name in enumerate(names):
            if hosts[rank] == host:
                ranks.setdefault(name, []).append(rank)
        if len(ranks) > 1:
            which = ", ".join(f"{name or 'no device'} ({named(theirs, [host])})" for name, theirs in ranks.items())
            found.append(f"devices of host {host} differ: {which}: its ranks wait for the slower")
    return found


def cautions_about(told: Mapping[str, HostFacts]) -> list[str]:
    """The same, of what each host says; the first one is rank 0's."""
    (first, wanted), *others = told.items()
    found = []
    for host, own in others:
        ahead_s = own.now_s - wanted.now_s
        if abs(ahead_s) > MAX_OFFSET_S:
            way = f"{_span(abs(ahead_s))} {'ahead of' if ahead_s > 0 else 'behind'} host {first}'s"
            found.append(f"the clock of host {host} is {way}: dates are host {first}'s, and no time depends on them")
        if own.device_name != wanted.device_name:
            found.append(f"host {host} has {own.device_name or 'no device'}, host {first} {wanted.device_name}")
        if own.num_devices != wanted.num_devices:
            count = (
                f"host {host} shows a rank {count_text(own.num_devices, 'device')}, host {first} {wanted.num_devices}"
            )
            found.append(f"{count}: ranks of hosts that differ wait for the slower")
    return found


def _span(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < MINUTE_S else f"{seconds / MINUTE_S:,.0f} min"
