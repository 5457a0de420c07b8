"""A job: everything that one launch needs to know, in one JSON file; and what of a scenario a user chooses for it."""

import ast
import hashlib
import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from distbench.spec.discovery import Entry
from distbench.spec.errors import UserError, nearest
from distbench.spec.file_io import write_whole
from distbench.spec.mesh import Mesh, check_mesh_dims, mesh_dim_size, mesh_size
from distbench.spec.plan import ROTATIONS
from distbench.spec.printable_text import count_text, cut

Variant = dict[str, Any]
CHECKS = ("full", "loss", "none")
# What reading a text as a Python value raises, also for absurdly nested ones.
NOT_PYTHON = (ValueError, SyntaxError, TypeError, MemoryError, RecursionError)
_TRUTHS = {**dict.fromkeys(("true", "1", "yes", "on"), True), **dict.fromkeys(("false", "0", "no", "off"), False)}
JOB_FILE = "job.json"  # in the job's log folder; its ranks begin when it is there
LAUNCH_LOG = "launch.log"  # there too: what the process printed that started the ranks


def pid_file(log_dir: Path, rank: int) -> Path:
    """There too, from when a rank begins until it has done all of its work: its pid."""
    return log_dir / f"rank{rank}.pid"


@dataclass(frozen=True)
class Settings:
    """How long and how precisely to measure one case.

    Args:
        warmup_iterations: iterations thrown away before the first sample, at every case.
        min_samples: samples taken whatever they cost.
        max_samples: samples after which a case ends.
        max_case_s: seconds of timed iterations after which a case ends.
        budget_s: seconds of timed iterations that the cases of a launch share: with many cases, each ends sooner.
        target_ci: width, as a share of the median, at which a case ends: of the median pass's 95 % interval where cases
            take turns; else of the order statistics that would bound the median, were samples independent.
        iterations_per_sample: 1 times each iteration alone; more times that many back to back (pipelined).
        seed: for data, initial parameters and the order of cases.
        max_relaunches: new launches at most, after cases that killed or hung a rank.
        passes: times that all cases are gone through, each time taking this share of a case's samples and seconds: what
            else the machine does then affects all cases alike. 0: where a report compares variants, as many as the
            budget gives; one elsewhere.
        check: a name out of CHECKS: of a step, all its gradients are compared with one device's, or its loss alone, or
            nothing. One device then holds the whole model with its activations, or without them, or not at all.
    """

    warmup_iterations: int = 3
    min_samples: int = 15
    max_samples: int = 2000
    max_case_s: float = 5.0
    budget_s: float = 180.0
    target_ci: float = 0.02
    iterations_per_sample: int = 1
    seed: int = 20260101
    max_relaunches: int = 20
    passes: int = 0
    check: str = "full"

    @classmethod
    def quick(cls) -> "Settings":
        """A look, not a measurement to keep: fewer samples, less time a case."""
        return cls(warmup_iterations=2, min_samples=6, max_samples=200, max_case_s=0.8, budget_s=5.0)

    def with_budget(self, budget_s: float) -> "Settings":
        """The cases of a launch share other seconds, and no quick cap keeps them from taking their part."""
        full = Settings()
        return replace(self, budget_s=budget_s, max_case_s=full.max_case_s, max_samples=full.max_samples)

    def case_limit_s(self, num_cases: int) -> float:
        """Seconds of timed iterations that one of `num_cases` cases may take."""
        return min(self.max_case_s, self.budget_s / max(num_cases, 1))

    def of_a_pass(self) -> "Settings":
        """What one pass may take of a case: its share of samples and seconds."""
        share = {name: -(-getattr(self, name) // self.passes) for name in ("min_samples", "max_samples")}
        return replace(self, **share, max_case_s=self.max_case_s / self.passes)


@dataclass(frozen=True)
class Job:
    """One launch: one scenario, all its variants, on one mesh.

    Args:
        run_id: names the run file; unique.
        invocation_id: shared by all runs of one command.
        file: declares the scenario.
        variants: one dict of parameters each, in the order they run.
        axes: names of the parameters that tell the variants apart.
        mesh: mesh dim name to size.
        device: a name out of DEVICES.
        timeout_s: seconds without progress after which the launch is given up.
        started_at: seconds since the epoch when the command began.
        started_clock_s: the same by time.monotonic(): durations are taken by it, for the wall clock may jump.
        reporting_rank: who reports progress to the parent: 0, or under another launcher each parent's own rank.
        is_call: `scenario` names no scenario but a function as `Scenario.calls` has them, and a variant its arguments.
        environment: what the parent knows of the machine.
        profile: file of the cost profile that every rank loads.
        done_ids: cases that have a row from an earlier launch of this job: their first pass is not run again.
        ended_ids: those of them that failed: none of their passes is run.
        passes_done: case id to the number of the pass that it goes on with once every case of its group has its row.
        note: printed before it starts, or "".
        trace_paths: whether each step is traced after it was timed and checked.
        label: the user's own text for this run, or "".
        chosen: which cases run, an expression as `CaseChoice` has it; "" for all.
        file_digest: of the scenario file, as `digest_of` has it.
    """

    run_id: str
    invocation_id: str
    scenario: str
    file: str
    variants: list[Variant]
    axes: list[str]
    mesh: dict[str, int]
    device: str
    settings: Settings
    run_file: str
    log_dir: str
    timeout_s: float
    started_at: float
    is_call: bool = False
    environment: dict[str, Any] = field(default_factory=dict)
    profile: str | None = None
    done_ids: list[str] = field(default_factory=list)
    ended_ids: list[str] = field(default_factory=list)
    passes_done: dict[str, int] = field(default_factory=dict)
    note: str = ""
    trace_paths: bool = False
    started_clock_s: float = 0.0
    reporting_rank: int = 0
    label: str = ""
    chosen: str = ""
    file_digest: str = ""

    def to_record(self) -> dict[str, Any]:
        """As plain data for JSON, ordered as declared."""
        return asdict(self)

    @classmethod
    def load(cls, path: Path) -> "Job":
        """The job that `save` wrote; UserError where the file holds none, as on a disk that was full."""
        from distbench.spec.json_decoder import Format, read_record

        return read_record(path, cls, Format("job file", "start the launch again"))

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> "Job":
        """The job that `to_record` gave."""
        from distbench.spec.json_decoder import decode

        return decode(record, cls)

    def save(self, path: Path) -> None:
        """Write the job as JSON, as a whole: ranks may be waiting for it."""
        write_whole(path, json.dumps(self.to_record(), indent=1))


def digest_of(file: Path) -> str:
    """What tells two versions of a file apart; "" where it cannot be read."""
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()[:16]
    except OSError:
        return ""


def variants_of(entry: Entry, chosen: Mapping[str, Sequence[Any]], quick: bool) -> list[Variant]:
    """All combinations of the axes, the user's choices (--set) first, the quick sizes for what the user left unset."""
    for name in chosen:
        if name not in entry.params and not is_knob(name):
            raise UserError(
                f"scenario {entry.name!r} has no axis or parameter {name!r} ({nearest(name, entry.params)})"
            )
    base: dict[str, tuple[Any, ...]] = {name: (default,) for name, default in entry.params.items()}
    sweeps = {**base, **entry.axes}
    if quick:
        sweeps |= {name: (value,) for name, value in entry.quick.items()}
    sweeps |= {name: tuple(values) for name, values in chosen.items()}
    return [dict(zip(sweeps, values, strict=True)) for values in itertools.product(*sweeps.values())]


def variant_text(variant: Variant, axes: Sequence[str]) -> str:
    """`rotate=alltoall,load_balance=True`: a variant as its cases are named; empty where nothing is swept."""
    return ",".join(f"{name}={variant[name]}" for name in axes if name in variant)


def axis_names(variants: Sequence[Variant], entry: Entry) -> list[str]:
    """Parameters that tell the variants apart: the declared axes, and whatever else takes several values."""
    return [
        name
        for name in (variants[0] if variants else {})
        if name in entry.axes or len({repr(variant[name]) for variant in variants}) > 1
    ]


def parse_choices(texts: Sequence[str], params: Mapping[str, Any]) -> dict[str, list[Any]]:
    """`["rotate=allgather,alltoall"]` to `{"rotate": ["allgather", "alltoall"]}`, each value of its default's type."""
    chosen: dict[str, list[Any]] = {}
    for text in texts:
        name, equals, values = text.partition("=")
        if not equals or not name or not values:
            raise UserError(f"--set {text!r} is not AXIS=VALUE; write for example --set rotate=alltoall")
        if name in chosen:
            raise UserError(f"--set {name} is given twice; give all its values at once: --set {name}=A,B")
        default = KNOBS[name].example if is_knob(name) else params.get(name)
        chosen[name] = [_typed(name, value, default) for value in _values(values, default)]
        for value in chosen[name] if name in KNOBS else ():
            check_knob(name, value)
    return chosen


def _values(text: str, default: Any) -> list[str]:
    """`A,B` to its values; commas within brackets and quotes belong to a value, unless the default is a text."""
    if isinstance(default, str):
        return text.split(",")
    listed = f"[{text}]"
    try:
        return [str(ast.get_source_segment(listed, element)) for element in ast.parse(listed, mode="eval").body.elts]  # type: ignore[attr-defined]
    except (*NOT_PYTHON, AttributeError):
        return text.split(",")


def _typed(name: str, text: str, default: Any) -> Any:
    if isinstance(default, str):
        return text
    expected_type = type(default)
    if expected_type is bool and text.lower() in _TRUTHS:
        return _TRUTHS[text.lower()]
    try:
        value = ast.literal_eval(text)
    except NOT_PYTHON:
        value = text
    if expected_type in (tuple, list) and isinstance(value, tuple | list):
        return expected_type(value)
    allowed = (float, int) if expected_type is float else expected_type
    # To Python, True is a number; to a scenario it is none.
    is_wanted = isinstance(value, allowed) and (expected_type is bool or not isinstance(value, bool))
    if default is not None and not is_wanted:
        kind = "true or false" if expected_type is bool else f"{expected_type.__name__} values such as {default!r}"
        raise UserError(f"--set {name}={cut(text)}: {name} takes {kind}")
    return value


PREFIX = "plan."
MESH = "plan.mesh"
_MESH_PART = re.compile(r"([a-z_]+?)(\d+)")


@dataclass(frozen=True)
class Knob:
    """One thing about a plan that can be changed.

    Args:
        values: all that it may be, or () for any of the type of `example`.
        needs: the part of a plan without which there is nothing to change: "fsdp", "cp" or "".
    """

    example: Any
    values: tuple[Any, ...] = ()
    needs: str = ""


KNOBS: Mapping[str, Knob] = {
    MESH: Knob("dp_shard2xtp2"),
    "plan.reshard_after_forward": Knob(True, (True, False), "fsdp"),
    "plan.checkpoint": Knob("full", ("none", "full")),
    "plan.microbatches": Knob(2),
    "plan.sync_each_microbatch": Knob(True, (True, False), "fsdp"),
    "plan.rotate": Knob("alltoall", ROTATIONS, "cp"),
    "plan.load_balance": Knob(True, (True, False), "cp"),
    "plan.mixed_precision": Knob("bf16", ("none", "bf16"), "fsdp"),
    "plan.prefetch": Knob(2, needs="fsdp"),
    "plan.compile": Knob("inductor", ("none", "eager", "aot_eager", "inductor")),
}


def is_knob(name: str) -> bool:
    """Whether a name of --set is a change to the plan; UserError where it looks like one and is none."""
    if name.startswith(PREFIX) and name not in KNOBS:
        raise UserError(f"--set {name}: no such change to a plan ({nearest(name, KNOBS)})")
    return name in KNOBS


def check_knob(name: str, value: Any) -> None:
    """Refuse a value that a knob cannot have."""
    knob = KNOBS[name]
    if name == MESH:
        parse_brief_mesh(value)
    elif knob.values and value not in knob.values:
        raise UserError(f"--set {name}={value} is unknown; use {', '.join(map(str, knob.values))}")
    elif not knob.values and not 0 < value < 1 << 16:
        raise UserError(f"--set {name}={value} cannot be used; give a whole number from 1")


def split_variant(variant: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(what the scenario's function is given, what is changed in its plan), of a variant."""
    knobs = {name: value for name, value in variant.items() if name in KNOBS}
    return {name: value for name, value in variant.items() if name not in knobs}, knobs


def brief_mesh(mesh: Mapping[str, int]) -> str:
    """`{"dp_shard": 2, "tp": 2}` to `dp_shard2xtp2`; mesh dims of one rank are left out, unless there are no others."""
    kept = {name: size for name, size in mesh.items() if size > 1} or mesh
    return "x".join(f"{name}{size}" for name, size in kept.items())


def parse_brief_mesh(text: str) -> Mesh:
    """What `brief_mesh` wrote; UserError for anything else."""
    mesh: Mesh = {}
    for part in str(text).split("x"):
        match = _MESH_PART.fullmatch(part)
        if match is None or match[1] in mesh:
            raise UserError(f"--set {MESH}={text} is no mesh; write for example {MESH}=dp_shard2xtp2")
        mesh[match[1]] = mesh_dim_size(match[2], part)
    check_mesh_dims(mesh)
    return mesh


def mesh_of(variant: Mapping[str, Any], mesh: Mapping[str, int]) -> Mesh:
    """The mesh that a variant runs on: `mesh`, or its own of as many ranks, with 1 for what it leaves out of `mesh`.

    Raises:
        UserError: its own has another number of ranks.
    """
    if MESH not in variant:
        return dict(mesh)
    own_mesh = parse_brief_mesh(variant[MESH])
    if mesh_size(own_mesh) != mesh_size(mesh):
        ranks = count_text(mesh_size(own_mesh), "rank")
        problem = f"--set {MESH}={variant[MESH]} has {ranks}, and the launch {mesh_size(mesh)}"
        raise UserError(f"{problem}; give meshes of as many, or --mesh")
    return {**dict.fromkeys(mesh, 1), **own_mesh}


Matches = Callable[[str], bool]
# A part of an id in quotes may hold spaces and parentheses, as those of redistributions do.
TOKEN = re.compile(r"""\s*(?:(?P<mark>[()])|"(?P<double>[^"]*)"|'(?P<single>[^']*)'|(?P<word>[^\s()"']+))""")
MAX_NAMED, MAX_SHOWN = 3, 200
MAX_DEPTH = 50


class CaseChoice:
    """A parsed expression.

    Raises:
        UserError: it is none.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = self._split()
        self._depth = 0
        self._matches = self._any_of()
        if self._tokens:
            raise self._wrong(f"{self._tokens[0][1]!r} is not expected there")

    def matches(self, case_id: str) -> bool:
        """Whether a case is chosen; upper and lower case are the same."""
        return self._matches(case_id.lower())

    def _split(self) -> list[tuple[str, str]]:
        """(kind, text) of each token: "mark", "word" or "quoted"."""
        tokens, place, text = [], 0, self._text.strip()
        while place < len(text):
            match = TOKEN.match(text, place)
            if match is None:
                raise self._wrong("a quote is not closed")
            kind = str(match.lastgroup)
            tokens.append((kind if kind in ("mark", "word") else "quoted", match[kind]))
            place = match.end()
        return tokens

    def _any_of(self) -> Matches:
        parts = [self._all_of()]
        while self._take("word", "or"):
            parts.append(self._all_of())
        return lambda case_id: any(part(case_id) for part in parts)

    def _all_of(self) -> Matches:
        parts = [self._one()]
        while self._take("word", "and"):
            parts.append(self._one())
        return lambda case_id: all(part(case_id) for part in parts)

    def _one(self) -> Matches:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise self._wrong(f"nested deeper than {MAX_DEPTH} levels")
        part = self._part()
        self._depth -= 1
        return part

    def _part(self) -> Matches:
        if self._take("word", "not"):
            denied = self._one()
            return lambda case_id: not denied(case_id)
        if self._take("mark", "("):
            inner = self._any_of()
            if not self._take("mark", ")"):
                raise self._wrong("a parenthesis is not closed")
            return inner
        if not self._tokens or self._tokens[0] in (("mark", ")"), ("word", "and"), ("word", "or")):
            raise self._wrong("a part of a case's id is missing")
        part = self._tokens.pop(0)[1].lower()
        return lambda case_id: part in case_id

    def _take(self, *token: str) -> bool:
        is_next = bool(self._tokens) and self._tokens[0] == token
        if is_next:
            self._tokens.pop(0)
        return is_next

    def _wrong(self, why: str) -> UserError:
        how = """write parts of ids with and, or, not and parentheses, such as -k "greedy and not f32" """
        return UserError(f"-k {_shown(self._text)}: {why}; {how.strip()}")


def _shown(text: str) -> str:
    """In quotes, and only its beginning where it is long."""
    return repr(text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}...")


def none_chosen(text: str, num_cases: int, ids: Sequence[str]) -> str:
    """One sentence for a choice that leaves nothing."""
    some, of = "; ".join(ids[:MAX_NAMED]), count_text(num_cases, "case")
    return f"-k {_shown(text)} chooses none of the {of}; there are e.g. {some}; `run --dry-run` lists all"
