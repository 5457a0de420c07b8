"""A cost profile: the lines that were measured of one machine, as a file."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from distbench.costmodel.lines import ALL_TO_ALL, NATIVE_ALL_TO_ALL, Line
from distbench.spec.errors import UserError
from distbench.spec.writing import write_whole

PROFILE_VERSION = 1


@dataclass(frozen=True)
class Profile:
    """What was measured of one machine, or written by hand for one that is not here.

    Args:
        backend: "gloo" or "nccl".
        mesh: mesh dim names to ranks, outermost first.
        lines: one for each op and mesh dim.
    """

    machine: str
    backend: str
    torch: str
    mesh: Mapping[str, int]
    lines: tuple[Line, ...]
    source: str = "measured by distbench calibrate"

    def line(self, op: str, mesh_dim: str, group_size: int) -> Line | None:
        """The line of an op over a mesh dim of this many ranks; None where there is none."""
        return self._by_key.get((op, mesh_dim, group_size))

    @cached_property
    def _by_key(self) -> dict[tuple[str, str, int], Line]:
        return {line.key: line for line in self.lines}

    def natively(self) -> "Profile":
        """The same where an all-to-all runs as one; on gloo DTensor runs it as an all-gather unless told otherwise."""
        if self.backend != "gloo":
            return self
        native = [replace(line, op=ALL_TO_ALL) for line in self.lines if line.op == NATIVE_ALL_TO_ALL]
        return replace(self, lines=(*(line for line in self.lines if line.op != ALL_TO_ALL), *native))

    def digest(self) -> str:
        """A short hash of all that plans depend on: ranks whose digests differ would plan differently, and hang."""
        facts = [(*line.key, *(number.hex() for number in line.parameters)) for line in self.lines]
        return hashlib.sha256(repr(sorted(facts)).encode()).hexdigest()[:16]

    def save(self, path: Path) -> None:
        """Write it as JSON, a line of the file for each line of the profile."""
        head = {name: getattr(self, name) for name in ("machine", "backend", "torch", "source")}
        first = json.dumps({"profile_version": PROFILE_VERSION, **head, "mesh": dict(self.mesh)})[1:-1]
        lines = ",\n".join("  " + json.dumps(asdict(line)) for line in self.lines)
        write_whole(path, "{" + first + ',\n"lines": [\n' + lines + "\n]}\n")


def load_profile(path: Path) -> Profile:
    """Read what `Profile.save` wrote, or a hand-written file of the same fields; UserError for any other."""
    try:
        record: dict[str, Any] = json.loads(path.read_text())
        if record.pop("profile_version") > PROFILE_VERSION:
            raise UserError(f"profile {path} is newer than this distbench; update distbench")
        lines = tuple(_line(fields) for fields in record.pop("lines"))
        return Profile(lines=lines, **{**record, "mesh": dict(record["mesh"])})
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"profile {path} cannot be read ({error}); write one with distbench calibrate") from error


def _line(fields: dict[str, Any]) -> Line:
    line = Line(**{**fields, "samples": tuple(map(tuple, fields.get("samples", ())))})
    if min(line.parameters) < 0:
        raise ValueError(f"{line.op} over {line.mesh_dim} has a negative cost")
    return line
