"""A job: all inputs of one launch, in one JSON file, and the user's choices (--set, -k) for the job's scenario."""

import ast
import contextlib
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
# Errors of parsing a text as a Python value, also for deep nesting.
_NOT_PYTHON = (ValueError, SyntaxError, TypeError, MemoryError, RecursionError)
_TRUTHS = {**dict.fromkeys(("true", "1", "yes", "on"), True), **dict.fromkeys(("false", "0", "no", "off"), False)}
JOB_FILE = "job.json"  # file in the job's log folder; the ranks start when the file exists
LAUNCH_LOG = "launch.log"  # file in the log folder: output of the process that started the ranks


def pid_file(log_dir: Path, rank: int) -> Path:
    """Return the file with a rank's pid in a log folder. The file exists from the rank's start to the end of its
    work."""
    return log_dir / f"rank{rank}.pid"


@dataclass(frozen=True)
class Settings:
    """The effort for measuring one case: warm-up, samples, passes and check.

    Args:
        warmup_iterations: iterations before the first sample of every case.
        min_samples: samples taken regardless of their time.
        max_samples: number of samples after which a case ends.
        max_case_s: seconds of timed iterations after which a case ends.
        budget_s: seconds of timed iterations for all cases of a launch; many cases shorten each case.
        target_ci: interval width at which a case ends, as a share of the median. The interval is the 95 % interval of
            the median pass, or with one pass, the order statistics that bound the median of independent samples.
        iterations_per_sample: number of iterations per sample; several iterations are timed back to back (pipelined).
        seed: seed for data, initial parameters and the order of cases.
        max_relaunches: maximum number of new launches after cases that killed or hung a rank.
        passes: number of passes over all cases, each with an equal share of a case's samples and seconds, so that
            other load on the machine affects all cases equally. 0 means as many passes as the budget allows if a
            report compares variants, else 1 pass.
        check: a name from CHECKS: compare a step's gradients and loss, its loss only, or nothing with the step of one
            device. This device needs memory for the whole model with activations, without activations, or for neither.
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
        """Return settings for a quick look: fewer samples, less time per case."""
        return cls(warmup_iterations=2, min_samples=6, max_samples=200, max_case_s=0.8, budget_s=5.0)

    def with_budget(self, budget_s: float) -> "Settings":
        """Return these settings with another budget, and without the limits per case of `quick`."""
        full = Settings()
        return replace(self, budget_s=budget_s, max_case_s=full.max_case_s, max_samples=full.max_samples)

    def case_limit_s(self, num_cases: int) -> float:
        """Return the limit of timed iterations for each of `num_cases` cases, in seconds."""
        return min(self.max_case_s, self.budget_s / max(num_cases, 1))

    def of_a_pass(self) -> "Settings":
        """Return the settings of one pass, with its share of a case's samples and seconds."""
        share = {name: -(-getattr(self, name) // self.passes) for name in ("min_samples", "max_samples")}
        return replace(self, **share, max_case_s=self.max_case_s / self.passes)


@dataclass(frozen=True)
class Job:
    """One launch: one scenario, all its variants, on one mesh.

    Args:
        run_id: unique id, which is also in the run file's name.
        invocation_id: common id of all runs of one command.
        file: path of the file that declares the scenario.
        variants: one dict of parameters per variant, in run order.
        axes: names of the parameters that differ between variants.
        mesh: mesh dim name to size.
        device: a name from DEVICES.
        timeout_s: seconds without progress after which the launch is aborted.
        started_at: start of the command, seconds since the epoch.
        started_clock_s: start of the command by time.monotonic(), for durations, because the wall clock may jump.
        reporting_rank: the rank that reports progress to this parent process: 0, or the parent's rank under another
            launcher.
        is_call: whether `scenario` names a plain function (as in `Scenario.calls`), with a variant as its arguments.
        environment: facts of the machine.
        profile: file of the cost profile that every rank loads.
        done_ids: cases with a row from an earlier launch of this job; the first pass of these cases is not run again.
        ended_ids: done cases that failed; their further passes are not run.
        passes_done: case id to the number of its next pass, which runs after every case of the group has a row.
        note: text printed before the job starts, or "".
        trace_paths: whether each step is traced after it was timed and checked.
        label: the user's own text for this run, or "".
        chosen: the cases to run, as an expression of `CaseChoice`; "" for all cases.
        file_digest: result of `digest_of` for the scenario file.
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
        """Return plain data for JSON, in the order of the fields."""
        return asdict(self)

    @classmethod
    def load(cls, path: Path) -> "Job":
        """Return the job that `save` wrote. Raise UserError for a damaged file, for example after a full disk."""
        from distbench.spec.json_decoder import Format, read_record

        return read_record(path, cls, Format("job file", "start the launch again"))

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> "Job":
        """Return the job from a record of `to_record`."""
        from distbench.spec.json_decoder import decode

        return decode(record, cls)

    def save(self, path: Path) -> None:
        """Write the job as JSON atomically, because ranks may be waiting for the file."""
        write_whole(path, json.dumps(self.to_record(), indent=1))


def digest_of(file: Path) -> str:
    """Return a digest of a file; "" if the file cannot be read."""
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()[:16]
    except OSError:
        return ""


def variants_of(entry: Entry, chosen: Mapping[str, Sequence[Any]], quick: bool) -> list[Variant]:
    """Return all combinations of the axes with the user's choices (--set); with `quick`, other parameters have quick
    sizes."""
    for name in chosen:
        if name not in entry.params and not is_knob(name):
            problem = f"scenario {entry.name!r} has no axis or parameter {name!r}"
            raise UserError(f"{problem} ({nearest(name, entry.params)})")
    sweeps: dict[str, Sequence[Any]] = {name: (default,) for name, default in entry.params.items()}
    sweeps |= entry.axes
    if quick:
        sweeps |= {name: (value,) for name, value in entry.quick.items()}
    sweeps |= chosen
    return [dict(zip(sweeps, values, strict=True)) for values in itertools.product(*sweeps.values())]


def variant_text(variant: Variant, axes: Sequence[str]) -> str:
    """Return `rotate=alltoall,load_balance=True`, as in names of cases; empty without axes."""
    return ",".join(f"{name}={variant[name]}" for name in axes if name in variant)


def axis_names(variants: Sequence[Variant], entry: Entry) -> list[str]:
    """Return the parameters that differ between variants: the declared axes, and others with several values."""
    return [
        name for name in variants[0] if name in entry.axes or len({repr(variant[name]) for variant in variants}) > 1
    ]


def parse_choices(texts: Sequence[str], params: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Parse `["rotate=A,B"]` to `{"rotate": ["A", "B"]}`; values get the type of the parameter's default."""
    chosen: dict[str, list[Any]] = {}
    for text in texts:
        name, equals, values = text.partition("=")
        if not equals or not name or not values:
            raise UserError(f"--set {text!r} is not AXIS=VALUE; write for example --set rotate=alltoall")
        if name in chosen:
            raise UserError(f"--set {name} is given twice; give all values at once: --set {name}=A,B")
        default = KNOBS[name].example if is_knob(name) else params.get(name)
        chosen[name] = [_typed(name, value, default) for value in _values(values, default)]
        for value in chosen[name] if name in KNOBS else ():
            _check_knob(name, value)
    return chosen


def _values(text: str, default: Any) -> list[str]:
    """Split `A,B` into values. Commas within brackets and quotes belong to a value, unless the default is a text."""
    listed = f"[{text}]"
    with contextlib.suppress(*_NOT_PYTHON, AttributeError):
        if not isinstance(default, str):
            elements = ast.parse(listed, mode="eval").body.elts  # type: ignore[attr-defined]
            return [str(ast.get_source_segment(listed, element)) for element in elements]
    return text.split(",")


def _typed(name: str, text: str, default: Any) -> Any:
    if isinstance(default, str):
        return text
    expected_type = type(default)
    if expected_type is bool and text.lower() in _TRUTHS:
        return _TRUTHS[text.lower()]
    value: Any = text
    with contextlib.suppress(*_NOT_PYTHON):
        value = ast.literal_eval(text)
    if expected_type in (tuple, list) and isinstance(value, tuple | list):
        return expected_type(value)
    allowed = (float, int) if expected_type is float else expected_type
    # In Python, True is a number; in a scenario, True is not a number.
    is_allowed = isinstance(value, allowed) and (expected_type is bool or not isinstance(value, bool))
    if default is not None and not is_allowed:
        kind = "true or false" if expected_type is bool else f"{expected_type.__name__} values such as {default!r}"
        raise UserError(f"--set {name}={cut(text)} is not valid; give {kind}")
    return value


PREFIX = "plan."
MESH = "plan.mesh"
_MESH_PART = re.compile(r"([a-z_]+?)(\d+)")


@dataclass(frozen=True)
class Knob:
    """A change to a plan.

    Args:
        values: the allowed values, or () for any value of the type of `example`.
        needs: the part that a plan must have for this change: "fsdp", "cp" or "".
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
    "plan.reduce_scatter_group": Knob("own", ("shared", "own"), "fsdp"),
    "plan.reduce_scatter_buffers": Knob(2, needs="fsdp"),
    "plan.compile": Knob("inductor", ("none", "eager", "aot_eager", "inductor")),
    "plan.loss": Knob("compiled", ("none", "compiled", "chunked")),
}


def is_knob(name: str) -> bool:
    """Return whether a name of --set is a change to the plan. Raise UserError for an unknown `plan.` name."""
    if name.startswith(PREFIX) and name not in KNOBS:
        raise UserError(f"--set {name} is not a change to a plan ({nearest(name, KNOBS)})")
    return name in KNOBS


def _check_knob(name: str, value: Any) -> None:
    knob = KNOBS[name]
    if name == MESH:
        parse_brief_mesh(value)
    elif knob.values and value not in knob.values:
        raise UserError(f"--set {name}={value} is unknown; use {', '.join(map(str, knob.values))}")
    elif not knob.values and not 0 < value < 1 << 16:
        raise UserError(f"--set {name}={value} is not valid; give a whole number from 1")


def split_variant(variant: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split a variant into arguments of the scenario's function and changes to the plan."""
    knobs = {name: value for name, value in variant.items() if name in KNOBS}
    return {name: value for name, value in variant.items() if name not in knobs}, knobs


def brief_mesh(mesh: Mapping[str, int]) -> str:
    """Return `dp_shard2xtp2` for `{"dp_shard": 2, "tp": 2}`; mesh dims of size 1 are omitted, except in a mesh of one
    rank."""
    kept = {name: size for name, size in mesh.items() if size > 1} or mesh
    return "x".join(f"{name}{size}" for name, size in kept.items())


def parse_brief_mesh(text: str, option: str = f"--set {MESH}") -> Mesh:
    """Return the mesh from a text of `brief_mesh`. Raise UserError with the name of the option for any other text."""
    mesh: Mesh = {}
    for part in str(text).split("x"):
        match = _MESH_PART.fullmatch(part)
        if match is None or match[1] in mesh:
            raise UserError(f"{option}={text} is not a mesh; write for example {option}=dp_shard2xtp2")
        mesh[match[1]] = mesh_dim_size(match[2], part)
    check_mesh_dims(mesh)
    return mesh


def mesh_of(variant: Mapping[str, Any], mesh: Mapping[str, int]) -> Mesh:
    """Return the mesh of a variant: its `plan.mesh`, extended by the other mesh dims with size 1, else `mesh`.

    Raises:
        UserError: the number of ranks of `plan.mesh` differs from the number of `mesh`.
    """
    return mesh_on(variant[MESH], mesh) if MESH in variant else dict(mesh)


def mesh_on(text: str, mesh: Mapping[str, int], option: str = f"--set {MESH}") -> Mesh:
    """Return the mesh from a text of `brief_mesh`, extended by the other mesh dims of `mesh` with size 1.

    Raises:
        UserError: the text is not a mesh, or its number of ranks differs from that of `mesh`.
    """
    own_mesh = parse_brief_mesh(text, option)
    if mesh_size(own_mesh) != mesh_size(mesh):
        sizes = f"{count_text(mesh_size(own_mesh), 'rank')}, but the launch has {mesh_size(mesh)}"
        problem = f"{option}={text} has {sizes}"
        raise UserError(f"{problem}; give meshes of this size, or change --mesh")
    return {**dict.fromkeys(mesh, 1), **own_mesh}


# `run -k EXPR` selects cases by parts of their ids with `and`, `or`, `not` and parentheses, as pytest's -k selects
# tests.

_Matches = Callable[[str], bool]
# In quotes, a part of an id may contain spaces and parentheses, as in ids of redistributions.
TOKEN = re.compile(r"""\s*(?:(?P<mark>[()])|"(?P<double>[^"]*)"|'(?P<single>[^']*)'|(?P<word>[^\s()"']+))""")
MAX_NAMED, MAX_SHOWN = 3, 200
MAX_DEPTH = 50


class CaseChoice:
    """A parsed expression of -k. Raise UserError if the expression is not valid."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = self._split()
        self._depth = 0
        self._matches = self._any_of()
        if self._tokens:
            raise self._wrong(f"{self._tokens[0][1]!r} is not expected here")

    def matches(self, case_id: str) -> bool:
        """Return whether a case is chosen, ignoring upper and lower case."""
        return self._matches(case_id.lower())

    def _split(self) -> list[tuple[str, str]]:
        """Return (kind, text) of each token; kinds are "mark", "word" and "quoted"."""
        tokens, place, text = [], 0, self._text.strip()
        while place < len(text):
            match = TOKEN.match(text, place)
            if match is None:
                raise self._wrong("a quote is not closed")
            kind = str(match.lastgroup)
            tokens.append((kind if kind in ("mark", "word") else "quoted", match[kind]))
            place = match.end()
        return tokens

    def _any_of(self) -> _Matches:
        parts = [self._all_of()]
        while self._take("word", "or"):
            parts.append(self._all_of())
        return lambda case_id: any(part(case_id) for part in parts)

    def _all_of(self) -> _Matches:
        parts = [self._one()]
        while self._take("word", "and"):
            parts.append(self._one())
        return lambda case_id: all(part(case_id) for part in parts)

    def _one(self) -> _Matches:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise self._wrong(f"nested deeper than {MAX_DEPTH} levels")
        part = self._part()
        self._depth -= 1
        return part

    def _part(self) -> _Matches:
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
        advice = 'write parts of ids with and, or, not and parentheses, such as -k "greedy and not f32"'
        if re.search(r"\w\(|\)\w", self._text):
            advice = """put a part that has parentheses in quotes, such as -k "greedy and 'S(0)->R'\""""
        return UserError(f"-k {_shown(self._text)}: {why}; {advice}")


def _shown(text: str) -> str:
    return repr(text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}...")


def none_chosen(text: str, num_cases: int, ids: Sequence[str]) -> str:
    """Return one sentence on a choice that matches no case."""
    choice = f"-k {_shown(text)} matches 0 of {count_text(num_cases, 'case')}"
    return f"{choice}, such as {', '.join(ids[:MAX_NAMED])}; `run --dry-run` lists all"
