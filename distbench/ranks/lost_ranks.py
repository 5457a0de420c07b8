"""Detection of a lost rank or host during a launch."""

import contextlib
import errno
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from distbench.ranks.agreement import Store
from distbench.ranks.failure import report_failure
from distbench.ranks.hosts import named

# Time in which a rank that fails together with other ranks can report its reason.
GONE_AFTER_S = 10.0
CONNECT_S = 10.0
# A host that loses power or network closes no connection; its loss is detected after 25 s.
KEEP_ALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
UNREACHABLE = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN)
LEAVES = b"."


class Presence:
    """Detection of the end of another rank. Under srun nothing else detects a rank's end, so collectives would hang for
    minutes.

    Each rank holds a connection to rank 0. The kernel closes the connection when the process ends in any way; the
    connection times out if the other host no longer responds.

    Args:
        store: the store in which rank 0 publishes its port.
        hosts: each rank's host, in rank order.
        address: the address of rank 0.
        on_gone: called on a separate thread, with a sentence, at most once; not after `leave`.
    """

    def __init__(
        self, store: Store, rank: int, hosts: Sequence[str], address: str, on_gone: Callable[[str], None]
    ) -> None:
        self._on_gone, self._is_leaving = on_gone, False
        self._rank, self._hosts, world_size = rank, hosts, len(hosts)
        self._ranks: dict[socket.socket, int | None] = {}
        self._link: socket.socket | None = None
        if world_size == 1:
            return
        if rank == 0:
            is_dual_stack = socket.has_dualstack_ipv6()
            family = socket.AF_INET6 if is_dual_stack else socket.AF_INET
            server = socket.create_server(("", 0), family=family, dualstack_ipv6=is_dual_stack, backlog=world_size)
            store.set("presence", str(server.getsockname()[1]))
            threading.Thread(target=self._follow_all, args=(server,), daemon=True).start()
            return
        with contextlib.suppress(OSError):  # a rank that cannot reach the port runs without detection
            port = int(store.get("presence"))
            self._link = _kept_alive(socket.create_connection((address, port), CONNECT_S))
            self._link.sendall(rank.to_bytes(4, "big"))
            threading.Thread(target=self._follow_first, args=(self._link,), daemon=True).start()

    def leave(self) -> None:
        """Allow ranks to end from now on. All ranks have one more barrier after this call."""
        self._is_leaving = True
        if self._link is not None:
            with contextlib.suppress(OSError):
                self._link.sendall(LEAVES)

    def _follow_all(self, server: socket.socket) -> None:
        with server, selectors.DefaultSelector() as selector:
            selector.register(server, selectors.EVENT_READ)
            while self._ranks or not self._is_leaving:
                for key, _ in selector.select():
                    link: Any = key.fileobj
                    if link is server:
                        link = _kept_alive(server.accept()[0])
                        self._ranks[link] = None
                        selector.register(link, selectors.EVENT_READ)
                    elif (end := self._end_of(link)) is not None:
                        selector.unregister(link)
                        link.close()
                        rank = self._ranks.pop(link)
                        if rank is not None and not self._is_leaving:
                            self._tell(rank, is_silent=end in UNREACHABLE)

    def _end_of(self, link: socket.socket) -> int | None:
        """Return the end of a rank's connection: the system's error number, 0 if closed, None if open."""
        try:
            received = link.recv(4 if self._ranks[link] is None else 1)
        except OSError as error:
            return error.errno or 0
        if received == LEAVES:
            self._ranks[link] = None
        elif len(received) == 4:
            self._ranks[link] = int.from_bytes(received, "big")
        return None if received else 0

    def _tell(self, rank: int, is_silent: bool) -> None:
        message = self._silence_of(rank) if is_silent else f"rank {rank} has ended while the others continued"
        for link in self._ranks:
            with contextlib.suppress(OSError):
                link.sendall(message.encode())
        self._gone(message, is_silent)

    def _follow_first(self, link: socket.socket) -> None:
        link.settimeout(None)
        message, is_silent = "", False
        with link:
            try:
                message = link.recv(1 << 10).decode()
            except OSError as error:
                is_silent = error.errno in UNREACHABLE
        if is_silent:
            message = self._silence_of(0)
        self._gone(message or "rank 0 has ended while the others continued", is_silent)

    def _silence_of(self, rank: int) -> str:
        own_host, other_host = self._hosts[self._rank], self._hosts[rank]
        theirs = [other_rank for other_rank, host in enumerate(self._hosts) if host == other_host]
        ranks = named(theirs, [other_host] * len(self._hosts))
        return f"host {other_host} ({ranks}) no longer responds to host {own_host}: {other_host} or the network is down"

    def _gone(self, message: str, is_silent: bool) -> None:
        if not self._is_leaving:
            time.sleep(0 if is_silent else GONE_AFTER_S)
        if not self._is_leaving:
            self._on_gone(message)


def _kept_alive(link: socket.socket) -> socket.socket:
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEP_ALIVE.items():
        if hasattr(socket, name):
            link.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return link


def presence_of(log_dir: Path, store: Store, rank: int, hosts: Sequence[str]) -> Presence | None:
    """Return a Presence, which ends this rank when another rank is gone. Return None if all ranks are on one host and
    the launcher ends them: torchrun's and distbench's launchers set these variables.
    """
    is_launched = {"TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE"} & set(os.environ)
    if is_launched and len(set(hosts)) == 1:
        return None

    def end(message: str) -> None:
        report_failure(log_dir, rank, "gone", message)
        os._exit(1)

    return Presence(store, rank, hosts, os.environ["MASTER_ADDR"], end)
