"""What differs between hosts and may be meant: said before anything is measured, and in the run file."""

import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from distbench.spec.printable import count_text
from distbench.worker.hosts.alike import Gather
from distbench.worker.rank.device import device_facts

MAX_OFFSET_S = 2.0  # of clocks; ranks leave a gather within milliseconds of each other
MINUTE_S = 60


class HostFacts(NamedTuple):
    """What a rank says of its host: seconds since the epoch, and its devices."""

    now_s: float
    device_name: str
    num_devices: int


def host_cautions(hosts: Sequence[str], device: torch.device, gather: Gather) -> list[str]:
    """Sentences about clocks and devices of hosts that differ from the first host's; none on one host.

    Args:
        hosts: each rank's host, in rank order.
        device: this rank's.
        gather: gives every rank's value, in rank order.
    """
    if len(set(hosts)) == 1:
        return []
    facts = device_facts(device)
    gather(None)
    told = gather(HostFacts(time.time(), str(facts["device_name"] or ""), int(facts["num_devices"])))
    by_host = dict(reversed([*zip(hosts, told, strict=True)]))
    return cautions_about({host: by_host[host] for host in dict.fromkeys(hosts)})


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
