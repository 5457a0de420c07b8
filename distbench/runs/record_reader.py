"""The lines of a run file, one after another: a bad header refuses the file, a bad line costs only itself."""

import codecs
from collections.abc import Iterator
from pathlib import Path

from distbench.runs.record_checks import FOOTER, Record, wrong_in_header, wrong_in_record
from distbench.spec.errors import UserError
from distbench.spec.fields import shown, wrong_field
from distbench.spec.reading import opened, parse_json

MAX_RUN_BYTES = 1 << 30
MAX_LINE_WARNINGS = 20
RUN_FILE = "run file"
BROKE_THE_LAUNCH = ("raised", "timeout", "aborted")


class RecordReader:
    """Reads one run file; `warnings` gets a sentence for each line that was left out."""

    def __init__(self, path: Path, warnings: list[str]) -> None:
        self._path = path
        self._warnings = warnings
        self._num_left_out = 0
        self._case_lines: dict[str, tuple[int, str]] = {}
        self._pass_lines: dict[tuple[str, int], int] = {}

    def header(self) -> Record:
        """The first line alone.

        Raises:
            UserError: the file cannot be read, is no run file, or its header is wrong.
        """
        with opened(self._path, RUN_FILE, MAX_RUN_BYTES) as file:
            return self._header(file.readline(MAX_RUN_BYTES))

    def records(self) -> Iterator[Record]:
        """The header, then every line that holds what its type should. Raises as `header`, also for a second one."""
        with opened(self._path, RUN_FILE, MAX_RUN_BYTES) as file:
            yield self._header(file.readline())
            for number, line in enumerate(file, start=2):
                if line.strip() and (record := self._record(number, line)) is not None:
                    yield record
        if self._num_left_out > MAX_LINE_WARNINGS:
            more = self._num_left_out - MAX_LINE_WARNINGS
            self._warnings.append(f"{self._path.name}: {more} more lines were left out for such reasons")

    def _header(self, line: bytes) -> Record:
        try:
            record = parse_json(line.removeprefix(codecs.BOM_UTF8))
        except ValueError:
            record = None
        if not isinstance(record, dict) or record.get("type") != "run":
            what = f"{self._path} is no distbench run file (its first line is no run header)"
            raise UserError(f"{what}; give a results/*.jsonl file")
        if wrong := wrong_in_header(record):
            raise UserError(f"{RUN_FILE} {self._path}, line 1: {wrong}; its header is damaged: measure again")
        return record

    def _record(self, number: int, line: bytes) -> Record | None:
        try:
            record = parse_json(line)
        except ValueError as error:
            self._leave_out(number, f"not a whole record, cut short or corrupt ({error})")
            return None
        if not isinstance(record, dict):
            self._leave_out(number, "not a whole record (no object)")
            return None
        if record.get("type") == "run":
            twice = "a second run header, but a file holds one run"
            raise UserError(f"{RUN_FILE} {self._path}, line {number}: {twice}; cut it into two files there")
        if record.get("type") == "footer":
            return self._footer(number, record)
        if wrong := wrong_in_record(record) or self._repeated(number, record):
            self._leave_out(number, wrong)
            return None
        return record

    def _footer(self, number: int, record: Record) -> Record:
        """Without its wrong fields: what it is there for is to say that the run ended."""
        whole = {name: value for name, value in record.items() if not wrong_field({name: value}, FOOTER)}
        if len(whole) < len(record):
            wrong = wrong_field(record, FOOTER)
            self._warnings.append(f"{self._path.name}, line {number}: {wrong}; this field is left out")
        return whole

    def _repeated(self, number: int, record: Record) -> str | None:
        """What is wrong with a case or a pass that stands in the file already."""
        if record.get("type") == "case":
            case_id, status = record["case"]["id"], record["status"]
            first, before = self._case_lines.setdefault(case_id, (number, status))
            if first == number:
                return None
            # A case recorded twice, the second time by the parent when the launch broke: both rows count.
            if status in BROKE_THE_LAUNCH and not record.get("samples_s") and before in ("ok", "wrong"):
                self._case_lines[case_id] = first, status
                return None
            return f"case.id {shown(case_id)} stands in line {first} already"
        if record.get("type") == "pass" and "error" not in record:
            key = record["case_id"], record["number"]
            if (first := self._pass_lines.setdefault(key, number)) != number:
                return f"pass {key[1]} of case {shown(key[0])} stands in line {first} already"
        return None

    def _leave_out(self, number: int, why: str) -> None:
        self._num_left_out += 1
        if self._num_left_out <= MAX_LINE_WARNINGS:
            self._warnings.append(f"{self._path.name}, line {number}: {why}; left out")
