"""A sweep by measurement. Rounds measure every mesh, then changes of the fastest plan, then the best plans again. A
folder has the rounds' files.

All candidates of a round are variants of one job, each on its own mesh of the same ranks, and all rounds share one
launch. The first rounds only screen; the last round measures the recommended plan and the next best in the same passes.
The number of screened changes depends on the time of the first round.
"""

import contextlib
import json
import math
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from distbench.launch import MODULE, RankProcesses, Request, jobs_of, launch_on
from distbench.launch.display import display_for
from distbench.records.dataframe import PASSES, frame_of, measured_of, records_of
from distbench.records.machine import machine_name
from distbench.records.run_file import read_run
from distbench.report.trace_rows import traces_of
from distbench.search.space import Candidate, Setup, Space
from distbench.search.sweep_child import code_of_file, digest
from distbench.search.sweep_result import Limits, RankedPlan, SweepState, judged
from distbench.spec import Job, Settings
from distbench.spec.errors import UserError
from distbench.spec.file_io import write_whole
from distbench.spec.job import MESH, variant_text
from distbench.spec.json_decoder import Format, Name, read_record
from distbench.spec.printable_text import count_text

FILE = "sweep.json"
KEPT_SHARE, NUM_FINAL = 3, 4  # One plan of three continues. The last round has at most this many plans.
# The share of the budget for the first round, and of the remaining budget for the last round.
SCREEN_SHARE, FINAL_BUDGET_SHARE = 0.5, 0.5
ROUNDS, LEAST_FINAL_S = ("every mesh", "single changes", "the best again", "last round"), 2.0
LEAST_CHANGES, SOONEST = 2, ("plan.mixed_precision", "plan.reshard_after_forward")
# Time of a plan of the last round in addition to timed steps (open, check, trace), in screened plans.
FINAL_IN_SCREENED = 3
SCREENING = Settings(warmup_iterations=1, min_samples=2, max_samples=2, passes=1, check="none")


class SweepFile(msgspec.Struct):
    """The identity of a folder's sweep: scenario, its file, number of ranks."""

    scenario: Name
    file: Name
    world: int


class RoundFile(msgspec.Struct):
    """The run file of a round's plans; `code` is a digest of all inputs of the run file except labels."""

    run_file: Name
    labels: list[str]
    code: Name


def require_folder(out: Path, setup: Setup, resume: bool) -> None:
    """Reject a folder of another sweep, and with --reuse a folder without a sweep.

    Raises:
        UserError: the folder is rejected, and left unchanged.
    """
    file = out / FILE
    if not file.is_file():
        if resume:
            raise UserError(
                f"{out} contains no sweep for --reuse; give the --results of the earlier sweep, or leave --reuse out"
            )
        return
    sweep = read_record(file, SweepFile, Format("sweep file", "give another --results"))
    if sweep != _identity(setup):
        description = f"{sweep.scenario} ({sweep.file}) on {count_text(sweep.world, 'rank')}"
        raise UserError(
            f"--results {out} contains a sweep of {description}; give another --results, to avoid overwriting it"
        )


def claim_folder(out: Path, setup: Setup) -> None:
    """Write the sweep's identity into the folder. Raise UserError if the folder cannot be written."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        write_whole(out / FILE, json.dumps(msgspec.structs.asdict(_identity(setup))))
    except OSError as error:
        raise UserError(f"--results {out} cannot be written ({error.strerror}); give another folder") from error


def _identity(setup: Setup) -> SweepFile:
    return SweepFile(setup.entry.name, str(setup.entry.file.resolve()), setup.world)


def keep_round(file: Path, run_file: Path, labels: Sequence[str], code: str) -> None:
    """Write a `RoundFile`."""
    write_whole(file, json.dumps(msgspec.structs.asdict(RoundFile(str(run_file), [*labels], code))))


def read_round(file: Path, code: str) -> tuple[Path, list[str]] | None:
    """Return (run file, labels) of a round; None if the round does not exist or has other code.

    Raises:
        UserError: the file is damaged.
    """
    if not file.is_file():
        return None
    record = read_record(
        file, RoundFile, Format("round file", "delete this file, then --reuse measures the round again")
    )
    return (Path(record.run_file), record.labels) if record.code == code else None


def changes_of_best(space: Space, best: Sequence[Candidate]) -> list[Candidate]:
    """Return the single changes of the plan as written on each mesh, the fastest mesh first; on each mesh, the changes
    with the largest effect on compute and communication come first.
    """

    def lateness(changed: Candidate) -> int:
        return min((SOONEST.index(name) for name, _ in changed.choices if name in SOONEST), default=len(SOONEST))

    plain = [candidate for candidate in best if not candidate.choices]
    return [changed for candidate in plain for changed in sorted(space.neighbours(candidate), key=lateness)]


def num_affordable(each_s: float, left_s: float, most: int) -> int:
    """Return the number of changes to screen. The second round, with a third of all plans, takes about as long as
    screening.

    Args:
        each_s: seconds of screening a plan; 0 if unknown.
        left_s: seconds for screening and the second round.
    """
    return max(min(most, max(LEAST_CHANGES, int(left_s / 2 / each_s)) if each_s else most), 0)


def combined(ranked: Sequence[RankedPlan], plans: Mapping[Candidate, RankedPlan]) -> list[Candidate]:
    """Return a plan with the two best changes of the best mesh, if each is faster than the plan as written."""
    if not ranked:
        return []
    sizes = ranked[0].candidate.sizes
    written_plan = plans.get(Candidate(sizes))
    different: dict[str, Any] = {}
    for plan in ranked:
        is_single = plan.candidate.sizes == sizes and len(plan.candidate.choices) == 1
        if is_single and (written_plan is None or plan.step_s < written_plan.step_s):
            different.setdefault(*plan.candidate.choices[0])
    combination = Candidate(sizes, tuple(sorted(list(different.items())[:2])))
    return [combination] if len(different) > 1 and combination not in plans else []


def with_written(
    kept: Sequence[Candidate], as_written: Candidate | None, measured: Container[Candidate]
) -> list[Candidate]:
    """Return the best plans; the plan as written, if it works, replaces the last plan if there are more than two."""
    if as_written is None or as_written in kept or as_written not in measured:
        return [*kept]
    return [*(kept[:-1] if len(kept) > 2 else kept), as_written]


class Rounds:
    """The rounds of one launch; `state` has the measurements, also after an interrupt.

    Args:
        out: folder of run files, and of the state that a resumed sweep continues from.
    """

    def __init__(
        self, setup: Setup, limits: Limits, state: SweepState, *, out: Path, resume: bool, quiet: bool
    ) -> None:
        self._setup, self._limits, self._state = setup, limits, state
        self._out, self._resume, self._quiet = out, resume, quiet
        state.num_reused = 0 if resume else None
        self._jobs = [self._job() for _ in ROUNDS]
        self._spent_s = 0.0
        self._code = digest(
            [*code_of_file(setup.entry.file), setup.entry.name, machine_name(), sorted(setup.base.items())]
        )

    def run(
        self, starting: Sequence[Candidate], changes: Callable[[Sequence[Candidate], int], Sequence[Candidate]]
    ) -> None:
        """Run all rounds, or the rounds before an interrupt.

        Args:
            changes: maps candidates, the fastest first, and a limit to the candidates to try next.
        """
        state = self._state
        with self._kept_if_interrupted(), RankProcesses(self._jobs, None, MODULE) as ranks:
            self._round(ranks, 0, starting, SCREENING)
            if not state.interrupted and (more := changes(self._best(len(starting)), self._num_changes(len(starting)))):
                self._round(ranks, 1, more, SCREENING)
            kept = self._best(max(NUM_FINAL, math.ceil(len(state.measured) / KEPT_SHARE)))
            has_room = len(state.measured) < self._limits.max_plans
            more = combined(state.ranked_measured, state.measured) if has_room else []
            if len(kept) <= NUM_FINAL:
                kept = [*more, *kept]
            elif not state.interrupted:
                again = [*kept, *more]
                self._round(ranks, 2, again, replace(SCREENING, min_samples=6, max_samples=6, passes=3))
                kept = [candidate for candidate in self._best() if candidate in again][:NUM_FINAL]
            if not state.interrupted and kept:
                # The last round has as many plans as the time allows, and at least two, for a verdict.
                each_s = self._final_s()
                count = max(2, min(NUM_FINAL, int(self._limits.left_s() / each_s))) if each_s else NUM_FINAL
                self._last_round(ranks, with_written(kept[:count], state.written, state.measured))

    def run_last(self, kept: Sequence[Candidate]) -> None:
        """Run the last round only, with given candidates."""
        with self._kept_if_interrupted(), RankProcesses(self._jobs[-1:], None, MODULE) as ranks:
            self._last_round(ranks, kept)

    @contextlib.contextmanager
    def _kept_if_interrupted(self) -> Iterator[None]:
        """Keep the results if an interrupt comes between two rounds."""
        try:
            yield
        except KeyboardInterrupt:
            self._state.interrupted = True

    def _last_round(self, ranks: RankProcesses, kept: Sequence[Candidate]) -> None:
        left_s = self._limits.left_s()
        budget_s = max(min(FINAL_BUDGET_SHARE * left_s, left_s - len(kept) * self._final_s()), LEAST_FINAL_S)
        self._round(ranks, len(ROUNDS) - 1, kept, replace(Settings(), check="loss").with_budget(budget_s))

    def _num_changes(self, num_measured: int) -> int:
        """Return as many changes as the time allows, or as in the resumed sweep."""
        if before := self._before(1):
            return len(before[1])
        each_s = self._spent_s / max(num_measured, 1)
        return num_affordable(each_s, self._limits.left_s(SCREEN_SHARE), self._limits.max_plans - num_measured)

    def _final_s(self) -> float:
        """Return the seconds of a plan in the last round in addition to its timed steps; 0 if unknown."""
        return FINAL_IN_SCREENED * self._spent_s / max(len(self._state.measured), 1)

    def _best(self, count: int | None = None) -> list[Candidate]:
        return [plan.candidate for plan in self._state.fastest_measured[:count]]

    def _job(self) -> Job:
        setup = self._setup
        target = f"{setup.entry.file}::{setup.entry.name}"
        out, started_at = self._out / "runs", time.time()
        (job,) = jobs_of(Request((target,), mesh=setup.mesh, quick=setup.quick, out=out, started_at=started_at), None)
        return job

    def _round(self, ranks: RankProcesses, number: int, candidates: Sequence[Candidate], settings: Settings) -> None:
        state = self._state
        variants = [candidate.variant(self._setup.base) for candidate in candidates]
        axes = list(dict.fromkeys([MESH, *(name for varied in candidates for name, _ in varied.choices)]))
        is_final = number == len(ROUNDS) - 1
        job = replace(self._jobs[number], variants=variants, axes=axes, settings=settings, profile=None, note="")
        job = replace(job, trace_paths=is_final)
        labels = {variant_text(variant, axes): varied for variant, varied in zip(variants, candidates, strict=True)}
        before = self._before(number)
        run_file = before[0] if labels and before and before[1] == [*labels] and before[0].is_file() else None
        if state.num_reused is not None:
            state.num_reused += run_file is not None
        if run_file is None:
            # A separate display, because each round counts its cases from 0.
            with display_for(f"{job.scenario}, {ROUNDS[number]}", self._quiet) as display:
                outcome = launch_on(ranks, job, display)
            state.interrupted = outcome.status == "interrupted"
            if outcome.user_can_fix:
                raise UserError(outcome.message)
            run_file = Path(job.run_file)
            if outcome.status == "complete":
                keep_round(self._round_file(number), run_file, [*labels], self._code)
        if run_file.is_file():
            state.run_files.append(str(run_file))
            self._take_in(run_file, labels, is_final)

    def _before(self, number: int) -> tuple[Path, list[str]] | None:
        """Return (run file, labels) of a round of the resumed sweep."""
        return read_round(self._round_file(number), self._code) if self._resume else None

    def _round_file(self, number: int) -> Path:
        return self._out / f"round-{number + 1}.json"

    def _take_in(self, run_file: Path, labels: Mapping[str, Candidate], is_final: bool) -> None:
        run, state = read_run(run_file), self._state
        self._spent_s += sum((run.footer or {}).get("spent_s", {}).values())
        for record in run.cases:
            candidate = labels.get(str(record["case"]["params"].get("variant")))
            is_cut = state.interrupted and record["status"] == "aborted"
            if candidate is not None and record["status"] != "ok" and not is_cut:
                state.left_out[candidate] = f"{record['status']}: {record.get('error')}"
                state.measured.pop(candidate, None)
        rows = measured_of(frame_of([run]), "step")
        rows = rows[rows["variant"].isin(list(labels))]
        plans = [_plan(row, labels[str(row["variant"])]) for row in records_of(rows)]
        state.measured |= {plan.candidate: plan for plan in plans}
        if is_final and plans:
            state.final = judged(plans, rows[PASSES].tolist())
            traces = {
                labels.get(str(trace.case["case"]["params"].get("variant"))): trace
                for trace in traces_of([run])[0]
                if trace.case
            }
            state.traces = {candidate: trace for candidate, trace in traces.items() if candidate is not None}


def _plan(row: Mapping[Any, Any], candidate: Candidate) -> RankedPlan:
    memory_bytes = float(row["peak_bytes"]) if math.isfinite(row["peak_bytes"]) else None
    rate = row["tokens_per_s"] if math.isfinite(row["tokens_per_s"]) else row["samples_per_s"]
    return RankedPlan(candidate, float(row["median_s"]), float(rate), memory_bytes, "measured", True)
