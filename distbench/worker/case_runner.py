"""The runner of cases, one after another: open, warm up, time, check, append rows. A failed case does not affect other
cases."""

import math
import os
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from distbench.observe.trace import Tracing
from distbench.ranks.agreement import Agreement
from distbench.ranks.case_protocol import CaseSpec, OpenedCase, result_of
from distbench.ranks.context import RankContext
from distbench.ranks.device import clock_of, free_bytes
from distbench.ranks.failure import RankFailed, one_line, one_line_and_place
from distbench.ranks.measure import Meter, RankGroup, Samples, StampSeries, Stopwatch
from distbench.records.progress_events import ProgressWriter
from distbench.records.run_file import AGAIN, CaseResult, append
from distbench.spec import Settings, UserError
from distbench.spec.devices import known_device
from distbench.spec.errors import StorageFailed
from distbench.statistics.intervals import median
from distbench.torch_private import Unsupported
from distbench.worker.pass_schedule import REOPEN_EVERY, STRETCH, CaseProgress, PassPlan

# Memory of a model between steps: parameters, two optimizer states, a share of the batch and of the process groups.
BYTES_PER_PARAMETER_BYTE = 4
RUN_BY_USERS = ("step", "call")  # kinds of cases whose collectives the user's own code issues
OUT_OF_STEP = (
    "ranks have issued different collectives; look for collectives that "
    "depend on the rank, or on state of earlier calls"
)
SMALL_BYTES = 1 << 28  # a group with at most this size remains open without a check of free memory
SAVE_EVERY_S = 1.0


class RowWriter:
    """The writer of the run file on one rank; ranks other than 0 write nothing.

    Rows of first passes are appended immediately, lines of further passes once per second, and the disk is synchronized
    once per second: a synchronization, for which all ranks wait, takes longer than a short case. Methods that write
    raise StorageFailed if the disk is full or the folder was deleted.
    """

    def __init__(self, context: RankContext, run_file: Path) -> None:
        self._context, self._run_file = context, run_file
        self._passes: list[dict[str, Any]] = []
        self._saved_at = self._synced_at = time.monotonic()

    def save(self, *records: dict[str, Any]) -> None:
        """Append records, and wait until they are on the disk."""
        self._append(records, is_synced=True)

    def _append(self, records: Sequence[dict[str, Any]], is_synced: bool) -> None:
        if self._context.rank != 0 or not records:
            return
        if records[0]["type"] != "run" and not self._run_file.exists():
            raise StorageFailed(f"{self._run_file} was moved or deleted during the run")
        try:
            append(self._run_file, *records, is_synced=is_synced)
        except OSError as error:
            raise StorageFailed(f"{self._run_file} cannot be written: {error.strerror}") from error
        if is_synced:
            self._synced_at = time.monotonic()

    def _is_sync_due(self) -> bool:
        return time.monotonic() - self._synced_at > SAVE_EVERY_S

    def save_row(self, result: CaseResult) -> None:
        """Append the row of a case; a crash of the machine may lose at most one second of rows."""
        result.backend = self._context.backend
        self._append([result.to_record()], self._is_sync_due())

    def note(self, of: CaseSpec, number: int, samples: Samples) -> None:
        """Store a further pass of a case for `save_passes`, so that short passes do not wait for the disk."""
        record = samples.to_record(of.keeps_ranks)
        self._passes.append({"type": "pass", "case_id": of.case.id, "number": number, **record})

    def save_passes(self, are_due: bool = True) -> None:
        """Append the passes stored since the last call; unless `are_due`, at most once per second."""
        if are_due or time.monotonic() - self._saved_at > SAVE_EVERY_S:
            records, self._passes, self._saved_at = self._passes, [], time.monotonic()
            self._append(records, self._is_sync_due())


class Runner:
    """The measurement of cases on one rank; with `trace_paths`, traces are written after the rows."""

    def __init__(
        self,
        context: RankContext,
        agreement: Agreement,
        settings: Settings,
        rows: RowWriter,
        progress: ProgressWriter,
        stopwatch: Stopwatch,
        trace_paths: bool = False,
    ) -> None:
        self._context, self._agreement, self._rows = context, agreement, rows
        self._progress, self._stopwatch = progress, stopwatch
        clock = clock_of(context.device)
        shared = clock.shared_between_ranks and len(set(context.gather(os.uname().nodename))) == 1
        self._repeats = settings.iterations_per_sample
        self._waits_on_host = known_device(context.device.type).waits_on_host
        self._meter = Meter(RankGroup(context.control, context.device), clock, settings, shared, progress.tell_samples)
        self._plan = PassPlan(settings, 0, is_compared=False)
        self._turns: Sequence[CaseProgress] = ()
        self._num_begun = 0
        self._keeps_open = self._is_small = False
        self._room_bytes: float | None = None
        self._unseen: list[tuple[CaseProgress, int, StampSeries]] = []
        self._tracing: Tracing | None = None
        if trace_paths:
            self._tracing = Tracing(shared, on_progress=partial(progress.tell, "tracing"))

    def run(self, case_specs: Sequence[CaseSpec], plan: PassPlan, passes_done: Mapping[str, int]) -> None:
        """Measure the cases of one group: a first pass, which also checks the results, then further passes.

        Args:
            case_specs: the cases.
            plan: the number of passes, and the limits of a case per pass.
            passes_done: case id to the number of the next pass, for cases with a first pass in an earlier launch.

        Raises:
            UserError: the declaration of a case is not valid.
            RankFailed: only this rank failed, so the other ranks would wait forever.
            StorageFailed: a result could not be written.
        """
        self._plan = plan
        turns = [CaseProgress(self._num_begun + index, case_spec) for index, case_spec in enumerate(case_specs)]
        self._num_begun += len(turns)
        self._turns, self._is_small, self._room_bytes = turns, True, None
        new = [turn for turn in turns if turn.id not in passes_done]
        spent_s, started = Counter(self._stopwatch.spent_s), time.monotonic()
        turns = [turn for turn in turns if turn.id in passes_done or self._in_pass(turn, 0, self._first_pass_of)]
        self._turns = turns
        if plan.num_passes > 1:
            self._keeps_open = self._is_small or self._fit_in(turns)
        if new and plan.is_automatic:
            spent_s = Counter(self._stopwatch.spent_s) - spent_s
            opening_s = spent_s["set-up"] + spent_s["warm-up"]
            stay_open = self._keeps_open and all(turn.stays_open for turn in turns)
            saved_s = spent_s["checking"] + opening_s * (1 - 1 / REOPEN_EVERY if stay_open else 0)
            pass_s = time.monotonic() - started - saved_s + plan.share_limits(turns)
            # Eight passes of two samples take little longer than every case's minimum number of samples.
            stretch = math.inf if self._is_small else STRETCH
            plan.set_number(max(self._context.gather(pass_s * len(turns) / len(new))), stretch)
        number = max([1, *(passes_done.get(case_spec.case.id, 1) for case_spec in case_specs)])
        try:
            while turns and plan.goes_on(number, [turn.medians for turn in turns]):
                turns = self._further_pass(turns, number)
                number += 1
        finally:
            self._rows.save_passes()
        for turn in turns:
            turn.close()
        for turn in turns:
            self._trace(turn)

    def _further_pass(self, turns: list[CaseProgress], number: int) -> list[CaseProgress]:
        """Run one more pass over the cases; return the cases that may continue."""
        if not self._is_small:
            self._progress.tell("pass", number=number, num_passes=self._plan.num_passes, num_cases=len(turns))
        self._plan.share_limits(turns)
        places = self._plan.order(number, len(turns))
        alive = {place for place in places if self._in_pass(turns[place], number, self._turn_of)}
        if not self._is_small or self._plan.must_be_seen(number + 1):
            self._see()
        self._rows.save_passes(are_due=False)
        return [turn for place, turn in enumerate(turns) if place in alive]

    def _in_pass(self, turn: CaseProgress, number: int, measure: Callable[[CaseProgress, int], str]) -> bool:
        """Run one pass of a case, and save its row or failure; return whether the case may have another pass."""
        case = turn.case_spec.case
        self._progress.tell("case", index=turn.index, id=case.id, kind=case.kind, params=case.params, number=number)
        try:
            status = measure(turn, number)
        except (UserError, StorageFailed, RankFailed):
            raise
        except Exception as error:
            status = self._failed(turn, number, error)
        event = "done" if number == 0 else "turn"
        times = {"spent_s": self._stopwatch.spent_s, "measuring_s": self._stopwatch.measuring_s}
        self._progress.tell(event, id=case.id, status=status, **times)
        return status in ("ok", "wrong")

    def _failed(self, turn: CaseProgress, number: int, error: Exception) -> str:
        """Record a case that failed on every rank; return its status."""
        if isinstance(error, Unsupported):
            status, message = error.status, str(error)
            self._agreement.require_all_failed(f"{turn.index}-{number}", message)
        else:
            traceback.print_exc()
            status, message = "raised", one_line_and_place(error)
            self._require_harmless(f"{turn.index}-{number}", message)
        turn.close()
        if number == 0:
            self._rows.save_row(CaseResult(turn.case_spec.case, status, error=message))
        else:
            self._see()
            self._rows.save_passes()
            self._rows.save({"type": "pass", "case_id": turn.id, "number": number, "status": status, "error": message})
        return status

    def _require_harmless(self, what: str, message: str) -> None:
        """Check that all ranks raised and every group still works, because half of a collective may be pending.

        Otherwise raise RankFailed, so that this case breaks the launch, and not the next case.
        """
        self._agreement.require_all_failed(what, message)
        self._require_working_groups(message)

    def _require_working_groups(self, message: str) -> None:
        """Raise RankFailed on all ranks together if a group's all_reduce no longer gives correct sums."""
        try:
            works = [self._context.group_works(mesh_dim) for mesh_dim in self._context.mesh_dims]
            # A rank that detects this ends immediately: its next collective would match earlier collectives of other
            # ranks.
            if not all(works):
                raise RankFailed(message)
            self._context.any(False)
        except RuntimeError as error:
            raise RankFailed(message) from error

    def _require_in_step(self, turn: CaseProgress) -> None:
        """Raise RankFailed if ranks are out of step after the user's code, so that the failure is not in the next
        case."""
        if turn.case_spec.case.kind in RUN_BY_USERS:
            self._require_working_groups(OUT_OF_STEP)

    def _first_pass_of(self, turn: CaseProgress, number: int) -> str:
        """Sample and check a case and save its row; return its status."""
        opened_case = self._open(turn)
        samples = self._samples(turn, opened_case)
        with self._stopwatch.on("checking"):
            wrong = self._check(opened_case)
            self._require_in_step(turn)
        result = result_of(turn.case_spec, opened_case, samples, wrong)
        self._rows.save_row(result)
        turn.counters, own_bytes = result.counters, opened_case.held_bytes
        if own_bytes is None:
            own_bytes = (result.counters.get("parameter_bytes") or 0) * BYTES_PER_PARAMETER_BYTE
        # Shards may be uneven, but all ranks must decide alike.
        turn.held_bytes = max(self._context.gather(own_bytes))
        if self._plan.num_passes == 1 and self._waits_on_host:  # on a device, the profiler slows down later launches
            self._trace(turn)
        is_step = opened_case.held_bytes is None
        self._is_small = self._is_small and not is_step and turn.held_bytes * len(self._turns) <= SMALL_BYTES
        if self._plan.num_passes > 1 and (self._is_small or self._stays_beside_checks(turn, opened_case)):
            opened_case.pause()
        else:
            turn.close()
        return result.status

    def _stays_beside_checks(self, turn: CaseProgress, opened_case: OpenedCase) -> bool:
        """Return whether a case remains open during checks of other cases; False if cases share an allocator's peak."""
        so_far = [other_turn for other_turn in self._turns if other_turn.opened_case is not None]
        return self._waits_on_host and opened_case.stays_open and self._fit_in(so_far)

    def _fit_in(self, turns: Sequence[CaseProgress]) -> bool:
        """Return whether all these cases can remain open, in half of every rank's free memory at this group's first
        check. All ranks must call this together.
        """
        if self._room_bytes is None:
            self._room_bytes = min(self._context.gather(free_bytes(self._context.device))) / 2
        return sum(turn.held_bytes for turn in turns) <= self._room_bytes

    def _turn_of(self, turn: CaseProgress, number: int) -> str:
        """Run a further pass of a case; return its status."""
        if turn.opened_case is None or turn.is_due_for_reopening(number):
            opened_case = self._open(turn)
        else:
            opened_case = turn.opened_case
            opened_case.resume()
            with self._stopwatch.on("warm-up"):
                self._touch(turn, opened_case)
        if self._plan.is_automatic and turn.limits is not None:
            meter = self._meter.started_on(opened_case.starts_on)
            samples = meter.take(opened_case.call, opened_case.phases, turn.limits.max_samples)
            self._unseen.append((turn, number, samples))
        else:
            self._rows.note(turn.case_spec, number, self._samples(turn, opened_case))
        with self._stopwatch.on("checking"):
            self._require_in_step(turn)
        turn.has_settled = True
        if opened_case.stays_open and self._keeps_open:
            opened_case.pause()
        else:
            turn.close()
        return "ok"

    def _see(self) -> None:
        """Gather the samples since the last call. All ranks must call this together."""
        unseen, self._unseen = self._unseen, []
        if unseen:
            all_samples = self._meter.see([own_samples for _, _, own_samples in unseen], "passes")
            for (turn, number, _), samples in zip(unseen, all_samples, strict=True):
                self._count(turn, samples)
                self._rows.note(turn.case_spec, number, samples)

    def _open(self, turn: CaseProgress) -> OpenedCase:
        """Open a case and warm it up."""
        with self._stopwatch.on("set-up"):
            opened_case = turn.open()
        with self._stopwatch.on("warm-up"):
            if turn.limits is None or not opened_case.stays_open:
                meter = self._meter.started_on(opened_case.starts_on)
                estimate_s = meter.warm_up(opened_case.call, opened_case.warm_ups)
                if turn.limits is None:
                    turn.estimate_s = turn.shortest_s = turn.longest_s = estimate_s
                    turn.is_touched = opened_case.held_bytes is None
                    turn.limits = self._plan.limits(estimate_s, turn.is_touched, turn.case_spec.num_samples)
            elif opened_case.held_bytes is not None:
                self._touch(turn, opened_case)
            else:
                # This process has run the case before. Only the model is new, and the first iteration of the model
                # completes its set-up.
                for _ in range(max(self._meter.settings.warmup_iterations - 1, 1)):
                    self._meter.touch(opened_case.call)
        return opened_case

    def _touch(self, turn: CaseProgress, opened_case: OpenedCase) -> None:
        if turn.needs_touch(self._is_small, self._waits_on_host):
            self._meter.touch(opened_case.call)

    def _samples(self, turn: CaseProgress, opened_case: OpenedCase) -> Samples:
        meter = self._meter.started_on(opened_case.starts_on)
        samples = meter.measure(opened_case.call, opened_case.phases, turn.longest_s, turn.limits)
        if self._plan.is_automatic:
            samples.stop_reason = "passes"
        self._count(turn, samples)
        return samples

    def _count(self, turn: CaseProgress, samples: Samples) -> None:
        self._stopwatch.add("timed", sum(samples.samples_s) * self._repeats)
        turn.medians.append(median(samples.samples_s))

    def _trace(self, turn: CaseProgress) -> None:
        """Append a case's trace, or the reason for a missing trace; the launch continues if all ranks failed."""
        if self._tracing is None or turn.is_traced or turn.id.endswith(AGAIN):
            return
        turn.is_traced = True
        if (opened_case := turn.opened_case or turn.open()).trace is None:
            return turn.close()
        self._progress.tell("tracing")
        record, label = {"type": "trace", "case_id": turn.id}, f"trace-{turn.index}"
        try:
            with self._stopwatch.on("tracing"):
                self._rows.save(record | opened_case.trace.record(self._tracing, turn.counters))
        except StorageFailed:
            raise
        except Exception as error:
            traceback.print_exc()
            message = one_line(error)
            try:
                self._require_harmless(label, message)
            finally:
                self._rows.save(record | {"error": self._agreement.first_message(label, message)})
        finally:
            turn.close()

    def _check(self, opened_case: OpenedCase) -> str | None:
        message = opened_case.check()
        if not self._context.any(message is not None):
            return None
        by_rank = enumerate(self._context.gather(message))
        return next(f"rank {rank}: {message}" for rank, message in by_rank if message)
