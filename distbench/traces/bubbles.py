"""The bubbles of a traced pipeline: when a rank neither works on a stage nor communicates."""

from collections.abc import Iterator

from distbench.compare.medians import median
from distbench.render.units import percent_text
from distbench.runs.frame import records_of
from distbench.spec.printable import count_text
from distbench.traces.records import Trace
from distbench.traces.spans import Stretch, left_of

SCHEDULE = "schedule"  # the phase in which forward and backward take turns


def bubble_shares(trace: Trace) -> dict[int, float]:
    """Of each rank, the share of forward and backward that is bubble: the median over the traced steps.

    Forward and backward last from their first beginning on any rank to their last end, or on each rank its own where
    ranks share no clock. In a bubble a rank neither works on a stage (its forward, loss, backward or reduction of
    gradients, with what FSDP and TP communicate in them) nor has a message or collective under way. A message is under
    way from when both ends asked for it; what came before was waiting. Of a simulated step its record says them, as
    shares of the step: what waits for the host is no bubble there.
    """
    if (given := _simulated(trace)) is not None:
        return given
    found: dict[int, list[float]] = {}
    for rank, whole, busy in _ranks_of_steps(trace):
        free = sum(end - start for start, end in left_of(whole, busy))
        found.setdefault(rank, []).append(free / (whole[1] - whole[0]))
    return {rank: median(shares) for rank, shares in sorted(found.items())}


def _simulated(trace: Trace) -> dict[int, float] | None:
    shares = (trace.record.get("pipeline") or {}).get("bubble_shares")
    return None if shares is None else dict(zip(trace.ranks, shares, strict=False))


def _ranks_of_steps(trace: Trace) -> Iterator[tuple[int, Stretch, list[Stretch]]]:
    """(rank, its forward and backward, when it was busy) of each step."""
    if trace.computing is None:
        return
    phases = trace.phases[trace.phases["phase"] == SCHEDULE]
    timed = trace.rows[trace.rows["duration_s"].notna()]
    begun_s = timed["issued_s"] + timed["straggler_s"].fillna(0.0)
    moved = timed.assign(start_s=begun_s, end_s=timed["completed_s"])
    for step, of_step in phases.groupby("step"):
        all_ranks = of_step["start_s"].min(), of_step["end_s"].max()
        for row in records_of(of_step):
            whole = all_ranks if trace.record.get("clock_shared") else (row["start_s"], row["end_s"])
            busy: list[Stretch] = []
            for table in (trace.computing, moved):
                own = table[(table["rank"] == row["rank"]) & (table["step"] == step)]
                busy += zip(own["start_s"].tolist(), own["end_s"].tolist(), strict=True)
            if whole[1] > whole[0]:
                yield int(row["rank"]), whole, busy


def bubbles_text(trace: Trace) -> str | None:
    """The same as a sentence, beside what the schedule has at least; None where it is no pipeline."""
    pipeline, shares = trace.record.get("pipeline"), bubble_shares(trace)
    if not pipeline or not shares:
        return None
    least, most = min(shares, key=lambda rank: shares[rank]), max(shares, key=lambda rank: shares[rank])
    mean = sum(shares.values()) / len(shares)
    of = "the step" if _simulated(trace) is not None else "forward and backward"
    text = f"bubbles are {percent_text(mean)} of {of} on a rank"
    text += f" (rank {least} {percent_text(shares[least])}, rank {most} {percent_text(shares[most])})"
    at_least = pipeline.get("least_idle_share")
    parts = count_text(pipeline["microbatches"], "micro-batch", "micro-batches")
    of_schedule = f"{pipeline['schedule']} of {count_text(pipeline['num_stages'], 'stage')} and {parts}"
    if at_least is None:
        return f"{text}; {of_schedule} has no least share that holds for all models"
    return f"{text}; {of_schedule} leaves {percent_text(at_least)} where all stages take as long"
