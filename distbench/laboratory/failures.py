"""Redistributions that came out wrong or broke, by cause: planner, suite, and what their layouts have in common."""

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from distbench.runs.frame import Row, records_of
from distbench.spec.layouts import Placement, parse_placements
from distbench.spec.planner_names import OUR_VARIANTS

if TYPE_CHECKING:
    import pandas as pd

BAD = ("wrong", "raised", "aborted", "timeout")
PAIR_KEY = ["run_file", "mesh", "mesh_shape", "shape", "dtype", "suite", "direction", "flattened", "source", "target"]


class Failure(NamedTuple):
    """Cases of one cause."""

    status: str  # one of BAD
    planner: str
    suite: str  # the laboratory's suite, empty for none
    pattern: str  # what the layouts have in common, in words
    num_cases: int
    example: Row  # the frame's row of the smallest of them
    ours: dict[str, dict[str, int]]  # planner of ours to its statuses on the same pairs, as counts


def failures_of(rows: "pd.DataFrame") -> list[Failure]:
    """Every group of rows (of `laboratory_rows`) that are not ok, most serious status first, then the largest."""
    bad = rows[rows["status"].isin(BAD)]
    if bad.empty:
        return []
    bad = bad.assign(pattern=[pattern_of(record) for record in records_of(bad)])
    outcomes, found = rows[[*PAIR_KEY, "planner", "status"]], []
    for (status, planner, suite, pattern), group in bad.groupby(["status", "planner", "suite", "pattern"], sort=False):
        example = min(records_of(group), key=lambda record: (numel_of(record), str(record["id"])))
        same = group[PAIR_KEY].drop_duplicates().merge(outcomes[outcomes["planner"] != planner])
        statuses = {name: same.loc[same["planner"] == name, "status"] for name in OUR_VARIANTS}
        others = {name: dict(Counter(of_one)) for name, of_one in statuses.items() if len(of_one)}
        found.append(Failure(str(status), str(planner), str(suite), str(pattern), len(group), example, others))
    return sorted(found, key=lambda failure: (BAD.index(failure.status), -failure.num_cases))


def pattern_of(record: Row) -> str:
    """What is special about a row's pair, in words that rows of one cause share; "plain layouts" when nothing is."""
    source, target = sides = _placements(record["source"]), _placements(record["target"])
    both = (*source, *target)
    reduce_ops = sorted({placement.reduce_op for placement in source if placement.reduce_op})
    words = {
        "strided shards": any(placement.split_factor is not None for placement in both),
        "explicit shard order": any(placement.turn is not None for placement in both),
        "Shard to Partial" if _sharded_dims(source) else "to Partial": any(one.reduce_op for one in target),
        "from Partial " + "/".join(reduce_ops): bool(reduce_ops),
        "nested shards": any(len(dims) > len(set(dims)) for dims in map(_sharded_dims, sides)),
        "uneven": _is_uneven(record, sides),
        "a flattened mesh exists": bool(record["flattened"]),
        "backward": record["direction"] == "backward",
    }
    return ", ".join(word for word, is_true in words.items() if is_true) or "plain layouts"


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
    return any(
        length % math.prod(size for size, one in zip(mesh_shape, placements, strict=False) if one.tensor_dim == dim)
        for placements in layouts
        for dim, length in enumerate(shape)
    )
