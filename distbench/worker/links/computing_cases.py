"""How fast each rank computes by itself: products in bursts that outlast the period of a limit on its CPU or power.

Ranks that have a host's CPUs to themselves, and all accelerators, compute at once, as in training: then they also share
its power and heat. Where there are fewer CPUs than the ranks' threads, as many compute at a time as have CPUs of their
own, or each would be as slow as the others, however slow it is.
"""

import contextlib
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from distbench.runs.run_file import Case
from distbench.spec.devices import is_accelerator
from distbench.worker.links.link_rounds import compute_turns
from distbench.worker.rank.device import synchronize
from distbench.worker.rank.opened_case import CaseSpec, OpenedCase, first_difference
from distbench.worker.rank.rank_context import RankContext

TRIES = 3
PERIOD, LEFT_PERIOD = 251, 3  # sums of products stay below 2^24, so that float32 has them exactly


@dataclass
class Bursts:
    """How many products a burst has: as many on every rank, in every case of a launch.

    Args:
        size: rows and columns of a product.
        seconds: that a burst shall last on the middle rank.
        turns: who computes at the same time.
    """

    size: int
    seconds: float
    turns: Sequence[tuple[int, ...]]
    num_products: int = 0

    def settle(self, product: "Product", context: RankContext) -> int:
        """Find out once, all ranks together, each in its turn."""
        if not self.num_products:
            own_s = 0.0
            for ranks in self.turns:
                context.gather(None)  # begins when the turn before has ended
                if context.rank in ranks:
                    own_s = product.seconds_of_one()
            middle_s = statistics.median(context.gather(own_s))
            self.num_products = max(round(self.seconds / middle_s), 1)
        return self.num_products


class Product:
    """Two square matrices of whole numbers, and their product."""

    def __init__(self, size: int, device: torch.device) -> None:
        numbers = torch.arange(size * size, device=device).reshape(size, size)
        # Dense: what a product of zeros draws of a device's power says nothing of how it computes.
        self._left = numbers.remainder(LEFT_PERIOD).float()
        self._right = numbers.remainder(PERIOD).float()
        self._got = torch.zeros_like(self._right)
        self._device = device

    @property
    def nbytes(self) -> int:
        """Of all three."""
        return 3 * self._got.nbytes

    def multiply(self, count: int) -> None:
        """So many times, one after the other."""
        for _ in range(count):
            torch.mm(self._left, self._right, out=self._got)

    def seconds_of_one(self) -> float:
        """The least of a few, after one that nobody looks at."""
        found = []
        for _ in range(TRIES + 1):
            synchronize(self._device)
            began = time.monotonic()
            self.multiply(1)
            synchronize(self._device)
            found.append(time.monotonic() - began)
        return max(min(found[1:]), 1e-6)

    def difference(self) -> str | None:
        """What is wrong with the product, None where nothing is: applied to a vector, it is what its factors make of
        that one after the other (R. Freivalds, "Probabilistic machines can use less running time", 1977)."""
        self._got.zero_()
        self.multiply(1)
        left, right, got = (one.cpu().double() for one in (self._left, self._right, self._got))
        vector = torch.arange(got.shape[1]).remainder(7).double()
        return first_difference(got @ vector, left @ (right @ vector))


def computing_cases(
    size: int, burst_s: float, hosts: Sequence[str], group: str, max_passes: int, context: RankContext
) -> Iterator[CaseSpec]:
    """One for each turn of ranks that compute at the same time."""
    turns = compute_turns(hosts, _at_once(hosts, context))
    bursts = Bursts(size, burst_s, turns)
    own = is_accelerator(context.device.type)
    devices = {"devices": context.gather(str(context.device))} if own else {}
    for number, ranks in enumerate(turns):
        params = {
            "op": "matmul",
            "dtype": "f32",
            "shape": [size] * 3,
            "ranks": list(ranks),
            "hosts": list(hosts),
            **devices,
        }
        which = "all" if len(turns) == 1 else f"rank{ranks[0]}" if len(ranks) == 1 else f"turn{number}"
        case = Case(f"links/f32[{size},{size}]/matmul/{which}", "links", params)
        opener = partial(_opened_turn, ranks, bursts, context)
        yield CaseSpec(case, opener, group, max_passes, keeps_ranks=True, most_samples=1)


def _at_once(hosts: Sequence[str], context: RankContext) -> dict[str, int]:
    """How many ranks of each host have CPUs of their own, or an accelerator."""
    if is_accelerator(context.device.type):
        return dict.fromkeys(hosts, len(hosts))
    cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    of_host: dict[str, set[int]] = {}
    threads: dict[str, int] = {}
    told = context.gather((sorted(cpus), torch.get_num_threads()))
    for host, (usable, num_threads) in zip(hosts, told, strict=True):
        of_host.setdefault(host, set()).update(usable)
        threads[host] = max(threads.get(host, 1), num_threads)
    return {host: len(usable) // threads[host] for host, usable in of_host.items()}


@contextlib.contextmanager
def _opened_turn(ranks: tuple[int, ...], bursts: Bursts, context: RankContext) -> Iterator[OpenedCase]:
    takes_part, product = context.rank in ranks, Product(bursts.size, context.device)
    count = bursts.settle(product, context)

    def call(_: Any) -> None:
        if takes_part:
            product.multiply(count)

    def check() -> str | None:
        return product.difference() if takes_part else None

    fields = {"counters": {"repeats": count}}
    yield OpenedCase(call, check, fields=fields, stays_open=True, held_bytes=product.nbytes, warm_ups=1)
