"""Traces as one frame for CSV and JSON."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from distbench.report.overview import scenario_name
from distbench.report.paths.read import Trace

if TYPE_CHECKING:
    import pandas as pd


def frame_of_traces(traces: Sequence[Trace]) -> "pd.DataFrame":
    """One row a collective, traced step and rank: where it is from, then the columns of `read.rows_of`."""
    import pandas as pd

    parts = []
    for trace in traces:
        rows = trace.rows.copy()
        for place, (name, value) in enumerate(
            (("scenario", scenario_name(trace.run)), ("run_file", trace.run.path.name), ("case_id", trace.case_id))
        ):
            rows.insert(place, name, value)
        parts.append(rows)
    return pd.concat(parts, ignore_index=True)
