"""Which trace is meant: `RUN`, or `RUN::PART` with a part of the case's id."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from distbench.runs.find import collect
from distbench.runs.run_file import Run
from distbench.spec.errors import UserError
from distbench.traces.records import Trace, traces_of

SEPARATOR = "::"
HOW_TO_TRACE = "trace a step with `distbench run SCENARIO --trace-paths`"


@dataclass(frozen=True)
class Chosen:
    """The runs that were named, and their traces without those that no PART means."""

    runs: list[Run]
    traces: list[Trace]
    is_part: bool  # a PART was named
    warnings: list[str]  # on files and lines that were left out
    failed: list[str]  # one for each trace that failed or cannot be read


def chosen(named: Sequence[Path], out: Path | None) -> Chosen:
    """The traces of run files and folders, each with or without `::PART`; of the latest run under `out` for none."""
    asked = [_split(given) for given in named]
    runs, warnings = collect(tuple(path for path, _ in asked), out)
    traces, failed = traces_of(runs)
    if not traces:
        of = ", ".join(map(str, named)) or f"the latest run under {out}"
        why = f" ({'; '.join(failed)})" if failed else ""
        raise UserError(f"{of} holds no trace of a step{why}; {HOW_TO_TRACE}")
    for path, part in asked:
        if not any(_is_meant(trace, path, part) for trace in traces) and part:
            raise UserError(f"no traced case of {path} has {part!r} in its id; {_there_are(traces)}")
    kept = [trace for trace in traces if not asked or any(_is_meant(trace, path, part) for path, part in asked)]
    return Chosen(runs, kept, any(part for _, part in asked), warnings, failed)


def one_trace(given: Path) -> tuple[Trace, list[str]]:
    """The one trace that `RUN` or `RUN::PART` names, and sentences on what was left out.

    A PART that is the whole end of one case's id means that case, whatever else holds it.
    """
    found = chosen((given,), None)
    path, part = _split(given)
    traces = [trace for trace in found.traces if part and trace.case_id.endswith(f"/{part}")] or found.traces
    if len(traces) > 1:
        how = f"give {path}{SEPARATOR}PART with a part of one's case id"
        raise UserError(f"{given} holds {len(traces)} traces; {how}; {_there_are(traces)}")
    return traces[0], [*found.warnings, *found.failed]


def _split(given: Path) -> tuple[Path, str]:
    """(the run file or folder, the part of a case's id after `::`; empty for none)."""
    if given.exists():
        return given, ""
    path, _, part = str(given).partition(SEPARATOR)
    return Path(path), part


def _is_meant(trace: Trace, path: Path, part: str) -> bool:
    is_of_run = trace.run.path.resolve().is_relative_to(path.resolve()) or trace.run.scenario == str(path)
    return is_of_run and part in trace.case_id


def _there_are(traces: Sequence[Trace]) -> str:
    shown = ", ".join(trace.case_id for trace in traces[:8])
    return f"there are: {shown}" + (", ..." if len(traces) > 8 else "")
