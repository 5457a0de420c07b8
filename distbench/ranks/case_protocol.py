"""Interface between a workload and the runner: a case, and how to open it for measuring."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from distbench.ranks.measure import Call, Samples
from distbench.records.run_file import Case, CaseResult
from distbench.spec.printable_text import count_text


class Traceable(Protocol):
    """Traces the communication of a case."""

    def record(self, tracing: Any, counters: dict[str, Any]) -> dict[str, Any]:
        """Return the fields of the case's trace record; collective."""


@dataclass
class OpenedCase:
    """A case that is ready to run."""

    call: Call  # runs one iteration and waits for it; stamps the end of each phase
    # Runs it once more on fresh data; None if this rank's result is correct, else the problem
    check: Callable[[], str | None]
    phases: tuple[str, ...] = ()  # names of the phases that `call` stamps
    fields: dict[str, Any] = field(default_factory=dict)  # fields of CaseResult that are available before timing
    # Fields of `counters` that are available only after the timed iterations
    after: Callable[[], dict[str, Any]] = dict
    trace: Traceable | None = None  # traces the case's communication; None if it has no parts
    stays_open: bool = False  # whether it may be kept open between passes while other cases run
    # Memory that an open case keeps, the same on every rank, if that is little and one iteration warms it up; None: as
    # much as its parameters
    held_bytes: int | None = None
    pause: Callable[[], None] = lambda: None  # called before other cases run while it is kept open
    resume: Callable[[], None] = lambda: None  # called before it runs again
    warm_ups: int | None = None  # iterations discarded before the first sample; None: from the settings
    starts_on: Any = None  # the group whose devices start each sample together; None: the hosts start together


@dataclass(frozen=True)
class CaseSpec:
    """One case, and the function that opens it for measuring; all ranks open it together."""

    case: Case
    open: Callable[[], AbstractContextManager[OpenedCase]]
    # Cases of one group are compared with each other, so their passes alternate; "" for a case without comparison
    group: str = ""
    max_passes: int = 0  # limit of its group; 0 for none
    keeps_ranks: bool = False  # whether lines of further passes include each rank's median
    most_samples: int = 0  # per pass; 0 for no own limit


def first_difference(got: Any, expected: Any) -> str | None:
    """Return the first difference of two tensors as a sentence; None if they are equal."""
    import torch

    if got.shape != expected.shape:
        return f"the result has shape {tuple(got.shape)}, expected {tuple(expected.shape)}"
    if torch.equal(got, expected):
        return None
    offset = int((got.flatten() != expected.flatten()).nonzero()[0])
    wrong = int((got != expected).sum())
    return (
        f"{wrong} of {count_text(got.numel(), 'element')} are wrong; the first, at offset {offset}, "
        f"is {float(got.flatten()[offset])}, expected {float(expected.flatten()[offset])}"
    )


def result_of(case_spec: CaseSpec, opened_case: OpenedCase, samples: Samples, wrong: str | None) -> CaseResult:
    """Return the row of a case's first pass; `wrong` is the problem that its check found, None if it is correct."""
    fields = dict(opened_case.fields)
    counters = {
        **fields.pop("counters", {}),
        "entry_skew_s": samples.entry_skew_s,
        "isolated_s": samples.isolated_s,
        **opened_case.after(),
    }
    # JSON has no infinity: an unbounded error is reported by the status and its sentence.
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
