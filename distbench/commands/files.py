"""Files and folders as the command line names them: patterns expanded, what cannot be written refused in a sentence."""

import glob
import time
from collections.abc import Sequence
from pathlib import Path

from distbench.spec.errors import UserError
from distbench.spec.writing import write_whole


def expanded(paths: Sequence[str]) -> list[Path]:
    """Patterns that a shell has not expanded; what exists is taken by its name. A pattern must match something."""
    found: list[Path] = []
    for text in paths:
        if Path(text).exists() or not glob.has_magic(text):
            found.append(Path(text))
            continue
        matches = sorted(glob.glob(text, recursive=True))  # noqa: PTH207 - Path.glob takes no absolute pattern
        if not matches:
            raise UserError(f"pattern {text!r} matches no file; give run files or a folder of them")
        found += [Path(match) for match in matches]
    return found


def check_writable(path: Path, option: str) -> None:
    """Refuse a file that cannot be written before something is measured for it; nothing is left where none was."""
    if not path.resolve().parent.is_dir():
        missing = f"there is no folder {path.parent}; make it, or give another file"
        raise UserError(f"{option} {path} cannot be written: {missing}")
    is_new = not path.exists()
    try:
        path.open("a").close()
    except OSError as error:
        raise UserError(f"{option} {path} cannot be written ({error.strerror}); give another file") from error
    if is_new:
        path.unlink()


def make_folder(path: Path, option: str) -> None:
    """Make a folder that may be there already, or raise a UserError."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{option} {path} is no folder and cannot be made: {error.strerror}; give another") from error


def write(path: Path, text: str, mode: str = "w") -> None:
    """Write a text, or append it with mode "a"; a UserError where the file cannot be written."""
    try:
        if mode == "w":
            write_whole(path, text)
            return
        with path.open(mode, encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}); give another file") from error


def new_folder(kind: str, out: Path | None = None) -> Path:
    """`out`, or a folder of this moment below results/; it need not exist yet, and holds no file.

    Raises:
        UserError: `out` is no folder, or holds files.
    """
    folder = out or Path("results") / kind / time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--out {folder} is no folder; give another, or one that is not there yet")
    # Empty folders are what a launch that could not work leaves behind.
    if any(path.is_file() for path in folder.rglob("*")):
        raise UserError(f"--out {folder} is not empty; give a new folder, so that only these launches are compared")
    return folder
