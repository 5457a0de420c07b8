"""Text files that are written as a whole or not at all."""

import contextlib
import errno
import os
import shutil
from pathlib import Path

# The folder takes no new file, or something is mounted on this one: then it can only be written in place.
IN_PLACE = (errno.EACCES, errno.EPERM, errno.EBUSY)


def write_whole(path: Path, text: str) -> None:
    """Write a text, or leave what was there: a disk that fills up would keep neither the old nor the new one.

    Raises:
        OSError: it cannot be written.
    """
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")  # a device
        return
    target = Path(os.path.realpath(path))  # a link stays one
    new = target.with_name(f".{target.name[:100]}.{os.getpid()}")
    try:
        with new.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        if target.exists():
            shutil.copymode(target, new)
        new.replace(target)
    except OSError as error:
        with contextlib.suppress(OSError):
            new.unlink()
        if error.errno not in IN_PLACE:
            raise OSError(error.errno, error.strerror, str(path)) from error
        path.write_text(text, encoding="utf-8")
