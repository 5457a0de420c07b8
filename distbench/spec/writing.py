"""Files that are written as a whole or not at all, and names that no other process gives."""

import contextlib
import errno
import os
import secrets
import shutil
from datetime import UTC, datetime
from pathlib import Path

# The folder takes no new file, or something is mounted on this one: then it can only be written in place.
IN_PLACE = (errno.EACCES, errno.EPERM, errno.EBUSY)

RANDOM_BYTES = 6  # 4 launches of one sweep begin within a second: of 2 bytes, 1 sweep in 11,000 had a name twice


def unique_stem(moment: float, *parts: str) -> str:
    """Return `20261123T071449Z-PARTS-<12 random hex digits>`, a file's name without its suffix.

    Args:
        moment: seconds since the epoch.
    """
    begun = datetime.fromtimestamp(moment, UTC).strftime("%Y%m%dT%H%M%SZ")
    return "-".join([begun, *parts, secrets.token_hex(RANDOM_BYTES)])


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a text (UTF-8) or bytes, or leave what was there: under another name first, renamed when it is whole.

    A disk that fills up, or a command that is stopped, would else keep neither the old nor the new one.

    Raises:
        OSError: it cannot be written.
    """
    data = content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content
    if path.exists() and not path.is_file():
        path.write_bytes(data)  # a device
        return
    target = Path(os.path.realpath(path))  # a link stays one
    new = target.with_name(f".{target.name[:100]}.{os.getpid()}")
    try:
        with new.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if target.exists():
            shutil.copymode(target, new)
        new.replace(target)
    except BaseException as error:
        with contextlib.suppress(OSError):
            new.unlink()
        if not isinstance(error, OSError):
            raise
        if error.errno not in IN_PLACE:
            raise OSError(error.errno, error.strerror, str(path)) from error
        path.write_bytes(data)
