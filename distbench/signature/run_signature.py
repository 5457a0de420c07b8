"""What the traced or simulated steps of a run file communicate, as the signature that `distbench signature` writes."""

from pathlib import Path

from distbench.runs.run_file import Record, read_run
from distbench.signature.signature_file import Signature, counted, load
from distbench.spec.errors import UserError

RUN_SUFFIX = ".jsonl"


def load_either(file: Path) -> Signature:
    """A signature file, or by its suffix a run file; UserError where it cannot be read, is neither, or has no trace."""
    return of_run_file(file) if file.suffix == RUN_SUFFIX else load(file)


def of_run_file(file: Path) -> Signature:
    """The signature of a run's traced steps: their lowest rank's first step each."""
    run = read_run(file)
    traces = {str(trace["case_id"]): _collectives(trace) for trace in run.traces if not trace.get("error")}
    if not traces:
        how = "trace a step with distbench run SCENARIO --trace-paths, or simulate it"
        raise UserError(f"run file {file} holds no trace of a step, so nothing of what it communicates; {how}")
    try:
        cases = {case: counted(rows) for case, rows in traces.items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"run file {file}: a trace lacks {error}; trace it anew with this distbench") from error
    return Signature(
        run.scenario, run.about.mesh or {}, run.about.environment.torch or "unknown", cases, has_peaks=False
    )


def _collectives(trace: Record) -> list[Record]:
    rows = [dict(zip(trace["columns"], row, strict=True)) for row in trace["rows"]]
    first = min(((row.get("rank", 0), row.get("step", 0)) for row in rows), default=(0, 0))
    own = [row for row in rows if (row.get("rank", 0), row.get("step", 0)) == first]
    # A signature has no null: what is in no redistribution is in an empty one.
    return [{**row, "owner": row["owner"] or "", "redistribution": row["redistribution"] or ""} for row in own]
