"""Agreement of ranks on whether a case failed on all ranks or on one rank."""

import contextlib
import datetime
import itertools
import signal
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from distbench.ranks.failure import HostLost, RankFailed
from distbench.spec import UserError

Store = dist.TCPStore | dist.PrefixStore
# A rank that has not failed, and does not report for this time, waits in a collective for a failed rank.
GRACE_S = 5.0
REPORT_S, POLL_S = 0.5, 0.05
FOREVER = datetime.timedelta(days=365)
LEFT, PARTED = "left", "parted"


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
