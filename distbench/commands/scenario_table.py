"""The scenarios as `distbench list` shows them."""

from collections.abc import Sequence

from distbench.spec import Entry, format_mesh


def scenario_table(entries: Sequence[Entry]) -> str:
    """A row a scenario: name, mesh, tags and what it measures."""
    from distbench.render.blocks import Table
    from distbench.render.terminal import text_of

    rows = [(entry.name, format_mesh(entry.mesh), ", ".join(entry.tags), entry.summary) for entry in entries]
    columns = ("<scenario", "<mesh", "<tags", "<what it measures")
    return text_of([Table("distbench run SCENARIO", columns, rows, optional=("tags",), prose="what it measures")])
