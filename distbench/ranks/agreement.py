"""Agreement of ranks on whether a case failed on all ranks or on one rank, and detection of a lost rank or host."""

import contextlib
import datetime
import errno
import itertools
import os
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from distbench.ranks.failure import HostLost, RankFailed, report_failure
from distbench.ranks.hosts import named
from distbench.spec import UserError

Store = dist.TCPStore | dist.PrefixStore
# A rank that has not failed, and does not report for this time, waits in a collective for a failed rank.
GRACE_S = 5.0
REPORT_S, POLL_S = 0.5, 0.05
FOREVER = datetime.timedelta(days=365)
LEFT, PARTED = "left", "parted"
# Time in which a rank that fails together with other ranks can report its reason.
GONE_AFTER_S = 10.0
CONNECT_S = 10.0
# A host that loses power or network closes no connection; its loss is detected after 25 s.
KEEP_ALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
UNREACHABLE = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN)
LEAVES = b"."


class Agreement:
    """One rank's part in the decision whether all ranks failed or one rank only. `hosts` contains each rank's host.

    A failed rank waits for the failure of the other ranks as long as the other ranks work. A thread of each rank
    reports this work: it sleeps until a rank fails, then reports that its own rank is alive, and signals the main
    thread. Python handles signals between two instructions, so the main thread does not respond while it waits in a
    collective.
    """

    def __init__(self, store: Store, rank: int, hosts: Sequence[str]) -> None:
        self._store, self._rank, self._hosts = store, rank, hosts
        self._num_failures = 0
        self._answered = False
        signal.signal(signal.SIGUSR2, self._answer)
        signal.siginterrupt(signal.SIGUSR2, False)
        threading.Thread(target=self._report_work, daemon=True).start()

    def require_all_failed(self, what: str, message: str) -> None:
        """Wait until every rank has failed in `what`.

        Raises:
            RankFailed: only this rank failed, or a rank that failed alone has left.
            HostLost: no rank of a host responds.
        """
        keys = self._publish(what, message)
        if not self._all_set(keys):
            self._store.set(LEFT, str(self._rank))
            if lost_hosts := self._lost_hosts(keys):
                raise HostLost(f"{lost_hosts}; rank {self._rank} reports {message}")
            raise RankFailed(message)
        if self._store.check([LEFT]):
            raise RankFailed(message)

    def user_error(self, error: UserError) -> UserError:
        """Return the given error; if only some ranks have an error, with these ranks in the message."""
        keys = self._publish("by the user", str(error))
        if self._all_set(keys):
            self._part()
            return error
        ranks = [str(rank) for rank, key in enumerate(keys) if self._store.check([key])]
        places = f"{'ranks' if len(ranks) > 1 else 'rank'} {', '.join(ranks)}"
        return UserError(f"on {places} of {len(keys)} only: {error}")

    def _part(self) -> None:
        """Leave the store. Rank 0 leaves last: under srun the store ends with rank 0, and other ranks may still read
        it."""
        deadline = time.monotonic() + GRACE_S
        num_parted = self._store.add(PARTED, 1)
        while self._rank == 0 and num_parted < len(self._hosts) and time.monotonic() < deadline:
            time.sleep(POLL_S)
            num_parted = self._store.add(PARTED, 0)

    def _publish(self, what: str, message: str) -> list[str]:
        """Publish this rank's failure with its message; return the key of each rank's failure."""
        keys = [_failed(what, rank) for rank in range(len(self._hosts))]
        self._store.set(keys[self._rank], message)
        self._store.set(f"failure{self._num_failures}", "")
        self._num_failures += 1
        return keys

    def _lost_hosts(self, keys: list[str]) -> str:
        """Describe the hosts on which no rank has published this failure or reported to be alive; "" without such a
        host."""
        silent: dict[str, list[str]] = {}
        heard = set()
        for rank, (host, key) in enumerate(zip(self._hosts, keys, strict=True)):
            if self._store.check([key]) or self._store.check([_here(self._num_failures - 1, rank)]):
                heard.add(host)
            else:
                silent.setdefault(host, []).append(str(rank))
        return " and ".join(
            f"host {host} is lost: its {'ranks' if len(ranks) > 1 else 'rank'} {', '.join(ranks)} "
            f"no longer {'respond' if len(ranks) > 1 else 'responds'}"
            for host, ranks in silent.items()
            if host not in heard
        )

    def first_message(self, what: str, message: str) -> str:
        """Return the message of a rank that failed alone and left, if any; else this rank's message."""
        if not self._store.check([LEFT]):
            return message
        rank = int(self._store.get(LEFT))
        key = _failed(what, rank)
        return f"rank {rank}: {self._store.get(key).decode()}" if self._store.check([key]) else message

    def _all_set(self, keys: list[str]) -> bool:
        """Wait for all ranks' keys; return False if a rank without its key stops working."""
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
        """Count each response of the main thread, from the next failure of any rank until this rank's failure."""
        main = threading.main_thread().ident or 0
        store: Any = self._store.clone()  # type: ignore[union-attr]  # a store serves one thread at a time
        with contextlib.suppress(RuntimeError):  # the launch is over
            for number in itertools.count():
                store.wait([f"failure{number}"], FOREVER)
                store.set(_here(number, self._rank), "")
                while self._num_failures == number:
                    self._answered = False
                    signal.pthread_kill(main, signal.SIGUSR2)
                    time.sleep(REPORT_S)
                    if self._answered:
                        store.add("reports", 1)

    def _answer(self, *_: object) -> None:
        self._answered = True


def _here(number: int, rank: int) -> str:
    return f"here{number}/{rank}"


def _failed(what: str, rank: int) -> str:
    return f"failed/{what}/{rank}"


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
