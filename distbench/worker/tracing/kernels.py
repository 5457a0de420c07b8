"""Collectives among the kernels of a profiled step: when each ran, and how much of it nothing else covered.

The profiler writes a collective's name, sizes and process group with its kernel (kineto's `output_json.cpp`), and we
read those: kernels are renamed from one NCCL to the next. Where it did not, the call that was open when the kernel was
launched has them too; a kernel that neither tells of is known as communication by its name alone, and hides no other.
A collective's duration is its kernel's, so it includes waiting for the slowest rank, as all NCCL durations do.
"""

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from itertools import accumulate
from typing import Any, NamedTuple

from distbench.worker.torch_internals import kind_of
from distbench.worker.tracing.communication import Communication
from distbench.worker.tracing.host_calls import HOST_OPERATOR, KERNEL, Event, HostCalls, Span, is_on_device, span_of

# The profiler's names of dtypes (c10::toString) to bytes an element; of any other, bytes are not compared.
DTYPE_BYTES = {"Double": 8, "Float": 4, "Half": 2, "BFloat16": 2, "Long": 8, "Int": 4, "Byte": 1, "Char": 1, "Bool": 1}
UNNAMED = "unnamed communication"
# Kernels of NCCL and RCCL (ncclDevKernel_..., ncclKernel_..., ncclSymDevKernel_...), MSCCL, oneCCL and Ascend's HCCL.
OF_COMMUNICATION = re.compile(r"\b(?:nccl\w*Kernel|msccl\w*|oneccl_|hcom_)", re.IGNORECASE)
COLLECTIVE = "Collective name"


class Ran(NamedTuple):
    """One collective's kernel; moments are seconds of the profiler's clock.

    Args:
        kind: as in Communication; UNNAMED where the profiler does not tell.
        group: name of its process group.
        exposed_s: how long it ran while no other kernel or copy did.
        payload_bytes: nccl-tests' S by the profiler's count, None where it is not recorded.
    """

    kind: str
    group: str
    begun_s: float
    ended_s: float
    exposed_s: float
    payload_bytes: int | None = None


def collectives_among(events: Sequence[Event], launches: HostCalls | None = None) -> list[Ran]:
    """The kernels that communicate, of one rank, in the order in which they began, among the events of a Chrome trace
    of `torch.profiler` (`ts` and `dur` in microseconds)."""
    calls = _Calls(events, launches or HostCalls(events))
    on_device = [(event, calls.facts_of(event)) for event in events if is_on_device(event)]
    covered = Cover(span_of(event) for event, facts in on_device if facts is None)
    found = []
    for event, facts in on_device:
        if facts is not None:
            begun, ended = span_of(event)
            kind = kind_of(str(facts[COLLECTIVE])) if facts else UNNAMED
            exposed = ended - begun - covered.seconds((begun, ended))
            group = str(facts.get("Process Group Name", ""))
            found.append(Ran(kind, group, begun, ended, exposed, _payload_bytes(kind, facts)))
    return sorted(found, key=lambda ran: ran.begun_s)


@cache
def communicates(kernel: str) -> bool:
    """Whether a kernel is one of a communication library, by its name; names are long, and few."""
    return OF_COMMUNICATION.search(kernel) is not None


class _Calls:
    """What is known of communication: the host's calls of it (`record_param_comms`), by thread."""

    def __init__(self, events: Sequence[Event], launches: HostCalls) -> None:
        self._launches = launches
        self._calls: dict[Any, list[tuple[float, float, Event]]] = {}
        for event in events:
            facts = event.get("args") or {}
            if event.get("cat") == HOST_OPERATOR and event.get("ph") == "X" and facts.get(COLLECTIVE):
                self._calls.setdefault(event.get("tid"), []).append((*span_of(event), facts))
        for calls in self._calls.values():
            calls.sort(key=lambda call: call[:2])

    def facts_of(self, event: Event) -> Event | None:
        """What the profiler tells of a kernel that communicates, {} where that is nothing; None for other work."""
        facts = event.get("args") or {}
        if event.get("cat") in (KERNEL, "collective_comm") and facts.get(COLLECTIVE):
            return facts
        if event.get("cat") != KERNEL or not communicates(str(event.get("name", ""))):
            return None
        launch = self._launches.of(event)
        calls = self._calls.get(launch.thread, []) if launch else []
        place = bisect_right(calls, launch.at_s, key=lambda call: call[0]) - 1 if launch else -1
        return calls[place][2] if launch and place >= 0 and launch.at_s <= calls[place][1] else {}


def _payload_bytes(kind: str, facts: Mapping[str, Any]) -> int | None:
    numel = facts.get("Out msg nelems" if kind == "all_gather" else "In msg nelems")
    itemsize = DTYPE_BYTES.get(str(facts.get("dtype")))
    return int(numel) * itemsize if numel is not None and itemsize is not None else None


def union(spans: Iterable[Span]) -> list[Span]:
    """Spans that overlap or touch made one, in order."""
    merged: list[Span] = []
    for begun, ended in sorted(spans):
        if merged and begun <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], ended))
        else:
            merged.append((begun, ended))
    return merged


class Cover:
    """Times at which something runs; made once, then asked by bisection."""

    def __init__(self, spans: Iterable[Span]) -> None:
        merged = union(spans)
        self._begins = [begun for begun, _ in merged]
        self._ends = [ended for _, ended in merged]
        self._before = [0.0, *accumulate(ended - begun for begun, ended in merged)]

    def seconds(self, span: Span) -> float:
        """Of a span, how long something runs."""
        return max(0.0, self._until(span[1]) - self._until(span[0]))

    def _until(self, moment: float) -> float:
        place = bisect_right(self._begins, moment) - 1
        return 0.0 if place < 0 else self._before[place] + min(moment, self._ends[place]) - self._begins[place]


def matched(
    rows: Sequence[Communication], kernels: Sequence[Ran], group_names: Mapping[str, str]
) -> tuple[list[Ran | None], str | None]:
    """Each row's kernel: the n-th collective of a group is its n-th kernel, for a group's kernels run in order.

    Args:
        rows: what the dispatch mode saw of one step on this rank.
        kernels: of another run of the same step.
        group_names: process group name to its ranks as a row's `group` has them.

    Returns:
        One kernel a row, all None with a sentence where the two do not fit together.
    """
    none: list[Ran | None] = [None] * len(rows)
    unnamed = sum(ran.kind == UNNAMED for ran in kernels)
    # A collective of one rank may be a kernel, a copy, or nothing.
    kernels = [ran for ran in kernels if ran.kind != UNNAMED and group_names.get(ran.group, ",").count(",")]
    ours = Counter((row.group, row.kind) for row in rows if row.group_size > 1)
    theirs = Counter((group_names.get(ran.group, f"group {ran.group}"), ran.kind) for ran in kernels)
    if ours != theirs:
        more = [f"{kind} over {group}: {count}" for (group, kind), count in (theirs - ours).items()]
        fewer = [f"{kind} over {group}: {count}" for (group, kind), count in (ours - theirs).items()]
        differing = "; ".join(
            [
                *(f"only among kernels {text}" for text in more),
                *(f"no kernel of {text}" for text in fewer),
                *([f"{unnamed} kernels communicate and do not say what"] if unnamed else []),
            ]
        )
        return none, f"the profiler's kernels are not the collectives that were issued: {differing}"
    waiting: dict[str, list[Ran]] = {}
    for ran in reversed(kernels):
        waiting.setdefault(group_names[ran.group], []).append(ran)
    found = [waiting[row.group].pop() if row.group_size > 1 else None for row in rows]
    for row, its in zip(rows, found, strict=True):
        if its is not None and its.kind != row.kind:
            return none, f"kernels of {row.group} ran in another order than they were issued"
    return found, None


def differing_bytes(rows: Sequence[Communication], kernels: Sequence[Ran | None]) -> list[str]:
    """Where a row and its kernel do not move as much, as sentences; bytes that the profiler does not report agree."""
    return [
        f"{row.kind} over ranks {row.group} of {row.payload_bytes} B; its kernel moved {ran.payload_bytes} B"
        for row, ran in zip(rows, kernels, strict=True)
        if ran is not None and ran.payload_bytes not in (None, row.payload_bytes)
    ]
