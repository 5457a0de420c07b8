"""The folder of a sweep: which sweep it is of, and the rounds that were measured."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from distbench.spec.errors import UserError
from distbench.spec.fields import NAME, Kind, Kinds, wrong_field
from distbench.spec.printable import count_text
from distbench.spec.reading import read_json
from distbench.spec.writing import write_whole
from distbench.sweep.setup import Setup

FILE = "sweep.json"
_TEXTS = Kind(lambda value: type(value) is list and all(type(one) is str for one in value), "a list of texts")
_SWEEP: Kinds = {"scenario": NAME, "file": NAME, "world": Kind(lambda value: type(value) is int, "a whole number")}
_ROUND: Kinds = {"run_file": NAME, "labels": _TEXTS, "code": NAME}


def require_folder(out: Path, setup: Setup, resume: bool) -> None:
    """Refuse a folder of another sweep, and with --resume one of none.

    Raises:
        UserError: nothing in the folder has been changed.
    """
    file = out / FILE
    if not file.is_file():
        if resume:
            raise UserError(f"--resume: {out} holds no sweep; give the --out of the earlier one, or leave --resume out")
        return
    known = _checked(read_json(file, "sweep file"), _SWEEP, file, "give another --out")
    if any(known[name] != value for name, value in _identity(setup).items()):
        what = f"{known['scenario']} ({known['file']}) on {count_text(known['world'], 'rank')}"
        raise UserError(f"--out {out} holds a sweep of {what}, which this one would overwrite; give another --out")


def claim_folder(out: Path, setup: Setup) -> None:
    """Say in the folder which sweep it is of; UserError where it cannot be written."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        write_whole(out / FILE, json.dumps(_identity(setup)))
    except OSError as error:
        raise UserError(f"--out {out} cannot be written ({error.strerror}); give another folder") from error


def _identity(setup: Setup) -> dict[str, Any]:
    return {"scenario": setup.entry.name, "file": str(setup.entry.file.resolve()), "world": setup.world}


def keep_round(file: Path, run_file: Path, labels: Sequence[str], code: str) -> None:
    """Keep which run file has a round's plans.

    Args:
        code: what the run file depends on besides its labels: a digest.
    """
    write_whole(file, json.dumps({"run_file": str(run_file), "labels": [*labels], "code": code}))


def read_round(file: Path, code: str) -> tuple[Path, list[str]] | None:
    """(run file, labels) of a round; None where there is no such round, or it is of other code.

    Raises:
        UserError: the file is damaged.
    """
    if not file.is_file():
        return None
    advice = "delete it, and --resume measures that round again"
    known = _checked(read_json(file, "round file"), _ROUND, file, advice)
    return (Path(known["run_file"]), known["labels"]) if known["code"] == code else None


def _checked(record: Any, kinds: Kinds, file: Path, advice: str) -> dict[str, Any]:
    wrong = wrong_field(record, kinds, [*kinds]) if isinstance(record, dict) else "it is no object"
    if wrong:
        raise UserError(f"{file} cannot be used: {wrong}; {advice}")
    found: dict[str, Any] = record
    return found
