"""What the lines of a run file may hold: the type of each kind of line; older files lack some fields."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

from msgspec import Meta, Struct, defstruct

from distbench.spec.json_decoder import Amount, Bytes, Count, Date, Duration, Moment, Name, Size, Time, decode, optional

# Columns of a trace: a row per collective, per phase, and per stretch in which a rank computes.
TRACE_COLUMNS = (
    *("rank", "step", "phase", "kind", "op", "backend_op", "mesh_dim", "group", "seq", "group_size", "dtype"),
    *("payload_bytes", "wire_bytes", "owner", "owner_known", "source", "redistribution", "explicit"),
    *("issued_s", "completed_s", "exposed_s"),
)
PHASE_COLUMNS = ("rank", "step", "phase", "start_s", "end_s")
COMPUTING_COLUMNS = ("rank", "step", "start_s", "end_s")
Status = Literal["ok", "wrong", "raised", "timeout", "aborted", "skipped", "unsupported"]
STATUSES: tuple[str, ...] = get_args(Status)
MAX_PASSES = 100_000  # a number of a pass beyond this is no number of a pass
PassNumber = Annotated[int, Meta(ge=1, le=MAX_PASSES - 1, description="a number of a pass")]
Record = dict[str, Any]


class JobFields(Struct):
    """What was run; fields without a type are not read as one."""

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
    """Where a run was made; None for what its header does not have.

    Args:
        cautions: in what hosts differ.
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
        """Of the minute before the run began."""
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
        # (what it is, owner, bytes).
        *optional(list[tuple[str, str, Bytes]], "alive"),
        # Of a pipeline.
        *optional(Amount, "idle_share", "least_idle_share"),
        *optional(list[Amount], "idle_shares"),
        # Of a simulated step.
        *optional(Duration, "compute_s", "exposed_s", "idle_s", "host_s", "bubble_s"),
        *optional(list[Amount], "bubble_shares"),
        *optional(dict[str, Duration], "predicted_phases_s", "exposed_by_mesh_dim_s"),
        *optional(Amount, "mfu", "hfu"),
        *optional(Count, "slowest_rank", "num_retries"),
        *optional(bool, "fits"),
        # Of links: of each rank, interface to the segments that it sent and sent again.
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
        """Check what no annotation can: that rows and columns go together, and each column's values."""
        if len(set(self.columns)) < len(self.columns):
            raise ValueError("columns has a name twice")
        if any(len(row) != len(self.columns) for row in self.rows):
            raise ValueError(f"rows is no list of rows with {len(self.columns)} values each")
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


def line_type(record: Mapping[str, Any]) -> type[Struct] | None:
    """The type of a line other than the first one; None for a kind that is left to newer versions."""
    match record.get("type"):
        case "case":
            return CaseLine
        case "pass":
            return FailedPassLine if "error" in record else PassLine
        case "trace":
            return TraceLine if record.get("error") is None else FailedTraceLine
        case "footer":
            return Footer
    return None


def require_line(record: Record) -> None:
    """Raise a ValueError, one sentence, for the first wrong field of a line other than the first one."""
    if kind := line_type(record):
        decode(record, kind)
