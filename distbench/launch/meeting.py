"""Ranks that another launcher started meet at an address: what is wrong with it is said, and soon."""

import os
import socket
import sys
import time

from distbench.launch.ranks import Joined
from distbench.spec import UserError
from distbench.spec.printable import printable

# Name servers may need a moment, right after a node came up.
RESOLVE_S = 5.0
# After which a rank that waits for the others says so; they may have begun later, and import torch more slowly.
TOLD_AFTER_S, CONNECT_S = 20.0, 3.0


def require_address(joined: Joined, wait_s: float = RESOLVE_S) -> None:
    """Refuse a MASTER_ADDR that has no address, for which torch would wait in silence.

    Raises:
        UserError: its name did not resolve within `wait_s` seconds.
    """
    host, until = joined.address.rpartition(":")[0], time.monotonic() + wait_s
    while host:
        try:
            socket.getaddrinfo(host, None)
            return
        except (OSError, UnicodeError) as error:
            if time.monotonic() > until:
                what = f"MASTER_ADDR={host} is no name or address that this host knows ({error})"
                raise UserError(f"{what}; set it to the first node's address, alike for all ranks") from error
        time.sleep(RESOLVE_S / 10)


class Meeting:
    """Says once, from the first rank of each host, that the others are waited for.

    Args:
        joined: the launch, or None for one of our own, of which nothing is said.
    """

    def __init__(self, joined: Joined | None) -> None:
        local_rank = (joined.variables if joined else {}).get("LOCAL_RANK") or os.environ.get("LOCAL_RANK", "0")
        self._joined = joined if joined and joined.address and local_rank == "0" else None

    def waited(self, seconds: float) -> None:
        """Tell, if it is time to."""
        if self._joined and seconds > TOLD_AFTER_S:
            print(printable(f"distbench: {why_waiting(self._joined, seconds)}"), file=sys.stderr, flush=True)
            self._joined = None


def why_waiting(joined: Joined, seconds: float) -> str:
    """What a rank that waits can tell about the address, in one sentence."""
    what = f"rank {joined.rank} has waited {seconds:.0f} s at {joined.address} for the other ranks"
    host, _, port = joined.address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), CONNECT_S).close()
    except OSError as error:
        advice = "MASTER_ADDR must be the host of rank 0, and its MASTER_PORT open to the others"
        return f"{what}, and nothing answers there ({error}); {advice}"
    return f"{what}, and goes on waiting; rank 0 is there"
