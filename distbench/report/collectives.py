"""Collectives: bandwidth per mesh dim, op, dtype and size; ways and loads of a collective, compared by passes."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from distbench.records.dataframe import PASSES, Row, measured_of, records_of
from distbench.records.run_file import AGAIN
from distbench.report.section_protocol import MAX_PANELS, PER_ROW, Compared, Figures, ReportedRun, Section
from distbench.report.steps import VERDICT
from distbench.show import plots as style
from distbench.show import units
from distbench.show.blocks import Block, Code, Lines, Table, TableColumns, capped, changes_in, table_of
from distbench.show.plots import Spot, hover
from distbench.spec.printable_text import count_text
from distbench.statistics.pass_comparison import BASELINE, TOO_FEW, PassComparison, as_table, compare_passes
from distbench.statistics.size_crossings import Crossing, crossings_of, fastest_by_size
from distbench.statistics.verdicts import FASTER, SLOWER, WITHIN_NOISE

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
    measured = measured[measured["variant"].isna()].copy()
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
    title = f"mesh dim {mesh_dim}: groups of {sizes} {'rank' if sizes == '1' else 'ranks'} over {backends}"
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


# Ways and loads of a collective, each compared with the first one of its size.


@dataclass(frozen=True)
class Ways:
    """The variants of one collective over one mesh dim: a row per size and variant, sizes ascending."""

    mesh_dim: str
    op: str
    dtype: str
    rows: Sequence[Row]
    comparison: PassComparison

    @property
    def title(self) -> str:
        """Collective, dtype, mesh dim and number of ranks."""
        return f"{self.op}, {self.dtype}, over {self.mesh_dim} ({units.whole_text(self.rows[0]['group_size'])} ranks)"

    @property
    def names(self) -> list[str]:
        """The variants, the reference first."""
        return list(dict.fromkeys(str(row["variant"]) for row in self.rows))

    def of_way(self, name: str) -> list[Row]:
        """The rows of one variant."""
        return [row for row in self.rows if row["variant"] == name]

    def crossings(self, name: str) -> list[Crossing]:
        """The sizes at which a variant becomes faster or slower than the first variant."""
        rows = [row for row in self.of_way(name) if row["verdict"] != BASELINE]
        sizes, ratios = [row["payload_bytes"] for row in rows], [1 / row["speedup"] for row in rows]
        return crossings_of(sizes, ratios, [row["verdict"] for row in rows])


def ways_of(frame: "pd.DataFrame") -> list[Ways]:
    """The variants of each collective, mesh dim and dtype, with verdicts, one family of tests each.

    Rows have `speedup`, `speedup_low`, `speedup_high` and `verdict`, as steps do. Times and sizes of uneven all-to-alls
    are per exchange.
    """
    measured = measured_of(frame, "collective")
    measured = measured[measured["variant"].notna()].copy()
    per_exchange = measured["num_exchanges"].fillna(1.0)
    for name in ("payload_bytes", "median_s", "q1_s", "q3_s", "p95_s", "ci_low_s", "ci_high_s"):
        measured[name] = measured[name] / per_exchange
    comparisons = []
    for (mesh_dim, op, dtype), unsorted in measured.groupby(["mesh_dim", "op", "dtype"], sort=False):
        of_op = unsorted.sort_values("size_bytes", kind="stable")
        firsts: dict[float, int] = {}
        references = [firsts.setdefault(size, row) for row, size in enumerate(of_op["size_bytes"])]
        is_first = of_op["variant"].to_numpy()[references] == of_op["variant"].iloc[0]
        # A size whose first variant failed has no reference.
        references = [row if known else -1 for row, known in zip(references, is_first, strict=True)]
        passes = as_table(of_op[PASSES].tolist()) / per_exchange[of_op.index].to_numpy()[:, None]
        comparison = compare_passes(passes, references)
        rows = records_of(
            of_op.assign(
                speedup=1 / comparison.ratio,
                speedup_low=1 / comparison.high,
                speedup_high=1 / comparison.low,
                verdict=comparison.verdict,
            )
        )
        comparisons.append(Ways(str(mesh_dim), str(op), str(dtype), rows, comparison))
    return comparisons


def _ways_headline(reported: ReportedRun) -> Iterator[str]:
    for ways in ways_of(reported.frame):
        for sentence in _sentences(ways):
            yield f"{ways.title}: {sentence}"


def _sentences(ways: Ways) -> Iterator[str]:
    """A sentence per variant: at which sizes it is faster or slower than the first variant."""
    first, *others = ways.names
    for name in others:
        verdicts = [row["verdict"] for row in ways.of_way(name)]
        is_control = name.endswith(AGAIN)
        sides = [verdict for verdict in (FASTER, SLOWER) if verdict in verdicts]
        if is_control and not sides:
            continue
        if is_control:
            yield f"warning: the control ({first} measured again) is {' and '.join(sides)} than {first}"
        elif ways.op == UNEVEN or not sides:
            yield from _sentence_of_sizes(ways, name, first)
        elif not (crossings := ways.crossings(name)):
            number = f"{verdicts.count(sides[0])} of {count_text(len(verdicts), 'size')}"
            others_text = "" if set(verdicts) == {sides[0]} else ", other sizes have no verdict"
            yield f"{name}: {sides[0]} than {first} at {number}{others_text}; no crossing"
        else:
            yield f"{name}: {'; '.join(_crossing_text(crossing, first) for crossing in crossings)}"


UNEVEN = "all_to_all_v"


def _sentence_of_sizes(ways: Ways, name: str, first: str) -> Iterator[str]:
    for row in ways.of_way(name):
        if row["verdict"] in (FASTER, SLOWER):
            times = units.times_text(1 / row["speedup"], first, 1 / row["speedup_high"], 1 / row["speedup_low"])
            yield f"{name}: {times}"
    if ways.op == UNEVEN:
        return
    rows = ways.of_way(name)
    finding = f"{TOO_FEW} for a verdict"
    if any(row["verdict"] == WITHIN_NOISE for row in rows):
        finding = f"no difference from {first} found at {count_text(len(rows), 'size')}; no crossing"
    yield f"{name}: {finding}"


def _crossing_text(crossing: Crossing, first: str) -> str:
    becomes = f"{crossing.becomes} than {first} from {units.size_text(crossing.high)} on"
    if not crossing.low:
        return f"{becomes}; smaller sizes have no verdict"
    near = f", near {units.size_text(crossing.size)}" if math.isfinite(crossing.size) else ""
    between = f"{units.size_text(crossing.low)} and {units.size_text(crossing.high)}"
    return f"{becomes} (crossing between {between}{near}; 95 %)"


def _rows_text(column: str, row: Row) -> str:
    """Rows of each rank in one exchange, such as `2458/754/456/428`, or `1024 each`; of many ranks, least to most."""
    if not isinstance(row[column], str):
        return units.NOTHING
    rows = [round(int(count) / row["num_exchanges"]) for count in row[column].split("x")]
    if len(set(rows)) == 1:
        return f"{rows[0]} each"
    return "/".join(map(str, rows)) if len(rows) <= 8 else f"{min(rows)} to {max(rows)}"


OF_LOADS = ("sent", "received", "max/mean", "straggler")
WAY_COLUMNS: TableColumns = (
    ("size", lambda row: units.size_text(row["payload_bytes"])),
    ("<variant", lambda row: str(row["variant"])),
    ("median", lambda row: units.time_text(row["median_s"])),
    ("algbw GB/s", lambda row: units.bandwidth_text(row["algbw_gb_per_s"])),
    ("busbw GB/s", lambda row: units.bandwidth_text(row["busbw_gb_per_s"])),
    ("sent", lambda row: _rows_text("rows_sent", row)),
    ("received", lambda row: _rows_text("rows_received", row)),
    ("max/mean", lambda row: f"{row['max_over_mean']:.2f}" if units.known(row["max_over_mean"]) else units.NOTHING),
    (
        "straggler",
        lambda row: (
            units.percent_text(row["straggler_share"]) if units.known(row["straggler_share"]) else units.NOTHING
        ),
    ),
    *VERDICT,
)


def _way_tables(reported: ReportedRun, full: bool = True) -> list[Block]:
    blocks: list[Block] = []
    all_ways = ways_of(reported.frame)
    for ways in all_ways:
        notes = ways.comparison.sentences("a variant", ways.names[0])
        if ways.op == UNEVEN:
            notes += [
                "per exchange; sent, received: rows of each rank, also to itself; max/mean: of the busiest rank's rows",
                "straggler: share of the iteration in which a rank has ended and the slowest has not, mean over ranks",
            ]
        breaks = changes_in([row["size_bytes"] for row in ways.rows])
        optional = ("busbw GB/s", "algbw GB/s", "sent", "received")
        blocks.append(capped(table_of(ways.title, WAY_COLUMNS, ways.rows, notes, breaks, optional, OF_LOADS), MAX_ROWS))
        if full and ways.op != UNEVEN:
            blocks += [Lines((f"the way to use by size, in bytes, for {ways.title}:",)), Code(code_of(ways, all_ways))]
    return blocks


def code_of(ways: Ways, all_ways: Sequence[Ways]) -> tuple[str, ...]:
    """Lines of Python: a dict of the way to use by size, and the function that reads it.

    Their names contain the dtype and the mesh dim if the report has several of the collective.
    """
    names = [name for name in ways.names if not name.endswith(AGAIN)]
    sizes = [row["payload_bytes"] for row in ways.of_way(names[0])]
    complete = [name for name in names if [row["payload_bytes"] for row in ways.of_way(name)] == sizes]
    rows = [ways.of_way(name) for name in complete]
    seconds, verdicts = ([[row[column] for row in of_way] for of_way in rows] for column in ("median_s", "verdict"))
    table = {round(size): complete[way] for size, way in fastest_by_size(sizes, seconds, verdicts)}
    same_op = [other for other in all_ways if other.op == ways.op]
    dtype = f"_{ways.dtype}" if len({other.dtype for other in same_op}) > 1 else ""
    mesh_dim = f"_{ways.mesh_dim}" if len({other.mesh_dim for other in same_op}) > 1 else ""
    prefix = f"{ways.op}{dtype}{mesh_dim}"
    name = f"{prefix}_WAYS".upper()
    return (
        f"# {ways.title}; measured up to {units.size_text(sizes[-1])}",
        f"{name} = {table!r}  # from this size in bytes on",
        "",
        "",
        f"def {prefix}_way(num_bytes):",
        f"    return {name}[max(size for size in {name} if size <= num_bytes)]",
    )


def _compared(reported: ReportedRun) -> list[Compared]:
    """Every variant at every size, except baselines and controls."""
    return [
        Compared(
            f"{ways.op} {row['variant']}, {units.size_text(row['payload_bytes'])}",
            ways.names[0],
            1 / row["speedup"],
            1 / row["speedup_high"],
            1 / row["speedup_low"],
            row["verdict"],
        )
        for ways in ways_of(reported.frame)
        for row in ways.rows
        if row["verdict"] != BASELINE and not str(row["variant"]).endswith(AGAIN)
    ]


WAYS = Section(_ways_headline, _way_tables, compared=_compared)
