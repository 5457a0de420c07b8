"""Whether the folders of a launch can be written, tried before it begins and when it has failed; where its logs are."""

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

from distbench.spec import Job
from distbench.spec.job import JOB_FILE

# More than a rank needs to say why it failed.
PROBE_BYTES = 8192
MAX_LOG_BYTES, KEPT_LOG_BYTES = 50_000_000, 1_000_000  # of each log


def make_folders(job: Job) -> None:
    """Make the folders of logs and of the run file, and write the job; an OSError where that cannot be."""
    log_dir, folder = Path(job.log_dir), Path(job.run_file).parent
    log_dir.mkdir(parents=True, exist_ok=True)
    job.save(log_dir / JOB_FILE)
    folder.mkdir(parents=True, exist_ok=True)
    _try_to_write(folder)


def why_unwritable(job: Job) -> str:
    """One sentence on the folder that takes no more, full or gone; empty where both take something."""
    for folder in (Path(job.run_file).parent, Path(job.log_dir)):
        try:
            _try_to_write(folder)
        except OSError as error:
            return cannot_be_written(error, folder)
    return ""


def moved_logs(job: Job) -> Path | None:
    """Where this rank moved its logs, beside rank 0's; the link that it left, and a folder of them, go.

    None where they are where they were.
    """
    own = Path(job.log_dir)
    if not own.is_symlink():
        return None
    now = own.resolve()
    with contextlib.suppress(OSError):
        own.unlink()
        own.parent.rmdir()  # not before the last rank of this host
    return now


def shorten_logs(log_dir: Path) -> dict[Path, int]:
    """Cut each log that has grown beyond MAX_LOG_BYTES to its beginning; how many bytes that took out of which.

    The ranks append, so that what they print next, such as a traceback, follows the beginning. A model that prints in
    each step would fill the disk otherwise.
    """
    cut = {}
    for path in log_dir.glob("*.log"):
        with contextlib.suppress(OSError):
            if (size := path.stat().st_size) > MAX_LOG_BYTES:
                os.truncate(path, KEPT_LOG_BYTES)
                cut[path] = size - KEPT_LOG_BYTES
    return cut


def too_long(cut_logs: Mapping[Path, int]) -> str:
    """One sentence on logs that were cut; empty where none was."""
    if not cut_logs:
        return ""
    longest = max(cut_logs, key=lambda path: cut_logs[path])
    more = f" ({len(cut_logs)} logs were cut)" if len(cut_logs) > 1 else ""
    what = f"{longest} grew too long: {cut_logs[longest] / 1e6:,.0f} MB were taken out of it{more}"
    return f"{what}; print less in the model, as printing is a part of what was timed"


def cannot_be_written(error: OSError, where: Path) -> str:
    """One sentence; `where` is for an error that names no file, as a full disk's does not."""
    return f"{error.filename or where} cannot be written: {error.strerror or error}"


def _try_to_write(folder: Path) -> None:
    probe = folder / f".probe{os.getpid()}"
    try:
        with probe.open("wb", buffering=0) as file:
            if file.write(bytes(PROBE_BYTES)) < PROBE_BYTES:
                file.write(b"\0")  # says why no more went in
            os.fsync(file.fileno())
    finally:
        probe.unlink(missing_ok=True)
