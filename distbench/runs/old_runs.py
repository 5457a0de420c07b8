"""Runs under a results folder with all that belongs to them, told apart from what is not ours to delete."""

import contextlib
import shutil
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from distbench.runs.baselines import FOLDER as BASELINES
from distbench.runs.find import run_files_in
from distbench.runs.header import Header, header_of
from distbench.runs.record_reader import RecordReader
from distbench.spec.errors import UserError
from distbench.spec.printable import count_text

# Folders whose launches belong together: one command made them, to be compared with each other.
TOGETHER = ("ab", "self-test")
LOGS, LAUNCHERS = "logs", ("slurm-", "torchrun-")
GOING_ON_S = 86_400.0  # a run without a footer that was written to since may still be going on
FOOTER = b'"type":"footer"'
TAIL_BYTES = 1 << 16


@dataclass(frozen=True)
class OldRun:
    """What one command measured.

    Args:
        run_files: its run files; `files` are these and the files of their logs.
        log_folders: of their ranks.
        started_at: seconds since the epoch, of the first.
        text: its scenarios, or the folder that holds its launches.
        goes_on: whether it may still be measuring.
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
        """The date, UTC."""
        return time.strftime("%Y-%m-%d %H:%M", time.gmtime(self.started_at))


def kept_and_old(folder: Path, keep: int | None, before: float | None) -> tuple[list[OldRun], list[OldRun]]:
    """The runs under a results folder that stay, and those that go; each oldest first.

    Args:
        folder: the results folder.
        keep: the newest so many stay, or None.
        before: what began later (seconds since the epoch) stays, or None.

    Raises:
        UserError: it is no folder.
    """
    if not folder.is_dir():
        raise UserError(f"--runs {folder} is no folder; give a results folder, such as results")
    runs = sorted(_runs_in(folder), key=lambda run: run.started_at)
    newest = {id(run) for run in runs[len(runs) - keep :]} if keep else set()
    stays = [run.goes_on or id(run) in newest or (before is not None and run.started_at >= before) for run in runs]
    kept, old = ([run for run, stay in zip(runs, stays, strict=True) if stay is wanted] for wanted in (True, False))
    return kept, old


def _runs_in(folder: Path) -> list[OldRun]:
    together: dict[object, list[tuple[Path, Header]]] = {}
    for path in run_files_in(folder):
        parts = path.relative_to(folder).parts
        # A link may lead anywhere, and what cannot be read as a run may be anybody's.
        if BASELINES in parts or path.is_symlink():
            continue
        with contextlib.suppress(UserError):
            about = header_of(RecordReader(path, []).header())
            key = parts[:2] if parts[0] in TOGETHER else about.invocation_id or about.run_id or str(path)
            together.setdefault(key, []).append((path, about))
    return [_run_of(key, some, folder) for key, some in together.items()]


def _launch_folder(log_dir: str | None, folder: Path) -> Path | None:
    """Where the ranks of another launcher's launch each have a folder of their own, if it lies in `folder`."""
    launch = Path(log_dir or "").parent
    inside = launch.parent == folder.resolve() / LOGS and launch.name.startswith(LAUNCHERS)
    return folder / LOGS / launch.name if inside else None


def _run_of(key: object, some: Sequence[tuple[Path, Header]], folder: Path) -> OldRun:
    run_files = tuple(path for path, _ in some)
    beside = [path.parent / LOGS / path.stem for path in run_files]
    launches = [one for _, about in some if (one := _launch_folder(about.log_dir, folder))]
    log_folders = tuple(logs for logs in (*beside, *launches) if logs.is_dir() and not logs.is_symlink())
    written = [path for one in log_folders for path in one.rglob("*") if path.is_symlink() or path.is_file()]
    files = (*run_files, *written)
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
    """Delete the runs, and folders below `folder` that are empty then; a sentence for each that could not go."""
    failed = []
    for run in runs:
        for one in (*run.log_folders, *run.run_files):
            try:
                if one.is_dir():
                    shutil.rmtree(one)
                else:
                    one.unlink()
            except OSError as error:
                failed.append(f"{one} could not be deleted: {error.strerror or error}")
            for parent in one.parents:
                if parent == folder or not _removed_if_empty(parent):
                    break
    return failed


def _removed_if_empty(folder: Path) -> bool:
    try:
        folder.rmdir()
    except OSError:
        return False
    return True
