"""File access: reading to plain data, with one sentence if a file is rejected, and atomic writing.

Files are rejected if they are not regular (reading a device may never end, reading a pipe may never begin), too big, or
JSON that distbench never writes: NaN, infinity, overlong numbers, deep nesting. `spec/json_decoder.py` makes records of
plain data.
"""

import contextlib
import errno
import gc
import json
import math
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from distbench.spec.errors import UserError

MAX_DOCUMENT_BYTES = 256 << 20
MAX_DEPTH = 50
MAX_COUNT = 10**18  # every count is smaller
MAX_DIGITS = 18
_KINDS = {
    stat.S_ISDIR: "a folder",
    stat.S_ISFIFO: "a pipe",
    stat.S_ISCHR: "a device",
    stat.S_ISBLK: "a device",
    stat.S_ISSOCK: "a socket",
}
# Every digit becomes 0, so that a search for bytes finds floats that may be too large.
_DIGITS = bytes.maketrans(b"123456789E", b"000000000e")
_LONG = b"0" * 300


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in record if names.count(name) > 1)
        raise ValueError(f"an object contains the name {ascii(twice)[:60]} twice")
    return record


def _whole(digits: str) -> int:
    if len(digits) > MAX_DIGITS and abs(value := int(digits[:4000])) > MAX_COUNT:
        raise ValueError(f"whole number {str(value)[:MAX_DIGITS]}... is above {MAX_COUNT:.0e}")
    return int(digits)


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, parse_int=_whole)
_STRICT = json.JSONDecoder(parse_constant=_refuse_constant, parse_int=_whole, object_pairs_hook=_without_repeats)


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Suspend garbage collection during reading of many records, which have no cycles. Collection would double the
    time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@contextmanager
def opened(path: Path, label: str, max_bytes: int = MAX_DOCUMENT_BYTES) -> Iterator[BinaryIO]:
    """Open a regular file of at most `max_bytes` bytes for reading in binary mode.

    Args:
        label: the kind of file, for messages.

    Raises:
        UserError: the file is not regular, too big, or not readable.
    """
    try:
        status = os.stat(path)  # noqa: PTH116 - before opening, because opening a pipe waits for a writer
        if not stat.S_ISREG(status.st_mode):
            kind = next((kind for is_kind, kind in _KINDS.items() if is_kind(status.st_mode)), "not a regular file")
            raise UserError(f"{label} {path} cannot be read: it is {kind}; give a file")
        if status.st_size > max_bytes:
            size = f"the file has {status.st_size:,} bytes, but the limit is {max_bytes:,} bytes"
            raise UserError(f"{label} {path} cannot be read: {size}; give another file")
        with path.open("rb") as file:
            yield file
    except UnicodeDecodeError as error:
        needed = "it is not UTF-8 text; decompress or convert it first"
        raise UserError(f"{label} {path} cannot be read: {needed}") from error
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise UserError(f"{label} {path} cannot be read: {why}") from error


def read_text(path: Path, label: str, max_bytes: int = MAX_DOCUMENT_BYTES) -> str:
    """Return a file's text. Raise UserError as `opened` does, and for bytes that are not valid UTF-8."""
    with opened(path, label, max_bytes) as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise UserError(f"{label} {path} cannot be read: the file exceeds the limit of {max_bytes:,} bytes")
    try:
        return data.decode("utf-8-sig")  # editors on Windows write a byte order mark first
    except UnicodeDecodeError as error:
        raise UserError(f"{label} {path} cannot be read: byte {error.start} is not valid UTF-8") from error


def read_json(path: Path, label: str) -> Any:
    """Return a file's JSON value. Raise UserError as `read_text` does, and for invalid JSON or duplicate names in an
    object."""
    try:
        return parse_json(read_text(path, label), _STRICT)
    except ValueError as error:
        raise UserError(f"{label} {path} cannot be read: {error}") from error


def parse_json(text: str | bytes, decoder: json.JSONDecoder = _DECODER) -> Any:
    """Return the value of a JSON text with finite numbers, integers up to MAX_COUNT and at most MAX_DEPTH levels.

    Raises:
        ValueError: the text is not valid; the message is a short clause.
    """
    data = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    try:
        value = decoder.decode(data.decode("utf-8"))
    except RecursionError as error:
        raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"line {error.lineno}, column {error.colno} is not valid JSON ({error.msg})") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start} is not valid UTF-8") from error
    except ValueError as error:  # of the hooks above
        raise ValueError(str(error).partition(";")[0]) from error
    zeros = data.translate(_DIGITS, b"+")
    has_long_number = b"e00" in zeros or _LONG in zeros
    if has_long_number or data.count(b"[") + data.count(b"{") > MAX_DEPTH:
        _require_sane(value)
    if b"\\u" in data:
        # Files and terminals do not accept half of a surrogate pair.
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise ValueError("a string contains half a character (a lone surrogate)") from error
    return value


def _require_sane(value: Any) -> None:
    """Reject infinite numbers and deep nesting. The check is a loop over levels, because recursion fails for deep
    values."""
    level = [[value]]
    for _ in range(MAX_DEPTH + 1):
        inner: list[Any] = []
        for values in level:
            for item in values:
                if isinstance(item, dict):
                    inner.append(item.values())
                elif isinstance(item, list):
                    inner.append(item)
                elif isinstance(item, float) and not math.isfinite(item):
                    raise ValueError("it contains a number too large for a float")
        if not inner:
            return
        level = inner
    raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels")


# With these errors, the folder accepts no new file or the file is a mount point, so the file is written in place.
IN_PLACE = (errno.EACCES, errno.EPERM, errno.EBUSY)
RANDOM_BYTES = 6  # several launches of a sweep start per second; with 2 bytes, 1 sweep in 11,000 had a duplicate name
DAY_S = 86_400.0
LATEST = 1e11  # seconds since the epoch, year 5138; later dates cannot be written
MAX_SHOWN = 60


def unique_stem(moment: float, *parts: str) -> str:
    """Return a unique file name without suffix: `20261123T071449Z-PARTS-<12 random hex digits>`.

    Args:
        moment: seconds since the epoch.
    """
    begun = datetime.fromtimestamp(moment, UTC).strftime("%Y%m%dT%H%M%SZ")
    return "-".join([begun, *parts, os.urandom(RANDOM_BYTES).hex()])


@contextmanager
def writing(what: str, instead: str = "file") -> Iterator[None]:
    """Raise UserError if the system refuses to write `what`, such as "--page out.html"; `instead` is what to give."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{what} cannot be written ({error.strerror or error}); give another {instead}") from error


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a text (UTF-8) or bytes to a temporary file, then rename it; after a failure the old file remains.

    Raises:
        OSError: the file cannot be written.
    """
    data = content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content
    if path.exists() and not path.is_file():
        path.write_bytes(data)  # a device
        return
    target = Path(os.path.realpath(path))  # a link remains a link
    new = target.with_name(f".{target.name[:100]}.{os.getpid()}")
    try:
        with new.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if target.exists():
            import shutil

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


def short_path(path: Path) -> Path:
    """Return a path relative to the working folder if the path is inside this folder, else the path."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def shown(value: Any) -> str:
    """Return the beginning of a value's text, on one line, for a message."""
    if isinstance(value, list | dict):
        kind = "a list" if isinstance(value, list) else "an object"
        return f"{kind} of {len(value)}"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    text = ascii(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."
