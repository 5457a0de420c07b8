"""Links between ranks: pairs in rounds, groups of each mesh dim, and computing on each rank alone.

All ranks compute at once, as in training, on accelerators and on hosts with a CPU per thread, where ranks share the
host's power and heat. With fewer CPUs than threads, only as many ranks compute at a time as have their own CPUs.
Otherwise every rank would be as slow as the slowest rank.
"""

import contextlib
import fcntl
import math
import os
import socket
import statistics
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from distbench.ranks.case_protocol import CaseSpec, OpenedCase, first_difference
from distbench.ranks.context import RankContext
from distbench.ranks.device import synchronize
from distbench.ranks.dtypes import TORCH_DTYPES
from distbench.records.run_file import DTYPE_BYTES, Case
from distbench.redistribute.expected_shards import tagged
from distbench.spec import Scenario
from distbench.spec.devices import is_accelerator

# TCP segments that this rank's connections sent and retransmitted: A lossy link may be fast, and only these counts show
# the loss.
#
# The kernel counts retransmissions per network namespace and per connection, not per interface. A connection's counts
# are in its `struct tcp_info` (Linux 4.2 or newer, linux/tcp.h); its local address belongs to one interface.
TCP_INFO_BYTES, TOTAL_RETRANS_AT, SEGS_OUT_AT = 140, 100, 136
SIOCGIFADDR = 0x8915  # linux/sockios.h
# Name of an interface to (TCP segments sent, segments retransmitted).
Segments = dict[str, tuple[int, int]]
WITHIN, SAME_PLACE, ACROSS = "within a host", "across hosts, same local rank", "across hosts"
Pairs = tuple[tuple[int, int], ...]
TRIES = 3
MAX_ROUNDS = 64
RIGHT_PERIOD, LEFT_PERIOD = 251, 3  # sums of products remain below 2^24, so that float32 is exact
GROUP, MAX_PASSES = "links", 12
DTYPE, PERIOD = "f32", 251
# A message long enough to measure bandwidth, and a product long enough to measure a rank's speed.
SIZE_BYTES, MATMUL_SIZE = {"cpu": 1 << 20}, {"cpu": 512}
SIZE_BYTES_ELSEWHERE, MATMUL_SIZE_ELSEWHERE = 1 << 26, 4096
SMALL_BYTES = 4
# The number of samples per pass. Samples of one period drift together, so more samples would not add information.
SMALL_SAMPLES, LARGE_SAMPLES = 5, 2
# Small messages per sample. Ranks leave the barrier before a sample at times that differ by more than one message.
SMALL_REPEATS = 20


def segments_so_far() -> Segments | None:
    """Return TCP segment counts of this process's open connections by interface; None if the system has no counts."""
    if not hasattr(socket, "TCP_INFO"):
        return None
    interfaces = _interface_addresses()
    segments: Segments = {}
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError, struct.error):
            if not str(link.readlink()).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(link.name))) as connection:
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_BYTES)
                (again,), (sent,) = (struct.unpack_from("I", info, at) for at in (TOTAL_RETRANS_AT, SEGS_OUT_AT))
                address = connection.getsockname()[0].removeprefix("::ffff:")
            interface = interfaces.get(address, address)
            before = segments.get(interface, (0, 0))
            segments[interface] = (before[0] + sent, before[1] + again)
    return segments


def _interface_addresses() -> dict[str, str]:
    """Map each IPv4 address to the name of its interface. IPv6 addresses are absent."""
    names = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # no IPv4 address
                reply = fcntl.ioctl(any_socket, SIOCGIFADDR, struct.pack("256s", name.encode()))
                names[socket.inet_ntoa(reply[20:24])] = name
    return names


class LinkRound(NamedTuple):
    """Pairs of ranks that send to each other at the same time; each rank is in at most one pair."""

    level: str  # one of WITHIN, SAME_PLACE and ACROSS; "" for pairs of several levels
    pairs: Pairs


def link_rounds(hosts: Sequence[str], max_rounds: int = 0) -> list[LinkRound]:
    """Return rounds with every pair of ranks once; `hosts` has each rank's host.

    If these were more than `max_rounds` (0: MAX_ROUNDS), each host meets only the binary logarithm of the number of
    hosts, with all its ranks, so that doubling the hosts adds one meeting. Each rank then still meets ranks of several
    hosts, so that slow ranks and hosts are found. A slow link between two ranks that do not meet is not found.

    With one host or an even number of hosts, each with the same even number of ranks, N ranks need N - 1 rounds. Each
    round then has pairs of one level and includes all ranks, and each pair between two hosts shares the hosts' links
    with the same number of other pairs in every round. Otherwise a round may have several levels, and an odd number N
    of ranks needs N rounds with one waiting rank per round.
    """
    ranks_of: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        ranks_of.setdefault(host, []).append(rank)
    members, sizes = list(ranks_of.values()), {len(ranks) for ranks in ranks_of.values()}
    size, num_hosts = max(sizes, default=0), len(members)
    if len(sizes) > 1 or size % 2 * (size > 1) or num_hosts % 2 * (num_hosts > 1):
        return [LinkRound("", pairs) for pairs in _spread(tournament(len(hosts)), max_rounds or MAX_ROUNDS)]
    rounds, meetings_of_hosts = [], tournament(num_hosts)
    for places in tournament(size):
        pairs = tuple((ranks[a], ranks[b]) for ranks in members for a, b in places)
        rounds.append(LinkRound(WITHIN, pairs))
    if len(rounds) + size * len(meetings_of_hosts) > (max_rounds or MAX_ROUNDS):
        meetings_of_hosts = _spread(meetings_of_hosts, math.ceil(math.log2(num_hosts)))
    for meetings in meetings_of_hosts:
        for shift in range(size):
            pairs = tuple((members[a][i], members[b][(i + shift) % size]) for a, b in meetings for i in range(size))
            rounds.append(LinkRound(ACROSS if shift else SAME_PLACE, pairs))
    return rounds


def _spread(rounds: Sequence[Pairs], count: int) -> list[Pairs]:
    """At most `count` rounds, at equal distances."""
    count = min(count, len(rounds))
    return [rounds[number * len(rounds) // count] for number in range(count)]


def compute_turns(hosts: Sequence[str], at_once: Mapping[str, int]) -> list[tuple[int, ...]]:
    """Return the groups of ranks that compute at the same time; each rank is in one group.

    All hosts compute at the same time, with the same number of ranks per host in each group, so that conditions are
    equal for all groups. `at_once` has the number of ranks that can compute at the same time on each host.
    """
    queues = []
    for host in dict.fromkeys(hosts):
        ranks = [rank for rank, name in enumerate(hosts) if name == host]
        most = min(max(at_once[host], 1), len(ranks))
        size = max(size for size in range(1, most + 1) if len(ranks) % size == 0)
        queues.append([ranks[at : at + size] for at in range(0, len(ranks), size)])
    turns = zip_longest(*queues, fillvalue=[])
    return [tuple(sorted(chain.from_iterable(together))) for together in turns]


def tournament(num_players: int) -> list[Pairs]:
    """Return rounds in which each two players meet once (circle method): n - 1 rounds if n is even, else n.

    Source: E. Lucas, "Recreations mathematiques" (1883), volume 2; the schedule of a round-robin tournament.
    """
    if num_players < 2:
        return []
    count, rounds = num_players + num_players % 2, []
    for number in range(count - 1):
        last = count - 1
        pairs = [(number, last)]
        pairs += [((number + step) % last, (number - step) % last) for step in range(1, count // 2)]
        rounds.append(tuple(sorted((min(pair), max(pair)) for pair in pairs if max(pair) < num_players)))
    return rounds


@dataclass
class Bursts:
    """Number of products of `size` rows and columns per burst; the number is equal on all ranks and in all cases."""

    size: int
    seconds: float  # of a burst on the median rank
    turns: Sequence[tuple[int, ...]]  # ranks that compute at the same time
    num_products: int = 0

    def settle(self, product: "Product", context: RankContext) -> int:
        """Measure the number once, one group of ranks after the other; all ranks must call this together."""
        if not self.num_products:
            own_s = 0.0
            for ranks in self.turns:
                context.gather(None)  # starts when the previous group has ended
                if context.rank in ranks:
                    own_s = product.seconds_of_one()
            middle_s = statistics.median(context.gather(own_s))
            self.num_products = max(round(self.seconds / middle_s), 1)
        return self.num_products


class Product:
    """Two square matrices of whole numbers, and their product."""

    def __init__(self, size: int, device: torch.device) -> None:
        numbers = torch.arange(size * size, device=device).reshape(size, size)
        # Dense: zeros draw less power and would run faster than real values.
        self._left = numbers.remainder(LEFT_PERIOD).float()
        self._right = numbers.remainder(RIGHT_PERIOD).float()
        self._got = torch.zeros_like(self._right)
        self._device = device

    @property
    def nbytes(self) -> int:
        """Return the bytes of all three matrices."""
        return 3 * self._got.nbytes

    def multiply(self, count: int) -> None:
        """Multiply `count` times in sequence."""
        for _ in range(count):
            torch.mm(self._left, self._right, out=self._got)

    def seconds_of_one(self) -> float:
        """Return the shortest of a few times in seconds, after one untimed product."""
        times_s = []
        for _ in range(TRIES + 1):
            synchronize(self._device)
            began = time.monotonic()
            self.multiply(1)
            synchronize(self._device)
            times_s.append(time.monotonic() - began)
        return max(min(times_s[1:]), 1e-6)

    def difference(self) -> str | None:
        """Return the problem of the product; None if the product is correct.

        The product applied to a vector must equal its factors applied one after the other (R. Freivalds, "Probabilistic
        machines can use less running time", 1977).
        """
        self._got.zero_()
        self.multiply(1)
        left, right, got = (tensor.cpu().double() for tensor in (self._left, self._right, self._got))
        vector = torch.arange(got.shape[1]).remainder(7).double()
        return first_difference(got @ vector, left @ (right @ vector))


def _computing_cases(size: int, burst_s: float, hosts: Sequence[str], context: RankContext) -> Iterator[CaseSpec]:
    """Yield one case per group of ranks that compute at the same time."""
    turns = compute_turns(hosts, _at_once(hosts, context))
    bursts = Bursts(size, burst_s, turns)
    params: dict[str, Any] = {"op": "matmul", "dtype": DTYPE, "shape": [size] * 3}
    on_accelerator = is_accelerator(context.device.type)
    devices = {"devices": context.gather(str(context.device))} if on_accelerator else {}
    for number, ranks in enumerate(turns):
        turn_name = "all" if len(turns) == 1 else f"rank{ranks[0]}" if len(ranks) == 1 else f"turn{number}"
        own_params = {**params, "ranks": list(ranks), "hosts": list(hosts), **devices}
        case = Case(f"links/{DTYPE}[{size},{size}]/matmul/{turn_name}", "links", own_params)
        yield _case_spec(case, partial(_opened_turn, ranks, bursts, context), num_samples=1)


def _at_once(hosts: Sequence[str], context: RankContext) -> dict[str, int]:
    """Return how many ranks of each host have their own CPUs or an accelerator."""
    if is_accelerator(context.device.type):
        return dict.fromkeys(hosts, len(hosts))
    cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    usable: dict[str, set[int]] = {host: set() for host in hosts}
    threads = dict.fromkeys(hosts, 1)
    rank_cpus = context.gather((sorted(cpus), torch.get_num_threads()))
    for host, (own_cpus, num_threads) in zip(hosts, rank_cpus, strict=True):
        usable[host].update(own_cpus)
        threads[host] = max(threads[host], num_threads)
    return {host: len(usable[host]) // threads[host] for host in usable}


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


def link_cases(scenario: Scenario, context: RankContext) -> Iterator[CaseSpec]:
    """Yield the cases of each `Links`: two per round of pairs (a small and a large message), one per mesh dim with
    several groups, and one per group of ranks that compute at the same time. Cases run in a new order in each pass.
    """
    for links in scenario.links:
        kind = context.device.type
        hosts = context.gather(os.uname().nodename)
        size_bytes = links.size_bytes or SIZE_BYTES.get(kind, SIZE_BYTES_ELSEWHERE)
        for number, link_round in enumerate(link_rounds(hosts, links.max_rounds)):
            for size in (SMALL_BYTES, size_bytes):
                yield _round_case(number, link_round, size, hosts, context)
        for mesh_dim in context.mesh_dims:
            if 1 < context.size(mesh_dim) < context.mesh.size():
                yield _group_case(mesh_dim, size_bytes, hosts, context)
        matmul_size = links.matmul_size or MATMUL_SIZE.get(kind, MATMUL_SIZE_ELSEWHERE)
        yield from _computing_cases(matmul_size, links.burst_s, hosts, context)


def _case_spec(case: Case, opener: Any, num_samples: int) -> CaseSpec:
    return CaseSpec(case, opener, GROUP, MAX_PASSES, keeps_ranks=True, num_samples=num_samples)


def _round_case(
    number: int, link_round: LinkRound, size_bytes: int, hosts: list[str], context: RankContext
) -> CaseSpec:
    numel = size_bytes // DTYPE_BYTES[DTYPE]
    params = {
        "op": "send_recv",
        "dtype": DTYPE,
        "size_bytes": numel * DTYPE_BYTES[DTYPE],
        "round": number,
        "level": link_round.level,
        "pairs": [list(pair) for pair in link_round.pairs],
        "hosts": hosts,
    }
    case = Case(f"links/{DTYPE}[{numel}]/send_recv/round{number}", "links", params)
    num_samples, repeats = (SMALL_SAMPLES, SMALL_REPEATS) if size_bytes == SMALL_BYTES else (LARGE_SAMPLES, 1)
    partners = dict(link_round.pairs) | {second: first for first, second in link_round.pairs}
    return _case_spec(case, partial(_open_round, partners, numel, repeats, context), num_samples)


@contextlib.contextmanager
def _open_round(partners: dict[int, int], numel: int, repeats: int, context: RankContext) -> Iterator[OpenedCase]:
    partner = partners.get(context.rank)
    mine, got = _tag(context.rank, numel).to(context.device), torch.zeros(numel, device=context.device)

    def exchange(count: int = repeats) -> None:
        for _ in range(count if partner is not None else 0):
            ops = [dist.P2POp(dist.isend, mine, partner), dist.P2POp(dist.irecv, got, partner)]
            for work in dist.batch_isend_irecv(ops):
                work.wait()

    def check() -> str | None:
        got.zero_()
        exchange(1)
        return None if partner is None else first_difference(got.cpu(), _tag(partner, numel))

    fields = {"payload_bytes": numel * DTYPE_BYTES[DTYPE], "group_size": 2, "counters": {"repeats": repeats}}
    # Waiting ranks of this round also take part here, because NCCL creates a communicator when all ranks of a group
    # call it.
    yield OpenedCase(
        lambda _: exchange(),
        check,
        fields=fields,
        after=partial(_segments_since, segments_so_far(), context),
        stays_open=True,
        held_bytes=mine.nbytes + got.nbytes,
        starts_on=dist.group.WORLD,
    )


def _segments_since(before: Segments | None, context: RankContext) -> dict[str, list[dict[str, tuple[int, int]]]]:
    """Return each rank's segments since `before`, sent and retransmitted by interface; {} if a rank has no counts."""
    now = segments_so_far()
    if now is not None and before is not None:
        for interface, (sent, again) in now.items():
            sent_before, again_before = before.get(interface, (0, 0))
            # The counts of a connection that has since been closed are lost.
            now[interface] = max(sent - sent_before, 0), max(again - again_before, 0)
    by_rank = context.gather(now)
    return {} if None in by_rank else {"tcp_segments": by_rank}


def _tag(rank: int, numel: int) -> torch.Tensor:
    return tagged((numel,), TORCH_DTYPES[DTYPE], PERIOD, shift=3 * rank)


def _group_case(mesh_dim: str, size_bytes: int, hosts: list[str], context: RankContext) -> CaseSpec:
    numel = max(size_bytes // DTYPE_BYTES[DTYPE] // context.size(mesh_dim), 1) * context.size(mesh_dim)
    number = context.mesh_dims.index(mesh_dim)
    ranks = context.mesh.mesh.movedim(number, -1).reshape(-1, context.size(mesh_dim))
    params = {
        "op": "all_reduce",
        "dtype": DTYPE,
        "mesh_dim": mesh_dim,
        "size_bytes": numel * DTYPE_BYTES[DTYPE],
        "groups": ranks.tolist(),
        "hosts": hosts,
    }
    case = Case(f"links/{DTYPE}[{numel}]/all_reduce/{mesh_dim}", "links", params)
    return _case_spec(case, partial(_open_group, mesh_dim, numel, context), LARGE_SAMPLES)


@contextlib.contextmanager
def _open_group(mesh_dim: str, numel: int, context: RankContext) -> Iterator[OpenedCase]:
    group, size = context.mesh.get_group(mesh_dim), context.size(mesh_dim)
    summed = torch.zeros(numel, device=context.device)  # zeros, so that repeated sums remain finite

    def check() -> str | None:
        summed.fill_(1.0)
        dist.all_reduce(summed, group=group)
        difference = first_difference(summed.cpu(), torch.full((numel,), float(size)))
        summed.zero_()
        return difference

    yield OpenedCase(
        lambda _: dist.all_reduce(summed, group=group),
        check,
        fields={"payload_bytes": summed.nbytes, "group_size": size, "mesh_dim": mesh_dim},
        stays_open=True,
        held_bytes=summed.nbytes,
        starts_on=group,
    )
