"""Redistributions that came out wrong or broke, by cause: planner, suite, and what their layouts have in common."""

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from distbench.runs.frame import Row
from distbench.spec.layouts import Placement, parse_placements
from distbench.spec.planner_names import OUR_VARIANTS

if TYPE_CHECKING:
    import pandas as pd

BAD = ("wrong", "raised", "aborted", "timeout")
PAIR_KEY = ["run_file", "mesh", "mesh_shape", "shape", "dtype", "suite", "direction", "flattened", "source", "target"]


class Failure(NamedTuple):
    """Cases of one cause.

    Args:
        status: one of BAD.
        planner: whose plan it was.
        suite: the laboratory's suite, empty for none.
        pattern: what the layouts have in common, in words.
        num_cases: how many.
        example: the frame's row of the smallest of them.
        ours: planner of ours to its statuses on the same pairs, as counts.
    """

    status: str
    planner: str
    suite: str
    pattern: str
    num_cases: int
    example: Row
    ours: dict[str, dict[str, int]]


def failures_of(rows: "pd.DataFrame") -> list[Failure]:
    """Every group of rows that are not ok, most serious status first, then the largest.

    Args:
        rows: redistributions, as `laboratory.laboratory_rows` gives them.
    """
    bad = rows[rows["status"].isin(BAD)]
    if bad.empty:
        return []
    bad = bad.assign(pattern=[pattern_of(record) for record in bad.to_dict("records")])
    ours = _outcomes_by_pair(rows[rows["planner"].isin(OUR_VARIANTS)])
    found = []
    for (status, planner, suite, pattern), group in bad.groupby(["status", "planner", "suite", "pattern"], sort=False):
        example = min(group.to_dict("records"), key=lambda record: (numel_of(record), str(record["id"])))
        keys = group[PAIR_KEY].drop_duplicates().itertuples(index=False, name=None)
        others = _counted(ours, keys, str(planner))
        found.append(Failure(str(status), str(planner), str(suite), str(pattern), len(group), example, others))
    return sorted(found, key=lambda failure: (BAD.index(failure.status), -failure.num_cases))


def _outcomes_by_pair(rows: "pd.DataFrame") -> dict[tuple[Any, ...], list[tuple[str, str]]]:
    found: dict[tuple[Any, ...], list[tuple[str, str]]] = {}
    for *key, planner, status in rows[[*PAIR_KEY, "planner", "status"]].itertuples(index=False, name=None):
        found.setdefault(tuple(key), []).append((planner, status))
    return found


def _counted(
    outcomes: dict[tuple[Any, ...], list[tuple[str, str]]], keys: Iterable[tuple[Any, ...]], without: str
) -> dict[str, dict[str, int]]:
    counts: dict[str, Counter[str]] = {}
    for key in keys:
        for planner, status in outcomes.get(key, ()):
            if planner != without:
                counts.setdefault(planner, Counter())[status] += 1
    return {planner: dict(counts[planner]) for planner in OUR_VARIANTS if planner in counts}


def pattern_of(record: Row) -> str:
    """What is special about a row's pair, in words that rows of one cause share; "plain layouts" when nothing is."""
    source, target = _placements(record["source"]), _placements(record["target"])
    both = (*source, *target)
    words = []
    if any(placement.split_factor is not None for placement in both):
        words.append("strided shards")
    if any(placement.turn is not None for placement in both):
        words.append("explicit shard order")
    if any(placement.reduce_op for placement in target):
        words.append("Shard to Partial" if _sharded_dims(source) else "to Partial")
    if reduce_ops := sorted({placement.reduce_op for placement in source if placement.reduce_op}):
        words.append("from Partial " + "/".join(reduce_ops))
    if any(len(dims) > len(set(dims)) for dims in map(_sharded_dims, (source, target))):
        words.append("nested shards")
    if _is_uneven(record, (source, target)):
        words.append("uneven")
    if record["flattened"]:
        words.append("a flattened mesh exists")
    if record["direction"] == "backward":
        words.append("backward")
    return ", ".join(words) or "plain layouts"


def numel_of(record: Row) -> int:
    """Elements of the full tensor."""
    return math.prod(sizes_in(record["shape"]))


def sizes_in(text: object) -> tuple[int, ...]:
    """`"2x4"` as (2, 4); () for what is no such text."""
    is_shape = isinstance(text, str) and re.fullmatch(r"\d+(x\d+)*", text)
    return tuple(int(part) for part in str(text).split("x")) if is_shape else ()


def _placements(text: object) -> tuple[Placement, ...]:
    """Of a row's side; none where it names no layout."""
    try:
        return parse_placements(str(text))
    except ValueError:
        return ()


def _sharded_dims(placements: Iterable[Placement]) -> list[int]:
    """The tensor dim of each shard, in order of the mesh dims."""
    return [placement.tensor_dim for placement in placements if placement.tensor_dim is not None]


def _is_uneven(record: Row, layouts: Iterable[Sequence[Placement]]) -> bool:
    shape, mesh_shape = sizes_in(record["shape"]), sizes_in(record["mesh_shape"])
    for placements in layouts:
        num_chunks = [1] * len(shape)
        for size, placement in zip(mesh_shape, placements, strict=False):
            if placement.tensor_dim is not None and placement.tensor_dim < len(shape):
                num_chunks[placement.tensor_dim] *= size
        if any(length % count for length, count in zip(shape, num_chunks, strict=True)):
            return True
    return False
