"""One folder of logs a launch, though each host's launcher has a name of its own for it."""

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from distbench.spec import Job
from distbench.spec.job import JOB_FILE


def join_logs(job: Job, hosts: Sequence[str], gather: Callable[[Any], list[Any]]) -> list[str]:
    """Move this rank's folder beside rank 0's, where this host sees that; a sentence on the hosts that do not.

    A link stays in its old place, so that paths that are known already go on working: who started the rank takes it
    away (`launch/storage.py`).

    Args:
        job: this rank's.
        hosts: each rank's host, in rank order.
        gather: gives every rank's value, in rank order.
    """
    told = gather((job.log_dir, job.run_id))
    folders = {folder for folder, _ in told}
    if len(folders) == 1:  # ranks of a launch of our own
        return []
    first, run_id = told[0]
    is_seen = _is_of(Path(first), run_id)
    if is_seen:
        _move(Path(job.log_dir), Path(first).parent / Path(job.log_dir).name)
    blind = list(dict.fromkeys(host for host, seen in zip(hosts, gather(is_seen), strict=True) if not seen))
    if not blind:
        return []
    who = f"host{'s' if len(blind) > 1 else ''} {', '.join(blind)} {'do' if len(blind) > 1 else 'does'}"
    what = f"{who} not see {Path(first).parent} of host {hosts[0]}"
    return [f"{what}: the run file is on host {hosts[0]}, and each host keeps the logs of its own ranks"]


def _is_of(folder: Path, run_id: str) -> bool:
    """Whether rank 0's folder is here; another host may have one of that name for itself."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return run_id in (folder / JOB_FILE).read_text(encoding="utf-8")
    return False


def _move(own: Path, wanted: Path) -> None:
    """Move it, or leave it where that cannot be."""
    if own == wanted or wanted.exists():
        return
    with contextlib.suppress(OSError):
        own.rename(wanted)
        try:
            own.symlink_to(wanted, target_is_directory=True)
        except OSError:
            wanted.rename(own)
