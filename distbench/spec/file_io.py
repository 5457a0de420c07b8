"""How files are read and written: read to plain data or refused in one sentence, written whole or not at all;
`spec/json_decoder.py` makes records of plain data."""

import contextlib
import errno
import json
import math
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from distbench.spec.errors import UserError

# How every file is read that this program did not write in this process: refused with one sentence, or plain data.
#
# Refused are what is no regular file (a device never ends, a pipe may never begin), what is too big, and JSON that no
# program of ours writes: NaN, infinity, numbers of absurd length, nesting without end.

MAX_DOCUMENT_BYTES = 256 << 20
MAX_DEPTH = 50
MAX_COUNT = 10**18  # above: no count of anything
MAX_DIGITS = 18
_KINDS = {
    stat.S_ISDIR: "a folder",
    stat.S_ISFIFO: "a pipe",
    stat.S_ISCHR: "a device",
    stat.S_ISBLK: "a device",
    stat.S_ISSOCK: "a socket",
}
# Every digit as 0: a float that may be too large is then found at the speed of a search for bytes.
_DIGITS = bytes.maketrans(b"123456789E", b"000000000e")
_LONG = b"0" * 300


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in record if names.count(name) > 1)
        raise ValueError(f"{ascii(twice)[:60]} stands in one object twice")
    return record


def _whole(digits: str) -> int:
    if len(digits) > MAX_DIGITS and abs(value := int(digits[:4000])) > MAX_COUNT:
        raise ValueError(f"whole number {str(value)[:MAX_DIGITS]}... is beyond {MAX_COUNT:.0e}")
    return int(digits)


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, parse_int=_whole)
_STRICT = json.JSONDecoder(parse_constant=_refuse_constant, parse_int=_whole, object_pairs_hook=_without_repeats)


@contextmanager
def opened(path: Path, what: str, max_bytes: int = MAX_DOCUMENT_BYTES) -> Iterator[BinaryIO]:
    """A regular file of at most `max_bytes`, open for reading bytes; `what` is what messages call it.

    Raises:
        UserError: it is no such file, or cannot be read.
    """
    try:
        status = os.stat(path)  # noqa: PTH116 - before it is opened: opening a pipe waits for its writer
        if not stat.S_ISREG(status.st_mode):
            kind = next((kind for is_kind, kind in _KINDS.items() if is_kind(status.st_mode)), "no regular file")
            raise UserError(f"{what} {path} cannot be read: it is {kind}; give a file")
        if status.st_size > max_bytes:
            size = f"its {status.st_size:,} bytes are more than the {max_bytes:,} that are read"
            raise UserError(f"{what} {path} cannot be read: {size}; give another file")
        with path.open("rb") as file:
            yield file
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise UserError(f"{what} {path} cannot be read: {why}") from error


def read_text(path: Path, what: str, max_bytes: int = MAX_DOCUMENT_BYTES) -> str:
    """A file's text (UTF-8). Raises as `opened`, also where it is no such text."""
    with opened(path, what, max_bytes) as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise UserError(f"{what} {path} cannot be read: it is still growing beyond {max_bytes:,} bytes")
    try:
        return data.decode("utf-8-sig")  # editors on Windows put a mark before it
    except UnicodeDecodeError as error:
        raise UserError(f"{what} {path} cannot be read: byte {error.start} is no UTF-8 text") from error


def read_json(path: Path, what: str, max_bytes: int = MAX_DOCUMENT_BYTES) -> Any:
    """A file's JSON value. Raises as `read_text`, also where `parse_json` refuses it, or an object has a name twice."""
    try:
        return parse_json(read_text(path, what, max_bytes), _STRICT)
    except ValueError as error:
        raise UserError(f"{what} {path} cannot be read: {error}") from error


def parse_json(text: str | bytes, decoder: json.JSONDecoder = _DECODER) -> Any:
    """The value of a JSON text: every number in it is finite, no whole one beyond MAX_COUNT; nesting at most MAX_DEPTH.

    Raises:
        ValueError: it is none, in one short sentence.
    """
    data = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    try:
        value = decoder.decode(data.decode("utf-8"))
    except RecursionError as error:
        raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"line {error.lineno}, column {error.colno} is no JSON ({error.msg})") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start} is no UTF-8 text") from error
    except ValueError as error:  # what the hooks above refuse
        raise ValueError(str(error).partition(";")[0]) from error
    zeros = data.translate(_DIGITS, b"+")  # an exponent's sign says nothing
    is_long = b"e00" in zeros or _LONG in zeros
    if is_long or data.count(b"[") + data.count(b"{") > MAX_DEPTH:
        _require_sane(value)
    if b"\\u" in data:
        _require_text(value)
    return value


def _require_text(value: Any) -> None:
    """Half of a surrogate pair stands in a string, but in no file and on no terminal."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError("a text of it holds half a character (a lone surrogate)") from error


def _require_sane(value: Any) -> None:
    """By levels and not by recursion, which a deep value would break."""
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
                    raise ValueError("a number in it is beyond any that a computer holds")
        if not inner:
            return
        level = inner
    raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels")


# Files that are written as a whole or not at all, and names that no other process gives.

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


DAY_S = 86_400.0
LATEST = 1e11  # seconds since the epoch, year 5138: beyond it dates cannot be written
MAX_SHOWN = 60


def short_path(path: Path) -> Path:
    """Relative to the working folder, where the path lies below that."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def shown(value: Any) -> str:
    """A value for a message: its beginning, on one line."""
    if isinstance(value, list | dict):
        kind = "a list" if isinstance(value, list) else "an object"
        return f"{kind} of {len(value)}"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    text = ascii(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."
