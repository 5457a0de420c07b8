"""The host's calls of collectives (`record_param_comms`), and which of them a kernel was launched for.

kineto puts a call's facts with a kernel that was launched while it was open. NCCL launches what is sent and received in
one batch (`batch_isend_irecv`, and whatever else torch coalesces) when the batch ends, and then no call is open any
more: those kernels say nothing, and belong to the calls before them that have no kernel.
"""

import re
from bisect import bisect_right
from collections.abc import Sequence
from functools import cache
from typing import Any

from distbench.worker.torch_internals import FAMILIES, OTHERS, kind_of
from distbench.worker.tracing.host_calls import (
    HOST_OPERATOR,
    Event,
    HostCall,
    HostCalls,
    is_copy,
    is_on_device,
    span_of,
)

# Kernels of NCCL and RCCL (ncclDevKernel_..., ncclKernel_..., ncclSymDevKernel_...), libraries made after them (MCCL,
# CNCL), MSCCL, oneCCL and Ascend's HCCL, torch's over symmetric memory, vLLM's; some profilers leave C++ names as they
# are.
OF_COMMUNICATION = re.compile(
    r"(?:nccl|rccl|mccl|cncl)\w*kernel|msccl|oneccl_|hcom_|nvshmem|_shot_all_reduce|multimem_all_|cross_device_reduce",
    re.IGNORECASE,
)
COLLECTIVE, NUMBER, GROUP = "Collective name", "External id", "Process Group Name"


class HostCollective:
    """One call: its facts as the profiler has them, and from when to when it was open, seconds of the profiler's
    clock."""

    def __init__(self, facts: Event, at_s: float, ended_s: float) -> None:
        self.facts, self.at_s, self.ended_s = facts, at_s, ended_s
        self.within: HostCollective | None = None
        self.has_kernel = False

    @property
    def communicates(self) -> bool:
        """Whether it is one that has a kernel: others wait, or set something up."""
        return kind_of(str(self.facts[COLLECTIVE])) in (*FAMILIES, *OTHERS)


@cache
def communicates(kernel: str) -> bool:
    """Whether a kernel is one of a communication library, by its name; names are long, and few."""
    return OF_COMMUNICATION.search(kernel) is not None


class HostCollectives:
    """The calls of one rank's events, by what they launched."""

    def __init__(self, events: Sequence[Event], launches: HostCalls) -> None:
        self._launches = launches
        self._by_number: dict[Any, HostCollective] = {}
        self._by_thread: dict[Any, list[HostCollective]] = {}
        for event in events:
            facts = event.get("args") or {}
            if event.get("cat") == HOST_OPERATOR and event.get("ph") == "X" and facts.get(COLLECTIVE):
                call = HostCollective(facts, *span_of(event))
                self._by_thread.setdefault(event.get("tid"), []).append(call)
                if number := facts.get(NUMBER):
                    self._by_number[number] = call
        for calls in self._by_thread.values():
            _nest(calls)
        self._of_kernels = self._find([event for event in events if is_on_device(event)])

    def of(self, event: Event) -> tuple[HostCollective, ...] | None:
        """What a kernel was launched for, () where it communicates and nobody tells what; None for other work."""
        return self._of_kernels.get(id(event))

    def _find(self, events: Sequence[Event]) -> dict[int, tuple[HostCollective, ...] | None]:
        found: dict[int, tuple[HostCollective, ...] | None] = {}
        silent = []
        for event in events:
            facts = event.get("args") or {}
            if facts.get(COLLECTIVE):
                found[id(event)] = (self._told(event),)
            elif not is_copy(event) and communicates(str(event.get("name", ""))):
                found[id(event)] = self._open_at(event)
                silent += [event] if not found[id(event)] else []
        return found | self._of_batches(silent) | self._of_copies(events)

    def _told(self, event: Event) -> HostCollective:
        """The call of a kernel's facts; each other kernel that bears its number is of it too."""
        facts, launch = event["args"], self._launches.of(event)
        number = facts.get(NUMBER)
        call = self._by_number.get(number) if number else self._around(launch)
        if call is None or call.facts[COLLECTIVE] != facts[COLLECTIVE]:
            at_s = launch.at_s if launch else span_of(event)[0]
            call = HostCollective(facts, at_s, at_s)
            if number:
                self._by_number[number] = call
        call.has_kernel = True
        return call

    def _open_at(self, event: Event) -> tuple[HostCollective, ...]:
        if (call := self._around(self._launches.of(event))) is None:
            return ()
        call.has_kernel = True
        return (call,)

    def _around(self, launch: HostCall | None) -> HostCollective | None:
        """The innermost call of its thread that was open at a launch."""
        if launch is None:
            return None
        calls = self._by_thread.get(launch.thread, [])
        place = bisect_right(calls, launch.at_s, key=lambda call: call.at_s) - 1
        call = calls[place] if place >= 0 else None
        while call is not None and call.ended_s < launch.at_s:
            call = call.within
        return call

    def _of_batches(self, kernels: Sequence[Event]) -> dict[int, tuple[HostCollective, ...]]:
        """Of kernels launched while no call was open: the calls of that thread since the one before that have none.

        A kernel like it that follows on its stream without a call in between is of the same batch.
        """
        launched = [(launch, event) for event in kernels if (launch := self._launches.of(event))]
        found: dict[int, tuple[HostCollective, ...]] = {}
        seen: dict[Any, tuple[int, Any, tuple[HostCollective, ...]]] = {}
        for launch, event in sorted(launched, key=lambda one: one[0].at_s):
            calls = self._by_thread.get(launch.thread, [])
            since, like, before = seen.get(launch.thread, (0, None, ()))
            until = bisect_right(calls, launch.at_s, key=lambda call: call.at_s)
            own = [call for call in calls[since:until] if call.communicates and not call.has_kernel]
            batch = tuple(call for call in own if call.facts.get(GROUP) == own[-1].facts.get(GROUP))
            this = event.get("tid"), event.get("name")
            if since == until and like == this:
                batch = before
            seen[launch.thread] = until, this, batch
            found[id(event)] = batch
        return found

    def _of_copies(self, events: Sequence[Event]) -> dict[int, tuple[HostCollective, ...]]:
        """Of copies that bear the number of a call without a kernel: NCCL over symmetric memory lets copy engines move
        what nobody reduces, and kineto gives facts to kernels alone."""
        found: dict[int, tuple[HostCollective, ...]] = {}
        for event in filter(is_copy, events):
            call = self._by_number.get((event.get("args") or {}).get(NUMBER))
            if call is not None and call.communicates and not call.has_kernel:
                found[id(event)] = (call,)
        return found


def _nest(calls: list[HostCollective]) -> None:
    """Order a thread's calls, and tell each which one it was made in."""
    calls.sort(key=lambda call: (call.at_s, -call.ended_s))
    around: list[HostCollective] = []
    for call in calls:
        while around and around[-1].ended_s < call.at_s:
            around.pop()
        call.within = around[-1] if around else None
        around.append(call)
