"""Collectives among the kernels of a profiled step on CUDA: when each ran, and how much of it nothing else covered.

The profiler writes a collective's name, sizes and process group with its kernel (kineto's `output_json.cpp`), and we
read those: kernels are renamed from one NCCL to the next. A collective's duration is its kernel's, so it includes
waiting for the slowest rank, as all NCCL durations do.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from distbench.worker.torch_internals import kind_of
from distbench.worker.tracing.attribution import Communication

MICRO = 1e-6
KERNEL, MOVED, ANNOTATION = "kernel", ("gpu_memcpy", "gpu_memset"), "gpu_user_annotation"
PHASE = "distbench:"
# The profiler's names of dtypes (c10::toString) to bytes an element; of any other, bytes are not compared.
DTYPE_BYTES = {"Double": 8, "Float": 4, "Half": 2, "BFloat16": 2, "Long": 8, "Int": 4, "Byte": 1, "Char": 1, "Bool": 1}
Event = Mapping[str, Any]
Span = tuple[float, float]


class Ran(NamedTuple):
    """One collective's kernel; moments are seconds of the profiler's clock.

    Args:
        kind: as in Communication.
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


def collectives_among(events: Iterable[Event]) -> list[Ran]:
    """The collectives' kernels of one rank, in the order in which they began, among the events of a Chrome trace of
    `torch.profiler` (`ts` and `dur` in microseconds)."""
    on_device = [event for event in events if event.get("ph") == "X" and event.get("cat") in (KERNEL, *MOVED)]
    named = [(event, _collective(event)) for event in on_device]
    covered = union(_span(event) for event, name in named if name is None)
    found = []
    for event, name in named:
        if name is not None:
            begun, ended = _span(event)
            group = str(event["args"].get("Process Group Name", ""))
            kind, exposed = kind_of(name), ended - begun - overlap((begun, ended), covered)
            found.append(Ran(kind, group, begun, ended, exposed, _payload_bytes(kind, event["args"])))
    return sorted(found, key=lambda ran: ran.begun_s)


def phases_among(events: Iterable[Event]) -> list[tuple[str, float, float]]:
    """Phases as the device saw them: name, begin and end in seconds of the profiler's clock, in order."""
    spans = [
        (str(event["name"]).removeprefix(PHASE), *_span(event))
        for event in events
        if event.get("cat") == ANNOTATION and str(event.get("name", "")).startswith(PHASE)
    ]
    return sorted(spans, key=lambda span: span[1])


def _collective(event: Event) -> str | None:
    name = event.get("args", {}).get("Collective name")
    return str(name) if name and event.get("cat") == KERNEL else None


def _payload_bytes(kind: str, facts: Mapping[str, Any]) -> int | None:
    numel = facts.get("Out msg nelems" if kind == "all_gather" else "In msg nelems")
    itemsize = DTYPE_BYTES.get(str(facts.get("dtype")))
    return int(numel) * itemsize if numel is not None and itemsize is not None else None


def _span(event: Event) -> Span:
    begun = float(event["ts"]) * MICRO
    return begun, begun + float(event.get("dur", 0.0)) * MICRO


def union(spans: Iterable[Span]) -> list[Span]:
    """Spans that overlap or touch made one, in order."""
    merged: list[Span] = []
    for begun, ended in sorted(spans):
        if merged and begun <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], ended))
        else:
            merged.append((begun, ended))
    return merged


def overlap(span: Span, covered: Sequence[Span]) -> float:
    """Seconds of a span that spans apart from each other cover."""
    return sum(max(0.0, min(span[1], ended) - max(span[0], begun)) for begun, ended in covered)


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
    # A collective of one rank may be a kernel, a copy, or nothing.
    kernels = [ran for ran in kernels if group_names.get(ran.group, ",").count(",")]
    ours = Counter((row.group, row.kind) for row in rows if row.group_size > 1)
    theirs = Counter((group_names.get(ran.group, f"group {ran.group}"), ran.kind) for ran in kernels)
    if ours != theirs:
        more = [f"{kind} over {group}: {count}" for (group, kind), count in (theirs - ours).items()]
        fewer = [f"{kind} over {group}: {count}" for (group, kind), count in (ours - theirs).items()]
        differing = "; ".join(
            [*(f"only among kernels {text}" for text in more), *(f"no kernel of {text}" for text in fewer)]
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
