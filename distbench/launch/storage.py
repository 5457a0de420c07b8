"""Whether the folders of a launch can be written, tried before it begins and when it has failed; where its logs are."""

import contextlib
import os
from pathlib import Path

from distbench.spec import Job
from distbench.spec.job import JOB_FILE

# More than a rank needs to say why it failed.
PROBE_BYTES = 8192


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
