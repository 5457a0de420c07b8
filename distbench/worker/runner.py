"""Runs cases one after another: open, warm up, time, check, and append a line; bad cases do not affect others."""

import math
import os
import time
import traceback
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from distbench.compare.medians import median
from distbench.runs.progress import ProgressWriter
from distbench.runs.run_file import AGAIN, CaseResult, append
from distbench.spec import Settings, UserError
from distbench.spec.errors import StorageFailed
from distbench.worker.pass_plan import REOPEN_EVERY, PassPlan, Turn
from distbench.worker.rank.agreement import Agreement
from distbench.worker.rank.device import clock_of, free_bytes
from distbench.worker.rank.failure import RankFailed, one_line
from distbench.worker.rank.measure import Meter, RankGroup, Samples
from distbench.worker.rank.opened_case import CaseSpec, OpenedCase
from distbench.worker.rank.rank_context import RankContext
from distbench.worker.rank.stopwatch import Stopwatch
from distbench.worker.torch_internals import Forwarding, Unsupported
from distbench.worker.tracing.trace import Tracing

# A model between steps: parameters, two states of an optimizer, its share of a batch and of what its groups hold.
BYTES_PER_PARAMETER_BYTE = 4


class Runner:
    """One rank's part in measuring a list of cases.

    Args:
        context: this rank's context.
        agreement: tells failures of all ranks from failures of one.
        plan: how many passes, and what a case takes of each.
        settings: how to warm up and repeat.
        run_file: where rank 0 appends results.
        progress: where rank 0 reports progress.
        stopwatch: where this rank's time is counted.
        trace_paths: whether cases that can be traced are, each after its row is on the disk.
    """

    def __init__(
        self,
        context: RankContext,
        agreement: Agreement,
        plan: PassPlan,
        settings: Settings,
        run_file: Path,
        progress: ProgressWriter,
        stopwatch: Stopwatch,
        trace_paths: bool = False,
    ) -> None:
        self._context = context
        self._agreement = agreement
        self._plan = plan
        self._run_file = run_file
        self._progress = progress
        self._stopwatch = stopwatch
        clock = clock_of(context.device)
        shared = clock.shared_between_ranks and len(set(context.gather(os.uname().nodename))) == 1
        ranks = RankGroup(context.control, context.device)
        self._repeats = settings.iterations_per_sample
        self._meter = Meter(ranks, clock, settings, shared, progress.tell_samples)
        self._turns: Sequence[Turn] = ()
        self._tracing: Tracing | None = None
        if trace_paths:
            self._tracing = Tracing(Forwarding(context.mesh), shared, on_progress=partial(progress.tell, "tracing"))

    def run(self, case_specs: Sequence[CaseSpec], rows: Collection[str] = (), next_pass: int = 1) -> None:
        """Measure every case: a first pass, which checks them too, then further ones.

        Args:
            case_specs: the cases.
            rows: ids of those whose first pass an earlier launch has made.
            next_pass: number of the pass that follows the first one.

        Raises:
            UserError: a case is declared wrongly.
            RankFailed: this rank failed alone, so the others wait for it in vain.
            StorageFailed: a result could not be written.
        """
        turns = [Turn(index, case_spec) for index, case_spec in enumerate(case_specs)]
        new = [turn for turn in turns if turn.id not in rows]
        spent = Counter(self._stopwatch.spent_s)
        started = time.monotonic()
        turns = [turn for turn in turns if turn.id in rows or self._in_pass(turn, 0, self._first_pass_of)]
        self._turns = turns
        if new:
            first_s = time.monotonic() - started
            spent = Counter(self._stopwatch.spent_s) - spent
            opening_s = spent["set-up"] + spent["warm-up"]
            pass_s = first_s - spent["checking"] - opening_s
            pass_s += opening_s * (1 / REOPEN_EVERY if self._keeps_open else 1)
            self._plan.set_number(max(self._context.gather(pass_s * len(turns) / len(new))))
        number = next_pass
        while turns and self._plan.goes_on(number, [turn.medians for turn in turns]):
            turns = self._further_pass(turns, number)
            number += 1
        for turn in turns:
            turn.close()
        for turn in turns:
            self._trace(turn)

    def _further_pass(self, turns: list[Turn], number: int) -> list[Turn]:
        """One more pass over the cases; those that may go on. What was measured is written even if it is broken off."""
        self._progress.tell("pass", number=number, num_passes=self._plan.num_passes, num_cases=len(turns))
        records: list[dict[str, Any]] = []
        alive = set()
        try:
            for place in self._plan.order(number, len(turns)):
                if self._in_pass(turns[place], number, partial(self._turn_of, records=records)):
                    alive.add(place)
        finally:
            self.save(*records)
        return [turn for place, turn in enumerate(turns) if place in alive]

    def _in_pass(self, turn: Turn, number: int, measure: Callable[[Turn, int], str]) -> bool:
        """One turn of a case, and its row or what became of it; whether it may have another."""
        case = turn.case_spec.case
        self._progress.tell("case", index=turn.index, id=case.id, kind=case.kind, params=case.params, number=number)
        try:
            status = measure(turn, number)
        except (UserError, StorageFailed, RankFailed):
            raise
        except Exception as error:
            status = self._failed(turn, number, error)
        event = "done" if number == 0 else "turn"
        self._progress.tell(event, id=case.id, status=status, spent_s=self._stopwatch.spent_s)
        return status in ("ok", "wrong")

    def _failed(self, turn: Turn, number: int, error: Exception) -> str:
        """Record a case that failed on every rank; its status."""
        if isinstance(error, Unsupported):
            status, message = error.status, str(error)
            self._agreement.require_all_failed(f"{turn.index}-{number}", message)
        else:
            traceback.print_exc()
            status, message = "raised", one_line(error)
            self._require_harmless(f"{turn.index}-{number}", message)
        turn.close()
        if number == 0:
            self._save_row(CaseResult(turn.case_spec.case, status, error=message))
        else:
            self.save({"type": "pass", "case_id": turn.id, "number": number, "status": status, "error": message})
        return status

    def save(self, *records: dict[str, Any]) -> None:
        """Rank 0 appends records to the run file; the other ranks do nothing.

        Raises:
            StorageFailed: the disk is full or the folder is gone.
        """
        if self._context.rank != 0 or not records:
            return
        if records[0]["type"] != "run" and not self._run_file.exists():
            raise StorageFailed(f"{self._run_file} is gone: it was moved or deleted while it was written")
        try:
            append(self._run_file, *records)
        except OSError as error:
            raise StorageFailed(f"{self._run_file} cannot be written: {error.strerror}") from error

    def _save_row(self, result: CaseResult) -> None:
        result.backend = self._context.backend
        self.save(result.to_record())

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

    def _first_pass_of(self, turn: Turn, number: int) -> str:
        """Samples, the check and the row of a case; its status."""
        opened_case = self._open(turn)
        samples = self._samples(turn, opened_case)
        with self._stopwatch.on("checking"):
            wrong = self._check(opened_case)
        result = _result_of(turn.case_spec, opened_case, samples, wrong)
        self._save_row(result)
        turn.counters = result.counters
        if self._plan.num_passes == 1:
            self._trace(turn)
        turn.close()
        return result.status

    def _turn_of(self, turn: Turn, number: int, records: list[dict[str, Any]]) -> str:
        """Samples of a further pass."""
        if turn.opened_case is None or turn.is_due_for_reopening(number):
            turn.close()
            opened_case = self._open(turn)
        else:
            opened_case = turn.opened_case
            with self._stopwatch.on("warm-up"):
                self._meter.warm_up(opened_case.call, 1)
        samples = self._samples(turn, opened_case)
        if not (opened_case.stays_open and self._keeps_open):
            turn.close()
        records.append({"type": "pass", "case_id": turn.id, "number": number, **samples.to_record()})
        return "ok"

    def _open(self, turn: Turn) -> OpenedCase:
        """A case opened and warmed up."""
        with self._stopwatch.on("set-up"):
            opened_case = turn.open()
        with self._stopwatch.on("warm-up"):
            estimate_s = self._meter.warm_up(opened_case.call)
        turn.limits = turn.limits or self._plan.limits(estimate_s)
        turn.estimate_s = estimate_s
        return opened_case

    def _samples(self, turn: Turn, opened_case: OpenedCase) -> Samples:
        samples = self._meter.measure(opened_case.call, opened_case.phases, turn.estimate_s, turn.limits)
        if self._plan.is_automatic:
            samples.stop_reason = "passes"
        self._stopwatch.add("timed", sum(samples.samples_s) * self._repeats)
        turn.medians.append(median(samples.samples_s))
        return samples

    @cached_property
    def _keeps_open(self) -> bool:
        """Whether all cases fit into half of the memory that is free at once, on every rank."""
        needed = sum(turn.counters.get("parameter_bytes") or 0 for turn in self._turns) * BYTES_PER_PARAMETER_BYTE
        return not self._context.any(needed > free_bytes(self._context.device) / 2)

    def _trace(self, turn: Turn) -> None:
        """Append a case's trace, or why there is none; the launch goes on where all ranks failed."""
        if self._tracing is None or turn.is_traced or turn.id.endswith(AGAIN):
            return
        turn.is_traced = True
        opened_case = turn.opened_case or turn.open()
        if opened_case.trace is None:
            turn.close()
            return
        self._progress.tell("tracing")
        record, what = {"type": "trace", "case_id": turn.id}, f"trace-{turn.index}"
        try:
            with self._stopwatch.on("tracing"):
                self.save(record | opened_case.trace.record(self._tracing, turn.counters))
        except StorageFailed:
            raise
        except Exception as error:
            traceback.print_exc()
            message = one_line(error)
            try:
                self._require_harmless(what, message)
            finally:
                self.save(record | {"error": self._agreement.first_message(what, message)})
        finally:
            turn.close()

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
