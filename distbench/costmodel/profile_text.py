"""A cost profile as a table."""

from itertools import pairwise

from distbench.costmodel.profile import Profile
from distbench.render.blocks import Table, TableColumns, table_of
from distbench.render.terminal import text_of
from distbench.render.units import NOTHING, bandwidth_text, percent_text, size_text, time_text
from distbench.spec.mesh import format_mesh

GB = 1e9
COLUMNS: TableColumns = (
    ("<op", lambda line: line.op),
    ("<mesh dim", lambda line: line.mesh_dim),
    ("base", lambda line: time_text(line.base_s) if line.base_s else NOTHING),
    ("GB/s", lambda line: _rate_text(line.per_byte_s)),
    ("copied", lambda line: _rate_text(line.per_copied_byte_s)),
    ("knee", lambda line: NOTHING if line.knee_bytes is None else size_text(line.knee_bytes)),
    ("beyond", lambda line: NOTHING if line.knee_bytes is None else _rate_text(line.per_byte_beyond_s)),
    ("fit error", lambda line: percent_text(line.error)),
    ("held out", lambda line: NOTHING if line.held_out_error is None else percent_text(line.held_out_error)),
    ("samples", lambda line: str(len(line.samples))),
)


def profile_text(profile: Profile) -> str:
    """The profile as a table."""
    return text_of([profile_table(profile)])


def profile_table(profile: Profile) -> Table:
    """One row a line, those of a mesh dim together."""
    title = f"{profile.machine}, {profile.backend}, torch {profile.torch}, mesh {format_mesh(profile.mesh)}"
    notes = [
        "time = base + payload / (GB/s) + payload x num_copies / (copied GB/s), beyond the knee at the rate beyond",
        *(_message_note(line.per_message_s) for line in profile.lines if line.per_message_s),
        "payload: the full gathered or scattered buffer; of direct, what the busiest rank sends or receives",
        "errors: median of |predicted / measured - 1|, over the sizes fitted and over those held out",
    ]
    neighbours = enumerate(pairwise(profile.lines), start=1)
    breaks = [number for number, (line, following) in neighbours if line.mesh_dim != following.mesh_dim]
    return table_of(title, COLUMNS, profile.lines, notes, breaks, ("samples", "copied", "knee", "beyond"))


def _message_note(per_message_s: float) -> str:
    return f"of direct, {time_text(per_message_s).strip()} more for each message of the busiest rank"


def _rate_text(per_byte_s: float) -> str:
    return bandwidth_text(1 / per_byte_s / GB).strip() if per_byte_s else NOTHING
