"""An index of the launches below a results folder in SQLite. An update reads only new and changed files.

A launch is one row: its facts as JSON, the name of its list of cases, and the 10th percentiles as a block of float64.
"""

import hashlib
import json
import os
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from distbench.records.baselines import files_of, read_file
from distbench.records.foreign_numbers import NumberColumns, require_one_log_per_launch
from distbench.records.launches import SECONDS, Launch, Unit
from distbench.records.results_folder import MAX_FILE_WARNINGS
from distbench.spec.errors import UserError
from distbench.spec.file_io import no_garbage_collection
from distbench.spec.printable_text import capped_lines

INDEX_NAME = ".distbench-index.sqlite"
VERSION = 1  # an index of another version is written again
LOCK_S = 30.0
EVERY_FILES = 20  # between lines of progress
SCHEMA = f"""
CREATE TABLE files (path TEXT PRIMARY KEY, state TEXT, refused TEXT, warnings TEXT);
CREATE TABLE launches (path TEXT, about TEXT, is_latency INTEGER, cases TEXT, p10_s BLOB);
CREATE TABLE case_lists (name TEXT PRIMARY KEY, cases TEXT);
PRAGMA user_version = {VERSION};
"""


@dataclass(frozen=True)
class IndexedLaunch:
    """A launch in the index.

    Args:
        launch: without cases.
        is_latency: whether a case is a forward pass only.
        number: row of the 10th percentiles.
        cases: name of the list of measured cases.
    """

    launch: Launch
    is_latency: bool
    number: int
    cases: str


class RunIndex:
    """The launches below a results folder, or of one file.

    Args:
        warnings: sentences on files that were left out and on unreadable lines.
        launches: oldest first.
        num_read: number of files that were read because they are new or changed.
    """

    def __init__(
        self, database: sqlite3.Connection, results: Path, columns: NumberColumns, progress: Callable[[str], None]
    ) -> None:
        self._database = database
        self.warnings: list[str] = []
        files = {self._name(path, results): path for path in files_of(results, "--results", self.warnings, columns)}
        # As in `read_side`, a named file must be readable. If columns are given, every file must be readable.
        is_strict = not results.is_dir() or columns != NumberColumns()
        self.num_read = self._update(files, columns, is_strict, progress)
        self.launches = self._launches(files)

    @staticmethod
    def _name(path: Path, results: Path) -> str:
        return str(path.relative_to(results)) if path != results else path.name

    def _update(
        self, files: dict[str, Path], columns: NumberColumns, is_strict: bool, progress: Callable[[str], None]
    ) -> int:
        known = dict(self._database.execute("SELECT path, state FROM files"))
        states = {}
        for name, path in files.items():
            status = path.stat()
            states[name] = f"{status.st_size} {status.st_mtime_ns} {columns}"
        new = [name for name in files if known.get(name) != states[name]]
        for number, name in enumerate(new):
            if number and number % EVERY_FILES == 0:
                progress(f"read {number} of {len(new)} new run files")
            self._add(name, files[name], states[name], columns, is_strict)
        with self._database:
            gone = [(name,) for name in known if name not in files]
            for table in ("files", "launches"):
                self._database.executemany(f"DELETE FROM {table} WHERE path = ?", gone)
            self._database.execute("DELETE FROM case_lists WHERE name NOT IN (SELECT cases FROM launches)")
        return len(new)

    def _add(self, name: str, path: Path, state: str, columns: NumberColumns, is_strict: bool) -> None:
        warnings: list[str] = []
        refused, launches = None, []
        try:
            with no_garbage_collection():
                launches = read_file(path, warnings, columns)
        except UserError as error:
            if is_strict:
                raise
            refused = f"left out: {error}"
        # One transaction per file, so that an update that was stopped continues.
        with self._database:
            for table in ("files", "launches"):
                self._database.execute(f"DELETE FROM {table} WHERE path = ?", (name,))
            self._database.execute(
                "INSERT INTO files VALUES (?, ?, ?, ?)", (name, state, refused, json.dumps(warnings))
            )
            for launch in launches:
                measured = {case_id: value for case_id, value in launch.cases.items() if value.status == "ok"}
                units = {
                    case_id: (value.unit.name, value.unit.is_reciprocal)
                    for case_id, value in measured.items()
                    if value.unit != SECONDS
                }
                cases = json.dumps([list(measured), units])
                digest = hashlib.sha256(cases.encode()).hexdigest()
                p10_s = np.array([value.p10_s for value in measured.values()])
                about = json.dumps(
                    {each.name: getattr(launch, each.name) for each in fields(launch) if each.name != "cases"}
                )
                is_latency = any(value.is_latency for value in launch.cases.values())
                self._database.execute("INSERT OR IGNORE INTO case_lists VALUES (?, ?)", (digest, cases))
                self._database.execute(
                    "INSERT INTO launches VALUES (?, ?, ?, ?, ?)", (name, about, is_latency, digest, p10_s.tobytes())
                )

    def _launches(self, files: dict[str, Path]) -> list[IndexedLaunch]:
        refused = dict(self._database.execute("SELECT path, refused FROM files WHERE refused IS NOT NULL"))
        left_out = [refused[name] for name in files if name in refused]
        more = "{} more files were left out for similar reasons"
        self.warnings += capped_lines(left_out, MAX_FILE_WARNINGS, more)
        for (warnings,) in self._database.execute("SELECT warnings FROM files WHERE warnings != '[]'"):
            self.warnings += json.loads(warnings)
        by_file: dict[str, list[IndexedLaunch]] = {}
        columns = "path, about, is_latency, rowid, cases"
        for name, about, *others in self._database.execute(f"SELECT {columns} FROM launches ORDER BY rowid"):
            launch = replace(Launch(**json.loads(about), cases={}), source=str(files[name]))
            by_file.setdefault(name, []).append(IndexedLaunch(launch, bool(others[0]), *others[1:]))
        # A launch in two files counts once, as in `read_side`.
        by_id = {each.launch.run_id: each for name in files for each in by_file.get(name, ())}
        require_one_log_per_launch([each.launch for each in by_id.values()])
        return sorted(by_id.values(), key=lambda each: (each.launch.started_at, each.launch.source))

    def p10_s(
        self, launches: Sequence[IndexedLaunch], is_chosen: Callable[[str], bool]
    ) -> tuple[list[str], NDArray[np.float64], dict[str, Unit]]:
        """Return the ids of the launches' chosen cases, 10th percentiles [cases, launches], and units other than
        seconds. A 10th percentile is nan if the launch did not measure the case.

        Raises:
            UserError: launches have a case in two units.
        """
        lists: dict[str, tuple[list[str], dict[str, tuple[str, bool]]]] = {}
        rows: dict[str, int] = {}
        units: dict[str, Unit] = {}
        for name in dict.fromkeys(each.cases for each in launches):
            [[text]] = self._database.execute("SELECT cases FROM case_lists WHERE name = ?", (name,))
            lists[name] = ids, own_units = json.loads(text)
            for case_id in filter(is_chosen, ids):
                known = case_id in rows
                rows.setdefault(case_id, len(rows))
                unit = Unit(*own_units[case_id]) if case_id in own_units else SECONDS
                if known and units.get(case_id, SECONDS) != unit:
                    raise UserError(f"case {case_id!r} is in two units; write one unit per case")
                if unit != SECONDS:
                    units[case_id] = unit
        places = {
            name: np.array([rows.get(case_id, -1) for case_id in ids], np.int64) for name, (ids, _) in lists.items()
        }
        p10_s = np.full((len(rows), len(launches)), np.nan)
        for column, each in enumerate(launches):
            [[block]] = self._database.execute("SELECT p10_s FROM launches WHERE rowid = ?", (each.number,))
            place = places[each.cases]
            p10_s[place[place >= 0], column] = np.frombuffer(block)[place >= 0]
        return list(rows), p10_s, units


def open_index(results: Path, columns: NumberColumns, progress: Callable[[str], None]) -> RunIndex:
    """Return the updated index of a results folder. A folder that is not writable has an index in memory.

    Args:
        columns: the numbers that are read from other tools' files.
        progress: receives a line after every few files, and a line if the index is written again.

    Raises:
        UserError: as in `read_side`; also if another process locks the index.
    """
    is_kept = results.is_dir() and os.access(results, os.W_OK)
    path = str(results / INDEX_NAME) if is_kept else ":memory:"
    try:
        database = _database(path, progress)
        return RunIndex(database, results, columns, progress)
    except sqlite3.Error as error:
        if error.sqlite_errorname.startswith("SQLITE_BUSY"):
            why = "another distbench site is writing the index; run the command again later"
            raise UserError(f"index {path} is locked: {why}") from error
        raise UserError(f"index {path} cannot be used ({error}); delete this file and run the command again") from error


def _database(path: str, progress: Callable[[str], None]) -> sqlite3.Connection:
    """Open the database, and write it again if it is damaged or of another version."""
    is_new = path == ":memory:" or not Path(path).exists()
    try:
        database = sqlite3.connect(path, timeout=LOCK_S)
        [[version]] = database.execute("PRAGMA user_version")
        [[state]] = database.execute("PRAGMA quick_check(1)")
        if version == VERSION and state == "ok":
            return database
        why = "is damaged" if state != "ok" else "has the format of another version of distbench"
    except sqlite3.DatabaseError as error:
        if error.sqlite_errorname not in ("SQLITE_NOTADB", "SQLITE_CORRUPT"):
            raise
        why = "is damaged"
    if not is_new:
        progress(f"index {path} {why}; all run files are read again")
        database.close()
        Path(path).unlink()
        database = sqlite3.connect(path, timeout=LOCK_S)
    with closing(database.cursor()) as cursor:
        # This does nothing if another process has created the tables in the meantime.
        cursor.execute("BEGIN IMMEDIATE")
        [[version]] = cursor.execute("PRAGMA user_version")
        for statement in SCHEMA.split(";") if version != VERSION else ():
            cursor.execute(statement)
        cursor.execute("COMMIT")
    return database
