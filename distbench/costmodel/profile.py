"""A cost profile: the lines that were measured of one machine, as a file."""

import hashlib
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

from distbench.costmodel.lines import ALL_TO_ALL, NATIVE_ALL_TO_ALL, Line, lines_by_key
from distbench.spec.errors import UserError
from distbench.spec.fields import (
    AMOUNT,
    BYTES,
    DURATION,
    LIST,
    NAME,
    SIZE,
    TEXT,
    Kind,
    Kinds,
    is_time,
    list_of,
    mapping_of,
    number_within,
    shown,
    wrong_field,
)
from distbench.spec.levels import fits, is_shape, mesh_shapes, more_like, ranks_per_host, sizes_of, slowest
from distbench.spec.reading import read_json
from distbench.spec.writing import write_whole

# 2: `hosts`, of the profile and of each line.
PROFILE_VERSION = 2


def _is_sample(one: Any) -> bool:
    return isinstance(one, list) and len(one) in (3, 4) and all(map(AMOUNT.fits, one)) and is_time(one[2])


HEAD: Kinds = {
    **dict.fromkeys(("machine", "backend", "torch", "source"), TEXT),
    "mesh": mapping_of(SIZE),
    "hosts": list_of(TEXT),
}
NEEDED = ("op", "mesh_dim", "group_size", "base_s", "per_byte_s")
# Seconds a byte: a byte a second is the slowest link that anyone prices.
_PER_BYTE = number_within(0, 1)
LINE: Kinds = {
    **dict.fromkeys(("op", "mesh_dim"), NAME),
    "group_size": SIZE,
    **dict.fromkeys(("base_s", "per_message_s"), DURATION),
    **dict.fromkeys(("per_byte_s", "per_copied_byte_s", "per_byte_beyond_s"), _PER_BYTE),
    "knee_bytes": BYTES,
    **dict.fromkeys(("error", "held_out_error"), AMOUNT),
    "hosts": Kind(is_shape, "ranks of a group on each of its hosts, such as 4, 1+1 or 2|1+1"),
    "samples": list_of(Kind(_is_sample, "points (payload bytes, copies, seconds, messages)")),
}


@dataclass(frozen=True)
class Profile:
    """What was measured of one machine, or written by hand for one that is not here.

    Args:
        backend: "gloo" or "nccl".
        mesh: mesh dim names to ranks, outermost first.
        lines: one for each op and mesh dim, and for each op and shape of groups that no mesh dim has.
        hosts: each rank's host, in rank order; empty where unknown, as in older files.
    """

    machine: str
    backend: str
    torch: str
    mesh: Mapping[str, int]
    lines: tuple[Line, ...]
    source: str = "measured by distbench calibrate"
    hosts: tuple[str, ...] = ()

    def line(self, op: str, mesh_dim: str, group_size: int) -> Line | None:
        """The line of an op over a mesh dim of this many ranks; None where there is none."""
        return self._by_key.get((op, mesh_dim, group_size))

    @cached_property
    def _by_key(self) -> dict[tuple[str, str, int], Line]:
        return lines_by_key(self.lines)

    def on(self, mesh: Mapping[str, int], hosts: Sequence[str] = ()) -> "Profile":
        """The same for a mesh (names to ranks, outermost first) over all ranks, whose hosts are these.

        Args:
            hosts: each rank's host, in rank order; none given: as many ranks on each as where it was measured.
        """
        hosts = tuple(hosts) or more_like(self.hosts, math.prod(mesh.values()))
        if not self.hosts or len(hosts) != math.prod(mesh.values()):
            return self
        return replace(self, hosts=hosts).of_shapes(
            mesh, mesh_shapes(mesh, hosts), by_name_only=ranks_per_host(hosts) != ranks_per_host(self.hosts)
        )

    def of_shapes(self, mesh: Mapping[str, int], shapes: Mapping[str, str], by_name_only: bool = False) -> "Profile":
        """The same with the lines of a mesh: each mesh dim's by how its groups lie on hosts, not by its name alone.

        A mesh dim has the line of its own name where that is of its shape, else any line of that shape. Where some of
        its groups cross hosts and others do not, those that cross the most count, if it has no line as a whole. A
        profile that does not know hosts stays as it is.

        Args:
            shapes: mesh dim, or all of them joined by "x", to how its groups lie, as `levels` writes it.
            by_name_only: other numbers of ranks share a host, so that lines of other mesh dims say nothing.
        """
        if not shapes or not any(line.hosts for line in self.lines):
            return self
        lines = dict(self._by_key)
        by_shape = {} if by_name_only else {(line.op, line.hosts): line for line in reversed(self.lines)}
        for op, (name, shape) in product(dict.fromkeys(line.op for line in self.lines), shapes.items()):
            key = op, name, mesh.get(name, math.prod(mesh.values()))
            own = lines.pop(key, None)
            # A line of groups of several shapes costs what the slowest of them do.
            likest = None if own is not None and own.hosts in ("", shape) else by_shape.get((op, shape))
            line = likest or (own if own is not None and fits(own.hosts, shape) else by_shape.get((op, slowest(shape))))
            if line is not None:
                lines[key] = replace(line, mesh_dim=name, group_size=key[2])
        return replace(self, lines=tuple(lines.values()))

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
        first = json.dumps({"profile_version": PROFILE_VERSION, **head, "mesh": dict(self.mesh), "hosts": self.hosts})[
            1:-1
        ]
        lines = ",\n".join("  " + json.dumps(asdict(line)) for line in self.lines)
        write_whole(path, "{" + first + ',\n"lines": [\n' + lines + "\n]}\n")


def load_profile(path: Path | str) -> Profile:
    """Read what `Profile.save` wrote, or a hand-written file of the same fields; UserError for any other."""
    try:
        record: Any = read_json(Path(path), "profile")
    except UserError as error:
        raise UserError(f"{error}; write one with distbench calibrate") from error
    version = record.get("profile_version") if isinstance(record, dict) else None
    if type(version) is int and version > PROFILE_VERSION:
        raise UserError(f"profile {path} is newer than this distbench; update distbench")
    if wrong := _wrong_in_profile(record):
        raise UserError(f"profile {path} cannot be used: {wrong}; write one with distbench calibrate")
    head = {name: record[name] for name in HEAD if name in record}
    lines = tuple(_line(fields) for fields in record["lines"])
    hosts = tuple(record.get("hosts") or ())
    return Profile(**{**head, "mesh": dict(record["mesh"]), "lines": lines, "hosts": hosts})


def _wrong_in_profile(record: Any) -> str | None:
    if not isinstance(record, dict):
        return f"it is {shown(record)}, not an object"
    needed = ("profile_version", "machine", "backend", "torch", "mesh", "lines")
    if wrong := wrong_field(record, {**HEAD, "profile_version": SIZE, "lines": LIST}, needed):
        return wrong
    hosts, num_ranks = record.get("hosts"), math.prod(record["mesh"].values())
    if hosts and len(hosts) != num_ranks:
        return f"hosts names {len(hosts)}, and mesh has {num_ranks} ranks, each of which has one"
    wrong_lines = (_wrong_in_line(fields, f"lines[{index}]") for index, fields in enumerate(record["lines"]))
    if wrong := next(filter(None, wrong_lines), None):
        return wrong
    keys = Counter((fields["op"], fields["mesh_dim"], fields["group_size"]) for fields in record["lines"])
    twice = next((key for key, count in keys.items() if count > 1), None)
    return "two lines are of {} over {} in groups of {}".format(*map(shown, twice)) if twice else None


def _wrong_in_line(fields: Any, where: str) -> str | None:
    if not isinstance(fields, dict):
        return f"{where} is {shown(fields)}, not an object"
    if unknown := next((name for name in fields if name not in LINE), None):
        return f"{where} has a field {shown(unknown)}, which no line has"
    if wrong := wrong_field(fields, LINE, NEEDED, f"{where}."):
        return wrong
    shape, size = fields.get("hosts") or "", fields["group_size"]
    if shape and sizes_of(shape) != {size}:
        return f"{where}.hosts is {shown(shape)}, which are no groups of {size} ranks"
    return None


def _line(fields: dict[str, Any]) -> Line:
    given = {name: value for name, value in fields.items() if value is not None}
    return Line(**{**given, "samples": tuple(map(tuple, fields.get("samples") or ()))})
