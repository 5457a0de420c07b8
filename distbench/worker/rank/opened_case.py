"""What a workload hands to the runner: a case, and how to open it for measuring."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from distbench.runs.run_file import Case
from distbench.worker.rank.measure import Call


class Traceable(Protocol):
    """Traces what a case communicates."""

    def record(self, tracing: Any, counters: dict[str, Any]) -> dict[str, Any]:
        """The fields of the case's trace record; collective."""


@dataclass
class OpenedCase:
    """A case that is ready to run.

    Args:
        call: runs one iteration and waits for it; stamps the end of each phase.
        check: runs it once more on fresh data; None when this rank's result is right, else what is wrong with it.
        phases: names of the phases that `call` stamps.
        fields: fields of CaseResult that are known beforehand.
        after: fields of `counters` that are known only when the timed iterations are over.
        trace: traces what the case communicates; None where it has no parts.
        stays_open: whether it may be kept open between passes while other cases run.
    """

    call: Call
    check: Callable[[], str | None]
    phases: tuple[str, ...] = ()
    fields: dict[str, Any] = field(default_factory=dict)
    after: Callable[[], dict[str, Any]] = dict
    trace: Traceable | None = None
    stays_open: bool = False


@dataclass(frozen=True)
class CaseSpec:
    """One case, and what opens it for measuring; all ranks open it together."""

    case: Case
    open: Callable[[], AbstractContextManager[OpenedCase]]


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
        f"{wrong} of {got.numel()} elements are wrong; the first, at offset {offset}, "
        f"is {float(got.flatten()[offset])}, {float(expected.flatten()[offset])} was expected"
    )
