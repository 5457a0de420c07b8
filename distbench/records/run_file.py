"""The run file: its lines, its header and its JSON schema.

Line 1 is the run (schema_version, run_id, job, environment). The next lines are a line per case after its first pass, a
line per case and further pass, traces if requested, and a footer. A file without a footer is an interrupted run, whose
cases count with their finished passes.

History of schema_version:
    1: first version.
    2: lines of further passes; in a case that was read, `passes` has the number of each pass and its samples. A step's
       `batch_size`; its `num_tokens` only if the scenario has a number of tokens (in version 1 always batch x the next
       dimension). Added later, readable by all versions: a header, case or trace with `simulated` is of `distbench
       simulate`.
"""

import codecs
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import msgspec.json
from msgspec import Meta, Struct, defstruct

from distbench.spec.devices import DRIVER_FIELDS, first_backend_class
from distbench.spec.errors import UserError
from distbench.spec.file_io import opened, parse_json, shown
from distbench.spec.json_decoder import (
    Amount,
    Bytes,
    Count,
    Date,
    Duration,
    Moment,
    Name,
    Size,
    Time,
    decode,
    is_of_type,
    optional,
)
from distbench.spec.mesh import Mesh, format_mesh

# Types of a run file's lines. Older files do not have all fields. The JSON schema contains the docstrings of these
# types.

# Columns of a trace: a row per collective, per phase, and per span of computing on a rank.
TRACE_COLUMNS = (
    *("rank", "step", "phase", "kind", "op", "backend_op", "mesh_dim", "group", "seq", "group_size", "dtype"),
    *("payload_bytes", "wire_bytes", "owner", "owner_known", "source", "redistribution", "explicit"),
    *("issued_s", "completed_s", "exposed_s"),
)
PHASE_COLUMNS = ("rank", "step", "phase", "start_s", "end_s")
COMPUTING_COLUMNS = ("rank", "step", "start_s", "end_s")
Status = Literal["ok", "wrong", "raised", "timeout", "aborted", "skipped", "unsupported"]
STATUSES: tuple[str, ...] = get_args(Status)
MAX_PASSES = 100_000  # larger numbers of a pass are not valid
PassNumber = Annotated[int, Meta(ge=1, le=MAX_PASSES - 1, description="number of a pass")]
Record = dict[str, Any]


class JobFields(Struct):
    """The job of the run. Fields without a type may have any value."""

    scenario: str | None = None
    device: str | None = None
    profile: str | None = None
    label: str | None = None
    mesh: dict[str, Size] | None = None
    settings: Record | None = None
    started_at: Date | None = None
    log_dir: Any = None
    variants: Any = None


class Environment(Struct, frozen=True):
    """The environment of a run. Fields that are missing in the header are None.

    Args:
        cautions: sentences on differences between hosts.
        load_at_start: load averages of 1, 5 and 15 minutes.
    """

    machine: str | None = None
    cpu_model: str | None = None
    num_cpus: Count | None = None
    num_threads: Count | None = None
    memory_bytes: Count | None = None
    num_devices: Count | None = None
    device_name: str | None = None
    device: str | None = None
    backend: str | None = None
    backend_class: str | None = None
    world_size: Count | None = None
    num_hosts: Count | None = None
    hosts: list[str] | None = None
    scheduler: str | None = None
    torch: str | None = None
    nccl: str | None = None
    python: str | None = None
    platform: str | None = None
    git_commit: str | None = None
    git_dirty: bool | None = None
    cautions: list[str] | None = None
    load_at_start: list[Amount] | None = None
    variables: Record | None = None

    @property
    def load_per_cpu(self) -> float | None:
        """The load average of the minute before the run."""
        return self.load_at_start[0] / self.num_cpus if self.load_at_start and self.num_cpus else None


class HeaderLine(Struct):
    """The first line of a run file."""

    schema_version: Any = None
    run_id: str | None = None
    invocation_id: str | None = None
    job: JobFields | None = None
    environment: Environment | None = None
    simulated: Record | None = None


Params = defstruct(
    "Params",
    [
        *optional(str, "op", "dtype", "mesh_dim", "source", "target", "planner", "variant", "suite", "direction"),
        *optional(str, "scenario", "computes", "call", "mode", "level"),
        *optional(Bytes, "size_bytes", "num_tokens", "batch_size"),
        *optional(list[Count], "shape", "mesh_shape", "ranks"),
        *optional(list[str], "flattened", "hosts"),
        *optional(list[list[Count]], "pairs", "groups"),
    ],
)
CaseFields = defstruct("CaseFields", [("id", Name), *optional(str, "kind"), *optional(Params, "params")])
Counters = defstruct(
    "Counters",
    [
        *optional(str, "path", "worst_grad", "check", "peak_phase", "peak_owner", "memory_reason"),
        *optional(str, "result", "gradients", "forward_pays", "backward_pays"),
        *optional(Bytes, "num_implicit", "state_bytes", "forward_wire_bytes", "backward_wire_bytes"),
        *optional(Bytes, "num_collectives", "num_messages", "wire_bytes_executed", "lower_bound_bytes"),
        *optional(Bytes, "peak_allocated_bytes", "peak_reserved_bytes", "peak_growth_bytes", "parameter_bytes"),
        *optional(Duration, "predicted_s", "planning_cold_s", "planning_warm_s", "entry_skew_s", "isolated_s"),
        *optional(Amount, "loss_rel_error", "grad_rel_error", "output_rel_error", "num_copies"),
        *optional(Bytes, "peak_bytes", "predicted_peak_bytes", "baseline_bytes", "cache_bytes"),
        *optional(dict[str, Bytes], "peak_by_kind"),
        *optional(dict[str, list[Amount]], "per_rank"),
        # (kind of tensor, owner, bytes).
        *optional(list[tuple[str, str, Bytes]], "alive"),
        # Of a pipeline.
        *optional(Amount, "idle_share", "least_idle_share"),
        *optional(list[Amount], "idle_shares"),
        # Of a simulated step.
        *optional(Duration, "compute_s", "exposed_s", "idle_s", "host_s", "bubble_s", "on_host_s"),
        *optional(list[Amount], "bubble_shares"),
        *optional(dict[str, Duration], "predicted_phases_s", "exposed_by_mesh_dim_s"),
        *optional(Amount, "mfu", "hfu"),
        *optional(Count, "slowest_rank", "num_retries", "num_exchanges"),
        *optional(bool, "fits"),
        # Of an uneven all-to-all: rows of each rank in all exchanges of an iteration, and the busiest rank's share.
        *optional(list[Count], "rows_sent", "rows_received"),
        *optional(Amount, "max_over_mean"),
        # Of links: per rank, interface to the number of TCP segments sent and sent again.
        *optional(list[dict[str, tuple[Count, Count]]], "tcp_segments"),
    ],
)
SAMPLES = [
    *optional(list[Time], "samples_s"),
    *optional(dict[str, list[Duration]], "phases_s"),
    *optional(list[Duration], "rank_median_s"),
    *optional(str, "stop_reason", "error"),
]
CaseLine = defstruct(
    "CaseLine",
    [
        ("case", CaseFields),
        ("status", Status),
        *SAMPLES,
        *optional(Bytes, "payload_bytes", "wire_bytes"),
        *optional(Size, "group_size"),
        *optional(str, "mesh_dim", "backend", "backend_op"),
        *optional(Counters, "counters"),
        *optional(bool, "simulated"),
    ],
)
PassLine = defstruct(
    "PassLine",
    [
        ("case_id", Name),
        ("number", PassNumber),
        ("samples_s", list[Time]),
        ("phases_s", dict[str, list[Duration]]),
        *SAMPLES[2:],
        *optional(Status, "status"),
    ],
)
FailedPassLine = defstruct(
    "FailedPassLine", [("case_id", Name), ("status", Status), *SAMPLES, *optional(PassNumber, "number")]
)
Footer = defstruct(
    "Footer",
    [
        *optional(str, "status", "message"),
        *optional(Date, "finished_at"),
        *optional(Amount, "wall_s", "measuring_s", "foreign_cpu"),
        *optional(dict[str, Amount], "spent_s"),
        *optional(dict[str, Count], "num_by_status"),
        *optional(Count, "num_relaunches", "num_not_run"),
        *optional(list[Amount], "load_at_end"),
    ],
)
# The columns of a trace's tables, each with a value per row.
Columns = defstruct(
    "Columns",
    [
        *optional(list[Count], "rank", "step", "seq", "payload_bytes"),
        *optional(list[str], "phase", "kind", "op", "group", "dtype", "source"),
        *optional(list[str | None], "backend_op", "mesh_dim", "owner", "redistribution"),
        *optional(list[Size], "group_size"),
        *optional(list[Count | None], "wire_bytes"),
        *optional(list[bool], "owner_known"),
        *optional(list[bool | None], "explicit"),
        *optional(list[Moment | None], "issued_s", "completed_s", "start_s", "end_s"),
        *optional(list[Duration | None], "exposed_s"),
    ],
)


class TraceTable(Struct):
    """Rows with a value for each of the columns."""

    columns: Annotated[list[str], Meta(extra_json_schema={"uniqueItems": True})]
    rows: list[list[Any]]

    def __post_init__(self) -> None:
        if len(set(self.columns)) < len(self.columns):
            raise ValueError("columns has a duplicate name")
        if any(len(row) != len(self.columns) for row in self.rows):
            raise ValueError(f"rows is not a list of rows with {len(self.columns)} values each")
        by_column = zip(self.columns, zip(*self.rows, strict=True), strict=False)
        decode({name: list(values) for name, values in by_column}, Columns, "rows")


TRACE = [
    *optional(str, "method", "exposed_reason"),
    *optional(bool, "clock_shared", "simulated"),
    *optional(list[Duration], "steps_s"),
]
FailedTraceLine = defstruct(
    "FailedTraceLine",
    [
        ("case_id", Name),
        ("error", str),
        *TRACE,
        *optional(Record, "overhead", "agreement", "memory", "phases", "computing", "pipeline"),
        *optional(list[Any], "columns", "rows"),
    ],
)
Overhead = defstruct("Overhead", [*optional(Amount, "ratio"), *optional(list[Amount], "bare_cpu_s", "traced_cpu_s")])
Agreement = defstruct(
    "Agreement", [*optional(str, "method"), *optional(Count, "num_rows"), *optional(list[str], "differences")]
)
Memory = defstruct(
    "Memory",
    [*optional(str, "measured_by", "reason"), *optional(Bytes, "measured_peak_bytes", "predicted_peak_bytes")],
)
Pipeline = defstruct(
    "Pipeline",
    [
        *optional(str, "mesh_dim", "schedule"),
        *optional(list[Amount], "bubble_shares"),
        *optional(Count, "num_stages", "microbatches"),
        *optional(Amount, "least_idle_share"),
    ],
)
TraceLine = defstruct(
    "TraceLine",
    [
        ("case_id", Name),
        ("phases", TraceTable),
        *optional(TraceTable, "computing"),
        *TRACE,
        *optional(Overhead, "overhead"),
        *optional(Agreement, "agreement"),
        *optional(Memory, "memory"),
        *optional(Pipeline, "pipeline"),
    ],
    bases=(TraceTable,),
    kw_only=True,
)


def require_line(record: Record) -> None:
    """Raise a ValueError with one sentence for the first invalid field of a line after the header.

    Lines of unknown types are from newer versions.
    """
    match record.get("type"):
        case "case":
            decode(record, CaseLine)
        case "pass":
            decode(record, FailedPassLine if "error" in record else PassLine)
        case "trace":
            decode(record, TraceLine if record.get("error") is None else FailedTraceLine)
        case "footer":
            decode(record, Footer)


MAX_RUN_BYTES = 1 << 30
MAX_LINE_WARNINGS = 20
RUN_FILE = "run file"
BROKE_THE_LAUNCH = ("raised", "timeout", "aborted")


class _RecordReader:
    """Reader of one run file. An invalid header rejects the file. Other invalid lines are left out with a sentence in
    `warnings`."""

    def __init__(self, path: Path, warnings: list[str]) -> None:
        self._path = path
        self._warnings = warnings
        self._num_left_out = 0
        self._case_lines: dict[str, tuple[int, str]] = {}
        self._pass_lines: dict[tuple[str, int], int] = {}

    def records(self) -> Iterator[Record]:
        """Yield the header and every valid line. Raise UserError as `read_run`."""
        with opened(self._path, RUN_FILE, MAX_RUN_BYTES) as file:
            yield _header_line(self._path, file.readline())
            for number, line in enumerate(file, start=2):
                if line.strip() and (record := self._record(number, line)) is not None:
                    yield record
        if self._num_left_out > MAX_LINE_WARNINGS:
            more = self._num_left_out - MAX_LINE_WARNINGS
            self._warnings.append(f"{self._path.name}: {more} more lines were left out for similar reasons")

    def _record(self, number: int, line: bytes) -> Record | None:
        try:
            record = parse_json(line)
        except ValueError as error:
            self._leave_out(number, f"not a complete record, truncated or corrupt ({error})")
            return None
        if not isinstance(record, dict):
            self._leave_out(number, "not a complete record (not an object)")
            return None
        if record.get("type") == "run":
            twice = "a second run header, but a file has one run"
            raise UserError(f"{RUN_FILE} {self._path}, line {number}: {twice}; split the file at this line")
        try:
            require_line(record)
            self._require_first(number, record)
        except ValueError as error:
            if record.get("type") != "footer":
                self._leave_out(number, str(error))
                return None
            # Without the wrong field, the footer still shows that the run finished.
            self._warnings.append(f"{self._path.name}, line {number}: {error}; the field is left out")
            return {name: value for name, value in record.items() if is_of_type({name: value}, Footer)}
        return record

    def _require_first(self, number: int, record: Record) -> None:
        """Raise a ValueError for a case or a pass of an earlier line."""
        if record.get("type") == "case":
            case_id, status = record["case"]["id"], record["status"]
            first, before = self._case_lines.setdefault(case_id, (number, status))
            if first == number:
                return
            # A case may have a second row, which the parent writes after a failed launch. Both rows count.
            if status in BROKE_THE_LAUNCH and not record.get("samples_s") and before in ("ok", "wrong"):
                self._case_lines[case_id] = first, status
                return
            raise ValueError(f"line {first} already has case.id {shown(case_id)}")
        if record.get("type") == "pass" and "error" not in record:
            key = record["case_id"], record["number"]
            if (first := self._pass_lines.setdefault(key, number)) != number:
                raise ValueError(f"line {first} already has pass {key[1]} of case {shown(key[0])}")

    def _leave_out(self, number: int, why: str) -> None:
        self._num_left_out += 1
        if self._num_left_out <= MAX_LINE_WARNINGS:
            self._warnings.append(f"{self._path.name}, line {number}: {why}; left out")


def _header_line(path: Path, line: bytes) -> Record:
    try:
        record = parse_json(line.removeprefix(codecs.BOM_UTF8))
    except ValueError:
        record = None
    if not isinstance(record, dict) or record.get("type") != "run":
        problem = f"{path} is not a distbench run file, because line 1 is not a run header"
        raise UserError(f"{problem}; give a results/*.jsonl file")
    try:
        decode(record, HeaderLine)
    except ValueError as error:
        raise UserError(f"{RUN_FILE} {path}, line 1: {error}; measure again") from error
    return record


# Launches are compared only if these fields of their headers agree.
MUST_AGREE = (
    *("machine", "cpu_model", "num_cpus", "device", "device_name", "backend", "mesh", "world_size", "num_hosts"),
    *("num_threads", "scheduler", "pipelined", "passes"),
)
# Fields that a comparison may study.
SHOWN = ("torch", *DRIVER_FIELDS, "python", "platform", "git_commit", "git_dirty", "variables", "settings", "profile")
SIMULATED = "simulated"  # marks a header, case or trace that was not measured


@dataclass(frozen=True)
class Header:
    """A run file's header, from `header_of`.

    Args:
        invocation_id: common id of the runs of one `distbench run`.
        device: the requested device. The used device is in the environment.
        settings: settings of sampling.
        profile: file of the machine's profile.
        log_dir: folder of rank 0's logs.
        label: the user's label of the run.
        started_at: seconds since the epoch, or 0 if unknown.
        facts: every field of MUST_AGREE and SHOWN as written, None if unknown.
        simulated: the hardware file and assumptions of a simulated run, empty for a measured run.
    """

    run_id: str | None = None
    invocation_id: str | None = None
    scenario: str | None = None
    mesh: Mesh | None = None
    device: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    profile: str | None = None
    log_dir: str | None = None
    label: str | None = None
    started_at: float = 0.0
    variants: Any = None
    environment: Environment = field(default_factory=Environment)
    facts: dict[str, Any] = field(default_factory=lambda: _facts({}, {}))
    simulated: dict[str, Any] = field(default_factory=dict)


def basis_text(simulated: Mapping[str, Any]) -> str:
    """The hardware file of a simulated run (`Header.simulated`), and the number of its guessed figures."""
    hardware = simulated.get("hardware")
    name = (hardware.get("name") if isinstance(hardware, dict) else None) or "unknown"
    return (
        f"simulated with hardware file {name}, {guesses_text(simulated)}; distbench report --full lists the assumptions"
    )


def guesses_text(simulated: Mapping[str, Any]) -> str:
    """A text such as `13 guessed, 2 extrapolated figures` on a simulated run's hardware file."""
    counts = [
        f"{len(names)} {word}"
        for basis, word in (("guess", "guessed"), ("fitted", "fitted"), ("extrapolated", "extrapolated"))
        if isinstance(names := simulated.get(basis), list | dict) and names
    ]
    return f"{', '.join(counts)} figures" if counts else "no guessed figure"


def header_of(record: Mapping[str, Any]) -> Header:
    """The header of a run file's first line. Raise ValueError if the line does not match `HeaderLine`."""
    line = decode(record, HeaderLine)
    job = line.job or JobFields()
    return Header(
        run_id=line.run_id,
        invocation_id=line.invocation_id,
        scenario=job.scenario,
        mesh=job.mesh,
        device=job.device,
        settings=job.settings or {},
        profile=job.profile,
        log_dir=job.log_dir if isinstance(job.log_dir, str) else None,
        label=job.label or None,
        started_at=job.started_at or 0.0,
        variants=job.variants,
        environment=line.environment or Environment(),
        facts=_facts(record.get("job") or {}, record.get("environment") or {}),
        simulated=line.simulated or {},
    )


def _facts(job: dict[str, Any], environment: dict[str, Any]) -> dict[str, Any]:
    facts = {name: environment.get(name) for name in (*MUST_AGREE, *SHOWN)}
    settings = dict(job.get("settings") or {})
    # The backend's class, if the class of this name differs from older versions of torch.
    backend, backend_class = environment.get("backend"), environment.get("backend_class")
    if backend_class not in (None, first_backend_class(str(backend))):
        facts["backend"] = f"{backend} ({backend_class})"
    facts["mesh"] = format_mesh(job.get("mesh") or {}) or None
    facts["device"] = environment.get("device") or job.get("device")
    facts["pipelined"] = settings.pop("iterations_per_sample", None)
    facts["passes"] = settings.pop("passes", 1)
    # Older files do not have this field, and their runs checked everything.
    if settings.get("check") == "full":
        del settings["check"]
    facts["settings"] = settings or None
    facts["profile"] = job.get("profile")
    return facts


SCHEMA_VERSION = 2
AGAIN = "(baseline again)"  # suffix of the id and the variant of the control, a second measurement of the baseline
DTYPE_BYTES = {"f64": 8, "f32": 4, "bf16": 2, "f16": 2}


def _without_guessed_tokens(record: Record) -> Record:
    case = record["case"] if record.get("type") == "case" else {}
    if case.get("kind") != "step" or not (params := case.get("params")):
        return record
    batch = {"batch_size": params["shape"][0]} if params.get("shape") else {}
    kept = {name: value for name, value in params.items() if name != "num_tokens"}
    return {**record, "case": {**case, "params": kept | batch}}


UPGRADES: dict[int, Callable[[Record], Record]] = {1: _without_guessed_tokens}


@dataclass(frozen=True)
class Case:
    """One case to measure. `params` are columns of a report."""

    id: str  # stable join key, such as kind/dtype[shape]/operation/mesh
    kind: str  # "collective", "redistribute", "calibrate", "operator", "compute", "step", "checkpoint" or "call"
    params: Record = field(default_factory=dict)


@dataclass
class CaseResult:
    """The outcome of one case.

    Args:
        status: one of STATUSES.
        samples_s: seconds of each sample on the sample's slowest rank.
        phases_s: phase name to seconds of each sample on the phase's slowest rank.
        payload_bytes: size of a collective or calibrated step as S in nccl-tests; of a redistribution, size of the
        global tensor.
        wire_bytes: bytes that one rank must send, by the algorithm's count.
        group_size: ranks in one group.
        mesh_dim: mesh dim of the participating groups, or mesh dims joined by "x".
        backend_op: the backend's operation.
        stop_reason: the reason that ended sampling: "steady" ("precise" in older files), "max_samples", "max_case_s" or
            "passes".
        counters: other numbers and short texts of the case.
        error: one sentence if status is not ok.
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
        """Return the data of the case's JSON line."""
        return {"type": "case", **asdict(self)}


@dataclass
class Run:
    """The content of a run file.

    Args:
        header: the first line as data. `about` is the typed header.
        cases: a record per case in file order, with the fields of CaseResult over all passes, and `passes`, a list of
        (number of a pass, number of samples).
        footer: the last line, or None for an interrupted run.
        warnings: sentences about lines that could not be read.
        traces: a record per traced step in file order, with `case_id`, and `error` or the fields of `observe.trace`.
    """

    path: Path
    header: Record
    cases: list[Record]
    footer: Record | None
    warnings: list[str]
    traces: list[Record] = field(default_factory=list)

    @cached_property
    def about(self) -> Header:
        """The header, with defaults for missing fields."""
        return header_of(self.header)

    @property
    def is_simulated(self) -> bool:
        """Whether the run was simulated rather than measured."""
        return bool(self.about.simulated)

    @property
    def scenario(self) -> str:
        """The scenario's name, or the file's name if the header has no scenario."""
        return self.about.scenario or self.path.stem


def append(path: Path, *records: Record, is_synced: bool = True) -> None:
    """Append records, one line each. With `is_synced`, return after the records are on the disk, not only in the
    kernel.

    An unfinished line of a killed writer is ended first, so that each record has a line. After an OSError (a full disk)
    the file is unchanged.
    """
    line = "".join(json.dumps(record, separators=(",", ":"), allow_nan=False) + "\n" for record in records)
    # Unbuffered, because the rest of a buffer would be written at the close, after the file was truncated.
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
            # Remove a partial record, because the footer needs the space.
            file.truncate(end)
            if not end:
                path.unlink()
            raise


def read_header(path: Path) -> Header:
    """The first line of a run file of any version. Raise UserError if the line cannot be read or is not a header."""
    with opened(path, RUN_FILE, MAX_RUN_BYTES) as file:
        return header_of(_header_line(path, file.readline(MAX_RUN_BYTES)))


def read_run(path: Path) -> Run:
    """Read the run file of a finished or interrupted run, and convert the content to the present schema.

    Raises:
        UserError: the file is not a run file, or has an invalid header or two headers. Other invalid lines become
        warnings.
    """
    warnings: list[str] = []
    records = list(_RecordReader(path, warnings).records())
    version = records[0].get("schema_version")
    if type(version) is not int or not 1 <= version <= SCHEMA_VERSION:
        versions = f"but this distbench reads only versions 1 to {SCHEMA_VERSION}"
        raise UserError(f"run file {path} has schema version {version}, {versions}; update distbench")
    for step in range(version, SCHEMA_VERSION):
        records = [UPGRADES[step](record) for record in records]
    cases, passes, traces, footers = (
        [record for record in records if record.get("type") == kind] for kind in ("case", "pass", "trace", "footer")
    )
    cases = [{**case, "passes": [(0, len(case.get("samples_s") or ()))]} for case in cases]
    _add_passes(cases, passes)
    if not footers:
        finished = f"{len(cases)} finished cases are shown"
        warnings.append(f"{path.name} has no footer, because the run was interrupted; {finished}")
    return Run(path, records[0], cases, footers[-1] if footers else None, warnings, traces)


def _add_passes(cases: list[Record], passes: list[Record]) -> None:
    """Add further passes to their cases. If two cases have the same id, the last case gets the passes."""
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
        phases = case.get("phases_s") or {}
        case["phases_s"] = {name: [*phases.get(name, ()), *more] for name, more in record["phases_s"].items()}
        case["passes"].append((record["number"], len(record["samples_s"])))
        case["stop_reason"] = record.get("stop_reason", case.get("stop_reason"))


def run_file_schema() -> dict[str, Any]:
    """The JSON schema of one line, from the reader's types. Other fields may have any value.

    The reader also requires exactly one header in line 1, no duplicate case, and a value per column in each row of a
    trace. `python -m distbench.records.run_file > docs/run_file.schema.json` updates the file that a test compares with
    this schema.
    """
    kinds = (HeaderLine, CaseLine, FailedPassLine, PassLine, FailedTraceLine, TraceLine, Footer)
    (run, case, failed_pass, one_pass, failed_trace, trace, footer), types = msgspec.json.schema_components(
        kinds, ref_template="#/$defs/{name}"
    )
    # Headers of all versions can be read. Other lines are of these versions.
    types["HeaderLine"]["properties"]["schema_version"] = {"type": "integer", "minimum": 1, "maximum": SCHEMA_VERSION}
    types["HeaderLine"]["required"].append("schema_version")
    has_error = {"required": ["error"]}
    has_reason = {**has_error, "properties": {"error": {"not": {"type": "null"}}}}
    lines = {
        "run": run,
        "case": case,
        "pass": {"if": has_error, "then": failed_pass, "else": one_pass},
        "trace": {"if": has_reason, "then": failed_trace, "else": trace},
        "footer": footer,
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A line of a distbench run file",
        "description": f"schema_version 1 to {SCHEMA_VERSION}; docs/run-file.md describes each field",
        "type": "object",
        "required": ["type"],
        "allOf": [{"if": {"properties": {"type": {"const": kind}}}, "then": line} for kind, line in lines.items()],
        "$defs": types,
    }


if __name__ == "__main__":
    print(json.dumps(run_file_schema(), indent=1))
