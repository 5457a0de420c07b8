"""Which run files a report is about: those that were named, or every scenario of the latest `distbench run`."""

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from distbench.runs.header import Header, header_of
from distbench.runs.record_reader import RecordReader
from distbench.runs.run_file import Run, read_run
from distbench.spec.errors import UserError

MAX_FILE_WARNINGS = 5
# Folders of what a launch and a sweep leave beside run files.
NO_RUNS = {"logs", "recordings"}
T = TypeVar("T")


def collect(named: tuple[Path, ...], out: Path | None) -> tuple[list[Run], list[str]]:
    """The runs to report, oldest first, and sentences about files and lines that were left out.

    `named` are run files and folders of them; empty for the latest invocation under the results folder `out`. Names of
    scenarios among them leave the other scenarios out; where no file is named, each means its own latest invocation.
    Without `out` nothing is looked for: `named` are paths alone.
    """
    warnings: list[str] = []
    names = [] if out is None else [str(name) for name in named if is_scenario_name(name)]
    paths = [path for path in named if str(path) not in names]
    if paths or out is None:
        runs = _of_scenarios(names, _read_named(paths, warnings))
    else:
        runs = _read_latest(out, warnings, names)
    runs.sort(key=lambda run: (run.about.started_at, run.path.name))
    return runs, [*warnings, *(warning for run in runs for warning in run.warnings)]


def labelled(named: tuple[Path, ...], out: Path, label: str) -> tuple[Path, ...]:
    """The run files with that label among those named and in folders named, or under the results folder `out`.

    Raises:
        UserError: there is none.
    """
    files = [path for one in named or (out,) for path in (run_files_in(one) if one.is_dir() else [one])]
    heads = read_each(files, _head, [])
    found = tuple(path for path, about in heads if about.label == label)
    if not found:
        known = sorted({about.label for _, about in heads if about.label})
        there_are = f"there are {', '.join(map(repr, known))}" if known else "none has a label; `run --label` gives one"
        raise UserError(f"--label {label!r}: no run here has it; {there_are}")
    return found


def is_scenario_name(given: Path) -> bool:
    """Whether it is a scenario that is meant, and no file: a plain word, under which not even a broken link is here."""
    return str(given).isidentifier() and not os.path.lexists(given)


def _of_scenarios(names: Sequence[str], runs: list[Run]) -> list[Run]:
    for name in names:
        if all(run.scenario != name for run in runs):
            raise _unknown(name, "these runs", [run.scenario for run in runs])
    return [run for run in runs if not names or run.scenario in names]


def _unknown(name: str, where: str, scenarios: Iterable[str]) -> UserError:
    known = ", ".join(sorted(set(scenarios)))
    return UserError(f"{name} is no file or folder here, and no scenario of {where}; measured are: {known}")


def run_files_in(folder: Path) -> list[Path]:
    """Every *.jsonl below the folder that can be a run file: the ranks' logs, progress files, recordings are not."""
    found = (path.relative_to(folder) for path in folder.rglob("*.jsonl") if path.is_file())
    return sorted(folder / path for path in found if path.name != "progress.jsonl" and not NO_RUNS & {*path.parts[:-1]})


def _read_named(named: Iterable[Path], warnings: list[str]) -> list[Run]:
    runs: dict[Path, Run] = {}
    for given in named:
        if given.is_dir():
            read = read_each(run_files_in(given), read_run, warnings)
            if not read:
                none = f"folder {given} holds no run file that can be read"
                raise UserError(f"{none}; give a results folder or a run file")
        elif given.exists():
            read = [read_run(given)]
        else:
            none = f"run {given} does not exist: it is no file or folder here"
            raise UserError(f"{none}; give a run file or a folder of run files, such as results/")
        runs.update({run.path.resolve(): run for run in read})
    return list(runs.values())


def _read_latest(out: Path, warnings: list[str], names: Sequence[str] = ()) -> list[Run]:
    heads = read_each(run_files_in(out), _head, warnings) if out.is_dir() else []
    if not heads:
        why = f" ({warnings[0]})" if warnings else ""
        raise UserError(
            f"no run file is under {out}{why}; measure something first with `distbench run`, or give --runs"
        )
    chosen: dict[Path, None] = {}
    for name in names or [""]:
        own = [head for head in heads if name in ("", head[1].scenario)]
        if not own:
            raise _unknown(name, f"the runs under {out}", (about.scenario or "" for _, about in heads))
        chosen |= dict.fromkeys(_latest_of(own))
    runs = read_each(chosen, read_run, warnings)
    if not runs:
        raise UserError(f"the latest run cannot be shown: {warnings[-1]}; name another run file or folder")
    return runs


def _latest_of(heads: Sequence[tuple[Path, Header]]) -> list[Path]:
    """The newest run and those of the same invocation."""
    newest = max(heads, key=lambda head: (head[1].started_at, head[0].name))
    together = newest[1].invocation_id
    return [path for path, about in heads if path == newest[0] or (together and about.invocation_id == together)]


def read_each(paths: Iterable[Path], read: Callable[[Path], T], warnings: list[str]) -> list[T]:
    """What `read` gave for each path; one it refuses becomes a warning, for one bad file must not hide the rest."""
    good: list[T] = []
    refused: list[str] = []
    for path in paths:
        try:
            good.append(read(path))
        except UserError as error:
            refused.append(f"left out: {error}")
    warnings += refused[:MAX_FILE_WARNINGS]
    if len(refused) > MAX_FILE_WARNINGS:
        warnings.append(f"{len(refused) - MAX_FILE_WARNINGS} more files were left out for such reasons")
    return good


def _head(path: Path) -> tuple[Path, Header]:
    return path, header_of(RecordReader(path, []).header())
