"""Interface between a workload and the runner: a case, and the function that opens the case for measuring."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from distbench.ranks.measure import Call, Samples
from distbench.records.run_file import Case, CaseResult
from distbench.spec.printable_text import count_text


class Traceable(Protocol):
    """A tracer of a case's communication."""

    def record(self, tracing: Any, counters: dict[str, Any]) -> dict[str, Any]:
        """Return the fields of the case's trace record; called on all ranks."""


@dataclass
class OpenedCase:
    """A case that is ready to run."""

    call: Call  # runs one iteration and waits for its end; stamps the end of each phase
    # Runs one more iteration on fresh data; returns the problem of this rank's result, None if the result is correct
    check: Callable[[], str | None]
    phases: tuple[str, ...] = ()  # names of the phases that `call` stamps
    fields: dict[str, Any] = field(default_factory=dict)  # fields of CaseResult that are available before timing
    # Fields of `counters` that are available only after the timed iterations
    after: Callable[[], dict[str, Any]] = dict
    trace: Traceable | None = None  # traces the case's communication; None if not traceable
    stays_open: bool = False  # whether the case may remain open between passes while other cases run
    # Memory of an open case, equal on all ranks. It is set if the memory is small and one iteration is enough warm-up.
    # None means the size of the parameters.
    held_bytes: int | None = None
    pause: Callable[[], None] = lambda: None  # called before other cases run while this case remains open
    resume: Callable[[], None] = lambda: None  # called before this case runs again
    # number of discarded iterations before the first sample; None for the number in the settings
    warm_ups: int | None = None
    starts_on: Any = None  # the group whose devices start each sample together; None if the hosts start together


@dataclass(frozen=True)
class CaseSpec:
    """One case, and the function that opens the case for measuring. All ranks open a case together."""

    case: Case
    open: Callable[[], AbstractContextManager[OpenedCase]]
    # Cases of one group are compared with each other, so their passes alternate; "" for a case without comparison
    group: str = ""
    max_passes: int = 0  # maximum for the case's group; 0 for no maximum
    keeps_ranks: bool = False  # whether the run file has each rank's median of further passes
    most_samples: int = 0  # maximum per pass; 0 for the maximum of the settings


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
    """Return the row of a case's first pass; `wrong` is the problem that the check found, None for a correct result."""
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
