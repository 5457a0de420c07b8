"""Ranks agree on whether a case failed on all of them or on one alone, and on which host is lost."""

import contextlib
import datetime
import itertools
import signal
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from distbench.spec import UserError
from distbench.worker.rank.failure import HostLost, RankFailed

Store = dist.TCPStore | dist.PrefixStore
# A rank that has not failed and reports no work for so long waits in a collective for one that has.
GRACE_S = 5.0
REPORT_S, POLL_S = 0.5, 0.05
FOREVER = datetime.timedelta(days=365)
LEFT, PARTED = "left", "parted"


class Agreement:
    """One rank's part in telling a failure of all ranks from a failure of one.

    A rank that fails waits for the others to fail too, as long as they are working. A thread of each reports that:
    it sleeps until some rank fails, then signals its main thread, whose Python answers between two instructions, and
    so not while it waits in a collective. That the rank is there at all it says at once.

    Args:
        hosts: each rank's host, in rank order.
    """

    def __init__(self, store: Store, rank: int, hosts: Sequence[str]) -> None:
        self._store, self._rank, self._hosts = store, rank, hosts
        self._num_failures = 0
        self._answered = False
        signal.signal(signal.SIGUSR2, self._answer)
        signal.siginterrupt(signal.SIGUSR2, False)
        threading.Thread(target=self._report_work, daemon=True).start()

    def require_all_failed(self, what: str, message: str) -> None:
        """Return when every rank has failed in this too.

        Raises:
            RankFailed: this one alone did, or another that has left did.
            HostLost: there is a host of whose ranks none answers any more.
        """
        keys = self._told(what, message)
        if not self._all_set(keys):
            self._store.set(LEFT, str(self._rank))
            if lost := self._lost_hosts(keys):
                raise HostLost(f"{lost}; rank {self._rank} saw {message}")
            raise RankFailed(message)
        if self._store.check([LEFT]):
            raise RankFailed(message)

    def user_error(self, error: UserError) -> UserError:
        """What the user can fix, said with the ranks that it was found on where it was not found on all of them."""
        keys = self._told("by the user", str(error))
        if self._all_set(keys):
            self._part()
            return error
        ranks = [str(rank) for rank, key in enumerate(keys) if self._store.check([key])]
        found_on = f"{'ranks' if len(ranks) > 1 else 'rank'} {', '.join(ranks)}"
        return UserError(f"on {found_on} of {len(keys)} only: {error}")

    def _part(self) -> None:
        """Under srun the store ends with rank 0, which therefore leaves last: the others may still be looking."""
        deadline = time.monotonic() + GRACE_S
        left = self._store.add(PARTED, 1)
        while self._rank == 0 and left < len(self._hosts) and time.monotonic() < deadline:
            time.sleep(POLL_S)
            left = self._store.add(PARTED, 0)

    def _told(self, what: str, message: str) -> list[str]:
        """Have the others know that this rank failed, and how; under which key each rank says so."""
        keys = [self._key(what, rank) for rank in range(len(self._hosts))]
        self._store.set(keys[self._rank], message)
        self._store.set(f"failure{self._num_failures}", "")
        self._num_failures += 1
        return keys

    def _lost_hosts(self, keys: list[str]) -> str:
        """In words, the hosts of which no rank has failed in this or said that it is there; empty for none."""
        silent: dict[str, list[int]] = {}
        heard = set()
        for rank, (host, key) in enumerate(zip(self._hosts, keys, strict=True)):
            if any(self._store.check([one]) for one in (key, _here(self._num_failures - 1, rank))):
                heard.add(host)
            else:
                silent.setdefault(host, []).append(rank)
        return " and ".join(
            f"host {host} is lost: its {'ranks' if len(ranks) > 1 else 'rank'} {', '.join(map(str, ranks))} "
            f"{'answer' if len(ranks) > 1 else 'answers'} no more"
            for host, ranks in silent.items()
            if host not in heard
        )

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
