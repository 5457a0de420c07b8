"""Collectives among the kernels of a profiled step: when each ran, and how much of it nothing else covered.

The profiler writes a collective's name, sizes and process group with its kernel (kineto's `output_json.cpp`), and we
read those: kernels are renamed from one NCCL to the next. Where it did not, `host_collectives` finds the host's calls
that the kernel was launched for; a kernel without any is known as communication by its name alone, and hides no other.
A collective's duration is its kernels', so it includes waiting for the slowest rank, as all NCCL durations do.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from distbench.worker.torch_internals import PEERS, kind_of
from distbench.worker.tracing.communication import Communication
from distbench.worker.tracing.host_calls import Event, HostCalls, Span, is_on_device, span_of
from distbench.worker.tracing.host_collectives import COLLECTIVE, HostCollective, HostCollectives

# The profiler's names of dtypes (c10::toString) to bytes an element; of any other, bytes are not compared.
DTYPE_BYTES = {
    **dict.fromkeys(("Double", "Long", "UInt64", "ComplexFloat"), 8),
    **dict.fromkeys(("Float", "Int", "UInt32"), 4),
    **dict.fromkeys(("Half", "BFloat16", "Short", "UInt16"), 2),
    **dict.fromkeys(("Byte", "Char", "Bool", "Float8_e4m3fn", "Float8_e5m2", "Float8_e4m3fnuz", "Float8_e5m2fnuz"), 1),
}
UNNAMED = "unnamed communication"
MEETING = "barrier"  # has a kernel, and moves nothing


class Ran(NamedTuple):
    """One collective's kernels; moments are seconds of the profiler's clock.

    Args:
        kind: as in Communication; UNNAMED where the profiler does not tell.
        group: name of its process group.
        exposed_s: how long it ran while no other kernel or copy did; of a batch that one kernel moved, an equal part.
        payload_bytes: nccl-tests' S by the profiler's count, None where it is not recorded.
        issued_s: when the host called it; when it began, where that is not known.
    """

    kind: str
    group: str
    begun_s: float
    ended_s: float
    exposed_s: float
    payload_bytes: int | None = None
    issued_s: float = 0.0


def collectives_among(events: Sequence[Event], launches: HostCalls | None = None) -> list[Ran]:
    """The collectives that ran on one rank's device, in the order in which they began, among the events of a Chrome
    trace of `torch.profiler` (`ts` and `dur` in microseconds).

    NCCL may run one in several kernels, and messages of one batch in a single one.
    """
    calls = HostCollectives(events, launches or HostCalls(events))
    covered = Cover(span_of(event) for event in events if is_on_device(event) and calls.of(event) is None)
    kernels: dict[HostCollective, list[tuple[Span, int]]] = {}
    unnamed: list[Span] = []
    for event in filter(is_on_device, events):
        own = calls.of(event)
        for call in own or ():
            kernels.setdefault(call, []).append((span_of(event), len(own or ())))
        unnamed += [span_of(event)] if own == () else []

    def ran(shared: Sequence[tuple[Span, int]], facts: Mapping[str, Any], issued_s: float) -> Ran:
        # Copy engines, and several kernels of a split one, may run at once.
        spans = union(span for span, _ in shared)
        exposed = sum(max(ended - begun - covered.seconds((begun, ended)), 0.0) for begun, ended in spans)
        kind = kind_of(str(facts[COLLECTIVE])) if facts else UNNAMED
        group = str(facts.get("Process Group Name", ""))
        size = max(size for _, size in shared)
        return Ran(kind, group, spans[0][0], spans[-1][1], exposed / size, _payload_bytes(kind, facts), issued_s)

    found = [ran(shared, call.facts, call.at_s) for call, shared in kernels.items()]
    found += [ran([(span, 1)], {}, span[0]) for span in unnamed]
    return sorted(found, key=lambda one: (one.begun_s, one.issued_s))


def _payload_bytes(kind: str, facts: Mapping[str, Any]) -> int | None:
    numel = facts.get("Out msg nelems" if kind == "all_gather" else "In msg nelems")
    itemsize = DTYPE_BYTES.get(str(facts.get("dtype")))
    return numel * itemsize if isinstance(numel, int) and itemsize is not None else None


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

    Messages between two ranks are matched by themselves, in the order in which the host called them; where those are
    others than the rows have, only they are left without times.

    Args:
        rows: what the dispatch mode saw of one step on this rank.
        kernels: of another run of the same step.
        group_names: process group name to its ranks as a row's `group` has them.

    Returns:
        One kernel a row, all None with a sentence where the two do not fit together.
    """
    none: list[Ran | None] = [None] * len(rows)
    unnamed = sum(ran.kind == UNNAMED for ran in kernels)
    messages = sorted((ran for ran in kernels if ran.kind in PEERS), key=lambda ran: ran.issued_s)
    # A collective of one rank may be a kernel, a copy, or nothing.
    kernels = [
        ran
        for ran in kernels
        if ran.kind not in (UNNAMED, MEETING, *PEERS) and group_names.get(ran.group, ",").count(",")
    ]
    ours = Counter((row.group, row.kind) for row in rows if row.group_size > 1 and row.kind not in PEERS)
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
    are_alike = [row.kind for row in rows if row.kind in PEERS] == [ran.kind for ran in messages]
    in_order = iter(messages if are_alike else ())
    found = [
        next(in_order, None) if row.kind in PEERS else waiting[row.group].pop() if row.group_size > 1 else None
        for row in rows
    ]
    for row, its in zip(rows, found, strict=True):
        if its is not None and its.kind != row.kind:
            return none, f"kernels of {row.group} ran in another order than they were issued"
    return found, None


def without_kernels(rows: Sequence[Communication], kernels: Sequence[Ran | None]) -> list[str]:
    """How many messages have no kernel of theirs, as a sentence."""
    of_rows = [ran is None for row, ran in zip(rows, kernels, strict=True) if row.kind in PEERS]
    if not any(of_rows):
        return []
    return [f"of {sum(of_rows)} messages the profiler does not tell which kernel moved them; they have no times"]


def differing_bytes(rows: Sequence[Communication], kernels: Sequence[Ran | None]) -> list[str]:
    """Where a row and its kernel do not move as much, as sentences; bytes that the profiler does not report agree."""
    return [
        f"{row.kind} over ranks {row.group} of {row.payload_bytes} B; its kernel moved {ran.payload_bytes} B"
        for row, ran in zip(rows, kernels, strict=True)
        if ran is not None and ran.payload_bytes not in (None, row.payload_bytes)
    ]
