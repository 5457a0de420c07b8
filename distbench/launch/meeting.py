"""Ranks that another launcher started meet at an address: what is wrong with it is said, and soon."""

import contextlib
import os
import socket
import subprocess
import sys
import time
from dataclasses import replace

from distbench.launch.ranks import Joined
from distbench.spec import UserError
from distbench.spec.printable import printable

# Name servers may need a moment, right after a node came up.
RESOLVE_S = 5.0
# For an answer of Slurm's controller.
ASK_S = 10.0
# After which a rank that waits for the others says so; they may have begun later, and import torch more slowly.
TOLD_AFTER_S, CONNECT_S = 15.0, 3.0


def require_address(joined: Joined, wait_s: float = RESOLVE_S) -> Joined:
    """Refuse a MASTER_ADDR that has no address, for which torch would wait in silence.

    A name of Slurm's that no name server knows becomes the address by which Slurm itself reaches that node.

    Returns:
        The launch, with an address that resolves.

    Raises:
        UserError: its name did not resolve within `wait_s` seconds; or this is rank 0, and the others would not reach
            it there.
    """
    host, _, port = joined.address.rpartition(":")
    is_slurms = "SLURM_JOB_ID" in os.environ and "MASTER_ADDR" not in os.environ
    if is_slurms and not _resolves(host) and (address := address_by_slurm(host)):
        return replace(joined, variables={**joined.variables, "MASTER_ADDR": address}, address=f"{address}:{port}")
    require_host(host, wait_s)
    told = {**os.environ, **joined.variables}
    # Under torchrun it is torchrun that listens there.
    if joined.rank == 0 and host and "MASTER_PORT" in told and "TORCHELASTIC_RUN_ID" not in told:
        require_own(joined.address)
    return joined


def _resolves(host: str) -> bool:
    with contextlib.suppress(OSError, UnicodeError):
        return bool(socket.getaddrinfo(host, None))
    return False


def require_host(host: str, wait_s: float = RESOLVE_S) -> None:
    """Refuse a name that has no address.

    Raises:
        UserError: it did not resolve within `wait_s` seconds.
    """
    until = time.monotonic() + wait_s
    while host:
        try:
            socket.getaddrinfo(host, None)
            return
        except (OSError, UnicodeError) as error:
            if time.monotonic() >= until:
                what = f"MASTER_ADDR={host} is no name or address that this host knows ({error})"
                raise UserError(f"{what}; set it to the first node's address, alike for all ranks") from error
        time.sleep(RESOLVE_S / 10)


def require_own(address: str) -> None:
    """Refuse a `HOST:PORT` at which this host, where the others are to meet, is not reached, or whose port is taken.

    A name need not be this host's own: something in between may pass on what is sent there.

    Raises:
        UserError: what is sent there does not arrive here, or another process listens there.
    """
    host, _, port = address.rpartition(":")
    try:
        server = socket.create_server(("", int(port)), family=_family(), dualstack_ipv6=socket.has_dualstack_ipv6())
    except OSError as error:
        what = (
            f"ranks cannot meet at {address}: port {port} of this host cannot be had ({os.strerror(error.errno or 0)})"
        )
        raise UserError(f"{what}; give all ranks another MASTER_PORT (torchrun: --master-port)") from error
    with server:
        if _is_local(host):
            return
        server.settimeout(CONNECT_S)
        try:
            with socket.create_connection((host, int(port)), CONNECT_S), server.accept()[0]:
                return
        except OSError as error:
            what = f"ranks cannot meet at {address}: that is not this host, where rank 0 is, and what is sent there"
            advice = "MASTER_ADDR (torchrun: --master-addr) must be an address of rank 0's host"
            raise UserError(f"{what} does not arrive here ({error}); {advice}") from error


def _family() -> socket.AddressFamily:
    return socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET


def _is_local(host: str) -> bool:
    """Whether one of a name's addresses is this host's: only those can be bound."""
    with contextlib.suppress(OSError, UnicodeError):
        for family, kind, _, _, (there, *_) in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM):
            with contextlib.suppress(OSError), socket.socket(family, kind) as one:
                one.bind((there, 0))
                return True
    return False


def address_by_slurm(node: str) -> str:
    """By which Slurm reaches a node; "" where it does not say."""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        command = ("scontrol", "show", "node", "--oneliner", node)
        done = subprocess.run(
            command, capture_output=True, timeout=ASK_S, check=False, encoding="utf-8", errors="replace"
        )
        # A comment of the site's behind it may hold what looks like one.
        return next((part.partition("=")[2] for part in done.stdout.split() if part.startswith("NodeAddr=")), "")
    return ""


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
    if error := why_no_answer(joined.address):
        advice = "MASTER_ADDR must be the host of rank 0, and its MASTER_PORT open to the others"
        return f"{what}, and nothing answers there ({error}); {advice}"
    return f"{what}, and goes on waiting; something answers there"


def why_no_answer(address: str) -> str:
    """Why nobody answers at `HOST:PORT`; "" where somebody does."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), CONNECT_S).close()
    except OSError as error:
        return str(error)
    return ""
