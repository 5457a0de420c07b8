"""The header of a run file: what was run, where, and which of it must agree before two launches are compared."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from distbench.spec.devices import DRIVER_FIELDS, first_backend_class
from distbench.spec.mesh import Mesh, format_mesh

# A number measured under another value of one of these is another number.
MUST_AGREE = (
    *("machine", "cpu_model", "num_cpus", "device", "device_name", "backend", "mesh", "world_size", "num_hosts"),
    *("num_threads", "scheduler", "pipelined", "passes"),
)
# These may be the very thing that is compared.
SHOWN = ("torch", *DRIVER_FIELDS, "python", "platform", "git_commit", "git_dirty", "variables", "settings", "profile")
Number = int | float
SIMULATED = "simulated"  # the field of a header, case or trace that nobody measured


@dataclass(frozen=True)
class Environment:
    """Where a run was made; None for what its header does not say, or says as something else than its type here."""

    machine: str | None = None
    cpu_model: str | None = None
    num_cpus: Number | None = None
    memory_bytes: Number | None = None
    num_devices: Number | None = None
    device_name: str | None = None
    device: str | None = None
    backend: str | None = None
    world_size: Number | None = None
    num_hosts: Number | None = None
    scheduler: str | None = None
    torch: str | None = None
    nccl: str | None = None
    git_commit: str | None = None
    git_dirty: bool | None = None
    cautions: tuple[str, ...] = ()  # in what hosts differ
    load_per_cpu: Number | None = None  # of the minute before the run began


@dataclass(frozen=True)
class Header:
    """What a run file's first line says, as far as anyone reads it; made by `header_of`, whatever the line holds.

    Args:
        invocation_id: what the runs of one `distbench run` share.
        device: as asked for; what was used is the environment's.
        settings: how samples were taken.
        profile: file of the machine's profile.
        log_dir: folder of rank 0's logs.
        label: the user's own text for the run; None for none.
        started_at: seconds since the epoch, or 0 where the line does not say.
        facts: every field of MUST_AGREE and SHOWN, as written; None where the line does not say.
        simulated: of a simulated run, on which hardware file's figures, with what assumed; empty for a measured one.
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
    started_at: Number = 0.0
    variants: Any = None
    environment: Environment = Environment()
    facts: dict[str, Any] = field(default_factory=lambda: _facts({}, {}))
    simulated: dict[str, Any] = field(default_factory=dict)


def basis_text(simulated: Mapping[str, Any]) -> str:
    """On what a simulated run stands, in short: its hardware file, and how many of its figures are no facts.

    Args:
        simulated: `Header.simulated`.
    """
    hardware = _mapping(simulated.get("hardware")).get("name") or "unknown"
    return f"by hardware file {hardware} with {guesses_text(simulated)}; distbench report --full lists what was assumed"


def guesses_text(simulated: Mapping[str, Any]) -> str:
    """`13 guessed, 2 extrapolated figures` of a simulated run's hardware file."""
    counts = [
        f"{len(names)} {said}"
        for basis, said in (("guess", "guessed"), ("fitted", "fitted"), ("extrapolated", "extrapolated"))
        if isinstance(names := simulated.get(basis), list | dict) and names
    ]
    return f"{', '.join(counts)} figures" if counts else "no guessed figure"


def header_of(record: Mapping[str, Any]) -> Header:
    """The header that a run file's first line is."""
    job, environment = (_mapping(record.get(name)) for name in ("job", "environment"))
    return Header(
        **{name: _of_type(record, name, str) for name in ("run_id", "invocation_id")},
        **{name: _of_type(job, name, str) for name in ("scenario", "device", "profile", "log_dir")},
        mesh=_of_type(job, "mesh", dict),
        settings=_mapping(job.get("settings")),
        label=_of_type(job, "label", str) or None,
        started_at=_of_type(job, "started_at", Number) or 0.0,
        variants=job.get("variants"),
        environment=_environment(environment),
        facts=_facts(job, environment),
        simulated=_mapping(record.get(SIMULATED)),
    )


def _environment(record: dict[str, Any]) -> Environment:
    scalars = [one for one in fields(Environment) if one.name != "cautions"]
    found = Environment(**{one.name: _of_type(record, one.name, one.type) for one in scalars})
    if isinstance(cautions := record.get("cautions"), list):
        found = replace(found, cautions=tuple(map(str, cautions)))
    load = record.get("load_at_start")
    if not (found.num_cpus and isinstance(load, list) and load and isinstance(load[0], Number)):
        return found
    return replace(found, load_per_cpu=load[0] / found.num_cpus)


def _facts(job: dict[str, Any], environment: dict[str, Any]) -> dict[str, Any]:
    facts = {name: environment.get(name) for name in (*MUST_AGREE, *SHOWN)}
    settings = dict(_mapping(job.get("settings")))
    facts["backend"] = _backend(environment)
    facts["mesh"] = format_mesh(_mapping(job.get("mesh"))) or None
    facts["device"] = environment.get("device") or job.get("device")
    facts["pipelined"] = settings.pop("iterations_per_sample", None)
    facts["passes"] = settings.pop("passes", 1)
    # Older files, which do not say, are of runs that checked everything.
    if settings.get("check") == "full":
        del settings["check"]
    facts["settings"] = settings or None
    facts["profile"] = job.get("profile")
    return facts


def _backend(environment: dict[str, Any]) -> Any:
    """The backend's name, with its class where that is not the one that the name has always had."""
    name, its_class = environment.get("backend"), environment.get("backend_class")
    return name if its_class in (None, first_backend_class(str(name))) else f"{name} ({its_class})"


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _of_type(record: Mapping[str, Any], name: str, kind: Any) -> Any:
    """The value of that name where it is of that type; else None."""
    value = record.get(name)
    return value if isinstance(value, kind) else None
