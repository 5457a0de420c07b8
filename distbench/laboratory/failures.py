"""Redistributions that came out wrong or broke, by cause: planner, suite, and what their layouts have in common."""

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from distbench.runs.frame import Row
from distbench.spec.planner_names import OUR_VARIANTS

if TYPE_CHECKING:
    import pandas as pd

BAD = ("wrong", "raised", "aborted", "timeout")
PAIR_KEY = ["run_file", "mesh", "mesh_shape", "shape", "dtype", "suite", "direction", "flattened", "source", "target"]
_SHARD = re.compile(r"_?S(?:S|tridedShard)?\((?:dim=)?(\d+)(?:, *(?:sf=|split_factor=)?(\d+))?\)(?:\[(\d+)\])?")


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
    source, target = str(record["source"]), str(record["target"])
    both = (source, target)
    words = []
    if any("_S" in text or "SS(" in text for text in both):
        words.append("strided shards")
    if any("]" in text for text in both):
        words.append("explicit shard order")
    if "P(" in target:
        words.append("Shard to Partial" if _has_cut(source) else "to Partial")
    if operators := sorted(set(re.findall(r"P\((\w+)\)", source))):
        words.append("from Partial " + "/".join(operators))
    nested = any(_is_nested(text) for text in both)
    if nested:
        words.append("nested shards")
    if _is_uneven(record, both):
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


def cuts_in(layout: str) -> list[tuple[int, int | None]]:
    """(tensor dim, split factor of a strided shard) of each shard in a layout, in order of the mesh dims."""
    return [(int(dim), int(factor) if factor else None) for dim, factor, _ in _SHARD.findall(layout)]


def _has_cut(layout: str) -> bool:
    return bool(cuts_in(layout))


def _is_nested(layout: str) -> bool:
    dims = [dim for dim, _ in cuts_in(layout)]
    return len(set(dims)) < len(dims)


def _is_uneven(record: Row, layouts: Sequence[str]) -> bool:
    shape, mesh_shape = sizes_in(record["shape"]), sizes_in(record["mesh_shape"])
    for layout in layouts:
        pieces = [1] * len(shape)
        for size, token in zip(mesh_shape, tokens_of(layout), strict=False):
            for dim, _ in cuts_in(token):
                if dim < len(shape):
                    pieces[dim] *= size
        if any(length % count for length, count in zip(shape, pieces, strict=True)):
            return True
    return False


_TOKEN = re.compile(rf"R|P\(\w+\)|{_SHARD.pattern}")


def tokens_of(layout: str) -> list[str]:
    """The placements of a layout, one a mesh dim: `"S(0)[1]RP(sum)"` as `["S(0)[1]", "R", "P(sum)"]`."""
    return [match.group(0) for match in _TOKEN.finditer(layout)]
