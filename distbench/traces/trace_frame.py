"""Traces as one frame for CSV and JSON: every row, or costs by columns of the rows."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from distbench.spec.errors import UserError, nearest
from distbench.traces.costs import costs
from distbench.traces.records import Trace

if TYPE_CHECKING:
    import pandas as pd

# What is summed cannot be summed by, and costs are medians over steps.
GROUPABLE = (
    *("rank", "phase", "source", "kind", "op", "backend_op", "mesh_dim", "group", "group_size", "seq", "dtype"),
    *("owner", "path_owner", "owner_known", "redistribution", "explicit"),
)


def frame_of_traces(traces: Sequence[Trace], by: Sequence[str] = ()) -> "pd.DataFrame":
    """One row a collective, traced step and rank: where it is from, then the columns of `read.rows_of`.

    Args:
        traces: the traces.
        by: columns of the rows to sum by instead; then one row a combination of them, with the columns of `costs`.

    Raises:
        UserError: a column that is none of GROUPABLE.
    """
    import pandas as pd

    parts = []
    for trace in traces:
        for name in by:
            if name not in GROUPABLE:
                raise UserError(f"--group-by {name}: a trace has no such column to sum by ({nearest(name, GROUPABLE)})")
        rows = costs(trace, tuple(dict.fromkeys(by))) if by else trace.rows.copy()
        where = (("scenario", trace.run.scenario), ("run_file", trace.run.path.name), ("case_id", trace.case_id))
        for place, (name, value) in enumerate(where):
            rows.insert(place, name, value)
        parts.append(rows)
    return pd.concat(parts, ignore_index=True)
