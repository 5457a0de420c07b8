"""The rows of a trace record: every rank's collectives and phases of every traced step."""

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from distbench.runs.run_file import busbw_factor
from distbench.worker.rank.rank_context import RankContext
from distbench.worker.torch_internals import BACKEND_OPS, PEERS
from distbench.worker.tracing.communication import Communication

COMPUTING_COLUMNS = ("rank", "step", "start_s", "end_s")
PHASE_COLUMNS = ("rank", "step", "phase", "start_s", "end_s")
COLUMNS = (
    *("rank", "step", "phase", "kind", "op", "backend_op", "mesh_dim", "group", "seq", "group_size", "dtype"),
    *("payload_bytes", "wire_bytes", "owner", "owner_known", "source", "redistribution", "explicit"),
    *("issued_s", "completed_s", "exposed_s"),
)


class TracedRow(NamedTuple):
    """One collective of one traced step; moments are seconds of this rank's clock, None where not taken."""

    what: Communication
    issued_s: float | None = None
    completed_s: float | None = None
    exposed_s: float | None = None


class Traced(NamedTuple):
    """One traced step of one rank: when it began, when each phase ended, its CPU seconds, its collectives, and of a
    pipeline when it worked on its stages."""

    start_s: float
    ends_s: list[float]
    cpu_s: float
    rows: list[TracedRow]
    working: Sequence[tuple[float, float]] = ()


def tables(steps: Sequence[Traced], phases: Sequence[str], context: RankContext, clock_shared: bool) -> dict[str, Any]:
    """All ranks' steps, phases and rows, as the trace record has them."""
    by_rank: list[Sequence[Traced]] = context.gather(steps)
    lengths, phase_rows, rows, working = [], [], [], []
    for number, ranks in enumerate(zip(*by_rank, strict=True)):
        lengths += [max(one.ends_s[-1] - one.start_s for one in ranks)] if all(one.ends_s for one in ranks) else []
        last_in = max(one.start_s for one in ranks)
        for rank, one in enumerate(ranks):
            zero = last_in if clock_shared else one.start_s
            starts = [one.start_s, *one.ends_s]
            phase_rows += [
                [rank, number, phase, begun - zero, ended - zero]
                for phase, begun, ended in zip(phases, starts, one.ends_s, strict=False)
            ]
            working += [[rank, number, begun - zero, ended - zero] for begun, ended in one.working]
            rows += _rows_of(rank, number, one.rows, zero, context.backend)
    return {
        "num_steps": len(steps),
        # Of each step, or of none: who reads them takes the n-th for the n-th step's.
        "steps_s": lengths if len(lengths) == len(steps) else [],
        "phases": {"columns": PHASE_COLUMNS, "rows": phase_rows},
        "columns": COLUMNS,
        "rows": rows,
        **({"computing": {"columns": COMPUTING_COLUMNS, "rows": working}} if working else {}),
    }


def _rows_of(rank: int, step: int, rows: Sequence[TracedRow], zero: float, backend: str) -> list[list[Any]]:
    seen: Counter[str] = Counter()
    found = []
    for what, issued_s, completed_s, exposed_s in rows:
        values = {
            **vars(what),
            "rank": rank,
            "step": step,
            "seq": seen[what.group],
            "backend_op": BACKEND_OPS.get((backend, what.kind), what.kind),
            "wire_bytes": wire_bytes_of(what),
            "issued_s": None if issued_s is None else issued_s - zero,
            "completed_s": None if completed_s is None else completed_s - zero,
            "exposed_s": exposed_s,
        }
        seen[what.group] += 1
        found.append([values[name] for name in COLUMNS])
    return found


def wire_bytes_of(what: Communication) -> int | None:
    """Bytes that one rank must send, by the algorithm's own count; None for what nccl-tests knows no count of. Who
    receives a message sends nothing."""
    if what.kind in PEERS:
        return what.payload_bytes if what.kind == "send" else 0
    try:
        return round(what.payload_bytes * busbw_factor(what.kind, what.group_size))
    except ValueError:
        return None
