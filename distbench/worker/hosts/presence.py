"""Each rank knows when another has ended, or its host answers no more, though no launcher tells it."""

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

from distbench.worker.hosts.alike import named
from distbench.worker.rank.agreement import Store
from distbench.worker.rank.failure import report_failure

# A rank that fails with others may have its own reason to tell.
GONE_AFTER_S = 10.0
CONNECT_S = 10.0
# A host that vanishes, or whose cable is cut, closes no connection: it is missed after 25 s.
KEEP_ALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
UNREACHABLE = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN)
LEAVES = b"."


class Presence:
    """Tells a rank that another one has ended: under srun nobody else does, and a collective would wait for minutes.

    Each rank holds a connection to rank 0, which the kernel closes with the process, however that ends, and which
    times out where the other host answers no more.

    Args:
        store: where rank 0 says its port.
        rank: this one.
        hosts: each rank's host, in rank order.
        address: rank 0's.
        on_gone: called on a thread of its own, with a sentence, once at most; not after `leave`.
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
            both = socket.has_dualstack_ipv6()
            family = socket.AF_INET6 if both else socket.AF_INET
            server = socket.create_server(("", 0), family=family, dualstack_ipv6=both, backlog=world_size)
            store.set("presence", str(server.getsockname()[1]))
            threading.Thread(target=self._follow_all, args=(server,), daemon=True).start()
            return
        with contextlib.suppress(OSError):  # where that port is closed to it, a rank does without
            port = int(store.get("presence"))
            self._link = _kept_alive(socket.create_connection((address, port), CONNECT_S))
            self._link.sendall(rank.to_bytes(4, "big"))
            threading.Thread(target=self._follow_first, args=(self._link,), daemon=True).start()

    def leave(self) -> None:
        """From here on ranks may end; all of them meet once more after this."""
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
        """How a rank's connection has ended: the system's error, 0 where it was closed; None where it has not."""
        try:
            told = link.recv(4 if self._ranks[link] is None else 1)
        except OSError as error:
            return error.errno or 0
        if told == LEAVES:
            self._ranks[link] = None
        elif len(told) == 4:
            self._ranks[link] = int.from_bytes(told, "big")
        return None if told else 0

    def _tell(self, rank: int, is_silent: bool) -> None:
        """Tell all others that one has ended, or that its host is silent."""
        message = self._silence_of(rank) if is_silent else f"rank {rank} has ended while the others went on"
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
        self._gone(message or "rank 0 has ended while the others went on", is_silent)

    def _silence_of(self, rank: int) -> str:
        """In words, that a rank's host answers this one's no more."""
        here, there = self._hosts[self._rank], self._hosts[rank]
        theirs = [other for other, host in enumerate(self._hosts) if host == there]
        what = f"host {there} ({named(theirs, [there] * len(self._hosts))}) answers host {here} no more"
        return f"{what}: it is down, or the network between them"

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
    """Each rank ends itself where another one is gone; None where a launcher sees to that: torchrun and ours, which set
    these variables, for the ranks of one host."""
    is_launched = {"TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE"} & set(os.environ)
    if is_launched and len(set(hosts)) == 1:
        return None

    def end(message: str) -> None:
        report_failure(log_dir, rank, "gone", message)
        os._exit(1)

    return Presence(store, rank, hosts, os.environ["MASTER_ADDR"], end)
