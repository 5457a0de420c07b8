"""Which run files a report is about: those that were named, or every scenario of the latest `distbench run`."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from distbench.runs.header import Header, header_of
from distbench.runs.record_reader import RecordReader
from distbench.runs.run_file import Run, read_run
from distbench.spec.errors import UserError

MAX_FILE_WARNINGS = 5
T = TypeVar("T")


def collect(named: tuple[Path, ...], out: Path) -> tuple[list[Run], list[str]]:
    """The runs to report, oldest first, and sentences about files and lines that were left out.

    `named` are run files and folders of them; empty for the latest invocation under the results folder `out`.
    """
    warnings: list[str] = []
    runs = _read_named(named, warnings) if named else _read_latest(out, warnings)
    runs.sort(key=lambda run: (run.about.started_at, run.path.name))
    return runs, [*warnings, *(warning for run in runs for warning in run.warnings)]


def run_files_in(folder: Path) -> list[Path]:
    """Every *.jsonl below the folder that can be a run file: the ranks' logs and progress files are not."""
    found = (path.relative_to(folder) for path in folder.rglob("*.jsonl") if path.is_file())
    return sorted(folder / path for path in found if path.name != "progress.jsonl" and "logs" not in path.parts[:-1])


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
            raise UserError(f"run {given} does not exist; give a run file or a folder of run files, such as results/")
        runs.update({run.path.resolve(): run for run in read})
    return list(runs.values())


def _read_latest(out: Path, warnings: list[str]) -> list[Run]:
    heads = read_each(run_files_in(out), _head, warnings) if out.is_dir() else []
    if not heads:
        why = f" ({warnings[0]})" if warnings else ""
        advice = "measure something first with `distbench run`, or give --runs"
        raise UserError(f"no run file is under {out}{why}; {advice}")
    newest = max(heads, key=lambda head: (head[1].started_at, head[0].name))
    together = newest[1].invocation_id
    chosen = [path for path, about in heads if path == newest[0] or (together and about.invocation_id == together)]
    runs = read_each(chosen, read_run, warnings)
    if not runs:
        raise UserError(f"the latest run cannot be shown: {warnings[-1]}; name another run file or folder")
    return runs


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
