"""Ranks agree on what they were given, and on whether a case failed on all of them or on one alone."""

import contextlib
import datetime
import itertools
import os
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from distbench.spec import UserError
from distbench.worker.rank.failure import RankFailed, report_failure

Store = dist.TCPStore | dist.PrefixStore
# A rank that has not failed and reports no work for so long waits in a collective for one that has.
GRACE_S = 5.0
REPORT_S, POLL_S = 0.5, 0.05
FOREVER = datetime.timedelta(days=365)
LEFT = "left"
# A rank that fails with others may have its own reason to tell, and a node that vanishes closes no connection.
GONE_AFTER_S = 10.0
KEEP_ALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
LEAVES = b"."


def require_same(own: Mapping[str, str], gather: Callable[[Any], list[Any]]) -> None:
    """Refuse ranks whose `own` differ: each would wait for collectives that the others never issue.

    `gather` gives every rank's value, in rank order; the keys of `own` name in the message what differs.
    """
    first, *others = gather(dict(own))
    for what in own:
        if ranks := [rank for rank, theirs in enumerate(others, start=1) if theirs[what] != first[what]]:
            named = ("ranks " if len(ranks) > 1 else "rank ") + ", ".join(map(str, ranks))
            raise UserError(f"{what} of {named} differs from rank 0's; give all ranks the same command and files")


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


class Agreement:
    """One rank's part in telling a failure of all ranks from a failure of one.

    A rank that fails waits for the others to fail too, as long as they are working. A thread of each reports that:
    it sleeps until some rank fails, then signals its main thread, whose Python answers between two instructions, and
    so not while it waits in a collective.
    """

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        self._store, self._rank, self._world_size = store, rank, world_size
        self._num_failures = 0
        self._answered = False
        signal.signal(signal.SIGUSR2, self._answer)
        signal.siginterrupt(signal.SIGUSR2, False)
        threading.Thread(target=self._report_work, daemon=True).start()

    def require_all_failed(self, what: str, message: str) -> None:
        """Return when every rank has failed in this too; `RankFailed` where this one alone did, or another that has
        left did."""
        keys = [self._key(what, rank) for rank in range(self._world_size)]
        self._store.set(keys[self._rank], message)
        self._store.set(f"failure{self._num_failures}", "")
        self._num_failures += 1
        if not self._all_set(keys):
            self._store.set(LEFT, str(self._rank))
            raise RankFailed(message)
        if self._store.check([LEFT]):
            raise RankFailed(message)

    def first_message(self, what: str, message: str) -> str:
        """The message of the rank that failed alone and left, where one did; else this rank's own."""
        if not self._store.check([LEFT]):
            return message
        rank = int(self._store.get(LEFT))
        key = self._key(what, rank)
        return f"rank {rank}: {self._store.get(key).decode()}" if self._store.check([key]) else message

    def _key(self, what: str, rank: int) -> str:
        return f"failed/{what}/{rank}"

    def _all_set(self, keys: list[str]) -> bool:
        """Whether every key was set before its rank stopped working."""
        reports, deadline = -1, 0.0
        while not self._store.check(keys):
            now = time.monotonic()
            if (latest := self._store.add("reports", 0)) != reports:
                reports, deadline = latest, now + GRACE_S
            elif now > deadline:
                return False
            time.sleep(POLL_S)
        return True

    def _report_work(self) -> None:
        """Count a report whenever the main thread answers, from any rank's next failure until this rank's own."""
        main = threading.main_thread().ident or 0
        store: Any = self._store.clone()  # type: ignore[union-attr]  # a store serves one thread at a time
        with contextlib.suppress(RuntimeError):  # the launch is over
            for number in itertools.count():
                store.wait([f"failure{number}"], FOREVER)
                while self._num_failures == number:
                    self._answered = False
                    signal.pthread_kill(main, signal.SIGUSR2)
                    time.sleep(REPORT_S)
                    if self._answered:
                        store.add("reports", 1)

    def _answer(self, *_: object) -> None:
        self._answered = True


class Presence:
    """Tells a rank that another one has ended: under srun nobody else does, and a collective would wait for minutes.

    Each rank holds a connection to rank 0, which the kernel closes with the process, however that ends.

    Args:
        store: where rank 0 says its port.
        rank, world_size: as in torch.distributed.
        host: rank 0's.
        on_gone: called on a thread of its own, with a sentence, once at most; not after `leave`.
    """

    def __init__(self, store: Store, rank: int, world_size: int, host: str, on_gone: Callable[[str], None]) -> None:
        self._on_gone, self._is_leaving = on_gone, False
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
            self._link = _kept_alive(socket.create_connection((host, port), GONE_AFTER_S))
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
                    elif self._has_ended(link):
                        selector.unregister(link)
                        link.close()
                        rank = self._ranks.pop(link)
                        if rank is not None and not self._is_leaving:
                            self._tell(f"rank {rank} has ended while the others went on")

    def _has_ended(self, link: socket.socket) -> bool:
        """Whether a rank's connection is closed and it has not said that it leaves."""
        try:
            told = link.recv(4 if self._ranks[link] is None else 1)
        except OSError:
            told = b""
        if told == LEAVES:
            self._ranks[link] = None
            return False
        if len(told) == 4:
            self._ranks[link] = int.from_bytes(told, "big")
        return not told

    def _tell(self, message: str) -> None:
        for link in self._ranks:
            with contextlib.suppress(OSError):
                link.sendall(message.encode())
        self._gone(message)

    def _follow_first(self, link: socket.socket) -> None:
        link.settimeout(None)
        with link:
            try:
                message = link.recv(1 << 10).decode()
            except OSError:
                message = ""
        self._gone(message or "rank 0 has ended while the others went on")

    def _gone(self, message: str) -> None:
        if not self._is_leaving:
            time.sleep(GONE_AFTER_S)
        if not self._is_leaving:
            self._on_gone(message)


def _kept_alive(link: socket.socket) -> socket.socket:
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEP_ALIVE.items():
        if hasattr(socket, name):
            link.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return link


def presence_of(log_dir: Path, store: Store, rank: int, world_size: int) -> Presence | None:
    """Where no launcher ends the ranks that are left (torchrun and ours set these variables), each ends itself."""
    if {"TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE"} & set(os.environ):
        return None

    def end(message: str) -> None:
        report_failure(log_dir, rank, "gone", message)
        os._exit(1)

    return Presence(store, rank, world_size, os.environ["MASTER_ADDR"], end)
