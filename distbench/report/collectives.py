"""Collectives: bandwidth per mesh dim, op, dtype and size."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from distbench.records.dataframe import Row, measured_of, records_of
from distbench.report.section_protocol import MAX_PANELS, PER_ROW, Figures, ReportedRun, Section
from distbench.show import plots as style
from distbench.show import units
from distbench.show.blocks import Table, TableColumns, capped, changes_in, table_of
from distbench.show.plots import Spot, hover

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

MAX_ROWS = 100
# Names of collectives in footnotes, as opposed to called functions.
OWN_NAMES = {"reduce_scatter": "reduce-scatter", "all_gather": "all-gather", "all_to_all": "all-to-all"}


def _is_run_as_another(row: Row) -> bool:
    return isinstance(row["backend_op"], str) and row["backend_op"] != row["op"]


# Columns of the frame, out of a hundred, that COLUMNS needs.
SHOWN = (
    *("op", "backend_op", "dtype", "payload_bytes", "median_s", "q1_s", "q3_s", "p95_s"),
    *("algbw_gb_per_s", "busbw_gb_per_s"),
)
COLUMNS: TableColumns = (
    ("<op", lambda row: f"{row['op']}{'^' * _is_run_as_another(row)}"),
    ("<dtype", lambda row: units.word_text(row["dtype"])),
    ("size", lambda row: units.size_text(row["payload_bytes"])),
    ("median", lambda row: units.time_text(row["median_s"])),
    (f"<{units.QUARTILES}", units.quartiles_text),
    ("p95", lambda row: units.time_text(row["p95_s"])),
    ("algbw GB/s", lambda row: units.bandwidth_text(row["algbw_gb_per_s"])),
    ("busbw GB/s", lambda row: units.bandwidth_text(row["busbw_gb_per_s"])),
)


def _collectives_of(frame: "pd.DataFrame") -> "pd.DataFrame":
    """Measured collectives with correct results, ordered by mesh dim (in file order), op, dtype and size.

    Added columns are `busbw_low_gb_per_s` and `busbw_high_gb_per_s`, the busbw at the slow and the fast quartile.
    """
    measured = measured_of(frame, "collective")
    measured[["mesh_dim", "op"]] = measured[["mesh_dim", "op"]].fillna("unknown")
    gigabytes = measured["busbw_gb_per_s"] * measured["median_s"]
    measured["busbw_low_gb_per_s"] = gigabytes / measured["q3_s"]
    measured["busbw_high_gb_per_s"] = gigabytes / measured["q1_s"]
    measured["mesh_dim_rank"] = measured["mesh_dim"].factorize()[0]
    return measured.sort_values(["mesh_dim_rank", "op", "dtype", "payload_bytes"], kind="stable")


def _headline(reported: ReportedRun) -> Iterator[str]:
    """The bus bandwidth of each collective at the largest size, per mesh dim of several ranks."""
    measured = _collectives_of(reported.frame)
    for mesh_dim, of_dim in measured[measured["group_size"] != 1].groupby("mesh_dim", sort=False):
        largest = of_dim[of_dim["payload_bytes"] == of_dim["payload_bytes"].max()].drop_duplicates("op")
        rows = [row for row in records_of(largest) if units.known(row["busbw_gb_per_s"])]
        if rows:
            ranks, size = units.whole_text(rows[0]["group_size"]), units.size_text(rows[0]["payload_bytes"])
            yield f"{mesh_dim} ({ranks} ranks), {size}, busbw GB/s: {', '.join(map(_busbw_text, rows))}"


def _busbw_text(row: Row) -> str:
    run_as = f" (run as {row['backend_op']})" if _is_run_as_another(row) else ""
    return f"{row['op']}{run_as} {units.bandwidth_text(row['busbw_gb_per_s']).strip()}"


def _tables(reported: ReportedRun, full: bool = True) -> list[Table]:
    measured = _collectives_of(reported.frame)
    return [_table(str(mesh_dim), of_dim) for mesh_dim, of_dim in measured.groupby("mesh_dim", sort=False)]


def _table(mesh_dim: str, measured: "pd.DataFrame") -> Table:
    backends = "/".join(measured["backend"].dropna().unique()) or "unknown backend"
    sizes = _group_sizes_text(measured) or "an unknown number of"
    title = f"mesh dim {mesh_dim}: groups of {sizes} ranks over {backends}"
    breaks = changes_in(measured["op"].tolist())
    if len(breaks) + 1 == len(measured):
        breaks = []
    notes = [
        f"^ {op} runs as {backend_op} on {backend}, so its busbw is not {OWN_NAMES.get(op, op)} busbw"
        for op, backend_op, backend in _run_as_another(measured)
    ]
    rows = records_of(measured[list(SHOWN)])
    optional = ("p95", units.QUARTILES, "algbw GB/s", "dtype")
    return capped(table_of(title, COLUMNS, rows, notes + units.p95_notes(rows), breaks, optional), MAX_ROWS)


def _group_sizes_text(measured: "pd.DataFrame") -> str:
    """The number of ranks per group, such as "2/4" if groups differ, or "" if unknown."""
    return "/".join(units.whole_text(size) for size in measured["group_size"].dropna().unique())


def _run_as_another(measured: "pd.DataFrame") -> list[tuple[str, str, str]]:
    """Unique (op, op of the backend, backend) for which the two ops differ."""
    differing = measured[measured["backend_op"].notna() & (measured["backend_op"] != measured["op"])]
    pairs = differing[["op", "backend_op", "backend"]].drop_duplicates()
    return list(pairs.itertuples(index=False, name=None))


def _figures(reported: ReportedRun) -> Figures:
    """Plots of busbw by size, with one figure per dtype, one panel per mesh dim, and one line per collective."""
    measured = _collectives_of(reported.frame)
    measured = measured[(measured["busbw_gb_per_s"] > 0) & (measured["payload_bytes"] > 0)]
    for dtype, of_dtype in measured.groupby("dtype", sort=False):
        panels = list(of_dtype.groupby("mesh_dim", sort=False))[:MAX_PANELS]
        colors = dict(zip(sorted(of_dtype["op"].unique()), style.CYCLE * 3, strict=False))
        figure, axes = style.panels(len(panels), PER_ROW, (5.2, 4.6), (1.2, 0))
        ends = [
            _busbw_panel(panel, str(mesh_dim), of_dim, colors)
            for panel, (mesh_dim, of_dim) in zip(axes, panels, strict=True)
        ]
        # The limits of the panels' common y axis are known only after all lines are drawn.
        for panel, of_panel in zip(axes, ends, strict=True):
            style.label_ends(panel, of_panel, colors)
        for panel in axes[::PER_ROW]:
            panel.set_ylabel("busbw (GB/s)")
        style.title(figure, f"{reported.run.scenario}: bus bandwidth by message size, {dtype}")
        notes = [f"{op} runs as {backend_op} on {backend}" for op, backend_op, backend in _run_as_another(of_dtype)]
        style.caption(figure, "; ".join(["bands: quartiles", *notes]))
        yield f"busbw-{dtype}", figure


def _busbw_panel(axes: "Axes", mesh_dim: str, measured: "pd.DataFrame", colors: dict[str, str]) -> dict[str, float]:
    """Draw one line per op. Return the y of each op's last point."""
    ends: dict[str, float] = {}
    for op, of_op in measured.groupby("op", sort=False):
        points = of_op.sort_values("payload_bytes")
        columns = ("payload_bytes", "busbw_gb_per_s", "busbw_low_gb_per_s", "busbw_high_gb_per_s")
        sizes, busbw, low, high = (points[name].to_numpy(float) for name in columns)
        axes.fill_between(sizes, low, high, color=colors[str(op)], alpha=0.15, linewidth=0)
        axes.plot(sizes, busbw, color=colors[str(op)], marker="o", markersize=4, linewidth=1.8)
        ends[str(op)] = float(busbw[-1])
        hover(axes, map(_busbw_spot, records_of(points)))
    axes.set_yscale("log")
    axes.grid(visible=True, axis="y")
    style.size_ticks(axes, measured["payload_bytes"].tolist())
    style.label_axis(axes.yaxis, lambda value: f"{value:g}")
    axes.tick_params(labelleft=True)
    axes.set_title(f"mesh dim {mesh_dim}, groups of {_group_sizes_text(measured)}", fontweight="normal")
    axes.set_xlabel("message size S")
    return ends


def _busbw_spot(row: Row) -> Spot:
    low, high = (f"{row[f'busbw_{end}_gb_per_s']:.3g}" for end in ("low", "high"))
    text = f"{row['op']} over {row['mesh_dim']}, {units.size_text(row['payload_bytes'])}\n"
    text += f"busbw {row['busbw_gb_per_s']:.3g} GB/s [{low}, {high}]\n"
    text += f"median {units.brief_time_text(row['median_s'])} {units.quartiles_text(row)}"
    return Spot(row["payload_bytes"], row["busbw_gb_per_s"], text)


SECTION = Section(_headline, _tables, _figures)
