"""The data frame with one row per case, columns from fields of the case's record, and derived columns."""

import math
from collections.abc import Hashable, Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from distbench.records.bus_bandwidth import busbw_factor
from distbench.records.run_file import Run
from distbench.spec.mesh import format_mesh
from distbench.statistics.intervals import Floats, counts_of, median, median_ci, summarise
from distbench.statistics.pass_comparison import pass_medians
from distbench.statistics.verdicts import MIN_PASSES

if TYPE_CHECKING:
    import pandas as pd

Nodes = list[Any]
Row = dict[Hashable, Any]
GB = 1e9
PHASES = ("forward", "backward", "optimizer")
PASSES = "pass_medians_s"  # an array per case with the median sample of each pass, nan for a pass without samples


@dataclass(frozen=True)
class Column:
    """One column. The name ends with the unit.

    Args:
        path: keys from the case's record down to the value.
        is_number: whether values that are not numbers count as missing.
    """

    name: str
    path: tuple[str, ...]
    is_number: bool = False


def _columns(names: str, *path: str, is_number: bool = False) -> tuple[Column, ...]:
    return tuple(Column(name, (*path, name), is_number) for name in names.split())


# Kinds of a step's memory at the peak. The kinds in the second line are simulated, and are "other" in measured steps.
HELD = (
    *("parameters", "buffers", "optimizer", "batch", "cache", "gradients", "other"),
    *("activations", "backward", "fsdp"),
)
PARAMS, COUNTERS = ("case", "params"), ("counters",)
BEFORE_TIMES = (*_columns("kind id", "case"), *_columns("status"))
AFTER_TIMES = (
    *_columns("payload_bytes wire_bytes group_size", is_number=True),
    *_columns("mesh_dim backend backend_op"),
    *_columns("op dtype", *PARAMS),
    *_columns("size_bytes", *PARAMS, is_number=True),
    *_columns("source target planner shape variant suite direction mesh_shape flattened", *PARAMS),
    *_columns("batch_size num_tokens", *PARAMS, is_number=True),
    *_columns("computes mode", *PARAMS),
)
LAST = (
    *_columns("path", *COUNTERS),
    *_columns("num_collectives wire_bytes_executed lower_bound_bytes", *COUNTERS, is_number=True),
    *_columns("predicted_s planning_cold_s planning_warm_s", *COUNTERS, is_number=True),
    *_columns("peak_bytes peak_reserved_bytes predicted_peak_bytes", *COUNTERS, is_number=True),
    *(Column(f"peak_{kind}_bytes", (*COUNTERS, "peak_by_kind", kind), is_number=True) for kind in HELD),
    *_columns("peak_phase peak_owner memory_reason", *COUNTERS),
    # Of older runs, with a peak that is not from the allocator's record.
    *_columns("peak_allocated_bytes peak_growth_bytes", *COUNTERS, is_number=True),
    *_columns("loss_rel_error grad_rel_error output_rel_error cache_bytes", *COUNTERS, is_number=True),
    *_columns("entry_skew_s isolated_s", *COUNTERS, is_number=True),
    *_columns("worst_grad", *COUNTERS),
    *_columns("result gradients forward_pays backward_pays", *COUNTERS),
    *_columns("idle_share least_idle_share", *COUNTERS, is_number=True),
    *_columns("num_implicit state_bytes", *COUNTERS, is_number=True),
    *_columns("rows_sent rows_received", *COUNTERS),
    *_columns("max_over_mean num_exchanges", *COUNTERS, is_number=True),
    *_columns("compute_s exposed_s bubble_s idle_s mfu hfu slowest_rank", *COUNTERS, is_number=True),
    *_columns("simulated"),
    *_columns("stop_reason error"),
)


def any_characters() -> AbstractContextManager[None]:
    """Let new columns of pandas have texts of any character. Texts of pyarrow, pandas' default where pyarrow is
    installed, must be UTF-8, but names of files need not."""
    import pandas as pd

    return pd.option_context("mode.string_storage", "python")


def new_frame(data: Any, columns: Any = None) -> "pd.DataFrame":
    """Return a frame with texts of any character."""
    import pandas as pd

    with any_characters():
        return pd.DataFrame(data, columns=columns)


def frame_of(runs: Sequence[Run]) -> "pd.DataFrame":
    """All cases of the runs, one row each, in file order.

    Times are in seconds, sizes in bytes, bandwidths in GB/s (1e9 bytes per second). Only collectives have algbw and
    busbw, computed from the median. busbw depends on the size of the case's group, and is missing for an op without a
    factor.
    """
    records = [case for run in runs for case in run.cases]
    samples: list[Sequence[float]] = [record.get("samples_s") or () for record in records]
    read_values = _read_columns(records, (*BEFORE_TIMES, *AFTER_TIMES, *LAST))
    columns: dict[str, Any] = {
        **_run_columns(runs),
        **{column.name: read_values[column.name] for column in BEFORE_TIMES},
        "num_samples": counts_of(samples),
        **summarise(samples),
        **{column.name: read_values[column.name] for column in AFTER_TIMES},
    }
    columns[PASSES] = [_of_passes(*pair) for pair in zip(records, columns["median_s"], strict=True)]
    columns |= _intervals_of_passes(columns)
    is_collective = np.array([kind == "collective" for kind in columns["kind"]], dtype=bool)
    with np.errstate(divide="ignore", invalid="ignore"):
        algbw = np.where(is_collective, columns["payload_bytes"] / columns["median_s"] / GB, np.nan)
    columns["algbw_gb_per_s"] = algbw
    columns["busbw_gb_per_s"] = algbw * factors_of(columns["op"], columns["group_size"])
    columns["straggler_share"] = np.array([*map(_straggler_share, records)])
    columns |= _phase_columns(records)
    with np.errstate(divide="ignore", invalid="ignore"):
        columns["samples_per_s"] = columns["batch_size"] / columns["median_s"]
        columns["tokens_per_s"] = columns["num_tokens"] / columns["median_s"]
    return new_frame(columns | {column.name: read_values[column.name] for column in LAST})


def measured_of(frame: "pd.DataFrame", kind: str) -> "pd.DataFrame":
    """A copy of the rows of one kind with status ok."""
    return frame[(frame["kind"] == kind) & (frame["status"] == "ok") & frame["median_s"].notna()].copy()


def records_of(frame: "pd.DataFrame") -> list[Row]:
    """Each row as a dict by column name. `DataFrame.to_dict` takes 10 ms for a hundred columns."""
    names = list(frame.columns)
    return [dict(zip(names, row, strict=True)) for row in zip(*(frame[name].tolist() for name in names), strict=True)]


def _of_passes(record: dict[str, Any], median_s: float) -> Floats:
    passes: Sequence[tuple[int, int]] = record.get("passes") or ()
    if len(passes) == 1 and passes[0][0] == 0:
        return np.array([median_s])
    return pass_medians(record.get("samples_s") or (), passes, 1 + max((number for number, _ in passes), default=-1))


def _intervals_of_passes(columns: dict[str, Any]) -> dict[str, Floats]:
    """Return 95 % intervals of the median of passes, and replace the median of samples, for rows with at least
    MIN_PASSES."""
    low, high = np.full((2, len(columns[PASSES])), np.nan)
    for row, medians in enumerate(columns[PASSES]):
        finite = medians[np.isfinite(medians)].tolist()
        if len(finite) >= MIN_PASSES:
            columns["median_s"][row] = median(finite)
            low[row], high[row] = median_ci(finite)
    return {"ci_low_s": low, "ci_high_s": high}


def _straggler_share(record: dict[str, Any]) -> float:
    """Return the share of an iteration in which a rank has ended and the slowest has not, of uneven all-to-alls."""
    by_pass = record.get("ranks_by_pass") or [record.get("rank_median_s") or []]
    if "rows_sent" not in (record.get("counters") or {}) or not by_pass[0]:
        return math.nan
    medians = [median(times) for times in zip(*by_pass, strict=False)]
    return 1 - sum(medians) / len(medians) / max(medians)


def _read_columns(records: Nodes, columns: Iterable[Column]) -> dict[str, Any]:
    """Column name to values, which are float arrays (nan if missing) for numbers, and lists of text or None for the
    rest."""

    @cache
    def nodes_at(path: tuple[str, ...]) -> Nodes:
        """The dicts at a path of every record, {} if missing."""
        nodes = values_at(path) if path else records
        return [node if isinstance(node, dict) else {} for node in nodes]

    @cache
    def keys_at(path: tuple[str, ...]) -> set[str]:
        return set(chain.from_iterable(nodes_at(path)))

    def values_at(path: tuple[str, ...]) -> Nodes:
        above, key = path[:-1], path[-1]
        return [node.get(key) for node in nodes_at(above)] if key in keys_at(above) else [None] * len(records)

    return {column.name: (_as_floats if column.is_number else _as_texts)(values_at(column.path)) for column in columns}


def _as_floats(values: Nodes) -> Floats:
    if set(map(type, values)) <= {int, float, type(None)}:
        return np.array(values, dtype=np.float64)  # converts None to nan
    numbers = (float(value) if isinstance(value, int | float) else np.nan for value in values)
    return np.fromiter(numbers, dtype=np.float64, count=len(values))


def _as_texts(values: Nodes) -> Nodes:
    if set(map(type, values)) <= {str, type(None)}:
        return values
    return [value if value is None or isinstance(value, str) else _text(value) for value in values]


def _text(value: object) -> str:
    return "x".join(str(part) for part in value) if isinstance(value, list) else str(value)


def _run_columns(runs: Sequence[Run]) -> dict[str, Any]:
    facts = {
        "scenario": [run.about.scenario for run in runs],
        "run_file": [run.path.name for run in runs],
        "machine": [run.about.environment.machine for run in runs],
        "mesh": [None if run.about.mesh is None else format_mesh(run.about.mesh) for run in runs],
        "pipelined": [run.about.settings.get("iterations_per_sample", 1) for run in runs],
    }
    counts = [len(run.cases) for run in runs]
    return {name: np.repeat(np.array(values, dtype=object), counts) for name, values in facts.items()}


def factors_of(ops: Sequence[str | None], group_sizes: Floats) -> Floats:
    """Factors from algbw to busbw, nan if the op or the group's size is unknown."""
    pairs = list(zip(ops, np.nan_to_num(group_sizes).tolist(), strict=True))
    factors = dict.fromkeys(pairs, np.nan)
    for op, group_size in factors:
        if op is not None and group_size >= 1:
            with suppress(ValueError):
                factors[op, group_size] = busbw_factor(op, int(group_size))
    return np.array([factors[pair] for pair in pairs], dtype=np.float64)


def _phase_columns(records: Nodes) -> dict[str, Floats]:
    """Medians of `forward_s`, `backward_s`, `optimizer_s` and other phases in seconds."""
    phases = [record.get("phases_s") or {} for record in records]
    names = (*PHASES, *sorted({name for of_record in phases for name in of_record} - set(PHASES)))
    return {f"{name}_s": summarise([of_record.get(name, ()) for of_record in phases])["median_s"] for name in names}
