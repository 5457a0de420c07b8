"""Runs cases one after another: open, warm up, time, check, and append a line; bad cases do not affect others."""

import contextlib
import math
import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from distbench.runs.progress import ProgressWriter
from distbench.runs.run_file import CaseResult, append
from distbench.spec import Settings, UserError
from distbench.worker.rank.agreement import Agreement
from distbench.worker.rank.clocks import CudaClock, HostClock
from distbench.worker.rank.failure import RankFailed, StorageFailed, one_line
from distbench.worker.rank.measure import Meter, RankGroup, Samples
from distbench.worker.rank.opened_case import CaseSpec, OpenedCase
from distbench.worker.rank.rank_context import RankContext
from distbench.worker.rank.stopwatch import Stopwatch
from distbench.worker.torch_internals import Forwarding, Unsupported
from distbench.worker.tracing.trace import Tracing


class Runner:
    """One rank's part in measuring a list of cases.

    Args:
        context: this rank's context.
        agreement: tells failures of all ranks from failures of one.
        settings: when to stop sampling.
        run_file: where rank 0 appends results.
        progress: where rank 0 reports progress.
        stopwatch: where this rank's time is counted.
        trace_paths: whether cases that can be traced are, each after its row is on the disk.
    """

    def __init__(
        self,
        context: RankContext,
        agreement: Agreement,
        settings: Settings,
        run_file: Path,
        progress: ProgressWriter,
        stopwatch: Stopwatch,
        trace_paths: bool = False,
    ) -> None:
        self._context = context
        self._agreement = agreement
        self._run_file = run_file
        self._progress = progress
        self._stopwatch = stopwatch
        clock = CudaClock() if context.device.type == "cuda" else HostClock()
        shared = clock.shared_between_ranks and len(set(context.gather(os.uname().nodename))) == 1
        ranks = RankGroup(context.control, context.device)
        self._repeats = settings.iterations_per_sample
        self._meter = Meter(ranks, clock, settings.of_a_pass(), shared, progress.tell_samples)
        self._passes = settings.passes
        self._earlier: dict[str, list[torch.Tensor]] = {}
        self._tracing: Tracing | None = None
        if trace_paths:
            self._tracing = Tracing(Forwarding(context.mesh), shared, on_progress=partial(progress.tell, "tracing"))

    def run(self, case_specs: Sequence[CaseSpec]) -> None:
        """Measure every case, in order.

        Raises:
            UserError: a case is declared wrongly.
            RankFailed: this rank failed alone, so the others wait for it in vain.
            StorageFailed: a result could not be written.
        """
        waiting = list(enumerate(case_specs))
        for number in range(self._passes):
            is_last = number == self._passes - 1
            waiting = [(index, case_spec) for index, case_spec in waiting if not self._ended(index, case_spec, is_last)]

    def _ended(self, index: int, case_spec: CaseSpec, is_last: bool) -> bool:
        """One pass over a case; whether it has its row now: after the last pass, or where it failed."""
        case = case_spec.case
        self._progress.tell("case", index=index, id=case.id, kind=case.kind, params=case.params)
        result = self._result(index, case_spec, is_last)
        if result is None:
            return False
        self._progress.tell("done", id=case.id, status=result.status, spent_s=self._stopwatch.spent_s)
        return True

    def save(self, record: dict[str, Any]) -> None:
        """Rank 0 appends a record to the run file; the other ranks do nothing.

        Raises:
            StorageFailed: the disk is full or the folder is gone.
        """
        if self._context.rank != 0:
            return
        try:
            append(self._run_file, record)
        except OSError as error:
            raise StorageFailed(f"{self._run_file} cannot be written: {error.strerror}") from error

    def _save_row(self, result: CaseResult) -> CaseResult:
        result.backend = self._context.backend
        self.save(result.to_record())
        return result

    def _result(self, index: int, case_spec: CaseSpec, is_last: bool) -> CaseResult | None:
        """Run a case and append its row; its trace follows, where one is wanted. None before the last pass."""
        try:
            if is_last:
                return self._measure(index, case_spec)
            self._take_samples(case_spec)
            return None
        except (UserError, StorageFailed, RankFailed):
            raise
        except Unsupported as reason:
            status, message = reason.status, str(reason)
            self._agreement.require_all_failed(str(index), message)
        except Exception as error:
            traceback.print_exc()
            status, message = "raised", one_line(error)
            self._require_harmless(str(index), message)
        return self._save_row(CaseResult(case_spec.case, status, error=message))

    def _require_harmless(self, what: str, message: str) -> None:
        """Return when all ranks raised and every group still works: half of a collective may have been left behind.

        Raises:
            RankFailed: this case breaks the launch, and not the innocent one after it.
        """
        self._agreement.require_all_failed(what, message)
        try:
            works = [self._context.group_works(mesh_dim) for mesh_dim in self._context.mesh_dims]
        except RuntimeError as error:
            raise RankFailed(message) from error
        if self._context.any(not all(works)):
            raise RankFailed(message)

    @contextlib.contextmanager
    def _warm(self, case_spec: CaseSpec) -> Iterator[tuple[OpenedCase, float]]:
        """A case opened and warmed up, and the seconds that an iteration takes."""
        with contextlib.ExitStack() as opened:
            with self._stopwatch.on("set-up"):
                opened_case = opened.enter_context(case_spec.open())
            with self._stopwatch.on("warm-up"):
                estimate_s = self._meter.warm_up(opened_case.call)
            yield opened_case, estimate_s

    def _take_samples(self, case_spec: CaseSpec) -> None:
        """A pass that is not the last: samples, and nothing else."""
        with self._warm(case_spec) as (opened_case, estimate_s):
            stamps, _ = self._meter.sample(opened_case.call, estimate_s)
        self._earlier.setdefault(case_spec.case.id, []).append(stamps)

    def _measure(self, index: int, case_spec: CaseSpec) -> CaseResult:
        """The last pass: samples, the check and the row."""
        with self._warm(case_spec) as (opened_case, estimate_s):
            earlier = self._earlier.pop(case_spec.case.id, [])
            samples = self._meter.measure(opened_case.call, opened_case.phases, estimate_s, earlier)
            self._stopwatch.add("timed", sum(samples.samples_s) * self._repeats)
            with self._stopwatch.on("checking"):
                wrong = self._check(opened_case)
            result = _result_of(case_spec, opened_case, samples, wrong)
            if self._tracing is None or opened_case.trace is None:
                return self._save_row(result)
            # The row first: whatever becomes of the trace, what was measured stays.
            self._save_row(result)
            with self._stopwatch.on("tracing"):
                trace = partial(opened_case.trace.record, self._tracing, result.counters)
                self._trace(f"trace-{index}", case_spec.case.id, trace)
            return result

    def _trace(self, what: str, case_id: str, trace: Callable[[], dict[str, Any]]) -> None:
        """Append a case's trace, or why there is none; the launch goes on where all ranks failed."""
        self._progress.tell("tracing")
        record = {"type": "trace", "case_id": case_id}
        try:
            self.save(record | trace())
        except StorageFailed:
            raise
        except Exception as error:
            traceback.print_exc()
            message = one_line(error)
            try:
                self._require_harmless(what, message)
            finally:
                self.save(record | {"error": self._agreement.first_message(what, message)})

    def _check(self, opened_case: OpenedCase) -> str | None:
        message = opened_case.check()
        if not self._context.any(message is not None):
            return None
        found = enumerate(self._context.gather(message))
        return next(f"rank {rank}: {message}" for rank, message in found if message)


def _result_of(case_spec: CaseSpec, opened_case: OpenedCase, samples: Samples, wrong: str | None) -> CaseResult:
    fields = dict(opened_case.fields)
    counters = {
        **fields.pop("counters", {}),
        "entry_skew_s": samples.entry_skew_s,
        "isolated_s": samples.isolated_s,
        **opened_case.after(),
    }
    # JSON has no infinity: for an unbounded error there are the status and its sentence.
    counters = {name: None if _unbounded(value) else value for name, value in counters.items()}
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


def _unbounded(value: object) -> bool:
    return isinstance(value, float) and not math.isfinite(value)
