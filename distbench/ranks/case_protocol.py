"""What a workload hands to the runner: a case, and how to open it for measuring."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from distbench.ranks.measure import Call, Samples
from distbench.records.run_file import Case, CaseResult
from distbench.spec.printable_text import count_text


class Traceable(Protocol):
    """Traces what a case communicates."""

    def record(self, tracing: Any, counters: dict[str, Any]) -> dict[str, Any]:
        """The fields of the case's trace record; collective."""


@dataclass
class OpenedCase:
    """A case that is ready to run."""

    call: Call  # runs one iteration and waits for it; stamps the end of each phase
    # Runs it once more on fresh data; None when this rank's result is right, else what is wrong with it
    check: Callable[[], str | None]
    phases: tuple[str, ...] = ()  # names of the phases that `call` stamps
    fields: dict[str, Any] = field(default_factory=dict)  # fields of CaseResult that are known beforehand
    # Fields of `counters` that are known only when the timed iterations are over
    after: Callable[[], dict[str, Any]] = dict
    trace: Traceable | None = None  # traces what the case communicates; None where it has no parts
    stays_open: bool = False  # whether it may be kept open between passes while other cases run
    # Memory that it takes while it is kept so, the same on every rank, where that is little and one iteration warms it
    # up; None: as much as its parameters do
    held_bytes: int | None = None
    pause: Callable[[], None] = lambda: None  # called before other cases run while it is kept open
    resume: Callable[[], None] = lambda: None  # called before it runs again
    warm_ups: int | None = None  # iterations thrown away before the first sample; None: as the settings have it
    starts_on: Any = None  # the group over which its devices start each sample together; None: as the hosts do


@dataclass(frozen=True)
class CaseSpec:
    """One case, and what opens it for measuring; all ranks open it together."""

    case: Case
    open: Callable[[], AbstractContextManager[OpenedCase]]
    # Cases of one group are compared with each other, so they take turns; "" for one compared with none
    group: str = ""
    max_passes: int = 0  # its group takes at most so many; 0 for no limit of its own
    keeps_ranks: bool = False  # whether a further pass's line says each rank's median too
    most_samples: int = 0  # of a turn; 0 for no limit of its own


def first_difference(got: Any, expected: Any) -> str | None:
    """Where two tensors differ first, as a sentence; None when they are equal."""
    import torch

    if got.shape != expected.shape:
        return f"the result has shape {tuple(got.shape)}, {tuple(expected.shape)} was expected"
    if torch.equal(got, expected):
        return None
    offset = int((got.flatten() != expected.flatten()).nonzero()[0])
    wrong = int((got != expected).sum())
    return (
        f"{wrong} of {count_text(got.numel(), 'element')} are wrong; the first, at offset {offset}, "
        f"is {float(got.flatten()[offset])}, {float(expected.flatten()[offset])} was expected"
    )


def result_of(case_spec: CaseSpec, opened_case: OpenedCase, samples: Samples, wrong: str | None) -> CaseResult:
    """The row of a case's first pass; `wrong` is what its check found, None where it is right."""
    fields = dict(opened_case.fields)
    counters = {
        **fields.pop("counters", {}),
        "entry_skew_s": samples.entry_skew_s,
        "isolated_s": samples.isolated_s,
        **opened_case.after(),
    }
    # JSON has no infinity: for an unbounded error there are the status and its sentence.
    for name, value in counters.items():
        if isinstance(value, float) and not math.isfinite(value):
            counters[name] = None
    return CaseResult(
        case=case_spec.case,
        status="wrong" if wrong else "ok",
        error=wrong,
        samples_s=samples.samples_s,
        phases_s=samples.phases_s,
        rank_median_s=samples.rank_median_s,
        stop_reason=samples.stop_reason,
        counters=counters,
        **fields,
    )
