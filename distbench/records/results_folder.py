"""Run files in a results folder: files for a report, the newest file of a scenario, and old files to delete."""

import contextlib
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from distbench.records.machine import machine_name
from distbench.records.run_file import Header, Run, read_header, read_run
from distbench.spec.errors import UserError
from distbench.spec.job import CaseChoice, none_chosen
from distbench.spec.printable_text import capped_lines, count_text

MAX_FILE_WARNINGS = 5
BASELINES, LOGS = "baselines", "logs"
NO_RUNS = {LOGS, "recordings"}  # folders of launches and sweeps without run files
RUN_NAME = re.compile(r"last(~(?P<before>\d{1,5}))?|@(?P<label>.+)|(?P<commit>[0-9a-f]{7,40})")
NAMES = "last, last~1, @LABEL or a commit"
T = TypeVar("T")


def collect(targets: tuple[Path, ...], out: Path | None) -> tuple[list[Run], list[str]]:
    """The runs to report, oldest first, and warnings on ignored files and lines.

    Args:
        targets: run files, folders of run files, and names of scenarios, or empty for the latest invocation under
        `out`. Names select scenarios from the files. Without a file, each name means the scenario's latest invocation.
        out: the results folder, or None if `targets` are only paths.
    """
    warnings: list[str] = []
    names = [] if out is None else [str(name) for name in targets if is_scenario_name(name)]
    paths = [path for path in targets if str(path) not in names]
    if paths or out is None:
        runs = _read_named(paths, warnings)
        for name in names:
            if all(run.scenario != name for run in runs):
                raise _unknown(name, "these runs", [run.scenario for run in runs])
        runs = [run for run in runs if not names or run.scenario in names]
    else:
        runs = _read_latest(out, warnings, names)
    runs.sort(key=lambda run: (run.about.started_at, run.path.name))
    return runs, [*warnings, *(warning for run in runs for warning in run.warnings)]


def with_cases(runs: Sequence[Run], expression: str) -> list[Run]:
    """The runs with the cases that match an expression of -k, except runs without a match.

    Raises:
        UserError: the expression is not valid, or matches no case.
    """
    if not expression:
        return list(runs)
    choice = CaseChoice(expression)
    kept = [
        replace(
            run,
            cases=[record for record in run.cases if choice.matches(record["case"]["id"])],
            traces=[trace for trace in run.traces if choice.matches(trace["case_id"])],
        )
        for run in runs
    ]
    ids = list(dict.fromkeys(record["case"]["id"] for run in runs for record in run.cases))
    if ids and not any(run.cases for run in kept):
        raise UserError(none_chosen(expression, len(ids), ids))
    return [run for run in kept if run.cases]


def labelled(targets: tuple[Path, ...], out: Path, label: str) -> tuple[Path, ...]:
    """The run files with a label among the given files and folders, or under the results folder `out`.

    Raises:
        UserError: no run has the label.
    """
    files = [path for target in targets or (out,) for path in (run_files_in(target) if target.is_dir() else [target])]
    heads = read_each(files, _head, [])
    paths = tuple(path for path, about in heads if about.label == label)
    if not paths:
        raise UserError(f"no run has the label {label!r} of --label; {_labels_text(heads)}")
    return paths


def is_run_name(given: Path) -> bool:
    """Whether a text is a name of runs (NAMES), with or without `::PART`, rather than a file."""
    name = str(given).partition("::")[0]
    return RUN_NAME.fullmatch(name) is not None and not os.path.lexists(name) and not os.path.lexists(given)


def named_runs(targets: Iterable[Path], results: Path) -> tuple[Path, ...]:
    """The targets, with each name of runs (NAMES) replaced by its run files under `results`, oldest first.

    `last` is the latest command that measured, `last~1` the previous one. `@LABEL` is every run with that label. A
    commit is every run of the commit. Runs of a changed working tree count only if the clean commit has no runs.

    Raises:
        UserError: a name has no run.
    """
    heads: list[tuple[Path, Header]] | None = None
    paths: list[Path] = []
    for target in targets:
        if not is_run_name(target):
            paths.append(target)
            continue
        if heads is None:
            heads = read_each(run_files_in(results), _head, []) if results.is_dir() else []
            heads.sort(key=lambda head: (head[1].started_at, head[0].name))
        name, mark, part = str(target).partition("::")
        if any(about.scenario == name for _, about in heads):  # a scenario's name may look like a commit
            paths.append(target)
            continue
        paths += [Path(f"{path}{mark}{part}") for path in _files_of(name, heads, results)]
    return tuple(paths)


def named_run(target: Path, results: Path) -> Path:
    """The run file of a target. Raise UserError if a name has several run files."""
    files = named_runs((target,), results)
    if len(files) > 1:
        raise UserError(f"{target} has {len(files)} run files; give a single file, such as {files[-1]}")
    return files[0]


def _files_of(name: str, heads: Sequence[tuple[Path, Header]], results: Path) -> list[Path]:
    """The run files of one name; `heads` are all below the results folder, oldest first."""
    if not heads:
        raise UserError(f"{name}: no run file under {results}; measure with `distbench run`, or give --results DIR")
    match = RUN_NAME.fullmatch(name)
    assert match is not None
    if label := match["label"]:
        if files := [path for path, about in heads if about.label == label]:
            return files
        raise UserError(f"{name}: no run under {results} has this label; {_labels_text(heads)}")
    if commit := match["commit"]:
        of_commit = [(path, about) for path, about in heads if (about.environment.git_commit or "").startswith(commit)]
        clean = [path for path, about in of_commit if not about.environment.git_dirty]
        if of_commit:
            return clean or [path for path, _ in of_commit]
        commits = (about.environment.git_commit for _, about in reversed(heads))
        newest = list(dict.fromkeys(text[:8] for text in commits if text))
        there_are = f"the newest commits are {', '.join(newest[:3])}" if newest else "no run has a commit"
        raise UserError(f"{name}: no run under {results} has this commit; {there_are}")
    commands: dict[str, list[Path]] = {}
    for path, about in heads:
        commands.setdefault(about.invocation_id or str(path), []).append(path)
    number = int(match["before"] or 0)
    if number >= len(commands):
        oldest = f"last~{len(commands) - 1}" if len(commands) > 1 else "last"
        raise UserError(f"{name}: {results} has only {count_text(len(commands), 'run')}; the oldest is {oldest}")
    return list(commands.values())[-1 - number]


def _labels_text(heads: Iterable[tuple[Path, Header]]) -> str:
    labels = ", ".join(map(repr, sorted({about.label for _, about in heads if about.label})))
    return f"available labels: {labels}" if labels else "no run has a label; set a label with `run --label`"


def is_scenario_name(given: Path) -> bool:
    """Whether a text is a scenario's name, which is an identifier, and not a file or broken link in the current
    folder."""
    return str(given).isidentifier() and not os.path.lexists(given)


def _unknown(name: str, where: str, scenarios: Iterable[str]) -> UserError:
    scenario_names = ", ".join(sorted(set(scenarios)))
    problem = f"{name} is not a file or folder, and not a scenario of {where}"
    return UserError(f"{problem}; measured scenarios: {scenario_names}")


def run_files_in(folder: Path) -> list[Path]:
    """Every *.jsonl below the folder, except ranks' logs, progress files and recordings."""
    paths = (path.relative_to(folder) for path in folder.rglob("*.jsonl") if path.is_file())
    return sorted(folder / path for path in paths if path.name != "progress.jsonl" and not NO_RUNS & {*path.parts[:-1]})


def _read_named(targets: Iterable[Path], warnings: list[str]) -> list[Run]:
    runs: dict[Path, Run] = {}
    for target in targets:
        if target.is_dir():
            target_runs = read_each(run_files_in(target), read_run, warnings)
            if not target_runs:
                none = f"folder {target} contains no readable run file"
                raise UserError(f"{none}; give a results folder or a run file")
        elif target.exists():
            target_runs = [read_run(target)]
        else:
            none = f"run {target} does not exist"
            raise UserError(f"{none}; give a run file or folder, such as results/, or {NAMES}")
        runs.update({run.path.resolve(): run for run in target_runs})
    return list(runs.values())


def _read_latest(out: Path, warnings: list[str], names: Sequence[str]) -> list[Run]:
    heads = read_each(run_files_in(out), _head, warnings) if out.is_dir() else []
    if not heads:
        why = f" ({warnings[0]})" if warnings else ""
        raise UserError(f"no run file under {out}{why}; measure with `distbench run`, or give --results")
    chosen: dict[Path, None] = {}
    for name in names or [""]:
        own_heads = [head for head in heads if name in ("", head[1].scenario)]
        if not own_heads:
            raise _unknown(name, f"the runs under {out}", (about.scenario or "" for _, about in heads))
        newest_path, newest = max(own_heads, key=lambda head: (head[1].started_at, head[0].name))
        together = newest.invocation_id
        for path, about in own_heads:
            if path == newest_path or (together and about.invocation_id == together):
                chosen[path] = None
    runs = read_each(chosen, read_run, warnings)
    if not runs:
        raise UserError(f"the latest run cannot be shown: {warnings[-1]}; give another run file or folder")
    return runs


def read_each(paths: Iterable[Path], read: Callable[[Path], T], warnings: list[str]) -> list[T]:
    """The results of `read` for each path. A path that `read` rejects adds a warning."""
    good: list[T] = []
    refused: list[str] = []
    for path in paths:
        try:
            good.append(read(path))
        except UserError as error:
            refused.append(f"left out: {error}")
    warnings += capped_lines(refused, MAX_FILE_WARNINGS, "{} more files were left out for similar reasons")
    return good


def _head(path: Path) -> tuple[Path, Header]:
    return path, read_header(path)


def newest_finished(out: Path, scenario: str, fits: Callable[[Header], bool] = lambda about: True) -> Run | None:
    """The newest finished run of a scenario on this machine for which `fits` is true, in a results folder."""
    folder = out / machine_name()
    heads = read_each(run_files_in(folder), _head, []) if folder.is_dir() else []
    chosen = [head for head in heads if head[1].scenario == scenario and fits(head[1])]
    for path, _ in sorted(chosen, key=lambda head: head[1].started_at, reverse=True):
        for run in read_each([path], read_run, []):
            footer = run.footer or {}
            if footer.get("status") == "complete" and footer.get("wall_s") and run.cases:
                return run
    return None


TOGETHER = ("ab", "self-test")  # folders whose launches belong together
LAUNCHERS = ("slurm-", "torchrun-")
GOING_ON_S = 86_400.0  # a run without a footer and with a more recent write may still be measuring
FOOTER = b'"type":"footer"'
TAIL_BYTES = 1 << 16


@dataclass(frozen=True)
class OldRun:
    """The runs of one command.

    Args:
        run_files: run files of the command. `files` also includes the log files.
        log_folders: folders of the ranks' logs.
        started_at: start of the first run, in seconds since the epoch.
        text: scenarios of the command, or the folder of the launches.
        goes_on: whether the command may still be measuring.
    """

    run_files: tuple[Path, ...]
    log_folders: tuple[Path, ...]
    files: tuple[Path, ...]
    num_bytes: int
    started_at: float
    text: str
    goes_on: bool

    @property
    def started_text(self) -> str:
        """The start in UTC."""
        return time.strftime("%Y-%m-%d %H:%M", time.gmtime(self.started_at))


def runs_kept_and_deleted(folder: Path, keep: int | None, before: float | None) -> tuple[list[OldRun], list[OldRun]]:
    """The runs under a results folder to keep and the runs to delete, both oldest first.

    Args:
        folder: the results folder.
        keep: the number of newest runs to keep, or None.
        before: keep runs that started later, in seconds since the epoch, or None.

    Raises:
        UserError: `folder` is not a folder.
    """
    if not folder.is_dir():
        raise UserError(f"--results {folder} is not a folder; give a results folder, such as results")
    runs = sorted(_runs_in(folder), key=lambda run: run.started_at)
    newest = {id(run) for run in runs[len(runs) - keep :]} if keep else set()
    stays = [run.goes_on or id(run) in newest or (before is not None and run.started_at >= before) for run in runs]
    kept, old = ([run for run, stay in zip(runs, stays, strict=True) if stay is is_kept] for is_kept in (True, False))
    return kept, old


def _runs_in(folder: Path) -> list[OldRun]:
    together: dict[object, list[tuple[Path, Header]]] = {}
    for path in run_files_in(folder):
        parts = path.relative_to(folder).parts
        # A link may point anywhere, and a file that is not a run may belong to another program.
        if BASELINES in parts or path.is_symlink():
            continue
        with contextlib.suppress(UserError):
            about = read_header(path)
            key = parts[:2] if parts[0] in TOGETHER else about.invocation_id or about.run_id or str(path)
            together.setdefault(key, []).append((path, about))
    return [_run_of(key, some, folder) for key, some in together.items()]


def _run_of(key: object, some: Sequence[tuple[Path, Header]], folder: Path) -> OldRun:
    run_files = tuple(path for path, _ in some)
    logs = [path.parent / LOGS / path.stem for path in run_files]
    # With another launcher each rank has a folder inside the launch's folder.
    launches = [Path(about.log_dir or "").parent for _, about in some]
    logs += [
        folder / LOGS / launch.name
        for launch in launches
        if launch.parent == folder.resolve() / LOGS and launch.name.startswith(LAUNCHERS)
    ]
    log_folders = tuple(path for path in logs if path.is_dir() and not path.is_symlink())
    log_files = (path for log_folder in log_folders for path in log_folder.rglob("*"))
    files = (*run_files, *(path for path in log_files if path.is_symlink() or path.is_file()))
    names = dict.fromkeys(about.scenario or path.stem for path, about in some)
    text = "/".join(key) if isinstance(key, tuple) else ", ".join(names)
    return OldRun(
        run_files,
        log_folders,
        files,
        sum(path.lstat().st_size for path in files),
        min(float(about.started_at) for _, about in some) or min(path.stat().st_mtime for path in run_files),
        f"{text} ({count_text(len(some), 'launch', 'launches')})" if isinstance(key, tuple) else text,
        any(_goes_on(path) for path in run_files),
    )


def _goes_on(path: Path) -> bool:
    if time.time() - path.stat().st_mtime > GOING_ON_S:
        return False
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL_BYTES))
        return FOOTER not in file.read().replace(b'": "', b'":"')


def delete(runs: Iterable[OldRun], folder: Path) -> list[str]:
    """Delete the runs, and empty folders below `folder`. Return a sentence per path that cannot be deleted."""
    failed = []
    for run in runs:
        for path in (*run.log_folders, *run.run_files):
            try:
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink()
            except OSError as error:
                failed.append(f"{path} could not be deleted: {error.strerror or error}")
            with contextlib.suppress(OSError):  # the first folder that is not empty
                for parent in path.parents:
                    if parent == folder:
                        break
                    parent.rmdir()
    return failed
