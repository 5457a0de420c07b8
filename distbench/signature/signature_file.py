"""A communication signature: what a scenario communicates, as text that is stable, reviewable and kept in git.

A path is one way that bytes take in a step: phase, source, kind, mesh dim, group size, dtype, payload, owner and
redistribution. Layers of one stack are one owner (`layers.*.attention`), and how often a path is taken is its count.
"""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path as FilePath
from typing import Any

from distbench.spec.errors import UserError
from distbench.spec.fields import shown
from distbench.spec.mesh import format_mesh, parse_mesh
from distbench.spec.parallel import folded
from distbench.spec.reading import read_text

VERSION = 1
FIRST_LINE = "distbench signature, version"
PHASES = ("forward", "backward", "optimizer", "save", "load", "call")
PEAK = "predicted peak memory"
HEAD, HEAD_LINES = ("scenario", "mesh", "torch"), 4
# No count of bytes has more digits, and Python reads no longer ones.
_NUMBER = r"[0-9]{1,18}"
PEAK_LINE = re.compile(rf"{PEAK} ({_NUMBER}) B")
ROOT, NOBODY = "(root)", "(unknown)"
LINE = re.compile(
    rf"(?P<count>{_NUMBER}) x (?P<phase>\S+) (?P<source>\S+) (?P<kind>\S+) over (?P<mesh_dim>\S+) "
    rf"\((?P<group_size>{_NUMBER})\), (?P<dtype>\S+), (?P<payload_bytes>{_NUMBER}) B: (?P<owner>\S[^,]*)"
    r"(?:, (?P<explicit>explicit|implicit) (?P<redistribution>\S+))?"
)


@dataclass(frozen=True)
class Path:
    """One way that bytes take; the fields are those of `worker.tracing.communication.Communication`, layers folded."""

    phase: str
    source: str
    kind: str
    mesh_dim: str
    group_size: int
    dtype: str
    payload_bytes: int
    owner: str
    redistribution: str = ""
    explicit: bool | None = None

    def text(self) -> str:
        """As in a signature file, without the count."""
        text = f"{self.phase} {self.source} {self.kind} over {self.mesh_dim} ({self.group_size}), {self.dtype}"
        text += f", {self.payload_bytes} B: {self.owner}"
        if self.redistribution:
            text += f", {'explicit' if self.explicit else 'implicit'} {self.redistribution}"
        return text


@dataclass(frozen=True)
class Signature:
    """What one scenario communicates on one mesh, on rank 0.

    Args:
        mesh: mesh dim names to ranks, outermost first.
        torch: torch's version; shown, never compared.
        cases: case id to how often each path is taken.
        peaks: case id to the predicted peak of all tensors alive, bytes; cases without a model have none.
        has_peaks: whether peaks were predicted at all; a run file's are others.
    """

    scenario: str
    mesh: Mapping[str, int]
    torch: str
    cases: Mapping[str, Mapping[Path, int]]
    peaks: Mapping[str, int] = field(default_factory=dict)
    has_peaks: bool = True

    def to_text(self) -> str:
        """The file's content: cases and paths in an order that depends on nothing else."""
        head = [f"{FIRST_LINE} {VERSION}", f"scenario {self.scenario}", f"mesh {format_mesh(self.mesh)}"]
        lines = [*head, f"torch {self.torch}"]
        for case in sorted(self.cases):
            counts = self.cases[case]
            lines += ["", f"[{case}]"]
            lines += [f"{PEAK} {self.peaks[case]} B"] if case in self.peaks else []
            lines += [f"{counts[path]} x {path.text()}" for path in sorted(counts, key=_order)] or ["nothing"]
        return "\n".join(lines) + "\n"


def _order(path: Path) -> tuple[Any, ...]:
    return (PHASES.index(path.phase) if path.phase in PHASES else len(PHASES), path.text())


def counted(communications: list[dict[str, Any]]) -> Counter[Path]:
    """Communications as `worker.tracing.communication.Communication` has them, counted by path."""
    found: Counter[Path] = Counter()
    for record in communications:
        owner = folded(record["owner"]) or ROOT if record["owner_known"] else NOBODY
        found[Path(**{one.name: record[one.name] for one in fields(Path)} | {"owner": owner})] += 1
    return found


def parse(text: str, where: str) -> Signature:
    """Read what `Signature.to_text` wrote; UserError, naming the file as `where`, for other text or a newer version."""
    lines = text.replace("\r\n", "\n").split("\n")
    if not lines[0].startswith(FIRST_LINE):
        raise UserError(f"{where} is no signature; write one with distbench signature SCENARIO -o {where}")
    version = lines[0].removeprefix(FIRST_LINE).strip()
    if version != str(VERSION):
        wrong = f"{where} is a signature of version {shown(version)}, not of {VERSION}, or newer than this distbench"
        raise UserError(f"{wrong}; update distbench, or write the file anew")
    reader = _Reader()
    for number, line in enumerate(lines[1:], start=2):
        try:
            (reader.head if number <= HEAD_LINES else reader.body)(line)
        except UserError as error:
            raise UserError(f"{where}, line {number} {error}; write the file anew") from error
    if lacking := [name for name in HEAD if name not in reader.found]:
        raise UserError(f"{where} lacks its line {lacking[0]!r}; write the file anew")
    return Signature(**reader.found, cases=reader.cases, peaks=reader.peaks)


class _Reader:
    """What the lines of a file have said so far; each method raises a UserError on a line that is wrong."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}
        self.cases: dict[str, Counter[Path]] = {}
        self.peaks: dict[str, int] = {}
        self._case = ""

    def head(self, line: str) -> None:
        if not line:
            return
        name, _, value = line.partition(" ")
        if name not in HEAD or name in self.found or not value.isprintable():
            raise UserError(f"is none of {', '.join(HEAD)}: {shown(line)}")
        try:
            self.found[name] = parse_mesh(value) if name == "mesh" else value
        except UserError as error:
            raise UserError(f"is no mesh: {error}") from error

    def body(self, line: str) -> None:
        if not line.isprintable():
            raise UserError("holds control characters")
        if line.startswith("[") and line.endswith("]"):
            self._begin(line[1:-1])
        elif (peak := PEAK_LINE.fullmatch(line)) and self.cases and self._case not in self.peaks:
            self.peaks[self._case] = int(peak[1])
        elif line and line != "nothing":
            match = LINE.fullmatch(line)
            if match is None or not self.cases:
                raise UserError(f"is no path: {shown(line)}")
            path, count = _path(match.groupdict()), int(match["count"])
            if path in self.cases[self._case] or not count:
                raise UserError("is a path that stands in its case already" if count else "is a path taken 0 times")
            self.cases[self._case][path] = count

    def _begin(self, case: str) -> None:
        if case in self.cases:
            raise UserError(f"begins case {shown(case)} a second time")
        self._case = case
        self.cases[case] = Counter()


def _path(found: dict[str, Any]) -> Path:
    del found["count"]
    for name in ("group_size", "payload_bytes"):
        found[name] = int(found[name])
    explicit = found["explicit"] and found["explicit"] == "explicit"
    return Path(**found | {"redistribution": found["redistribution"] or "", "explicit": explicit})


def load(file: FilePath) -> Signature:
    """Read a signature file; UserError where it cannot be read or is none."""
    return parse(read_text(file, "signature"), f"signature {file}")
