"""The run file: what a run wrote, one JSON line at a time, and every statistic, derived on read.

Line 1 is the run (schema_version, run_id, job, environment), then one line a case, written as its first
pass ends, then one line a case for each further pass, traces where they were asked for, and a footer. A file with no
footer is an interrupted run; every case in it still counts, with the passes it has.

History of schema_version:
    1: first version.
    2: lines of further passes; in a case that was read, `passes` has the number of each pass and its samples. A step's
       `batch_size`; its `num_tokens` only where the scenario gives them (before, always: batch x the next dimension).
       Since then, read by all: a header, case or trace that says `simulated` is of `distbench simulate`.
"""

import gc
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path

from distbench.runs.header import Header, header_of
from distbench.runs.record_checks import Record
from distbench.runs.record_reader import RecordReader
from distbench.spec.errors import UserError

SCHEMA_VERSION = 2
AGAIN = "(baseline again)"  # ends the id and the variant of a baseline that is measured a second time
DTYPE_BYTES = {"f64": 8, "f32": 4, "bf16": 2, "f16": 2}


def _without_guessed_tokens(record: Record) -> Record:
    case = record.get("case")
    if not (isinstance(case, dict) and case.get("kind") == "step" and isinstance(params := case.get("params"), dict)):
        return record
    shape = params.get("shape")
    batch = {"batch_size": shape[0]} if isinstance(shape, list) and shape else {}
    kept = {name: value for name, value in params.items() if name != "num_tokens"}
    return {**record, "case": {**case, "params": kept | batch}}


UPGRADES: dict[int, Callable[[Record], Record]] = {1: _without_guessed_tokens}


@dataclass(frozen=True)
class Case:
    """One thing measured; `params` tell it apart, as columns for a report."""

    id: str  # stable join key, kind/dtype[shape]/what/how
    kind: str  # "collective", "redistribute", "calibrate", "operator", "compute", "step" or "call"
    params: Record = field(default_factory=dict)


@dataclass
class CaseResult:
    """What one case gave.

    Args:
        status: one of STATUSES.
        samples_s: seconds of each sample on its slowest rank.
        phases_s: phase name to seconds of each sample on that phase's slowest rank.
        payload_bytes: S as nccl-tests has it for a collective or a calibrated step; a redistribution's global tensor.
        wire_bytes: bytes that one rank must send, by the algorithm's own count.
        group_size: ranks in one group.
        mesh_dim: mesh dim (or dims, joined by "x") whose groups took part.
        backend_op: what the backend really runs for it.
        stop_reason: what ended sampling: "steady" ("precise" in older files), "max_samples", "max_case_s", or "passes".
        counters: any other number or short text of the case.
        error: one sentence, when status is not ok.
    """

    case: Case
    status: str
    samples_s: list[float] = field(default_factory=list)
    phases_s: dict[str, list[float]] = field(default_factory=dict)
    rank_median_s: list[float] = field(default_factory=list)
    payload_bytes: int | None = None
    wire_bytes: int | None = None
    group_size: int | None = None
    mesh_dim: str | None = None
    backend: str | None = None
    backend_op: str | None = None
    stop_reason: str | None = None
    counters: Record = field(default_factory=dict)
    error: str | None = None

    def to_record(self) -> Record:
        """As one JSON line's data."""
        return {"type": "case", **asdict(self)}


@dataclass
class Run:
    """One run file, read.

    Args:
        header: its first line, as it stands; `about` has it typed.
        cases: one record a case, in file order, each with the fields of CaseResult over all its passes, and `passes`:
            (number of a pass, its samples), in order.
        footer: its last line, or None when the run was interrupted.
        warnings: sentences about lines that could not be read.
        traces: one record a traced step, in file order: `case_id`, and `error` or the fields of `worker.tracing`.
    """

    path: Path
    header: Record
    cases: list[Record]
    footer: Record | None
    warnings: list[str]
    traces: list[Record] = field(default_factory=list)

    @cached_property
    def about(self) -> Header:
        """The header, with a default in the place of whatever is missing or of another type."""
        return header_of(self.header)

    @property
    def is_simulated(self) -> bool:
        """Whether nothing in it was measured."""
        return bool(self.about.simulated)

    @property
    def scenario(self) -> str:
        """The scenario's name; the file's where the header does not say."""
        return self.about.scenario or self.path.stem


def append(path: Path, *records: Record, is_synced: bool = True) -> None:
    """Append records, a line each, and return when they are on the disk, or when the kernel has them: then only a
    machine that stops can lose them, and the next synced ones take them along.

    A line that a killed writer left unfinished is closed first, so that each record stands on a line of its own. Where
    an OSError says that the disk takes no more, the file is what it was before.
    """
    line = "".join(json.dumps(record, separators=(",", ":"), allow_nan=False) + "\n" for record in records)
    # Without a buffer: what is left of one is written when the file is closed, after it was cut.
    with path.open("ab+", buffering=0) as file:
        if end := file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                line = "\n" + line
        data = line.encode()
        try:
            while data:
                data = data[file.write(data) :]
            if is_synced:
                os.fsync(file.fileno())
        except OSError:
            # The room that half a record took is what the footer needs.
            file.truncate(end)
            if not end:
                path.unlink()
            raise


def read_run(path: Path) -> Run:
    """Read one run file, whatever state it was left in, and bring it to the present schema.

    Raises:
        UserError: it is no run file, its header is wrong, or it holds two; other bad lines become warnings.
    """
    warnings: list[str] = []
    records = list(RecordReader(path, warnings).records())
    version = records[0].get("schema_version")
    if type(version) is not int or not 1 <= version <= SCHEMA_VERSION:
        known = f"this distbench reads 1 up to {SCHEMA_VERSION}"
        raise UserError(f"run file {path} has schema version {version}, {known}; update distbench")
    for step in range(version, SCHEMA_VERSION):
        records = [UPGRADES[step](record) for record in records]
    cases, passes, traces, footers = (
        [record for record in records if record.get("type") == kind] for kind in ("case", "pass", "trace", "footer")
    )
    cases = [_with_passes(case) for case in cases]
    _add_passes(cases, passes)
    if not footers:
        finished = f"its {len(cases)} finished cases are shown"
        warnings.append(f"{path.name} has no footer: the run was interrupted; {finished}")
    return Run(path, records[0], cases, footers[-1] if footers else None, warnings, traces)


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """For reading many records: they hold no cycles, and looking for some again and again doubles the time it takes."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _with_passes(case: Record) -> Record:
    return {**case, "passes": [(0, len(case.get("samples_s") or ()))]}


def _add_passes(cases: list[Record], passes: list[Record]) -> None:
    """Put further passes into the cases that they are of; the last case of an id is the one that goes on."""
    by_id = {case["case"]["id"]: case for case in cases}
    for record in passes:
        if (case := by_id.get(record["case_id"])) is None:
            continue
        if "error" in record:
            case.update(status=record["status"], error=record["error"])
            continue
        if "rank_median_s" in record:
            case.setdefault("ranks_by_pass", [case.get("rank_median_s") or []]).append(record["rank_median_s"])
        case["samples_s"] = [*(case.get("samples_s") or ()), *record["samples_s"]]
        phases = known if isinstance(known := case.get("phases_s"), dict) else {}
        case["phases_s"] = {name: [*phases.get(name, ()), *more] for name, more in record["phases_s"].items()}
        case["passes"].append((record["number"], len(record["samples_s"])))
        case["stop_reason"] = record.get("stop_reason", case.get("stop_reason"))


def busbw_factor(op: str, group_size: int) -> float:
    """What algbw = S/t is multiplied by to give busbw, as nccl-tests' PERFORMANCE.md derives it.

    `op` is one of COLLECTIVE_OPS or "send_recv", else ValueError; `group_size` is of the group that ran it.
    """
    n = group_size
    if op == "all_reduce":
        return 2 * (n - 1) / n
    if op in ("all_gather", "reduce_scatter", "all_to_all"):
        return (n - 1) / n
    if op in ("broadcast", "send_recv"):
        return 1.0
    raise ValueError(f"no busbw factor is known for {op!r}")
