"""Trace records to frames: one row a collective of a traced step on a rank, with what is derived from several rows."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from distbench.runs.header import SIMULATED
from distbench.runs.run_file import Record, Run
from distbench.spec.parallel import folded

if TYPE_CHECKING:
    import pandas as pd

ROOT, NOBODY = "(root)", "(unknown)"
TIMES = ("issued_s", "completed_s", "exposed_s")
WHAT = ("phase", "kind", "op", "backend_op", "mesh_dim", "dtype", "payload_bytes", "wire_bytes")
WHOSE = ("owner", "owner_known", "source", "redistribution", "explicit")
NEEDED = frozenset(("rank", "step", "group", "seq", "group_size", *WHAT, *WHOSE, *TIMES))
PHASE_COLUMNS = frozenset(("rank", "step", "phase", "start_s", "end_s"))
COMPUTING_COLUMNS = frozenset(("rank", "step", "start_s", "end_s"))


@dataclass(frozen=True)
class Trace:
    """What one step case communicates, with times."""

    run: Run
    record: Record  # its line of the run file
    case: Record | None  # the measured case; None where the run file has none
    rows: "pd.DataFrame"  # one row a collective, traced step and rank: the record's columns and those of `rows_of`
    phases: "pd.DataFrame"  # one row a phase, traced step and rank: `start_s`, `end_s`
    ranks: tuple[int, ...]  # every rank that took part; of a simulated step, those that were simulated
    steps: tuple[int, ...]
    computing: "pd.DataFrame | None" = None  # when operators run: `rank`, `step`, `start_s`, `end_s`; None: not known
    summed: "dict[tuple[str, ...], pd.DataFrame]" = field(
        default_factory=dict, init=False
    )  # what `costs` gave, by keys

    @property
    def case_id(self) -> str:
        """The case that was traced."""
        return str(self.record["case_id"])

    @property
    def name(self) -> str:
        """The case's id without its kind and shape: the scenario and, where there is one, the variant."""
        return self.case_id.split("/", 2)[-1]

    @property
    def is_simulated(self) -> bool:
        """Whether nobody measured it."""
        return self.record.get(SIMULATED) is True or self.run.is_simulated

    @property
    def is_timed(self) -> bool:
        """Whether it says when each phase began and ended; without that there is nothing to draw."""
        return not self.phases.empty and bool(self.phases[["start_s", "end_s"]].notna().all(axis=None))


def traces_of(runs: Sequence[Run]) -> tuple[list[Trace], list[str]]:
    """The traces of some runs in file order, and one sentence for each that failed or cannot be read."""
    traces, failed = [], []
    for run in runs:
        for record in run.traces:
            problem = _problem(record)
            try:
                traces += [] if problem else [_trace(run, record)]
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                problem = f"its record does not hold together ({error}); trace it anew"
            if problem:
                failed.append(f"{record['case_id']} has no trace: {problem}")
    return traces, failed


def _problem(record: Record) -> str | None:
    if record.get("error"):
        return str(record["error"])
    lacking = [*NEEDED.difference(record["columns"]), *PHASE_COLUMNS.difference(record["phases"]["columns"])]
    if computing := record.get("computing"):
        lacking += COMPUTING_COLUMNS.difference(computing["columns"])
    if lacking:
        return f"its record lacks {', '.join(sorted(lacking))}; trace it anew with this distbench"
    return None


def _trace(run: Run, record: Record) -> Trace:
    phases = _frame(record["phases"], ("start_s", "end_s"))
    rows = rows_of(record, phases)
    case = next((case for case in run.cases if case["case"]["id"] == record["case_id"]), None)
    is_simulated = record.get(SIMULATED) is True or run.is_simulated
    groups = () if is_simulated else rows["group"].unique()
    in_groups = {int(rank) for group in groups for rank in str(group).split(",") if rank.isdigit()}
    ranks = {*rows["rank"].tolist(), *phases["rank"].tolist(), *in_groups}
    steps = {*rows["step"].tolist(), *phases["step"].tolist()}
    computing = _frame(table, ("start_s", "end_s")) if (table := record.get("computing")) else None
    return Trace(run, record, case, rows, phases, tuple(sorted(ranks)), tuple(sorted(steps)), computing)


def rows_of(record: Record, phases: "pd.DataFrame") -> "pd.DataFrame":
    """The record's rows with what follows from them; times are in seconds, nan where they are not known.

    Added:
        duration_s: from issue to completion on this rank, waiting for the slowest rank included.
        straggler_s: duration minus the shortest of the group's ranks, matched by (step, group, seq): how long this
            rank waited for others. nan where the collective is not timed on every rank of its group, or simulated.
        rank_step_s: how long the step took on this rank.
        share_of_step: duration over that.
        path_owner: the owner with layers folded; "(root)" for the model itself, "(unknown)" where nobody is known.
    """
    rows = _frame(record, TIMES)
    rows["duration_s"] = rows["completed_s"] - rows["issued_s"]
    same = rows.groupby(["step", "group", "seq"], sort=False)["duration_s"]
    is_whole = (same.transform("count") == rows["group_size"]) & (record.get(SIMULATED) is not True)
    rows["straggler_s"] = (rows["duration_s"] - same.transform("min")).where(is_whole)
    rows["rank_step_s"] = _rank_steps(rows, phases)
    rows["share_of_step"] = rows["duration_s"] / rows["rank_step_s"]
    owners = zip(rows["owner"], rows["owner_known"], strict=True)
    rows["path_owner"] = [(folded(str(owner)) or ROOT) if known else NOBODY for owner, known in owners]
    return rows


def _rank_steps(rows: "pd.DataFrame", phases: "pd.DataFrame") -> "pd.Series[float]":
    """Each row's step on its own rank: from its first phase's start to its last one's end."""
    spans = phases.groupby(["rank", "step"]).agg(start_s=("start_s", "min"), end_s=("end_s", "max"))
    lengths = spans["end_s"] - spans["start_s"]
    joined = rows[["rank", "step"]].join(lengths.rename("length"), on=["rank", "step"])["length"]
    return joined.where(joined > 0)


def _frame(table: dict[str, Any], times: Sequence[str]) -> "pd.DataFrame":
    import pandas as pd

    frame = pd.DataFrame(table["rows"], columns=table["columns"])
    for name in times:
        frame[name] = pd.to_numeric(frame[name], errors="coerce").astype("float64")
    return frame
